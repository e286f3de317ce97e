"""Garbage around Dynamo: whether its trace under way refers to objects of the program, and collecting what old traces keep.

In: nothing; the trace is of this thread. Out: whether it keeps objects of the program, which old traces then keep too.
"""

import contextlib
import gc
from collections.abc import Collection
from typing import Any

import torch


def collect() -> None:
    """All garbage, unless `without_collection` or the user's configuration of Dynamo says otherwise."""
    from torch._dynamo import config

    if config.run_gc_after_compile:
        gc.collect()


def without_collection() -> contextlib.AbstractContextManager[None]:
    """A context in which neither Dynamo nor we look for garbage after code was compiled."""
    from torch._dynamo import config

    return config.patch(run_gc_after_compile=False)


def traces_objects() -> bool:
    """Whether what Dynamo traces in this thread refers to objects that were there before and may go before it.

    Modules, what they refer to and what globals refer to stay. Attributes that the trace sets show which of these may be replaced,
    such as the weight that ``torch.nn.utils.weight_norm`` computes in each call.
    """
    from torch._dynamo.symbolic_convert import tls

    translator = getattr(tls, "current_tx", None)
    if translator is None:
        return False
    effects = translator.output.side_effects
    return any(_may_go(each, effects.store_attr_mutations.get(each, ())) for each in effects.id_to_variable.values())


def _may_go(variable: Any, names: Collection[str]) -> bool:
    """Whether an object of the program may, or tensors that it refers to, of which the trace sets the attributes named."""
    from torch._dynamo.source import is_from_local_source, is_from_unspecialized_nn_module_source
    from torch._dynamo.variables import UnspecializedNNModuleVariable, UserDefinedObjectVariable

    if isinstance(variable, UnspecializedNNModuleVariable):
        own = vars(variable.value)
        kept = (own.get(name, own.get("_buffers", {}).get(name)) for name in names)
        return any(isinstance(each, torch.Tensor | list | tuple | dict) for each in kept)
    source = variable.source if isinstance(variable, UserDefinedObjectVariable) else None
    if source is None or not is_from_local_source(source):
        return False
    return bool(names) or not is_from_unspecialized_nn_module_source(source)
