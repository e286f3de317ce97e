"""``await_updates``: what it emits, where it emits nothing, and that results stay."""

import pytest
from expecttest import assert_expected_inline
from torch import fx

from autohete_fx import BlockDecision, Optimizer, Params, PassError, passes
from autohete_fx.graph import annotations
from autohete_fx.graph.saved import is_view, storage_root
from autohete_fx.ir import Lane, Overlap, Schedule
from autohete_fx.passes import Stage
from tests.two_blocks import assert_same_results, code, context, forward, forward_that_saves_a_weight

STEP = Schedule(overlap=Overlap.STEP)
UPDATED_ON_HOST = BlockDecision(optimizer=Optimizer.HOST)
STREAMED = BlockDecision(optimizer=Optimizer.STREAMED)


def rewritten(
    decision: BlockDecision, schedule: Schedule = STEP, gm: fx.GraphModule | None = None, stage: Stage = Stage.FORWARD
) -> fx.GraphModule:
    given = context(stage, decision, schedule=schedule)
    return passes.run(passes.only(passes.await_updates), gm or forward(), given, given=("blocks",))


def test_readers_read_a_view_that_is_taken_when_the_update_is_done():
    gm = rewritten(UPDATED_ON_HOST)
    assert_expected_inline(
        code(gm),
        """\
def forward(self, x, w0, w1):
wait_update_w0 = autohete.wait_update.default(w0, 'two blocks')
wait_update_w1 = autohete.wait_update.default(w1, 'two blocks')
first = aten.mm.default(x, wait_update_w0)
gelu = aten.gelu.default(first)
w1_t = aten.permute.default(wait_update_w1, [1, 0])
second = aten.mm.default(gelu, w1_t)
return (second, first, gelu)""",
    )
    notes = {node.name: annotations.inserted(node) for node in gm.graph.nodes if annotations.inserted(node)}
    assert {name: (note.lane, note.priority, note.slot) for name, note in notes.items() if note is not None} == {
        "wait_update_w0": (Lane.UPDATE, 0, 0),
        "wait_update_w1": (Lane.UPDATE, 1, 1),
    }


def test_parameters_whose_states_are_streamed_are_waited_for_alike():
    assert code(rewritten(STREAMED)) == code(rewritten(UPDATED_ON_HOST))


def test_a_wait_is_a_view_so_that_no_memory_is_counted_twice():
    gm = rewritten(UPDATED_ON_HOST)
    wait = next(node for node in gm.graph.nodes if node.name == "wait_update_w0")
    assert is_view(wait) and storage_root(wait).name == "w0"


@pytest.mark.parametrize("name", ["w1", "w1_t"])
def test_what_is_saved_for_backward_stays_over_the_parameter(name: str):
    gm = rewritten(UPDATED_ON_HOST, gm=forward_that_saves_a_weight(name))
    saved = next(node for node in reversed(gm.graph.nodes) if node.op == "output").args[0][1]
    assert saved.name == name and storage_root(saved).name == "w1"


def test_results_are_those_of_the_graph_as_it_was():
    assert_same_results(rewritten(UPDATED_ON_HOST), forward())


@pytest.mark.parametrize(
    ("decision", "schedule"),
    [
        (UPDATED_ON_HOST, Schedule()),
        (BlockDecision(), STEP),
        (BlockDecision(params=Params.HOST, optimizer=Optimizer.HOST), STEP),
    ],
    ids=["done in the step", "updated on the device", "the prefetch waits"],
)
def test_where_nothing_is_to_be_waited_for_the_graph_stays(decision: BlockDecision, schedule: Schedule):
    assert rewritten(decision, schedule).code == forward().code


def test_waits_are_not_inserted_behind_lanes():
    given = context(Stage.FORWARD, UPDATED_ON_HOST, schedule=STEP)
    with pytest.raises(PassError, match=r"await_updates .* conflicts with"):
        passes.run(passes.only(passes.await_updates), forward(), given, given=("blocks", "lanes"))
