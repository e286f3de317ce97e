"""16-bit training differs from plain Inductor's by rounding alone: in fp64 the same plan under Inductor equals eager.

Inductor rounds what a kernel stores, and not what stays inside one. A plan that recomputes has other values stored. Its
distance from plain Inductor is therefore like plain Inductor's own distance from eager, in the same run.
"""

from typing import Any

import pytest
import torch
import transformers as hf
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel

import autohete_fx
from autohete_fx import Activations, BlockDecision, Plan
from tests.thorough import thorough

pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("ignore")]  # transformers' own
KEEP, RECOMPUTE = BlockDecision(), BlockDecision(activations=Activations.RECOMPUTE)
SELECTIVE = BlockDecision(activations=Activations.SELECTIVE)
LAYERS = {"fp64": (RECOMPUTE, SELECTIVE), "bf16": (RECOMPUTE,) * 2, "autocast": (SELECTIVE,) * 2}
"""Their decisions, by the kind of numbers. Layers that are decided alike have most kernels in common."""
LABELS = ("prologue", *(f"model.layers.{layer}" for layer in range(2)), "epilogue")
CONFIG: dict[str, Any] = {
    "vocab_size": 128,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
    "use_cache": False,
    "bos_token_id": 1,
    "eos_token_id": 2,
}


def trained(kind: str, backend: str | None, steps: int) -> tuple[list[Tensor], list[Tensor]]:
    """A trainer's loop: loss, clipped gradients, AdamW. Returns the first step's gradients and the last weights."""
    torch.manual_seed(0)
    model: Any = hf.LlamaForCausalLM(hf.LlamaConfig(**CONFIG)).train()
    model = {"fp64": model.double, "bf16": model.bfloat16, "autocast": model.float}[kind]()
    if kind == "fp64":
        for layer in model.model.layers:  # transformers' own compute in fp32, whatever they are given
            layer.input_layernorm, layer.post_attention_layernorm = norm(), norm()
        model.model.norm, model.model.rotary_emb = norm(), Rotary()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True)
    if backend is not None:
        plan = Plan(labels=LABELS, decisions=(KEEP, *LAYERS[kind], KEEP))
        options = {"options": {"plan": plan, "profile": "analytic"}} if backend == "autohete" else {}
        model.compile(backend=backend, **options)
    first: list[Tensor] = []
    for step in range(steps):
        tokens = torch.randint(3, 128, (8, 64), generator=torch.Generator().manual_seed(step))
        with surroundings(kind):
            logits = model(input_ids=tokens).logits[:, :-1]
            loss = nn.functional.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())
        loss.backward()
        first = first or [p.grad.detach().clone() for p in model.parameters()]
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
    torch._dynamo.reset()
    return first, [p.detach().clone() for p in model.parameters()]


def surroundings(kind: str) -> Any:
    if kind == "fp64":
        return sdpa_kernel(SDPBackend.MATH)  # of the other one PyTorch 2.11 compiles no backward in fp64
    return torch.autocast("cpu", dtype=torch.bfloat16, enabled=kind == "autocast")


class Rotary(nn.Module):
    def forward(self, x: Tensor, position_ids: Tensor) -> tuple[Tensor, Tensor]:
        half = torch.arange(0, 16, 2, dtype=torch.float64) / 16
        angles = position_ids[..., None] * 10_000.0**-half
        return torch.cat((angles, angles), -1).cos(), torch.cat((angles, angles), -1).sin()


def norm() -> nn.RMSNorm:
    return nn.RMSNorm(CONFIG["hidden_size"], eps=1e-6, dtype=torch.float64)


def distance(given: list[Tensor], expected: list[Tensor]) -> float:
    return max((a.double() - b.double()).abs().max().item() for a, b in zip(given, expected, strict=True))


@pytest.mark.thorough
def test_in_fp64_a_plan_that_recomputes_trains_as_eager_does():
    given, expected = trained("fp64", "autohete", 6), trained("fp64", None, 6)
    assert autohete_fx.compilations()[-1].plan.decisions == (KEEP, *LAYERS["fp64"], KEEP)
    assert distance(given[0], expected[0]) < 1e-12
    assert distance(given[1], expected[1]) < 1e-10


@pytest.mark.parametrize("kind", ["bf16", thorough("autocast")])
def test_in_bf16_it_is_no_further_from_inductor_than_inductor_is_from_eager(kind: str):
    (eager, _), (plain, _), (given, _) = (trained(kind, name, 1) for name in (None, "inductor", "autohete"))
    assert distance(given, plain) <= 2 * distance(plain, eager)
    assert distance(given, eager) <= 2 * distance(plain, eager)
