"""The ``autohete`` command: what a plan decides, what this machine can do, and what another one could.

Thin: it parses, calls and prints.
"""

import argparse
import dataclasses
import os
import sys
import time
import webbrowser
from collections.abc import Sequence
from pathlib import Path

import torch

from autohete_fx.arguments import DTYPES, EXPLAIN, MOST_RANKS, POINTS, add_plan
from autohete_fx.compiler.problem import with_disk
from autohete_fx.errors import AutoHeteError, OptionError, ReportError
from autohete_fx.integrations.command import add_run, run_program
from autohete_fx.ir import Machine, Overlap, Plan, Problem, Schedule
from autohete_fx.machine.described import link_text, machine_text
from autohete_fx.machine.devices import (
    RESERVE_SHARE,
    find_device,
    machine_of_spec,
    net_of_spec,
)
from autohete_fx.machine.link import Link, measure_link
from autohete_fx.machine.measure import measure_machine
from autohete_fx.machine.net import Exchange, measure_net, ranks_of_job
from autohete_fx.options import Options, Share, Size, parse_size, resolve_bytes
from autohete_fx.report import format_bytes, plan_table
from autohete_fx.report.compare import comparison, read_side
from autohete_fx.report.plots import require_matplotlib
from autohete_fx.report.saved import Report
from autohete_fx.report.why import why
from autohete_fx.runtime.shard.ranks import Ranks
from autohete_fx.runtime.tiers.host import host_view, open_tier
from autohete_fx.whatif.blueprint import read_model
from autohete_fx.whatif.depth import TracedStep
from autohete_fx.whatif.job import Job
from autohete_fx.whatif.predict import Scaling, predict, predict_if_any, sweep_budgets, with_more
from autohete_fx.whatif.report import (
    Setting,
    draw_sweep,
    prediction_json,
    prediction_text,
    scaling_json,
    scaling_text,
    sweep_json,
    sweep_text,
)
from autohete_fx.whatif.trace import trace_model

__all__ = ["main"]

_HOST_SHARE = Share(0.9)
"""Of the host's memory, what homes may take unless told otherwise."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one subcommand; returns the exit status. Errors that the user can mend go to standard error, status 2."""
    parser = argparse.ArgumentParser(
        prog="autohete", description="Plan the training of transformers within a device-memory budget."
    )
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    show = commands.add_parser("show", help="print a saved plan as a table")
    show.add_argument("plan", metavar="PLAN.json", help="a file that Plan.save wrote")
    show.add_argument("--explain", action="store_true", help=EXPLAIN)
    show.set_defaults(run=_show)
    report = commands.add_parser(
        "report",
        help="draw the page of a run again, from the directory that the option report_dir wrote, and sum it up",
    )
    report.add_argument("directory", metavar="DIR", help="such as runs/x, of options={'report_dir': 'runs/x'}")
    report.add_argument("--open", action="store_true", help="also open the page in a browser")
    report.set_defaults(run=_report)
    compare = commands.add_parser("compare", help="say what two plans or runs decide otherwise, and what that costs")
    for side in ("A", "B"):
        compare.add_argument(side.lower(), metavar=side, help="a plan file, or a directory that report_dir wrote")
    compare.set_defaults(run=lambda parsed: comparison(read_side(parsed.a), read_side(parsed.b)))
    doctor = commands.add_parser(
        "doctor",
        help="measure this machine and print what the planner will assume of it; under torchrun, the link between ranks too",
    )
    doctor.add_argument("--device", choices=("cpu", "cuda"), default=None, help="default: cuda where there is one")
    doctor.add_argument(
        "--save", metavar="FILE", help="also write a machine file, which `autohete plan --machine` reads"
    )
    doctor.add_argument(
        "--offload-dir",
        metavar="DIR",
        help="measure the disk there, as training does with the option of that name (default: the temporary directory)",
    )
    doctor.add_argument(
        "--cluster",
        metavar="FILE",
        help="under torchrun, a process a GPU: measure all nodes and links, and write a file that `autohete plan --cluster` reads",
    )
    doctor.set_defaults(run=_doctor)
    add_plan(commands).set_defaults(run=_plan)
    add_run(commands).set_defaults(run=run_program)
    parsed = parser.parse_args(arguments)
    try:
        text = parsed.run(parsed)
    except AutoHeteError as error:
        print(f"autohete: {error}", file=sys.stderr)
        return 2
    if text:
        print(text)
    return 0


def link_of(device: torch.device) -> Link | None:
    """The link of a device, timed over memory such as homes are made of."""
    tier = open_tier(device)
    try:
        return measure_link(device, lambda count: tier.empty_strided((count,), (1,), torch.uint8), host_view)
    finally:
        tier.close()


def _show(parsed: argparse.Namespace) -> str:
    plan = Plan.load(parsed.plan)
    return f"{plan_table(plan)}\n\n{why(plan)}" if parsed.explain else plan_table(plan)


def _report(parsed: argparse.Namespace) -> str:
    report = Report.load(parsed.directory)
    page = report.rewrite_page(parsed.directory).resolve()
    if parsed.open and not webbrowser.open(page.as_uri()):
        raise ReportError(
            f"--open was given, but no browser could be started. Expected was one. Open {str(page)!r} yourself"
        )
    return f"{report.summary}\n\n{page}"


def _doctor(parsed: argparse.Namespace) -> str:
    has_cuda = torch.cuda.is_available()
    if parsed.device == "cuda" and not has_cuda:
        raise OptionError("--device cuda was given, but PyTorch finds no CUDA device; leave it out to measure the CPU")
    # Before half a minute of measuring is lost.
    if parsed.save and not Path(parsed.save).absolute().parent.is_dir():
        raise OptionError(
            f"cannot write {parsed.save!r}: its directory does not exist; give --save a file that can be written"
        )
    device = torch.device(parsed.device or ("cuda" if has_cuda else "cpu"))
    if parsed.cluster:
        return _doctor_cluster(parsed, device.type)
    offload_dir = Options.from_user({"offload_dir": parsed.offload_dir}).offload_dir
    ranks = ranks_of_job(device.type)
    if ranks is not None and ranks.rank:
        ranks.exchange(None)  # or this rank's work would slow down what the first one measures
        measure_net(ranks, device, _exchange(ranks))
        return ""
    if ranks is not None:
        torch.set_num_threads(len(os.sched_getaffinity(0)))  # torchrun leaves one; plans divide what all of them do
    machine, link = measure_machine(device, offload_dir=offload_dir), link_of(device)
    if ranks is not None:
        ranks.exchange(None)
        rate, latency_s = measure_net(ranks, device, _exchange(ranks))
        machine = dataclasses.replace(machine, net_bytes_per_s=rate, net_latency_s=latency_s)
    if parsed.save:
        _save(machine, parsed.save)
    return f"torch {torch.__version__}\n{machine_text(machine)}\n{link_text(link)}"


def _doctor_cluster(parsed: argparse.Namespace, device_type: str) -> str:
    from autohete_fx.cluster.doctor import measure_cluster

    if parsed.save or parsed.offload_dir:
        raise OptionError(
            "--cluster was given with --save or --offload-dir, which are about one machine. Expected was --cluster alone. Run"
            " doctor twice"
        )
    return measure_cluster(parsed.cluster, device_type)


def _exchange(ranks: Ranks) -> Exchange:
    return lambda what, value: ranks.exchange(value)


def _save(value: Machine | Plan, path: str) -> None:
    try:
        value.save(path)
    except OSError as error:
        raise OptionError(f"cannot write {path!r}: {error.strerror}; give --save a file that can be written") from error


def _plan(parsed: argparse.Namespace) -> str:
    _check(parsed)
    if parsed.cluster:
        return _plan_cluster(parsed)
    if parsed.sweep == "ranks":
        return _scaling(parsed)
    job = Job(num_ranks=parsed.ranks or 1, num_nodes=parsed.nodes, node_bytes_per_s=parsed.node_rate * 1e9)
    asked = _ask(parsed, job)
    step, problem, setting = asked.step, asked.problem, asked.setting
    tokens, limit_s = setting.batch * setting.seq, parsed.time_limit
    if parsed.sweep:
        sweep = sweep_budgets(step, problem, tokens=tokens, num_points=parsed.points or POINTS, time_limit_s=limit_s)
        if parsed.plot:
            draw_sweep(setting, sweep, parsed.plot)
        return sweep_json(setting, sweep) if parsed.json else sweep_text(setting, sweep)
    given = predict(step, problem, "as given", tokens=tokens, time_limit_s=limit_s)
    more = with_more(step, given, time_limit_s=limit_s / 2)
    if parsed.save:
        _save(given.plan, parsed.save)
    if parsed.json:
        return prediction_json(setting, given, more)
    return prediction_text(setting, given, more, explain=parsed.explain)


def _check(parsed: argparse.Namespace) -> None:
    """Raise OptionError where options do not go together, before anything is traced."""
    for option, given in (("--plot", parsed.plot), ("--points", parsed.points)):
        if given and parsed.sweep != "budget" and not (parsed.cluster and option == "--plot"):
            raise OptionError(f"{option} is about a sweep of budgets; give --sweep budget too")
    for option, given in (
        ("--costs", parsed.costs),
        ("--symmetric-tp", parsed.symmetric_tp),
        ("--max-tp", parsed.max_tp),
        ("--spot", parsed.spot),
    ):
        if given and not parsed.cluster:
            raise OptionError(f"{option} is about clusters; give --cluster too, or leave it out")
    for option, given in (("--sweep", parsed.sweep), ("--ranks", parsed.ranks), ("--budget", parsed.budget)):
        if given and parsed.cluster:
            raise OptionError(
                f"{option} is about GPUs that are alike; leave it out, or name a --device instead of a --cluster"
            )
    for option, given, verb in (("--save", parsed.save, "writes"), ("--explain", parsed.explain, "explains")):
        if given and parsed.sweep:
            raise OptionError(f"{option} {verb} one plan, and a sweep makes several; leave one of the two out")
    if parsed.sweep == "ranks" and parsed.nodes > 1:
        raise OptionError(
            f"--sweep ranks was given with --nodes {parsed.nodes}. Expected was one node, on which the sweep puts all ranks. Leave"
            " --nodes out, or --sweep"
        )
    for option, path in (("--plot", parsed.plot), ("--save", parsed.save)):
        if path and (Path(path).is_dir() or not Path(path).parent.is_dir()):  # said now, not when all is solved
            raise OptionError(f"cannot write {path!r}; give {option} a file in a directory that exists")
    if parsed.plot:
        require_matplotlib()


def _plan_cluster(parsed: argparse.Namespace) -> str:
    from autohete_fx.cluster.command import Request, plan_for_cluster

    return plan_for_cluster(
        Request(
            model=parsed.model,
            cluster=parsed.cluster,
            global_batch=parsed.batch,
            seq=parsed.seq,
            measured=parsed.costs,
            dtype=DTYPES[parsed.dtype] if parsed.dtype else None,
            tf32=parsed.dtype == "tf32",
            objective=parsed.objective,
            spot=parsed.spot,
            symmetric_tp=parsed.symmetric_tp,
            max_tp=parsed.max_tp,
            explain=parsed.explain,
            as_json=parsed.json,
            plot=parsed.plot,
            save=parsed.save,
            time_limit_s=parsed.time_limit,
        )
    )


def _scaling(parsed: argparse.Namespace) -> str:
    """The sweep over numbers of ranks, from one on by doubling."""
    most = parsed.ranks or MOST_RANKS
    counts = tuple(1 << n for n in range(most.bit_length()))
    jobs = [Job(num_ranks=count) for count in counts]
    for job in jobs:
        _machine_for(parsed, job)  # refuses now, not when the first ones are solved
    asked = [_ask(parsed, job) for job in jobs]
    setting, limit_s = asked[-1].setting, parsed.time_limit
    tokens = setting.batch * setting.seq
    points = tuple(predict_if_any(a.step, a.problem, tokens=tokens, time_limit_s=limit_s) for a in asked)
    if not any(points):
        predict(
            asked[-1].step, asked[-1].problem, "planned", tokens=tokens, time_limit_s=limit_s
        )  # raises, and says why
    scaling = Scaling(num_ranks=counts, points=points)
    return scaling_json(setting, scaling) if parsed.json else scaling_text(setting, scaling)


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Asked:
    """A step of one rank as the options ask for it."""

    step: TracedStep
    problem: Problem
    setting: Setting


def _ask(parsed: argparse.Namespace, job: Job) -> _Asked:
    machine, source, peak_flops_per_s, peak_name = _machine_for(parsed, job)
    device_budget_bytes, host_budget_bytes = _budgets(parsed, machine)
    dtype = DTYPES[parsed.dtype] if parsed.dtype else None
    blueprint = read_model(parsed.model, batch=parsed.batch, seq=parsed.seq, dtype=dtype)
    began = time.perf_counter()
    step = trace_model(blueprint, machine, Options(micro_batches=parsed.micro_batches), job.num_ranks)
    batch, seq = step.batch
    setting = Setting(
        model=parsed.model,
        batch=batch,
        seq=seq,
        dtype=parsed.dtype or ("bf16" if blueprint.num_layers else "its own dtype"),
        source=source,
        peak_flops_per_s=peak_flops_per_s,
        peak_name=peak_name,
        traced_layers=step.traced_layers,
        trace_s=time.perf_counter() - began,
        num_nodes=job.num_nodes,
    )
    problem = with_disk(
        dataclasses.replace(
            step.problem,
            device_budget_bytes=device_budget_bytes,
            host_budget_bytes=host_budget_bytes,
            schedule=Schedule(overlap=Overlap(parsed.overlap)),
            clips_gradients=parsed.clip,
        )
    )
    return _Asked(step=step, problem=problem, setting=setting)


def _machine_for(parsed: argparse.Namespace, job: Job) -> tuple[Machine, str, float, str]:
    """The machine of one rank, where its figures come from, and the rate that utilization refers to, with its name."""
    dtype = str(DTYPES[parsed.dtype or "bf16"]).removeprefix("torch.")
    if parsed.machine:
        machine = Machine.load(parsed.machine)
        rate = machine.flops_per_s(dtype)
        return (
            job.machine_of(machine, None),
            f"measured ({parsed.machine})",
            rate,
            f"the measured {rate / 1e12:.3g} TFLOP/s",
        )
    spec, tf32 = find_device(parsed.device), parsed.dtype == "tf32"
    peak = spec.peak_flops_per_s(dtype, tf32=tf32)
    net = f", {net_of_spec(spec).name} between ranks" if job.num_ranks > 1 else ""
    source = f"from its data sheet ({spec.link.name}{net}; host assumed: {spec.host.name})"
    return (
        job.machine_of(machine_of_spec(spec, tf32=tf32), spec),
        source,
        peak,
        f"the data sheet's {peak / 1e12:.4g} TFLOP/s (MFU)",
    )


def _budgets(parsed: argparse.Namespace, machine: Machine) -> tuple[int, int]:
    """Bytes that a plan may take on the device and on the host."""
    device: Size = Share(1 - RESERVE_SHARE) if parsed.budget is None else parse_size(parsed.budget)
    host: Size = _HOST_SHARE if parsed.host_budget is None else parse_size(parsed.host_budget)
    if parsed.budget is not None and resolve_bytes(device, machine.device_bytes) > machine.device_bytes:
        raise OptionError(
            f"--budget {parsed.budget} was given, but {machine.device_name} has {format_bytes(machine.device_bytes)} of device"
            " memory. Expected was no more than that. Give less, such as --budget 90%, or name a larger device"
        )
    return resolve_bytes(device, machine.device_bytes), resolve_bytes(host, machine.host_bytes)


if __name__ == "__main__":
    sys.exit(main())
