"""``tag_recompute``: which nodes it tags, and what it leaves. That what is recomputed is exact, dropout included, is
tested where graphs are partitioned and trained: tests/e2e/test_compose.py."""

import operator

import pytest
import torch
from expecttest import assert_expected_inline
from torch import fx
from torch._functorch._aot_autograd.descriptors import InputMutationAOTOutput, PlainAOTInput, PlainAOTOutput
from torch.utils.checkpoint import CheckpointPolicy

from autohete_fx import Activations, BlockDecision, passes
from autohete_fx.graph import annotations
from autohete_fx.passes import Stage
from tests.two_blocks import code, context, joint

RECOMPUTE = BlockDecision(activations=Activations.RECOMPUTE)
SELECTIVE = BlockDecision(activations=Activations.SELECTIVE)


def tagged(*decisions: BlockDecision) -> fx.GraphModule:
    gm = joint()
    blocks = {node.name: block for node in gm.graph.nodes if (block := annotations.block_of(node)) is not None}
    stage = context(Stage.JOINT, *decisions, block_of=blocks)
    return passes.run(passes.only(passes.tag_recompute), gm, stage)


def tags(gm: fx.GraphModule) -> str:
    """One line a forward node: name, policy, id of the recomputed region."""
    nodes = [n for n in gm.graph.nodes if "recompute" in n.meta]
    return "\n".join(f"{n.name} {n.meta['recompute'].name} {n.meta['ac_graph_id']}" for n in nodes)


def test_both_blocks():
    """Seeds are saved, nodes of backward have no policy, and what block 1 reads of block 0 is kept."""
    assert_expected_inline(
        tags(tagged(RECOMPUTE)),
        """\
first MUST_RECOMPUTE 0
gelu MUST_SAVE 0
w1_t MUST_RECOMPUTE 1
second MUST_RECOMPUTE 1
x_t MUST_RECOMPUTE 0""",
    )


def test_the_first_block_alone():
    assert_expected_inline(
        tags(tagged(RECOMPUTE, BlockDecision())),
        """\
first MUST_RECOMPUTE 0
gelu MUST_SAVE 0
x_t MUST_RECOMPUTE 0""",
    )


def test_the_second_block_alone():
    """It starts from what block 0 made, so that is saved though block 0 is not recomputed."""
    assert_expected_inline(
        tags(tagged(BlockDecision(), RECOMPUTE)),
        """\
gelu MUST_SAVE 0
w1_t MUST_RECOMPUTE 1
second MUST_RECOMPUTE 1""",
    )


def test_the_code_stays():
    assert code(tagged(RECOMPUTE)) == code(joint())


@pytest.mark.parametrize("activations", [Activations.KEEP, Activations.OFFLOAD])
def test_other_plans_tag_nothing(activations: Activations):
    assert tags(tagged(BlockDecision(activations=activations))) == ""


def test_one_of_several_results_is_kept_with_those_it_is_made_with():
    """A block that ends in a layer norm: the partitioner would heed no tag on the result alone."""
    graph = fx.Graph()
    x = graph.placeholder("x")
    product = graph.call_function(torch.ops.aten.mm.default, (x, x))
    norm = graph.call_function(torch.ops.aten.native_layer_norm.default, (product, [4], None, None, 1e-5))
    result = graph.call_function(operator.getitem, (norm, 0))
    mean = graph.call_function(operator.getitem, (norm, 1))
    reader = graph.call_function(torch.ops.aten.mm.default, (result, result))
    value = torch.empty(4, 4, device="meta")
    for node in graph.nodes:
        node.meta["val"] = (value, value, value) if node is norm else value
        if node is not x:
            annotations.set_block(node, 1 if node is reader else 0)
    graph.output((reader, mean))
    gm = passes.tag_recompute(fx.GraphModule({}, graph), context(Stage.JOINT, RECOMPUTE))
    assert_expected_inline(
        tags(gm),
        """\
mm_default MUST_RECOMPUTE 0
native_layer_norm_default MUST_SAVE 0
getitem MUST_SAVE 0
getitem_1 MUST_SAVE 0
mm_default_1 MUST_RECOMPUTE 1""",
    )


@pytest.mark.parametrize("is_checkpointed", [False, True])
def test_selective_recomputation_keeps_what_was_expensive_and_tags_what_backward_needs(is_checkpointed: bool):
    """The products are kept, the gelu between them is computed again; ``w1_t`` serves a product, which is kept.

    No tag of the user's own checkpointing is left: the partitioner would compare the number of its region with ours, and keep what
    makes a dropout's results without them.
    """
    gm = joint()
    for node in gm.graph.nodes:
        if annotations.block_of(node) is not None:
            annotations.set_block(node, 0)
            if is_checkpointed and node.name in ("first", "gelu", "w1_t", "second"):
                node.meta |= {"recompute": CheckpointPolicy.PREFER_RECOMPUTE, "ac_graph_id": 7}
    gm = passes.tag_recompute(gm, context(Stage.JOINT, SELECTIVE))
    assert_expected_inline(
        tags(gm),
        """\
first MUST_SAVE 0
gelu MUST_RECOMPUTE 0
second MUST_SAVE 0
x_t MUST_RECOMPUTE 0""",
    )


def test_selective_recomputation_starts_from_other_blocks_values_too():
    """Block 1 has nothing to compute again but reads the gelu of block 0, which is kept for it."""
    assert_expected_inline(
        tags(tagged(SELECTIVE)),
        """\
first MUST_SAVE 0
gelu MUST_SAVE 0
second MUST_SAVE 1
x_t MUST_RECOMPUTE 0""",
    )


def test_selective_recomputation_keeps_small_results():
    """A mask that is a quarter of what it is made from, or a norm's statistics, are not worth another pass over it."""
    graph = fx.Graph()
    x, tangent = graph.placeholder("x"), graph.placeholder("tangents_1")
    noise = graph.call_function(torch.ops.aten.cos.default, (x,))
    mask = graph.call_function(torch.ops.aten.gt.Scalar, (noise, 0.5))
    scaled = graph.call_function(torch.ops.aten.mul.Tensor, (x, 2.0))
    statistics = graph.call_function(torch.ops.aten.var_mean.correction, (scaled, [1]))
    variance = graph.call_function(operator.getitem, (statistics, 0))
    gradient = graph.call_function(torch.ops.aten.where.self, (mask, tangent, variance))
    large, row = torch.empty(8, 8, device="meta"), torch.empty(8, 1, device="meta")
    values = {mask: large > 0, statistics: (row, row), variance: row}
    for node in graph.nodes:
        node.meta["val"] = values.get(node, large)
        if node.op == "call_function":
            annotations.set_block(node, 0)
    graph.output((scaled, gradient))
    gm = passes.tag_recompute(fx.GraphModule({}, graph), context(Stage.JOINT, SELECTIVE))
    assert_expected_inline(
        tags(gm),
        """\
gt_scalar MUST_SAVE 0
var_mean_correction MUST_SAVE 0
getitem MUST_SAVE 0""",
    )


@pytest.mark.parametrize("is_told", [False, True])
@pytest.mark.parametrize("decision", [BlockDecision(), RECOMPUTE])
def test_what_is_read_of_a_written_input_is_kept(decision: BlockDecision, is_told: bool):
    """Be it written by a copy in the graph or, as the output's description tells, by the caller: backward would read the new
    value. A view has the input's memory, so what reads the view is kept."""
    graph = fx.Graph()
    x, seen = graph.placeholder("x"), graph.placeholder("seen")
    view = graph.call_function(torch.ops.aten.permute.default, (seen, [1, 0]))
    scaled = graph.call_function(torch.ops.aten.mul.Tensor, (x, view))
    result = graph.call_function(torch.ops.aten.mul.Tensor, (scaled, scaled))
    for node in graph.nodes:
        node.meta["val"] = torch.empty(8, 8, device="meta")
        if node.op == "call_function":
            annotations.set_block(node, 0)
    if not is_told:
        graph.call_function(torch.ops.aten.copy_.default, (seen, result))
    seen.meta["desc"] = PlainAOTInput(idx=1)
    output = graph.output((result, result))
    output.meta["desc"] = [PlainAOTOutput(idx=0), InputMutationAOTOutput(PlainAOTInput(idx=1))][: 1 + is_told]
    gm = passes.tag_recompute(fx.GraphModule({}, graph), context(Stage.JOINT, decision))
    kept = [node.name for node in gm.graph.nodes if node.meta.get("recompute") is CheckpointPolicy.MUST_SAVE]
    assert kept == [scaled.name]
