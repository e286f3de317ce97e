"""Costs of a model's layers, timed on the devices of a running job, and kept for its next start.

Enter how to build the model and an example batch; leaves a `CostTable` that is equal on all ranks. One rank of each type of GPU
times one layer of each kind, alone (`timed_layer`), compiled as the job compiles its stages. Layers are of one kind where their
modules have equal classes and settings, and their parameters equal names and shapes. The first kind is all before the layers, the
last one all after them.

Each type's figures lie in a file under `cache.cache_dir`. Its key is all that they depend on: the model's structure, the shapes of
the batch, backend, optimizer, versions, and the GPU. A rank that finds the file spares all ranks of its type the timing.
"""

import gc
import json
import math
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn

from autohete_fx.cache import device_name, load_text, store_text
from autohete_fx.cluster.building import BuildModel
from autohete_fx.cluster.costs import CostTable, LayerBytes, LayerTime, UpdateTime
from autohete_fx.cluster.deploy import Member
from autohete_fx.cluster.layers import LayerMap, Shape, map_layers
from autohete_fx.cluster.memory import OVERHEAD_BYTES
from autohete_fx.cluster.timed_layer import Measuring, TimedLayer, time_layer
from autohete_fx.errors import ClusterError
from autohete_fx.internals.modes import FakeTensorMode
from autohete_fx.ir.files import SavedAs, spelled

FIRST, LAYER, LAST = "first", "layer", "last"
_CACHED_AS = "cluster_costs"
_FILES = SavedAs(
    kind="measured costs", writer="a job", again="they are measured again", schema_version=1, error=ClusterError
)


@dataclass(frozen=True, slots=True, kw_only=True)
class KindTime:
    """Seconds of a kind of layer for a micro-batch."""

    kind: str
    micro_batch: int
    forward_s: float
    backward_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class GpuCosts:
    """All that one rank measured on its device.

    Attributes:
        times: rows.
        sizes: rows, one for each kind.
        update_s_per_byte: seconds of the optimizer's step for a byte of weights.
        optimizer_bytes_per_byte: of its states, for a byte of weights.
        gradient_bytes_per_byte: of gradients, for a byte of weights.
        schema_version: of the file.
    """

    times: tuple[KindTime, ...]
    sizes: tuple[LayerBytes, ...]
    update_s_per_byte: float
    optimizer_bytes_per_byte: float
    gradient_bytes_per_byte: float
    schema_version: int = 1


def measured_costs(
    measuring: Measuring,
    members: Sequence[Member],
    device: torch.device,
    group: dist.ProcessGroup | None = None,
    *,
    model: str,
    cache_dir: str | Path | None = None,
    say: Callable[[str], None] = lambda line: None,
) -> CostTable:
    """Time the layers on one rank of each type of GPU, or read what an earlier job timed. All ranks call it; all get one table.

    Args:
        measuring: what is timed.
        members: all ranks, in order.
        device: of this rank.
        group: of all ranks, for values in host memory; None: the default one.
        model: name, for errors and plans.
        cache_dir: where figures are kept; None: `cache.cache_dir`.
        say: tells the user a line.

    Raises:
        ClusterError: a rank could not measure; on all ranks.
    """
    rank, layer_map = dist.get_rank(), map_layers(measuring.build_model, measuring.example.of_samples(1))
    kinds = kinds_of(measuring.build_model, layer_map)
    mine = members[rank].gpu
    key = _key(measuring, layer_map, kinds, mine, device)
    known = _loaded(key, cache_dir)
    found = _first_of_each_gpu(members, _exchanged(known, group))
    missing = {member.gpu for member in members} - set(found)
    left = len(set(kinds)) * len(measuring.micro_batches) if missing else 0
    if missing:
        say(
            f"timing {left} compiled layers on {', '.join(sorted(missing))}; a later start finds the figures in the cache"
        )

    def meet() -> None:
        """All ranks meet after each layer, or those that wait would give the others up."""
        nonlocal left
        left -= 1
        _exchanged(None, group)

    if mine in missing and next(r for r, member in enumerate(members) if member.gpu == mine) == rank:
        known = _or_error(lambda: measure(measuring, kinds, device, meet))
    while left:
        meet()
    rows = _exchanged(known, group)
    failed = next((f"rank {r}: {row}" for r, row in enumerate(rows) if isinstance(row, str)), None)
    if failed is not None:
        raise ClusterError(
            f"layers of {model} could not be timed. {failed}. Expected was one layer's forward and backward on each type of GPU."
            " Give a smaller global batch, or a plan"
        )
    found |= {gpu: row for gpu, row in _first_of_each_gpu(members, rows).items() if gpu not in found}
    store_text(_CACHED_AS, key, json.dumps(asdict(found[mine])), cache_dir)
    return _table(model, kinds, layer_map, found, device)


def _exchanged(value: "GpuCosts | str | None", group: dist.ProcessGroup | None) -> "list[GpuCosts | str | None]":
    rows: list[GpuCosts | str | None] = [None] * dist.get_world_size()
    dist.all_gather_object(rows, value, group=group)
    return rows


def _first_of_each_gpu(members: Sequence[Member], rows: "Sequence[GpuCosts | str | None]") -> dict[str, GpuCosts]:
    found: dict[str, GpuCosts] = {}
    for member, row in zip(members, rows, strict=True):
        if isinstance(row, GpuCosts):
            found.setdefault(member.gpu, row)
    return found


def _or_error(measured: Callable[[], GpuCosts]) -> "GpuCosts | str":
    """The figures, or an error's words for the other ranks, which would wait for ever."""
    try:
        return measured()
    except Exception as error:  # whatever it is, all ranks raise it
        return f"{type(error).__name__}: {error}"


def _table(
    model: str, kinds: Sequence[str], layer_map: LayerMap, found: dict[str, GpuCosts], device: torch.device
) -> CostTable:
    largest: dict[str, LayerBytes] = {}
    for row in (row for costs in found.values() for row in costs.sizes):
        known = largest.get(row.kind, row)
        largest[row.kind] = max(known, row, key=lambda size: size.kept_bytes)
    last = layer_map.num_layers - 1
    tied = [name for name, readers in layer_map.readers.items() if {0, last} <= readers]
    tied_bytes = sum(math.prod(shape.sizes) * shape.dtype.itemsize for shape in map(layer_map.shapes.__getitem__, tied))
    largest[LAST] = replace(largest[LAST], params_bytes=largest[LAST].params_bytes - tied_bytes)
    return CostTable(
        model=model,
        kinds=tuple(kinds),
        times=tuple(
            LayerTime(
                kind=row.kind,
                gpu=gpu,
                tp=1,
                micro_batch=row.micro_batch,
                forward_s=row.forward_s,
                backward_s=row.backward_s,
            )
            for gpu, costs in found.items()
            for row in costs.times
        ),
        sizes=tuple(largest.values()),
        updates=tuple(
            UpdateTime(gpu=gpu, fixed_s=0.0, s_per_byte=costs.update_s_per_byte) for gpu, costs in found.items()
        ),
        tied_bytes=tied_bytes,
        gradient_bytes_per_byte=max(costs.gradient_bytes_per_byte for costs in found.values()),
        optimizer_bytes_per_byte=max(costs.optimizer_bytes_per_byte for costs in found.values()),
        overhead_bytes=OVERHEAD_BYTES if device.type == "cuda" else 0,
        source="timed by the job",
    )


# -- which layers are alike ------------------------------------------------------------------------------------------


def kinds_of(build_model: BuildModel, layer_map: LayerMap) -> tuple[str, ...]:
    """The kind of each layer, ends among them: ``first``, ``layer``, ``layer-2`` and so on, ``last``."""
    with FakeTensorMode(allow_non_fake_inputs=True):
        model = build_model()
    seen: list[tuple[object, ...]] = []
    names = []
    for index, name in enumerate(layer_map.layers, 1):
        own = (*_traits(model.get_submodule(name)), *_params(layer_map, index, f"{name}."))
        if own not in seen:
            seen.append(own)
        place = seen.index(own)
        names.append(f"{LAYER}-{place + 1}" if place else LAYER)
    return (FIRST, *names, LAST)


def _traits(module: nn.Module) -> list[object]:
    """Classes and settings of a module's parts; integers are left out, because many layers know their own index."""
    found: list[object] = [repr(module)]
    for name, part in module.named_modules():
        found.append((name, f"{type(part).__module__}.{type(part).__qualname__}"))
        found += [(key, value) for key, value in vars(part).items() if isinstance(value, str | bool | float)]
    return found


def _params(layer_map: LayerMap, layer: int, prefix: str = "") -> list[tuple[str, Shape]]:
    return [
        (name.removeprefix(prefix), layer_map.shapes[name]) for name in sorted(layer_map.held(range(layer, layer + 1)))
    ]


# -- the file --------------------------------------------------------------------------------------------------------


def _key(measuring: Measuring, layer_map: LayerMap, kinds: Sequence[str], gpu: str, device: torch.device) -> str:
    """All that seconds and bytes depend on."""
    ends = [_params(layer_map, 0), _params(layer_map, layer_map.num_layers - 1)]
    layers = {kind: _params(layer_map, kinds.index(kind)) for kind in dict.fromkeys(kinds[1:-1])}
    batch = {name: (tuple(tensor.shape[1:]), str(tensor.dtype)) for name, tensor in measuring.example.tensors.items()}
    optimizer = measuring.make_optimizer([nn.Parameter(torch.zeros(1))])
    loss = getattr(measuring.loss, "__qualname__", type(measuring.loss).__qualname__)
    parts = [kinds, ends, layers, layer_map.hidden, batch, loss, type(optimizer).__name__, measuring.backend]
    parts += [measuring.micro_batches, gpu, device.type, device_name(device.type, device.index), torch.__version__]
    parts += [torch.get_float32_matmul_precision(), torch.get_num_threads() if device.type == "cpu" else 0]
    return "|".join(map(repr, parts))


def _loaded(key: str, cache_dir: str | Path | None) -> GpuCosts | None:
    text = load_text(_CACHED_AS, key, cache_dir)
    if text is None:
        return None
    try:
        return _FILES.parse(text, lambda raw: spelled(GpuCosts, raw))
    except ClusterError:  # of another version of this package: measured again
        return None


# -- timing ----------------------------------------------------------------------------------------------------------


def measure(
    measuring: Measuring, kinds: Sequence[str], device: torch.device, after_each: Callable[[], None]
) -> GpuCosts:
    """Time one layer of each kind, and a step of the optimizer, on this rank alone.

    Compiled code of earlier functions is dropped (`torch.compiler.reset`): the job's stages must not be taken for layers that
    were timed with other shapes.

    Raises:
        ClusterError: a layer cannot be built, or does not fit the device with the smallest micro-batch.
    """
    times: list[KindTime] = []
    sizes: dict[str, LayerBytes] = {}
    update: tuple[float, float, float] | None = None
    most = Counter(kinds).most_common(1)[0][0]
    cuda = [device] if device.type == "cuda" else []
    with torch.random.fork_rng(devices=cuda, device_type="cuda"):
        for micro_batch in measuring.micro_batches:
            batch = measuring.example.of_samples(micro_batch).mapped(lambda tensor: tensor.contiguous().to(device))
            layer_map = map_layers(measuring.build_model, batch)
            rows: list[KindTime] = []
            try:
                for kind in dict.fromkeys(kinds):
                    layer = TimedLayer(measuring, layer_map, kinds.index(kind), batch, device)
                    forward_s, backward_s = time_layer(layer)
                    rows.append(
                        KindTime(kind=kind, micro_batch=micro_batch, forward_s=forward_s, backward_s=backward_s)
                    )
                    sizes[kind] = layer.bytes(kind)
                    if kind == most and update is None:
                        update = layer.update()
                    after_each()
            except torch.OutOfMemoryError as error:
                if not times:
                    raise ClusterError(
                        f"one layer of {micro_batch} samples does not fit the memory: {error}"
                    ) from error
                break  # larger micro-batches take in proportion, and planners see that they do not fit
            finally:
                torch.compiler.reset()
                gc.collect()
                if cuda:
                    torch.cuda.empty_cache()
            times += rows
    assert update is not None, "the smallest micro-batch was timed"
    return GpuCosts(
        times=tuple(times),
        sizes=tuple(sizes.values()),
        update_s_per_byte=update[0],
        optimizer_bytes_per_byte=update[1],
        gradient_bytes_per_byte=update[2],
    )
