"""Which saved tensors can leave for host memory: the rule that the profiler counts by and the passes move by."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, fx
from torch.fx.experimental.proxy_tensor import make_fx

from autohete_fx.graph.saved import is_view, offloadable, storage_root

ROWS, WIDTH = 64, 1024
SAVED = ROWS * WIDTH * 4


def names(function: Callable[..., Any], *, num_outputs: int = 1, smallest_bytes: int = SAVED) -> list[str]:
    """What can leave of what the function returns behind its first results; it gets a tensor of ROWS x WIDTH."""
    gm = traced(function)
    return [root.name for root in offloadable(gm, num_outputs, smallest_bytes)]


def traced(function: Callable[..., Any]) -> fx.GraphModule:
    return make_fx(function, tracing_mode="fake")(torch.empty(ROWS, WIDTH))


def test_the_largest_comes_first_and_equals_in_graph_order():
    def function(x: Tensor) -> tuple[Tensor, ...]:
        sin, wide, cos = x.sin(), torch.cat([x, x]), x.cos()
        return x.sum(), cos, sin, wide

    assert names(function) == ["cat", "sin", "cos"]


def test_inputs_small_tensors_and_what_the_user_gets_stay():
    def function(x: Tensor) -> tuple[Tensor, ...]:
        y = x.sin()
        return y.view(-1), x, x.t(), y, x.exp().sum(0), x.cos()

    assert names(function) == ["cos"]
    assert names(function, num_outputs=0) == ["cos"], "two views of one storage that both are saved whole"
    assert names(function, smallest_bytes=1) == ["cos", "sum_1"]


def test_a_storage_leaves_with_all_its_parts_and_not_with_views_that_overlap():
    def function(x: Tensor) -> tuple[Tensor, ...]:
        left, right = torch.cat([x, x]).chunk(2)
        y = x.sin()
        return x.sum(), left.t(), right, y, y.t()

    assert names(function) == ["cat"]
    assert names(function, smallest_bytes=SAVED + 1) == [], "each part would be a copy of its own"


def test_a_storage_with_gaps_stays():
    def function(x: Tensor) -> tuple[Tensor, ...]:
        padded = torch.empty_strided((ROWS, WIDTH), (2 * WIDTH, 1), device=x.device)
        return x.sum(), padded, x.cos()

    assert names(function) == ["cos"]


def test_parts_of_a_split_and_unsafe_views_are_views():
    gm = traced(lambda x: torch.ops.aten._unsafe_view(x.sin(), [-1]).chunk(2)[1].t())
    output = next(node for node in reversed(gm.graph.nodes) if node.op == "output").args[0]
    assert isinstance(output, fx.Node) and is_view(output)
    assert storage_root(output).name == "sin"


@pytest.mark.parametrize("dynamic", [False, True])
def test_symbolic_sizes_are_read_without_guards(dynamic: bool):
    gm = make_fx(lambda x: (x.sum(), x.cos()), tracing_mode="symbolic" if dynamic else "fake")(torch.empty(ROWS, WIDTH))
    assert [root.name for root in offloadable(gm, 1)] == ["cos"]
    size = next(node for node in gm.graph.nodes if node.op == "placeholder").meta["val"].shape[0]
    assert isinstance(size, torch.SymInt) == dynamic
    assert not dynamic or not size.node.shape_env.guards
