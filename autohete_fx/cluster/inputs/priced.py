"""Costs of a model's layers on types of GPU that are not there: traced without weights, priced from data sheets.

Enter a model as `autohete plan` takes it, devices of `machine.devices`, sizes of micro-batches and degrees of tensor parallelism;
leaves a `CostTable`. The GPUs of a unit compute what `narrow` says. Every device prices the same traces.

Layers
    A few are traced: two at the beginning and one at the end, which lie beside something else and cost a little otherwise. One
    of each type between them is traced, too. The costs of a type are those of its layers between. Differences of the others
    from them are added to ``first`` and ``last``, so that all layers together cost what a whole step costs in `autohete plan`.
Micro-batches
    The smallest is traced at each degree, the largest at the least degree alone. Seconds that do not grow from one to the other
    are traffic of weights and of their gradients. They get smaller with the weights as the degree rises. All others grow in
    proportion. A kernel takes the larger of two times that are each linear in the micro-batch. The table's straight line
    between the two sizes is thus never too low, and exact where no kernel changes sides. At higher degrees the largest is off
    by a few hundredths for layers. For the embedding and the head it is up to a fifth too long. Bytes are those of the
    smallest.
Collectives
    Rings of the node's net: an all-reduce of B bytes takes 2 (t-1) / t B / rate + 2 (t-1) latencies. Hidden states are summed after
    the embedding, after each row-wise layer in forward and in its place in backward, and before the head in backward. The loss over
    a divided vocabulary sums three numbers of 4 bytes a token. Nothing overlaps them.
Optimizer
    AdamW, by the rates of the device and of its host, which the GPUs of a node share evenly. An update on the host, the gradients'
    way down and the weights' way up overlap one another: the slowest counts.
"""

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from torch import fx

from autohete_fx.cluster.costs import CostTable, LayerBytes, LayerTime, UpdateTime
from autohete_fx.cluster.inputs.layer_kinds import FIRST, LAST, LayerKinds
from autohete_fx.cluster.inputs.narrow import Division, division_of, part_of_model, tied_bytes
from autohete_fx.compiler.problem import state_bytes
from autohete_fx.errors import ClusterError
from autohete_fx.graph.ops import SMALLEST_COPY_BYTES
from autohete_fx.internals.modes import FakeTensorMode
from autohete_fx.ir import BlockKind, Machine
from autohete_fx.machine.devices import NET_LATENCY_S, UPDATE_BYTES, DeviceSpec, machine_of_spec, net_of_spec
from autohete_fx.profiler.flops import seconds_of
from autohete_fx.profiler.memory.lowering import lower
from autohete_fx.profiler.partition import Partition
from autohete_fx.profiler.saved_tensors import saved_tensors
from autohete_fx.whatif.blueprint import Blueprint, read_model
from autohete_fx.whatif.depth import HEAD, TAIL
from autohete_fx.whatif.trace import Captured, capture_step

_LOSS_SUMS, _LOSS_BYTES = 3, 4
"""Exchanges of the loss over a divided vocabulary: the largest logit, the sum of exponentials and the label's logit, in fp32."""
_ACCUMULATED = 3
"""How many times its own bytes adding to a gradient moves: two read and one written."""
_DEVICE_TYPE = "cuda"


def priced_costs(
    model: str,
    devices: Sequence[DeviceSpec],
    *,
    seq: int,
    micro_batches: Sequence[int],
    degrees: Sequence[int],
    dtype: torch.dtype | None = None,
    tf32: bool = False,
    gpus_of_node: int = 8,
) -> CostTable:
    """The costs of a model's layers on each device.

    Args:
        model: a name of `architectures`, the path of a JSON configuration, or ``file.py:factory``.
        devices: types of GPU; the table has them by name.
        seq: tokens of each sequence.
        micro_batches: sequences of one, from the smallest to the largest that plans will have.
        degrees: of tensor parallelism. Those are left out that exceed a node, or that do not divide the model (`division_of`).
        dtype: of parameters; None: bfloat16 for a configuration, a factory's module as it is.
        tf32: fp32 products run in TF32.
        gpus_of_node: how many share a host.

    Raises:
        OptionError: there is no such model.
        CaptureError: it does not compile to one graph.
        ClusterError: no degree is left, or the model has no layers.
    """
    sizes = sorted({min(micro_batches), max(micro_batches)})
    blueprints = [read_model(model, batch=size, seq=seq, dtype=dtype) for size in sizes]
    whole = blueprints[0].build(FakeTensorMode(), None).module
    asked = sorted({degree for degree in degrees if degree <= gpus_of_node})
    divisions = [division for degree in asked if (division := division_of(whole, degree)) is not None]
    if not divisions:
        raise ClusterError(
            f"the degrees {list(degrees)} of tensor parallelism were given for {model!r}. Expected was one that divides its heads"
            f" and widths, and is at most {gpus_of_node}. Give 1 as well"
        )
    layers = LayerKinds(blueprints[0], whole)
    captured = [
        _captured(blueprint, size, divisions[0], layers) for blueprint, size in zip(blueprints, sizes, strict=True)
    ]
    small, large = (_priced(step, layers, divisions[0], devices, tf32) for step in (captured[0], captured[-1]))
    parts = [small]
    for division in divisions[1:]:
        step = _captured(blueprints[0], sizes[0], division, layers)
        parts.append(_priced(step, layers, division, devices, tf32))
    times = [row for part in parts for row in _times(part, devices)]
    if len(sizes) > 1:
        times += [row for part in parts for row in _times(_grown(part, small, large), devices)]
    params = list(captured[0].params.values())
    param_bytes = sum(param.nbytes for param in params)
    trained = [param for param in params if param.requires_grad]
    num_trained, grad_bytes = sum(param.numel() for param in trained), sum(param.nbytes for param in trained)
    return CostTable(
        model=model,
        kinds=layers.kinds,
        times=tuple(times),
        sizes=tuple(row for part in parts for row in _sizes(part)),
        updates=tuple(_update_of(spec, num_trained / param_bytes, gpus_of_node) for spec in devices),
        tied_bytes=tied_bytes(whole),
        gradient_bytes_per_byte=grad_bytes / param_bytes,
        optimizer_bytes_per_byte=sum(map(state_bytes, params)) / param_bytes,
        accumulate_share=_ACCUMULATED * grad_bytes / (UPDATE_BYTES * num_trained),
        source="traced, priced from data sheets",
    )


def _update_of(spec: DeviceSpec, params_of_byte: float, gpus_of_node: int) -> UpdateTime:
    machine = machine_of_spec(spec)
    on_host_s = params_of_byte * gpus_of_node / machine.host_update_params_per_s
    return UpdateTime(
        gpu=spec.name,
        fixed_s=0.0,
        s_per_byte=params_of_byte / machine.device_update_params_per_s,
        host_s_per_byte=max(on_host_s, 1 / machine.d2h_bytes_per_s, 1 / machine.h2d_bytes_per_s),
    )


# -- from a trace to figures of each kind ----------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class _Part:
    """What one GPU of a unit does with a micro-batch, by kind of layer.

    Attributes:
        degree: GPUs of the unit.
        batch: sequences of the micro-batch, and tokens of each.
        seconds: by device and kind, of forward and of backward, without collectives.
        params_bytes, unsharded_bytes, kept_bytes: by kind, as of `LayerBytes`, the last of the whole micro-batch.
        sums: by kind of layer, how often hidden states are summed in forward, and in backward.
        hidden_bytes: of the hidden states of one sequence.
    """

    degree: int
    batch: tuple[int, int]
    seconds: Mapping[tuple[str, str], tuple[float, float]]
    params_bytes: Mapping[str, int]
    unsharded_bytes: Mapping[str, int]
    kept_bytes: Mapping[str, int]
    sums: Mapping[str, int]
    hidden_bytes: int


def _captured(blueprint: Blueprint, micro_batch: int, division: Division, layers: LayerKinds) -> Captured:
    found = capture_step(part_of_model(blueprint, division.degree), layers.depth, _DEVICE_TYPE)
    if found.batch[0] != micro_batch:
        raise ClusterError(
            f"micro-batches of {micro_batch} were asked of {blueprint.name!r}, which has its own of {found.batch[0]}. Expected was"
            " that size. Give it, or a factory without inputs"
        )
    return found


def _priced(
    captured: Captured, layers: LayerKinds, division: Division, devices: Sequence[DeviceSpec], tf32: bool
) -> _Part:
    partition, kinds = captured.partition, layers.kinds_of(captured)
    blocks = partition.blocks.blocks
    machines = {spec.name: machine_of_spec(spec, tf32=tf32) for spec in devices}
    assert partition.backward is not None, "the step trains"
    forward, backward = (
        _block_seconds(partition, graph, machines) for graph in (partition.forward, partition.backward)
    )
    seconds: dict[tuple[str, str], tuple[float, float]] = {}
    for gpu in machines:
        ahead, back = by_kind(forward[gpu], kinds), by_kind(backward[gpu], kinds)
        seconds.update({(gpu, kind): (ahead[kind], back[kind]) for kind in ahead})
    saved = [0] * len(blocks)
    for tensor in saved_tensors(partition):
        saved[tensor.block] += tensor.num_bytes if tensor.by_default else 0
    kept = by_kind(saved, kinds)
    # The first layers make what all layers read besides hidden states, such as masks.
    hidden_bytes = min(
        edge.num_bytes
        for edge in partition.blocks.edges
        if blocks[edge.producer].kind is BlockKind.LAYER and edge.consumer == edge.producer + 1
    )
    weights = {
        kind: {name: captured.params[name].nbytes for name in block.param_fqns}
        for kind, block in zip(kinds, blocks, strict=True)
    }
    return _Part(
        degree=division.degree,
        batch=captured.batch,
        seconds=seconds,
        params_bytes={kind: sum(own.values()) for kind, own in weights.items()},
        unsharded_bytes={
            kind: sum(size for name, size in own.items() if size < SMALLEST_COPY_BYTES or name in division.uneven)
            for kind, own in weights.items()
        },
        kept_bytes={kind: max(0, math.ceil(num_bytes)) for kind, num_bytes in kept.items()},
        sums={
            kind: division.sums_in(block.module_fqn)
            for kind, block in zip(kinds, blocks, strict=True)
            if block.kind is BlockKind.LAYER
        },
        hidden_bytes=hidden_bytes // captured.batch[0],
    )


def _block_seconds(
    partition: Partition, graph_module: fx.GraphModule, machines: Mapping[str, Machine]
) -> dict[str, list[float]]:
    """By device the seconds of each block.

    The sum is that of `analytic_times`. Here a kernel belongs to the blocks of those nodes that it alone computes. Nodes that are
    inlined into kernels of many layers, such as rotary angles, would give the embedding seconds that grow with the layers.
    """
    placed = partition.placements(graph_module)
    graph = lower(graph_module, device_type=partition.device_type, inner_backend=partition.inner_backend)
    nodes = {node.name: node for node in graph_module.graph.nodes}
    times = Counter(name for kernel in graph.kernels for name in kernel.nodes)
    found = {gpu: [0.0] * len(partition.blocks.blocks) for gpu in machines}
    for kernel in graph.kernels:
        mine = [placed[name] for name in kernel.nodes if name in placed]
        alone = [placed[name] for name in kernel.nodes if name in placed and times[name] == 1] or mine
        for gpu, machine in machines.items():
            kernel_s = seconds_of(kernel, graph, nodes, machine)
            for block in alone:
                found[gpu][block] += kernel_s / len(alone)
    return found


def by_kind(values: Sequence[float], kinds: Sequence[str]) -> dict[str, float]:
    """A figure of each kind from one of each block.

    A kind's is the mean of its layers between head and tail, or of all of its layers where none lies between. Differences of the
    layers of head and tail from it are added to the first and to the last block's.
    """
    found = {FIRST: values[0], LAST: values[-1]}
    inner = range(1, len(values) - 1)
    between = range(1 + HEAD, len(values) - 1 - TAIL)
    for kind in dict.fromkeys(kinds[1:-1]):
        alike = [values[i] for i in between if kinds[i] == kind] or [values[i] for i in inner if kinds[i] == kind]
        found[kind] = sum(alike) / len(alike)
    for index in inner:
        if index not in between:
            found[FIRST if index <= HEAD else LAST] += values[index] - found[kinds[index]]
    return found


def _grown(part: _Part, small: _Part, large: _Part) -> _Part:
    """A part with the micro-batch of ``large``, where ``small`` and ``large`` are of one degree. Seconds that do not grow between
    those two are in proportion to the bytes of weights."""
    (few, tokens), (many, _) = part.batch, large.batch

    def grown(mine_s: float, small_s: float, large_s: float, share: float) -> float:
        fixed_s = max(0.0, small_s - few * (large_s - small_s) / (many - few))
        fixed_s = min(share * fixed_s, mine_s)
        return fixed_s + (mine_s - fixed_s) * many / few

    seconds = {}
    for key, mine in part.seconds.items():
        share = part.params_bytes[key[1]] / max(1, small.params_bytes[key[1]])
        forward_s, backward_s = (
            grown(*three, share) for three in zip(mine, small.seconds[key], large.seconds[key], strict=True)
        )
        seconds[key] = forward_s, backward_s
    if part is small:
        seconds = dict(large.seconds)
    return replace(part, batch=(many, tokens), seconds=seconds)


# -- rows of the table -----------------------------------------------------------------------------------------------


def _times(part: _Part, devices: Sequence[DeviceSpec]) -> list[LayerTime]:
    rows = []
    for spec in devices:
        for (gpu, kind), (forward_s, backward_s) in part.seconds.items():
            if gpu != spec.name:
                continue
            ahead, back = _summed_bytes(part, kind)
            rows.append(
                LayerTime(
                    kind=kind,
                    gpu=gpu,
                    tp=part.degree,
                    micro_batch=part.batch[0],
                    forward_s=forward_s + _all_reduces_s(ahead, spec, part.degree),
                    backward_s=backward_s + _all_reduces_s(back, spec, part.degree),
                )
            )
    return rows


def _sizes(part: _Part) -> list[LayerBytes]:
    return [
        LayerBytes(
            kind=kind,
            tp=part.degree,
            params_bytes=num_bytes,
            kept_bytes=-(-part.kept_bytes[kind] // part.batch[0]),
            output_bytes=0 if kind == LAST else part.hidden_bytes,
            unsharded_bytes=part.unsharded_bytes[kind],
        )
        for kind, num_bytes in part.params_bytes.items()
    ]


def _summed_bytes(part: _Part, kind: str) -> tuple[list[int], list[int]]:
    """Bytes of each sum over the GPUs of a unit, in forward and in backward."""
    micro_batch, tokens = part.batch
    hidden = [micro_batch * part.hidden_bytes]
    if kind == FIRST:
        return hidden, []
    if kind == LAST:
        return [micro_batch * tokens * _LOSS_BYTES] * _LOSS_SUMS, hidden
    times = part.sums.get(kind, 0)
    return hidden * times, hidden * times


def _all_reduces_s(rows: Sequence[int], spec: DeviceSpec, degree: int) -> float:
    """Seconds of sums of so many bytes each, one after another, in a ring."""
    rate, steps = net_of_spec(spec).reached_gb_per_s * 1e9, 2 * (degree - 1)
    return sum(steps / degree * num_bytes / rate + steps * NET_LATENCY_S for num_bytes in rows)
