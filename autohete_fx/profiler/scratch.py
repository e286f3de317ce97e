"""Scratch memory of attention kernels, which PyTorch's allocator counts and no graph shows.

Enter nodes, or operator names with fake tensors; leave bytes.
"""

import functools
import math
from collections.abc import Sequence

import torch
from torch import fx

from autohete_fx.profiler.node_kinds import unwrapped_call
from autohete_fx.saved import hint

_GPU_ATTENTION_GRAINS = {
    "aten._scaled_dot_product_flash_attention_backward": 32,
    "aten._scaled_dot_product_efficient_attention_backward": 64,
    "aten._scaled_dot_product_cudnn_attention_backward": 64,
}
"""What attention's backward on a GPU rounds the width of a head up to. Of cuDNN's, which chooses for itself, it is a guess."""


def workspace_bytes(node: fx.Node) -> int:
    """Scratch that an ATen kernel allocates while it runs."""
    name, args = unwrapped_call(node)
    if name in _GPU_ATTENTION_GRAINS and isinstance(args[1], fx.Node):
        return gpu_attention_scratch_bytes(name, args[1].meta["val"])
    if "_flash_attention_for_cpu" not in name:
        return 0
    assert all(isinstance(arg, fx.Node) for arg in args[:3])
    tensors = [arg.meta["val"] for arg in args[:3]]
    if tensors[0].device.type != "cpu":
        return 0  # it stands for another device's kernel
    return attention_scratch_bytes(name, tensors)


def attention_scratch_bytes(name: str, tensors: Sequence[torch.Tensor]) -> int:
    """Scratch of PyTorch's flash attention on a CPU, by its first three arguments: exact, but for 16-bit products in backward,
    of which it is the most that there can be.

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
            return math.prod(hint(size) for size in grad_output.shape) * grad_output.element_size()
        needed *= size
    return 0


def gpu_attention_scratch_bytes(name: str, query: torch.Tensor) -> int:
    """Scratch of attention's backward on a GPU, 0 for anything else: the gradient of the queries is summed up in fp32 before it is
    rounded, and so is one number a row, both in tiles of 128 rows."""
    if name not in _GPU_ATTENTION_GRAINS:
        return 0
    batch, heads, rows, width = (hint(size) for size in query.shape)
    grain = _GPU_ATTENTION_GRAINS[name]
    return batch * heads * (-(-rows // 128) * 128) * (-(-width // grain) * grain + 1) * 4
