"""Blocks from module paths: which modules are layers, where every node goes, what equal layers share."""

from collections.abc import Callable

import pytest
import torch
from torch import nn

from autohete_fx.capture.assign import check_order
from autohete_fx.capture.dataflow import split_joint
from autohete_fx.capture.grouping import block_index
from autohete_fx.ir import BlockKind
from tests.joint_graphs import Captured, assert_sound, capture_one, layers
from tests.main_job import slow
from tests.processes import run_python
from tests.tiny_models import (
    ACTIVATION_BYTES,
    BATCH,
    GPT,
    TOKENS,
    VOCAB,
    WIDTH,
    EncoderDecoder,
    Layer,
    Shared,
    Wrapped,
    gpt,
    ids,
    loss_of,
)


def names(captured: Captured) -> list[str]:
    return [block.module_fqn for block in layers(assert_sound(captured))]


def test_kinds_in_execution_order():
    graph = assert_sound(gpt())
    assert [block.kind for block in graph.blocks] == [BlockKind.PROLOGUE, *[BlockKind.LAYER] * 3, BlockKind.EPILOGUE]
    assert [block.label for block in graph.blocks] == ["prologue", "layers.0", "layers.1", "layers.2", "epilogue"]


@pytest.mark.parametrize(
    ("prefix", "make"),
    [
        slow("inner.", lambda: capture_one(Wrapped(GPT(depth=2)), ids(), in_place=True)),
        slow("inner.inner.", lambda: capture_one(Wrapped(Wrapped(GPT(depth=2))), ids())),
        slow("", lambda: capture_one(GPT(depth=2, recompute=True), ids())),
    ],
    ids=["wrapped in place", "wrapped twice", "checkpointed"],
)
def test_names_are_the_users_own(prefix: str, make: Callable[[], Captured]):
    assert names(make()) == [f"{prefix}layers.{index}" for index in range(2)]


@pytest.mark.slow
def test_equal_layers_have_equal_digests_and_others_do_not():
    model = GPT(depth=5)
    model.layers[3] = Layer(dropout=0.0)
    graph = assert_sound(capture_one(loss_of(model), ids()))
    digests = [block.digest for block in layers(graph)]
    assert len(set(digests[:3] + digests[4:])) == 1
    assert digests[3] != digests[0]
    assert len({block.digest for block in graph.blocks}) == 4


@pytest.mark.slow
def test_digests_depend_on_shapes_but_not_on_names_or_depth():
    other = Wrapped(GPT(depth=2))
    deep, renamed = gpt(), capture_one(lambda x: loss_of(other.inner)(x), ids())
    wide = capture_one(loss_of(GPT()), torch.randint(VOCAB, (BATCH, TOKENS + 1)))
    digest = [layers(captured.grouped())[0].digest for captured in (deep, renamed, wide)]
    assert digest[0] == digest[1]
    assert digest[0] != digest[2]
    assert deep.grouped().digest != renamed.grouped().digest != wide.grouped().digest


@pytest.mark.slow
def test_digests_are_those_of_every_other_process():
    program = (
        "import torch\n"
        "from tests.tiny_models import gpt\n"
        "graph = gpt().grouped()\n"
        "print(graph.digest, *(block.digest for block in graph.blocks))\n"
    )
    other = run_python(["-W", "ignore", "-c", program])  # which hashes with another seed than this process
    graph = gpt().grouped()
    assert other.stdout == " ".join((graph.digest, *(block.digest for block in graph.blocks))) + "\n"


def test_edges_count_the_residual_stream_once():
    graph = assert_sound(gpt())
    num_bytes = {(edge.producer, edge.consumer): edge.num_bytes for edge in graph.edges}
    assert num_bytes[1, 2] == num_bytes[2, 3] == num_bytes[3, 4] == ACTIVATION_BYTES
    shared = num_bytes[0, 1] - ACTIVATION_BYTES  # the mask and the random seeds, read by every layer
    assert shared > 0
    assert num_bytes[0, 2] == num_bytes[0, 3] == shared
    assert set(num_bytes) <= {(0, 1), (0, 2), (0, 3), (0, 4), (1, 2), (2, 3), (3, 4)}


def test_each_layer_owns_its_parameters():
    blocks = assert_sound(gpt()).blocks
    own = {name for name, _ in Layer().named_parameters()}
    for block in layers(assert_sound(gpt())):
        assert set(block.param_fqns) == {f"{block.module_fqn}.{name}" for name in own}
    assert blocks[0].param_fqns == ("embed.weight",)
    assert blocks[-1].param_fqns == ("norm.weight", "norm.bias", "head.weight")


@pytest.mark.slow
def test_a_tied_parameter_belongs_to_its_first_user():
    graph = assert_sound(capture_one(loss_of(GPT(tied=True)), ids()))
    assert graph.blocks[0].param_fqns == ("embed.weight",)
    assert graph.blocks[-1].param_fqns == ("norm.weight", "norm.bias")
    # The two gradients are added where the second one arrives, which is the last to run in backward.
    assert any("add" in name for name in graph.blocks[0].backward_nodes)


@pytest.mark.slow
def test_frozen_layers_are_layers():
    model = GPT()
    model.embed.requires_grad_(False)
    model.layers[0].requires_grad_(False)
    blocks = layers(assert_sound(capture_one(loss_of(model), ids())))
    assert len(blocks) == 3
    assert not blocks[0].backward_nodes
    assert len(blocks[0].param_fqns) == len(blocks[1].param_fqns)


class Stages(nn.Module):
    """Two widths with a projection between them, as vision models have."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCAB, WIDTH)
        self.stages = nn.ModuleList(Stage(WIDTH * (index + 1)) for index in range(2))
        self.grow = nn.Linear(WIDTH, 2 * WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.stages[1](self.grow(self.stages[0](self.embed(x)))).sum()


class Stage(nn.Module):
    """Several layers of one width."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Layer(width) for _ in range(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block(x)
        return x


@pytest.mark.slow
def test_stages_are_divided_into_their_layers():
    graph = assert_sound(capture_one(Stages(), ids()))
    expected = [f"stages.{stage}.blocks.{block}" for stage in range(2) for block in range(3)]
    assert [block.module_fqn for block in layers(graph)] == expected
    assert [block.kind for block in graph.blocks].count(BlockKind.BRIDGE) == 1
    assert graph.blocks[4].param_fqns == ("grow.weight", "grow.bias")


@pytest.mark.slow
def test_encoder_and_decoder_are_two_stacks_with_a_bridge():
    captured = capture_one(loss_of(EncoderDecoder()), ids())
    graph = assert_sound(captured)
    expected = [*(f"body.encoder.layers.{i}" for i in range(2)), *(f"body.decoder.layers.{i}" for i in range(3))]
    assert [block.module_fqn for block in layers(graph)] == expected
    assert [block.kind for block in graph.blocks].count(BlockKind.BRIDGE) == 1
    bridge = next(block for block in graph.blocks if block.kind is BlockKind.BRIDGE)
    assert "body.encoder.norm.weight" in bridge.param_fqns
    read_encoder = {edge.consumer: edge.num_bytes for edge in graph.edges if edge.producer == bridge.index}
    assert [read_encoder[bridge.index + i] for i in (1, 2, 3)] == [ACTIVATION_BYTES] * 3


@pytest.mark.slow
def test_each_call_of_a_shared_layer_is_a_block_and_the_first_owns_the_parameters():
    blocks = layers(assert_sound(capture_one(Shared(), ids())))
    assert [block.module_fqn for block in blocks] == ["layer"] * 4
    assert [len(block.param_fqns) for block in blocks] == [12, 0, 0, 0]
    assert len({len(block.forward_nodes) for block in blocks}) == 1


class Named(nn.Module):
    """Layers that no list holds."""

    def __init__(self, container: bool) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCAB, WIDTH)
        self.parts = nn.ModuleDict({"early": Layer(), "late": Layer()}) if container else None
        if not container:
            self.block1, self.block2 = Layer(), Layer()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.embed(x)
        if self.parts is None:
            return self.block2(self.block1(x)).sum()
        return self.parts["late"](self.parts["early"](x)).sum()


@pytest.mark.parametrize(
    ("container", "expected"), [(True, ["parts.early", "parts.late"]), slow(False, ["block1", "block2"])]
)
def test_layers_without_a_list(container: bool, expected: list[str]):
    assert names(capture_one(Named(container), ids())) == expected


class Mixture(nn.Module):
    """A layer whose feed-forward part is several experts, all of them run."""

    def __init__(self) -> None:
        super().__init__()
        self.attend = Layer()
        self.experts = nn.ModuleList(
            nn.Sequential(nn.Linear(WIDTH, 8 * WIDTH), nn.GELU(), nn.Linear(8 * WIDTH, WIDTH)) for _ in range(4)
        )
        self.router = nn.Linear(WIDTH, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.attend(x)
        share = self.router(x).softmax(-1)
        return x + sum(share[..., i : i + 1] * expert(x) for i, expert in enumerate(self.experts))


@pytest.mark.slow
def test_experts_are_not_layers():
    model = nn.Sequential(nn.Embedding(VOCAB, WIDTH), *(Mixture() for _ in range(2)), nn.Linear(WIDTH, VOCAB))
    assert names(capture_one(loss_of(model), ids())) == ["1", "2"]


class Residual(nn.Module):
    """A sublayer and its residual."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.inner(x)


@pytest.mark.slow
def test_different_sublayers_of_one_class_do_not_divide_a_layer():
    def feed_forward(factor: int) -> nn.Module:
        return nn.Sequential(nn.Linear(WIDTH, factor * WIDTH), nn.GELU(), nn.Linear(factor * WIDTH, WIDTH))

    body = (nn.Sequential(Residual(feed_forward(2)), Residual(feed_forward(3))) for _ in range(3))
    model = nn.Sequential(nn.Embedding(VOCAB, WIDTH), nn.Sequential(*body), nn.Linear(WIDTH, VOCAB))
    assert names(capture_one(loss_of(model), ids())) == ["1.0", "1.1", "1.2"]


class Hybrid(nn.Module):
    """A stack whose third layer is of another class."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCAB, WIDTH)
        self.layers = nn.ModuleList([Layer(), Layer(), nn.TransformerEncoderLayer(WIDTH, 2, 2 * WIDTH), Layer()])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.embed(x)
        for layer in self.layers:
            x = layer(x) * 0.5
        return x.sum()


@pytest.mark.slow
def test_siblings_of_another_class_are_layers_too():
    graph = assert_sound(capture_one(Hybrid(), ids()))
    assert [block.module_fqn for block in layers(graph)] == [f"layers.{i}" for i in range(4)]
    assert BlockKind.BRIDGE not in {block.kind for block in graph.blocks}
    assert graph.blocks[1].digest == graph.blocks[2].digest != graph.blocks[3].digest


def test_a_model_that_repeats_nothing_is_one_block():
    model = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 12), nn.ReLU(), nn.Linear(12, 4))
    graph = assert_sound(capture_one(lambda x: model(x).sum(), torch.randn(3, 8)))
    assert [block.kind for block in graph.blocks] == [BlockKind.LAYER]
    assert len(graph.blocks[0].param_fqns) == 6
    assert not graph.edges


@pytest.mark.slow
def test_two_models_in_one_function_are_two_stacks():
    first, second = GPT(depth=2), GPT(depth=3)
    graph = assert_sound(capture_one(lambda x: first(x).sum() + second(x).sum(), ids()))
    assert [block.module_fqn for block in layers(graph)] == [f"layers.{i}" for i in (0, 1, 0, 1, 2)]


def test_an_inference_graph_has_the_same_layers():
    model = GPT().eval()
    with torch.no_grad():
        graph = assert_sound(capture_one(model, ids()))
    assert [block.label for block in graph.blocks] == ["prologue", *(f"layers.{i}" for i in range(3)), "epilogue"]
    assert not any(block.backward_nodes for block in graph.blocks)
    assert len({block.digest for block in layers(graph)}) == 1
    assert graph.blocks[1].param_fqns[0].startswith("layers.0.")


@pytest.mark.slow
def test_symbolic_sizes_count_by_their_hints_and_add_no_guard():
    captured = capture_one(loss_of(GPT(depth=2)), ids(), dynamic=True)
    symbols = [
        node.meta["val"] for node in captured.graph.graph.nodes if isinstance(node.meta.get("val"), torch.SymInt)
    ]
    assert symbols
    shapes = symbols[0].node.shape_env
    guards = len(shapes.guards)
    graph = assert_sound(captured)
    assert len(shapes.guards) == guards
    num_bytes = {(edge.producer, edge.consumer): edge.num_bytes for edge in graph.edges}
    assert num_bytes[1, 2] == num_bytes[2, 3] == ACTIVATION_BYTES
    assert len({block.digest for block in layers(graph)}) == 1


def test_the_order_check_sees_a_misplaced_node():
    captured = gpt()
    joint, graph = split_joint(captured.graph), captured.grouped()
    index = block_index(graph)
    groups = {node: index[node.name] for node in joint.order}
    product = next(node for node in joint.forward if node.name in graph.blocks[2].forward_nodes and "mm" in node.name)
    with pytest.raises(AssertionError, match="against the order"):
        check_order(joint, {**groups, product: 0})
    with pytest.raises(AssertionError, match="against the order"):
        check_order(joint, {**groups, product: 4})
    del groups[product]
    with pytest.raises(AssertionError, match="in no group"):
        check_order(joint, groups)


def test_nodes_without_a_path_are_placed_by_dataflow():
    captured = gpt()
    whole = block_index(captured.grouped())
    joint = split_joint(captured.graph)
    inner = [node for node in joint.order if "layers.1" in str(node.meta.get("nn_module_stack"))]
    removed = inner[3::7]
    partial = Captured(captured.graph, captured.param_fqns)
    saved = {node: node.meta.pop("nn_module_stack") for node in removed}
    try:
        index = block_index(assert_sound(partial))
    finally:
        for node, stack in saved.items():
            node.meta["nn_module_stack"] = stack
    assert {node.name: index[node.name] for node in removed} == {node.name: whole[node.name] for node in removed}
