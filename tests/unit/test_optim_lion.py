"""Lion against its formulas, one operation after another, wherever parameters and states live."""

import copy
import io
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import Parameter

from autohete_fx.errors import OptimizerStateError
from autohete_fx.ir import Optimizer, Params
from autohete_fx.optim import AdamW, Lion, kernels
from autohete_fx.runtime import disk
from autohete_fx.runtime.disk import DiskTier
from autohete_fx.runtime.placement import Placement, place_param
from autohete_fx.runtime.tiers.host import HostTier, is_home, open_tier
from tests.main_job import slow
from tests.references import ReferenceLion
from tests.thorough import thorough

SHAPES = ((33, 7), (5,), (), (1,), (0, 4), (200, 300))
PLACES = [Optimizer.DEVICE, Optimizer.HOST, Optimizer.DISK]
FULL, HALF = [torch.float32, torch.float64], [torch.bfloat16, torch.float16]


@pytest.fixture
def tier(tmp_path: Path) -> HostTier:
    return open_tier("cpu", str(tmp_path))


@pytest.fixture(autouse=True)
def _several_windows_a_parameter(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(disk, "WINDOW_BYTES", 2**15)


def made(dtype: torch.dtype, shapes: Sequence[tuple[int, ...]] = SHAPES) -> tuple[list[Parameter], list[Parameter]]:
    """Parameters, and what the reference trains: copies, or the masters of 16-bit ones."""
    torch.manual_seed(0)
    params = [Parameter(torch.randn(shape).to(dtype)) for shape in shapes]
    return params, [
        Parameter(p.detach().to(torch.float64 if dtype == torch.float64 else torch.float32)) for p in params
    ]


def place(params: Sequence[Parameter], where: Optimizer, tier: HostTier, params_at: Params = Params.DEVICE) -> None:
    on_disk = DiskTier() if where is Optimizer.DISK else None
    for block, p in enumerate(params):
        place_param(p, Placement(params=params_at, optimizer=where, tier=tier, block=block, disk=on_disk))


def backward(params: Sequence[Parameter], reference: Sequence[Parameter]) -> None:
    for p, r in zip(params, reference, strict=True):
        p.grad = torch.randn_like(p)
        r.grad = p.grad.to(r.dtype).clone()


def assert_same(params: Sequence[Parameter], optimizer: Lion, expected: ReferenceLion) -> None:
    """Bit by bit."""
    for p, r, m in zip(params, expected.params, expected.momenta, strict=True):
        state = optimizer.state[p]
        assert torch.equal(state["exp_avg"], m)
        assert torch.equal(p, r.to(p.dtype)), "a 16-bit weight is the rounding of its master"
        assert torch.equal(state.get("master", p), r)
        assert set(state) == {"step", "exp_avg"} | ({"master"} if p.dtype in HALF else set())


@pytest.mark.slow
@pytest.mark.parametrize("params_at", list(Params), ids=str)
@pytest.mark.parametrize("where", PLACES, ids=str)
@pytest.mark.parametrize(
    "dtype", [torch.float32, thorough(torch.float64), torch.bfloat16, thorough(torch.float16)], ids=str
)
def test_steps_are_the_papers_bit_by_bit(
    dtype: torch.dtype, where: Optimizer, params_at: Params, tier: HostTier
) -> None:
    params, reference = made(dtype)
    optimizer, expected = Lion(params, lr=1e-3, weight_decay=0.1), ReferenceLion(reference)
    place(params, where, tier, params_at)
    for step in range(5):
        backward(params, reference)
        optimizer.step()
        expected.step()
        assert_same(params, optimizer, expected)
        assert all(optimizer.state[p]["step"] == step + 1 for p in params)
    large = optimizer.state[params[-1]]["exp_avg"]
    assert is_home(large) == (where is not Optimizer.DEVICE) and tier.owns(large) == (where is Optimizer.HOST)


@pytest.mark.parametrize("dtype", [torch.float32, slow(torch.bfloat16)], ids=str)
@pytest.mark.parametrize(
    "options",
    [{"betas": (0.0, 0.5)}, {"weight_decay": 0.0}, {"maximize": True}, {"lr": 0.0}, {"lr": torch.tensor(0.01)}],
    ids=["betas", "no_decay", "maximize", "lr_0", "lr_tensor"],
)
def test_hyperparameters(dtype: torch.dtype, options: dict[str, Any]) -> None:
    params, reference = made(dtype)
    options = {"lr": 1e-3, "weight_decay": 0.1, **options}
    optimizer = Lion(params, **options)
    expected = ReferenceLion(reference, **{name: options[name] for name in options if name != "maximize"})
    expected.sign, expected.lr = -1.0 if options.get("maximize") else 1.0, float(expected.lr)
    for _ in range(3):
        backward(params, reference)
        optimizer.step()
        expected.step()
        assert_same(params, optimizer, expected)


def test_defaults_are_the_papers() -> None:
    (group,) = Lion([Parameter(torch.ones(2))]).param_groups
    assert {name: group[name] for name in group if name != "params"} == {
        **{"lr": 1e-4, "betas": (0.9, 0.99), "weight_decay": 0.0, "maximize": False}
    }


@pytest.mark.slow
@pytest.mark.parametrize("where", PLACES, ids=str)
def test_edits_of_16_bit_weights_win(where: Optimizer, tier: HostTier) -> None:
    params, reference = made(torch.bfloat16, [(300, 200)])
    optimizer, expected = Lion(params, lr=1e-3, weight_decay=0.1), ReferenceLion(reference)
    place(params, where, tier)
    for step in range(4):
        backward(params, reference)
        if step == 2:
            params[0].data[::3] *= 1.5
            reference[0].data[::3] = params[0].data[::3].float()
        optimizer.step()
        expected.step()
        assert_same(params, optimizer, expected)


def test_clipping_is_pytorchs(tier: HostTier) -> None:
    params, reference = made(torch.float32)
    optimizer, expected = Lion(params, lr=1e-3, weight_decay=0.1, max_grad_norm=0.5), ReferenceLion(reference)
    place(params[::2], Optimizer.HOST, tier)
    for _ in range(3):
        backward(params, reference)
        norm = torch.nn.utils.clip_grad_norm_(reference, 0.5)
        optimizer.step()
        expected.step()
        assert optimizer.grad_norm is not None and torch.equal(optimizer.grad_norm, norm)
        assert_same(params, optimizer, expected)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_without_a_compiler_it_warns_and_is_bitwise_the_same(
    dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object) -> None:
        raise RuntimeError("no compiler here")

    params, reference = made(dtype)
    optimizer, expected = Lion(params, lr=1e-3, weight_decay=0.1), ReferenceLion(reference)
    kernels._compiled.cache_clear()
    monkeypatch.setattr(kernels, "_compile", fail)
    backward(params, reference)
    with pytest.warns(RuntimeWarning, match=r"autohete_fx\.Lion could not compile.*no compiler here"):
        optimizer.step()
    expected.step()
    assert_same(params, optimizer, expected)
    kernels._compiled.cache_clear()


# -- state dicts --------------------------------------------------------------------------------------------------------


def tensors_of(state_dict: dict[str, Any]) -> list[Tensor]:
    return [t for state in state_dict["state"].values() for t in state.values()]


@pytest.mark.parametrize("way", ["deepcopy", "save"])
@pytest.mark.parametrize("where", PLACES, ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, slow(torch.bfloat16)], ids=str)
def test_resume_is_bitwise(dtype: torch.dtype, where: Optimizer, way: str, tier: HostTier) -> None:
    params, reference = made(dtype, [shape for shape in SHAPES if 0 not in shape])
    optimizer = Lion(params, lr=1e-3, weight_decay=0.1)
    place(params, where, tier)
    for _ in range(2):
        backward(params, reference)
        optimizer.step()
    saved = copy.deepcopy(optimizer.state_dict())
    if way == "save":
        buffer = io.BytesIO()
        torch.save(optimizer.state_dict(), buffer)
        buffer.seek(0)
        saved = torch.load(buffer, weights_only=True)
    assert not any(map(is_home, tensors_of(saved)))
    twins = [Parameter(p.detach().clone()) for p in params]
    resumed = Lion(twins, lr=7.0)
    place(twins[:3], Optimizer.HOST, tier)
    resumed.load_state_dict(saved)
    assert resumed.param_groups[0]["lr"] == 1e-3
    backward(params, twins)
    optimizer.step()
    resumed.step()
    assert all(map(torch.equal, params, twins))
    torch.testing.assert_close(resumed.state_dict(), optimizer.state_dict(), rtol=0, atol=0)


@pytest.mark.parametrize("steps", [0, 1])
@pytest.mark.parametrize(
    ("foreign", "message"),
    [
        (AdamW, r"group 0 of the state dict has \['eps', 'amsgrad'\], which Lion does not know.*Lion.state_dict"),
        (torch.optim.AdamW, r"has \['eps', 'amsgrad'\]"),
        (torch.optim.SGD, r"lacks \['betas'\]; it is not Lion's: make it with Lion.state_dict"),
    ],
)
def test_state_dicts_of_others_are_refused(foreign: Any, message: str, steps: int) -> None:
    params, reference = made(torch.float32)
    theirs, optimizer = foreign(reference), Lion(params)
    for _ in range(steps):
        backward(params, reference)
        theirs.step()
        optimizer.step()
    before = copy.deepcopy(optimizer.state_dict())
    with pytest.raises(OptimizerStateError, match=message):
        optimizer.load_state_dict(theirs.state_dict())
    torch.testing.assert_close(optimizer.state_dict(), before, rtol=0, atol=0)
    if foreign is AdamW:
        with pytest.raises(OptimizerStateError, match=r"lacks \['eps'\]; it is not AdamW's: make it with AdamW"):
            theirs.load_state_dict(before)


def test_a_state_that_it_does_not_have_is_refused() -> None:
    params, reference = made(torch.float32)
    optimizer = Lion(params)
    backward(params, reference)
    optimizer.step()
    saved = copy.deepcopy(optimizer.state_dict())
    saved["state"][0]["exp_avg_sq"] = saved["state"][0]["exp_avg"]
    with pytest.raises(OptimizerStateError, match=r"expected \['step', 'exp_avg'\]: make it with Lion"):
        optimizer.load_state_dict(saved)


# -- arguments ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"lr": -1.0}, "lr is -1.0"),
        ({"lr": torch.ones(2)}, "expected one element"),
        ({"weight_decay": -0.1}, "weight_decay is"),
        ({"betas": (0.9, 1.0)}, r"betas\[1\] is 1.0"),
        ({"betas": 0.9}, "betas is 0.9; expected two numbers"),
        ({"overlap": "always"}, "overlap is 'always'"),
        ({"max_grad_norm": 0.0}, "max_grad_norm is 0.0"),
    ],
)
def test_bad_arguments(options: dict[str, Any], message: str) -> None:
    with pytest.raises(OptimizerStateError, match=message):
        Lion([Parameter(torch.ones(2))], **options)


@pytest.mark.parametrize(
    ("dtype", "state_bytes", "moved", "of_adamw"),
    [
        (torch.float32, 4, 20, 28),
        slow(torch.float64, 8, 40, 56),
        slow(torch.bfloat16, 8, 22, 30),
        slow(torch.float16, 8, 22, 30),
    ],
    ids=str,
)
def test_state_bytes_and_what_updates_move(dtype: torch.dtype, state_bytes: int, moved: int, of_adamw: int) -> None:
    p = Parameter(torch.ones(10, 10, dtype=dtype))
    optimizer = Lion([p])
    assert optimizer.state_bytes_of(p) == 100 * state_bytes
    assert optimizer.update_share_of(p) == moved / of_adamw and AdamW([p]).update_share_of(p) == 1.0
    optimizer = Lion([p])
    p.grad = torch.ones_like(p)
    optimizer.step()
    assert sum(t.nbytes for name, t in optimizer.state[p].items() if name != "step") == 100 * state_bytes
