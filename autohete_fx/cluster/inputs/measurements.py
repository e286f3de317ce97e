"""Published or own measurements of real GPUs, read from JSON files into costs and links.

Four files of one schema: `costs_of` reads layers and memory, `links_of` the network, and `runs_of` whole training runs. Files may
have models, GPUs and degrees that no other file has. An error names the run or model that needs what is missing.
"""

import contextlib
import itertools
import json
import math
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from autohete_fx.cluster.costs import CostTable, LayerBytes, LayerTime, UpdateTime
from autohete_fx.cluster.inputs.described import rate_of
from autohete_fx.cluster.plan import ClusterPlan, Pipeline, Stage
from autohete_fx.cluster.spec import Cluster, Gpu, Joined, Link, Node, Rates, slower_link
from autohete_fx.errors import ClusterError

GPU_BYTES = {
    "A100-40": 40 * 2**30,
    "A100-80": 80 * 2**30,
    "V100-16": 16 * 2**30,
    "GH-96": int(95.6 * 2**30),
    "RTX-2080": 11 * 2**30,
    "RTX-3090": 24 * 2**30,
    "Titan-RTX": 24 * 2**30,
}
NODE_GPUS = {"A100-40": 4, "A100-80": 4, "V100-16": 4, "GH-96": 4, "RTX-2080": 8, "RTX-3090": 8, "Titan-RTX": 8}
"""GPUs of a node in the clusters where the measurements were taken."""
_OTHER_NODE_GPUS = 8
"""Of a node of any other type, unless a file says so."""
_GIB_IN_NAME = re.compile(r"-(\d+)$")
_SMALLEST_LOG2, _LARGEST_LOG2 = -2, 10
"""Logarithms of megabytes, where the quadratic fits of bandwidth are evaluated."""


def read(path: str | Path) -> Any:
    """A JSON file. Raises ClusterError, which names it, where there is none or it is damaged."""
    try:
        return json.loads(Path(path).read_text(encoding="utf-8"))
    except OSError as error:
        raise ClusterError(
            f"cannot read {str(path)!r}: {error.strerror}. Expected was a JSON file. Correct the path"
        ) from error
    except ValueError as error:
        raise ClusterError(
            f"{str(path)!r} is no JSON: {error}. Expected was a file of measurements. Write it again"
        ) from error


@contextlib.contextmanager
def _reading(what: str) -> Iterator[None]:
    """A context in which a value that is missing or of another kind is a ClusterError about ``what``."""
    try:
        yield
    except KeyError as error:
        raise ClusterError(
            f"{what} lacks {error}. Expected were the entries of examples/benchmarks/measured. Add it, or leave that out"
        ) from error
    except (TypeError, ValueError, IndexError, AttributeError, StopIteration) as error:
        raise ClusterError(
            f"{what} cannot be read: {error}. Expected were the entries of examples/benchmarks/measured. Correct it"
        ) from error


def _not_below_0(name: str, value: Any) -> float:
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 <= value < math.inf:
        raise ValueError(f"{name} is {value!r}")
    return float(value)


def memory_of_gpu(gpu: str) -> int:
    """Bytes of a type of GPU: of the table, else of the GiB that end its name. Raises ClusterError for any other name."""
    found = _GIB_IN_NAME.search(gpu)
    if gpu not in GPU_BYTES and not found:
        raise ClusterError(
            f"GPU {gpu!r} is unknown. Expected was one of {sorted(GPU_BYTES)}, or a name that ends with its GiB, such as H100-80."
            " Correct the name"
        )
    return GPU_BYTES[gpu] if gpu in GPU_BYTES or not found else int(found[1]) * 2**30


def costs_of(layers: Any, memory: Any, model: str) -> CostTable:
    """The costs of a model from tables of measured layers and sizes. Raises ClusterError for what they lack."""
    with _reading("the table of layers or of memory"):
        known = sorted(set(layers["models"]) & set(memory["models"]))
        if model not in known:
            raise ClusterError(
                f"there are no measurements of {model!r}. Expected was one of {known}. Give files that have it"
            )
    with _reading(f"the entry of {model!r}"):
        return _costs_of(layers["models"][model], memory["models"][model], model)


def tokens_of(layers: Any, model: str) -> int | None:
    """Tokens of each sequence that a model's layers were measured with, the entry ``seq`` of its ``config``.

    None where the table does not say. Raises ClusterError for an entry that is no such number.
    """
    try:
        found = layers["models"][model]["config"]["seq"]
    except (KeyError, TypeError):  # `costs_of` says what else is missing
        return None
    with _reading(f"the entry of {model!r}"):
        if isinstance(found, bool) or not isinstance(found, int) or found < 1:
            raise ValueError(f"seq is {found!r}")
    return found


def _costs_of(entry: Any, sizes: Any, model: str) -> CostTable:
    records = [
        row for found in entry["gpus"].values() for by_size in found["runs"].values() for row in by_size.values()
    ]
    norm = ["norm"] if any("norm" in row for row in records) else []
    kinds = ("first", *["layer"] * entry["config"]["layers"], *norm, "last")
    times, updates = [], []
    for gpu, found in entry["gpus"].items():
        for tp, by_size in found["runs"].items():
            for micro_batch, row in by_size.items():
                alike = [row[name] for name in ("layer", "layer1") if name in row]
                if not alike or not {"first", "last", *norm} <= set(row):
                    continue  # a run that needs this record is told that it is missing
                seconds = {kind: row[kind] for kind in ("first", "last", *norm)}
                seconds["layer"] = [sum(column) / len(alike) for column in zip(*alike, strict=True)]
                for kind, (forward_s, backward_s) in seconds.items():
                    times.append(
                        LayerTime(
                            kind=kind,
                            gpu=gpu,
                            tp=int(tp),
                            micro_batch=int(micro_batch),
                            forward_s=_not_below_0(f"forward of {kind} on {gpu}", forward_s),
                            backward_s=_not_below_0(f"backward of {kind} on {gpu}", backward_s),
                        )
                    )
        updates.append(_update_of(gpu, found))
    rows = [
        LayerBytes(
            kind=kind,
            tp=int(tp),
            **{
                name: int(_not_below_0(f"{name} of {kind}", value))
                for name, value in zip(("params_bytes", "kept_bytes", "output_bytes"), row, strict=True)
            },
        )
        for tp, by_kind in sizes.items()
        for kind, row in by_kind.items()
    ]
    return CostTable(
        model=model,
        kinds=kinds,
        times=tuple(times),
        sizes=tuple(rows),
        updates=tuple(updates),
        source="measured layers",
    )


def _update_of(gpu: str, found: Any) -> UpdateTime:
    """A line through the measured updates of several degrees, by least squares; ``update_params`` are of fp32."""
    points = []
    for tp, by_size in found["runs"].items():
        taken = [_not_below_0(f"update_s of {gpu}", row["update_s"]) for row in by_size.values() if "update_s" in row]
        if taken and tp in found["update_params"]:
            num_bytes = 4 * rate_of(f"update_params of {gpu}", found["update_params"][tp])
            points.extend((num_bytes, seconds) for seconds in taken)
    if not points:
        raise KeyError(f"update_s of {gpu}")
    mean_x, mean_y = (sum(column) / len(points) for column in zip(*points, strict=True))
    spread = sum((x - mean_x) ** 2 for x, _ in points)
    slope = sum((x - mean_x) * (y - mean_y) for x, y in points) / spread if spread else mean_y / mean_x
    return UpdateTime(gpu=gpu, fixed_s=max(0.0, mean_y - slope * mean_x), s_per_byte=slope)


def _link(name: str, fits: Any, *, never_falls: bool) -> Link:
    """A link from quadratic fits of GB/s in log2(MB), by number of pairs.

    ``never_falls``: a port carries no less for more pairs. The tables have entries of some pairs of types that say otherwise; they
    repeat, digit by digit, those of another pair with a slower port.
    """
    rates = []
    for pairs, (a, b, c, most) in sorted(fits.items(), key=lambda item: int(item[0])):
        points = []
        for log2 in range(_SMALLEST_LOG2, _LARGEST_LOG2 + 1):
            rate = min(1e9 * (a * log2**2 + b * log2 + c), most)
            if rate > 0:
                points.append((1e6 * 2.0**log2, rate))
        if never_falls and rates:
            points = [(size, max(rate, rates[-1].at(size))) for size, rate in points]
        if not points:
            raise ValueError(f"{name} carries nothing for {pairs} pairs")
        rates.append(Rates(pairs=int(pairs), points=tuple(points)))
    if not rates:
        raise ValueError(f"{name} has no fits")
    return Link(name=name, rates=tuple(rates))


def links_of(network: Any) -> tuple[tuple[Joined, ...], tuple[Joined, ...]]:
    """Links within nodes, by type, and between nodes, by the types of sender and receiver."""
    within = tuple(
        Joined(source=gpu, target=gpu, link=_link(f"{gpu} node", fits, never_falls=False))
        for gpu, fits in network["intra"].items()
    )
    between = [
        Joined(source=gpu, target=gpu, link=_link(f"{gpu} port", fits, never_falls=True))
        for gpu, fits in network["inter"].items()
    ]
    for pair, fits in network.get("inter_cross_type", {}).items():
        source, target = pair.split("->")
        between.append(Joined(source=source, target=target, link=_link(f"{pair} port", fits, never_falls=True)))
    own = {joined.source: joined.link for joined in between if joined.source == joined.target}
    known = {(joined.source, joined.target) for joined in between}
    between += [  # nobody timed these: a message passes both ports
        Joined(source=a, target=b, link=slower_link(own[a], own[b]))
        for a, b in itertools.permutations(own, 2)
        if (a, b) not in known
    ]
    return within, tuple(between)


def cluster_of(network: Any, counts: dict[str, int], gpus_of_node: dict[str, int] | None = None) -> Cluster:
    """A cluster of so many GPUs of each type, on nodes of the usual size, joined by measured links. Raises ClusterError for types
    that the network lacks."""
    with _reading("the table of the network"):
        within, between = links_of(network)
    reached = {joined.source for joined in between}
    per_node = {**NODE_GPUS, **(gpus_of_node or {})}
    nodes = []
    for gpu, count in counts.items():
        if gpu not in reached:
            raise ClusterError(
                f"the table of the network has no GPU {gpu!r}. Expected was one of {sorted(reached)}. Correct the name, or"
                " measure it"
            )
        size = per_node.get(gpu, _OTHER_NODE_GPUS)
        for index in range(-(-count // size)):
            nodes.append(Node(name=f"{gpu}-{index}", gpu=gpu, gpus=min(size, count - index * size)))
    return Cluster(
        gpus=tuple(Gpu(name=gpu, memory_bytes=memory_of_gpu(gpu)) for gpu in counts),
        nodes=tuple(nodes),
        within=tuple(joined for joined in within if joined.source in counts),
        between=tuple(joined for joined in between if joined.source in counts and joined.target in counts),
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """A training run that was measured.

    Attributes:
        name: of it.
        plan: that it ran.
        cluster: on which.
        iteration_s: measured seconds of a step.
        peak_bytes: measured, of the fullest GPU, as the driver shows it; None where nobody measured it.
        peak_doubt: why the file of the run doubts its peak; "" where it does not.
        reduce_s: measured seconds of one rank's gradient all-reduce, waits included.
    """

    name: str
    plan: ClusterPlan
    cluster: Cluster
    iteration_s: float
    peak_bytes: int | None
    peak_doubt: str
    reduce_s: float | None


def runs_of(runs: Any, network: Any) -> list[Run]:
    """The measured runs of a file. Raises ClusterError for what they lack."""
    return [run_of(row, network) for row in rows_of(runs)]


def rows_of(runs: Any) -> list[Any]:
    """The entries of a file of runs, each for `run_of`. Raises ClusterError where there is none."""
    rows = runs.get("runs") if isinstance(runs, dict) else None
    if not isinstance(rows, list):
        raise ClusterError('the file of runs has no list "runs". Expected was an object with one. Give another file')
    return rows


def run_of(row: Any, network: Any) -> Run:
    """The measured run of an entry. Raises ClusterError for what it lacks."""
    with _reading(f"the run {row.get('name', 'without a name') if isinstance(row, dict) else row!r}"):
        if not isinstance(row["name"], str):
            raise TypeError(f"its name is {row['name']!r}")
        grid = {"count": 1, "stages": row["stages"]}
        plan, cluster = plan_of_grids(
            row["model"],
            [grid],
            micro_batch=row["mbs"],
            global_batch=row["gbs"],
            network=network,
            gpus_of_node=row.get("gpus_of_node"),
        )
        return Run(
            name=row["name"],
            plan=plan,
            cluster=cluster,
            iteration_s=rate_of("iteration_s", row["iteration_s"]),
            peak_bytes=None if row.get("peak_bytes") is None else int(rate_of("peak_bytes", row["peak_bytes"])),
            peak_doubt=str(row.get("suspect_peak", "")),
            reduce_s=row.get("red_grads_s"),
        )


def plan_of_grids(
    model: str,
    grids: Any,
    *,
    micro_batch: int,
    global_batch: int,
    network: Any,
    planner: str = "given",
    gpus_of_node: dict[str, int] | None = None,
) -> tuple[ClusterPlan, Cluster]:
    """A plan of grids of pipelines, with the cluster that it fills.

    ``grids``: of each, ``count`` and ``stages``; of each stage, ``layers`` [first, last] and ``replicas`` [[gpu, tp, count],
    ...] in data-parallel order. Units fill nodes in that order, stage by stage, as the ranks of Megatron-LM and DeepSpeed do.
    Micro-batches are shared out evenly. ``gpus_of_node``: where nodes are not of the usual size.
    """
    filling = Filling({**NODE_GPUS, **(gpus_of_node or {})})
    placed: list[tuple[Stage, ...]] = []
    counts: dict[str, int] = {}
    for stages in (grid["stages"] for grid in grids for _ in range(grid["count"])):
        units = [[(_plain(gpu), tp) for gpu, tp, count in stage["replicas"] for _ in range(count)] for stage in stages]
        if len({len(row) for row in units}) > 1:
            raise ClusterError(
                f"stages have {[len(row) for row in units]} replicas. Expected was the same number in each. Write pipelines"
                " instead"
            )
        rows = []
        for stage, row in zip(stages, units, strict=True):
            first, last = stage["layers"]
            rows.append([Stage(node=filling.place(gpu, tp), gpu=gpu, tp=tp, first=first, last=last) for gpu, tp in row])
            for gpu, tp in row:
                counts[gpu] = counts.get(gpu, 0) + tp
        placed.extend(zip(*rows, strict=True))
    cluster = cluster_of(network, {gpu: filling.taken(gpu) for gpu in counts}, gpus_of_node)
    total, width = global_batch // micro_batch if micro_batch > 0 else 0, len(placed)
    if not 0 < width <= total:
        raise ClusterError(
            f"a batch of {global_batch} in micro-batches of {micro_batch} was given for {width} pipelines. Expected was one for"
            " each pipeline at least. Correct the batch"
        )
    pipelines = tuple(
        Pipeline(stages=stages, micro_batch=micro_batch, micro_batches=total // width + (index < total % width))
        for index, stages in enumerate(placed)
    )
    return ClusterPlan(model=model, pipelines=pipelines, planner=planner), cluster


def _plain(gpu: str) -> str:
    """The type in a name such as ``V100-16x4+V100-16x4``: one entry for each GPU, with its node's size."""
    types = {
        part.rpartition("x")[0] if part.rpartition("x")[2].isdecimal() and "x" in part else part
        for part in gpu.split("+")
    }
    if len(types) > 1:
        raise ClusterError(
            f"a unit mixes GPUs of types {sorted(types)}. Expected was one type. Write it as several stages"
        )
    return types.pop()


class Filling:
    """Units put on nodes one after another: each on the node in use where it fits, else on the next one."""

    def __init__(self, gpus_of_node: dict[str, int]) -> None:
        self._sizes = gpus_of_node
        self._free: dict[str, list[int]] = {}

    def place(self, gpu: str, tp: int) -> str:
        """The name of the node that a unit of ``tp`` GPUs stands on."""
        size = self._sizes.setdefault(gpu, _OTHER_NODE_GPUS)
        if not 0 < tp <= size:
            raise ClusterError(
                f"a unit has {tp} GPUs {gpu}. Expected was 1 to {size}, all of one node. Correct the unit"
            )
        free = self._free.setdefault(gpu, [])
        for index, left in enumerate(free):
            if left >= tp:
                free[index] -= tp
                return f"{gpu}-{index}"
        free.append(size - tp)
        return f"{gpu}-{len(free) - 1}"

    def taken(self, gpu: str) -> int:
        """GPUs of all nodes that have been begun."""
        return self._sizes[gpu] * len(self._free[gpu])
