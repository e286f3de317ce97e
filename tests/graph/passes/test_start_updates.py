"""``start_updates``: what it emits, where it emits nothing, what it stands behind, and that results stay."""

import pytest
from expecttest import assert_expected_inline
from torch import fx

from autohete_fx import BlockDecision, Optimizer, Params, PassError, passes
from autohete_fx.graph import annotations, ops
from autohete_fx.graph.saved import output_args
from autohete_fx.ir import Lane, Overlap, Schedule
from autohete_fx.passes import Stage
from autohete_fx.passes.base import output_node
from tests.two_blocks import SIDE, assert_same_results, aten, backward, code, context

BACKWARD = Schedule(overlap=Overlap.BACKWARD)
DEVICE_PARAMS = BlockDecision(optimizer=Optimizer.HOST)
HOST_PARAMS = BlockDecision(params=Params.HOST, optimizer=Optimizer.HOST)


def rewritten(
    decision: BlockDecision = DEVICE_PARAMS, schedule: Schedule = BACKWARD, gm: fx.GraphModule | None = None
) -> fx.GraphModule:
    given = context(Stage.BACKWARD, decision, schedule=schedule)
    return passes.run(passes.only(passes.start_updates), gm or backward(), given, given=("blocks",))


def whole_pipeline(decision: BlockDecision, gm: fx.GraphModule | None = None) -> fx.GraphModule:
    given = context(Stage.BACKWARD, decision, schedule=BACKWARD)
    return passes.run(passes.PIPELINE, gm or backward(), given, given=("blocks",))


def names(gm: fx.GraphModule) -> list[str]:
    return [node.name for node in gm.graph.nodes]


def test_an_update_starts_behind_its_gradient_and_the_last_reader():
    gm = rewritten()
    assert_expected_inline(
        code(gm),
        """\
def forward(self, x, w1, first, gelu, tangent):
grad_t = aten.permute.default(tangent, [1, 0])
grad_w1 = aten.mm.default(grad_t, gelu)
offload_grad_w1 = autohete.offload.default(grad_w1, 'two blocks', 2, 0)
grad_gelu = aten.mm.default(tangent, w1)
start_update_grad_w1 = autohete.start_update.default(offload_grad_w1, [w1], 'two blocks', 2, 1)
wait_grad_w1 = autohete.wait.default(start_update_grad_w1, grad_w1, 'two blocks')
grad_first = aten.gelu_backward.default(grad_gelu, first)
x_t = aten.permute.default(x, [1, 0])
grad_w0 = aten.mm.default(x_t, grad_first)
offload_grad_w0 = autohete.offload.default(grad_w0, 'two blocks', 2, 0)
start_update_grad_w0 = autohete.start_update.default(offload_grad_w0, [], 'two blocks', 1, 0)
wait_grad_w0 = autohete.wait.default(start_update_grad_w0, grad_w0, 'two blocks')
return (None, wait_grad_w0, wait_grad_w1)""",
    )
    notes = {n.name: annotations.inserted(n) for n in gm.graph.nodes if n.target is ops.start_update}
    found = {name: (note.lane, note.priority, note.block, note.num_bytes) for name, note in notes.items() if note}
    assert found == {
        "start_update_grad_w0": (Lane.UPDATE, 0, 0, 4 * SIDE**2),
        "start_update_grad_w1": (Lane.UPDATE, 1, 1, 4 * SIDE**2),
    }


def test_without_priority_updates_start_as_gradients_come():
    gm = rewritten(schedule=Schedule(overlap=Overlap.BACKWARD, priority=False))
    assert {node.args[4] for node in gm.graph.nodes if node.target is ops.start_update} == {0}


@pytest.mark.parametrize("decision", [DEVICE_PARAMS, HOST_PARAMS], ids=["device", "host"])
def test_sorted_and_pinned_it_stands_behind_every_reader(decision: BlockDecision):
    """``w1`` is read by the product that follows the one that makes its gradient, or by what fetches it."""
    gm = whole_pipeline(decision)
    passes.run(
        passes.PIPELINE,
        gm,
        context(Stage.BACKWARD, decision, schedule=BACKWARD),
        stage=Stage.FINAL,
        given=("blocks", "sorted"),
    )
    order = names(gm)
    reader = "grad_gelu" if decision is DEVICE_PARAMS else "prefetch_w1"
    assert order.index(reader) < order.index("start_update_grad_w1") < order.index("wait_grad_w1")


def backward_that_reads_late() -> fx.GraphModule:
    """Block 0 reads ``w1`` too."""
    gm = backward()
    grad_w0, w1 = (next(node for node in gm.graph.nodes if node.name == name) for name in ("grad_w0", "w1"))
    with gm.graph.inserting_after(grad_w0):
        late = gm.graph.create_node("call_function", aten.mul.Tensor, (grad_w0, w1), name="late")
    late.meta["val"] = grad_w0.meta["val"]
    annotations.set_block(late, 0)
    output_node(gm).args = ((None, late, output_args(gm)[2]),)
    return gm


def test_an_update_waits_for_a_reader_in_another_block():
    gm = whole_pipeline(DEVICE_PARAMS, backward_that_reads_late())
    order = names(gm)
    assert order.index("late") < order.index("start_update_grad_w1") < order.index("wait_grad_w1")
    assert_same_results(gm, backward_that_reads_late())


def test_a_parameter_that_backward_returns_is_left_to_the_step():
    gm = backward()
    w1 = next(node for node in gm.graph.nodes if node.name == "w1")
    output_node(gm).args = ((w1, *output_args(gm)[1:]),)
    found = names(rewritten(gm=gm))
    assert "start_update_grad_w1" not in found and "start_update_grad_w0" in found


@pytest.mark.parametrize("decision", [DEVICE_PARAMS, HOST_PARAMS], ids=["device", "host"])
def test_results_are_those_of_the_graph_as_it_was(decision: BlockDecision):
    assert_same_results(whole_pipeline(decision), backward())


@pytest.mark.parametrize(
    ("decision", "schedule"),
    [(BlockDecision(), BACKWARD), (DEVICE_PARAMS, Schedule(overlap=Overlap.STEP)), (DEVICE_PARAMS, Schedule())],
    ids=["updated on the device", "at the step", "in the step"],
)
def test_where_nothing_starts_in_backward_nothing_is_inserted(decision: BlockDecision, schedule: Schedule):
    assert not any("start_update" in name for name in names(rewritten(decision, schedule)))


def test_updates_are_not_started_where_no_gradients_were_offloaded():
    given = context(Stage.BACKWARD, DEVICE_PARAMS, schedule=BACKWARD)
    alone = tuple(item for item in passes.PIPELINE if item.function is passes.start_updates)
    with pytest.raises(PassError, match=r"start_updates .* requires \['gradients'\]"):
        passes.run(alone, backward(), given, given=("blocks",))
