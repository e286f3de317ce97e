"""``announce_gradients``: what it emits, where it emits nothing, and that results stay."""

import pytest
import torch
from expecttest import assert_expected_inline
from torch import fx

from autohete_fx import BlockDecision, Optimizer, PassError, passes
from autohete_fx.graph import annotations, ops
from autohete_fx.graph.saved import output_args
from autohete_fx.passes import Stage
from autohete_fx.passes.base import output_node
from tests.two_blocks import assert_same_results, backward, code, context

AWAITED = (None, 1, 2)


def rewritten(decision: BlockDecision | None = None, awaited: tuple[int | None, ...] = AWAITED) -> fx.GraphModule:
    given = context(Stage.BACKWARD, decision or BlockDecision(), offloaded={}, awaited_edges=awaited)
    return passes.run(passes.PIPELINE, backward(), given, given=("blocks",))


def test_a_blocks_gradients_are_told_of_before_the_next_block():
    gm = rewritten()
    assert_expected_inline(
        code(gm),
        """\
def forward(self, x, w1, first, gelu, tangent):
grad_t = aten.permute.default(tangent, [1, 0])
grad_w1 = aten.mm.default(grad_t, gelu)
grad_gelu = aten.mm.default(tangent, w1)
announce_b = autohete.announce.default(grad_w1, [], [2])
grad_first = aten.gelu_backward.default(grad_gelu, first)
x_t = aten.permute.default(x, [1, 0])
grad_w0 = aten.mm.default(x_t, grad_first)
announce_a = autohete.announce.default(grad_w0, [], [1])
return (None, announce_a, announce_b)""",
    )
    notes = [annotations.inserted(node) for node in gm.graph.nodes if node.target is ops.announce]
    assert [(note.block, note.slot) for note in notes if note is not None] == [(1, 1), (0, 2)]
    assert_same_results(gm, backward())


def returning(*changed: str | None) -> fx.GraphModule:
    """The backward graph with other outputs; ``view`` is one of the gradient of ``w1``."""
    gm = backward()
    nodes = {node.name: node for node in gm.graph.nodes}
    grad = nodes["grad_w1"]
    with gm.graph.inserting_after(grad):
        view = gm.graph.call_function(torch.ops.aten.permute.default, (grad, [1, 0]))
    view.meta["val"] = grad.meta["val"].t()
    annotations.set_block(view, 1)
    nodes["view"] = view
    output_node(gm).args = (tuple(None if name is None else nodes[name] for name in changed),)
    gm.graph.eliminate_dead_code()
    return gm


@pytest.mark.parametrize(
    ("outputs", "awaited", "expected"),
    [
        (("grad_w1", "grad_w1", "grad_w0"), (0, 1, None), (("grad_w1", [0, 1]), "announce_b", "announce_b", "grad_w0")),
        (("grad_w1", "grad_w1", "grad_w0"), (None, 1, None), (("grad_w1", [1]), "announce_b", "announce_b", "grad_w0")),
        (("grad_w1", "view", "grad_w0"), (0, None, 2), (("grad_w0", [2]), "grad_w1", "permute_default", "announce_a")),
        (("grad_w1", "view", "grad_t"), (0, 1, 2), (("grad_t", [2, 0, 1]), "grad_w1", "permute_default", "announce_b")),
    ],
    ids=["twice", "of another, too", "viewed", "viewed beside another"],
)
def test_no_two_tensors_of_autograd_have_the_same_memory(
    outputs: tuple[str, ...], awaited: tuple[int | None, ...], expected: tuple[object, ...]
):
    """The view that an announcement returns is in all places of its gradient, and of one that no other output views."""
    given = context(Stage.BACKWARD, BlockDecision(), offloaded={}, awaited_edges=awaited)
    gm = passes.run(passes.PIPELINE, returning(*outputs), given, given=("blocks",))
    (told,) = (node.args for node in gm.graph.nodes if node.target is ops.announce)
    assert ((str(told[0]), told[2]), *map(str, output_args(gm))) == expected
    assert_same_results(gm, returning(*outputs))


@pytest.mark.parametrize("awaited", [(), (None, None, None)], ids=["nobody", "others"])
def test_where_nobody_waits_nothing_is_inserted(awaited: tuple[int | None, ...]):
    assert not any(node.target is ops.announce for node in rewritten(awaited=awaited).graph.nodes)


def test_gradients_that_leave_the_device_are_not_told_of():
    gm = rewritten(BlockDecision(optimizer=Optimizer.HOST))
    assert not any(node.target is ops.announce for node in gm.graph.nodes)
    assert_same_results(gm, backward())


def test_they_are_not_told_of_where_nothing_says_which_leave():
    alone = tuple(item for item in passes.PIPELINE if item.function is passes.announce_gradients)
    with pytest.raises(PassError, match=r"announce_gradients .* requires \['gradients'\]"):
        passes.run(alone, backward(), context(Stage.BACKWARD, BlockDecision()), given=("blocks",))
