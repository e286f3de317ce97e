"""``merge_reduces`` and ``gather_again``: a weight of which ranks hold shards, read twice in forward. Nothing is run."""

import torch
from expecttest import assert_expected_inline
from torch import Tensor, fx
from torch.fx.experimental.proxy_tensor import make_fx

from autohete_fx import Plan, passes
from autohete_fx.graph import annotations
from autohete_fx.graph.collectives import gather
from autohete_fx.graph.saved import gathered
from autohete_fx.passes import PassContext, Stage
from autohete_fx.profiler.measured import extract_block
from autohete_fx.profiler.memory.scratch import scratch_bytes

CONTEXT = PassContext(stage=Stage.JOINT, plan=Plan(labels=(), decisions=()))


def joint(num_reads: int = 2, group: str = "2-group") -> fx.GraphModule:
    """Seven rows on two ranks, four on each."""

    def step(shard: Tensor, x: Tensor) -> list[Tensor]:
        read = [torch.ops.autohete.gather(shard, 2, group)[:7]]
        y = x @ read[0].t()
        if num_reads == 2:
            y = y.relu() @ torch.ops.autohete.gather(shard, 2, group)[:7]
        return list(torch.autograd.grad(y.sum(), [shard, x]))

    shard, x = torch.randn(4, 3, requires_grad=True), torch.randn(5, 3, requires_grad=True)
    gm = make_fx(step, tracing_mode="fake")(shard, x)
    gm.graph.eliminate_dead_code()
    return gm


def collectives_of(gm: fx.GraphModule) -> str:
    lines = [line.split(";")[0].strip() for line in gm.code.splitlines() if "autohete" in line or "add" in line]
    return "\n".join(lines)


def test_a_weight_read_twice_gets_one_reduce_of_the_sum():
    gm = joint()
    result = [node.meta["val"].shape for node in gm.graph.output_node().all_input_nodes]
    assert gm.code.count("autohete.reduce") == 2
    merged = passes.merge_reduces(gm, CONTEXT)
    merged.graph.lint()
    merged.recompile()
    assert [node.meta["val"].shape for node in merged.graph.output_node().all_input_nodes] == result
    assert_expected_inline(
        collectives_of(merged),
        """\
gather = torch.ops.autohete.gather.default(shard_1, 2, '2-group')
gather_1 = torch.ops.autohete.gather.default(shard_1, 2, '2-group')
add = torch.ops.aten.add.Tensor(slice_backward, slice_backward_1)
reduce_default = torch.ops.autohete.reduce.default(add, 2, '2-group')""",
    )


def test_a_weight_read_once_keeps_its_reduce():
    gm = joint(1)
    before = gm.code
    assert passes.merge_reduces(gm, CONTEXT).code == before and "autohete.reduce" in before


def test_every_view_of_the_whole_is_computed_again():
    gm = passes.gather_again(joint(), CONTEXT)
    tagged = [node for node in gm.graph.nodes if "recompute" in node.meta]
    assert {node.meta["recompute"].name for node in tagged} == {"MUST_RECOMPUTE"}
    assert set(tagged) == gathered(gm.graph) and sum(node.target is gather for node in tagged) == 2
    assert all(node.meta["ac_graph_id"] > 10**6 for node in tagged) and len(tagged) > 4  # slices and transposes


def test_a_block_is_timed_without_collectives():
    gm = joint()
    placed = {node.name: 0 for node in gm.graph.nodes if node.op == "call_function"}
    for node in gm.graph.nodes:
        annotations.set_block(node, 0)
    block = extract_block(gm, placed, 0)
    assert block is not None and "autohete" not in block.code
    inputs = [tuple(node.meta["val"].shape) for node in block.graph.nodes if node.op == "placeholder"]
    assert inputs.count((8, 3)) == 2  # the wholes come from outside


def test_gloo_works_on_a_copy_of_the_whole():
    shard, whole = torch.empty(4, 3), torch.empty(8, 3)
    assert scratch_bytes(gather, (shard, 2, "2-group"), {}) == whole.nbytes
    assert scratch_bytes(torch.ops.autohete.reduce.default, (whole, 2, "2-group"), {}) == whole.nbytes
    assert scratch_bytes(gather, (shard.to("meta"), 2, "2-group"), {}) == 0
