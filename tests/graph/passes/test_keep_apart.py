"""What waits for the region before in a backward graph: the starts of recomputation, and what comes after sums over regions."""

from typing import Any

import pytest
import torch
from expecttest import assert_expected_inline
from torch import fx
from torch._inductor import inductor_prims  # noqa: F401  (registers prims.inductor_force_stride_order)

from autohete_fx import Activations, BlockDecision, passes
from autohete_fx.graph import annotations
from autohete_fx.passes import PassContext, Stage
from tests.two_blocks import Eager, aten, code, context

SIDE = 64
RECOMPUTE = BlockDecision(activations=Activations.RECOMPUTE)


def shared_backward(*, keeps_means: bool = False) -> fx.GraphModule:
    """The backward of two calls of one layer: a norm of each call's ``x`` is computed again, or what it makes of a mean that was
    kept; the gradients of a weight and of a bias are added."""
    graph = fx.Graph()
    node: dict[str, fx.Node] = {}
    shapes = dict.fromkeys(("x0", "x1", "m", "tangent"), (SIDE, SIDE)) | {"w": (SIDE,)}
    for name, shape in (shapes | (dict.fromkeys(("mean0", "mean1"), (SIDE, 1)) if keeps_means else {})).items():
        node[name] = graph.placeholder(name)
        node[name].meta["val"] = torch.empty(shape, device="meta")

    def call(name: str, block: int, target: torch._ops.OpOverload, *args: Any) -> None:
        given = tuple(node.get(a, a) if isinstance(a, str) else a for a in args)
        made = graph.create_node("call_function", target, given, name=name)
        made.meta["val"] = target(*fx.map_arg(given, lambda n: n.meta["val"]))
        annotations.set_block(made, block)
        node[name] = made

    above = "tangent"
    for block in (1, 0):
        call(f"grad{block}", block, aten.mm.default, above, "m")
        if not keeps_means:
            call(f"mean{block}", block, aten.mean.dim, f"x{block}", [1], True)
        call(f"norm{block}", block, aten.sub.Tensor, f"x{block}", f"mean{block}")
        call(f"scaled{block}", block, aten.mul.Tensor, f"norm{block}", "w")
        call(f"bias{block}", block, aten.sum.dim_IntList, f"grad{block}", [0])
        call(f"weight{block}", block, aten.mm.default, f"grad{block}", f"scaled{block}")
        above = f"grad{block}"
    call("biases", 0, aten.add.Tensor, "bias1", "bias0")
    call("weights", 0, aten.add.Tensor, "weight1", "weight0")
    graph.output((node["biases"], node["weights"], node["grad0"]))
    return fx.GraphModule(torch.nn.Module(), graph)


def stage(decision: BlockDecision) -> PassContext:
    return context(Stage.BACKWARD, decision, offloaded={}, owners={}, gradients=(), gradient_strides=(), edges={})


def pinned(decision: BlockDecision, **how: bool) -> fx.GraphModule:
    only = [p for p in passes.PIPELINE if p.function is passes.pin_positions]
    return passes.run(only, shared_backward(**how), stage(decision), stage=Stage.FINAL, given=("blocks", "sorted"))


def test_a_region_begins_after_what_the_one_before_adds_to_sums_over_regions():
    assert_expected_inline(
        code(pinned(RECOMPUTE)),
        """\
def forward(self, x0, x1, m, tangent, w):
grad1 = aten.mm.default(tangent, m)
mean1 = aten.mean.dim(x1, [1], True)
norm1 = aten.sub.Tensor(x1, mean1)
scaled1 = aten.mul.Tensor(norm1, w)
bias1 = aten.sum.dim_IntList(grad1, [0])
weight1 = aten.mm.default(grad1, scaled1)
subgraph_grad0 = self.subgraph_grad0
grad0 = higher_order.control_deps((weight1, bias1), subgraph_grad0, grad1, m)
subgraph_mean0 = self.subgraph_mean0
mean0 = higher_order.control_deps((weight1, bias1), subgraph_mean0, x0)
norm0 = aten.sub.Tensor(x0, mean0)
scaled0 = aten.mul.Tensor(norm0, w)
bias0 = aten.sum.dim_IntList(grad0, [0])
weight0 = aten.mm.default(grad0, scaled0)
biases = aten.add.Tensor(bias1, bias0)
weights = aten.add.Tensor(weight1, weight0)
return (biases, weights, grad0)""",
    )


def test_a_value_of_a_region_that_reads_what_others_read_is_stored_there():
    assert_expected_inline(
        code(pinned(RECOMPUTE, keeps_means=True)),
        """\
def forward(self, x0, x1, m, tangent, w, mean0, mean1):
grad1 = aten.mm.default(tangent, m)
norm1 = aten.sub.Tensor(x1, mean1)
scaled1 = aten.mul.Tensor(norm1, w)
bias1 = aten.sum.dim_IntList(grad1, [0])
weight1 = aten.mm.default(grad1, scaled1)
subgraph_grad0 = self.subgraph_grad0
grad0 = higher_order.control_deps((weight1, bias1), subgraph_grad0, grad1, m)
norm0 = aten.sub.Tensor(x0, mean0)
scaled0 = aten.mul.Tensor(norm0, w)
subgraph_stored_scaled0 = self.subgraph_stored_scaled0
stored_scaled0 = higher_order.control_deps((weight1, bias1), subgraph_stored_scaled0, scaled0)
bias0 = aten.sum.dim_IntList(grad0, [0])
weight0 = aten.mm.default(grad0, stored_scaled0)
biases = aten.add.Tensor(bias1, bias0)
weights = aten.add.Tensor(weight1, weight0)
return (biases, weights, grad0)""",
    )


@pytest.mark.parametrize("keeps_means", [False, True])
def test_results_are_the_same(keeps_means: bool):
    expected = shared_backward(keeps_means=keeps_means)
    inputs = [torch.randn(node.meta["val"].shape) for node in expected.graph.nodes if node.op == "placeholder"]
    given = Eager(pinned(RECOMPUTE, keeps_means=keeps_means)).run(*inputs)
    assert all(torch.equal(a, b) for a, b in zip(given, expected(*inputs), strict=True))


def test_a_graph_without_copies_and_recomputation_is_left_as_it_is():
    assert code(pinned(BlockDecision())) == code(shared_backward())
    assert passes.pinned_after(shared_backward(), stage(BlockDecision())) == {}


def test_the_trace_is_told_what_is_pinned():
    told = passes.pinned_after(shared_backward(), stage(RECOMPUTE))
    assert told == passes.regions_apart(shared_backward(), stage(BlockDecision()))
    assert told == {"grad0": ("weight1", "bias1"), "mean0": ("weight1", "bias1")}
