"""Captures what grouping gets: joint graphs as Inductor's custom partitioner sees them, and inference graphs."""

import contextlib
import copy
import warnings
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx
from torch._functorch.partitioners import default_partition
from torch._inductor.compile_fx import compile_fx
from torch._inductor.custom_graph_pass import CustomPartitionerFn

from autohete_fx.capture.assign import check_order
from autohete_fx.capture.dataflow import split_joint
from autohete_fx.capture.grouping import block_index, group_blocks
from autohete_fx.capture.inputs import graph_inputs, parameter_fqns
from autohete_fx.ir import Block, BlockGraph, BlockKind


@dataclass(frozen=True)
class Captured:
    """A copy of one graph and its placeholders' parameter names."""

    graph: fx.GraphModule
    param_fqns: dict[str, str]

    def grouped(self) -> BlockGraph:
        """The graph's blocks."""
        return group_blocks(self.graph, self.param_fqns)


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Without PyTorch's warnings about itself: a function that it has deprecated, what Dynamo reads at graph breaks."""
    with warnings.catch_warnings():
        warnings.filterwarnings(
            "ignore", message=r"The \.grad attribute of a Tensor that is not a leaf", category=UserWarning
        )
        warnings.filterwarnings("ignore", message=".*LeafSpec.*", category=FutureWarning)
        yield


def copied(graph: fx.GraphModule) -> fx.GraphModule:
    """The graph as it is now; its nodes' metadata are shared."""
    with _quiet():
        return fx.GraphModule(graph, copy.deepcopy(graph.graph))


class _Capture(CustomPartitionerFn):
    """Keeps the joint graph; what becomes of it matters to nobody, so it is split in the cheapest way."""

    def __init__(self, keep: Callable[[fx.GraphModule], None]) -> None:
        self.keep = keep

    def __call__(self, gm: fx.GraphModule, joint_inputs: Any, **kwargs: Any) -> tuple[fx.GraphModule, fx.GraphModule]:
        self.keep(gm)
        kwargs.pop("compiler", None)
        return default_partition(gm, joint_inputs, **kwargs)

    def uuid(self) -> None:
        return None


def capture(step: Callable[..., Any], *args: Any, dynamic: bool = False, in_place: bool = False) -> list[Captured]:
    """Compile ``step`` (a function or a module) and call it once; every graph on the way, nothing compiled by Inductor.

    Under ``torch.no_grad()`` these are the inference graphs. ``in_place`` uses ``step.compile()``.
    """
    captured: list[Captured] = []

    def backend(gm: fx.GraphModule, example_inputs: list[Any]) -> Any:
        inputs = graph_inputs(gm, example_inputs)

        def keep(graph: fx.GraphModule) -> None:
            captured.append(Captured(copied(graph), parameter_fqns(graph, inputs)))

        def inner(graph: fx.GraphModule, _inputs: Any, **kwargs: Any) -> Any:
            if kwargs.get("is_inference"):
                keep(graph)
            return graph.forward

        return compile_fx(
            gm, example_inputs, inner_compile=inner, config_patches={"custom_partitioner_fn": _Capture(keep)}
        )

    torch._dynamo.reset()
    with _quiet():
        if in_place:
            assert isinstance(step, torch.nn.Module)
            step.compile(backend=backend, dynamic=dynamic)
            step(*args)
        else:
            torch.compile(step, backend=backend, dynamic=dynamic)(*args)
    return captured


def capture_one(step: Callable[..., Any], *args: Any, **kwargs: Any) -> Captured:
    """The only graph of ``step``."""
    captured = capture(step, *args, **kwargs)
    assert len(captured) == 1, f"{len(captured)} graphs"
    return captured[0]


def layers(graph: BlockGraph) -> list[Block]:
    """The blocks that are layers."""
    return [block for block in graph.blocks if block.kind is BlockKind.LAYER]


def assert_sound(captured: Captured) -> BlockGraph:
    """What holds for every grouping: a partition in execution order, made the same way twice."""
    graph = captured.grouped()
    assert captured.grouped() == graph
    joint = split_joint(captured.graph)
    index = block_index(graph)
    seen = Counter(name for block in graph.blocks for name in (*block.forward_nodes, *block.backward_nodes))
    expected = [node for node in captured.graph.graph.nodes if node.op not in ("placeholder", "output")]
    assert seen == Counter(node.name for node in expected)
    check_order(joint, {node: index[node.name] for node in expected})
    assert [block.index for block in graph.blocks] == list(range(len(graph.blocks)))
    assert all(block.forward_nodes or block.backward_nodes for block in graph.blocks)
    assert {name for block in graph.blocks for name in block.forward_nodes} == {node.name for node in joint.forward}
    placed = [fqn for block in graph.blocks for fqn in block.param_fqns]
    assert Counter(placed) == Counter(set(captured.param_fqns.values()))
    assert all(edge.producer < edge.consumer and edge.num_bytes > 0 for edge in graph.edges)
    return graph


def strip(captured: Captured, *keys: str) -> Captured:
    """The same graph without some of its nodes' metadata."""
    graph = copied(captured.graph)
    for node in graph.graph.nodes:
        for key in keys:
            node.meta.pop(key, None)
    return Captured(graph, captured.param_fqns)
