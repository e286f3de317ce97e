"""Whole training loops: modules, compiled and eager, with the optimizer's states and parameters anywhere."""

import copy
import functools
import io
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from autohete_fx.ir import Optimizer, Params
from autohete_fx.optim import AdamW
from autohete_fx.runtime.placement import Placement, place_param
from autohete_fx.runtime.tiers.host import HostTier, open_tier
from tests.processes import run_python

PLACES = [(params, optimizer) for params in Params for optimizer in (Optimizer.DEVICE, Optimizer.HOST)]
PLACE_IDS = [f"params_{p.value}-states_{o.value}" for p, o in PLACES]


class Net(nn.Module):
    """A tied embedding, a norm, a frozen layer and dropout."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(40, 32)
        self.frozen = nn.Linear(32, 32).requires_grad_(False)
        self.hidden = nn.Linear(32, 64)
        self.back = nn.Linear(64, 32)
        self.norm = nn.LayerNorm(32)
        self.drop = nn.Dropout(0.1)
        self.head = nn.Linear(32, 40, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.frozen(self.embed(tokens))
        x = self.norm(x + self.drop(self.back(torch.relu(self.hidden(x)))))
        return nn.functional.cross_entropy(self.head(x).flatten(0, -2).float(), tokens.roll(-1).flatten())


@pytest.fixture
def tier(tmp_path: Path) -> HostTier:
    return open_tier("cpu", str(tmp_path))


def make(dtype: torch.dtype) -> Net:
    torch.manual_seed(0)
    return Net().to(dtype)


def place(model: nn.Module, where: tuple[Params, Optimizer], tier: HostTier) -> None:
    for block, p in enumerate(model.parameters()):
        place_param(p, Placement(params=where[0], optimizer=where[1], tier=tier, block=block))


def train(model: Net, optimizer: torch.optim.Optimizer, steps: range, after: Callable[[int], None]) -> list[float]:
    """Fresh data each step, three different micro-batches, clipping, a schedule, and evaluation between steps."""
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda n: 1.0 / (1 + n))
    losses = []
    for step in steps:
        torch.manual_seed(100 + step)
        optimizer.zero_grad(set_to_none=step % 2 == 0)
        for _ in range(3):
            loss = model(torch.randint(0, 40, (2, 12)))
            losses.append(loss.item())
            loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 0.1)
        optimizer.step()
        schedule.step()
        after(step)
        with torch.no_grad():
            losses.append(model(torch.arange(12)[None]).item())
    return losses


KINDS = {"lr": 1e-2, "weight_decay": 0.1}


def trained(
    model: Net, optimizer: torch.optim.Optimizer, compiled: bool, after: Callable[[int], None]
) -> tuple[Any, ...]:
    """Losses, gradients of each step, parameters and states."""
    if compiled:
        model.compile()
    history: list[dict[str, torch.Tensor]] = []

    def note(step: int) -> None:
        history.append({n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None})
        after(step)

    losses = train(model, optimizer, range(5), note)
    return losses, history, copy.deepcopy(model.state_dict()), copy.deepcopy(optimizer.state_dict())


@functools.cache
def trained_plainly(compiled: bool) -> tuple[Any, ...]:
    model = make(torch.float32)
    optimizer = torch.optim.AdamW(model.parameters(), **KINDS, fused=True)
    return trained(model, optimizer, compiled, lambda step: None)


@pytest.mark.parametrize(
    "compiled",
    [
        pytest.param(False, id="eager"),
        pytest.param(True, id="inductor", marks=[pytest.mark.slow, pytest.mark.keeps_compiled]),
    ],
)
@pytest.mark.parametrize("where", PLACES, ids=PLACE_IDS)
def test_training_equals_torch_bitwise(where: tuple[Params, Optimizer], compiled: bool, tier: HostTier) -> None:
    """fp32: losses, gradients, parameters and states, with placement before the first step and changed in mid-run."""
    model = make(torch.float32)
    place(model, where, tier)

    def again(step: int) -> None:
        if step == 2:
            place(model, PLACES[(PLACES.index(where) + 1) % 4], tier)

    hosted, plain = trained(model, AdamW(model.parameters(), **KINDS), compiled, again), trained_plainly(compiled)
    assert plain[0] == hosted[0]
    torch.testing.assert_close(hosted[1], plain[1], rtol=0, atol=0)
    torch.testing.assert_close(hosted[2], plain[2], rtol=0, atol=0)
    torch.testing.assert_close(hosted[3]["state"], plain[3]["state"], rtol=0, atol=0)
    assert set(hosted[3]["param_groups"][0]) == set(plain[3]["param_groups"][0])


@pytest.mark.parametrize("where", PLACES[1:], ids=PLACE_IDS[1:])
def test_bf16_training_is_the_same_wherever_it_lives(where: tuple[Params, Optimizer], tier: HostTier) -> None:
    results = []
    for hosted in (False, True):
        model = make(torch.bfloat16)
        optimizer = AdamW(model.parameters(), lr=1e-2)
        if hosted:
            place(model, where, tier)
        losses = train(model, optimizer, range(4), lambda step: None)
        results.append((losses, copy.deepcopy(model.state_dict()), copy.deepcopy(optimizer.state_dict()["state"])))
    assert results[0][0] == results[1][0]
    torch.testing.assert_close(results[1][1:], results[0][1:], rtol=0, atol=0)


@pytest.mark.slow
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_a_step_inside_compiled_code(dtype: torch.dtype) -> None:
    results = []
    for compiled in (False, True):
        model = make(dtype)
        optimizer = AdamW(model.parameters(), lr=1e-2)

        def step(model: Net = model, optimizer: AdamW = optimizer) -> None:
            model(torch.arange(24).view(2, 12)).backward()
            optimizer.step()
            optimizer.zero_grad()

        model.eval()
        run = torch.compile(step, backend="aot_eager") if compiled else step
        for _ in range(3):
            run()
        results.append(model.state_dict())
    torch.testing.assert_close(results[1], results[0], rtol=0, atol=0)


def test_bf16_masters_learn_what_16_bits_cannot() -> None:
    """Updates far below a weight's last bit add up in the master."""
    p = nn.Parameter(torch.full((256,), 100.0, dtype=torch.bfloat16))
    optimizer = AdamW([p], lr=1e-3, weight_decay=0.0)
    for _ in range(300):
        p.grad = torch.ones(256, dtype=torch.bfloat16)
        optimizer.step()
    torch.testing.assert_close(optimizer.state[p]["master"], torch.full((256,), 99.7), rtol=1e-4, atol=0)
    assert torch.equal(p.float(), torch.full((256,), 99.5)), "two steps of 0.5 below 100 is where 99.7 rounds to"


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_a_checkpoint_resumes_bitwise_anywhere(dtype: torch.dtype, tier: HostTier) -> None:
    model = make(dtype)
    optimizer = AdamW(model.parameters(), lr=1e-2)
    place(model, (Params.HOST, Optimizer.HOST), tier)
    train(model, optimizer, range(2), lambda step: None)
    buffer = io.BytesIO()
    torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, buffer)
    losses = train(model, optimizer, range(2, 4), lambda step: None)
    buffer.seek(0)
    saved = torch.load(buffer, weights_only=True)
    for order in ("model first", "optimizer first"):
        twin = make(dtype)
        resumed = AdamW(twin.parameters(), lr=1e-2)
        loads = [lambda twin=twin: twin.load_state_dict(saved["model"])]
        loads.append(lambda resumed=resumed: resumed.load_state_dict(saved["optimizer"]))
        for load in loads if order == "model first" else reversed(loads):
            load()
        assert train(twin, resumed, range(2, 4), lambda step: None) == losses, order
        assert all(torch.equal(a, b) for a, b in zip(model.parameters(), twin.parameters(), strict=True))


def test_distributed_checkpoint_state_dicts(tier: HostTier) -> None:
    """DCP steps a fresh optimizer to learn its states; ours gives what torch's gives, and loads as it does."""
    from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict, set_optimizer_state_dict

    model = make(torch.float32)
    optimizer = AdamW(model.parameters(), lr=1e-2)
    place(model, (Params.DEVICE, Optimizer.HOST), tier)
    train(model, optimizer, range(2), lambda step: None)
    saved = copy.deepcopy(get_optimizer_state_dict(model, optimizer))
    assert saved["state"]["hidden.weight"]["exp_avg"].shape == (64, 32)
    results = []
    for kind in (AdamW, torch.optim.AdamW):
        twin = make(torch.float32)
        twin.load_state_dict(model.state_dict())
        values = copy.deepcopy(twin.state_dict())
        fresh = kind(twin.parameters(), lr=1e-2)
        structure = get_optimizer_state_dict(twin, fresh)
        assert structure["state"].keys() == saved["state"].keys()
        set_optimizer_state_dict(twin, fresh, copy.deepcopy(saved))
        torch.testing.assert_close(twin.state_dict(), values, rtol=0, atol=0)
        results.append((train(twin, fresh, range(2, 4), lambda step: None), twin.state_dict()))
    assert results[0][0] == results[1][0]
    torch.testing.assert_close(results[0][1], results[1][1], rtol=0, atol=0)
    assert results[0][0] == train(model, optimizer, range(2, 4), lambda step: None)


def test_homes_go_with_the_model_and_the_optimizer(tier: HostTier) -> None:
    model = make(torch.bfloat16)
    optimizer = AdamW(model.parameters())
    place(model, (Params.HOST, Optimizer.HOST), tier)
    train(model, optimizer, range(1), lambda step: None)
    assert tier.in_use_bytes > 0
    del model, optimizer
    import gc

    gc.collect()
    assert tier.in_use_bytes == 0


def test_states_outlive_their_tier(tier: HostTier) -> None:
    """A model that is compiled anew drops its old tier; training goes on exactly."""
    reference = make(torch.float32)
    expected = torch.optim.AdamW(reference.parameters(), lr=1e-2, fused=True)
    model = make(torch.float32)
    optimizer = AdamW(model.parameters(), lr=1e-2)
    place(model, (Params.HOST, Optimizer.HOST), tier)
    losses = train(model, optimizer, range(2), lambda step: None)
    tier.close()
    assert losses == train(reference, expected, range(2), lambda step: None)
    losses = train(model, optimizer, range(2, 4), lambda step: None)
    assert losses == train(reference, expected, range(2, 4), lambda step: None)


@pytest.mark.thorough
def test_the_benchmark_runs() -> None:
    script = Path(__file__).parents[2] / "examples" / "benchmarks" / "host_update.py"
    done = run_python([str(script), "--params", "100000", "--repeats", "1", "--threads", "1"])
    assert done.returncode == 0, done.stderr
    assert "share of a stream" in done.stdout and "torch" in done.stdout
