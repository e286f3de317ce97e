"""The systems that `gpu_suite.py` compares: one a file, each set up as its own documentation recommends.

In: a `Case`. Out: a `System`, whose ``train`` takes one optimizer step. A module is imported only when its system is asked
for, so that what one of them lacks is no concern of the others.
"""

import importlib

from systems.base import CannotRun, Case, System

__all__ = ["OURS", "SYSTEMS", "CannotRun", "Case", "System", "system_class"]

SYSTEMS = {
    "ours": "ours:Ours",
    "ours-backward": "ours:OursFromBackward",
    "fsdp2": "fsdp2:Fsdp2",
    "torchao": "cpu_offload_optimizer:CpuOffloadOptimizer",
    "compile": "compiled:Compiled",
    "compile-autocast": "compiled:CompiledUnderAutocast",
    "memory-budget": "compiled:MemoryBudget",
    "zero-offload": "deepspeed_zero:ZeroOffload",
    "zero-3": "deepspeed_zero:Zero3",
    "super-offload": "deepspeed_zero:SuperOffload",
    "deepcompile": "deepspeed_zero:DeepCompile",
}
"""Module and class by the name that rows show."""

OURS = ("ours", "ours-backward")


def system_class(name: str) -> type[System]:
    """The class of a system. Raises ImportError where a package of it is missing."""
    module, _, member = SYSTEMS[name].partition(":")
    return getattr(importlib.import_module(f"systems.{module}"), member)
