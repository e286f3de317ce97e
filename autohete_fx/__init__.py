"""Train transformers that do not fit in device memory: ``torch.compile(model, backend="autohete")``.

Three lines change in a training script::

    import torch, autohete_fx
    optimizer = autohete_fx.AdamW(model.parameters(), lr=3e-4, weight_decay=0.1)
    model.compile(backend="autohete", options={"memory_budget": "20GiB"})
"""

from autohete_fx.compiler.compilation import Compilation, compilations
from autohete_fx.compiler.explain import explain
from autohete_fx.errors import (
    AutoHeteError,
    HostMemoryError,
    InfeasiblePlanError,
    IntegrationError,
    OptimizerStateError,
    OptionError,
    PassError,
    PlanError,
    ReportError,
    ShardError,
)
from autohete_fx.ir import Activations, BlockDecision, Optimizer, Params, Plan
from autohete_fx.optim import SGD, Adam, AdamW, Lion, Muon
from autohete_fx.runtime.meter import MemoryMeter
from autohete_fx.runtime.place import place
from autohete_fx.runtime.shard import gathered, shard

__version__ = "0.1.0"

__all__ = [
    "SGD",
    "Activations",
    "Adam",
    "AdamW",
    "AutoHeteError",
    "BlockDecision",
    "Compilation",
    "HostMemoryError",
    "InfeasiblePlanError",
    "IntegrationError",
    "Lion",
    "MemoryMeter",
    "Muon",
    "Optimizer",
    "OptimizerStateError",
    "OptionError",
    "Params",
    "PassError",
    "Plan",
    "PlanError",
    "ReportError",
    "ShardError",
    "compilations",
    "explain",
    "gathered",
    "place",
    "shard",
]
