"""The passes that say where and in which order copies run: what each writes, where it writes nothing, what it refuses."""

from collections.abc import Callable

import pytest
import torch
from expecttest import assert_expected_inline
from torch import fx

from autohete_fx import Activations, BlockDecision, Optimizer, Params, passes
from autohete_fx.graph import annotations, ops
from autohete_fx.passes import PassContext, PassFunction, Stage
from autohete_fx.passes.base import insert_copy
from tests.two_blocks import assert_same_results, aten, backward, code, context, forward

HOST = BlockDecision(activations=Activations.OFFLOAD, params=Params.HOST, optimizer=Optimizer.HOST)
GRAPHS: dict[Stage, Callable[[], fx.GraphModule]] = {Stage.FORWARD: forward, Stage.BACKWARD: backward}
COPIES = (
    passes.offload_activations,
    passes.reload_activations,
    passes.prefetch_parameters,
    passes.offload_gradients,
)


def rewritten(stage: Stage, *functions: PassFunction, decision: BlockDecision = HOST) -> fx.GraphModule:
    """The graph with every copy that the plan wants, and these passes behind."""
    given = context(stage, decision, **({} if decision is HOST else {"offloaded": {}}))
    gm = passes.run(passes.only(*COPIES, *functions), GRAPHS[stage](), given, given=("blocks",))
    if passes.pin_positions in functions:
        only_pin = [p for p in passes.PIPELINE if p.function is passes.pin_positions]
        gm = passes.run(only_pin, gm, given, stage=Stage.FINAL, given=("blocks", "sorted"))
    return gm


# -- annotate_blocks --------------------------------------------------------------------------------------------------


def without_blocks() -> tuple[fx.GraphModule, dict[str, int]]:
    gm = forward()
    blocks = {n.name: block for n in gm.graph.nodes if (block := annotations.block_of(n)) is not None}
    copied = fx.Graph()
    copied.output(copied.graph_copy(gm.graph, {}))
    for node in copied.nodes:
        node.meta = {key: value for key, value in node.meta.items() if key == "val"}
    return fx.GraphModule(gm, copied), blocks


def test_annotate_blocks_writes_what_it_is_told_and_no_code():
    gm, blocks = without_blocks()
    stage = context(Stage.JOINT, BlockDecision(), block_of=blocks)
    gm = passes.run(passes.only(passes.annotate_blocks), gm, stage)
    assert {n.name: annotations.block_of(n) for n in gm.graph.nodes if n.op == "call_function"} == blocks
    assert_expected_inline(
        code(gm),
        """\
def forward(self, x, w0, w1):
first = aten.mm.default(x, w0)
gelu = aten.gelu.default(first)
w1_t = aten.permute.default(w1, [1, 0])
second = aten.mm.default(gelu, w1_t)
return (second, first, gelu)""",
    )
    assert_same_results(gm, forward())


def test_annotate_blocks_without_blocks_writes_nothing():
    gm, _ = without_blocks()
    gm = passes.run(passes.only(passes.annotate_blocks), gm, context(Stage.JOINT, BlockDecision()))
    assert all(annotations.block_of(node) is None for node in gm.graph.nodes)


def test_annotate_blocks_leaves_partitioned_graphs_to_the_partitioner():
    """It copies annotations from the joint graph; names of forward and backward nodes may mean other nodes."""
    gm, blocks = without_blocks()
    gm = passes.run(passes.only(passes.annotate_blocks), gm, context(Stage.FORWARD, BlockDecision(), block_of=blocks))
    assert all(annotations.block_of(node) is None for node in gm.graph.nodes)


# -- assign_lanes and lower_lanes -------------------------------------------------------------------------------------


def schedule(gm: fx.GraphModule) -> str:
    """One line a copy: name, lane, priority."""
    notes = [(n.name, note) for n in gm.graph.nodes if (note := annotations.inserted(n)) and note.op != "wait"]
    return "\n".join(f"{name} {note.lane.value if note.lane else None} {note.priority}" for name, note in notes)


def test_assign_lanes_orders_loads_by_need_and_gradients_behind_activations():
    assert_expected_inline(
        schedule(rewritten(Stage.FORWARD, passes.assign_lanes)),
        """\
prefetch_w0 h2d 0
prefetch_w1 h2d 1
offload_first d2h 0
offload_gelu d2h 0""",
    )
    assert_expected_inline(
        schedule(rewritten(Stage.BACKWARD, passes.assign_lanes)),
        """\
prefetch_w1 h2d -2
reload_first h2d -1
reload_gelu h2d -2
offload_grad_w1 d2h 3
offload_grad_w0 d2h 2""",
    )


@pytest.mark.parametrize("stage", GRAPHS)
def test_assign_lanes_changes_no_code(stage: Stage):
    gm = rewritten(stage, passes.assign_lanes)
    assert code(gm) == code(rewritten(stage))
    assert_same_results(gm, GRAPHS[stage]())


def test_lower_lanes():
    assert_expected_inline(
        code(rewritten(Stage.BACKWARD, passes.lower_lanes)),
        """\
def forward(self, x, w1, first, gelu, tangent):
prefetch_w1 = autohete.prefetch.default(w1, 'two blocks', 1, -2)
wait_w1 = autohete.wait.default(prefetch_w1, w1, 'two blocks')
reload_first = autohete.reload.default(first, 'two blocks', 1, -1)
wait_first = autohete.wait.default(reload_first, first, 'two blocks')
reload_gelu = autohete.reload.default(gelu, 'two blocks', 1, -2)
wait_gelu = autohete.wait.default(reload_gelu, gelu, 'two blocks')
grad_t = aten.permute.default(tangent, [1, 0])
grad_w1 = aten.mm.default(grad_t, wait_gelu)
offload_grad_w1 = autohete.offload.default(grad_w1, 'two blocks', 2, 3)
wait_grad_w1 = autohete.wait.default(offload_grad_w1, grad_w1, 'two blocks')
grad_gelu = aten.mm.default(tangent, wait_w1)
grad_first = aten.gelu_backward.default(grad_gelu, wait_first)
x_t = aten.permute.default(x, [1, 0])
grad_w0 = aten.mm.default(x_t, grad_first)
offload_grad_w0 = autohete.offload.default(grad_w0, 'two blocks', 2, 2)
wait_grad_w0 = autohete.wait.default(offload_grad_w0, grad_w0, 'two blocks')
return (None, wait_grad_w0, wait_grad_w1)""",
    )
    assert_same_results(rewritten(Stage.BACKWARD, passes.lower_lanes), backward())


# -- sort_regions -----------------------------------------------------------------------------------------------------


def test_sort_regions_in_forward():
    assert_expected_inline(
        code(rewritten(Stage.FORWARD, passes.sort_regions)),
        """\
def forward(self, x, w0, w1):
prefetch_w0 = autohete.prefetch.default(w0, 'two blocks', 1, 0)
prefetch_w1 = autohete.prefetch.default(w1, 'two blocks', 1, 1)
wait_w0 = autohete.wait.default(prefetch_w0, w0, 'two blocks')
first = aten.mm.default(x, wait_w0)
gelu = aten.gelu.default(first)
offload_first = autohete.offload.default(first, 'two blocks', 2, 0)
offload_gelu = autohete.offload.default(gelu, 'two blocks', 2, 0)
wait_w1 = autohete.wait.default(prefetch_w1, w1, 'two blocks')
w1_t_1 = aten.permute.default(wait_w1, [1, 0])
second = aten.mm.default(gelu, w1_t_1)
wait_first = autohete.wait.default(offload_first, first, 'two blocks')
wait_gelu = autohete.wait.default(offload_gelu, gelu, 'two blocks')
return (second, wait_first, wait_gelu)""",
    )


def test_sort_regions_in_backward():
    assert_expected_inline(
        code(rewritten(Stage.BACKWARD, passes.sort_regions)),
        """\
def forward(self, x, w1, first, gelu, tangent):
prefetch_w1 = autohete.prefetch.default(w1, 'two blocks', 1, -2)
reload_first = autohete.reload.default(first, 'two blocks', 1, -1)
reload_gelu = autohete.reload.default(gelu, 'two blocks', 1, -2)
wait_w1 = autohete.wait.default(prefetch_w1, w1, 'two blocks')
wait_gelu = autohete.wait.default(reload_gelu, gelu, 'two blocks')
grad_t = aten.permute.default(tangent, [1, 0])
grad_w1 = aten.mm.default(grad_t, wait_gelu)
grad_gelu = aten.mm.default(tangent, wait_w1)
offload_grad_w1 = autohete.offload.default(grad_w1, 'two blocks', 2, 3)
wait_first = autohete.wait.default(reload_first, first, 'two blocks')
grad_first = aten.gelu_backward.default(grad_gelu, wait_first)
x_t = aten.permute.default(x, [1, 0])
grad_w0 = aten.mm.default(x_t, grad_first)
wait_grad_w1 = autohete.wait.default(offload_grad_w1, grad_w1, 'two blocks')
offload_grad_w0 = autohete.offload.default(grad_w0, 'two blocks', 2, 2)
wait_grad_w0 = autohete.wait.default(offload_grad_w0, grad_w0, 'two blocks')
return (None, wait_grad_w0, wait_grad_w1)""",
    )


def test_sort_regions_computes_a_value_where_it_is_read_first():
    """A value may belong to a later region than its reader; what stands between must not go ahead of the reader for it."""
    gm = backward()
    annotations.set_block(next(n for n in gm.graph.nodes if n.name == "grad_t"), 0)
    pipeline = passes.only(*COPIES, passes.sort_regions)
    gm = passes.run(pipeline, gm, context(Stage.BACKWARD, HOST), given=("blocks",))
    assert code(gm) == code(rewritten(Stage.BACKWARD, passes.sort_regions))


@pytest.mark.parametrize("stage", GRAPHS)
def test_sort_regions_keeps_the_results(stage: Stage):
    assert_same_results(rewritten(stage, passes.sort_regions), GRAPHS[stage]())


def test_what_an_earlier_region_reads_does_not_let_later_regions_in():
    """Recomputation of block 0 that is ready at once waits for block 1, which reads another value of block 0."""
    graph = fx.Graph()
    for name in ("tangent", "saved"):
        graph.placeholder(name)
    for name, block, target, arguments in (
        ("again", 0, aten.gelu.default, ("saved",)),
        ("shared", 0, aten.neg.default, ("saved",)),
        ("grad_1", 1, aten.mul.Tensor, ("tangent", "shared")),
        ("grad_0", 0, aten.mul.Tensor, ("grad_1", "again")),
    ):
        named = {node.name: node for node in graph.nodes}
        made = graph.create_node("call_function", target, tuple(named[a] for a in arguments), name=name)
        annotations.set_block(made, block)
    graph.output((made,))
    gm = fx.GraphModule(torch.nn.Module(), graph)
    values = (torch.randn(4), torch.randn(4))
    expected = gm(*values)
    recompute = context(Stage.BACKWARD, BlockDecision(activations=Activations.RECOMPUTE), offloaded={})
    passes.run(
        [p for p in passes.PIPELINE if p.function is passes.sort_regions], gm, recompute, given=("blocks", "lowered")
    )
    order = [node.name for node in gm.graph.nodes if node.op == "call_function"]
    assert order == ["shared", "grad_1", "again", "grad_0"]
    torch.testing.assert_close(gm(*values), expected, rtol=0, atol=0)


def test_what_lets_go_of_memory_stands_before_what_takes_some():
    """At one place the gradient of block 1 is waited for and a parameter is fetched: both at once might not fit."""
    gm, given = backward(), context(Stage.BACKWARD, HOST)
    node = {node.name: node for node in gm.graph.nodes}
    insert_copy(gm, ops.prefetch, node["w1"], given, what="parameter", block=0, issue_slot=1, wait_slot=1)
    insert_copy(gm, ops.offload, node["grad_w1"], given, what="gradient", block=1, issue_slot=1, wait_slot=1)
    gm = passes.run(
        [p for p in passes.PIPELINE if p.function is passes.sort_regions], gm, given, given=("blocks", "lowered")
    )
    order = [node.name for node in gm.graph.nodes if annotations.inserted(node) is not None]
    assert order == ["offload_grad_w1", "wait_grad_w1", "prefetch_w1", "wait_w1"]


@pytest.mark.parametrize("stage", GRAPHS)
def test_without_copies_no_position_changes(stage: Stage):
    """The no-op case of the five passes of this file, in one run."""
    gm = rewritten(stage, passes.sort_regions, passes.pin_positions, decision=BlockDecision())
    assert code(gm) == code(GRAPHS[stage]())


# -- pin_positions ----------------------------------------------------------------------------------------------------


def test_pin_positions_ties_copies_to_the_products_around_them():
    assert_expected_inline(
        code(rewritten(Stage.FORWARD, passes.pin_positions)),
        """\
def forward(self, x, w0, w1):
prefetch_w0 = autohete.prefetch.default(w0, 'two blocks', 1, 0)
prefetch_w1 = autohete.prefetch.default(w1, 'two blocks', 1, 1, prefetch_w0)
wait_w0 = autohete.wait.default(prefetch_w0, w0, 'two blocks', prefetch_w1)
subgraph_first = self.subgraph_first
first = higher_order.control_deps((prefetch_w0, prefetch_w1), subgraph_first, x, wait_w0)
gelu = aten.gelu.default(first)
offload_first = autohete.offload.default(first, 'two blocks', 2, 0, first)
offload_gelu = autohete.offload.default(gelu, 'two blocks', 2, 0, offload_first)
wait_w1 = autohete.wait.default(prefetch_w1, w1, 'two blocks', offload_gelu)
w1_t_1 = aten.permute.default(wait_w1, [1, 0])
subgraph_second = self.subgraph_second
second = higher_order.control_deps((first, offload_first, offload_gelu), subgraph_second, gelu, w1_t_1)
wait_first = autohete.wait.default(offload_first, first, 'two blocks', second)
wait_gelu = autohete.wait.default(offload_gelu, gelu, 'two blocks', second)
return (second, wait_first, wait_gelu)""",
    )


@pytest.mark.parametrize("stage", GRAPHS)
def test_pin_positions_keeps_the_order_and_the_results(stage: Stage):
    gm = rewritten(stage, passes.pin_positions)
    assert any(str(node.target) == "control_deps" for node in gm.graph.nodes)
    assert_same_results(gm, GRAPHS[stage]())


def test_pin_positions_gives_way_to_work_that_another_pass_moved(caplog: pytest.LogCaptureFixture):
    """Promise 1 before speed: products that depend on each other against the order of blocks stay as they are."""

    def swap_blocks(gm: fx.GraphModule, _: PassContext) -> fx.GraphModule:
        for node in gm.graph.nodes:
            block = annotations.block_of(node)
            if node.target is aten.mm.default and block is not None:
                annotations.set_block(node, 1 - block)
        return gm

    stage = context(Stage.FORWARD, HOST)
    gm = swap_blocks(rewritten(Stage.FORWARD, passes.sort_regions), stage)
    before = code(gm)
    only_pin = [p for p in passes.PIPELINE if p.function is passes.pin_positions]
    gm = passes.run(only_pin, gm, stage, stage=Stage.FINAL, given=("blocks", "sorted"))
    assert code(gm) == before
    assert "could not be pinned" in caplog.text


def test_pin_positions_counts_a_product_that_the_compiler_made_itself():
    """On a GPU it replaces a product with a bias by a product and a sum, which have no block."""

    def pinned(forgotten: tuple[str, ...]) -> str:
        gm, stage = rewritten(Stage.FORWARD, passes.sort_regions), context(Stage.FORWARD, HOST)
        for node in gm.graph.nodes:
            if node.name in forgotten:
                node.meta = {"val": node.meta["val"]}
        only_pin = [p for p in passes.PIPELINE if p.function is passes.pin_positions]
        return code(passes.run(only_pin, gm, stage, stage=Stage.FINAL, given=("blocks", "sorted")))

    assert pinned(("second",)) == pinned(())
