"""The main job: training under hand-made and solved plans equals plain ``torch.compile``, within the budget.

With ``inner_backend="eager"`` the kernels are those of ``aot_eager`` and everything must be bitwise equal; with Inductor
the comparison has the tolerance that plain Inductor has against eager. `MainJob` is the same tests on every device;
``tests/e2e/test_main_job.py`` and ``tests/cuda/test_main_job_cuda.py`` say which.
"""

import contextlib
import gc
from collections.abc import Callable
from typing import Any

import pytest
import torch

import autohete_fx
from tests import training
from tests.training import MIXED, PLANS, Model, Sizes, assert_equal, batch, make, ours, plain, plan


def slow(*values: object) -> Any:
    """Parameters of a test that are left out where time is short."""
    return pytest.param(*values, marks=pytest.mark.slow)


class MainJob:
    """Set ``device``, and ``large``: sizes at which tensors outweigh what an allocator rounds up. ``deep`` has so many layers
    that Inductor's code can do with 30% of plain's peak."""

    device: str
    large: Sizes
    deep: Sizes
    with_masters: tuple[str, ...] = ("keep", *MIXED)

    @pytest.mark.parametrize("name", [n if n == "mixed" else slow(n) for n in PLANS])
    def test_hand_made_plans_are_bitwise_exact(self, name: str):
        given = ours(make(self.device), "eager", {"plan": plan(name)})
        training.assert_copies(name)
        assert_equal(given, plain(make(self.device), "eager"), bitwise=True)

    @pytest.mark.slow
    @pytest.mark.parametrize("name", MIXED)
    def test_a_hand_made_plan_with_inductor(self, name: str):
        given = ours(make(self.device), "inductor", {"plan": plan(name)})
        assert_equal(given, plain(make(self.device), "inductor"), bitwise=False)

    @pytest.mark.parametrize(
        "how",
        [
            pytest.param({"micro_batches": 3}, id="accumulation"),
            pytest.param({"clip": True, "micro_batches": 2}, id="clipping", marks=pytest.mark.slow),
            pytest.param({"between": training.evaluate}, id="evaluation between steps", marks=pytest.mark.slow),
        ],
    )
    @pytest.mark.parametrize("name", ["mixed", slow("mixed in part")])
    def test_loops_are_bitwise_exact(self, how: dict[str, Any], name: str):
        options = {"plan": plan(name), "micro_batches": how.get("micro_batches", 1)}
        given = ours(make(self.device), "eager", options, **how)
        assert_equal(given, plain(make(self.device), "eager", **how), bitwise=True)

    @pytest.mark.parametrize(
        "made",
        [
            pytest.param(lambda device: training.frozen(make(device)), id="frozen", marks=pytest.mark.slow),
            pytest.param(lambda device: make(device, tied=True), id="tied", marks=pytest.mark.slow),
        ],
    )
    @pytest.mark.parametrize("name", ["mixed", slow("mixed in part")])
    def test_frozen_and_tied_parameters_are_bitwise_exact(self, made: Callable[[str], Model], name: str):
        given = ours(made(self.device), "eager", {"plan": plan(name)})
        assert_equal(given, plain(made(self.device), "eager"), bitwise=True)

    @pytest.mark.slow
    def test_bf16_parameters_train_on_fp32_masters(self):
        """Wherever states are, masters are those of PyTorch's AdamW, in fp32 and given the same gradients."""
        for name in self.with_masters:
            model = make(self.device).bfloat16()
            masters = [p.detach().float().requires_grad_() for p in model.parameters()]
            reference = torch.optim.AdamW(masters, lr=1e-3, fused=True)
            optimizer = autohete_fx.AdamW(model.parameters(), lr=1e-3)
            options = {"inner_backend": "eager", "profile": "analytic", "plan": plan(name)}
            model.compile(backend="autohete", options=options)
            for step in range(training.STEPS):
                torch.manual_seed(1000 * step)
                model(batch(self.device, step)).backward()
                for master, parameter in zip(masters, model.parameters(), strict=True):
                    assert parameter.grad is not None
                    master.grad = training.copied(parameter.grad).float().to(self.device)
                reference.step()
                optimizer.step()
                optimizer.zero_grad()
            for master, parameter in zip(masters, model.parameters(), strict=True):
                own = optimizer.state[parameter]["master"].to(self.device)
                torch.testing.assert_close(own, master.detach(), atol=1e-5, rtol=1e-5)
                assert torch.equal(parameter, own.bfloat16())
            torch._dynamo.reset()

    def trains_exactly_within(self, share: float, inner: str, sizes: Sizes) -> None:
        """The planner's own plan at a share of plain's peak."""
        with training.in_one_order(self.device) if inner == "eager" else contextlib.nullcontext():
            self._trains_exactly_within(share, inner, sizes)

    def _trains_exactly_within(self, share: float, inner: str, sizes: Sizes) -> None:
        training.warm_up(self.device)
        expected, plain_peak = training.plain_run(self.device, inner, sizes)
        gc.collect()
        budget_bytes = int(plain_peak * share)
        given, peak = training.budgeted_run(self.device, inner, sizes, budget_bytes)
        assert peak <= budget_bytes
        assert 0.999 <= training.training_compilation().plan.peak_bytes / peak <= 1.05
        if self.device != "cpu":
            on_host = training.stepped_on_host()
            expected, _ = training.plain_run(self.device, inner, sizes, on_host)
            if inner == "eager":
                again, _ = training.plain_run(self.device, inner, sizes, on_host)
                assert_equal(again, expected, bitwise=True)  # its own kernels may add up in any order
        assert_equal(given, expected, bitwise=inner == "eager")

    @pytest.mark.parametrize("share", [slow(0.3), 0.5, slow(0.7), slow(1.0)])
    def test_solved_plans_are_exact_and_keep_the_budget_in_every_step(self, share: float):
        self.trains_exactly_within(share, "eager", self.large)

    @pytest.mark.slow
    @pytest.mark.parametrize("share", [0.3, 0.7, 1.0])
    def test_solved_plans_with_inductor(self, share: float):
        self.trains_exactly_within(share, "inductor", self.deep)

    @pytest.mark.slow
    def test_a_placed_model_reads_and_trains_as_any_other(self):
        """Built on the CPU; eager code, and a plan that brings some of it to the device."""
        placed, usual = autohete_fx.place(make("cpu"), self.device), make(self.device)
        assert {p.device.type for p in placed.parameters()} == {self.device}
        for name, value in usual.state_dict().items():
            assert torch.equal(placed.state_dict()[name], value) and torch.equal(
                placed.state_dict()[name].cpu(), value.cpu()
            )
        tokens = batch(self.device, 0)
        with torch.no_grad():
            torch.testing.assert_close(placed.eval()(tokens), usual.eval()(tokens))
        given = ours(placed.train(), "eager", {"plan": plan("mixed")})
        assert_equal(given, plain(usual.train(), "eager"), bitwise=True)
