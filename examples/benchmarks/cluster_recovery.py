"""Recovery by part, predicted and measured, beside a recovery that reads everything from the cloud, over three bandwidths.

Four processes on this machine are nodes of two pipelines of two stages. They train, save, and lose disks: of one node whose
layers another one has, or of both nodes that have some layers. New nodes take their places and restore. Reads of disks and of the
cloud, and what peers send and receive, take as long as the bandwidths of a setting say, scaled to the size of the model. What
this machine needs for them itself is part of that time. `autohete_fx.cluster.planner.moving` predicts the same from the plan and
from what disks have. Finding a loss, planning and starting again are not emulated here. Their seconds are those of the last
`cluster_chaos`, whose first half predicts its second.

    python examples/benchmarks/cluster_recovery.py --json results/cluster_recovery.json --plot results/cluster_recovery.svg
"""

import argparse
import json
import shutil
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from results import save
from torch import Tensor, nn

from autohete_fx import cluster
from autohete_fx.cluster.costs import CostTable, LayerBytes, LayerTime, UpdateTime
from autohete_fx.cluster.model.layers import LayerMap
from autohete_fx.cluster.model.tensor_parallel import TensorLayout
from autohete_fx.cluster.plan import ClusterPlan, Pipeline, Stage
from autohete_fx.cluster.planner.moving import all_from_cloud, moved
from autohete_fx.cluster.store import restore as restoring
from autohete_fx.cluster.store.sources import Bandwidths, Moved, Wanted, move_parts_s

NODES, LAYERS, WIDTH, BATCH = 4, 6, 128, 8
STATE_BYTES = 90e9
"""Of a 7B model, whose restore the scaled one stands for."""
WHOLE_S = 90.0
"""Of that model from a cloud of 1 GB/s; here it takes `SCALED_S`."""
SCALED_S = 20.0
SETTINGS = {
    "fast peers": Bandwidths(local=3e9, peer=12.5e9, cloud=1e9, cloud_of_all=2.5e9, cloud_first_s=0.0),
    "slow peers": Bandwidths(local=3e9, peer=1.25e9, cloud=1e9, cloud_of_all=2.5e9, cloud_first_s=0.0),
    "slow cloud": Bandwidths(local=3e9, peer=12.5e9, cloud=0.5e9, cloud_of_all=0.8e9, cloud_first_s=0.0),
}
LOSSES = {"a replica survives": (1,), "some layers are lost": (1, 3)}
"""Indexes of the nodes whose disks are gone."""
_SMALLEST_S, _LARGE_ERROR = 0.05, 0.2


class Net(nn.Module):
    """Layers in a list, between two others."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(8, WIDTH), nn.Linear(WIDTH, 8)
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(LAYERS))

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        for layer in self.layers:
            x = layer(x).relu()
        return self.last(x)


def plan_of(nodes: Sequence[str]) -> ClusterPlan:
    """Two pipelines of two stages."""
    middle, last = LAYERS // 2, LAYERS + 1
    pipelines = []
    for begin in (0, 2):
        stages = (
            Stage(node=nodes[begin], gpu="cpu", tp=1, first=0, last=middle),
            Stage(node=nodes[begin + 1], gpu="cpu", tp=1, first=middle + 1, last=last),
        )
        pipelines.append(Pipeline(stages=stages, micro_batch=2, micro_batches=2))
    return ClusterPlan(model="net", pipelines=tuple(pipelines))


def costs_of(layer_map: LayerMap) -> CostTable:
    """Bytes of each layer; its seconds do not matter."""
    kinds = tuple(f"layer {index}" for index in range(layer_map.num_layers))
    sizes = []
    for index, kind in enumerate(kinds):
        names = layer_map.held(range(index, index + 1))
        num_bytes = sum(
            torch.Size(layer_map.shapes[name].sizes).numel() * layer_map.shapes[name].dtype.itemsize for name in names
        )
        sizes.append(LayerBytes(kind=kind, tp=1, params_bytes=num_bytes, kept_bytes=0, output_bytes=0))
    times = tuple(LayerTime(kind=kind, gpu="cpu", tp=1, micro_batch=1, forward_s=1.0, backward_s=1.0) for kind in kinds)
    update = UpdateTime(gpu="cpu", fixed_s=0.0, s_per_byte=0.0)
    return CostTable(model="net", kinds=kinds, times=times, sizes=tuple(sizes), updates=(update,))


@contextmanager
def throttled(rates: Bandwidths, everything_from_cloud: bool) -> Iterator[dict[str, float]]:
    """Reads take as long as at these rates; each rank reads all that it needs from the cloud, or from what is nearest.

    Yields this machine's clock when this rank has ``read``, and when its ``end`` is there.
    """
    read, exchange, quickest = restoring._read, restoring._exchange, restoring.quickest
    readers: list[int] = []
    """Nodes that read from the cloud."""
    clock: dict[str, float] = {}

    def slow_read(found: Any, source: str, *rest: Any, **more: Any) -> int:
        began, before_s = time.perf_counter(), found.seconds[source]
        num_bytes = read(found, source, *rest, **more)
        rate = rates.local if source == "local" else min(rates.cloud, rates.cloud_of_all / max(1, readers[-1]))
        sleep_until(began + num_bytes / rate)
        found.seconds[source] = before_s + time.perf_counter() - began
        return num_bytes

    def slow_exchange(found: Any, fetch: Any, group: Any) -> None:
        clock["read"] = time.perf_counter()
        dist.barrier(group=group)
        began, before = time.perf_counter(), found.num_bytes["peer"]
        outgoing = [key for (sender, _), keys in fetch.peer.items() if sender == dist.get_rank(group) for key in keys]
        sent = sum(tensor.nbytes for key in outgoing for tensor in found.tensors[key].values())
        exchange(found, fetch, group)
        sleep_until(began + max(sent, found.num_bytes["peer"] - before) / rates.peer)
        clock["end"] = time.perf_counter()
        found.seconds["peer"] = clock["end"] - clock["read"]

    def planned(wanted: Wanted, bandwidths: Bandwidths) -> Any:
        fetch = quickest(wanted, bandwidths)
        if everything_from_cloud:
            fetch = restoring.Fetch(
                local={}, cloud={rank: tuple(keys) for rank, keys in enumerate(wanted.needs)}, peer={}
            )
        readers.append(len(fetch.cloud))
        return fetch

    with (
        mock.patch.object(restoring, "_read", slow_read),
        mock.patch.object(restoring, "_exchange", slow_exchange),
        mock.patch.object(restoring, "quickest", planned),
    ):
        yield clock


def sleep_until(time_s: float) -> None:
    """Until the clock of `time.perf_counter` shows that, which all processes of a machine share."""
    time.sleep(max(0.0, time_s - time.perf_counter()))


def rank_main(rank: int, root: str, settings: Sequence[str], found: Any) -> None:
    """One node: trains, saves, and restores in every setting."""
    dist.init_process_group(
        "gloo", init_method=f"file://{root}/meeting", rank=rank, world_size=NODES, timeout=timedelta(seconds=600)
    )
    torch.set_default_dtype(torch.float64)
    names = [f"node-{index}" for index in range(NODES)]
    job = cluster.join(
        Net,
        lambda out, x: (out - x).square().mean(),
        example=torch.zeros(1, 8),
        global_batch=BATCH,
        optimizer=lambda params: torch.optim.AdamW(params, lr=1e-3),
        plan=plan_of(names),
        store=cluster.Store(local=f"{root}/{names[rank]}", cloud=f"{root}/cloud", every=1, cloud_every=1),
        backend=None,
        member=cluster.Member(node=names[rank], gpu="cpu"),
    )
    job.train_step(lambda samples: torch.stack([torch.full((8,), index / BATCH) for index in samples]))
    job.finish()
    costs = costs_of(job.layer_map)
    state_bytes = sum(costs.whole_bytes(layer) for layer in range(job.layer_map.num_layers)) * 3
    for setting in settings:
        scale = state_bytes / STATE_BYTES * WHOLE_S / SCALED_S
        at = {key: getattr(SETTINGS[setting], key) * scale for key in ("local", "peer", "cloud", "cloud_of_all")}
        at["cloud_first_s"] = 0.0
        for loss, lost in LOSSES.items():
            row = recovered(rank, root, names, lost, Bandwidths(**at), job, costs)
            found[rank, setting, loss] = {"setting": setting, "loss": loss, **row}
    dist.destroy_process_group()


def recovered(
    rank: int, root: str, names: Sequence[str], lost: Sequence[int], rates: Bandwidths, job: Any, costs: CostTable
) -> dict[str, Any]:
    """Our recovery, and one from the cloud alone: seconds by part and bytes, as measured and as predicted."""
    nodes = [f"new-{index}" if index in lost else name for index, name in enumerate(names)]
    plan, layout = plan_of(nodes), TensorLayout()
    seat = job.deployment.seat(rank)
    needs = list(job.deployment.held(seat, job.layer_map, layout).values())
    layers = [frozenset(stage.layers) for _, _, stage in plan.stages()]
    held = {names[index]: layers[index] for index in range(NODES) if index not in lost}
    row: dict[str, Any] = {}
    for way, predicted, local in (
        ("nearest", moved(plan, costs, held, rates), f"{root}/{nodes[rank]}"),
        ("cloud", all_from_cloud(plan, costs), f"{root}/empty-{rank}"),
    ):
        dist.barrier()
        store = cluster.Store(local=local, cloud=f"{root}/cloud", every=1, cloud_every=1, bandwidths=rates)
        with throttled(rates, way == "cloud") as clock:
            restored = restoring.restore(store, needs, list(job.layer_map.readers), nodes[rank], None)
        assert restored is not None and {*restored.tensors} == {piece.name for piece in needs}
        local_s, peer_s, cloud_s = move_parts_s(predicted, rates)
        row[way] = {
            "bytes": restored.num_bytes,
            "clock": clock,
            "measured_s": {part: restored.seconds[part] for part in ("look", "local", "peer", "cloud")},
            "predicted_s": {"local": local_s, "peer": peer_s, "cloud": cloud_s},
            "longest_s": longest_s(predicted, rates),
            "predicted_bytes": {
                source: sum(getattr(each, source) for each in predicted.values())
                for source in ("local", "peer", "cloud")
            },
        }
    return row


def rows_of(found: dict[Any, Any], settings: Sequence[str]) -> list[dict[str, Any]]:
    """Seconds by part, and all ranks' bytes, by setting and loss.

    Parts are those of the rank that reads longest. The peers' part begins when the last rank has read, and ends when the last one
    has everything. ``longest`` has each part of the node that it takes longest.
    """
    rows = []
    for setting in settings:
        for loss in LOSSES:
            ranks = [found[rank, setting, loss] for rank in range(NODES)]
            row: dict[str, Any] = {"setting": setting, "loss": loss}
            for way in ("nearest", "cloud"):
                seconds = [rank[way]["measured_s"] for rank in ranks]
                slowest = max(seconds, key=lambda each: each["local"] + each["cloud"])
                clocks = [rank[way]["clock"] for rank in ranks]
                rest_s = max(clock["end"] for clock in clocks) - max(clock["read"] for clock in clocks)
                longest = {part: max(each[part] for each in seconds) for part in ("local", "cloud")}
                row[way] = {
                    **{key: value for key, value in ranks[0][way].items() if key != "clock"},
                    "measured_s": {**slowest, "peer": rest_s},
                    "longest": {
                        part: {"measured_s": {**longest, "peer": rest_s}[part], "predicted_s": predicted_s}
                        for part, predicted_s in ranks[0][way]["longest_s"].items()
                    },
                    "bytes": {
                        key: sum(rank[way]["bytes"][key] for rank in ranks) for key in ("local", "peer", "cloud")
                    },
                }
            rows.append(row)
    return rows


def longest_s(rows: Mapping[str, Moved], rates: Bandwidths) -> dict[str, float]:
    """By part, the predicted seconds of the node that it takes longest."""
    readers = sum(row.cloud > 0 for row in rows.values())
    return {
        "local": max(row.local + row.served for row in rows.values()) / rates.local,
        "peer": max(max(row.peer, row.sent) for row in rows.values()) / rates.peer,
        "cloud": max(row.cloud for row in rows.values()) / min(rates.cloud, rates.cloud_of_all / max(1, readers)),
    }


def _moving_s(seconds: Mapping[str, float]) -> float:
    return seconds["local"] + seconds["peer"] + seconds["cloud"]


def beginnings() -> dict[str, dict[str, float]]:
    """Seconds to find a loss and start again, and to join without reading, as `cluster_chaos` measured: by kind of change.

    Those of its first half predict those of its second.
    """
    path = Path(__file__).resolve().parent / "results" / "cluster_chaos.json"
    rows = [row for row in json.loads(path.read_text())["recovery_s"] if row["recovery_s"] is not None]
    found = {}
    for kind in ("kill", "tell", "join"):
        mine = [row for row in rows if row["event"] == kind]
        seconds = {
            "detect": [row["detect_and_restart_s"] for row in mine],
            "join": [row["join_s"] - sum(row["restore_s"].values()) for row in mine],
        }
        if len(mine) > 1:
            for part, values in seconds.items():
                half = len(values) // 2
                predicted, measured = statistics.median(values[:half]), statistics.median(values[half:])
                found[f"{kind}: {part}"] = {"predicted_s": predicted, "measured_s": measured}
    return found


def show(rows: Sequence[dict[str, Any]], begun: dict[str, dict[str, float]]) -> None:
    """Each part beside its prediction, with what is off by more than a fifth marked."""
    for row in rows:
        for way, words in (("nearest", "ours"), ("cloud", "all from the cloud")):
            found = row[way]
            parts = [_off(part, **seconds) for part, seconds in found["longest"].items()]
            total = _off("all", _moving_s(found["measured_s"]), _moving_s(found["predicted_s"]))
            print(f"{row['setting']:<11}{row['loss']:<23}{words:<19}{total}; {', '.join(parts)}")
    for name, seconds in begun.items():
        print(_off(name, **seconds))


def _off(name: str, measured_s: float, predicted_s: float) -> str:
    error = measured_s / predicted_s - 1 if predicted_s > _SMALLEST_S else 0.0
    mark = " (!)" if abs(error) > _LARGE_ERROR else ""
    return f"{name} {measured_s:.2f} s of {predicted_s:.2f} s predicted{mark}"


def draw(rows: Sequence[dict[str, Any]], path: Path) -> None:
    """Bars by setting and loss: what is nearest and all from the cloud, predicted and measured, by part."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(10, 1.5 + 0.9 * len(rows)), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.add_subplot()
    colors, labels = {"local": "#4c78a8", "peer": "#72b7b2", "cloud": "#f58518"}, []
    for index, row in enumerate(rows):
        bars = [(way, kind) for way in ("nearest", "cloud") for kind in ("predicted_s", "measured_s")]
        for place, (way, kind) in enumerate(bars):
            at, left = index * 5 + place, 0.0
            for part, color in colors.items():
                axes.barh(at, row[way][kind][part], left=left, color=color, height=0.85)
                left += row[way][kind][part]
            word = "ours" if way == "nearest" else "all from the cloud"
            labels.append((at, f"{row['setting']}, {row['loss']}: {word}, {kind.removesuffix('_s')}"))
    axes.set_yticks([at for at, _ in labels], [label for _, label in labels], fontsize=7)
    axes.invert_yaxis()
    axes.set_xlabel("seconds of the slowest node: own disk (blue), peers (green), cloud (orange)")
    for side in ("top", "right"):
        axes.spines[side].set_visible(False)
    figure.savefig(path)


def main() -> None:
    """Run, print, save, draw."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--settings", nargs="+", choices=list(SETTINGS), default=list(SETTINGS))
    parser.add_argument("--json", type=Path)
    parser.add_argument("--plot", type=Path)
    parsed = parser.parse_args()
    with tempfile.TemporaryDirectory() as root:
        shared: Any = mp.Manager().dict()
        start: Callable[..., Any] = mp.spawn  # pyright: ignore[reportPrivateImportUsage]
        start(rank_main, (root, parsed.settings, shared), nprocs=NODES)
        rows = rows_of(dict(shared), parsed.settings)
        shutil.rmtree(root, ignore_errors=True)
    begun = beginnings()
    for row in rows:
        row["begun"] = begun
    show(rows, begun)
    save(parsed.json, rows)
    if parsed.plot:
        draw(rows, parsed.plot)


if __name__ == "__main__":
    main()
