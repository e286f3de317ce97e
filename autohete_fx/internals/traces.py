"""Objects that Dynamo's trace under way refers to.

In: nothing; the trace is of this thread. Out: whether it keeps objects of the program, which old traces then keep too.
"""


def traces_objects() -> bool:
    """Whether what Dynamo traces in this thread refers to objects that were there before and may go before it.

    Modules, what they refer to and what globals refer to stay. Attributes that the trace sets show which of these may be replaced.
    """
    from torch._dynamo.source import is_from_local_source, is_from_unspecialized_nn_module_source
    from torch._dynamo.symbolic_convert import tls
    from torch._dynamo.variables import UnspecializedNNModuleVariable, UserDefinedObjectVariable

    translator = getattr(tls, "current_tx", None)
    if translator is None:
        return False
    effects = translator.output.side_effects
    return any(
        isinstance(each, UserDefinedObjectVariable)
        and not isinstance(each, UnspecializedNNModuleVariable)
        and each.source is not None
        and is_from_local_source(each.source)
        and (each in effects.store_attr_mutations or not is_from_unspecialized_nn_module_source(each.source))
        for each in effects.id_to_variable.values()
    )
