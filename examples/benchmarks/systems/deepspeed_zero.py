"""DeepSpeed: ZeRO-Offload, ZeRO-3 with everything offloaded, SuperOffload and DeepCompile.

Configurations are those of its tutorials, with pinned memory: bf16 with the fp32 masters that ZeRO keeps, and its own CPU
Adam, which builds at the first use (a compiler, ninja, nvcc; ``DS_SKIP_CUDA_CHECK=1`` where nvcc is not exactly PyTorch's
CUDA). ZeRO-Offload's hooks are on gradients, so its blocks are compiled one by one; stage 3 has hooks on modules, where
DeepSpeed recommends ``engine.compile()``.
"""

import importlib
import logging
import os
from typing import Any, ClassVar

import torch
from torch import Tensor

from systems.base import (
    LEARNING_RATE,
    WEIGHT_DECAY,
    Case,
    CompiledByBlock,
    Shares,
    new_model,
    recompute_by_level,
    what_is_missing,
)
from systems.fsdp2 import start_one_rank

_HOST = {"device": "cpu", "pin_memory": True}


class ZeroOffload(CompiledByBlock):
    """Stage 2 with gradients, states and updates on the host."""

    zero: ClassVar[dict[str, Any]] = {
        "stage": 2,
        "offload_optimizer": _HOST,
        "contiguous_gradients": True,
        "overlap_comm": True,
    }
    compile: ClassVar[dict[str, Any]] = {}
    compiles_engine = False
    params_on_host = 0.0

    @classmethod
    def reason_against(cls, case: Case) -> str:
        return what_is_missing("deepspeed")

    def __init__(self, case: Case) -> None:
        super().__init__(case)
        os.environ.setdefault("DS_SKIP_CUDA_CHECK", "1")
        if case.dry:
            os.environ["DS_ACCELERATOR"] = "cpu"
        deepspeed = importlib.import_module("deepspeed")
        logging.getLogger("DeepSpeed").setLevel(logging.WARNING)
        start_one_rank("gloo" if case.dry else "nccl")
        cpu_adam = importlib.import_module("deepspeed.ops.adam").DeepSpeedCPUAdam
        where = case.device if self.zero["stage"] < 3 else "cpu"
        self.model = new_model(case, where, torch.bfloat16)
        if self.compiles_engine:
            recompute_by_level(self.model, self.level)
        else:
            self.prepare_blocks(self.model)
        self.optimizer = cpu_adam(self.model.parameters(), lr=LEARNING_RATE, weight_decay=WEIGHT_DECAY, adamw_mode=True)
        self.engine, *_ = deepspeed.initialize(model=self.model, optimizer=self.optimizer, config=self.config())
        if self.compiles_engine:
            self.engine.compile(backend=case.backend, compile_kwargs={"dynamic": False})

    def config(self) -> dict[str, Any]:
        """DeepSpeed's JSON."""
        return {
            "train_micro_batch_size_per_gpu": self.case.batch // self.case.micro_batches,
            "gradient_accumulation_steps": self.case.micro_batches,
            "gradient_clipping": 1.0 if self.case.clip else 0.0,
            "bf16": {"enabled": True},
            "zero_optimization": self.zero,
            "zero_allow_untested_optimizer": True,
            "steps_per_print": 1_000_000,
            **({"compile": self.compile} if self.compile else {}),
        }

    def loss_of(self, tokens: Tensor, targets: Tensor) -> Tensor:
        if self.compiles_engine:
            return self.engine(tokens, targets)
        return self._cross_entropy(self.engine(tokens), targets)

    def train(self, tokens: Tensor, targets: Tensor) -> Tensor:
        count = self.case.micro_batches
        losses = []
        for part, wanted in zip(tokens.chunk(count), targets.chunk(count), strict=True):
            loss = self.loss_of(part, wanted)
            self.engine.backward(loss)
            self.engine.step()
            losses.append(loss.detach())
        return torch.stack(losses).mean()

    def shares(self) -> Shares:
        return Shares(optimizer=1.0, params=self.params_on_host, recompute=self.recompute_share())


class Zero3(ZeroOffload):
    """Stage 3 with parameters on the host too."""

    zero: ClassVar[dict[str, Any]] = {
        "stage": 3,
        "offload_optimizer": _HOST,
        "offload_param": _HOST,
        "contiguous_gradients": True,
        "overlap_comm": True,
    }
    compiles_engine = True
    params_on_host = 1.0


class SuperOffload(ZeroOffload):
    """Stage 3 with speculative updates on the host during backward; settings of DeepSpeed's example for one GPU."""

    zero: ClassVar[dict[str, Any]] = {
        "stage": 3,
        "overlap_comm": False,
        "reduce_bucket_size": int(4e8),
        "sub_group_size": int(4e8),
        "offload_optimizer": {**_HOST, "ratio": 0.8, "super_offload": True, "cpuadam_cores_perc": 0.9},
    }
    compiles_engine = True


class DeepCompile(ZeroOffload):
    """Stage 3 as passes of a compiler, with optimizer states and masters offloaded between steps."""

    zero: ClassVar[dict[str, Any]] = {"stage": 3, "offload_optimizer": _HOST}
    compile: ClassVar[dict[str, Any]] = {"deepcompile": True}
    compiles_engine = True
