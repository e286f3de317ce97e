"""Models whose parameters, gradients and states lie in host memory, used as any other: by eager code, checkpoints, scalers.

`PlacedJob` is the same tests on every device; ``tests/e2e/test_placed_job.py`` runs them on a CPU device whose lanes are those of a
device with memory of its own, ``tests/cuda/test_placed_job_cuda.py`` on a GPU. What a plan moves must make no difference: each
test trains beside a twin that no plan has placed, and compares bit by bit.
"""

import copy
import io
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import autohete_fx
from autohete_fx import BlockDecision, Plan
from autohete_fx.ir import Overlap, Schedule
from autohete_fx.runtime.placement import is_movable
from autohete_fx.runtime.tiers.host import is_home
from tests.held_updates import ALL_ON_HOST, OPTIMIZER_ON_HOST, Stack, eagerly, labels, saved, updated_at_once, weight_of
from tests.main_job import slow
from tests.training import Sizes, batch, copied, make

ROWS, WIDTH = 8, 256  # wide enough that a layer's 16-bit weight is worth moving


class Pair:
    """A model under a plan and its twin, with optimizers of one arithmetic."""

    def __init__(self, device: str, decision: BlockDecision, dtype: torch.dtype = torch.float32) -> None:
        self.device, self.dtype = device, dtype
        self.model, self.twin = (Stack(width=WIDTH).to(device, dtype) for _ in range(2))
        self.optimizer = autohete_fx.AdamW(self.model.parameters(), lr=1e-2)
        self.reference = updated_at_once(self.twin, lr=1e-2)
        if dtype != torch.float32 and device == "cpu":
            self.reference = autohete_fx.AdamW(self.twin.parameters(), lr=1e-2)  # PyTorch's has no masters
        schedule = Schedule(overlap=Overlap.STEP)
        plan = Plan(labels=labels(), decisions=(decision,) * len(labels()), schedule=schedule)
        options = {"inner_backend": "eager", "profile": "analytic", "plan": plan}
        self.model.compile(backend="autohete", options=options)

    @property
    def both(self) -> tuple[tuple[nn.Module, Any], ...]:
        return (self.twin, self.reference), (self.model, self.optimizer)

    def batch(self, step: int) -> Tensor:
        values = torch.sin(torch.arange(ROWS * WIDTH, dtype=torch.float32) * (1 + step)).view(ROWS, WIDTH)
        return values.to(self.device, self.dtype)

    def step(self, step: int, *, clip: bool = False) -> None:
        for model, optimizer in self.both:
            model(self.batch(step)).backward()
            if clip:
                nn.utils.clip_grad_norm_(model.parameters(), 1e-3)
            optimizer.step()
            optimizer.zero_grad()

    def backward(self, step: int) -> None:
        for model, _ in self.both:
            model(self.batch(step)).backward()

    def assert_equal(self) -> None:
        assert all(map(torch.equal, self.model.parameters(), self.twin.parameters()))
        ours, theirs = (optimizer.state_dict()["state"] for _, optimizer in self.both[::-1])
        for index, state in ours.items():
            for name in ("exp_avg", "exp_avg_sq"):
                assert torch.equal(state[name], theirs[index][name])


class PlacedJob:
    """Set ``device``."""

    device: str

    def test_eager_code_reads_and_writes_what_lies_in_homes(self):
        pair = Pair(self.device, ALL_ON_HOST)
        pair.step(0)
        pair.backward(1)
        weight, state = weight_of(pair.model), pair.optimizer.state[weight_of(pair.model)]
        for home in (weight, weight.grad, state["exp_avg"], state["exp_avg_sq"]):
            assert home is not None and is_home(home) and home.device.type == self.device
        norms = [
            torch.stack([p.grad.norm() for p in model.parameters() if p.grad is not None]) for model, _ in pair.both
        ]
        assert torch.equal(*norms)
        for model, optimizer in pair.both:
            edited = weight_of(model)
            with torch.no_grad():
                edited[3].mul_(2)
                assert edited.grad is not None
                edited.grad[:, 5] = 0.25
                moment = optimizer.state[edited]["exp_avg"] if edited in optimizer.state else None
                if moment is not None:
                    moment.mul_(0.5)
            nn.utils.clip_grad_norm_(model.parameters(), 0.1)
            optimizer.step()
            optimizer.zero_grad(set_to_none=False)
        assert torch.equal(eagerly(pair.model, pair.batch(9)), eagerly(pair.twin, pair.batch(9)))
        for step in (2, 3):
            pair.step(step, clip=True)
        pair.assert_equal()

    @pytest.mark.slow
    def test_copies_are_ordinary_tensors(self):
        pair = Pair(self.device, ALL_ON_HOST)
        pair.step(0)
        pair.backward(1)
        weight = weight_of(pair.model)
        duplicate = copy.deepcopy(pair.model)
        assert all(map(torch.equal, duplicate.parameters(), pair.twin.parameters()))
        assert not any(map(is_home, duplicate.parameters()))
        for t in (weight, weight.grad, pair.optimizer.state[weight]["exp_avg"]):
            read = saved(t.detach())
            assert torch.equal(read, t) and not is_home(read) and read.device == t.device
            assert torch.equal(t.detach().cpu(), copied(t)) and torch.equal(t.clone(), t.detach() + 0)

    @pytest.mark.parametrize("decision", [ALL_ON_HOST, slow(OPTIMIZER_ON_HOST)], ids=["host", "device"])
    def test_a_run_goes_on_from_its_checkpoint_bit_by_bit(self, decision: BlockDecision):
        pair = Pair(self.device, decision)
        for step in range(2):
            pair.step(step)
        checkpoint = io.BytesIO()
        torch.save([pair.model.state_dict(), pair.optimizer.state_dict()], checkpoint)  # while updates are under way
        for step in (7, 8):  # astray
            for p in pair.model.parameters():
                p.data.add_(step)
        checkpoint.seek(0)
        model_state, optimizer_state = torch.load(checkpoint, map_location="cpu")
        pair.model.load_state_dict(model_state)
        pair.optimizer.load_state_dict(optimizer_state)
        pair.assert_equal()
        for step in (2, 3):
            pair.step(step)
        pair.assert_equal()

    @pytest.mark.parametrize("decision", [ALL_ON_HOST, slow(OPTIMIZER_ON_HOST)], ids=["host", "device"])
    def test_fp16_autocast_with_a_scaler_skips_and_takes_the_same_steps(self, decision: BlockDecision):
        pair = Pair(self.device, decision)
        scalers = [torch.amp.GradScaler(self.device, init_scale=2.0**24, backoff_factor=2.0**-5) for _ in pair.both]
        scales: list[list[float]] = [[], []]
        for step in range(6):
            for (model, optimizer), scaler, seen in zip(pair.both, scalers, scales, strict=True):
                with torch.autocast(self.device, dtype=torch.float16):
                    loss = model(pair.batch(step) * 40)
                scaler.scale(loss).backward()
                scaler.unscale_(optimizer)
                nn.utils.clip_grad_norm_(model.parameters(), 1.0)
                scaler.step(optimizer)
                scaler.update()
                optimizer.zero_grad()
                seen.append(scaler.get_scale())
        assert scales[0] == scales[1] and scales[0][0] < 2.0**24, "no step was skipped"
        assert pair.optimizer.state[weight_of(pair.model)]["step"] > 0, "every step was skipped"
        pair.assert_equal()

    @pytest.mark.slow
    @pytest.mark.parametrize("decision", [ALL_ON_HOST, OPTIMIZER_ON_HOST], ids=["host", "device"])
    def test_bf16_parameters_keep_fp32_masters_in_homes(self, decision: BlockDecision):
        pair = Pair(self.device, decision, torch.bfloat16)
        for step in range(3):
            pair.step(step, clip=True)
        pair.assert_equal()
        for p in filter(is_movable, pair.model.parameters()):
            master = pair.optimizer.state[p]["master"]
            assert is_home(master) and master.dtype == torch.float32
            assert torch.equal(master.bfloat16(), p) and not torch.equal(master, p.float())

    sizes = Sizes(width=128, layers=6, time=16, batch=4)
    """Of a model that is larger than what the device may hold."""
    budget_bytes = 2**22

    @pytest.mark.slow
    def test_a_model_larger_than_the_device_is_built_trained_saved_and_resumed(self, tmp_path: Path):
        expected = self.losses(5)
        first = self.losses(3, save_to=tmp_path / "checkpoint.pt")
        torch._dynamo.reset()
        assert first + self.losses(5, resume_from=tmp_path / "checkpoint.pt") == expected

    def losses(self, steps: int, *, save_to: Path | None = None, resume_from: Path | None = None) -> list[float]:
        """Of the larger model, built on the CPU; of the steps that were taken here."""
        model, first = autohete_fx.place(make("cpu", self.sizes), self.device), 0
        assert sum(p.nbytes for p in model.parameters()) > self.budget_bytes
        assert all(is_home(p) and p.device.type == self.device for p in model.parameters() if is_movable(p))
        optimizer = autohete_fx.AdamW(model.parameters(), lr=1e-3)
        if resume_from is not None:
            checkpoint = torch.load(resume_from, map_location="cpu")
            model.load_state_dict(checkpoint["model"])
            optimizer.load_state_dict(checkpoint["optimizer"])
            assert all(is_home(optimizer.state[p]["exp_avg"]) for p in model.parameters() if is_movable(p))
            first = checkpoint["step"]
        options = {"memory_budget": self.budget_bytes, "inner_backend": "eager", "profile": "analytic"}
        model.compile(backend="autohete", options=options)
        seen = []
        with autohete_fx.MemoryMeter(self.device) as meter:
            foreign_bytes = meter.start_bytes
            for step in range(first, steps):
                torch.manual_seed(step)
                loss = model(batch(self.device, step, sizes=self.sizes))
                loss.backward()
                nn.utils.clip_grad_norm_(model.parameters(), 0.5)
                optimizer.step()
                optimizer.zero_grad()
                seen.append(loss.item())
                del loss
        # What stays of the model on the device counts before the meter was opened: parameters that are too small to move.
        small = sum(p.nbytes for p in model.parameters() if not is_movable(p))
        assert meter.peak_bytes - foreign_bytes + small <= self.budget_bytes
        if save_to is not None:
            torch.save(
                {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "step": steps},
                save_to,
            )
        return seen
