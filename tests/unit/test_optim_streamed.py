"""States that are streamed through the device: updated bit by bit as the device's own, within the memory that is counted."""

import contextlib
import copy
import random
import threading
import weakref
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import Parameter

from autohete_fx.errors import OptimizerStateError
from autohete_fx.ir import Lane, Optimizer, Overlap, Params, Schedule, staging_bytes
from autohete_fx.optim import SGD, Adam, AdamW, Lion, streamed
from autohete_fx.optim.base import PlannedOptimizer
from autohete_fx.optim.streamed import Staging
from autohete_fx.runtime.lanes.lanes import Lanes
from autohete_fx.runtime.lanes.ticket import Ticket
from autohete_fx.runtime.meter import MemoryMeter, device_live_bytes
from autohete_fx.runtime.pending.fence import lower_fences
from autohete_fx.runtime.pending.updates import Updates
from autohete_fx.runtime.placement import Placement, place_param
from autohete_fx.runtime.tiers.host import HostTier, is_home, open_tier

SHAPES = ((300, 333), (70001,), (5,), (), (0, 3), (64, 1024))


class Twins:
    """Parameters whose states are streamed, and others whose states are on the device, with optimizers of one arithmetic."""

    def __init__(
        self,
        tier: HostTier,
        lanes: Lanes,
        *,
        shapes: Any = SHAPES,
        dtype: torch.dtype = torch.float32,
        params_at: Params = Params.DEVICE,
        overlap: Overlap = Overlap.STEP,
        kind: type[PlannedOptimizer] = AdamW,
        **how: Any,
    ) -> None:
        self.tier, self.updates = tier, Updates(lanes)
        self.updates.schedule = Schedule(overlap=overlap)
        torch.manual_seed(0)
        self.params = [Parameter(torch.randn(shape).to(dtype)) for shape in shapes]
        self.others = [Parameter(p.detach().clone()) for p in self.params]
        how = {"lr": 1e-2, "weight_decay": 0.1, "max_grad_norm": None, **how}
        self.optimizer: Any = kind(self.params, **how)
        self.reference: Any = kind(self.others, **how)
        for index, p in enumerate(self.params):
            self.place(p, index // 2, params_at, Optimizer.STREAMED)

    @property
    def optimizers(self) -> tuple[Any, Any]:
        return self.optimizer, self.reference

    def place(self, p: Parameter, block: int, params: Params, optimizer: Optimizer) -> None:
        placement = Placement(params=params, optimizer=optimizer, tier=self.tier, block=block, updates=self.updates)
        place_param(p, placement)

    def backward(self) -> None:
        for p, other in zip(self.params, self.others, strict=True):
            p.grad = torch.randn_like(p)
            other.grad = p.grad.clone()

    def step(self) -> None:
        self.backward()
        for optimizer in self.optimizers:
            optimizer.step()
            optimizer.zero_grad()

    def assert_equal(self) -> None:
        assert all(map(torch.equal, self.params, self.others))
        for p, other in zip(self.params, self.others, strict=True):
            ours, theirs = self.optimizer.state[p], self.reference.state[other]
            assert all(torch.equal(ours[name], theirs[name]) for name in ours.keys() | theirs.keys())
            assert all(is_home(t) for name, t in ours.items() if name != "step" and t.numel())


@contextlib.contextmanager
def two_memories(**how: Any) -> Iterator[Lanes]:
    """Lanes of a device with memory of its own."""
    lanes = Lanes("cpu", is_host=False, **how)
    yield lanes
    lower_fences()
    lanes.close()


@pytest.fixture
def tier(tmp_path: Path) -> HostTier:
    return open_tier("cpu", str(tmp_path))


@pytest.mark.parametrize("overlap", [pytest.param(Overlap.NONE, marks=pytest.mark.slow), Overlap.STEP], ids=str)
@pytest.mark.parametrize("params_at", list(Params), ids=str)
@pytest.mark.parametrize(
    "dtype",
    [torch.float32, *(pytest.param(t, marks=pytest.mark.slow) for t in (torch.float64, torch.bfloat16))],
    ids=str,
)
@pytest.mark.parametrize(
    ("kind", "how"),
    [(AdamW, {}), (Lion, {}), (Adam, {}), (SGD, {"momentum": 0.9, "dampening": 0.1}), (SGD, {})],
    ids=["AdamW", "Lion", "Adam", "momentum", "SGD"],
)
def test_updates_are_the_devices_own_bit_by_bit(
    kind: type[PlannedOptimizer],
    how: dict[str, float],
    dtype: torch.dtype,
    params_at: Params,
    overlap: Overlap,
    tier: HostTier,
):
    """Edits of parameters, gradients and states between steps, rates that change, and everything late at random."""
    chance = random.Random(0)
    with two_memories(in_background=True, num_update_workers=4, pace=lambda ticket: chance.uniform(0, 1e-3)) as lanes:
        twins = Twins(tier, lanes, dtype=dtype, params_at=params_at, overlap=overlap, kind=kind, **how)
        for step in range(5):
            twins.backward()
            for optimizer, params in zip(twins.optimizers, (twins.params, twins.others), strict=True):
                optimizer.param_groups[0]["lr"] = 1e-2 / (1 + step)
                with torch.no_grad():
                    if step == 2:
                        params[0][7:].mul_(1.5)
                        params[1].grad.mul_(0.25)
                        for name in optimizer.rule_of(params[0]).moments:
                            optimizer.state[params[0]][name].mul_(0.5)
                optimizer.step()
                optimizer.param_groups[0]["lr"] = 7.0  # too late for this step
                optimizer.zero_grad()
            if step % 2:
                twins.assert_equal()
        twins.assert_equal()


def test_without_threads_and_without_a_model_too(tier: HostTier, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("autohete_fx.optim.updates.lanes_of", lambda device: Lanes(device, is_host=False))
    with two_memories(in_background=False) as lanes:
        twins = Twins(tier, lanes)
        twins.step()
        for block, p in enumerate(twins.params[:3]):
            own = Placement(params=Params.DEVICE, optimizer=Optimizer.STREAMED, tier=tier, block=block)
            place_param(p, own)
        twins.step()
        twins.assert_equal()


def test_one_memory_has_nothing_to_stream(tier: HostTier):
    lanes = Lanes("cpu", in_background=True)
    twins = Twins(tier, lanes)
    for _ in range(3):
        twins.step()
    twins.assert_equal()
    assert not any(record.lane in (Lane.H2D, Lane.D2H) for record in lanes.records())
    lower_fences()
    lanes.close()


def test_unusual_layouts_are_updated_in_their_homes(tier: HostTier):
    with two_memories() as lanes:
        twins = Twins(tier, lanes, shapes=((64, 300),))
        for params in (twins.params, twins.others):
            params[0].data = torch.arange(64.0 * 601).view(64, 601)[:, ::2][:, :300]
        for _ in range(2):
            for params in (twins.params, twins.others):
                params[0].grad = torch.sin(torch.arange(64.0 * 300)).view(300, 64).t()
            for optimizer in twins.optimizers:
                optimizer.step()
        twins.assert_equal()


def test_clipping_is_the_devices_own(tier: HostTier):
    with two_memories() as lanes:
        twins = Twins(tier, lanes, max_grad_norm=1e-2)
        for _ in range(3):
            twins.step()
            norms = [norm for optimizer in twins.optimizers if (norm := optimizer.grad_norm) is not None]
            assert len(norms) == 2 and torch.equal(norms[0], norms[1])
        twins.assert_equal()


@pytest.mark.parametrize("dtype", [torch.float32, pytest.param(torch.bfloat16, marks=pytest.mark.slow)], ids=str)
def test_a_checkpoint_moves_between_places_without_loss(dtype: torch.dtype, tier: HostTier):
    with two_memories(pace=lambda ticket: 1e-3) as lanes:
        twins = Twins(tier, lanes, dtype=dtype)
        twins.step()
        checkpoint = copy.deepcopy(twins.optimizer.state_dict())  # while updates are under way
        twins.reference.load_state_dict(checkpoint)
        twins.step()
        twins.optimizer.load_state_dict(twins.reference.state_dict())
        for where in (Optimizer.HOST, Optimizer.STREAMED, Optimizer.DEVICE, Optimizer.STREAMED):
            for block, p in enumerate(twins.params):
                twins.place(p, block, Params.DEVICE, where)
            twins.step()
        twins.assert_equal()


# -- memory -------------------------------------------------------------------------------------------------------------

COUNT, LENGTH = 8, 1 << 18
STATE_BYTES = 8 * LENGTH


@pytest.mark.parametrize("late", [Lane.H2D, Lane.D2H, Lane.UPDATE])
def test_device_memory_is_what_the_planner_counts_whichever_lane_is_late(late: Lane, tier: HostTier):
    with two_memories(in_background=True, pace=lambda ticket: 2e-3 if ticket.lane is late else 0.0) as lanes:
        twins = Twins(tier, lanes, shapes=[(LENGTH,)] * COUNT)
        twins.step()
        twins.updates.wait_all()
        twins.backward()
        lower_fences()
        blocks = COUNT // 2
        with MemoryMeter("cpu") as meter:
            twins.optimizer.step()
            assert twins.updates.is_pending
            lower_fences()
            twins.updates.wait_all()
        assert 0 < meter.peak_bytes - meter.start_bytes <= blocks * staging_bytes(2 * STATE_BYTES) + 4096


@pytest.mark.parametrize("most", [1, 4, 64])
def test_pieces_that_are_too_many_at_once_are_given_by_a_thread(
    tier: HostTier, monkeypatch: pytest.MonkeyPatch, most: int
):
    monkeypatch.setattr(streamed, "_PIECES_AHEAD", most)
    threads: list[str] = []
    issue = streamed._Streamed.issue

    def issued(self: streamed._Streamed, copies: list[Ticket]) -> None:
        threads.append(threading.current_thread().name)
        issue(self, copies)

    monkeypatch.setattr(streamed._Streamed, "issue", issued)
    with two_memories(in_background=True) as lanes:
        twins = Twins(tier, lanes, shapes=[(LENGTH,)] * COUNT)
        for _ in range(3):
            twins.step()
        twins.updates.wait_all()
        twins.assert_equal()
    here = [name == threading.current_thread().name for name in threads[-COUNT:]]
    assert here == sorted(here, reverse=True), "an update overtook another"
    assert all(here) if most == 64 else not all(here)


def test_kernels_come_after_the_count_of_the_step_and_the_rate_as_it_is(tier: HostTier):
    """They read both on the device, where other updates were given meanwhile."""
    with two_memories(in_background=True) as lanes:
        twins = Twins(tier, lanes, shapes=[(300,)] * 4, lr=torch.tensor(1e-2))
        twins.place(twins.params[3], 1, Params.DEVICE, Optimizer.DEVICE)
        twins.step()
        seen: list[float] = []
        now = lanes.now

        def noted() -> Ticket:
            seen.append(float(twins.optimizer.state[twins.params[0]]["step"]))
            return now()

        lanes.now = noted
        twins.step()
        del lanes.now
        assert seen[0] == 2.0
        twins.updates.wait_all()
        assert all(map(torch.equal, twins.params, twins.others))


def test_an_interrupt_while_pieces_are_given_reaches_the_program_and_its_update_has_failed(
    tier: HostTier, monkeypatch: pytest.MonkeyPatch
):
    with two_memories(in_background=True) as lanes:
        twins = Twins(tier, lanes)
        twins.step()
        checkpoint = copy.deepcopy(([p.detach() for p in twins.params], twins.optimizer.state_dict()))
        issue, count = streamed._Streamed.issue, iter(range(100))

        def interrupted(self: streamed._Streamed, copies: list[Ticket]) -> None:
            if next(count) == 2:
                raise KeyboardInterrupt
            issue(self, copies)

        monkeypatch.setattr(streamed._Streamed, "issue", interrupted)
        twins.backward()
        with pytest.raises(KeyboardInterrupt):
            twins.optimizer.step()
        monkeypatch.setattr(streamed._Streamed, "issue", issue)
        with pytest.raises(OptimizerStateError, match="Load the last checkpoint"):
            twins.optimizer.synchronize()
        twins.optimizer.load_state_dict(checkpoint[1])
        for p, value in zip(twins.params, checkpoint[0], strict=True):
            p.data.copy_(value)
        twins.optimizer.synchronize()
        assert all(map(torch.equal, twins.params, checkpoint[0]))


def test_a_gradient_goes_when_its_update_is_done(tier: HostTier):
    with two_memories(in_background=True, pace=lambda ticket: 1e-3) as lanes:
        twins = Twins(tier, lanes, shapes=[(LENGTH,)] * COUNT)
        twins.step()
        twins.updates.wait_all()
        lower_fences()
        live_bytes = device_live_bytes("cpu")
        gradients = []
        for p in twins.params:
            p.grad = torch.randn_like(p)
            gradients.append(weakref.ref(p.grad))
        twins.optimizer.step()
        twins.optimizer.zero_grad()
        lower_fences()
        assert gradients[-1]() is not None, "nothing was under way"
        for p, gradient in zip(twins.params, gradients, strict=True):
            twins.updates.wait_for(p)
            assert gradient() is None
        assert device_live_bytes("cpu") - live_bytes < 4096


def test_what_the_device_refuses_leaves_everything_as_it_was(tier: HostTier, monkeypatch: pytest.MonkeyPatch):
    def refuse(self: Staging, updates: object) -> None:
        raise torch.OutOfMemoryError("the device is full")

    with two_memories() as lanes:
        twins = Twins(tier, lanes)
        twins.place(twins.params[0], 0, Params.DEVICE, Optimizer.HOST)
        twins.place(twins.params[1], 0, Params.DEVICE, Optimizer.DEVICE)
        twins.step()
        twins.backward()
        before = copy.deepcopy((twins.params, twins.optimizer.state_dict()))
        with monkeypatch.context() as patch:
            patch.setattr(Staging, "__init__", refuse)
            with pytest.raises(torch.OutOfMemoryError, match="the device is full"):
                twins.optimizer.step()
        assert not twins.updates.is_pending
        assert all(map(torch.equal, twins.params, before[0]))
        torch.testing.assert_close(twins.optimizer.state_dict(), before[1], rtol=0, atol=0)
        for optimizer in twins.optimizers:
            optimizer.step()
        assert all(map(torch.equal, twins.params, twins.others))


# -- failure ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("lane", [Lane.H2D, Lane.D2H])
def test_a_copy_that_fails_is_told_for_its_own_parameter_alone(lane: Lane, tier: HostTier):
    fails: list[Tensor] = []

    def copies(dst: Tensor, src: Tensor) -> None:
        goes_up, memories = is_home(src), {t.untyped_storage().data_ptr() for t in (dst, src)}
        if goes_up == (lane is Lane.H2D) and any(t.untyped_storage().data_ptr() in memories for t in fails):
            raise OSError("a broken link")
        dst.copy_(src)

    with two_memories(copy=copies) as lanes:
        twins = Twins(tier, lanes)
        twins.step()
        checkpoint = copy.deepcopy(([p.detach() for p in twins.params], twins.optimizer.state_dict()))
        fails.append(twins.optimizer.state[twins.params[0]]["exp_avg"])
        twins.step()
        for _ in range(2):
            with pytest.raises(OptimizerStateError, match=r"a broken link.*Load the last checkpoint"):
                twins.params[0].norm()
        assert all(map(torch.equal, twins.params[1:], twins.others[1:]))
        fails.clear()
        twins.optimizer.load_state_dict(checkpoint[1])
        for p, value in zip(twins.params, checkpoint[0], strict=True):
            p.data.copy_(value)
        twins.optimizer.synchronize()
        assert all(map(torch.equal, twins.params, checkpoint[0]))
