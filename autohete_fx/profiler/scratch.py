"""Scratch memory of attention kernels, which PyTorch's allocator counts and no graph shows.

Enter nodes, or operator names with fake tensors; leave bytes.
"""

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
    query, key = args[1:3] if "backward" in name else args[0:2]
    assert isinstance(query, fx.Node) and isinstance(key, fx.Node)
    if query.meta["val"].device.type != "cpu":
        return 0  # it stands for another device's kernel
    return attention_scratch_bytes(name, query.meta["val"], key.meta["val"])


def attention_scratch_bytes(name: str, query: torch.Tensor, key: torch.Tensor) -> int:
    """Scratch of PyTorch's flash attention on a CPU: one tile of scores and one of results a thread."""
    q_size, head_dim, kv_size = hint(query.shape[2]), hint(query.shape[3]), hint(key.shape[2])
    threads = torch.get_num_threads()
    # aten/src/ATen/native/cpu/FlashAttentionKernel.cpp
    if "backward" in name:
        q_split, kv_split = min(q_size, 256 if q_size >= 512 else 64), min(kv_size, 512)
        return threads * 2 * q_split * kv_split * 4
    q_split = min(q_size, 256 if q_size >= 768 else (64 if q_size >= 192 else 32))
    kv_split = min(kv_size, 512)
    return threads * (q_split * kv_split + 2 * q_split + q_split * head_dim) * 4


def gpu_attention_scratch_bytes(name: str, query: torch.Tensor) -> int:
    """Scratch of attention's backward on a GPU, 0 for anything else: the gradient of the queries is summed up in fp32 before it is
    rounded, and so is one number a row, both in tiles of 128 rows."""
    if name not in _GPU_ATTENTION_GRAINS:
        return 0
    batch, heads, rows, width = (hint(size) for size in query.shape)
    grain = _GPU_ATTENTION_GRAINS[name]
    return batch * heads * (-(-rows // 128) * 128) * (-(-width // grain) * grain + 1) * 4
