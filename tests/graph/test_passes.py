"""The pipeline: its contracts, and that taking out what it inserts gives the graph back. Single passes: tests/graph/passes."""

from collections.abc import Callable

import pytest
import torch
from torch import fx

from autohete_fx import Activations, BlockDecision, Optimizer, Params
from autohete_fx.errors import PassError
from autohete_fx.graph import annotations, ops
from autohete_fx.graph.saved import output_args
from autohete_fx.ir import Overlap, Schedule
from autohete_fx.passes import PIPELINE, Pass, PassContext, Stage, run, validate, verify
from autohete_fx.passes.sort_regions import order_to_keep, region_keys, reorder
from tests.two_blocks import backward, context, forward, forward_that_saves_a_weight

HOST = BlockDecision(activations=Activations.OFFLOAD, params=Params.HOST, optimizer=Optimizer.HOST)


def strip_inserted(gm: fx.GraphModule) -> None:
    """Promise 4: every wait gives way to its source, and nothing else was changed."""
    for node in list(gm.graph.nodes):
        if node.target in (ops.wait, ops.wait_update, ops.announce):
            node.replace_all_uses_with(node.args[1 if node.target is ops.wait else 0])
        if node.target is ops.start_update:  # it writes, so that nobody takes it for dead code
            node.replace_all_uses_with(node.args[0])
            gm.graph.erase_node(node)
    gm.graph.eliminate_dead_code()


def calls(gm: fx.GraphModule) -> list[str]:
    return [f"{n.target}{tuple(str(a) for a in n.args)}" for n in gm.graph.nodes if n.op == "call_function"]


def output_names(gm: fx.GraphModule) -> list[str | None]:
    return [None if node is None else node.name for node in output_args(gm)]


def test_a_plan_that_keeps_everything_changes_nothing():
    given = context(Stage.FORWARD, BlockDecision(), offloaded={})
    assert run(PIPELINE, forward(), given, given=("blocks",)).code == forward().code


@pytest.mark.parametrize(("stage", "graph"), [(Stage.FORWARD, forward), (Stage.BACKWARD, backward)])
def test_taking_the_inserted_nodes_out_gives_the_original_graph(stage: Stage, graph: Callable[[], fx.GraphModule]):
    gm = run(PIPELINE, graph(), context(stage, HOST), given=("blocks",))
    strip_inserted(gm)
    assert sorted(c.replace("w1_t_1", "w1_t") for c in calls(gm)) == sorted(calls(graph()))
    assert output_names(gm) == output_names(graph())


def test_taking_starts_of_updates_out_gives_the_original_graph():
    given = context(Stage.BACKWARD, HOST, schedule=Schedule(overlap=Overlap.BACKWARD))
    gm = run(PIPELINE, backward(), given, given=("blocks",))
    assert [n.target for n in gm.graph.nodes].count(ops.start_update) == 2
    strip_inserted(gm)
    assert sorted(calls(gm)) == sorted(calls(backward()))
    assert output_names(gm) == output_names(backward())


def test_taking_announcements_out_gives_the_original_graph():
    given = context(Stage.BACKWARD, HOST, gradients=(None, None, 1), awaited_edges=(None, 1, 2))
    gm = run(PIPELINE, backward(), given, given=("blocks",))
    assert [n.target for n in gm.graph.nodes].count(ops.announce) == 1, "the other gradient leaves the device"
    strip_inserted(gm)
    assert sorted(calls(gm)) == sorted(calls(backward()))
    assert output_names(gm) == output_names(backward())


def test_taking_waits_for_updates_out_gives_the_original_graph():
    given = context(Stage.FORWARD, BlockDecision(optimizer=Optimizer.HOST), schedule=Schedule(overlap=Overlap.STEP))
    gm = run(PIPELINE, forward_that_saves_a_weight("w1_t"), given, given=("blocks",))
    assert [str(n.target) for n in gm.graph.nodes].count("autohete.wait_update.default") == 2
    strip_inserted(gm)
    assert sorted(calls(gm)) == sorted(calls(forward_that_saves_a_weight("w1_t")))
    assert output_names(gm) == output_names(forward_that_saves_a_weight("w1_t"))


def test_taking_the_inserted_nodes_out_saves_the_parameter_itself_again():
    kept = BlockDecision(activations=Activations.OFFLOAD, params=Params.HOST, keeps_fetched=True)
    given = context(Stage.FORWARD, kept, kept=frozenset({"w1"}))
    gm = run(PIPELINE, forward_that_saves_a_weight(), given, given=("blocks",))
    assert output_names(gm)[1] == "wait_w1"
    strip_inserted(gm)
    assert output_names(gm) == output_names(forward_that_saves_a_weight())


def test_the_pipeline_is_valid_at_every_stage():
    for stage in (Stage.FORWARD, Stage.BACKWARD):
        assert validate(PIPELINE, stage, ("blocks",))
    assert validate(PIPELINE, Stage.JOINT) and validate(PIPELINE, Stage.INFERENCE)
    assert validate(PIPELINE, Stage.FINAL, ("blocks", "sorted"))


@pytest.mark.parametrize("item", [p for p in PIPELINE if p.requires], ids=lambda p: p.name)
def test_a_pass_refuses_to_run_before_what_it_requires(item: Pass):
    with pytest.raises(PassError, match=f"pass {item.name} .* requires"):
        validate((item,), item.stages[0])


def test_a_broken_graph_names_the_pass():
    def break_it(gm: fx.GraphModule, _: PassContext) -> fx.GraphModule:
        wait = next(n for n in gm.graph.nodes if n.target is ops.wait)
        wait.args = (wait.args[0], next(n for n in gm.graph.nodes if n.name == "x"), "s")
        return gm

    pipeline = (*PIPELINE, Pass(function=break_it, stages=(Stage.FORWARD,)))
    with pytest.raises(PassError, match=r"pass break_it left a broken forward graph: .* must keep"):
        run(pipeline, forward(), context(Stage.FORWARD, HOST), given=("blocks",))


def test_verify_wants_a_wait_for_every_copy():
    gm = forward()
    with gm.graph.inserting_before(next(n for n in gm.graph.nodes if n.op == "call_function")):
        source = next(n for n in gm.graph.nodes if n.name == "w0")
        handle = gm.graph.call_function(ops.prefetch, (source, "s", 0, 0))
    note = annotations.Inserted(op="prefetch", what="parameter", block=0, slot=0, before_slot=True, num_bytes=1)
    annotations.set_inserted(handle, note)
    with pytest.raises(AssertionError, match="must be used by one wait"):
        verify(gm)


def test_reorder_refuses_a_cycle_and_leaves_the_graph():
    gm = forward()
    nodes = [n for n in gm.graph.nodes if n.op == "call_function"]
    before = [n.name for n in gm.graph.nodes]
    assert not reorder(gm.graph, {n: (0, 2) for n in nodes}, {nodes[0]: [nodes[-1]]})
    assert [n.name for n in gm.graph.nodes] == before


def test_what_draws_keeps_its_order_and_pulls_nothing_out_of_its_region():
    """Inductor makes the seeds, which are of the prologue, where one is first needed: behind attention of the first block."""
    graph = fx.Graph()
    x = graph.placeholder("x")
    made = {
        name: graph.call_function(torch.ops.aten.rand.default, ([4],), name=name) for name in ("late", "seeds", "early")
    }
    late = graph.call_function(torch.ops.aten.mul.Tensor, (made["late"], x))
    graph.output((late, graph.call_function(torch.ops.aten.mul.Tensor, (made["seeds"], made["early"]))))
    for node, block in ((made["late"], 1), (late, 1), (made["seeds"], 0)):
        annotations.set_block(node, block)
    keys = region_keys(graph, context(Stage.FORWARD, HOST))
    assert [keys[node][0] for node in made.values()] == [1, 1, 1]
    assert reorder(graph, {node: (-index, 2) for index, node in enumerate(keys)}, order_to_keep(graph))
    assert [node.name for node in graph.nodes if node in made.values()] == list(made)
