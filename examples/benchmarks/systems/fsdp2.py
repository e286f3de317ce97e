"""FSDP2: ``fully_shard`` on one rank with ``CPUOffloadPolicy``, set up as torchtitan does.

Parameters, gradients and AdamW's states are fp32 in pinned host memory; ``MixedPrecisionPolicy`` casts parameters to bf16 for
forward and backward, as its documentation describes mixed precision with fp32 masters. Each block is recomputed by level,
compiled, then sharded, in this order; the head keeps its parameters after forward; two blocks are prefetched both ways.
With several micro-batches, gradients wait on the device for the last one where they take less than 40% of the cap, else each
micro-batch adds its own on the host.
"""

import os
import socket
from contextlib import AbstractContextManager
from typing import Any, cast

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, OffloadPolicy, fully_shard

from systems.base import LEARNING_RATE, WEIGHT_DECAY, Case, CompiledByBlock, Shares, new_model

_PREFETCHED = 2


class Fsdp2(CompiledByBlock):
    """Everything on the host."""

    def __init__(self, case: Case) -> None:
        super().__init__(case)
        device = case.device.type
        start_one_rank(f"cpu:gloo,{device}:nccl" if device == "cuda" else "gloo")
        model = new_model(case, "cpu", torch.float32)
        model.cos, model.sin = model.cos.to(device), model.sin.to(device)
        self.prepare_blocks(model)
        # On a CPU device there is nothing to offload from.
        policy = CPUOffloadPolicy() if device == "cuda" else OffloadPolicy()
        how = {
            "mesh": init_device_mesh(device, (1,)),
            "mp_policy": MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32),
            "offload_policy": policy,
        }
        fully_shard(model.embedding, **how)
        for layer in model.layers:
            fully_shard(layer, **how)
        fully_shard([model.norm, model.head], **how, reshard_after_forward=False)
        fully_shard(model, **how)
        layers = cast("list[Any]", list(model.layers))  # fully_shard changes their class
        for index, layer in enumerate(layers):
            layer.set_modules_to_forward_prefetch(layers[index + 1 : index + 1 + _PREFETCHED])
            layer.set_modules_to_backward_prefetch(layers[max(0, index - _PREFETCHED) : index][::-1])
        self.model = model
        self.optimizer = torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE, weight_decay=WEIGHT_DECAY, fused=True)
        gradient_bytes = 4 * sum(p.numel() for p in model.parameters())
        cap = case.cap_bytes or (torch.cuda.mem_get_info()[1] if device == "cuda" else gradient_bytes * 4)
        self._holds_gradients = gradient_bytes < 0.4 * cap

    def micro_batch(self, *, is_last: bool) -> AbstractContextManager[None]:
        if self._holds_gradients:
            self.model.set_requires_gradient_sync(is_last)
        return super().micro_batch(is_last=is_last)

    def shares(self) -> Shares:
        return Shares(optimizer=1.0, params=1.0, recompute=self.recompute_share())


def start_one_rank(backend: str) -> None:
    """A process group of this process alone."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port), RANK="0", LOCAL_RANK="0", WORLD_SIZE="1")
    dist.init_process_group(backend, rank=0, world_size=1)
