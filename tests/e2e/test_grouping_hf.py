"""Layers of real architectures: small random models from transformers, training with labels."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
import transformers

from tests.joint_graphs import Captured, assert_sound, capture, layers

pytestmark = pytest.mark.slow

VOCAB, DEPTH = 64, 3
COMMON: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": DEPTH,
    "num_attention_heads": 4,
    "max_position_embeddings": 32,
}
DECODER: dict[str, Any] = {**COMMON, "num_key_value_heads": 2, "use_cache": False}
OPT: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": 32,
    "ffn_dim": 48,
    "num_hidden_layers": DEPTH,
    "num_attention_heads": 4,
    "max_position_embeddings": 32,
    "word_embed_proj_dim": 32,
    "use_cache": False,
}
T5: dict[str, Any] = {
    "vocab_size": VOCAB,
    "d_model": 32,
    "d_kv": 8,
    "d_ff": 48,
    "num_layers": DEPTH,
    "num_decoder_layers": 2,
    "num_heads": 4,
    "decoder_start_token_id": 0,
    "use_cache": False,
}
GPT2: dict[str, Any] = {
    "vocab_size": VOCAB,
    "n_embd": 32,
    "n_layer": DEPTH,
    "n_head": 4,
    "n_positions": 32,
    "use_cache": False,
}


def stack(path: str, depth: int = DEPTH) -> list[str]:
    return [f"{path}.{index}" for index in range(depth)]


MODELS: dict[str, tuple[Callable[[], transformers.PreTrainedModel], list[str], int]] = {
    "llama": (
        lambda: transformers.LlamaForCausalLM(transformers.LlamaConfig(**DECODER)),
        stack("model.layers"),
        1,
    ),
    "qwen3": (
        lambda: transformers.Qwen3ForCausalLM(transformers.Qwen3Config(**DECODER, head_dim=8)),
        stack("model.layers"),
        1,
    ),
    "gemma": (
        lambda: transformers.GemmaForCausalLM(transformers.GemmaConfig(**DECODER, head_dim=8)),
        stack("model.layers"),
        1,
    ),
    "opt": (
        lambda: transformers.OPTForCausalLM(transformers.OPTConfig(**OPT)),
        stack("model.decoder.layers"),
        1,
    ),
    "gpt2": (
        lambda: transformers.GPT2LMHeadModel(transformers.GPT2Config(**GPT2)),
        stack("transformer.h"),
        1,
    ),
    "mixtral": (
        lambda: transformers.MixtralForCausalLM(transformers.MixtralConfig(**DECODER, num_local_experts=4)),
        stack("model.layers"),
        1,
    ),
    "bert": (
        lambda: transformers.BertForMaskedLM(transformers.BertConfig(**COMMON)),
        stack("bert.encoder.layer"),
        1,
    ),
    # The first layers compute the position biases that the others add to, and receive their gradients.
    "t5": (
        lambda: transformers.T5ForConditionalGeneration(transformers.T5Config(**T5)),
        [*stack("encoder.block"), *stack("decoder.block", 2)],
        5,
    ),
    "albert": (
        lambda: transformers.AlbertForMaskedLM(transformers.AlbertConfig(**COMMON, embedding_size=16)),
        ["albert.encoder.albert_layer_groups.0.albert_layers.0"] * DEPTH,
        3,
    ),
}


def graphs_of(model: transformers.PreTrainedModel) -> list[Captured]:
    """Every graph of one training step."""
    tokens = torch.randint(1, VOCAB, (2, 8))
    model.train()
    return capture(lambda ids: model(input_ids=ids, labels=ids).loss, tokens)


@pytest.mark.parametrize("name", MODELS)
def test_every_layer_is_a_block(name: str):
    make, expected, max_distinct = MODELS[name]
    graphs = graphs_of(make())
    largest = max(graphs, key=lambda captured: len(captured.graph.graph.nodes))
    graph = assert_sound(largest)
    found = layers(graph)
    assert [block.module_fqn for block in found] == expected
    assert len({block.digest for block in found}) <= max_distinct
    assert all(block.backward_nodes for block in found)
    for captured in graphs:
        assert_sound(captured)


def test_layers_that_are_graphs_of_their_own():
    """OPT with layer dropping breaks at every layer: one graph serves all of them, and is one block."""
    graphs = graphs_of(transformers.OPTForCausalLM(transformers.OPTConfig(**OPT, layerdrop=0.1)))
    assert len(graphs) > 2
    for captured in graphs:
        assert len(assert_sound(captured).blocks) == 1
