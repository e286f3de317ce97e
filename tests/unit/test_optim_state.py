"""State dicts: plain, in fp32, all or nothing, and restored to where the plan wants them."""

import copy
import io
import pickle
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.nn import Parameter

from autohete_fx.errors import HostMemoryError, OptimizerStateError
from autohete_fx.ir import Optimizer, Params
from autohete_fx.optim import AdamW, Muon, optimizer_of
from autohete_fx.runtime.disk import DiskTier
from autohete_fx.runtime.placement import Placement, place_param
from autohete_fx.runtime.tiers.host import HostTier, is_home, open_tier

DTYPES = [torch.float32, torch.bfloat16]


@pytest.fixture
def tier(tmp_path: Path) -> HostTier:
    return open_tier("cpu", str(tmp_path))


def place(p: Parameter, params: Params, optimizer: Optimizer, tier: HostTier) -> None:
    disk = DiskTier() if optimizer is Optimizer.DISK else None
    place_param(p, Placement(params=params, optimizer=optimizer, tier=tier, block=0, disk=disk))


def trained(dtype: torch.dtype, steps: int = 3, **kwargs: Any) -> tuple[list[Parameter], AdamW]:
    generator = torch.Generator().manual_seed(0)
    params = [Parameter(torch.randn(s, generator=generator).to(dtype)) for s in ((20, 30), (7,))]
    optimizer = AdamW(params, lr=0.01, **kwargs)
    for step in range(steps):
        step_once(params, optimizer, step)
    return params, optimizer


def step_once(params: list[Parameter], optimizer: torch.optim.Optimizer, step: int) -> None:
    generator = torch.Generator().manual_seed(100 + step)
    for p in params:
        p.grad = torch.randn(p.shape, generator=generator).to(p.dtype)
    optimizer.step()


def tensors(optimizer: torch.optim.Optimizer) -> list[dict[str, torch.Tensor]]:
    return [copy.deepcopy(dict(state)) for state in optimizer.state.values()]


def clones(params: list[Parameter]) -> list[Parameter]:
    return [Parameter(p.detach().clone()) for p in params]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("way", ["deepcopy", "save", "pickle", "reference"])
@pytest.mark.parametrize("where", (Optimizer.DEVICE, Optimizer.HOST, Optimizer.DISK), ids=str)
def test_resume_is_bitwise(dtype: torch.dtype, way: str, where: Optimizer, tier: HostTier) -> None:
    params, optimizer = trained(dtype)
    for p in params:
        place(p, Params.DEVICE, where, tier)
    step_once(params, optimizer, 3)
    state_dict = optimizer.state_dict()
    if way == "save":
        buffer = io.BytesIO()
        torch.save(state_dict, buffer)
        assert buffer.tell() < 40_000, "only the states are saved, not the memory that homes come from"
        buffer.seek(0)
        state_dict = torch.load(buffer, weights_only=True)
    elif way == "pickle":
        state_dict = pickle.loads(pickle.dumps(state_dict))
    elif way == "deepcopy":
        state_dict = copy.deepcopy(state_dict)
    twins = clones(params)
    if way != "reference":
        assert not any(is_home(t) for s in state_dict["state"].values() for t in s.values())
        step_once(params, optimizer, 4)
    place(twins[0], Params.HOST, Optimizer.HOST, tier)
    resumed = AdamW(twins, lr=0.5)
    resumed.load_state_dict(state_dict)
    assert tier.owns(resumed.state[twins[0]]["exp_avg"]) and not is_home(resumed.state[twins[1]]["exp_avg"])
    assert resumed.param_groups[0]["lr"] == 0.01
    step_once(twins, resumed, 4)
    if way == "reference":
        step_once(params, optimizer, 4)
    for p, t in zip(params, twins, strict=True):
        assert torch.equal(p, t)
        torch.testing.assert_close(resumed.state[t], optimizer.state[p], rtol=0, atol=0)


def test_loaded_values_are_copies() -> None:
    params, optimizer = trained(torch.bfloat16)
    twins = clones(params)
    other = AdamW(twins)
    other.load_state_dict(optimizer.state_dict())
    before = tensors(optimizer)
    step_once(twins, other, 3)
    for state, kept in zip(optimizer.state.values(), before, strict=True):
        torch.testing.assert_close(dict(state), kept, rtol=0, atol=0)


def test_an_earlier_state_dict_survives_a_load() -> None:
    """As with torch.optim, references taken before a load keep the values that they had."""
    params, optimizer = trained(torch.float32)
    kept = optimizer.state_dict()
    values = copy.deepcopy(kept)
    fresh = AdamW(clones(params))
    optimizer.load_state_dict(fresh.state_dict())
    assert not optimizer.state
    step_once(params, optimizer, 0)
    torch.testing.assert_close(kept["state"], values["state"], rtol=0, atol=0)
    optimizer.load_state_dict(kept)
    torch.testing.assert_close(optimizer.state_dict()["state"], values["state"], rtol=0, atol=0)


def test_reloading_the_own_state_dict_needs_no_memory() -> None:
    """Accelerate does this when it prepares an optimizer."""
    params, optimizer = trained(torch.bfloat16)
    before = {name: t.data_ptr() for name, t in optimizer.state[params[0]].items() if name != "step"}
    optimizer.load_state_dict(optimizer.state_dict())
    assert before == {name: t.data_ptr() for name, t in optimizer.state[params[0]].items() if name != "step"}


@pytest.mark.parametrize("fused", [True, False])
def test_to_and_from_torch(fused: bool, tier: HostTier) -> None:
    params, optimizer = trained(torch.float32, weight_decay=0.2)
    for p in params:
        place(p, Params.HOST, Optimizer.HOST, tier)
    step_once(params, optimizer, 3)
    twins = clones(params)
    theirs = torch.optim.AdamW(twins, fused=fused)
    theirs.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    assert theirs.param_groups[0]["fused"] is True, "it goes on with the same arithmetic"
    assert {k for k in theirs.param_groups[0]} == {k for k in torch.optim.AdamW([torch.ones(1)]).param_groups[0]}
    step_once(params, optimizer, 4)
    step_once(twins, theirs, 4)
    assert all(torch.equal(p, t) for p, t in zip(params, twins, strict=True))
    again = clones(twins)
    ours = AdamW(again)
    ours.load_state_dict(theirs.state_dict())
    step_once(again, ours, 5)
    step_once(params, optimizer, 5)
    assert all(torch.equal(p, t) for p, t in zip(params, again, strict=True))


def test_numbers_of_steps_are_not_rounded_to_the_default_dtype() -> None:
    """Hand-made dicts have Python numbers there. bfloat16 knows no 257."""
    p = Parameter(torch.ones(3))
    moments = {name: torch.ones(3) for name in ("exp_avg", "exp_avg_sq")}
    optimizer = AdamW([p])
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.bfloat16)
    try:
        optimizer.load_state_dict({**optimizer.state_dict(), "state": {0: {"step": 257, **moments}}})
    finally:
        torch.set_default_dtype(before)
    assert optimizer.state[p]["step"] == 257


def test_a_torch_state_dict_of_16_bit_parameters_starts_masters_from_the_weights() -> None:
    theirs_params = [Parameter(torch.randn(6, 6).bfloat16())]
    theirs = torch.optim.AdamW(theirs_params)
    step_once(theirs_params, theirs, 0)
    params = clones(theirs_params)
    optimizer = AdamW(params)
    optimizer.load_state_dict(theirs.state_dict())
    state = optimizer.state[params[0]]
    assert "master" not in state and state["exp_avg"].dtype == torch.float32
    assert torch.equal(state["exp_avg"].bfloat16(), theirs.state[theirs_params[0]]["exp_avg"])
    step_once(params, optimizer, 1)
    assert optimizer.state[params[0]]["step"] == 2 and optimizer.state[params[0]]["master"].dtype == torch.float32


def test_masters_survive_a_round_trip_through_16_bit_parameters() -> None:
    params, optimizer = trained(torch.bfloat16)
    master = optimizer.state[params[0]]["master"].clone()
    assert not torch.equal(master, params[0].float()), "there is something to lose"
    twins = clones(params)
    other = AdamW(twins)
    other.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    assert torch.equal(other.state_dict()["state"][0]["master"], master)


@pytest.mark.parametrize("where", [Optimizer.DEVICE, Optimizer.DISK], ids=str)
def test_masters_of_a_parameter_with_gaps_in_memory_survive_a_state_dict(where: Optimizer, tier: HostTier) -> None:
    p = Parameter(torch.randn(8, 6).bfloat16()[:, :4])
    place(p, Params.DEVICE, where, tier)
    optimizer = AdamW([p], lr=0.01)
    step_once([p], optimizer, 0)
    before = optimizer.state[p]["master"].clone()
    p.data[0, 0] = 3.0
    master = optimizer.state_dict()["state"][0]["master"]
    assert master[0, 0] == 3.0
    before[0, 0] = 3.0
    assert torch.equal(master, before)


def test_state_dict_of_a_fresh_optimizer_changes_nothing() -> None:
    p = Parameter(torch.ones(3))
    optimizer = AdamW([p])
    assert optimizer.state_dict()["state"] == {} and not optimizer.state
    optimizer.load_state_dict(optimizer.state_dict())
    assert not optimizer.state and torch.equal(p, torch.ones(3))


def test_names_hooks_and_custom_group_keys_pass_through() -> None:
    p = Parameter(torch.ones(3))
    optimizer = AdamW([{"params": [("w", p)], "tag": "decoder"}])
    seen: list[str] = []
    optimizer.register_state_dict_pre_hook(lambda o: seen.append("save"))
    optimizer.register_load_state_dict_pre_hook(lambda o, s: seen.append("load"))
    optimizer.register_load_state_dict_post_hook(lambda o: seen.append("loaded"))
    state_dict = optimizer.state_dict()
    assert state_dict["param_groups"][0]["param_names"] == ["w"] and state_dict["param_groups"][0]["tag"] == "decoder"
    optimizer.load_state_dict(state_dict)
    assert seen == ["save", "load", "loaded"] and optimizer.param_groups[0]["tag"] == "decoder"


def _bad(state_dict: dict[str, Any], what: str) -> dict[str, Any]:
    entry, group = state_dict["state"][1], state_dict["param_groups"][0]
    if what == "no groups":
        del state_dict["param_groups"]
    elif what == "fewer parameters":
        group["params"] = [0]
    elif what == "unknown parameter":
        state_dict["state"][9] = entry
    elif what == "missing state":
        del entry["exp_avg_sq"]
    elif what == "sgd":
        state_dict["state"][1] = {"momentum_buffer": entry["exp_avg"]}
    elif what == "shape":
        entry["exp_avg"] = entry["exp_avg"][:-1]
    elif what == "dtype":
        entry["exp_avg"] = entry["exp_avg"].long()
    elif what == "no tensor":
        entry["exp_avg"] = [0.0]
    elif what == "step":
        entry["step"] = "three"
    elif what == "amsgrad":
        group["amsgrad"] = True
    elif what == "adam":
        group["decoupled_weight_decay"] = False
    elif what == "no lr":
        del group["lr"]
    else:
        assert what == "master"
        entry["master"] = entry["exp_avg"]
    return state_dict


@pytest.mark.parametrize(
    ("what", "message"),
    [
        ("no groups", "expected 'state' and 'param_groups'"),
        ("fewer parameters", r"expected 1 of \[2\]"),
        ("unknown parameter", r"states for \[9\]"),
        ("missing state", "expected .*exp_avg_sq"),
        ("sgd", "momentum_buffer"),
        ("shape", r"shape \(6,\); expected the parameter's \(7,\)"),
        ("dtype", "int64 tensor; expected a floating point tensor"),
        ("no tensor", "is a list"),
        ("step", "'three'; expected a number"),
        ("amsgrad", "amsgrad=True"),
        ("adam", "torch.optim.Adam "),
        ("no lr", r"lacks \['lr'\]"),
        ("master", "master"),
    ],
)
def test_a_bad_state_dict_changes_nothing(what: str, message: str) -> None:
    params, optimizer = trained(torch.float32)
    states, groups = tensors(optimizer), copy.deepcopy(optimizer.state_dict()["param_groups"])
    bad = _bad(copy.deepcopy(optimizer.state_dict()), what)
    with pytest.raises(OptimizerStateError, match=message):
        optimizer.load_state_dict(bad)
    assert optimizer.state_dict()["param_groups"] == groups
    for state, kept in zip(optimizer.state.values(), states, strict=True):
        torch.testing.assert_close(dict(state), kept, rtol=0, atol=0)
    step_once(params, optimizer, 3)


def test_host_memory_that_runs_out_loses_nothing(tmp_path: Path) -> None:
    tier = open_tier("cpu", str(tmp_path), 1 << 20)
    small, large = Parameter(torch.randn(10)), Parameter(torch.randn(1000, 300))
    optimizer = AdamW([small, large])
    place(small, Params.DEVICE, Optimizer.HOST, tier)
    place(large, Params.DEVICE, Optimizer.HOST, tier)
    small.grad, large.grad = torch.ones(10), torch.ones(1000, 300)
    before = small.detach().clone(), large.detach().clone()
    with pytest.raises(HostMemoryError):
        optimizer.step()
    assert torch.equal(small, before[0]) and torch.equal(large, before[1]), "no parameter has changed"
    place(large, Params.DEVICE, Optimizer.DEVICE, tier)
    optimizer.step()
    assert optimizer.state[small]["step"] == optimizer.state[large]["step"] == 1
    full = copy.deepcopy(optimizer.state_dict())
    place(large, Params.DEVICE, Optimizer.HOST, tier)
    with pytest.raises(HostMemoryError):
        optimizer.load_state_dict(full)
    torch.testing.assert_close(dict(optimizer.state[small]), full["state"][0], rtol=0, atol=0)


def test_states_leave_the_place_that_they_no_longer_belong_to(tier: HostTier) -> None:
    (p, _), optimizer = trained(torch.bfloat16)
    for where in (Optimizer.HOST, Optimizer.DEVICE, Optimizer.HOST):
        place(p, Params.DEVICE, where, tier)
        step_once([p], optimizer, 5)
        held = 3 * 4 * p.numel() if where is Optimizer.HOST else 0
        assert tier.in_use_bytes >= held
        assert (tier.in_use_bytes > 0) == (held > 0), "homes are given back"


def test_deepcopy_and_pickle_of_the_optimizer(tier: HostTier) -> None:
    params, optimizer = trained(torch.float32)
    for p in params:
        place(p, Params.HOST, Optimizer.HOST, tier)
    step_once(params, optimizer, 3)
    for twin in (copy.deepcopy(optimizer), pickle.loads(pickle.dumps(optimizer))):
        twins = twin.param_groups[0]["params"]
        assert optimizer_of(twins[0]) is twin and optimizer_of(params[0]) is optimizer
        assert not any(is_home(t) for s in twin.state.values() for t in s.values())
        reference = clones(params)
        expected = torch.optim.AdamW(reference, fused=True)
        expected.load_state_dict(copy.deepcopy(optimizer.state_dict()))
        step_once(twins, twin, 4)
        step_once(reference, expected, 4)
        assert all(torch.equal(a, b) for a, b in zip(twins, reference, strict=True))


@pytest.mark.parametrize("make", [AdamW, lambda params, **how: Muon([("layers.0.a", params[0])], **how)])
def test_a_copied_optimizer_clips_and_overlaps_as_the_first_one(make: Any) -> None:
    p = torch.nn.Parameter(torch.ones(4, 4))
    optimizer = make([p], max_grad_norm=0.5, overlap=None)
    for twin in (copy.deepcopy(optimizer), pickle.loads(pickle.dumps(optimizer))):
        assert twin.overlap is optimizer.overlap
        (mine,) = twin.param_groups[0]["params"]
        mine.grad = torch.ones_like(mine)
        twin.step()
        torch.testing.assert_close(mine.grad.norm(), torch.tensor(0.5))


def test_a_model_that_changes_dtype_keeps_its_states() -> None:
    module = torch.nn.Linear(6, 5)
    params = list(module.parameters())
    optimizer = AdamW(params)
    step_once(params, optimizer, 0)
    kept = optimizer.state[params[0]]["exp_avg"].clone()
    module.bfloat16()
    step_once(params, optimizer, 1)
    assert optimizer.state[params[0]]["master"].dtype == torch.float32
    assert not torch.equal(optimizer.state[params[0]]["exp_avg"], kept)
    module.float()
    step_once(params, optimizer, 2)
    assert "master" not in optimizer.state[params[0]] and optimizer.state[params[0]]["step"] == 3


def test_a_resized_parameter_is_an_error() -> None:
    (p, _), optimizer = trained(torch.float32)
    p.data = torch.ones(3)
    p.grad = torch.ones(3)
    with pytest.raises(OptimizerStateError, match="resized"):
        optimizer.step()
