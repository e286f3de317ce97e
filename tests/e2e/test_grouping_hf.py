"""Layers of real architectures that are called several times or compiled one by one. test_hf.py has those of others."""

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
    "num_hidden_layers": DEPTH,
    "num_attention_heads": 4,
    "max_position_embeddings": 32,
}


def graphs_of(model: transformers.PreTrainedModel) -> list[Captured]:
    """Every graph of one training step."""
    tokens = torch.randint(1, VOCAB, (2, 8))
    model.train()
    return capture(lambda ids: model(input_ids=ids, labels=ids).loss, tokens)


def test_each_call_of_a_shared_layer_is_a_block():
    config = transformers.AlbertConfig(**COMMON, intermediate_size=48, embedding_size=16)
    (captured,) = graphs_of(transformers.AlbertForMaskedLM(config))
    found = layers(assert_sound(captured))
    assert [block.module_fqn for block in found] == ["albert.encoder.albert_layer_groups.0.albert_layers.0"] * DEPTH
    assert all(block.backward_nodes for block in found)


def test_layers_that_are_graphs_of_their_own():
    """OPT with layer dropping breaks at every layer: one graph serves all of them, and is one block."""
    config = transformers.OPTConfig(**COMMON, ffn_dim=48, word_embed_proj_dim=32, use_cache=False, layerdrop=0.1)
    graphs = graphs_of(transformers.OPTForCausalLM(config))
    assert len(graphs) > 2
    for captured in graphs:
        assert len(assert_sound(captured).blocks) == 1
