"""Real architectures whose optimizer states are in every place, some in two of one block, on a device with memory of its own."""

import random
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
import transformers as hf
from torch import Tensor, nn

from autohete_fx import Activations, BlockDecision, Optimizer, Params, Plan
from autohete_fx.ir import Overlap, Schedule
from autohete_fx.runtime import disk
from autohete_fx.runtime.placement import placement_of
from tests.held_updates import use_lanes
from tests.thorough import thorough
from tests.training import HOST, STREAMED, Sizes, assert_equal, ours, plain

pytestmark = pytest.mark.slow

SIZES = Sizes(batch=2, time=32)
WIDTH: dict[str, Any] = {"vocab_size": 128, "hidden_size": 128, "intermediate_size": 256, "num_attention_heads": 4}
DEEPSEEK: dict[str, Any] = {
    **WIDTH,
    "num_hidden_layers": 2,
    "moe_intermediate_size": 128,
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "n_group": 2,
    "topk_group": 1,
    "first_k_dense_replace": 1,
    "kv_lora_rank": 64,
    "q_lora_rank": 64,
    "qk_rope_head_dim": 16,
    "qk_nope_head_dim": 32,
    "v_head_dim": 32,
    "use_cache": False,
}
T5: dict[str, Any] = {
    "vocab_size": 128,
    "d_model": 128,
    "d_kv": 32,
    "d_ff": 256,
    "num_layers": 2,
    "num_heads": 4,
    "use_cache": False,
}
DECISIONS = (
    replace(STREAMED, params=Params.HOST),
    replace(HOST, num_moved_states=2, other_states=Optimizer.STREAMED),
    BlockDecision(activations=Activations.SELECTIVE, params=Params.HOST, optimizer=Optimizer.DISK, prefetch_distance=2),
    replace(STREAMED, activations=Activations.RECOMPUTE, num_moved_states=2, other_states=Optimizer.DISK),
    replace(HOST, optimizer=Optimizer.DISK, num_moved_states=1, other_states=Optimizer.HOST, keeps_fetched=True),
    replace(STREAMED, activations=Activations.OFFLOAD, num_offloaded=2, num_moved_states=3),
)


class WithLoss(nn.Module):
    """A model with labels, as a function of tokens alone."""

    def __init__(self, model: Any) -> None:
        super().__init__()
        self.model = model

    def forward(self, tokens: Tensor) -> Tensor:
        return self.model(input_ids=tokens, labels=tokens).loss


def deepseek() -> Any:
    return hf.DeepseekV3ForCausalLM(hf.DeepseekV3Config(**DEEPSEEK))


def t5() -> Any:
    return hf.T5ForConditionalGeneration(hf.T5Config(**T5, decoder_start_token_id=0))


def partly_frozen_llama() -> Any:
    config = hf.LlamaConfig(**WIDTH, num_hidden_layers=2, tie_word_embeddings=True, use_cache=False)
    model = hf.LlamaForCausalLM(config)
    for name, parameter in model.named_parameters():
        parameter.requires_grad_("layers.1" in name or "_proj" not in name or "q_proj" in name or "up_proj" in name)
    return model


def pair(path: str) -> tuple[str, ...]:
    return f"model.{path}.0", f"model.{path}.1"


@pytest.mark.filterwarnings("ignore")  # transformers' own
@pytest.mark.parametrize(
    ("made", "layers", "overlap", "how"),
    [
        thorough(deepseek, pair("model.layers"), "step", {"clip": True}),
        (t5, (*pair("encoder.block"), "bridge", *pair("decoder.block")), "backward", {}),
        (partly_frozen_llama, pair("model.layers"), None, {"micro_batches": 2}),
    ],
)
def test_states_in_every_place_are_bitwise_exact(
    made: Callable[[], Any],
    layers: tuple[str, ...],
    overlap: str | None,
    how: dict[str, Any],
    monkeypatch: pytest.MonkeyPatch,
):
    """Dropout, tied embeddings, experts, an encoder beside a decoder, frozen matrices: under random delays of every lane."""

    def make() -> Any:
        torch.manual_seed(0)
        return WithLoss(made()).train()

    chance = random.Random(0)
    use_lanes(monkeypatch, is_host=False, num_update_workers=3, pace=lambda ticket: chance.uniform(0, 0.002))
    monkeypatch.setattr(disk, "WINDOW_BYTES", 2**15)  # several a parameter
    names = ("prologue", *layers, "epilogue")
    schedule = Schedule(overlap=Overlap.NONE if overlap is None else Overlap(overlap))
    plan = Plan(labels=names, decisions=(DECISIONS * 2)[: len(names)], schedule=schedule)
    model = make()
    options = {"plan": plan, "micro_batches": how.get("micro_batches", 1)}
    given = ours(model, "eager", options, overlap, sizes=SIZES, **how)
    places = {found.optimizer for p in model.parameters() if (found := placement_of(p)) is not None}
    assert places >= {Optimizer.HOST, Optimizer.STREAMED, Optimizer.DISK}
    assert_equal(given, plain(make(), "eager", sizes=SIZES, **how), bitwise=True)
