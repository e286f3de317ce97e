"""The entries of Inductor's configuration that call back into one compilation: a partitioner and a last pass."""

from collections.abc import Callable, Sequence
from typing import Any

from torch import fx
from torch._functorch import config as functorch_config
from torch._inductor import config as inductor_config
from torch._inductor.codecache import CppCodeCache
from torch._inductor.compile_fx import compile_fx, compile_fx_inner
from torch._inductor.custom_graph_pass import CustomGraphPass, CustomPartitionerFn
from torch._inductor.exc import InductorError
from torch._inductor.fx_passes.control_dependencies import preserve_node_ordering

from autohete_fx.errors import OptionError
from autohete_fx.internals import versions

__all__ = [
    "CppCodeCache",
    "InductorError",
    "LastPass",
    "Partitioner",
    "compile_fx",
    "compile_fx_inner",
    "preserve_node_ordering",
    "refuse_other_partitioner",
    "run_without_code",
]


def refuse_other_partitioner() -> None:
    """Raise OptionError where the user has set a partitioner: the plan needs its own, and theirs would never run."""
    theirs = inductor_config.custom_partitioner_fn
    if theirs is not None:
        raise OptionError(
            f"torch._inductor.config.custom_partitioner_fn is {theirs!r}, but the autohete backend partitions the graph"
            " itself; set it to None for this model, or run autohete_fx.passes in a backend of your own"
        )


class _SharedByCopies:
    """Inductor deep-copies its configuration, and pickles it for cache keys: this is one object, and its key its uuid."""

    def __init__(self, key: str) -> None:
        self._key = key

    def __deepcopy__(self, memo: object) -> "_SharedByCopies":
        return self

    def __reduce__(self) -> tuple[Callable[[object], str], tuple[str]]:
        return str, (self._key,)

    def uuid(self) -> str:
        """Part of every cache key."""
        return self._key


class Partitioner(_SharedByCopies, CustomPartitionerFn):
    """Inductor's ``custom_partitioner_fn``."""

    def __init__(self, partition: Callable[..., tuple[fx.GraphModule, fx.GraphModule]], key: str) -> None:
        super().__init__(key)
        self._partition = partition

    def __call__(
        self, gm: fx.GraphModule, joint_inputs: Sequence[object], **kwargs: Any
    ) -> tuple[fx.GraphModule, fx.GraphModule]:
        return self._partition(gm, joint_inputs, **kwargs)


class LastPass(_SharedByCopies, CustomGraphPass):
    """Inductor's ``post_grad_custom_post_pass``: runs what the user had set there, then ours."""

    def __init__(
        self, pin: Callable[[fx.Graph], None], key: str, user_passes: Sequence[Callable[[fx.Graph], None]]
    ) -> None:
        super().__init__(key)
        self._pin = pin
        self._user_passes = user_passes

    def __call__(self, graph: fx.Graph) -> None:
        for user_pass in self._user_passes:
            user_pass(graph)
        self._pin(graph)


def run_without_code(
    gm: fx.GraphModule,
    example_inputs: Sequence[Any],
    partitioner: Partitioner,
    inference_pass: Callable[[fx.GraphModule], object] | None = None,
) -> Callable[..., object]:
    """Inductor's pipeline up to where code would be generated: its joint passes, our partitioner, graphs that run as they are."""

    def run_as_is(graph: fx.GraphModule, inputs: Sequence[Any], **keywords: Any) -> Any:
        if keywords.get("is_inference") and inference_pass is not None:
            inference_pass(graph)
        return versions.run_as_is(graph, inputs)

    patches = {"custom_partitioner_fn": partitioner}
    with functorch_config.patch(enable_autograd_cache=False):
        compiled: Any = compile_fx(gm, list(example_inputs), inner_compile=run_as_is, config_patches=patches)
    return compiled
