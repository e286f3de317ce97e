"""Passes on graphs with weights of which ranks hold shards. Nothing is run."""

from collections.abc import Mapping

import pytest
import torch
from expecttest import assert_expected_inline
from torch import Tensor, fx
from torch.fx.experimental.proxy_tensor import make_fx

from autohete_fx import BlockDecision, Params, PassError, Plan, passes
from autohete_fx.graph import annotations
from autohete_fx.graph.collectives import ISSUING_GATHERS, gather, issue_gather, issue_gather_once
from autohete_fx.graph.saved import gathered, is_view
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


BLOCKS = ("a", "b", "c")


def three_blocks(stage: Stage = Stage.FORWARD, tied: bool = False) -> fx.GraphModule:
    """Each block multiplies by a weight and a bias of its own, both gathered; tied, the last reads the first one's. Or their
    gradients, in reverse."""
    group = "2-group"

    def forward(x: Tensor, *shards: Tensor) -> list[Tensor]:
        for at in range(3):
            weight = torch.ops.autohete.gather(shards[0 if tied and at == 2 else 2 * at], 2, group)
            x = torch.addmm(torch.ops.autohete.gather(shards[2 * at + 1], 2, group), x, weight.t())
        return [x]

    def backward(x: Tensor, *shards: Tensor) -> list[Tensor]:
        found = []
        for at in reversed(range(3)):
            weight = torch.ops.autohete.gather(shards[2 * at], 2, group)
            found.append(torch.ops.autohete.reduce(x.t() @ x, 2, group))
            found.append(torch.ops.autohete.reduce(x.sum(0), 2, group))
            x = x @ weight
        return found

    x, shards = torch.randn(4, 4), [torch.randn(2, 4) if at % 2 == 0 else torch.randn(2) for at in range(6)]
    gm = make_fx(forward if stage is Stage.FORWARD else backward, tracing_mode="fake")(x, *shards)
    products = [node for node in gm.graph.nodes if "mm" in str(node.target)]
    at = 0
    for node in gm.graph.nodes:
        if node.op == "call_function":
            annotations.set_block(node, at if stage is Stage.FORWARD else 2 - at)
            last = node in products and (stage is Stage.FORWARD or products.index(node) % 2 == 1)
            at = min(at + last, 2)
    return gm


def on(stage: Stage, *decisions: BlockDecision, owners: Mapping[str, int] | None = None) -> PassContext:
    decisions = decisions or (BlockDecision(),) * 3
    return PassContext(stage=stage, plan=Plan(labels=BLOCKS, decisions=decisions), session="s", owners=owners or {})


def ordered(gm: fx.GraphModule) -> str:
    """Collectives, copies and products, a line each, without digests."""
    names = ("autohete", "mm", "addmm")
    lines = [line.split(";")[0].strip() for line in gm.code.splitlines() if any(f".{name}" in line for name in names)]
    return "\n".join(lines).replace("torch.ops.", "").replace("'2-group', 's'", "...").replace("2, 's'", "...")


def test_a_block_gathers_by_one_collective_ahead_of_the_block_before_it():
    chosen = passes.only(passes.gather_parameters, passes.sort_regions)
    gm = passes.run(chosen, three_blocks(), on(Stage.FORWARD), given=("blocks",))
    assert_expected_inline(
        ordered(gm),
        """\
gather_a = autohete.gather.issue([arg1_1, arg2_1], 2, ...)
gather_b = autohete.gather.issue([arg3_1, arg4_1], 2, ...)
whole_arg1_1 = autohete.gather.wait(gather_a, arg1_1, 0, ...)
whole_arg2_1 = autohete.gather.wait(gather_a, arg2_1, 1, ...)
addmm = aten.addmm.default(whole_arg2_1, arg0_1, t_5)
gather_c = autohete.gather.issue([arg5_1, arg6_1], 2, ...)
whole_arg3_1 = autohete.gather.wait(gather_b, arg3_1, 0, ...)
whole_arg4_1 = autohete.gather.wait(gather_b, arg4_1, 1, ...)
addmm_1 = aten.addmm.default(whole_arg4_1, addmm, t_4)
whole_arg5_1 = autohete.gather.wait(gather_c, arg5_1, 0, ...)
whole_arg6_1 = autohete.gather.wait(gather_c, arg6_1, 1, ...)
addmm_2 = aten.addmm.default(whole_arg6_1, addmm_1, t_3)""",
    )
    notes = [
        note for node in gm.graph.nodes if (note := annotations.inserted(node)) is not None and note.op == "gather"
    ]
    assert [(note.block, note.slot, note.num_bytes) for note in notes] == [(0, 0, 80), (1, 0, 80), (2, 1, 80)]


def test_a_shard_that_two_blocks_read_is_gathered_for_each():
    gm = passes.run(
        passes.only(passes.gather_parameters), three_blocks(tied=True), on(Stage.FORWARD), given=("blocks",)
    )
    read = [node.args[0] for node in gm.graph.nodes if node.target is issue_gather]
    assert [[str(shard) for shard in shards] for shards in read] == [
        ["arg1_1", "arg2_1"],
        ["arg3_1", "arg4_1"],
        ["arg1_1", "arg6_1"],
    ]


@pytest.mark.parametrize("stage, target", [(Stage.FORWARD, issue_gather_once), (Stage.INFERENCE, issue_gather)])
def test_a_replicated_block_gathers_by_nodes_of_its_own_but_in_inference(stage: Stage, target: object):
    once = BlockDecision(replicates=True)
    chosen = passes.only(passes.gather_parameters, passes.sort_regions)
    gm = passes.run(chosen, three_blocks(), on(stage, BlockDecision(), once, BlockDecision()), given=("blocks",))
    issues = [node for node in gm.graph.nodes if node.target in ISSUING_GATHERS]
    assert [node.target for node in issues] == [issue_gather, target, issue_gather]
    assert not any(map(is_view, issues[1].users))  # its schema says so to compilers alone


def test_a_whole_that_a_replicated_block_returns_is_gathered_for_the_caller():
    def forward(shard: Tensor, x: Tensor) -> Tensor:
        return x @ torch.ops.autohete.gather(shard, 2, "group")[:7].t()

    def returning(shard: Tensor, x: Tensor) -> list[Tensor]:
        whole = torch.ops.autohete.gather(shard, 2, "group")[:7]
        return [x @ whole.t(), whole]

    for function in (forward, returning):
        gm = make_fx(function, tracing_mode="fake")(torch.randn(4, 3), torch.randn(5, 3))
        for node in gm.graph.nodes:
            annotations.set_block(node, 0)
        plan = Plan(labels=("a",), decisions=(BlockDecision(replicates=True),))
        context = PassContext(stage=Stage.FORWARD, plan=plan, session="s")
        passes.run(passes.only(passes.gather_parameters), gm, context, given=("blocks",))
        (issue,) = [node.target for node in gm.graph.nodes if node.target in ISSUING_GATHERS]
        assert issue is (issue_gather if function is returning else issue_gather_once)


def test_a_shard_in_host_memory_arrives_ahead_of_its_gather():
    host = BlockDecision(params=Params.HOST)
    owners = {f"arg{at + 1}_1": at // 2 for at in range(6)}
    context = on(Stage.FORWARD, BlockDecision(), BlockDecision(), host, owners=owners)
    chosen = passes.only(passes.gather_parameters, passes.prefetch_parameters, passes.sort_regions)
    gm = passes.run(chosen, three_blocks(), context, given=("blocks",))
    lines = ordered(gm).splitlines()
    places = [
        next(at for at, line in enumerate(lines) if line.startswith(name)) for name in ("prefetch", "wait", "gather_c")
    ]
    products = [at for at, line in enumerate(lines) if "addmm" in line]
    assert places == sorted(places) and places[0] < products[0] < places[1] < places[2] < products[1]
    assert sum("autohete.prefetch" in line for line in lines) == 2  # the weight and the bias, once each


def test_a_shard_fetched_for_a_replicated_block_is_gathered_each_time():
    """Its copy has no address that ranks could know its whole by: one would gather where another has it."""
    decisions = BlockDecision(params=Params.HOST), BlockDecision(), BlockDecision(replicates=True)
    owners = {f"arg{at + 1}_1": at // 2 for at in (0, 1, 2, 3, 5)}
    context = on(Stage.FORWARD, *decisions, owners=owners)
    chosen = passes.only(passes.gather_parameters, passes.prefetch_parameters, passes.sort_regions)
    gm = passes.run(chosen, three_blocks(tied=True), context, given=("blocks",))
    issues = [(node.target, list(map(str, node.args[0]))) for node in gm.graph.nodes if node.target in ISSUING_GATHERS]
    assert issues[2:] == [(issue_gather, ["wait_arg1_2"]), (issue_gather_once, ["arg6_1"])]


def test_a_block_averages_gradients_by_one_collective_beside_the_next():
    chosen = passes.only(passes.gather_parameters, passes.reduce_gradients, passes.sort_regions)
    gm = passes.run(chosen, three_blocks(Stage.BACKWARD), on(Stage.BACKWARD), given=("blocks",))
    assert_expected_inline(
        ordered(gm),
        """\
gather_c = autohete.gather.issue([arg5_1], 2, ...)
gather_b = autohete.gather.issue([arg3_1], 2, ...)
whole_arg5_1 = autohete.gather.wait(gather_c, arg5_1, 0, ...)
mm = aten.mm.default(t, arg0_1)
mm_1 = aten.mm.default(arg0_1, whole_arg5_1)
reduce_c = autohete.reduce.issue([mm, sum_1], 2, ...)
gather_a = autohete.gather.issue([arg1_1], 2, ...)
whole_arg3_1 = autohete.gather.wait(gather_b, arg3_1, 0, ...)
mm_2 = aten.mm.default(t_1, mm_1)
mm_3 = aten.mm.default(mm_1, whole_arg3_1)
mine_mm = autohete.reduce.wait(reduce_c, mm, 0, ...)
mine_sum_1 = autohete.reduce.wait(reduce_c, sum_1, 1, ...)
reduce_b = autohete.reduce.issue([mm_2, sum_2], 2, ...)
whole_arg1_1 = autohete.gather.wait(gather_a, arg1_1, 0, ...)
mm_4 = aten.mm.default(t_2, mm_3)
mm_5 = aten.mm.default(mm_3, whole_arg1_1)
mine_mm_2 = autohete.reduce.wait(reduce_b, mm_2, 0, ...)
mine_sum_2 = autohete.reduce.wait(reduce_b, sum_2, 1, ...)
reduce_a = autohete.reduce.issue([mm_4, sum_3], 2, ...)
mine_mm_4 = autohete.reduce.wait(reduce_a, mm_4, 0, ...)
mine_sum_3 = autohete.reduce.wait(reduce_a, sum_3, 1, ...)""",
    )
    outputs = [str(node) for node in gm.graph.output_node().all_input_nodes]
    assert outputs == ["mine_mm", "mine_sum_1", "mine_mm_2", "mine_sum_2", "mine_mm_4", "mine_sum_3"]


@pytest.mark.parametrize("function", [passes.gather_parameters, passes.reduce_gradients])
def test_collectives_are_issued_before_lanes_are_given(function: passes.PassFunction):
    stage = Stage.BACKWARD
    with pytest.raises(PassError, match=rf"{function.__name__} on the backward graph conflicts with \['lanes'\]"):
        passes.run(passes.only(function), three_blocks(stage), on(stage), given=("blocks", "lanes"))


def test_a_graph_without_shards_is_left_as_it_is():
    gm = make_fx(lambda x, y: x @ y)(torch.randn(2, 2), torch.randn(2, 2))
    before = gm.code
    chosen = passes.only(passes.gather_parameters, passes.reduce_gradients)
    assert passes.run(chosen, gm, on(Stage.BACKWARD), given=("blocks",)).code == before


def test_a_collective_that_nobody_waits_for_is_found():
    gm = passes.run(passes.only(passes.gather_parameters), three_blocks(), on(Stage.FORWARD), given=("blocks",))
    issue = next(node for node in gm.graph.nodes if node.target is issue_gather)
    first, second = issue.users
    second.replace_all_uses_with(first)
    gm.graph.erase_node(second)
    with pytest.raises(AssertionError, match="gather_a must be waited for on each of"):
        passes.verify(gm)
