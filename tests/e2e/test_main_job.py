"""The main job: training under hand-made and solved plans equals plain ``torch.compile``, within the budget.

With ``inner_backend="eager"`` the kernels are those of ``aot_eager`` and everything must be bitwise equal; with Inductor
the comparison has the tolerance that plain Inductor has against eager.
"""

import copy
import gc
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import autohete_fx
from autohete_fx import Activations, BlockDecision, Optimizer, Params, Plan

LABELS = ("prologue", "layers.0", "layers.1", "layers.2", "epilogue")
HOST = BlockDecision(activations=Activations.OFFLOAD, params=Params.HOST, optimizer=Optimizer.HOST)
PLANS: dict[str, tuple[BlockDecision, ...]] = {
    "keep": (BlockDecision(),) * 5,
    "recompute": (BlockDecision(activations=Activations.RECOMPUTE),) * 5,
    "offload": (BlockDecision(activations=Activations.OFFLOAD),) * 5,
    "host-params": (BlockDecision(params=Params.HOST, prefetch_distance=2),) * 5,
    "host-optimizer": (BlockDecision(optimizer=Optimizer.HOST),) * 5,
    "mixed": (
        BlockDecision(params=Params.HOST),
        HOST,
        BlockDecision(activations=Activations.RECOMPUTE, params=Params.HOST, optimizer=Optimizer.HOST),
        BlockDecision(activations=Activations.OFFLOAD, optimizer=Optimizer.HOST, prefetch_distance=2),
        BlockDecision(activations=Activations.RECOMPUTE, optimizer=Optimizer.HOST),
    ),
}
STEPS = 5


class Layer(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)
        self.dropout = nn.Dropout(0.1)

    def forward(self, x: Tensor) -> Tensor:
        batch, time, width = x.shape
        q, k, v = (t.view(batch, time, 4, -1).transpose(1, 2) for t in self.qkv(self.norm1(x)).chunk(3, dim=-1))
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).reshape(batch, time, width)
        x = x + self.dropout(self.out(mixed))
        return x + self.dropout(self.down(F.gelu(self.up(self.norm2(x)))))


class Model(nn.Module):
    def __init__(self, tied: bool = False, width: int = 64) -> None:
        super().__init__()
        self.embedding = nn.Embedding(128, width)
        self.layers = nn.ModuleList(Layer(width) for _ in range(3))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, 128, bias=False)
        if tied:
            self.head.weight = self.embedding.weight

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embedding(tokens)
        for layer in self.layers:
            x = layer(x)
        return F.cross_entropy(self.head(self.norm(x)).flatten(0, 1).float(), tokens.roll(-1, 1).flatten())


def make(tied: bool = False, width: int = 64) -> Model:
    torch.manual_seed(0)
    return Model(tied, width)


def batch(step: int, micro_batch: int) -> Tensor:
    return torch.randint(128, (8, 64), generator=torch.Generator().manual_seed(100 * step + micro_batch))


def train(
    model: Model,
    optimizer: Any,
    *,
    micro_batches: int = 1,
    clip: bool = False,
    between: Callable[[Model], list[Tensor]] | None = None,
) -> list[Tensor]:
    """Everything that must agree: losses, every gradient of every step, what ``between`` reads, parameters, states."""
    seen: list[Tensor] = []
    for step in range(STEPS):
        for micro_batch in range(micro_batches):
            torch.manual_seed(1000 * step + micro_batch)
            loss = model(batch(step, micro_batch))
            loss.backward()
            seen.append(loss.detach().clone())
        if clip:
            seen.append(nn.utils.clip_grad_norm_(model.parameters(), 0.5).clone())
        seen.extend(p.grad.clone() for p in model.parameters() if p.grad is not None)
        optimizer.step()
        optimizer.zero_grad()
        if between is not None:
            seen.extend(between(model))
    seen.extend(p.detach().clone() for p in model.parameters())
    states = optimizer.state_dict()["state"]
    seen.extend(states[i][name].clone() for i in sorted(states) for name in ("exp_avg", "exp_avg_sq"))
    return seen


@pytest.fixture(autouse=True)
def fresh_dynamo() -> Iterator[None]:
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()
    gc.collect()


def plain(model: Model, inner: str, **how: Any) -> list[Tensor]:
    model.compile(backend="aot_eager" if inner == "eager" else "inductor")
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-3, fused=True)
    result = train(model, optimizer, **how)
    torch._dynamo.reset()
    return result


def ours(model: Model, inner: str, options: dict[str, Any], **how: Any) -> list[Tensor]:
    optimizer = autohete_fx.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-3)
    model.compile(backend="autohete", options={"inner_backend": inner, "profile": "analytic", **options})
    return train(model, optimizer, **how)


def assert_equal(given: list[Tensor], expected: list[Tensor], *, bitwise: bool) -> None:
    assert len(given) == len(expected)
    for ours_value, plain_value in zip(given, expected, strict=True):
        if bitwise:
            assert torch.equal(ours_value, plain_value)
        else:
            torch.testing.assert_close(ours_value, plain_value, atol=1e-4, rtol=1e-3)


def plan(name: str) -> Plan:
    return Plan(labels=LABELS, decisions=PLANS[name])


@pytest.mark.parametrize("name", PLANS)
def test_hand_made_plans_are_bitwise_exact(name: str):
    expected = plain(make(), "eager")
    assert_equal(ours(make(), "eager", {"plan": plan(name)}), expected, bitwise=True)
    compilation = next(c for c in reversed(autohete_fx.compilations()) if c.training)
    kinds = {t.op for t in compilation.transfers}
    wanted = {"offload": {"offload", "reload"}, "host-params": {"prefetch"}, "host-optimizer": {"offload"}}
    assert kinds >= wanted.get(name, set())
    assert bool(kinds) == (name not in ("keep", "recompute"))


def evaluate(model: Model) -> list[Tensor]:
    """Reads of every public kind between two steps."""
    model.eval()
    with torch.no_grad():
        loss = model(batch(99, 0))
    model.train()
    copied = copy.deepcopy(model.layers[0].up.weight)
    state = {name: value.clone() for name, value in model.state_dict().items()}
    return [loss.clone(), copied.detach(), state["layers.1.down.weight"], model.layers[2].up.weight.norm().detach()]


def frozen(model: Model) -> Model:
    model.embedding.weight.requires_grad_(False)
    for parameter in model.layers[1].parameters():
        parameter.requires_grad_(False)
    return model


@pytest.mark.parametrize(
    ("case", "how"),
    [
        ("accumulation", {"micro_batches": 3}),
        ("clipping", {"clip": True, "micro_batches": 2}),
        ("evaluation between steps", {"between": evaluate}),
    ],
)
def test_loops_are_bitwise_exact(case: str, how: dict[str, Any]):
    expected = plain(make(), "eager", **how)
    options = {"plan": plan("mixed"), "micro_batches": how.get("micro_batches", 1)}
    assert_equal(ours(make(), "eager", options, **how), expected, bitwise=True)


@pytest.mark.parametrize("change", [frozen, lambda model: make(tied=True)], ids=["frozen", "tied"])
def test_frozen_and_tied_parameters_are_bitwise_exact(change: Callable[[Model], Model]):
    expected = plain(change(make()), "eager")
    assert_equal(ours(change(make()), "eager", {"plan": plan("mixed")}), expected, bitwise=True)


def test_bf16_parameters_train_on_fp32_masters():
    """Host and device placement of bf16 parameters agree, and both follow a hand-written fp32 master."""
    reference = make().bfloat16()
    masters = [p.detach().float().requires_grad_() for p in reference.parameters()]
    master_optimizer = torch.optim.AdamW(masters, lr=1e-3, fused=True)
    reference.compile(backend="aot_eager")
    losses = []
    for step in range(STEPS):
        torch.manual_seed(1000 * step)
        loss = reference(batch(step, 0))
        loss.backward()
        losses.append(loss.item())
        for master, parameter in zip(masters, reference.parameters(), strict=True):
            assert parameter.grad is not None
            master.grad = parameter.grad.float()
        master_optimizer.step()
        with torch.no_grad():
            for master, parameter in zip(masters, reference.parameters(), strict=True):
                parameter.copy_(master)
                parameter.grad = None
    torch._dynamo.reset()
    for name in ("keep", "mixed"):
        model = make().bfloat16()
        seen = ours(model, "eager", {"plan": plan(name)})
        given = [t.item() for t in seen if t.dim() == 0]
        assert given == pytest.approx(losses, rel=2e-2)
        for parameter, master in zip(model.parameters(), masters, strict=True):
            torch.testing.assert_close(parameter.float(), master.detach(), atol=4e-3, rtol=2e-2)
        torch._dynamo.reset()


def measured_steps(model: Model, optimizer: Any, steps: int = 3) -> int:
    """The largest peak over every step, the compiling one included."""
    peak = 0
    for step in range(steps):
        torch.manual_seed(step)
        with autohete_fx.MemoryMeter("cpu") as meter:
            model(batch(step, 0)).backward()
            optimizer.step()
            optimizer.zero_grad()
        peak = max(peak, meter.peak_bytes)
    return peak


def budget_case(inner: str, share: float, width: int) -> None:
    with autohete_fx.MemoryMeter("cpu") as meter:
        foreign = meter.start_bytes
    model = make(width=width)
    optimizer: Any = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True)
    model.compile(backend="aot_eager" if inner == "eager" else "inductor")
    plain_peak = measured_steps(model, optimizer) - foreign
    del model, optimizer
    torch._dynamo.reset()
    gc.collect()
    with autohete_fx.MemoryMeter("cpu") as meter:
        foreign = meter.start_bytes
    model = make(width=width)
    optimizer = autohete_fx.AdamW(model.parameters(), lr=1e-3)
    budget = int(plain_peak * share)
    model.compile(backend="autohete", options={"memory_budget": budget, "inner_backend": inner, "profile": "analytic"})
    peak = measured_steps(model, optimizer) - foreign
    predicted = autohete_fx.compilations()[-1].plan.peak_bytes
    assert peak <= budget
    assert predicted == pytest.approx(peak, rel=0.1)


@pytest.mark.parametrize("share", [0.4, 0.5, 0.7, 1.0])
def test_solved_plans_keep_the_budget_in_every_step(share: float):
    budget_case("eager", share, 192)


@pytest.mark.slow
@pytest.mark.parametrize("share", [0.5, 1.0])
def test_solved_plans_keep_the_budget_with_inductor(share: float):
    budget_case("inductor", share, 192)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["recompute", "mixed"])
def test_hand_made_plans_with_inductor(name: str):
    expected = plain(make(), "inductor")
    assert_equal(ours(make(), "inductor", {"plan": plan(name)}), expected, bitwise=False)


def test_a_silly_budget_says_what_would_do_and_that_works():
    model = make()
    autohete_fx.AdamW(model.parameters())
    with pytest.raises(autohete_fx.InfeasiblePlanError, match="held up in") as caught:
        autohete_fx.explain(model, batch(0, 0), options={"memory_budget": 1000, "profile": "analytic"})
    smallest = caught.value.smallest_budget_bytes
    found = autohete_fx.explain(model, batch(0, 0), options={"memory_budget": smallest, "profile": "analytic"})
    assert found[0].plan.peak_bytes <= smallest


def test_the_backend_raises_its_own_errors():
    model = make()
    model.compile(backend="autohete", options={"memory_budget": 1000, "profile": "analytic"})
    with pytest.raises(autohete_fx.InfeasiblePlanError):
        model(batch(0, 0))
    torch._dynamo.reset()
    model.compile(backend="autohete", options={"memory_bugdet": 1000})
    with pytest.raises(autohete_fx.OptionError, match="memory_budget"):
        model(batch(0, 0))
