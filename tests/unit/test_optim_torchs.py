"""AdamW, Adam and SGD against those of torch.optim with fused=True, wherever parameters and states live."""

import copy
import itertools
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.nn import Parameter

from autohete_fx.ir import Optimizer, Params
from autohete_fx.optim import AdamW, optimizer_of
from autohete_fx.runtime.placement import Placement, place_param
from autohete_fx.runtime.tiers.host import HostTier, is_home, open_tier
from tests.main_job import slow
from tests.optimizers import FULL, KINDS, assert_same, exact_copies, make_params, run, set_grads

SHAPES = ((33, 7), (5,), (), (1,), (0, 4), (200, 300))
PLACES = [(params, optimizer) for params in Params for optimizer in (Optimizer.DEVICE, Optimizer.HOST)]
PLACE_IDS = [f"params_{p.value}-states_{o.value}" for p, o in PLACES]


def kinds_of(*dtypes: torch.dtype) -> Iterator[Any]:
    """Every optimizer with every type. Each compiles a kernel for each type of 16 bits: those of AdamW in bfloat16 are quick.
    Those of others in float16 are thorough."""
    for name, dtype in itertools.product(KINDS, dtypes):
        is_quick = dtype in FULL or (name, dtype) == ("AdamW", torch.bfloat16)
        rest = pytest.mark.thorough if dtype is torch.float16 and name != "AdamW" else pytest.mark.slow
        yield pytest.param(name, dtype, id=f"{name}-{dtype}", marks=[] if is_quick else [rest])


@pytest.fixture
def tier(tmp_path: Path) -> HostTier:
    return open_tier("cpu", str(tmp_path))


def place_all(params: Sequence[Parameter], where: tuple[Params, Optimizer], tier: HostTier) -> None:
    for block, p in enumerate(params):
        place_param(p, Placement(params=where[0], optimizer=where[1], tier=tier, block=block))


@pytest.mark.parametrize("where", PLACES, ids=PLACE_IDS)
@pytest.mark.parametrize(("name", "dtype"), list(kinds_of(torch.float32, torch.float64, torch.bfloat16, torch.float16)))
def test_steps_equal_torch(name: str, dtype: torch.dtype, where: tuple[Params, Optimizer], tier: HostTier) -> None:
    params, kind = make_params(dtype, SHAPES), KINDS[name]
    optimizer = kind.make(params, lr=3e-3)
    place_all(params, where, tier)
    run(kind, params, optimizer, 6, lr=3e-3)
    for p in params:
        assert is_home(p) == (where[0] is Params.HOST)
        for name in (*kind.moments, "master"):
            t = optimizer.state[p].get(name)
            assert t is None or tier.owns(t) == (where[1] is Optimizer.HOST)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize(
    "options",
    [
        {"betas": (0.8, 0.95), "eps": 1e-6, "weight_decay": 0.0},
        {"maximize": True},
        {"betas": (0.0, 0.5)},
        {"lr": 0.0},
        {"lr": torch.tensor(0.01)},
    ],
    ids=["betas", "maximize", "beta1_0", "lr_0", "lr_tensor"],
)
def test_hyperparameters(dtype: torch.dtype, options: dict[str, Any]) -> None:
    params = make_params(dtype, SHAPES)
    run(KINDS["AdamW"], params, KINDS["AdamW"].make(params, **options), 4, **options)


@pytest.mark.parametrize(("name", "dtype"), list(kinds_of(torch.float32, torch.bfloat16)))
def test_a_placement_that_changes_between_steps_changes_no_value(name: str, dtype: torch.dtype, tier: HostTier) -> None:
    params = make_params(dtype, SHAPES)
    optimizer = KINDS[name].make(params)

    def move(step: int) -> None:
        place_all(params, PLACES[step % 4], tier)

    run(KINDS[name], params, optimizer, 9, move)


def test_a_host_gradient_is_used_where_it_is(tier: HostTier) -> None:
    params = make_params(torch.bfloat16, ((64, 64),))
    optimizer = AdamW(params)
    place_all(params, (Params.DEVICE, Optimizer.HOST), tier)
    reference = exact_copies(params)
    expected = torch.optim.AdamW(reference, fused=True)
    for step in range(3):
        set_grads(params, reference, step)
        assert params[0].grad is not None
        params[0].grad = tier.empty_like(params[0]).copy_(params[0].grad)
        optimizer.step()
        expected.step()
        assert_same(params, optimizer, reference, expected, step + 1)


@pytest.mark.parametrize("where", [PLACES[0], PLACES[3]], ids=[PLACE_IDS[0], PLACE_IDS[3]])
@pytest.mark.parametrize(("name", "dtype"), list(kinds_of(torch.float32, torch.bfloat16)))
def test_layouts(name: str, dtype: torch.dtype, where: tuple[Params, Optimizer], tier: HostTier) -> None:
    """Channels-last and transposed parameters, strided views, and gradients laid out in another way."""
    base = torch.randn(4, 6, 5, 5).to(dtype)
    params = [
        Parameter(base.clone(memory_format=torch.channels_last)),
        Parameter(torch.randn(40, 30).to(dtype).t()),
        Parameter(torch.randn(20, 20).to(dtype)[:, ::2]),
        Parameter(torch.randn(30, 40).to(dtype)),
    ]
    optimizer = KINDS[name].make(params)
    place_all(params, where, tier)
    reference = [Parameter(p.detach().to(torch.float32, copy=True)) for p in params]
    expected = KINDS[name].reference(reference)
    for step in range(3):
        set_grads(params, reference, step)
        for r in reference:
            assert r.grad is not None
            r.grad = torch.empty_like(r).copy_(r.grad)  # torch's kernel walks all memory in one order
        assert params[3].grad is not None
        params[3].grad = params[3].grad.t().contiguous().t()
        optimizer.step()
        expected.step()
        assert_same(params, optimizer, reference, expected, step + 1)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_groups_schedulers_and_clipping(dtype: torch.dtype, tier: HostTier) -> None:
    params = make_params(dtype, ((16, 16), (16,), (8, 16)))
    reference = exact_copies(params)

    def groups(p: Sequence[Parameter]) -> list[dict[str, Any]]:
        return [{"params": [p[0]], "weight_decay": 0.3}, {"params": [p[1]], "weight_decay": 0.0, "lr": 0.1}]

    optimizer, expected = AdamW(groups(params), lr=0.01), torch.optim.AdamW(groups(reference), lr=0.01, fused=True)
    for o, p in ((optimizer, params), (expected, reference)):
        o.add_param_group({"params": [p[2]], "betas": (0.7, 0.9)})
    schedules = [torch.optim.lr_scheduler.OneCycleLR(o, max_lr=0.05, total_steps=8) for o in (optimizer, expected)]
    place_all(params[:2], (Params.HOST, Optimizer.HOST), tier)
    for step in range(8):
        set_grads(params, reference, step)
        norm = torch.nn.utils.clip_grad_norm_(params, 0.5)
        assert norm > 0.5, "the clip must bite"
        for p, r in zip(params, reference, strict=True):
            assert p.grad is not None
            r.grad = p.grad.to(r.dtype).clone()
        for o in (optimizer, expected):
            o.step()
        for s in schedules:
            s.step()
        assert optimizer.param_groups[0]["lr"] == expected.param_groups[0]["lr"]
        assert_same(params, optimizer, reference, expected, step + 1)


def test_only_parameters_with_gradients_move() -> None:
    params = make_params(torch.float32, ((4, 4), (4,), (3,)))
    params[1].requires_grad_(False)
    before = [p.detach().clone() for p in params]
    optimizer = AdamW(params, lr=0.1)
    params[0].grad = torch.ones(4, 4)
    optimizer.step()
    assert not torch.equal(params[0], before[0])
    assert torch.equal(params[1], before[1]) and torch.equal(params[2], before[2])
    assert set(optimizer.state) == {params[0]}
    params[1].requires_grad_(True)
    params[1].grad = torch.ones(4)
    optimizer.step()
    assert optimizer.state[params[1]]["step"] == 1 and optimizer.state[params[0]]["step"] == 2


@pytest.mark.parametrize("to_none", [True, False])
def test_zero_grad_keeps_homes_valid(to_none: bool, tier: HostTier) -> None:
    (p,) = make_params(torch.float32, ((8, 8),))
    optimizer = AdamW([p])
    home = tier.empty_like(p).fill_(3.0)
    p.grad = home
    optimizer.zero_grad(set_to_none=to_none)
    assert (p.grad is None) if to_none else (p.grad is home and not home.any())


@pytest.mark.parametrize(("name", "dtype"), list(kinds_of(torch.float32, torch.bfloat16)))
def test_closure_hooks_and_accumulation(name: str, dtype: torch.dtype, tier: HostTier) -> None:
    """Three different micro-batches in a closure, as Lightning runs them, with hooks around the step."""
    torch.manual_seed(0)
    model = torch.nn.Linear(12, 6).to(dtype)
    params = list(model.parameters())
    place_all(params, (Params.HOST, Optimizer.HOST), tier)
    reference = exact_copies(params)
    optimizer, expected = KINDS[name].make(params), KINDS[name].reference(reference)
    calls: list[str] = []
    optimizer.register_step_pre_hook(lambda *_: calls.append("pre"))
    optimizer.register_step_post_hook(lambda *_: calls.append("post"))

    def closure() -> torch.Tensor:
        assert torch.is_grad_enabled()
        optimizer.zero_grad()
        losses = [model(torch.randn(5, 12).to(dtype)).square().mean() for _ in range(3)]
        for loss in losses:
            loss.backward()
        for p, r in zip(params, reference, strict=True):
            assert p.grad is not None
            r.grad = p.grad.to(r.dtype).clone()
        return sum(losses, torch.zeros(()))

    for step in range(3):
        loss = optimizer.step(closure)
        assert loss is not None and loss.isfinite()
        expected.step()
        assert_same(params, optimizer, reference, expected, step + 1)
    assert calls == ["pre", "post"] * 3


@pytest.mark.parametrize("how", ["version", "data", "load", "replaced"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, slow(torch.float16)], ids=str)
@pytest.mark.parametrize("where", PLACES, ids=PLACE_IDS)
def test_edits_between_steps_are_honoured(
    how: str, dtype: torch.dtype, where: tuple[Params, Optimizer], tier: HostTier
) -> None:
    """After an edit, training goes on exactly as from the edited value; elements not edited keep their masters."""
    (p,) = make_params(dtype, ((500, 90),))
    optimizer = AdamW([p], lr=1e-2)
    place_all([p], where, tier)
    for step in range(2):
        set_grads([p], exact_copies([p]), step)
        optimizer.step()
    master = optimizer.state[p].get("master", p).detach().clone()
    edited = torch.rand(p.shape) < 0.3
    value = torch.where(edited, p.detach() * 1.25, p.detach())
    edited &= value != p.detach()
    if how == "version":
        with torch.no_grad():
            p.copy_(value)
    elif how == "data":
        p.data.copy_(value)
    elif how == "load":
        module = torch.nn.Module()
        module.register_parameter("p", p)
        module.load_state_dict({"p": value})
    else:
        p.data = value.clone()
    wanted = torch.where(edited, value.to(master.dtype), master)
    reference = [Parameter(wanted.clone())]
    expected = torch.optim.AdamW(reference, lr=1e-2, fused=True)
    expected.state[reference[0]] = {
        name: optimizer.state[p][name].clone() for name in ("step", "exp_avg", "exp_avg_sq")
    }
    if "master" in optimizer.state[p]:
        assert torch.equal(optimizer.state_dict()["state"][0]["master"], wanted), "state_dict shows the edit"
    set_grads([p], reference, 2)
    optimizer.step()
    expected.step()
    assert_same([p], optimizer, reference, expected, 2)


def test_one_unit_in_the_last_place_is_an_edit() -> None:
    (p,) = make_params(torch.bfloat16, ((100, 100),))
    optimizer = AdamW([p], lr=1e-2)
    set_grads([p], exact_copies([p]), 0)
    optimizer.step()
    p.data.view(torch.int16).add_(1)
    value = p.detach().clone()
    assert torch.equal(optimizer.state_dict()["state"][0]["master"], value.float())


@pytest.mark.parametrize("name", KINDS)
def test_grad_scaler_skips_without_trace(name: str) -> None:
    (p,) = make_params(torch.float32, ((4, 4),))
    reference = exact_copies([p])
    optimizer, expected = KINDS[name].make([p], lr=0.1), KINDS[name].reference(reference, lr=0.1)
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0, growth_interval=10)
    for step, factor in enumerate((1.0, float("inf"), 1.0, float("nan"), 1.0)):
        before, state = p.detach().clone(), copy.deepcopy(optimizer.state_dict())
        optimizer.zero_grad()
        x = torch.full((4,), factor)
        scaler.scale((p @ x).square().sum() * (step + 1)).backward()
        scaler.unscale_(optimizer)
        torch.nn.utils.clip_grad_norm_([p], 1.0)
        reference[0].grad = p.grad.clone() if p.grad is not None else None
        scaler.step(optimizer)
        scaler.update()
        if factor == 1.0:
            expected.step()
        else:
            assert torch.equal(p, before)
            torch.testing.assert_close(optimizer.state_dict(), state, rtol=0, atol=0)
        assert torch.equal(p, reference[0])
    assert optimizer.state[p]["step"] == 3


def test_several_optimizers() -> None:
    a, b = make_params(torch.float32, ((3, 3), (4,)))
    first, second = AdamW([a], lr=0.1), AdamW([b], lr=0.2)
    assert optimizer_of(a) is first and optimizer_of(b) is second and optimizer_of(torch.ones(1)) is None
    a.grad, b.grad = torch.ones(3, 3), torch.ones(4)
    kept = b.detach().clone()
    first.step()
    assert torch.equal(b, kept) and not second.state
    second.step()
    assert not torch.equal(b, kept)
