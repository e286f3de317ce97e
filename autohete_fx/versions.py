"""Everything that differs between the supported versions of PyTorch, 2.11 to 2.13."""

from collections.abc import Callable, Sequence
from typing import Any

from torch import fx
from torch.fx.graph import _BoxedCodeGen


def custom_passes(configured: object) -> tuple[Callable[[fx.Graph], None], ...]:
    """What stands in one of Inductor's custom pass options, as a tuple: 2.13 allows sequences, 2.11 one pass."""
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
