"""Profiles of a model of which ranks hold shards: wholes are counted by themselves, and by nothing else. Nothing is run."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from functorch.compile import aot_function, make_boxed_func, min_cut_rematerialization_partition
from torch import Tensor, fx
from torch._subclasses.fake_tensor import FakeTensorMode

from autohete_fx import Plan, passes
from autohete_fx.graph.collectives import gather
from autohete_fx.graph.saved import storage_root
from autohete_fx.ir import Block, BlockCost, BlockGraph, BlockKind
from autohete_fx.passes import PassContext, Stage
from autohete_fx.profiler import ParamInfo, Partition, profile_analytic, trace_step
from autohete_fx.profiler.saved_tensors import saved_tensors
from tests import planner_problems

MACHINE = replace(planner_problems.MACHINE, device_type="cpu", device_flops_per_s=(("float32", 1e9),))
RANKS, ROWS, WIDTH, LAYERS = 4, 64, 128, 3
WHOLE, ACTIVATION = WIDTH * WIDTH * 4, ROWS * WIDTH * 4
CONTEXT = PassContext(stage=Stage.JOINT, plan=Plan(labels=(), decisions=()))


def read_shard(shard: Tensor) -> Tensor:
    return torch.ops.autohete.gather(shard, RANKS, "4-group")


def read_whole(weight: Tensor) -> Tensor:
    return weight


def partition_of(
    read: Callable[[Tensor], Tensor], *, is_shard: bool, is_saved: bool = False, inner_backend: str = "eager"
) -> Partition:
    """Layers of a product and a tanh, which each gather their weight once in forward and once in backward."""
    graphs: list[fx.GraphModule] = []

    def split(joint: fx.GraphModule, inputs: object, **keywords: object) -> tuple[fx.GraphModule, fx.GraphModule]:
        joint = joint if is_saved else passes.gather_again(joint, CONTEXT)
        graphs.extend(min_cut_rematerialization_partition(joint, inputs, **keywords))
        return graphs[0], graphs[1]

    def model(x: Tensor, *weights: Tensor) -> Tensor:
        for weight in weights:
            x = torch.tanh(x @ read(weight))
        return x.sum()

    with FakeTensorMode():
        shape = (WIDTH // RANKS if is_shard else WIDTH, WIDTH)
        weights = [torch.empty(shape, requires_grad=True) for _ in range(LAYERS)]
        aot_function(model, fw_compiler=lambda gm, _: make_boxed_func(gm), partition_fn=split)(
            torch.empty(ROWS, WIDTH), *weights
        )
    forward, backward = graphs
    block_of, block = {}, -1
    for node in forward.graph.nodes:
        if node.op == "call_function":
            begins = "gather" in str(node.target) if is_shard else "mm" in str(node.target)
            block += begins
            block_of[node.name] = block
    block = LAYERS
    for node in backward.graph.nodes:
        block -= "tanh_backward" in str(node.target)
        if node.op == "call_function" and node.name not in block_of:
            block_of[node.name] = max(0, min(block, LAYERS - 1))
    placeholders = [node.name for node in forward.graph.nodes if node.op == "placeholder"][1:]
    size = WHOLE // RANKS if is_shard else WHOLE
    params = {
        name: ParamInfo(
            fqn=f"{index}", num_bytes=size, num_elements=size // 4, requires_grad=True, state_bytes=2 * size
        )
        for index, name in enumerate(placeholders)
    }
    blocks = tuple(
        Block(
            index=index,
            kind=BlockKind.LAYER,
            module_fqn=f"{index}",
            forward_nodes=(),
            backward_nodes=(),
            param_fqns=(f"{index}",),
            digest=f"{index}",
        )
        for index in range(LAYERS)
    )
    return Partition(
        forward=forward,
        backward=backward,
        num_outputs=1,
        blocks=BlockGraph(blocks=blocks, edges=(), digest="a model"),
        block_of=block_of,
        params=params,
        inner_backend=inner_backend,
    )


def costs_of(partition: Partition) -> tuple[BlockCost, ...]:
    return profile_analytic(partition, MACHINE).costs


def without_sizes(cost: BlockCost) -> BlockCost:
    """A block's cost apart from what belongs to a rank."""
    own = {"param_bytes": 0, "grad_bytes": 0, "optimizer_bytes": 0, "num_params": 0, "trained": ()}
    return replace(cost, **own, gathered_bytes=0, gathered_again_bytes=0, reduced_bytes=0)


@pytest.fixture(scope="module")
def sharded() -> Partition:
    return partition_of(read_shard, is_shard=True)


def test_each_block_gathers_its_weight_and_reduces_its_gradient(sharded: Partition) -> None:
    costs = costs_of(sharded)
    assert [cost.gathered_bytes for cost in costs] == [WHOLE] * LAYERS
    assert [cost.reduced_bytes for cost in costs] == [WHOLE] * LAYERS
    # The input of the first product needs no gradient, so its backward does not read the weight.
    assert [cost.gathered_again_bytes for cost in costs] == [0, WHOLE, WHOLE]
    assert [cost.param_bytes for cost in costs] == [cost.grad_bytes for cost in costs] == [WHOLE // RANKS] * LAYERS


@pytest.mark.parametrize("inner_backend", ["eager", "inductor"])
def test_seconds_and_other_bytes_are_those_of_a_model_that_one_rank_holds(inner_backend: str) -> None:
    together = partition_of(read_shard, is_shard=True, inner_backend=inner_backend)
    alone = partition_of(read_whole, is_shard=False, inner_backend=inner_backend)
    gloo = {"forward_workspace_bytes": 0, "backward_workspace_bytes": 0}  # copies of its own, on a CPU
    for ours, theirs in zip(costs_of(together), costs_of(alone), strict=True):
        assert replace(without_sizes(ours), **gloo) == replace(without_sizes(theirs), **gloo)
        assert abs(ours.forward_workspace_bytes - theirs.forward_workspace_bytes) <= WHOLE


def test_workspaces_have_no_wholes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("autohete_fx.profiler.memory.scratch.collective_scratch_bytes", lambda *_: 0)
    sharded = partition_of(read_shard, is_shard=True)  # afresh: kernels keep the scratch that was counted first
    alone = costs_of(partition_of(read_whole, is_shard=False))
    for ours, theirs in zip(costs_of(sharded), alone, strict=True):
        assert ours.forward_workspace_bytes == theirs.forward_workspace_bytes
        assert ours.backward_workspace_bytes <= theirs.backward_workspace_bytes + ACTIVATION


def test_a_trace_of_the_same_graphs_has_them(sharded: Partition) -> None:
    assert sharded.backward is not None
    how: dict[str, Any] = {"device_type": "cpu", "inner_backend": "eager"}
    with_wholes = trace_step(sharded.forward, sharded.backward, 1, **how)
    without = trace_step(sharded.forward, sharded.backward, 1, **how, counts_wholes=False)
    assert without.forward.peak_bytes + WHOLE <= with_wholes.forward.peak_bytes
    assert without.peak_bytes + WHOLE <= with_wholes.peak_bytes


def test_a_whole_that_the_partition_saves_is_no_activation() -> None:
    partition = partition_of(read_shard, is_shard=True, is_saved=True)
    assert any(storage_root(node).target is gather for node in partition.forward.graph.output_node().all_input_nodes)
    assert {tensor.num_bytes for tensor in saved_tensors(partition)} <= {ACTIVATION, 4}
    costs = costs_of(partition)
    assert [cost.gathered_bytes for cost in costs] == [WHOLE] * LAYERS
    assert not any(cost.gathered_again_bytes for cost in costs)
