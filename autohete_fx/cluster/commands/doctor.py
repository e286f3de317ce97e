"""``autohete doctor --cluster``: the ranks that torchrun has started measure what they run on, and the first writes the file."""

import os
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from autohete_fx.cluster.deploy import Member
from autohete_fx.cluster.inputs.described import save_measured
from autohete_fx.cluster.job.rendezvous import this_member
from autohete_fx.cluster.measuring.costs import or_error
from autohete_fx.cluster.measuring.links import measured_cluster
from autohete_fx.cluster.spec import Cluster
from autohete_fx.errors import ClusterError
from autohete_fx.ir import Machine
from autohete_fx.ir.files import why_unwritable
from autohete_fx.ir.sizes import format_bytes, format_flops, format_seconds
from autohete_fx.machine.devices import spec_of_machine
from autohete_fx.machine.measure import measure_machine
from autohete_fx.report.tables import aligned


def measure_cluster(path: str | Path, device_type: str) -> str:
    """Measure nodes, devices and links; the first rank writes the file and returns tables, the others an empty text.

    Args:
        path: of the file, which `described` reads.
        device_type: ``cpu`` or ``cuda``.

    Raises:
        ClusterError: torchrun has not started this process, a rank could not measure, or the file cannot be written.
    """
    if "RANK" not in os.environ or "WORLD_SIZE" not in os.environ:
        raise ClusterError(
            "--cluster was given to a single process. Expected was one process for each GPU of the cluster, started by torchrun."
            f" Run torchrun --nproc-per-node GPUS -m autohete_fx doctor --cluster {path} on every node"
        )
    device = torch.device(device_type)
    if device_type == "cuda":
        device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0")))
        torch.cuda.set_device(device)
    begun = not dist.is_initialized()
    if begun:
        dist.init_process_group("cpu:gloo,cuda:nccl" if device_type == "cuda" else "gloo")
    try:
        return _measured(path, device)
    finally:
        if begun:
            dist.destroy_process_group()


def _measured(path: str | Path, device: torch.device) -> str:
    rank = dist.get_rank()
    refused = ["" if rank else why_unwritable(path)]
    dist.broadcast_object_list(refused)
    if refused[0]:  # before half a minute of measuring is lost
        raise ClusterError(
            f"cannot write {str(path)!r}: {refused[0]}. Expected was a file that can be written. Give --cluster"
            " another path"
        )
    members: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(members, this_member(device))
    cluster = measured_cluster(members, device, fresh=True)
    machines = _machines(members, device)
    if rank:
        return ""
    save_measured(cluster, [spec_of_machine(gpu.name, machines[gpu.name]) for gpu in cluster.gpus], path)
    return f"torch {torch.__version__}\n\n{cluster_text(cluster, machines)}\n\nwritten to {path}"


def _machines(members: Sequence[Member], device: torch.device) -> dict[str, Machine]:
    """The machine of each type of GPU, measured by its first rank while the others wait. All raise ClusterError where one fails."""
    rank = dist.get_rank()
    first = {member.gpu: r for r, member in reversed(list(enumerate(members)))}
    mine: Machine | str | None = None
    if rank in first.values():
        if device.type == "cuda":
            torch.set_num_threads(len(os.sched_getaffinity(0)))  # torchrun leaves one; plans divide what all of them do
        mine = or_error(lambda: measure_machine(device))
    rows: list[Machine | str | None] = [None] * len(members)
    dist.all_gather_object(rows, mine)
    failed = next((f"rank {r}: {row}" for r, row in enumerate(rows) if isinstance(row, str)), None)
    if failed is not None:
        raise ClusterError(
            f"the cluster could not be measured. {failed}. Expected was a measurement of each type of GPU by its first rank."
            " Run doctor alone on that rank's node, which shows more of what is wrong"
        )
    found = {gpu: rows[r] for gpu, r in first.items()}
    return {gpu: machine for gpu, machine in found.items() if isinstance(machine, Machine)}


def cluster_text(cluster: Cluster, machines: dict[str, Machine]) -> str:
    """Nodes and links, a table each."""
    nodes = [
        (
            node.name,
            str(node.gpus),
            node.gpu,
            format_bytes(cluster.gpu(node.gpu).memory_bytes),
            format_flops(machines[node.gpu].flops_per_s("float32")),
        )
        for node in cluster.nodes
    ]
    tables = [aligned(("node", "GPUs", "type", "memory for plans", "fp32"), nodes, 3)]
    links = list(_links(cluster))
    if links:
        tables.append(aligned(("link", "pairs at once", "first byte", "GB/s of all pairs"), links, 1))
    return "\n\n".join(tables)


def _links(cluster: Cluster) -> Iterator[tuple[str, str, str, str]]:
    for link in dict.fromkeys(joined.link for joined in (*cluster.within, *cluster.between)):
        for rates in link.rates:
            (size, slow), (_, fast) = rates.points[0], rates.points[-1]
            latency_s = rates.pairs * size / slow
            yield link.name, str(rates.pairs), format_seconds(latency_s), f"{fast / 1e9:.3g}"
