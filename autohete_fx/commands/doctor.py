"""``autohete doctor``: measure this machine, or under torchrun a cluster, and say what the planner will assume of it."""

import argparse
import dataclasses
import os

import torch

from autohete_fx.errors import OptionError
from autohete_fx.ir import Machine
from autohete_fx.ir.files import why_unwritable
from autohete_fx.machine.described import link_text, machine_text
from autohete_fx.machine.link import Link, measure_link
from autohete_fx.machine.measure import measure_machine
from autohete_fx.machine.net import (
    Exchange,
    leave_job,
    listed_together,
    measure_net,
    measure_net_contention,
    ranks_of_job,
)
from autohete_fx.machine.update_rates import remember_mixed_update_speed
from autohete_fx.optim.adamw import mixed_step
from autohete_fx.options import Options
from autohete_fx.report.stages import Stages
from autohete_fx.runtime.lanes.team import ranks_sharing_cores
from autohete_fx.runtime.shard.ranks import Ranks
from autohete_fx.runtime.tiers.host import host_view, open_tier


def link_of(device: torch.device) -> Link | None:
    """The link of a device, timed over memory such as homes are made of."""
    tier = open_tier(device)
    try:
        return measure_link(device, lambda count: tier.empty_strided((count,), (1,), torch.uint8), host_view)
    finally:
        tier.close()


def doctor(parsed: argparse.Namespace) -> str:
    """Measure what was asked, and save it where that was asked; returns what is to be printed, which of most ranks is nothing."""
    has_cuda = torch.cuda.is_available()
    if parsed.device == "cuda" and not has_cuda:
        raise OptionError("--device cuda was given, but PyTorch finds no CUDA device; leave it out to measure the CPU")
    # Before half a minute of measuring is lost.
    if parsed.save and (why := why_unwritable(parsed.save)):
        raise OptionError(f"cannot write {parsed.save!r}: {why}; give --save a file that can be written")
    device = torch.device(parsed.device or ("cuda" if has_cuda else "cpu"))
    if parsed.cluster:
        return _doctor_cluster(parsed, device.type)
    offload_dir = Options.from_user({"offload_dir": parsed.offload_dir}).offload_dir
    ranks = ranks_of_job(device.type)
    if ranks is not None and ranks.number:
        ranks.exchange(None)  # or this rank's work would slow down what the first one measures
        measure_net(ranks, device, _exchange(ranks))
        measure_net_contention(ranks, device, _exchange(ranks))
        leave_job()
        return ""
    if ranks is not None:
        torch.set_num_threads(len(os.sched_getaffinity(0)))  # torchrun leaves one; plans divide what all of them do
    with Stages() as stages:
        stages.begin("measuring")
        num_ranks = ranks_sharing_cores()  # a machine has the rate of all of their updates
        machine = measure_machine(device, offload_dir=offload_dir, mixed_step=mixed_step, num_ranks=num_ranks)
        remember_mixed_update_speed(device, machine)
        link = link_of(device)
    if ranks is not None:
        ranks.exchange(None)
        rate, latency_s = measure_net(ranks, device, _exchange(ranks))
        together = measure_net_contention(ranks, device, _exchange(ranks))
        machine = dataclasses.replace(
            machine,
            net_bytes_per_s=rate,
            net_latency_s=latency_s,
            contention=listed_together(machine.contention, together),
        )
        leave_job()
    if parsed.save:
        _save(machine, parsed.save)
    return f"torch {torch.__version__}\n{machine_text(machine)}\n{link_text(link)}"


def _doctor_cluster(parsed: argparse.Namespace, device_type: str) -> str:
    from autohete_fx.cluster.commands.doctor import measure_cluster

    if parsed.save or parsed.offload_dir:
        raise OptionError(
            "--cluster was given with --save or --offload-dir, which are about one machine. Expected was --cluster alone. Run"
            " doctor twice"
        )
    return measure_cluster(parsed.cluster, device_type)


def _exchange(ranks: Ranks) -> Exchange:
    return lambda what, value: ranks.exchange(value)


def _save(value: Machine, path: str) -> None:
    try:
        value.save(path)
    except OSError as error:
        raise OptionError(f"cannot write {path!r}: {error.strerror}; give --save a file that can be written") from error
