"""Differences between the supported versions of PyTorch, 2.11 to 2.15, or is theirs alone."""

import contextlib
import datetime
import functools
import importlib
import inspect
import sys
from collections.abc import Callable, Iterable, Sequence
from types import ModuleType
from typing import Any

import torch
import torch._functorch.config
from torch import fx
from torch.fx.graph import _BoxedCodeGen


def custom_passes(configured: object) -> tuple[Callable[[fx.Graph], None], ...]:
    """The passes in one of Inductor's custom pass options, as a tuple: 2.13 allows sequences, 2.11 one pass."""
    if configured is None:
        return ()
    return tuple(configured) if isinstance(configured, list | tuple) else (configured,)  # type: ignore[return-value]


def run_as_is(graph: fx.GraphModule, inputs: Sequence[object]) -> Callable[[list[object]], object]:
    """A graph that runs node by node, each value freed after its last use."""
    graph.graph.set_codegen(_BoxedCodeGen())
    graph.recompile()

    def run(args: list[object]) -> object:
        return graph(args)

    run._boxed_call = True  # type: ignore[attr-defined]
    return run


def aot_eager(
    gm: fx.GraphModule,
    example_inputs: Sequence[object],
    *,
    partition_fn: Callable[..., tuple[fx.GraphModule, fx.GraphModule]],
    inference_pass: Callable[[fx.GraphModule], object],
) -> Callable[..., object]:
    """AOTAutograd with graphs that run as they are."""
    from torch._dynamo.backends.common import aot_autograd

    def infer(graph: fx.GraphModule, inputs: Sequence[object]) -> Callable[[list[object]], object]:
        inference_pass(graph)
        return run_as_is(graph, inputs)

    backend: Any = aot_autograd(
        fw_compiler=run_as_is, bw_compiler=run_as_is, inference_compiler=infer, partition_fn=partition_fn
    )
    return backend(gm, list(example_inputs))


def compile_apart(function: Callable[..., object], backend: Callable[..., object]) -> Callable[..., object]:
    """``torch.compile``, with its results kept apart from those of other calls for the same code.

    They do not count towards each other's limit of recompilations.

    2.11 and 2.12 keep compiled code with the code of a function. There a function with code of its own calls it.
    """
    if "isolate_recompiles" in inspect.signature(torch.compile).parameters:
        apart: dict[str, Any] = {"isolate_recompiles": True}  # of which the overloads do not know
        return torch.compile(function, backend=backend, **apart)

    def call(*args: object, **kwargs: object) -> object:
        return function(*args, **kwargs)

    call.__code__ = call.__code__.replace()
    return torch.compile(call, backend=backend)


def around_backward(outputs: object, around: Callable[..., object]) -> None:
    """From now on, run the compiled backward of what a compiled forward returned as ``around(backward, *args)``.

    AOTAutograd makes an autograd function of each forward that it compiles, and looks up on it what runs the backward.
    """
    for output in outputs if isinstance(outputs, list | tuple) else (outputs,):
        function = getattr(getattr(output, "grad_fn", None), "_forward_cls", None)
        backward = getattr(function, "_backward_impl", None)
        if function is None or backward is None:
            continue
        if not hasattr(backward, "_autohete_is_around"):
            run = functools.wraps(backward)(functools.partial(around, backward))
            run._autohete_is_around = True  # type: ignore[attr-defined]
            function._backward_impl = staticmethod(run)
        return


def is_graph_kept() -> bool:
    """Whether the backward pass that runs leaves its graph for another one: ``retain_graph=True`` or ``create_graph=True``."""
    autograd: Any = getattr(torch._C, "_autograd")  # noqa: B009  (of which the stubs do not know)
    return autograd._get_current_graph_task_keep_graph()


def is_early_stop(error: BaseException) -> bool:
    """Whether this ends what ``torch.utils.checkpoint`` computes again, as soon as all is there that a backward needs."""
    from torch.utils import checkpoint

    return isinstance(error, getattr(checkpoint, "_StopRecomputationError", ()))


def keep_saved(node: Any, arguments: list[Any]) -> contextlib.AbstractContextManager[None]:
    """Around a compiled backward whose graph is kept: it writes over copies of what it was compiled to write over.

    AOTAutograd compiles backward at its first run, and by then knows whether it may. One that was compiled before, it refuses.

    Args:
        node: of the compiled forward, which has saved tensors for it.
        arguments: of the backward, among which copies are put.
    """
    for at in node._forward_cls.metadata.bw_donated_idxs or ():
        t = arguments[at]
        own = t.untyped_storage().clone()
        arguments[at] = t.new_empty(0).set_(own, t.storage_offset(), t.shape, t.stride())
    return torch._functorch.config.patch(donated_buffer=False)


def gradients_given(node: Any, arguments: Sequence[Any]) -> list[torch.Tensor]:
    """The gradients of what a compiled forward returned, among the arguments of its backward.

    Args:
        node: of the compiled forward.
        arguments: saved tensors, and these gradients last.
    """
    count = len(node._forward_cls.metadata.traced_tangents_descs)
    return [each for each in arguments[len(arguments) - count :] if isinstance(each, torch.Tensor)]


def ddp_bucket_bytes() -> int | None:
    """Bytes of the buckets into which the DistributedDataParallel that runs now copies gradients; None where none runs."""
    from torch.nn.parallel import DistributedDataParallel

    ddp: Any = DistributedDataParallel._get_active_ddp_module()
    if ddp is None:
        return None
    named = ddp.module.named_parameters()
    return sum(p.nbytes for name, p in named if p.requires_grad and name not in ddp.parameters_to_ignore)


def is_of_fsdp(placeholder: fx.Node) -> bool:
    """Whether an input of Dynamo's graph is a parameter of a module that FSDP manages."""
    source = getattr(placeholder, "_dynamo_source", None)
    guard_source: Any = getattr(source, "guard_source", None)
    if callable(guard_source):
        guard_source = guard_source()
    return guard_source is not None and guard_source.is_fsdp_module()


def has_fsdp(modules: Iterable[torch.nn.Module]) -> bool:
    """Whether FSDP manages any of the modules, or one below them."""
    fsdp = sys.modules.get("torch.distributed.fsdp")  # without it there is none
    return fsdp is not None and any(isinstance(m, fsdp.FSDPModule) for module in modules for m in module.modules())


def input_index(description: object) -> int | None:
    """The place among Dynamo's inputs of the one that a placeholder of AOTAutograd's stands for.

    A placeholder may stand for a DTensor's local tensor. None for any other.
    """
    if type(description).__name__ == "SubclassGetAttrAOTInput" and getattr(description, "attr", "") == "_local_tensor":
        description = getattr(description, "base", None)
    index = getattr(description, "idx", None)
    return index if type(description).__name__ == "PlainAOTInput" and isinstance(index, int) else None


def gradient_index(description: object) -> int | None:
    """The place among Dynamo's inputs of the one that an output of AOTAutograd's backward is the gradient of.

    The output may be the local tensor of its gradient. None for any other.
    """
    if type(description).__name__ == "SubclassGetAttrAOTOutput" and getattr(description, "attr", "") == "_local_tensor":
        description = getattr(description, "base", None)
    index = getattr(getattr(description, "grad_of", None), "idx", None)
    return index if isinstance(index, int) else None


def is_dtensor(tensor: object) -> bool:
    """Whether it is a part of a tensor that several ranks hold together."""
    module = sys.modules.get("torch.distributed.tensor")  # without it there is none
    return module is not None and isinstance(tensor, module.DTensor)


@functools.cache
def backward_holds_arguments() -> bool:
    """Whether AOTAutograd keeps the gradients of outputs that a backward is given until it has returned, as 2.11 does.

    Later ones release them after their last use.
    """
    from torch._functorch._aot_autograd import runtime_wrappers

    return not hasattr(runtime_wrappers, "_codegen_backward_prologue")


ALL_GATHER = ("all_gather_single", "all_gather_into_tensor")
REDUCE_SCATTER = ("reduce_scatter_single", "reduce_scatter_tensor")
"""Names of collectives in ``torch.distributed``: since 2.13, and before."""


def named(module: Any, names: tuple[str, ...]) -> Callable[..., Any]:
    """The function that a module has under the first of these names that it knows."""
    return next(getattr(module, name) for name in names if hasattr(module, name))


def coalescing(group: Any) -> Any:
    """A context in which collectives of one kind over a process group become one; it has ``works``, to wait for. Each is given
    ``async_op=True``."""
    from torch.distributed import distributed_c10d

    return distributed_c10d._coalescing_manager(group=group, async_ops=True)


def size_of_group(name: str) -> int:
    """How many ranks a process group has, by the name that functional collectives carry."""
    from torch.distributed import distributed_c10d

    resolve: Any = distributed_c10d._resolve_process_group  # pyright: ignore[reportPrivateImportUsage]
    return resolve(name).size()


def fsspec_filesystem() -> ModuleType:
    """PyTorch's readers and writers of checkpoints through fsspec: a public module since 2.15."""
    try:
        return importlib.import_module("torch.distributed.checkpoint.fsspec_filesystem")
    except ModuleNotFoundError:
        return importlib.import_module("torch.distributed.checkpoint._fsspec_filesystem")


def timeout_of(group: Any, device_type: str) -> datetime.timedelta:
    """How long a collective of a process group may take on tensors of a device."""
    return group._get_backend(torch.device(device_type)).options._timeout
