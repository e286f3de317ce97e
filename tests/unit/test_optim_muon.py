"""Muon against torch.optim.Muon for matrices and torch.optim.AdamW for the rest, wherever states and parameters live."""

import contextlib
import copy
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import Parameter

from autohete_fx.compiler.problem import slot_bytes, update_workspace_bytes
from autohete_fx.errors import OptimizerStateError
from autohete_fx.ir import Lane, Optimizer, Overlap, Params, Schedule
from autohete_fx.optim import AdamW, Muon
from autohete_fx.optim.muon import product_flops, workspace_bytes
from autohete_fx.runtime import disk
from autohete_fx.runtime.disk import DiskTier
from autohete_fx.runtime.lanes.lanes import Lanes
from autohete_fx.runtime.meter import MemoryMeter
from autohete_fx.runtime.pending.fence import lower_fences
from autohete_fx.runtime.pending.updates import Updates
from autohete_fx.runtime.placement import Placement, place_param
from autohete_fx.runtime.tiers.host import HostTier, open_tier
from tests.main_job import slow
from tests.optimizers import exact_copies, make_params, set_grads
from tests.thorough import thorough

MATRICES = ((40, 300), (300, 40), (64, 64), (1, 7), (33, 1), (257, 131))
OTHERS = ((70001,), (5, 4, 3), ())
PLACES = [Optimizer.DEVICE, Optimizer.HOST, Optimizer.STREAMED, Optimizer.DISK]
ADAMW = {"lr": 3e-3, "weight_decay": 0.1}


@pytest.fixture
def tier(tmp_path: Path) -> HostTier:
    return open_tier("cpu", str(tmp_path))


@contextlib.contextmanager
def placed(
    params: Sequence[Parameter], where: Optimizer, tier: HostTier, *, is_host: bool, params_at: Params = Params.DEVICE
) -> Iterator[Lanes]:
    """Parameters of one model, of a device with memory of its own or not."""
    lanes = Lanes("cpu", is_host=is_host, in_background=True)
    updates = Updates(lanes)
    updates.schedule = Schedule(overlap=Overlap.STEP)
    on_disk = DiskTier() if where is Optimizer.DISK else None
    for block, p in enumerate(params):
        own = {"tier": tier, "block": block, "updates": updates, "disk": on_disk}
        place_param(p, Placement(params=params_at, optimizer=where, **own))
    yield lanes
    lower_fences()
    lanes.close()


class Pair:
    """Muon, and the optimizers of torch that it must equal on exact copies."""

    def __init__(self, params: list[Parameter], num_matrices: int, **how: Any) -> None:
        self.params, self.reference, self.count = params, exact_copies(params), num_matrices
        groups = [{"params": params[:num_matrices], "use_muon": True}]
        if params[num_matrices:]:
            groups.append({"params": params[num_matrices:], "use_muon": False})
        self.optimizer = Muon(groups, adamw=ADAMW, **how)
        numbers = {name: float(each) if isinstance(each, Tensor) else each for name, each in how.items()}
        self.muon = torch.optim.Muon(self.reference[:num_matrices], **numbers)  # it computes with tensors in fp32
        others = self.reference[num_matrices:]
        self.adamw = torch.optim.AdamW(others, fused=True, **ADAMW) if others else None

    def step(self, step: int) -> None:
        set_grads(self.params, self.reference, step)
        self.optimizer.step()
        self.muon.step()
        if self.adamw is not None:
            self.adamw.step()

    def assert_equal(self) -> None:
        """Bit by bit, but for AdamW's rule on masters, which its own tests compare."""
        is_full = self.params[0].dtype in (torch.float32, torch.float64)
        for n, (p, r) in enumerate(zip(self.params, self.reference, strict=True)):
            state = self.optimizer.state[p]
            if n < self.count:
                assert torch.equal(state.get("master", p), r), n
                assert torch.equal(state["momentum_buffer"], self.muon.state[r]["momentum_buffer"])
                assert torch.equal(p, r.to(p.dtype))
                assert set(state) == {"step", "momentum_buffer"} | (set() if is_full else {"master"})
            elif is_full and self.adamw is not None:
                assert torch.equal(p, r)
                assert all(torch.equal(state[name], t) for name, t in self.adamw.state[r].items())
            else:
                torch.testing.assert_close(state["master"], r.detach(), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("is_host", [True, False])
@pytest.mark.parametrize("where", [Optimizer.DEVICE, *(slow(place) for place in PLACES[1:])], ids=str)
@pytest.mark.parametrize(
    "dtype", [torch.float32, thorough(torch.float64), slow(torch.bfloat16), thorough(torch.float16)], ids=str
)
def test_steps_are_torchs_bit_by_bit(
    dtype: torch.dtype, where: Optimizer, is_host: bool, tier: HostTier, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(disk, "WINDOW_BYTES", 2**15)
    pair = Pair(make_params(dtype, MATRICES + OTHERS), len(MATRICES), lr=0.02)
    with placed(pair.params, where, tier, is_host=is_host) as lanes:
        for step in range(4):
            pair.step(step)
        pair.assert_equal()
        copied = [r.num_bytes for r in lanes.records() if r.label == "states" and r.lane is Lane.H2D]
        if where is Optimizer.STREAMED and not is_host:
            each = 4 if dtype is torch.float32 else 8  # one state, or two of 4
            assert copied.count(257 * 131 * each) >= 4, "states of a matrix come whole"


@pytest.mark.slow
@pytest.mark.parametrize("where", PLACES[:3], ids=str)
def test_parameters_in_host_memory(where: Optimizer, tier: HostTier) -> None:
    for dtype in (torch.float32, torch.bfloat16):
        pair = Pair(make_params(dtype, MATRICES + OTHERS), len(MATRICES))
        with placed(pair.params, where, tier, is_host=False, params_at=Params.HOST):
            for step in range(3):
                pair.step(step)
            pair.assert_equal()


@pytest.mark.parametrize(
    "options",
    [
        {"nesterov": False},
        {"momentum": 0.0},
        {"adjust_lr_fn": "match_rms_adamw"},
        {"adjust_lr_fn": "original", "weight_decay": 0.0},
        {"ns_steps": 0},
        {"ns_steps": 2, "ns_coefficients": (2.0, -1.5, 0.5), "eps": 1e-3},
        {"lr": torch.tensor(0.01)},
    ],
    ids=str,
)
def test_hyperparameters(options: dict[str, Any]) -> None:
    for dtype in (torch.float32, torch.float64, torch.bfloat16):
        pair = Pair(make_params(dtype, MATRICES), len(MATRICES), **options)
        for step in range(3):
            pair.step(step)
        pair.assert_equal()


def test_schedules_clipping_and_edits(tier: HostTier) -> None:
    params = make_params(torch.float32, MATRICES)
    pair = Pair(params, len(MATRICES), lr=0.02)
    pair.optimizer.max_grad_norm = 0.5
    schedules = [torch.optim.lr_scheduler.LinearLR(o, 1.0, 0.1, 5) for o in (pair.optimizer, pair.muon)]
    with placed(params[::2], Optimizer.STREAMED, tier, is_host=False):
        for step in range(4):
            set_grads(params, pair.reference, step)
            norm = torch.nn.utils.clip_grad_norm_(pair.reference, 0.5)
            for o, values in ((pair.optimizer, params), (pair.muon, pair.reference)):
                if step == 2:
                    values[0].data[3:] *= 1.5
                o.step()
            for schedule in schedules:
                schedule.step()
            assert pair.optimizer.grad_norm is not None and torch.equal(pair.optimizer.grad_norm, norm)
        pair.assert_equal()


def test_a_transposed_matrix_is_updated_as_torch_updates_it() -> None:
    params = [Parameter(torch.randn(40, 30).t())]
    reference = [Parameter(params[0].detach().clone())]
    assert reference[0].stride() == params[0].stride() == (1, 30)
    ours, theirs = Muon([{"params": params, "use_muon": True}]), torch.optim.Muon(reference)
    for _ in range(3):
        params[0].grad = torch.randn(40, 30).t()
        reference[0].grad = params[0].grad.clone()
        ours.step()
        theirs.step()
        assert torch.equal(params[0], reference[0])


def test_a_step_takes_the_workspace_that_plans_count() -> None:
    for dtype in (torch.float32, torch.bfloat16):
        params = make_params(dtype, [(512, 1024), (1024, 512)])
        optimizer = Muon([{"params": params, "use_muon": True}], ns_steps=1)  # takes the memory of five
        for step in range(2):
            for p in params:
                p.grad = torch.randn_like(p)
            with MemoryMeter("cpu") as meter:
                optimizer.step()
            if step:
                taken, expected = meter.peak_bytes - meter.start_bytes, max(map(workspace_bytes, params))
                # A CPU's products reorder a transposed matrix. Masters are compared with weights in a few temporaries of a tile.
                assert expected <= taken <= expected + (6 * 2**20 if dtype is torch.bfloat16 else 2**21)
                assert expected <= 8 * 512 * 1024


@pytest.mark.parametrize("on_device", [0, 1])
def test_streamed_matrices_take_the_memory_that_plans_count(on_device: int, tier: HostTier) -> None:
    """Beside others, which the device updates in a workspace of its own, or alone."""
    for dtype in (torch.float32, torch.bfloat16):
        params = make_params(dtype, [(512, 1024), (1024, 512), (256, 256), (512, 512), (1024, 1024)][: 4 + on_device])
        optimizer = Muon([{"params": params, "use_muon": True}], ns_steps=1)
        with placed(params[:4], Optimizer.STREAMED, tier, is_host=False, params_at=Params.HOST):
            for step in range(2):
                for p in params:
                    p.grad = torch.randn(p.shape).to(dtype)
                lower_fences()
                with MemoryMeter("cpu") as meter:
                    optimizer.step()
                    lower_fences()
                    optimizer.synchronize()
                if step:
                    counted = on_device * update_workspace_bytes(params) + slot_bytes(params[:4])
                    assert 0.6 * counted <= meter.peak_bytes - meter.start_bytes <= counted


def test_flops_of_products() -> None:
    """Two products of the short side with the long one, and one of the short side cubed, at 2 operations each."""
    group = {"ns_steps": 5}
    assert (
        product_flops(torch.empty(3, 7), group) == product_flops(torch.empty(7, 3), group) == 5 * 2 * (2 * 9 * 7 + 27)
    )


# -- which parameters are matrices --------------------------------------------------------------------------------------


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.tokens = nn.Embedding(11, 8), nn.Embedding(11, 8)
        self.layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(2))
        self.lists = nn.ModuleList([nn.Embedding(3, 8), nn.Conv1d(8, 8, 3)])
        self.head = nn.Linear(8, 11)


def names_of(optimizer: Muon, use_muon: bool) -> set[str]:
    return {n for group in optimizer.param_groups if group["use_muon"] is use_muon for n in group["param_names"]}


def test_hidden_matrices_are_told_by_names_and_modules() -> None:
    net, hidden = Net(), {"layers.0.weight", "layers.1.weight"}
    every = {name for name, _ in net.named_parameters()}
    assert names_of(Muon(net), True) == hidden and names_of(Muon(net), False) == every - hidden
    assert names_of(Muon(net.named_parameters()), True) == hidden | {"lists.0.weight"}
    chosen = Muon(net.named_parameters(), is_matrix=lambda name, param: name == "head.weight")
    assert names_of(chosen, True) == {"head.weight"}
    (matrices, others) = Muon(net, lr=0.02, adamw={"lr": 1e-4, "betas": (0.8, 0.9)}).param_groups
    assert (matrices["lr"], others["lr"], others["betas"]) == (0.02, 1e-4, (0.8, 0.9))
    assert (
        (others["weight_decay"], others["eps"]) == (1e-2, 1e-8) and "momentum" not in others and "betas" not in matrices
    )


def test_groups_are_divided_and_added() -> None:
    net = Net()
    named = dict(net.named_parameters())
    first = [(n, p) for n, p in named.items() if not n.startswith("layers.1")]
    optimizer = Muon([{"params": first, "lr": 0.5}])
    matrix, bias = (("layers.1." + name, named["layers.1." + name]) for name in ("weight", "bias"))
    optimizer.add_param_group({"params": [matrix], "use_muon": True, "ns_steps": 3})
    optimizer.add_param_group({"params": [bias], "use_muon": False, "lr": 0.25})
    told = [(g["use_muon"], g["lr"], g.get("ns_steps"), len(g["params"])) for g in optimizer.param_groups]
    assert told == [(True, 0.5, 5, 2), (False, 1e-3, None, len(first) - 2), (True, 1e-3, 3, 1), (False, 0.25, None, 1)]
    copied = copy.deepcopy(optimizer)
    for p, q in zip(*([p for g in o.param_groups for p in g["params"]] for o in (optimizer, copied)), strict=True):
        p.grad = torch.randn_like(p)
        q.grad = p.grad.clone()
    for each in (optimizer, copied):
        each.step()
    pairs = [
        zip(a["params"], b["params"], strict=True)
        for a, b in zip(optimizer.param_groups, copied.param_groups, strict=True)
    ]
    assert all(torch.equal(p, q) for pair in pairs for p, q in pair)
    assert {"exp_avg", "exp_avg_sq"} < set(optimizer.state[net.head.weight])
    assert "momentum_buffer" in optimizer.state[net.layers[0].weight]


@pytest.mark.parametrize(
    ("params", "options", "message"),
    [
        ([Parameter(torch.ones(2, 2))], {}, r"without names.*model.named_parameters\(\), or groups with use_muon"),
        ([{"params": [Parameter(torch.ones(2))], "use_muon": True}], {}, r"shape \(2,\).*use_muon=False"),
        (Net(), {"lr": -1.0}, "lr is -1.0"),
        (Net(), {"ns_steps": 100}, "ns_steps is 100; expected a whole number from 0 to 99"),
        (Net(), {"ns_coefficients": (1.0, 2.0)}, r"ns_coefficients is \(1.0, 2.0\); expected three numbers"),
        (Net(), {"adjust_lr_fn": "rms"}, "adjust_lr_fn is 'rms'; expected 'original', 'match_rms_adamw' or None"),
        (Net(), {"adamw": {"momentum": 0.9}}, r"adamw has \['momentum'\]; expected some of \['lr', 'betas'"),
        (Net(), {"adamw": {"betas": (0.9, 1.0)}}, r"betas\[1\] is 1.0"),
    ],
)
def test_bad_arguments(params: Any, options: dict[str, Any], message: str) -> None:
    with pytest.raises(OptimizerStateError, match=message):
        Muon(params, **options)


def test_a_refused_group_leaves_no_part_of_it() -> None:
    net = Net()
    optimizer = Muon([{"params": [("head", net.head.weight)], "use_muon": False}])
    with pytest.raises(OptimizerStateError, match="complex"):
        wrong = Parameter(torch.ones(2, dtype=torch.complex64))
        optimizer.add_param_group({"params": [("0.a", net.layers[0].weight), ("b", wrong)]})
    assert len(optimizer.param_groups) == 1


# -- state dicts --------------------------------------------------------------------------------------------------------


def tensors(state_dict: dict[str, Any]) -> list[Tensor]:
    return [t for n in sorted(state_dict["state"]) for _, t in sorted(state_dict["state"][n].items())]


@pytest.mark.slow
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_resume_is_bitwise(dtype: torch.dtype, tier: HostTier) -> None:
    pair = Pair(make_params(dtype, MATRICES + OTHERS[:1]), len(MATRICES), lr=0.02)
    with placed(pair.params, Optimizer.STREAMED, tier, is_host=False):
        for step in range(2):
            pair.step(step)
        saved = copy.deepcopy(pair.optimizer.state_dict())
    twins = Pair([Parameter(p.detach().clone()) for p in pair.params], len(MATRICES), lr=7.0)
    twins.optimizer.load_state_dict(saved)
    set_grads(pair.params, twins.params, 2)
    with placed(pair.params, Optimizer.HOST, tier, is_host=False):
        for each in (pair, twins):
            each.optimizer.step()
    assert all(map(torch.equal, pair.params, twins.params))
    assert all(map(torch.equal, tensors(pair.optimizer.state_dict()), tensors(twins.optimizer.state_dict())))


def test_dicts_go_to_torch_and_back() -> None:
    pair = Pair(make_params(torch.float32, MATRICES), len(MATRICES), lr=0.02)
    for step in range(2):
        pair.step(step)
    ours, theirs = copy.deepcopy(pair.optimizer.state_dict()), copy.deepcopy(pair.muon.state_dict())
    pair.optimizer.load_state_dict(theirs)
    pair.muon.load_state_dict(ours)
    pair.step(2)
    assert all(map(torch.equal, pair.params, pair.reference))
    assert pair.optimizer.param_groups[0]["use_muon"] is True


def test_dicts_of_others_are_refused() -> None:
    p, q = (Parameter(torch.ones(3, 3)) for _ in range(2))
    optimizer = Muon([{"params": [p], "use_muon": True}])
    with pytest.raises(
        OptimizerStateError, match=r"lacks \['momentum'.*it is not Muon's: make it with Muon.state_dict"
    ):
        optimizer.load_state_dict(AdamW([q]).state_dict())
    other = Muon([{"params": [q], "use_muon": False}])
    with pytest.raises(OptimizerStateError, match=r"use_muon=False; expected True: divide the parameters"):
        optimizer.load_state_dict(other.state_dict())
    with pytest.raises(OptimizerStateError, match=r"make it with AdamW.state_dict"):
        AdamW([q]).load_state_dict(optimizer.state_dict())
