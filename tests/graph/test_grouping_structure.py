"""Layers from the shape of the graph: no module paths, or paths that show nothing."""

import pytest
import torch
from torch import nn

from autohete_fx.capture.dataflow import split_joint
from autohete_fx.capture.grouping import block_index
from autohete_fx.ir import BlockKind
from tests.joint_graphs import Captured, assert_sound, capture_one, layers, strip
from tests.tiny_models import (
    ACTIVATION_BYTES,
    GPT,
    TOKENS,
    VOCAB,
    WIDTH,
    EncoderDecoder,
    Layer,
    Shared,
    gpt,
    ids,
    loss_of,
)

PATHS = ("nn_module_stack", "fwd_nn_module_stack")


def moved(first: Captured, second: Captured) -> set[str]:
    """Nodes that two groupings of one graph place differently; both have the same number of blocks."""
    a, b = first.grouped(), assert_sound(second)
    assert len(a.blocks) == len(b.blocks)
    one, other = block_index(a), block_index(b)
    return {name for name in one if one[name] != other[name]}


def test_without_paths_the_same_layers_come_out():
    captured = gpt()
    bare = strip(captured, *PATHS)
    graph = assert_sound(bare)
    assert len(layers(graph)) == 3
    assert len({block.digest for block in layers(graph)}) == 1
    assert [block.digest for block in layers(graph)] == [block.digest for block in layers(captured.grouped())]
    assert {(e.producer, e.consumer): e.num_bytes for e in graph.edges}[1, 2] == ACTIVATION_BYTES
    assert [block.param_fqns for block in graph.blocks] == [block.param_fqns for block in captured.grouped().blocks]


def test_without_any_trace_of_forward_only_borders_move():
    captured = gpt()
    joint = split_joint(captured.graph)
    difference = moved(captured, strip(captured, *PATHS, "seq_nr"))
    products = {node.name for node in joint.order if "mm" in node.name}
    assert not difference & products
    assert not difference & {node.name for node in joint.forward if joint.order[node] < joint.forward_end}
    assert len(difference) < 0.1 * len(joint.order)


@pytest.mark.slow
def test_a_function_over_plain_parameters():
    """A GPT without any module: what functional code traces to."""
    embed = nn.Parameter(torch.randn(VOCAB, WIDTH))
    weights = [
        {
            "qkv": nn.Parameter(torch.randn(3 * WIDTH, WIDTH)),
            "out": nn.Parameter(torch.randn(WIDTH, WIDTH)),
            "up": nn.Parameter(torch.randn(2 * WIDTH, WIDTH)),
            "down": nn.Parameter(torch.randn(WIDTH, 2 * WIDTH)),
        }
        for _ in range(5)
    ]

    def step(x: torch.Tensor) -> torch.Tensor:
        functional = nn.functional
        h = functional.embedding(x, embed)
        mask = torch.ones(TOKENS, TOKENS, dtype=torch.bool).triu(1)
        for w in weights:
            q, k, v = functional.linear(functional.layer_norm(h, (WIDTH,)), w["qkv"]).chunk(3, -1)
            scores = (q @ k.transpose(-1, -2)).masked_fill(mask, float("-inf"))
            h = h + functional.linear(scores.softmax(-1) @ v, w["out"])
            h = h + functional.linear(functional.gelu(functional.linear(h, w["up"])), w["down"])
        return functional.cross_entropy((h @ embed.T).flatten(0, 1), x.flatten())

    graph = assert_sound(capture_one(step, ids()))
    assert len(layers(graph)) == 5
    assert len({block.digest for block in layers(graph)}) == 1
    assert all(len(block.param_fqns) == 4 and block.backward_nodes for block in layers(graph))
    assert len(graph.blocks[0].param_fqns) == 1  # the embedding, which the head shares


def test_a_graph_whose_parameters_have_no_names():
    captured = strip(gpt(), *PATHS)
    graph = assert_sound(Captured(captured.graph, {}))
    assert len(layers(graph)) == 3


@pytest.mark.slow
def test_an_inference_graph_without_paths():
    with torch.no_grad():
        captured = strip(capture_one(GPT().eval(), ids()), *PATHS)
    assert len(layers(assert_sound(captured))) == 3


@pytest.mark.slow
def test_encoder_and_decoder_without_paths():
    captured = strip(capture_one(loss_of(EncoderDecoder()), ids()), *PATHS)
    graph = assert_sound(captured)
    assert [len(block.param_fqns) for block in layers(graph)] == [12, 12, 18, 18, 18]
    first, second, *decoder = (block.digest for block in layers(graph))
    assert first == second
    assert first not in decoder


@pytest.mark.slow
def test_calls_of_a_shared_layer_without_paths():
    captured = strip(capture_one(Shared(), ids()), *PATHS)
    assert [len(block.param_fqns) for block in layers(assert_sound(captured))] == [12, 0, 0, 0]


@pytest.mark.slow
@pytest.mark.parametrize("strip_paths", [False, True])
def test_a_deep_mlp_repeats_its_projections(strip_paths: bool):
    hidden = [module for _ in range(6) for module in (nn.Linear(WIDTH, WIDTH), nn.ReLU())]
    model = nn.Sequential(nn.Linear(4, WIDTH), nn.ReLU(), *hidden, nn.Linear(WIDTH, 2))
    captured = capture_one(lambda x: model(x).sum(), torch.randn(3, 4))
    graph = assert_sound(strip(captured, *PATHS) if strip_paths else captured)
    assert len(layers(graph)) >= 5
    assert all(block.backward_nodes for block in layers(graph))


def test_one_layer_alone_is_not_divided():
    layer = Layer()
    captured = capture_one(lambda x: layer(x).sum(), torch.randn(2, TOKENS, WIDTH))
    for variant in (captured, strip(captured, *PATHS), strip(captured, *PATHS, "seq_nr")):
        graph = assert_sound(variant)
        assert [block.kind for block in graph.blocks] == [BlockKind.LAYER]
        assert len(graph.blocks[0].param_fqns) == 12
