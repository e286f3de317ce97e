"""Seconds of one graph, run by itself: in comes a graph with fake values, out comes how long the compiled code takes on real ones.

This happens in the middle of a compilation, of which neither the graph nor the random numbers may learn.
"""

import contextlib
import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import fx

from autohete_fx.graph.sizes import hint
from autohete_fx.internals.modes import compile_context, disable_current_modes, tracing

CompileGraph = Callable[[fx.GraphModule, Sequence[torch.Tensor]], Callable[[list[Any]], Any]]
"""A graph and its fake inputs to something that runs it on a list of real ones."""

_MAX_RUNS = 25
_MIN_RUNS = 3
_RUN_LIMIT_S = 0.4


def compile_inductor(graph_module: fx.GraphModule, inputs: Sequence[torch.Tensor]) -> Callable[[list[Any]], Any]:
    """Compile with Inductor, without the passes that the surrounding compilation has installed."""
    from autohete_fx.internals.configs import inductor_config as config
    from autohete_fx.internals.inductor import compile_fx_inner

    with config.patch({"post_grad_custom_post_pass": None, "post_grad_custom_pre_pass": None}):
        return compile_fx_inner(graph_module, list(inputs), is_inference=False)


def compile_eager(graph_module: fx.GraphModule, inputs: Sequence[torch.Tensor]) -> Callable[[list[Any]], Any]:
    """Run node by node."""
    graph_module.recompile()
    return lambda args: graph_module(*args)


@contextlib.contextmanager
def outside_tracing() -> Iterator[None]:
    """Real tensors and a compiler state of our own, although the caller is in the middle of a compilation.

    Random state is put back: what a model draws must not depend on whether it was timed.
    """
    with (
        disable_current_modes(),
        tracing(None),
        compile_context(None),
        torch.no_grad(),
        torch.random.fork_rng(devices=range(torch.cuda.device_count())),
    ):
        yield


def input_device(node: fx.Node) -> torch.device:
    """Where a placeholder's value really is.

    The seed of memory-efficient attention's dropout is on the CPU, whatever the fake says. Launching its backward reads it
    there, and a pointer to the device would end the process.
    """
    value = node.meta["val"]
    is_seed = any("efficient_attention_backward" in str(user.target) for user in node.users) and not value.shape
    return torch.device("cpu") if is_seed else value.device


def integer_results(graph_module: fx.GraphModule) -> dict[int, fx.Node]:
    """Those that may say how much there is to do, by place among the results; masks do not."""
    [results] = graph_module.graph.output_node().args
    assert isinstance(results, tuple)
    nodes = {index: node for index, node in enumerate(results) if isinstance(node, fx.Node)}
    dtypes = {index: node.meta["val"].dtype for index, node in nodes.items()}
    return {i: nodes[i] for i, d in dtypes.items() if not (d.is_floating_point or d.is_complex or d == torch.bool)}


def real_input(value: torch.Tensor, device: torch.device, known: torch.Tensor | None = None) -> torch.Tensor:
    """A tensor like a fake one: with the values of ``known``, else floats random, integers and booleans zero, so that every
    index is valid."""
    sizes, strides = [hint(s) for s in value.shape], [hint(s) for s in value.stride()]
    extent = 0 if 0 in sizes else 1 + sum((n - 1) * s for n, s in zip(sizes, strides, strict=True))
    memory = torch.zeros(extent, dtype=value.dtype, device=device)
    tensor = memory.as_strided(sizes, strides)
    if known is not None:
        tensor.copy_(known)
    elif value.dtype.is_floating_point:
        memory.uniform_(-1.0, 1.0)
    return tensor


def computing_device(graph_module: fx.GraphModule) -> torch.device:
    """The accelerator that a graph has inputs on; the CPU where there is none."""
    values = (node.meta["val"] for node in graph_module.graph.find_nodes(op="placeholder"))
    devices = (value.device for value in values if isinstance(value, torch.Tensor))
    return next((device for device in devices if device.type != "cpu"), torch.device("cpu"))


def _synchronize(device: torch.device) -> None:
    if device.type != "cpu":
        torch.accelerator.synchronize(device)


class TimedGraph:
    """A graph that was compiled to be timed: once when it is made, and again at any later time.

    Attributes:
        run: the compiled code.
        best_s: seconds of one run.
    """

    def __init__(self, graph_module: fx.GraphModule, compile_graph: CompileGraph) -> None:
        placeholders = [node for node in graph_module.graph.nodes if node.op == "placeholder"]
        self._inputs = {node.name: (node.meta["val"], input_device(node)) for node in placeholders}
        self._integers = {index: node.name for index, node in integer_results(graph_module).items()}
        self._device = computing_device(graph_module)
        self.best_s = float("inf")
        with outside_tracing():
            self.run = compile_graph(graph_module, self.fakes)

    @property
    def fakes(self) -> list[torch.Tensor]:
        """The inputs that it was compiled for."""
        return [value for value, _ in self._inputs.values()]

    def time(self, known: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """Run it for a while. Others on the machine only ever slow a run down, so a quick quarter of the runs counts,
        and of several whiles the best.

        Integers may decide what takes time, such as how many tokens an expert gets. ``known`` are those that the block's
        forward computes, by name, and its own are returned.
        """
        with outside_tracing():
            inputs = [real_input(value, device, known.get(name)) for name, (value, device) in self._inputs.items()]
            seconds: list[float] = []
            results = self.run(list(inputs))
            computed = {name: results[index] for index, name in self._integers.items()}
            del results  # most of the memory, beside which the next runs would stand
            started = time.perf_counter()
            while len(seconds) < _MIN_RUNS or (
                len(seconds) < _MAX_RUNS and time.perf_counter() - started < _RUN_LIMIT_S
            ):
                _synchronize(self._device)
                begun = time.perf_counter()
                self.run(list(inputs))
                _synchronize(self._device)
                seconds.append(time.perf_counter() - begun)
        self.best_s = min(self.best_s, statistics.quantiles(seconds)[0])
        return computed
