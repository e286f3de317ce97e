"""``take_norms``: what it emits, where it emits nothing, and that results stay."""

import pytest
from expecttest import assert_expected_inline
from torch import fx

from autohete_fx import BlockDecision, Optimizer, PassError, passes
from autohete_fx.graph import ops
from autohete_fx.ir import Overlap, Schedule
from autohete_fx.passes import Stage
from tests.two_blocks import assert_same_results, backward, code, context

ON_HOST = BlockDecision(optimizer=Optimizer.HOST)
CLIPPED = Schedule(overlap=Overlap.BACKWARD, takes_norms=True)


def rewritten(schedule: Schedule, *functions: passes.PassFunction) -> fx.GraphModule:
    given = context(Stage.BACKWARD, ON_HOST, schedule=schedule)
    return passes.run(passes.only(*functions) if functions else passes.PIPELINE, backward(), given, given=("blocks",))


def test_a_norm_is_taken_behind_the_offload():
    assert_expected_inline(
        code(rewritten(CLIPPED, passes.take_norms, passes.start_updates)),
        """\
def forward(self, x, w1, first, gelu, tangent):
grad_t = aten.permute.default(tangent, [1, 0])
grad_w1 = aten.mm.default(grad_t, gelu)
offload_grad_w1 = autohete.offload.default(grad_w1, 'two blocks', 2, 0)
take_norm_grad_w1 = autohete.take_norm.default(offload_grad_w1, grad_w1, 'two blocks')
wait_grad_w1 = autohete.wait.default(take_norm_grad_w1, grad_w1, 'two blocks')
grad_gelu = aten.mm.default(tangent, w1)
grad_first = aten.gelu_backward.default(grad_gelu, first)
x_t = aten.permute.default(x, [1, 0])
grad_w0 = aten.mm.default(x_t, grad_first)
offload_grad_w0 = autohete.offload.default(grad_w0, 'two blocks', 2, 0)
take_norm_grad_w0 = autohete.take_norm.default(offload_grad_w0, grad_w0, 'two blocks')
wait_grad_w0 = autohete.wait.default(take_norm_grad_w0, grad_w0, 'two blocks')
return (None, wait_grad_w0, wait_grad_w1)""",
    )


def test_results_are_those_of_the_graph_as_it_was():
    gm = rewritten(CLIPPED)
    assert sum(node.target is ops.take_norm for node in gm.graph.nodes) == 2
    assert_same_results(gm, backward())


@pytest.mark.parametrize("schedule", [Schedule(overlap=Overlap.BACKWARD), Schedule(overlap=Overlap.STEP)], ids=str)
def test_where_the_schedule_takes_none_nothing_is_inserted(schedule: Schedule):
    assert not any(node.target is ops.take_norm for node in rewritten(schedule).graph.nodes)


def test_norms_are_not_taken_where_no_gradients_were_offloaded():
    alone = tuple(item for item in passes.PIPELINE if item.function is passes.take_norms)
    with pytest.raises(PassError, match=r"take_norms .* requires \['gradients'\]"):
        passes.run(alone, backward(), context(Stage.BACKWARD, ON_HOST, schedule=CLIPPED), given=("blocks",))
