"""Train transformers that do not fit in device memory: ``torch.compile(model, backend="autohete")``.

Three lines change in a training script::

    import torch, autohete_fx
    optimizer = autohete_fx.AdamW(model.parameters(), lr=3e-4, weight_decay=0.1)
    model.compile(backend="autohete", options={"memory_budget": "20GiB"})

Importing this package imports next to nothing: each name brings its module when it is first asked for. PyTorch imports it whenever
it is installed, to register the names that ``TORCH_LOGS`` may have (`autohete_fx.internals.logs`).
"""

import importlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from autohete_fx.compiler.compilation import Compilation, compilations
    from autohete_fx.compiler.preview import preview
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
    "gathered",
    "place",
    "preview",
    "shard",
]

_HOMES = {
    "compiler.compilation": "Compilation compilations",
    "compiler.preview": "preview",
    "errors": (
        "AutoHeteError HostMemoryError InfeasiblePlanError IntegrationError OptimizerStateError OptionError PassError PlanError"
        " ReportError ShardError"
    ),
    "ir": "Activations BlockDecision Optimizer Params Plan",
    "optim": "SGD Adam AdamW Lion Muon",
    "runtime.meter": "MemoryMeter",
    "runtime.place": "place",
    "runtime.shard": "gathered shard",
}
"""Modules of this package, and the public names that each has."""
_HOME_OF = {name: module for module, names in _HOMES.items() for name in names.split()}


def __getattr__(name: str) -> object:
    """A public name, or a module of this package, which is imported now."""
    if name in _HOME_OF:
        value: object = getattr(importlib.import_module(f"{__name__}.{_HOME_OF[name]}"), name)
        globals()[name] = value
        return value
    if not name.startswith("_"):
        try:
            return importlib.import_module(f"{__name__}.{name}")
        except ModuleNotFoundError as error:
            if error.name != f"{__name__}.{name}":
                raise
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
