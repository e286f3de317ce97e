"""SGD's own: momenta that come and go, no states at all, and dicts of torch.optim, which count no steps. And Adam's dicts."""

import copy
import io
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.nn import Parameter

from autohete_fx.errors import OptimizerStateError
from autohete_fx.ir import Optimizer, Params
from autohete_fx.optim import SGD, Adam, AdamW, Lion
from autohete_fx.optim.owners import num_changes
from autohete_fx.runtime import disk
from autohete_fx.runtime.disk import DiskTier
from autohete_fx.runtime.placement import Placement, place_param
from autohete_fx.runtime.tiers.host import HostTier, is_home, open_tier
from tests.main_job import slow
from tests.optimizers import KINDS, assert_same, exact_copies, make_params, run, set_grads
from tests.thorough import thorough

SHAPES = ((33, 7), (5,), (), (200, 300))


@pytest.fixture
def tier(tmp_path: Path) -> HostTier:
    return open_tier("cpu", str(tmp_path))


def place(params: list[Parameter], where: Optimizer, tier: HostTier) -> None:
    on_disk = DiskTier() if where is Optimizer.DISK else None
    for block, p in enumerate(params):
        own = {"params": Params.DEVICE, "optimizer": where, "tier": tier, "block": block, "disk": on_disk}
        place_param(p, Placement(**own))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("dtype", "name"),
    [
        *(pytest.param(torch.float32, name, id=f"torch.float32-{name}") for name in KINDS if name != "AdamW"),
        pytest.param(torch.bfloat16, "momentum", id="torch.bfloat16-momentum"),
        *(
            thorough(torch.bfloat16, name, id=f"torch.bfloat16-{name}")
            for name in KINDS
            if name not in ("AdamW", "momentum")
        ),
    ],
)
def test_states_on_disk(dtype: torch.dtype, name: str, tier: HostTier, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where there are none."""
    monkeypatch.setattr(disk, "WINDOW_BYTES", 2**15)
    params, kind = make_params(dtype, SHAPES), KINDS[name]
    optimizer = kind.make(params)
    place(params, Optimizer.DISK, tier)
    run(kind, params, optimizer, 4)
    states = [t for n, t in optimizer.state[params[-1]].items() if n != "step"]
    assert all(is_home(t) and not tier.owns(t) for t in states)
    assert len(states) == len(kind.moments) + (dtype is torch.bfloat16)


@pytest.mark.parametrize("where", [Optimizer.DEVICE, Optimizer.HOST], ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, slow(torch.bfloat16)], ids=str)
def test_momenta_and_rates_that_change(dtype: torch.dtype, where: Optimizer, tier: HostTier) -> None:
    """A momentum begins with its first gradient undampened, whenever that is, and is kept while it is switched off."""
    params = make_params(dtype, SHAPES)
    reference = exact_copies(params)
    # PyTorch's kernel takes no parameters of one group of which some have a momentum and others not.
    groups = [[{"params": each[:1]}, {"params": each[1:]}] for each in (params, reference)]
    optimizer = SGD(groups[0], lr=0.1, dampening=0.3)
    expected = torch.optim.SGD(groups[1], lr=0.1, dampening=0.3, fused=True)
    place(params, where, tier)
    before = num_changes()
    for step, momentum in enumerate((0.0, 0.9, 0.8, 0.0, 0.95, 0.95)):
        for each in (optimizer, expected):
            for group in each.param_groups:
                group |= {"momentum": momentum, "lr": 0.1 / (1 + step)}
        set_grads(params, reference, step)
        if step == 1:
            params[0].grad = reference[0].grad = None
        optimizer.step()
        expected.step()
        assert_same(params[1:], optimizer, reference[1:], expected, step + 1)
        if step == 0:
            assert not any("momentum_buffer" in optimizer.state[p] for p in params) and num_changes() == before
            assert optimizer.state_bytes_of(params[-1]) == (4 * 60000 if dtype is torch.bfloat16 else 0)
        if step == 1:
            assert num_changes() > before, "plans are told of states that they do not count"
        if step == 3:
            saved = copy.deepcopy(optimizer.state_dict())
    assert_same(params, optimizer, reference, expected, 6)
    twins = [Parameter(p.detach().clone()) for p in params]
    resumed = SGD([{"params": twins[:1]}, {"params": twins[1:]}])
    resumed.load_state_dict(saved)
    momenta = [resumed.state[p]["momentum_buffer"] for p in twins]
    assert all(torch.equal(m, saved["state"][n]["momentum_buffer"]) for n, m in enumerate(momenta)), (
        "kept while it is off"
    )


@pytest.mark.parametrize("options", [{"maximize": True}, {"lr": torch.tensor(0.01)}, {"lr": 0.0}], ids=str)
@pytest.mark.parametrize("name", ["Adam", "SGD", "momentum"])
@pytest.mark.parametrize("dtype", [torch.float32, slow(torch.bfloat16)], ids=str)
def test_hyperparameters(dtype: torch.dtype, name: str, options: dict[str, Any]) -> None:
    params = make_params(dtype, SHAPES)
    run(KINDS[name], params, KINDS[name].make(params, **options), 3, **options)


@pytest.mark.parametrize("name", [name for name in KINDS if name != "AdamW"])
def test_clipping_is_pytorchs(name: str, tier: HostTier) -> None:
    params = make_params(torch.float32, SHAPES)
    reference = exact_copies(params)
    optimizer, expected = KINDS[name].make(params, max_grad_norm=0.5), KINDS[name].reference(reference)
    place(params[::2], Optimizer.HOST, tier)
    for step in range(3):
        set_grads(params, reference, step)
        norm = torch.nn.utils.clip_grad_norm_(reference, 0.5)
        optimizer.step()
        expected.step()
        assert optimizer.grad_norm is not None and torch.equal(optimizer.grad_norm, norm)
        assert_same(params, optimizer, reference, expected, step + 1)


# -- state dicts --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("steps", [0, 2])
@pytest.mark.parametrize("name", KINDS)
def test_dicts_go_to_torch_and_back(name: str, steps: int, tier: HostTier) -> None:
    """Each optimizer goes on from the other's dict, saved or copied, bit by bit."""
    kind, params = KINDS[name], make_params(torch.float32, SHAPES)
    reference = exact_copies(params)
    ours, theirs = kind.make(params, lr=0.01), kind.reference(reference, lr=0.01)
    place(params[:2], Optimizer.HOST, tier)
    for step in range(steps):
        set_grads(params, reference, step)
        ours.step()
        theirs.step()
    buffer = io.BytesIO()
    torch.save(ours.state_dict(), buffer)
    buffer.seek(0)
    saved, given = torch.load(buffer, weights_only=True), copy.deepcopy(theirs.state_dict())
    ours, theirs = kind.make(params, lr=7.0), kind.reference(reference, lr=7.0)
    ours.load_state_dict(given)
    theirs.load_state_dict(saved)
    assert ours.param_groups[0]["lr"] == theirs.param_groups[0]["lr"] == 0.01
    for step in range(2, 4):
        set_grads(params, reference, step)
        ours.step()
        theirs.step()
        assert all(map(torch.equal, params, reference))
        pairs = [
            (ours.state[p][n], theirs.state[r][n]) for p, r in zip(params, reference, strict=True) for n in kind.moments
        ]
        assert all(torch.equal(*pair) for pair in pairs)


def test_a_dict_of_early_pytorch_has_nothing_where_there_is_no_momentum() -> None:
    p = Parameter(torch.ones(3))
    optimizer = SGD([p], lr=0.1)
    given = torch.optim.SGD([p], lr=0.2).state_dict()
    optimizer.load_state_dict({**given, "state": {0: {"momentum_buffer": None}}})
    assert optimizer.param_groups[0]["lr"] == 0.2 and not optimizer.state


@pytest.mark.parametrize("dtype", [torch.float32, slow(torch.bfloat16)], ids=str)
def test_a_dict_of_steps_without_momentum_loads_where_there_is_one_from_now_on(dtype: torch.dtype) -> None:
    params = make_params(dtype, SHAPES)
    others = exact_copies(params)
    ours, theirs = SGD(params, lr=0.01), torch.optim.SGD(others, lr=0.01, fused=True)
    set_grads(params, others, 0)
    ours.step()
    theirs.step()
    for group in (*ours.param_groups, *theirs.param_groups):
        group["momentum"] = 0.9
    twins = [torch.nn.Parameter(p.detach().clone()) for p in params]
    resumed = SGD(params, lr=0.01)
    given = copy.deepcopy(ours.state_dict())
    resumed.load_state_dict(given)
    again = SGD(twins, lr=0.01)
    again.load_state_dict(given)
    for step in (1, 2):
        set_grads(params, others, step)
        for param, twin in zip(params, twins, strict=True):
            twin.grad = param.grad
        for optimizer in (resumed, theirs, again):
            optimizer.step()
    assert all(map(torch.equal, params, twins))
    if dtype == torch.float32:
        assert all(map(torch.equal, params, others))
        assert all(
            torch.equal(resumed.state[p]["momentum_buffer"], theirs.state[other]["momentum_buffer"])
            for p, other in zip(params, others, strict=True)
        )


@pytest.mark.parametrize("name", [name if name == "AdamW" else slow(name) for name in KINDS])
def test_16_bit_resume_is_bitwise(name: str, tier: HostTier) -> None:
    params = make_params(torch.bfloat16, SHAPES)
    optimizer = KINDS[name].make(params, lr=0.01)
    place(params, Optimizer.HOST, tier)
    for step in range(2):
        set_grads(params, exact_copies(params), step)
        optimizer.step()
    saved = copy.deepcopy(optimizer.state_dict())
    twins = [Parameter(p.detach().clone()) for p in params]
    resumed = KINDS[name].make(twins, lr=7.0)
    resumed.load_state_dict(saved)
    set_grads(params, twins, 2)
    optimizer.step()
    resumed.step()
    assert all(map(torch.equal, params, twins))
    torch.testing.assert_close(resumed.state_dict(), optimizer.state_dict(), rtol=0, atol=0)


@pytest.mark.parametrize(
    ("ours", "foreign", "message"),
    [
        (Adam, AdamW, r"is of AdamW \(decoupled_weight_decay=True\).*make it with Adam.state_dict"),
        (AdamW, Adam, r"is of torch.optim.Adam \(decoupled_weight_decay=False\)"),
        (Adam, torch.optim.AdamW, r"is of AdamW \(decoupled_weight_decay=True\)"),
        (Adam, SGD, r"lacks \['betas', 'eps'\]; it is not Adam's: make it with Adam.state_dict"),
        (SGD, Adam, r"lacks \['momentum', 'dampening', 'nesterov'\]; it is not SGD's: make it with SGD.state_dict"),
        (SGD, torch.optim.Muon, r"lacks \['dampening'\]"),
        (Lion, SGD, r"lacks \['betas'\]"),
    ],
)
def test_dicts_of_others_are_refused(ours: Any, foreign: Any, message: str) -> None:
    params = [Parameter(torch.ones(3, 3))]
    with pytest.raises(OptimizerStateError, match=message):
        ours(params).load_state_dict(foreign([Parameter(torch.ones(3, 3))]).state_dict())


def test_dicts_with_amsgrad_are_refused() -> None:
    saved = torch.optim.Adam([Parameter(torch.ones(3))], amsgrad=True).state_dict()
    with pytest.raises(OptimizerStateError, match=r"amsgrad=True, which is not supported: use torch.optim.Adam"):
        Adam([Parameter(torch.ones(3))]).load_state_dict(saved)


# -- arguments ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("kind", "options", "message"),
    [
        (SGD, {"lr": -1.0}, "lr is -1.0"),
        (SGD, {"momentum": -0.1}, "momentum is -0.1"),
        (SGD, {"momentum": "0.9"}, "momentum is '0.9'"),
        (SGD, {"dampening": float("nan")}, "dampening is nan; expected a number"),
        (SGD, {"nesterov": True}, r"nesterov=True was given with momentum 0.0.*expected a momentum above 0"),
        (SGD, {"nesterov": True, "momentum": 0.9, "dampening": 0.1}, "no dampening"),
        (SGD, {"differentiable": True}, "differentiable=True is not supported by autohete_fx.SGD"),
        (Adam, {"betas": (0.9, 1.0)}, r"betas\[1\] is 1.0"),
        (Adam, {"eps": -1.0}, "eps is -1.0"),
        (Adam, {"amsgrad": True}, "amsgrad=True is not supported by autohete_fx.Adam"),
        (Adam, {"decoupled_weight_decay": True}, "take autohete_fx.AdamW"),
    ],
)
def test_bad_arguments(kind: Any, options: dict[str, Any], message: str) -> None:
    with pytest.raises(OptimizerStateError, match=message):
        kind([Parameter(torch.ones(2))], **options)


@pytest.mark.parametrize(
    ("name", "dtype", "state_bytes", "share"),
    [
        ("SGD", torch.float32, 0, 12 / 28),
        slow("SGD", torch.bfloat16, 4, 14 / 30),
        ("momentum", torch.float32, 4, 20 / 28),
        slow("momentum", torch.float16, 8, 22 / 30),
        ("Adam", torch.float32, 8, 1.0),
        slow("Adam", torch.bfloat16, 12, 1.0),
    ],
)
def test_state_bytes_and_what_updates_move(name: str, dtype: torch.dtype, state_bytes: int, share: float) -> None:
    p = Parameter(torch.ones(10, 10, dtype=dtype))
    optimizer = KINDS[name].make([p])
    assert optimizer.state_bytes_of(p) == 100 * state_bytes and optimizer.update_share_of(p) == share
    p.grad = torch.ones_like(p)
    optimizer.step()
    assert sum(t.nbytes for n, t in optimizer.state[p].items() if n != "step") == 100 * state_bytes
