"""Which module a training loop calls to train the parameters of an optimizer.

In: an optimizer, when it is made. Out: the modules that hold all of its parameters. The first one of them that the loop calls
with gradients enabled is the one to compile: modules within it are then called by it. A module that holds only a part is never
compiled. A loop over the layers of a model would otherwise be compiled layer by layer, outside of any budget.
"""

import gc
from collections.abc import Iterable

import torch
from torch import Tensor, nn

from autohete_fx.internals import modules as calls
from autohete_fx.internals.modules import is_wrapper_of_dynamo


def trained_by(optimizer: torch.optim.Optimizer) -> list[Tensor]:
    """The parameters that it changes; all of them where none requires a gradient yet."""
    params = [p for group in optimizer.param_groups for p in group["params"]]
    return [p for p in params if p.requires_grad] or params


def holders_of(params: Iterable[Tensor]) -> list[nn.Module]:
    """The modules of this process, alive now, that hold all of these parameters."""
    needed = set(map(id, params))
    return [module for module in _modules() if needed and needed <= set(map(id, module.parameters()))]


def has_sparse_gradients(optimizer: torch.optim.Optimizer) -> bool:
    """Whether a table among its parameters is one that gets sparse gradients."""
    params = set(map(id, trained_by(optimizer)))
    tables = (module for module in _modules() if isinstance(module, nn.Embedding | nn.EmbeddingBag) and module.sparse)
    return any(id(table.weight) in params for table in tables)


def _modules() -> list[nn.Module]:
    # A class tells no lies about itself, as `isinstance` lets proxies do.
    found = [each for each in gc.get_objects() if issubclass(type(each), nn.Module)]
    return [module for module in found if {"_parameters", "_modules"} <= vars(module).keys()]


def name_of(module: nn.Module) -> str:
    """Its class, and the place of that where it is not the script's own."""
    kind = type(module)
    return kind.__qualname__ if kind.__module__ == "__main__" else f"{kind.__module__}.{kind.__qualname__}"


def compiled_in(module: nn.Module, known: Iterable[nn.Module]) -> str:
    """Which part of the module somebody else compiles, as the end of a sentence; empty where nobody does. ``known``: those whose
    calls are ours."""
    ours = set(map(id, known))
    for each in module.modules():
        if is_wrapper_of_dynamo(each) or (calls.before_call(each) is not None and id(each) not in ours):
            return (
                "the script compiles it itself" if each is module else f"the script compiles its {type(each).__name__}"
            )
    return ""


def refused(module: nn.Module) -> str:
    """Why a module cannot be compiled in its place, as the end of a sentence; empty where it can."""
    if isinstance(module, nn.DataParallel):
        return "nn.DataParallel copies it to several devices at each call"
    return ""


def is_transparent(module: nn.Module) -> bool:
    """Whether the module only wraps one that is to be compiled inside it, as DistributedDataParallel does."""
    return type(module).__name__ == "DistributedDataParallel"
