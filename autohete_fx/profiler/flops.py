"""Seconds of one kernel by the roofline: the larger of its arithmetic, its memory traffic and a launch.

Enter graph nodes and kernels; leave FLOPs, bytes and seconds. The formulas are those of
``torch.utils.flop_counter``, and its own for the CPU attention kernels that it does not know.
"""

from collections.abc import Mapping
from typing import Any

import torch
from torch import fx
from torch.utils.flop_counter import flop_registry, sdpa_backward_flop_count, sdpa_flop_count

from autohete_fx.graph.collectives import needs_others
from autohete_fx.graph.sizes import hint
from autohete_fx.ir import Machine
from autohete_fx.profiler.memory.kernels import Kernel, KernelGraph
from autohete_fx.profiler.memory.node_kinds import unwrapped_call
from autohete_fx.profiler.partition import Partition

_WIDEST_ELEMENT_BYTES = 8
_NARROW = 128
"""Up to this, a side of a product has too few steps, or too small tiles, for arithmetic to hide the traffic."""
_MATRICES = {"aten.mm": 0, "aten.bmm": 0, "aten.addmm": 1, "aten.baddbmm": 1}
"""Products of two matrices, by the place of the first."""


def _shape(node: Any) -> tuple[int, ...]:
    return tuple(hint(size) for size in node.meta["val"].shape)


def _plain(value: Any) -> Any:
    """A tensor's shape stands for it, as the registered formulas expect."""
    if isinstance(value, fx.Node):
        return _plain(value.meta.get("val"))
    if isinstance(value, torch.Tensor):
        return torch.Size(hint(size) for size in value.shape)
    if isinstance(value, torch.SymInt):
        return hint(value)
    if isinstance(value, dict):
        return {key: _plain(item) for key, item in value.items()}
    if isinstance(value, (tuple, list)):
        return type(value)(_plain(item) for item in value)
    return value


def flops_of(node: fx.Node) -> int:
    """FLOPs of a matrix product, convolution or attention; 0 for everything else."""
    name, args = unwrapped_call(node)
    if name == "aten._scaled_dot_product_flash_attention_for_cpu":
        return sdpa_flop_count(*(_shape(arg) for arg in args[:3]))
    if name == "aten._scaled_dot_product_flash_attention_for_cpu_backward":
        return sdpa_backward_flop_count(*(_shape(arg) for arg in args[:4]))
    packet = next((packet for packet in flop_registry if str(packet) == name), None)
    if packet is None or "val" not in node.meta:
        return 0
    # the registered formulas take shapes in place of tensors, and the result as ``out_shape``
    formula = getattr(flop_registry[packet], "__wrapped__", flop_registry[packet])
    return int(formula(*_plain(args), **{**_plain(node.kwargs), "out_shape": _plain(node.meta["val"])}))


def block_flops(partition: Partition) -> tuple[int, ...]:
    """FLOPs of every block's products in forward and backward, in block order."""
    totals = [0] * len(partition.blocks.blocks)
    for graph_module in (partition.forward, partition.backward):
        if graph_module is not None:
            placed = partition.placements(graph_module)
            for node in graph_module.graph.nodes:
                if node.name in placed:
                    totals[placed[node.name]] += flops_of(node)
    return tuple(totals)


def dtype_of(node: fx.Node) -> str:
    """Name of the dtype that a product is computed in, such as ``bfloat16``."""
    for arg in node.all_input_nodes:
        value = arg.meta.get("val")
        if isinstance(value, torch.Tensor) and value.dtype.is_floating_point:
            return str(value.dtype).removeprefix("torch.")
    return "float32"


def bytes_of(kernel: Kernel, graph: KernelGraph) -> int:
    """Bytes that a kernel reads and writes. A gather reads no more of its table than it has iterations."""
    limit = kernel.iterations * _WIDEST_ELEMENT_BYTES if kernel.fused else None
    total = sum(graph.storages[index].num_bytes for index in kernel.writes)
    for index in kernel.reads:
        size = graph.storages[index].num_bytes
        total += size if limit is None else min(size, limit)
    return total


def is_narrow(node: fx.Node) -> bool:
    """A product of two matrices with a side of at most 128, such as those of unfused attention over a head's width."""
    name, args = unwrapped_call(node)
    if name not in _MATRICES:
        return False
    first, second = args[_MATRICES[name] : _MATRICES[name] + 2]
    return min(*_shape(first)[-2:], *_shape(second)[-2:]) <= _NARROW


def seconds_of(
    kernel: Kernel, graph: KernelGraph, nodes: Mapping[str, fx.Node], machine: Machine, *, backward: bool = False
) -> float:
    """Roofline seconds of one kernel on a machine, as a kernel of forward or of backward.

    Arithmetic and traffic overlap, but for narrow products, where they add. A collective takes none: it has a lane of its own, or
    `exchanged.Waits` prices it.
    """
    if not kernel.fused and any(needs_others(nodes[name].target) for name in kernel.nodes):
        return 0.0
    traffic_s = bytes_of(kernel, graph) / machine.device_bytes_per_s
    products = [nodes[name] for name in kernel.nodes] if not kernel.fused else []
    compute_s = sum(flops_of(node) / machine.flops_per_s(dtype_of(node), backward=backward) for node in products)
    together_s = traffic_s + compute_s if any(map(is_narrow, products)) else max(traffic_s, compute_s)
    return max(together_s, machine.launch_s)
