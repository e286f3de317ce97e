"""Single graph nodes as the compiler sees them: kind, sizes, scratch memory. Facts about ATen and Inductor, no policy.

Enter nodes of an ATen graph with fake ``meta["val"]``; leave kinds and bytes. Symbolic sizes are read through
their hints, without adding guards.
"""

import enum
import math
import operator
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from autohete_fx.graph import collectives, ops
from autohete_fx.graph.sizes import hint
from autohete_fx.internals.operators import OpOverload

CUDA_ALIGNMENT_BYTES = 512
"""The CUDA caching allocator hands out multiples of this."""


class Kind(enum.Enum):
    """How a node's value comes to be."""

    INPUT = "input"
    OUTPUT = "output"
    VIEW = "view"
    POINTWISE = "pointwise"
    REDUCTION = "reduction"
    SCATTER = "scatter"
    EXTERN = "extern"
    ISSUE = "issue"
    WAIT = "wait"


_VIEWS = frozenset({"aten.reshape", "aten._unsafe_view", "aten._reshape_alias", "aten.lift_fresh", "prims.view_of"})
_POINTWISE = frozenset(
    {
        "aten.clone",
        "aten.embedding",
        "aten.gather",
        "aten.index",
        "aten._unsafe_index",
        "aten._unsafe_masked_index",
        "aten.index_select",
        "aten.slice_scatter",
        "aten.select_scatter",
        "aten.cat",
        "aten.constant_pad_nd",
        "aten.full",
        "aten.full_like",
        "aten.scalar_tensor",
        "aten.arange",
        "aten.tril",
        "aten.triu",
        "aten.masked_fill",
        "aten.flip",
        "aten.roll",
        "aten.empty",
        "aten.empty_like",
        "aten.new_empty",
        "aten.new_zeros",
        "aten.new_ones",
        "aten.zeros",
        "aten.ones",
        "aten.zeros_like",
        "aten.ones_like",
        "aten.new_full",
        "aten.repeat",
        "aten.contiguous",
        "aten.stack",
        "aten._to_copy",
        "aten.copy",
        "aten.fill",
        "aten.lift_fresh_copy",
        "aten.permute_copy",
        "aten.where",
        "aten.native_dropout",
        "aten.repeat_interleave",
        "aten.copysign",
        "aten.glu",
        "aten.logit",
        "aten.nan_to_num",
        "aten.empty_strided",
        "aten.new_empty_strided",
        "aten.isnan",
        "aten.isinf",
        "aten.mul",
        "aten.diagonal_scatter",
        "aten.as_strided_scatter",
        "aten.unfold_copy",
        "prims.iota",
        "prims.convert_element_type",
        "prims.inductor_random",
        "prims.inductor_randint",
        "prims.inductor_lookup_seed",
        "prims.fma",
        "prims.device_put",
        "prims.inductor_force_stride_order",
        "prims._low_memory_max_pool_offsets_to_indices",
        "_quantized_decomposed.quantize_per_tensor",
    }
)
_REDUCTIONS = frozenset(
    {
        "aten.sum",
        "aten.mean",
        "aten.amax",
        "aten.amin",
        "aten.var_mean",
        "aten.var",
        "aten.std",
        "aten.max",
        "aten.min",
        "aten.argmax",
        "aten.argmin",
        "aten.any",
        "aten.all",
        "aten.prod",
        "aten.cumsum",
        "aten.cumprod",
        "aten.logcumsumexp",
        "aten.logsumexp",
        "aten.linalg_vector_norm",
        "aten.norm",
        "aten.std_mean",
        "prims.sum",
        "prims.var",
        "prims.prepare_softmax_online",
        "prims.xor_sum",
        "aten._softmax",
        "aten._log_softmax",
    }
)
_SCATTERS = frozenset(
    {
        "aten.index_put",
        "aten.index_put_",
        "aten._unsafe_index_put",
        "aten._unsafe_masked_index_put_accumulate",
        "aten.scatter",
        "aten.scatter_add",
        "aten.scatter_reduce",
        "aten.index_add",
        "aten.index_copy",
    }
)
_HEAVY = frozenset(
    {
        "aten.exp",
        "aten.log",
        "aten.log10",
        "aten.log1p",
        "aten.log2",
        "aten.sigmoid",
        "aten.tanh",
        "aten.silu",
        "aten.expm1",
        "aten.softplus",
        "aten.gelu",
        "aten.logsigmoid",
    }
)
_REALIZED = frozenset({"prims.inductor_random", "prims.inductor_randint"})


def packet_name(node: fx.Node) -> str:
    """Operator name without its overload, such as ``aten.mm``."""
    parts = str(node.target).split(".")
    return ".".join(parts[:2])


def unwrapped_call(node: fx.Node) -> tuple[str, tuple[Any, ...]]:
    """Operator name and arguments of a node, of the inner operator where there is one."""
    return innermost_call(node.target, node.args)


def innermost_call(target: object, args: tuple[Any, ...]) -> tuple[str, tuple[Any, ...]]:
    """Operator name and arguments, of the inner operator where a higher-order one runs it with a random state."""
    inner, inner_args = innermost_operator(target, args)
    return ".".join(str(inner).split(".")[:2]), inner_args


def innermost_operator(target: object, args: tuple[Any, ...]) -> tuple[object, tuple[Any, ...]]:
    """The operator of `innermost_call`."""
    for position, arg in enumerate(args):
        if isinstance(arg, OpOverload):
            return arg, tuple(args[position + 1 :])
    return target, args


def kind_of(node: fx.Node) -> Kind:
    """The kind of a node. An operator that is not known is an extern kernel."""
    if node.op in ("placeholder", "get_attr"):
        return Kind.INPUT
    if node.op == "output":
        return Kind.OUTPUT
    if node.target in ops.ISSUING_OPS or node.target in collectives.ISSUING_COLLECTIVES:
        return Kind.ISSUE
    if node.target is ops.wait or node.target in ops.PASSING_OPS or node.target in collectives.WAITS:
        return Kind.WAIT
    name = packet_name(node)
    if node.target in (operator.getitem, collectives.wait_functional) or name in _VIEWS:
        return Kind.VIEW
    if name in _REDUCTIONS:
        return Kind.REDUCTION if not _binary_extremum(node) else Kind.POINTWISE
    if name in _SCATTERS:
        return Kind.SCATTER
    if name in _POINTWISE:
        return Kind.POINTWISE
    target = node.target
    if isinstance(target, OpOverload):
        if torch.Tag.pointwise in target.tags:
            return Kind.POINTWISE
        infos = [ret.alias_info for ret in target._schema.returns]
        if infos and any(info is not None and not info.is_write for info in infos):
            return Kind.VIEW
    return Kind.EXTERN


def _binary_extremum(node: fx.Node) -> bool:
    """``aten.max.other`` and ``aten.min.other`` are pointwise."""
    return str(node.target).endswith(".other")


def holds_tensor(node: fx.Node) -> bool:
    """The node's value is a tensor, or a tuple with one in it."""
    value = node.meta.get("val")
    if isinstance(value, (tuple, list)):
        return any(isinstance(item, torch.Tensor) for item in value)
    return isinstance(value, torch.Tensor)


def num_elements(value: Any) -> int:
    """Elements of a tensor, or of the largest tensor of a tuple."""
    if isinstance(value, torch.Tensor):
        return math.prod(hint(size) for size in value.shape)
    if isinstance(value, (tuple, list)):
        return max((num_elements(item) for item in value), default=0)
    return 0


def aligned_bytes(num_bytes: int, device_type: str) -> int:
    """Bytes that the device's allocator hands out for so many."""
    if device_type == "cpu" or not num_bytes:
        return num_bytes
    return -(-num_bytes // CUDA_ALIGNMENT_BYTES) * CUDA_ALIGNMENT_BYTES


def extent_bytes(value: torch.Tensor, device_type: str) -> int:
    """Bytes from a tensor's first to its last element; 0 where it lies on another device."""
    if value.device.type != device_type:
        return 0
    sizes = [hint(size) for size in value.shape]
    if 0 in sizes:
        return 0
    strides = [hint(stride) for stride in value.stride()]
    extent = 1 + sum((size - 1) * stride for size, stride in zip(sizes, strides, strict=True))
    return aligned_bytes(extent * value.element_size(), device_type)


def tensor_bytes(value: torch.Tensor, device_type: str) -> int:
    """Bytes of a tensor's elements; 0 where it lies on another device."""
    if value.device.type != device_type:
        return 0
    return aligned_bytes(num_elements(value) * value.element_size(), device_type)


def dense_bytes(node: fx.Node, device_type: str) -> int:
    """Bytes of a generated buffer for a node's value, which is dense whatever the fake strides are."""
    return tensor_bytes(node.meta["val"], device_type)


def copied_bytes(node: fx.Node, device_type: str) -> int:
    """Bytes that a node which issues a copy moves."""
    source = node.all_input_nodes[0].meta["val"]
    return aligned_bytes(num_elements(source) * source.element_size(), device_type)


def issued_bytes(node: fx.Node, device_type: str) -> int:
    """Device bytes that a copy fills: those of its source when it comes to the device, none when it leaves."""
    return 0 if node.target is ops.offload else copied_bytes(node, device_type)


def _sizes(values: Sequence[int | torch.SymInt]) -> list[int]:
    return [hint(value) for value in values]


def can_be_view(node: fx.Node, source: fx.Node) -> bool:
    """A reshape of a strided tensor may have to copy; every other view operator never does."""
    if packet_name(node) not in ("aten.reshape", "aten._unsafe_view"):
        return True
    before, after = source.meta.get("val"), node.meta.get("val")
    if not isinstance(before, torch.Tensor) or not isinstance(after, torch.Tensor):
        return True
    probe = torch.empty_strided(_sizes(before.shape), _sizes(before.stride()), device="meta")
    try:
        probe.view(_sizes(after.shape))
    except RuntimeError:  # torch's own answer that the strides do not allow it
        return False
    return True


def keeps_layout(node: fx.Node) -> bool:
    """The view reads its source's elements in the same order."""
    return packet_name(node) in (*_VIEWS, "aten.view", "aten.alias", "aten.detach", "aten.squeeze")


def is_heavy(node: fx.Node) -> bool:
    """Inductor stores the reused result of these on a CPU rather than compute it twice."""
    return packet_name(node) in _HEAVY


def always_realized(node: fx.Node) -> bool:
    """Pointwise operators whose lowering stores the result."""
    return packet_name(node) in _REALIZED


def rows_of_reduction(node: fx.Node) -> int:
    """Size of the outer loops of a reduction over trailing dimensions; 0 for any other, which fuses with nothing."""
    source: Any = node.all_input_nodes[0].meta.get("val") if node.all_input_nodes else None
    if packet_name(node) in _SCATTERS or not isinstance(source, torch.Tensor):
        return 0
    dims = node.args[1] if len(node.args) > 1 else None
    if isinstance(dims, int):
        dims = [dims]
    if not isinstance(dims, (list, tuple)) or not dims:
        return 1
    rank = source.dim()
    reduced = sorted(dim % rank for dim in dims if isinstance(dim, int))
    if reduced != list(range(rank - len(reduced), rank)):
        return 0
    return math.prod(hint(size) for size in source.shape[: rank - len(reduced)])


@dataclass(frozen=True, slots=True, kw_only=True)
class RealizeThresholds:
    """From when on Inductor stores an expression: reads, reads where it has several users, operators.

    ``delays_cheap_outputs``: an output that reads nothing is not stored before the end.
    """

    reads: int
    reads_when_reused: int
    ops: int
    delays_cheap_outputs: bool


def realize_thresholds(device_type: str) -> RealizeThresholds:
    """The installed Inductor's thresholds."""
    from autohete_fx.internals.configs import inductor_config as config

    # 2.13 gives a CPU thresholds of its own, 2.11 has one for all
    def pick(name: str, fallback: str, cpu_name: str) -> int:
        value = getattr(config, name, None)
        if value is not None:
            return value
        if device_type == "cpu" and hasattr(config, cpu_name):
            return getattr(config, cpu_name)
        return getattr(config, fallback)

    return RealizeThresholds(
        reads=pick(
            "realize_acc_reads_threshold", "_realize_acc_reads_threshold_default", "realize_cpu_acc_reads_threshold"
        ),
        reads_when_reused=config.realize_reads_threshold,
        ops=pick("realize_opcount_threshold", "_realize_opcount_threshold_default", "realize_cpu_opcount_threshold"),
        delays_cheap_outputs=getattr(config, "delay_realize_cheap_outputs", False),
    )
