"""Profiles of a small partition: each figure against what the graph says, and blocks on their own."""

import weakref
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from functorch.compile import aot_function, make_boxed_func, min_cut_rematerialization_partition
from torch import fx, nn
from torch._subclasses.fake_tensor import FakeTensorMode

from autohete_fx.ir import Block, BlockGraph, BlockKind
from autohete_fx.profiler import ParamInfo, Partition, profile_analytic, profile_measured
from autohete_fx.profiler.flops import flops_of
from autohete_fx.profiler.measured import extract_block, values_not_stored
from autohete_fx.profiler.saved_tensors import saved_tensors
from autohete_fx.profiler.timed_graph import input_device
from tests import planner_problems

MACHINE = replace(
    planner_problems.MACHINE, device_type="cpu", device_flops_per_s=(("float32", 1e9),), device_bytes_per_s=1e15
)
ROWS, WIDTH, LAYERS = 256, 128, 3
ACTIVATION = ROWS * WIDTH * 4
WEIGHT = WIDTH * WIDTH * 4


def layer(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    return torch.tanh(x @ weight)


def graphs_of(model: Callable[..., torch.Tensor], *inputs: torch.Tensor) -> list[fx.GraphModule]:
    """Forward and backward."""
    graphs: list[fx.GraphModule] = []

    def split(joint: fx.GraphModule, inputs: object, **keywords: object) -> tuple[fx.GraphModule, fx.GraphModule]:
        graphs.extend(min_cut_rematerialization_partition(joint, inputs, **keywords))
        return graphs[0], graphs[1]

    aot_function(model, fw_compiler=lambda gm, _: make_boxed_func(gm), partition_fn=split)(*inputs)
    return graphs


@pytest.fixture(scope="module")
def partition() -> Partition:
    """Layers of one product and a tanh each, then a sum. Blocks: the layers, the last with the loss."""
    weights = [nn.Parameter(torch.randn(WIDTH, WIDTH)) for _ in range(LAYERS)]

    def model(x: torch.Tensor, *weights: torch.Tensor) -> torch.Tensor:
        for weight in weights:
            x = layer(x, weight)
        return x.sum()

    forward, backward = graphs_of(model, torch.randn(ROWS, WIDTH), *weights)
    products = {node.name for node in forward.graph.nodes if "mm" in str(node.target)}
    block_of: dict[str, int] = {}
    block = -1
    for node in forward.graph.nodes:
        if node.op == "call_function":
            block += node.name in products
            block_of[node.name] = block
    block = LAYERS
    for node in backward.graph.nodes:
        # backward of a layer begins with that of its tanh
        block -= "tanh_backward" in str(node.target)
        if node.op == "call_function" and node.name not in block_of:
            block_of[node.name] = max(0, min(block, LAYERS - 1))
    placeholders = [node.name for node in forward.graph.nodes if node.op == "placeholder"]
    params = {
        name: ParamInfo(
            fqn=f"layers.{index}.weight",
            num_bytes=WEIGHT,
            num_elements=WIDTH * WIDTH,
            requires_grad=index > 0,
            state_bytes=2 * WEIGHT,
        )
        for index, name in enumerate(placeholders[1:])
    }
    blocks = tuple(
        Block(
            index=index,
            kind=BlockKind.LAYER,
            module_fqn=f"layers.{index}",
            forward_nodes=(),
            backward_nodes=(),
            param_fqns=(f"layers.{index}.weight",),
            digest="middle" if index == 1 else f"layer {index}",
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
        inner_backend="eager",
    )


@pytest.fixture(autouse=True)
def _own_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setenv("AUTOHETE_CACHE_DIR", str(tmp_path))
    yield


def test_seconds_are_flops_over_the_machines_rate(partition: Partition) -> None:
    costs = profile_analytic(partition, MACHINE).costs
    product_s = 2 * ROWS * WIDTH * WIDTH / 1e9
    assert [cost.forward_s for cost in costs] == pytest.approx([product_s] * LAYERS, rel=1e-3)
    assert sum(cost.backward_s for cost in costs) == pytest.approx((2 * LAYERS - 1) * product_s, rel=1e-3)


def test_parameters_are_counted_with_their_owner_and_frozen_ones_have_no_gradient(partition: Partition) -> None:
    costs = profile_analytic(partition, MACHINE).costs
    assert [cost.param_bytes for cost in costs] == [WEIGHT] * LAYERS
    assert [cost.grad_bytes for cost in costs] == [0, WEIGHT, WEIGHT]
    assert [cost.optimizer_bytes for cost in costs] == [0, 2 * WEIGHT, 2 * WEIGHT]
    assert [cost.num_params for cost in costs] == [0, WIDTH * WIDTH, WIDTH * WIDTH]


def test_saved_bytes_belong_to_the_producer_and_a_tied_placeholder_counts_once(partition: Partition) -> None:
    costs = profile_analytic(partition, MACHINE).costs
    # each tanh is saved, and read by the next layer
    assert [cost.saved_bytes for cost in costs] == [ACTIVATION, ACTIVATION, ACTIVATION + 4]
    assert [cost.boundary_bytes for cost in costs] == [ACTIVATION, ACTIVATION, 4]
    assert [cost.offloaded_bytes() for cost in costs] == [ACTIVATION] * LAYERS
    tied = {**partition.params}
    first, second = list(tied)[1:3]
    tied[second] = tied[first]
    costs = profile_analytic(replace(partition, params=tied), MACHINE).costs
    assert sum(cost.param_bytes for cost in costs) == 2 * WEIGHT


def test_only_the_last_block_has_something_to_recompute(partition: Partition) -> None:
    costs = profile_analytic(partition, MACHINE).costs
    assert costs[0].recompute_s == costs[1].recompute_s == 0.0
    assert costs[2].recompute_s == pytest.approx(costs[2].forward_s, rel=1e-3)


def test_small_and_returned_tensors_are_not_offloaded(partition: Partition) -> None:
    found = {tensor.num_bytes: tensor for tensor in saved_tensors(partition)}
    assert found[4].pinned and not found[4].offloadable
    assert found[ACTIVATION].offloadable


def test_inference_has_no_backward(partition: Partition) -> None:
    profile = profile_analytic(replace(partition, backward=None), MACHINE)
    assert all(cost.backward_s == cost.saved_bytes == cost.grad_bytes == 0 for cost in profile.costs)
    assert all(cost.forward_s > 0 for cost in profile.costs)


def test_nodes_that_the_map_lacks_are_placed_by_dataflow(partition: Partition) -> None:
    bare = replace(partition, block_of={n: b for n, b in partition.block_of.items() if "tanh" not in n})
    assert bare.placements(bare.forward) == partition.placements(partition.forward)


def test_blocks_run_one_after_another_give_the_whole_graphs_values(partition: Partition) -> None:
    placed = partition.placements(partition.forward)
    inputs = [torch.randn(ROWS, WIDTH), *(torch.randn(WIDTH, WIDTH) for _ in range(LAYERS))]
    names = [node.name for node in partition.forward.graph.nodes if node.op == "placeholder"]
    values = dict(zip(names, inputs, strict=True))
    for block in range(LAYERS):
        piece = extract_block(partition.forward, placed, block)
        assert piece is not None
        read = [node.name for node in piece.graph.nodes if node.op == "placeholder"]
        made = [arg.name for arg in next(n for n in piece.graph.nodes if n.op == "output").args[0]]
        values.update(zip(made, piece(*(values[name] for name in read)), strict=True))
    expected = partition.forward(*inputs)[0]
    loss = next(n for n in partition.forward.graph.nodes if n.op == "output").args[0][0]
    torch.testing.assert_close(values[loss.name], expected)


def test_measured_seconds_come_from_one_run_a_digest_and_are_kept(partition: Partition) -> None:
    alike = replace(
        partition,
        blocks=replace(
            partition.blocks, blocks=tuple(replace(block, digest="alike") for block in partition.blocks.blocks)
        ),
    )
    compiled: list[fx.GraphModule] = []

    def compile_graph(gm: fx.GraphModule, inputs: Sequence[Any], **_: Any) -> Callable[[list[Any]], Any]:
        compiled.append(gm)
        return lambda args: gm(*args)

    before = torch.random.get_rng_state()
    profile = profile_measured(alike, MACHINE, compile_graph=compile_graph)
    assert torch.equal(before, torch.random.get_rng_state())
    assert len(compiled) == 2
    assert profile.source == "measured"
    assert len({(cost.forward_s, cost.backward_s) for cost in profile.costs}) == 1
    assert all(cost.forward_s > 0 and cost.backward_s > 0 for cost in profile.costs)
    again = profile_measured(alike, MACHINE, compile_graph=compile_graph)
    assert len(compiled) == 2
    assert again.costs == profile.costs
    bytes_of = [(c.saved_bytes, c.grad_bytes) for c in profile_analytic(partition, MACHINE).costs]
    assert [(c.saved_bytes, c.grad_bytes) for c in profile.costs] == bytes_of


def test_a_backward_is_timed_with_the_integers_that_its_forward_computes(partition: Partition) -> None:
    """What experts a router chose: with zeros for how many rows each gets, their products would take no time."""

    def routed(x: torch.Tensor, router: torch.Tensor, experts: torch.Tensor) -> torch.Tensor:
        return (x * experts[(x @ router).argmax(-1)]).sum()

    x, router, experts = torch.randn(ROWS, WIDTH), torch.randn(WIDTH, LAYERS), torch.randn(LAYERS, WIDTH)
    forward, backward = graphs_of(routed, x, router, experts.requires_grad_())
    one = replace(
        partition,
        forward=forward,
        backward=backward,
        blocks=replace(partition.blocks, blocks=partition.blocks.blocks[:1]),
        block_of={node.name: 0 for gm in (forward, backward) for node in gm.graph.nodes},
        params={},
    )
    integers: list[torch.Tensor] = []
    others: list[weakref.ref[torch.Tensor]] = []

    def compile_graph(gm: fx.GraphModule, _: Sequence[Any]) -> Callable[[list[Any]], Any]:
        def run(args: list[Any]) -> Any:
            assert not any(other() is not None for other in others), "one run's results take memory during the next"
            results = gm(*args)
            others.extend(weakref.ref(value) for value in results if value.is_floating_point())
            integers.extend(value for value in (*args, *results) if not value.is_floating_point())
            return results

        return run

    assert profile_measured(one, MACHINE, compile_graph=compile_graph).source == "measured"
    assert len(integers) > 2 and all(torch.equal(each, integers[0]) for each in integers if each.shape == (ROWS,))
    assert set(integers[0].tolist()) == set(range(LAYERS))


def test_what_does_not_fit_or_comes_too_late_stays_analytic(partition: Partition) -> None:
    estimates = profile_analytic(partition, MACHINE)
    too_little: tuple[dict[str, Any], ...] = ({"max_bytes": 1000}, {"time_limit_s": -1.0})
    for limits in too_little:
        found = profile_measured(partition, MACHINE, **limits)
        assert found.source == "analytic"
        assert found.costs == estimates.costs


def test_flops_of_attention_on_a_cpu_are_those_of_its_products() -> None:
    query = torch.empty(2, 4, 32, 16)
    run = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default
    from torch.fx.experimental.proxy_tensor import make_fx

    gm = make_fx(lambda q: run(q, q, q)[0], tracing_mode="fake")(query)
    node = next(n for n in gm.graph.nodes if "flash" in str(n.target))
    assert flops_of(node) == 2 * (2 * 2 * 4 * 32 * 32 * 16)


def test_a_value_that_no_kernel_stores_is_timed_with_every_block_that_reads_it() -> None:
    from torch.fx.experimental.proxy_tensor import make_fx

    def two_blocks(positions: torch.Tensor, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        cosines = positions.cos()
        return ((x * cosines) @ weight * cosines) @ weight

    positions, x, weight = torch.randn(3, WIDTH, WIDTH)
    gm = make_fx(two_blocks, tracing_mode="fake")(positions, x, weight)
    not_stored = values_not_stored(gm, "cpu", "inductor")
    assert not_stored == {"cos"}  # products want their operands in memory
    assert not values_not_stored(gm, "cpu", "eager")
    placed = {"cos": 0, "mul": 0, "mm": 0, "mul_1": 1, "mm_1": 1}
    piece = extract_block(gm, placed, 1, not_stored=not_stored)
    assert piece is not None
    read = [node.name for node in piece.graph.nodes if node.op == "placeholder"]
    assert set(read) == {"positions_1", "mm", "weight_1"}
    assert [arg.name for arg in next(iter(reversed(piece.graph.nodes))).args[0]] == ["mm_1"]  # it is not a result here
    values = {"positions_1": positions, "mm": (x * positions.cos()) @ weight, "weight_1": weight}
    found = piece(*(values[name] for name in read))[0]
    torch.testing.assert_close(found, two_blocks(positions, x, weight))


def test_what_attention_has_drawn_its_dropout_by_is_where_its_backward_reads_it() -> None:
    """Fakes of it are on the GPU, where all other results are."""
    with FakeTensorMode():
        q = torch.empty(2, 4, 64, 64, device="cuda")
        out, logsumexp, seed, offset = torch.ops.aten._scaled_dot_product_efficient_attention(q, q, q, None, True, 0.1)
    graph = fx.Graph()
    values = (q, q, q, q, out, logsumexp, seed, offset)
    given = [graph.placeholder(f"input_{n}") for n in range(len(values))]
    for node, value in zip(given, values, strict=True):
        node.meta["val"] = value
    args = (*given[:4], None, *given[4:], 0.1, [True, True, True, False])
    graph.call_function(torch.ops.aten._scaled_dot_product_efficient_attention_backward.default, args)
    assert seed.device.type == offset.device.type == "cuda"
    assert [input_device(node).type for node in given] == ["cuda"] * 6 + ["cpu"] * 2
