"""Costs of a model's layers, timed on the devices of a running job, and kept for its next start.

Enter how to build the model and an example batch; leaves a `CostTable` that is equal on all ranks. One rank of each type of GPU
times one layer of each kind, alone (`timed_layer`), compiled as the job compiles its stages. Layers are of one kind where their
modules have equal classes and settings, and their parameters equal names and shapes. The first kind is all before the layers, the
last one all after them. Where layers may be shared, the ranks of a node time together what so many GPUs share.

Each type's figures lie in a file under `cache.cache_dir`. Its key is all that they depend on: the model's structure, the shapes of
the batch, backend, optimizer, versions, and the GPU. A rank that finds the file spares all ranks of its type the timing.
"""

import gc
import json
import math
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import nn

from autohete_fx.cache import device_name, load_text, store_text
from autohete_fx.cluster.costs import CostTable, LayerBytes, LayerTime, UpdateTime
from autohete_fx.cluster.deploy import Member
from autohete_fx.cluster.measuring.timed_layer import Measuring, TimedLayer, time_layer
from autohete_fx.cluster.memory import OVERHEAD_BYTES
from autohete_fx.cluster.model.batches import Shape
from autohete_fx.cluster.model.building import BuildModel
from autohete_fx.cluster.model.layers import LayerMap, map_layers
from autohete_fx.cluster.model.split import AtMarks
from autohete_fx.cluster.model.unit import Unit, UnitPlace
from autohete_fx.errors import ClusterError
from autohete_fx.internals.groups import mesh_of
from autohete_fx.internals.modes import FakeTensorMode
from autohete_fx.internals.versions import timeout_of
from autohete_fx.ir.files import SavedAs, spelled

FIRST, LAYER, LAST = "first", "layer", "last"
_CACHED_AS = "cluster_costs"
_FILES = SavedAs(
    kind="measured costs", writer="a job", again="they are measured again", schema_version=3, error=ClusterError
)


@dataclass(frozen=True, slots=True, kw_only=True)
class KindTime:
    """Seconds of a kind of layer for a micro-batch, on so many GPUs that share it."""

    kind: str
    micro_batch: int
    forward_s: float
    backward_s: float
    tp: int = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class GpuCosts:
    """All that one rank measured on its device.

    Attributes:
        times: rows.
        sizes: rows, one for each kind and degree of tensor parallelism.
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
    schema_version: int = 3


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
    mine, units = members[rank].gpu, units_of(members, measuring.layouts)
    key = _key(measuring, layer_map, kinds, mine, device, sorted(degree for gpu, degree in units if gpu == mine))
    known = _loaded(key, cache_dir)
    found = _merged(members, _exchanged(known, group))
    missing = {member.gpu for member in members} - set(found)
    degrees = sorted({degree for _, degree in units}) if missing else []
    each, left = len(set(kinds)) * len(measuring.micro_batches), 0
    if missing:
        say(
            f"timing {each * len(degrees)} compiled layers on {', '.join(sorted(missing))}; a later start finds the figures in"
            " the cache"
        )

    def meet() -> None:
        """All ranks meet after each layer, or those that wait would give the others up."""
        nonlocal left
        left -= 1
        _exchanged([], group)

    for degree in degrees:
        left = each
        unit = _unit({gpu: units[gpu, degree] for gpu in sorted(missing) if (gpu, degree) in units}, measuring, device)
        if mine in missing and rank in units.get((mine, degree), ()) and isinstance(known, list):
            known = or_error(lambda known=known, unit=unit: [*known, measure(measuring, kinds, device, meet, unit)])
        while left:
            meet()
    rows = _exchanged(known, group)
    failed = next((f"rank {r}: {row}" for r, row in enumerate(rows) if isinstance(row, str)), None)
    if failed is not None:
        raise ClusterError(
            f"layers of {model} could not be timed. {failed}. Expected was one layer's forward and backward on each type of GPU."
            " Give a smaller global batch, or a plan"
        )
    found |= {gpu: row for gpu, row in _merged(members, rows).items() if gpu not in found}
    store_text(_CACHED_AS, key, json.dumps(asdict(found[mine])), cache_dir)
    return _table(model, kinds, layer_map, found, device)


_Figures = TypeVar("_Figures")
Known = list[GpuCosts] | str
"""A rank's figures, of one or more degrees of tensor parallelism, or an error's words."""
Units = dict[tuple[str, int], tuple[int, ...]]
"""By type of GPU and degree, the ranks of one node that time it."""


def units_of(members: Sequence[Member], layouts: Iterable[int]) -> Units:
    """The first node's ranks of each type that has as many as a degree asks for; for one GPU the first rank of the type."""
    rows: dict[tuple[str, str], list[int]] = {}
    for rank, member in enumerate(members):
        rows.setdefault((member.gpu, member.node), []).append(rank)
    found: Units = {}
    for degree in (1, *sorted(layouts)):
        for (gpu, _), ranks in rows.items():
            if len(ranks) >= degree:
                found.setdefault((gpu, degree), tuple(ranks[:degree]))
    return found


def _unit(units: Mapping[str, tuple[int, ...]], measuring: Measuring, device: torch.device) -> Unit | None:
    """The unit of this rank among those by type of GPU. All ranks call it, because they make process groups together."""
    mine = None
    for ranks in units.values():
        if len(ranks) > 1:
            group: Any = dist.new_group(list(ranks), timeout=timeout_of(dist.group.WORLD, device.type))
            if dist.get_rank() in ranks:
                mesh = mesh_of({"tensor_parallel": group}, device.type)
                place = UnitPlace(degree=len(ranks), part=ranks.index(dist.get_rank()))
                mine = Unit(layout=measuring.layouts[len(ranks)], place=place, tensor_parallel=mesh)
    return mine


def _exchanged(value: Known, group: dist.ProcessGroup | None) -> list[Known]:
    rows: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(rows, value, group=group)
    return rows


def _merged(members: Sequence[Member], rows: Sequence[Known]) -> dict[str, GpuCosts]:
    """By type of GPU, the figures of all degrees, each as the first rank has it."""
    parts: dict[str, list[GpuCosts]] = {}
    for member, row in zip(members, rows, strict=True):
        if isinstance(row, list):
            parts.setdefault(member.gpu, []).extend(row)
    found: dict[str, GpuCosts] = {}
    for gpu, mine in parts.items():
        for part in sorted(mine, key=lambda part: part.times[0].tp):
            known = found.setdefault(gpu, part)
            if part.times[0].tp not in {time.tp for time in known.times}:
                found[gpu] = replace(known, times=(*known.times, *part.times), sizes=(*known.sizes, *part.sizes))
    return found


def or_error(measure: Callable[[], _Figures]) -> _Figures | str:
    """The figures, or an error's words for the other ranks, which would wait for ever."""
    try:
        return measure()
    except Exception as error:  # whatever it is, all ranks raise it
        return f"{type(error).__name__}: {error}"


def _table(
    model: str, kinds: Sequence[str], layer_map: LayerMap, found: dict[str, GpuCosts], device: torch.device
) -> CostTable:
    largest: dict[tuple[str, int], LayerBytes] = {}
    for row in (row for costs in found.values() for row in costs.sizes):
        known = largest.get((row.kind, row.tp), row)
        largest[row.kind, row.tp] = max(known, row, key=lambda size: size.kept_bytes)
    last = layer_map.num_layers - 1
    tied = [name for name, readers in layer_map.readers.items() if {0, last} <= readers]
    tied_bytes = sum(math.prod(shape.sizes) * shape.dtype.itemsize for shape in map(layer_map.shapes.__getitem__, tied))
    table = CostTable(
        model=model,
        kinds=tuple(kinds),
        times=tuple(
            LayerTime(
                kind=row.kind,
                gpu=gpu,
                tp=row.tp,
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
    if not tied_bytes:
        return table

    def untied(row: LayerBytes) -> LayerBytes:  # weights of the first layer count there alone
        unsharded_bytes = max(0, row.unsharded_bytes - table.tied_unsharded_bytes_at(row.tp))
        return replace(
            row,
            params_bytes=max(unsharded_bytes, row.params_bytes - table.tied_bytes_at(row.tp)),
            unsharded_bytes=unsharded_bytes,
        )

    return replace(table, sizes=tuple(untied(row) if row.kind == LAST else row for row in table.sizes))


# -- which layers are alike ------------------------------------------------------------------------------------------


def kinds_of(build_model: BuildModel, layer_map: LayerMap) -> tuple[str, ...]:
    """The kind of each layer, ends among them: ``first``, ``layer``, ``layer-2`` and so on, ``last``."""
    with FakeTensorMode(allow_non_fake_inputs=True):
        model = build_model()
    seen: list[tuple[object, ...]] = []
    names = []
    for index, name in enumerate(layer_map.layers, 1):
        if isinstance(layer_map.way, AtMarks):
            shapes = sorted(repr(shape) for _, shape in _params(layer_map, index))
            own = layer_map.way.alike[index], layer_map.crossing[index + 1], *shapes
        else:
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


def _key(
    measuring: Measuring, layer_map: LayerMap, kinds: Sequence[str], gpu: str, device: torch.device, degrees: list[int]
) -> str:
    """All that seconds and bytes depend on."""
    ends = [_params(layer_map, 0), _params(layer_map, layer_map.num_layers - 1)]
    layers = {kind: _params(layer_map, kinds.index(kind)) for kind in dict.fromkeys(kinds[1:-1])}
    batch = {name: (tuple(tensor.shape[1:]), str(tensor.dtype)) for name, tensor in measuring.example.tensors.items()}
    optimizer = measuring.make_optimizer([nn.Parameter(torch.zeros(1))])
    loss = getattr(measuring.loss, "__qualname__", type(measuring.loss).__qualname__)
    parts = [kinds, ends, layers, layer_map.crossing, batch, loss, type(optimizer).__name__, measuring.backend]
    parts += [measuring.micro_batches, gpu, device.type, device_name(device.type, device.index), torch.__version__]
    parts += [[(degree, measuring.layouts.get(degree)) for degree in degrees if degree > 1]]
    parts += [torch.get_float32_matmul_precision(), torch.get_num_threads() if device.type == "cpu" else 0]
    return "|".join(map(repr, parts))


def _loaded(key: str, cache_dir: str | Path | None) -> Known:
    text = load_text(_CACHED_AS, key, cache_dir)
    try:
        return [] if text is None else [_FILES.parse(text, lambda raw: spelled(GpuCosts, raw))]
    except ClusterError:  # of another version of this package: measured again
        return []


# -- timing ----------------------------------------------------------------------------------------------------------


def measure(
    measuring: Measuring,
    kinds: Sequence[str],
    device: torch.device,
    after_each: Callable[[], None],
    unit: Unit | None = None,
) -> GpuCosts:
    """Time one layer of each kind, and a step of the optimizer, on this rank alone, or on all ranks of a unit together.

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
                    layer = TimedLayer(measuring, layer_map, kinds.index(kind), batch, device, unit)
                    forward_s, backward_s = time_layer(layer)
                    rows.append(
                        KindTime(
                            kind=kind,
                            micro_batch=micro_batch,
                            forward_s=forward_s,
                            backward_s=backward_s,
                            tp=unit.place.degree if unit else 1,
                        )
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
