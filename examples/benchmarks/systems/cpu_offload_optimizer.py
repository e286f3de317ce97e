"""torchao's ``CPUOffloadOptimizer`` over ``torch.optim.AdamW(fused=True)``.

Its states have the dtype of the parameters, and its README recommends parameters in bf16, which would train without fp32
masters. To train alike, parameters are fp32 here and run under bf16 autocast. As its README says: blocks are compiled one by
one, so that gradients leave during backward; gradients are freed on the device as they leave, which excludes accumulation;
there is no clipping.
"""

import importlib

import torch
from torch import Tensor

from systems.base import (
    LEARNING_RATE,
    WEIGHT_DECAY,
    CannotRun,
    Case,
    CompiledByBlock,
    Shares,
    new_model,
    what_is_missing,
)


class CpuOffloadOptimizer(CompiledByBlock):
    """Optimizer states and gradients on the host."""

    @classmethod
    def reason_against(cls, case: Case) -> str:
        return "torchao's CPUOffloadOptimizer does not support clipping" if case.clip else what_is_missing("torchao")

    def __init__(self, case: Case) -> None:
        super().__init__(case)
        optimizer_class = importlib.import_module("torchao.optim").CPUOffloadOptimizer
        if case.device.type != "cuda":
            raise CannotRun("torchao's CPUOffloadOptimizer supports CUDA and XPU devices only")
        self.model = new_model(case, case.device, torch.float32)
        self.prepare_blocks(self.model)
        self.optimizer = optimizer_class(
            self.model.parameters(),
            torch.optim.AdamW,
            offload_gradients=case.micro_batches == 1,
            fused=True,
            lr=LEARNING_RATE,
            weight_decay=WEIGHT_DECAY,
        )

    def loss_of(self, tokens: Tensor, targets: Tensor) -> Tensor:
        with torch.autocast(self.case.device.type, torch.bfloat16):
            return super().loss_of(tokens, targets)

    def shares(self) -> Shares:
        return Shares(optimizer=1.0, recompute=self.recompute_share())
