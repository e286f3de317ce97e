"""Scratch memory of kernels, which PyTorch's allocator counts and no graph shows.

Enter nodes, or operators with what they are called with; leave bytes: of attention by formulas, of all else as `probe` measures
it. Without a probe, as where the device is not here, a bound stands for convolutions.
"""

import functools
import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import fx
from torch.fx.node import map_arg

from autohete_fx.graph.collectives import COLLECTIVES, ISSUING_GATHERS, gather, is_functional
from autohete_fx.graph.sizes import hint, num_bytes
from autohete_fx.profiler.memory.node_kinds import innermost_operator
from autohete_fx.profiler.memory.probe import current

_GPU_ATTENTION_GRAINS = {
    "aten._scaled_dot_product_flash_attention_backward": 32,
    "aten._scaled_dot_product_efficient_attention_backward": 64,
    "aten._scaled_dot_product_cudnn_attention_backward": 64,
}
"""Attention's backward on a GPU rounds the width of a head up to a multiple of these.

For cuDNN's, which chooses for itself, it is as measured on an H200 for heads of 64 and 128.
"""

_PRODUCTS = {"aten.mm": 0, "aten.bmm": 0, "aten.addmm": 1, "aten.baddbmm": 1}
"""Products of two matrices, by the place of the first."""


def workspace_bytes(node: fx.Node) -> int:
    """Scratch that the kernel of a node takes while it runs; of a condition, what the branch that takes more does."""
    if node.target is torch.ops.higher_order.cond:
        module = node.graph.owning_module
        branches = [getattr(module, str(arg.target)) for arg in node.args[1:3] if isinstance(arg, fx.Node)]
        return max(_branch_bytes(branch) for branch in branches)
    args, kwargs = map_arg((node.args, node.kwargs), lambda arg: arg.meta.get("val"))
    return scratch_bytes(node.target, args, kwargs)


def _branch_bytes(branch: fx.GraphModule) -> int:
    """The most that a branch takes beside its operands and results, run node by node."""
    results = set(branch.graph.output_node().all_input_nodes)
    live, most = dict[fx.Node, int](), 0
    for node in branch.graph.nodes:
        value = node.meta.get("val")
        if node.op == "call_function" and node not in results and isinstance(value, torch.Tensor):
            live[node] = num_bytes(value)
        most = max(most, sum(live.values()))
        for source in node.all_input_nodes:
            if next(reversed(source.users)) is node:
                live.pop(source, None)
    return most


def scratch_bytes(target: object, args: Any, kwargs: Any) -> int:
    """Scratch that an operator takes beside its results: measured within `probe.probing`, else by formulas.

    Those are exact for attention on a CPU, a bound for a convolution, and 0 for all that takes little or is not known. Attention
    is never measured: on a GPU it reads random state, which is not there before its forward has run.

    Args:
        target: the operator; one of higher order, which runs another with a given random state, counts as that.
        args, kwargs: what it is called with, tensors fake or real.
    """
    inner, inner_args = innermost_operator(target, args)
    name = ".".join(str(inner).split(".")[:2])
    if name in _GPU_ATTENTION_GRAINS:
        return gpu_attention_scratch_bytes(name, inner_args[:5]) if isinstance(inner_args[1], torch.Tensor) else 0
    if "_flash_attention_for_cpu" in name:
        # on another device it stands for that one's kernel
        return attention_scratch_bytes(name, inner_args[:3]) if inner_args[0].device.type == "cpu" else 0
    if "_attention" in name or is_blas_product(name, inner_args, kwargs):
        return 0
    if inner in COLLECTIVES:
        return collective_scratch_bytes(inner, inner_args)
    if is_functional(inner):  # one rank alone must not run it to measure it
        return _functional_scratch_bytes(name, inner_args)
    bound_bytes = convolution_scratch_bytes(name, inner_args)
    probe = current()
    measured = None
    if probe is not None:
        # oneDNN and cuDNN hardly ever come near the bound, which would forbid to measure under a tight budget
        likely = bound_bytes is not None and inner_args[0].device.type == "cpu" and inner_args[0].element_size() != 4
        measured = probe.scratch_bytes(inner, inner_args, kwargs, bound_bytes if likely else None)
    return (bound_bytes or 0) if measured is None else measured


def collective_scratch_bytes(target: object, args: Sequence[Any]) -> int:
    """Bytes that a collective on a CPU takes for a tensor. Gloo works on a copy of the whole, and gathers several from copies of
    the shards. NCCL works in place."""
    tensor, num_ranks = args[0], args[1]
    if tensor.device.type != "cpu":
        return 0
    copies = num_ranks + 1 if target in ISSUING_GATHERS else num_ranks if target is gather else 1
    return num_bytes(tensor) * copies


def _functional_scratch_bytes(name: str, args: Sequence[Any]) -> int:
    """Likewise of PyTorch's functional collectives, of which gloo works on a copy of the whole, as of ours."""
    tensor = args[0]
    if not isinstance(tensor, torch.Tensor) or tensor.device.type != "cpu":
        return 0
    if name.endswith("all_gather_into_tensor"):
        return num_bytes(tensor) * hint(args[1])
    return num_bytes(tensor) if name.endswith("reduce_scatter_tensor") else 0


def is_blas_product(name: str, args: Sequence[Any], kwargs: Any) -> bool:
    """A matrix product that a library takes as it is. A CPU's scratch for types of more than 16 bits is not PyTorch's memory;
    a GPU's is kept."""
    if name not in _PRODUCTS:
        return False
    matrices = [*args[_PRODUCTS[name] : _PRODUCTS[name] + 2], *([kwargs["out"]] if "out" in kwargs else [])]
    if matrices[0].device.type == "cpu" and matrices[0].element_size() < 4:
        return False
    return all(_is_row_or_column_major(matrix) for matrix in matrices)


def _is_row_or_column_major(matrix: torch.Tensor) -> bool:
    """Whether BLAS has words for the strides of the last two dimensions."""
    (rows, columns), (down, across) = map(hint, matrix.shape[-2:]), map(hint, matrix.stride()[-2:])
    return (across == 1 and down >= max(1, columns)) or (down == 1 and across >= max(1, rows))


def convolution_scratch_bytes(name: str, args: Sequence[Any]) -> int | None:
    """At most what a convolution, or its backward, takes; None for any other operator.

    oneDNN and cuDNN bring each operand into a layout of their own, channels in sixteens; two of oneDNN's may stand beside each
    other. Each of its threads sums up the weights' gradient by itself. Where no better algorithm is at hand it writes down the
    windows of all results of an image. A product of matrices then does the work. PyTorch's own code, for types that oneDNN does
    not take, does that for all images at once; so does oneDNN in fp32 for 16-bit types. As measured on CPUs; for cuDNN a guess.
    """
    if name not in ("aten.convolution", "aten.convolution_backward"):
        return None
    if name == "aten.convolution":
        source, weight, transposed = args[0], args[1], args[6]
        result_shape = torch.ops.aten.convolution.default(*(_as_meta(arg) for arg in args)).shape
    else:
        result_shape, source, weight, transposed = args[0].shape, args[1], args[2], args[7]
    batch, channels, *places = map(hint, source.shape)
    _, made, *made_places = map(hint, result_shape)
    if transposed:  # the forward of one is the backward of the other
        channels, made, places, made_places = made, channels, made_places, places
    first, second, *window = map(hint, weight.shape)
    item_bytes = source.element_size()
    operands = batch * (_blocked(channels) * math.prod(places) + _blocked(made) * math.prod(made_places))
    weights = _blocked(first) * _blocked(second) * math.prod(window) * max(4, item_bytes)
    if source.device.type != "cpu":
        return operands * item_bytes + weights
    threads = torch.get_num_threads()
    windows = channels * math.prod(window) * math.prod(made_places)
    images = {4: 2 * min(threads, batch), 8: max(2 * min(threads, batch), batch)}.get(item_bytes, 2 * batch)
    return 2 * operands * max(4, item_bytes) + (1 + threads) * weights + images * windows * item_bytes


def _as_meta(value: Any) -> Any:
    if not isinstance(value, torch.Tensor):
        return value
    return torch.empty([hint(size) for size in value.shape], dtype=value.dtype, device="meta")


def _blocked(channels: int) -> int:
    return -(-channels // 16) * 16


def attention_scratch_bytes(name: str, tensors: Sequence[torch.Tensor]) -> int:
    """Scratch of PyTorch's flash attention on a CPU, in bytes, by its first three arguments.

    It is exact, but for 16-bit products in backward, where it is the most that there can be.

    It mirrors aten/src/ATen/native/cpu/FlashAttentionKernel.cpp; PyTorch 2.11 to 2.15 take the same. A mask and the causal form
    take nothing more.
    """
    query, key = tensors[1:3] if "backward" in name else tensors[:2]
    batch, heads, rows, width = (hint(size) for size in query.shape)
    threads, item_bytes = torch.get_num_threads(), query.element_size()
    # Each thread works on a tile of scores in the accumulating type, and on its rounded copy where the type has 16 bits.
    accumulating_bytes = max(item_bytes, 4)
    score_bytes = accumulating_bytes + (item_bytes if item_bytes == 2 else 0)
    q_split = min(rows, 256 if rows >= 768 else (64 if rows >= 192 else 32))
    kv_split = min(hint(key.shape[2]), 512)
    if "backward" not in name:
        if query.dtype == torch.float16 and _has_onednn_products(query.dtype) and kv_split >= 64:
            kv_split = -(-kv_split // 64) * 64  # where keys and values are packed, which happens outside the allocator
        # and, for each row, the maximum, the sum and the result, which are not rounded before the end
        return threads * q_split * (kv_split * score_bytes + (2 + width) * accumulating_bytes)
    # Tiles of probabilities and of their gradients for every thread; a sum for each row, and products, for those that have work.
    tiles = threads * 2 * q_split * kv_split * score_bytes
    product = 0
    if _has_onednn_products(query.dtype):
        product = max(
            _product_scratch_bytes(kv_split, q_split, width, copies_rows=True),  # of keys' and values' gradients
            _product_scratch_bytes(q_split, kv_split, width, copies_rows=query.dtype == torch.float16),  # of queries'
        )
    at_work = min(threads, batch * heads) * (q_split * accumulating_bytes + product)
    return tiles + at_work + _contiguous_copy_bytes(tensors[0])


@functools.cache
def _has_onednn_products(dtype: torch.dtype) -> bool:
    """Whether products of this type whose result has it too are oneDNN's, which takes scratch from PyTorch's allocator."""
    name = {torch.bfloat16: "bf16", torch.float16: "fp16"}.get(dtype)
    if name is None or not torch.backends.mkldnn.is_available():
        return False
    return getattr(torch.ops.mkldnn, f"_is_mkldnn_{name}_supported")()


def _product_scratch_bytes(rows: int, depth: int, width: int, *, copies_rows: bool) -> int:
    """At most what oneDNN takes to add (rows, depth) @ (depth, width) of 16-bit values to a result.

    It divides the work by the number of threads even if the product then runs in one of them, beside others'. Each thread gets
    memory for as many rows as it may take on, copied if they have to be transposed, for 64 columns of what they are
    multiplied by, and for that part of the result in fp32 (src/cpu/x64/matmul/brgemm_matmul_utils.cpp). Where the CPU has no
    instructions for bf16, the whole result is in fp32 instead. Both are as measured with AVX-512; AMX divides the work in
    other ways, of which this is a guess.
    """
    if rows * depth * width <= 16**3:
        return 0  # PyTorch multiplies so little itself
    threads = torch.get_num_threads()
    depth = -(-depth // 32) * 32
    rows_at_once = -(-rows // max(1, threads // -(-width // 64)))
    rows_at_once = min(-(-rows_at_once // 16) * 16, 256)
    block = 2 * depth * (64 + (rows_at_once if copies_rows else 0)) + 4 * rows_at_once * min(width, 64)
    return max(threads * (block + 1156), 4 * rows * width + 132)


def _contiguous_copy_bytes(grad_output: torch.Tensor) -> int:
    """The copy that backward makes of a gradient that is not contiguous as (batch, rows, heads, width)."""
    needed = 1
    for axis in (3, 1, 2, 0):
        size = hint(grad_output.shape[axis])
        if size != 1 and hint(grad_output.stride(axis)) != needed:
            return num_bytes(grad_output)
        needed *= size
    return 0


def gpu_attention_scratch_bytes(name: str, args: Sequence[Any]) -> int:
    """Scratch of attention's backward on a GPU, in bytes, 0 for anything else.

    The gradient of the queries is summed up in fp32 before it is rounded. The same holds for one number a row; both are in
    tiles of 128 rows. The gradient of the output is copied where it is not contiguous as (batch, rows, heads, width), but not by
    cuDNN. Flash attention copies such an output, too.

    Args:
        name: the operator.
        args: its first: of flash attention the gradient, queries, keys, values and the output; of others the first two matter.
    """
    if name not in _GPU_ATTENTION_GRAINS:
        return 0
    batch, heads, rows, width = (hint(size) for size in args[1].shape)
    grain = _GPU_ATTENTION_GRAINS[name]
    copied = (args[0], args[4]) if "_flash_" in name else () if "_cudnn_" in name else (args[0],)
    sums = batch * heads * (-(-rows // 128) * 128) * (-(-width // grain) * grain + 1) * 4
    return sums + sum(map(_contiguous_copy_bytes, copied))
