"""The passes on traced graphs: contracts, no-ops, what is inserted, and that taking it out gives the graph back."""

from typing import Any

import pytest
import torch
from torch import fx, nn

import autohete_fx
from autohete_fx import Activations, BlockDecision, Optimizer, Params, Plan, annotations, ops
from autohete_fx.errors import PassError
from autohete_fx.passes import PIPELINE, Pass, PassContext, Stage, prefetch_parameters, run, validate, verify
from autohete_fx.passes.base import output_args
from autohete_fx.passes.sort_regions import reorder


def tiny_graph() -> fx.GraphModule:
    """``mm(gelu(mm(x, w0)), w1)``: block 0 makes ``gelu``, block 1 the output."""
    graph = fx.Graph()
    x, w0, w1 = (graph.placeholder(name) for name in ("x", "w0", "w1"))
    first = graph.create_node("call_function", torch.ops.aten.mm.default, (x, w0), name="first")
    gelu = graph.create_node("call_function", torch.ops.aten.gelu.default, (first,), name="gelu")
    view = graph.create_node("call_function", torch.ops.aten.permute.default, (w1, [1, 0]), name="permute")
    second = graph.create_node("call_function", torch.ops.aten.mm.default, (gelu, view), name="second")
    graph.output((second, gelu))
    for node in graph.nodes:
        node.meta["val"] = torch.empty(256, 256, device="meta")
    for node in (first, gelu):
        annotations.set_block(node, 0)
    for node in (view, second):
        annotations.set_block(node, 1)
    return fx.GraphModule(nn.Module(), graph)


def context(*decisions: BlockDecision, **changes: Any) -> PassContext:
    plan = Plan(labels=("a", "b"), decisions=decisions)
    return PassContext(stage=Stage.FORWARD, plan=plan, session="s", owners={"w0": 0, "w1": 1}, num_outputs=1, **changes)


HOST = BlockDecision(activations=Activations.OFFLOAD, params=Params.HOST, optimizer=Optimizer.HOST)


def rewritten(*decisions: BlockDecision) -> fx.GraphModule:
    gm = tiny_graph()
    return run(PIPELINE, gm, context(*decisions, offloaded=frozenset({"gelu"})), given=("blocks",))


def strip_inserted(gm: fx.GraphModule) -> None:
    """Promise 4: every wait gives way to its source, and nothing else was changed."""
    for node in list(gm.graph.nodes):
        if node.target is ops.wait:
            node.replace_all_uses_with(node.args[1])
    gm.graph.eliminate_dead_code()


def calls(gm: fx.GraphModule) -> list[str]:
    return [f"{n.target}{tuple(str(a) for a in n.args)}" for n in gm.graph.nodes if n.op == "call_function"]


def test_a_plan_that_keeps_everything_changes_nothing():
    gm = run(PIPELINE, tiny_graph(), context(BlockDecision(), BlockDecision()), given=("blocks",))
    assert gm.code == tiny_graph().code


def test_what_is_inserted_and_where():
    order = [n.name for n in rewritten(HOST, HOST).graph.nodes if n.op == "call_function"]
    assert order == [
        "prefetch_w0",
        "prefetch_w1",
        "wait_w0",
        "first",
        "gelu",
        "offload_gelu",
        "wait_w1",
        "permute_1",
        "second",
        "wait_gelu",
    ]


def test_lanes_and_priorities_are_arguments():
    nodes = {n.name: n for n in rewritten(HOST, HOST).graph.nodes}
    assert nodes["prefetch_w1"].args == (nodes["w1"], "s", autohete_fx.ir.Lane.H2D.index, 1)
    assert nodes["offload_gelu"].args == (nodes["gelu"], "s", autohete_fx.ir.Lane.D2H.index, 0)


def test_taking_the_inserted_nodes_out_gives_the_original_graph():
    gm = rewritten(HOST, HOST)
    strip_inserted(gm)
    assert [c.replace("permute_1", "permute") for c in calls(gm)] == calls(tiny_graph())
    assert [n.name for n in output_args(gm) if n is not None] == ["second", "gelu"]


def test_the_pipeline_is_valid_at_every_stage():
    for stage in (Stage.FORWARD, Stage.BACKWARD):
        assert validate(PIPELINE, stage, ("blocks",))
    assert validate(PIPELINE, Stage.JOINT) and validate(PIPELINE, Stage.INFERENCE)
    assert validate(PIPELINE, Stage.FINAL, ("blocks", "sorted"))


@pytest.mark.parametrize("item", [p for p in PIPELINE if p.requires], ids=lambda p: p.name)
def test_a_pass_refuses_to_run_before_what_it_requires(item: Pass):
    with pytest.raises(PassError, match=f"pass {item.name} .* requires"):
        validate((item,), item.stages[0])


def test_inserting_passes_refuse_to_run_after_lanes():
    late = next(p for p in PIPELINE if p.function is prefetch_parameters)
    with pytest.raises(PassError, match="conflicts with"):
        validate((late,), Stage.FORWARD, ("blocks", "lanes"))


def test_a_broken_graph_names_the_pass():
    def break_it(gm: fx.GraphModule, _: PassContext) -> fx.GraphModule:
        wait = next(n for n in gm.graph.nodes if n.target is ops.wait)
        wait.args = (wait.args[0], next(n for n in gm.graph.nodes if n.name == "x"), "s")
        return gm

    pipeline = (*PIPELINE, Pass(function=break_it, stages=(Stage.FORWARD,)))
    with pytest.raises(PassError, match=r"pass break_it left a broken forward graph: .* must keep"):
        run(pipeline, tiny_graph(), context(HOST, HOST), given=("blocks",))


def test_verify_wants_a_wait_for_every_copy():
    gm = tiny_graph()
    with gm.graph.inserting_before(next(n for n in gm.graph.nodes if n.op == "call_function")):
        source = next(n for n in gm.graph.nodes if n.name == "w0")
        handle = gm.graph.call_function(ops.prefetch, (source, "s", 0, 0))
    note = annotations.Inserted(op="prefetch", what="parameter", block=0, slot=0, before_slot=True, num_bytes=1)
    annotations.set_inserted(handle, note)
    with pytest.raises(AssertionError, match="must be used by one wait"):
        verify(gm)


def test_reorder_refuses_a_cycle_and_leaves_the_graph():
    gm = tiny_graph()
    nodes = [n for n in gm.graph.nodes if n.op == "call_function"]
    before = [n.name for n in gm.graph.nodes]
    assert not reorder(gm.graph, {n: (0, 2) for n in nodes}, {nodes[0]: [nodes[-1]]})
    assert [n.name for n in gm.graph.nodes] == before
