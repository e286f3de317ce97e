"""The two kernels: how exact the mixed pass is, what it takes for an edit, and what it costs in memory."""

import functools
import gc
import threading
import time
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._inductor import config as inductor_config
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn import Parameter
from torch.utils._python_dispatch import TorchDispatchMode

from autohete_fx.ir import Optimizer, Params
from autohete_fx.optim import AdamW, kernels
from autohete_fx.optim.adamw import ADAMW
from autohete_fx.runtime.meter import MemoryMeter
from autohete_fx.runtime.placement import Placement, place_param
from autohete_fx.runtime.tiers.host import HostTier, open_tier
from tests.main_job import slow

DTYPES = [torch.bfloat16, slow(torch.float16)]
GROUP: dict[str, Any] = {"lr": 0.01, "betas": (0.9, 0.999), "eps": 1e-8, "weight_decay": 0.1, "maximize": False}
IDLE = {**GROUP, "lr": 0.0}


@pytest.fixture
def tier(tmp_path: Path) -> HostTier:
    return open_tier("cpu", str(tmp_path))


@pytest.fixture
def uncompiled() -> Iterator[None]:
    """No kernel compiled before or after."""
    kernels._compiled.cache_clear()
    yield
    kernels._compiled.cache_clear()


def states(length: int, dtype: torch.dtype, seed: int = 0) -> list[Tensor]:
    """Weight, gradient, master and moments as they are in mid-training."""
    generator = torch.Generator().manual_seed(seed)
    master, grad, first, second = torch.randn(4, length, generator=generator)
    return [master.to(dtype), grad.to(dtype), master, 0.1 * first, 0.01 * second.square()]


def step_reference(tensors: list[Tensor], step: int) -> list[Tensor]:
    """torch's fused kernel on the master, then the rounding."""
    weight, grad, master, exp_avg, exp_avg_sq = (t.clone() for t in tensors)
    steps = [torch.tensor(float(step - 1))]
    step_fused([master], [grad.float()], [exp_avg], [exp_avg_sq], steps)
    return [weight.copy_(master), grad, master, exp_avg, exp_avg_sq]


def step_fused(params: list[Tensor], grads: list[Tensor], *moments_and_steps: list[Tensor]) -> None:
    *moments, steps = moments_and_steps
    for step in steps:
        step += 1
    assert ADAMW.fused is not None
    ADAMW.fused(params, grads, moments, steps, GROUP)


def step_mixed(tensors: list[Tensor], group: dict[str, Any], step: int) -> None:
    weight, grad, *states = tensors
    kernels.update(ADAMW, weight, grad, states, torch.tensor(ADAMW.coefficients(group, step)))


def ulps(a: Tensor, b: Tensor, scale: Tensor) -> float:
    """The largest difference in fp32 units in the last place of ``scale``."""
    unit = torch.finfo(torch.float32).eps * scale.abs().double()
    return float(((a.double() - b.double()).abs() / unit).max())


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("length", [1, 2, 15, 16, 17, 1000, kernels._SMALL, kernels._SMALL + 1, 100_003])
@pytest.mark.parametrize("step", [1, 7, 10_000])
def test_one_step_is_within_fp32_rounding(dtype: torch.dtype, length: int, step: int) -> None:
    """From equal states: 4 units in the last place, of the operands where they nearly cancel."""
    before = states(length, dtype)
    expected = step_reference(before, step)
    found = [t.clone() for t in before]
    step_mixed(found, GROUP, step)
    assert ulps(found[2], expected[2], before[2].abs() + (expected[2] - before[2]).abs()) <= 4
    assert ulps(found[3], expected[3], before[3].abs() + before[1].float().abs()) <= 4
    assert ulps(found[4], expected[4], expected[4]) <= 4
    assert torch.equal(found[0], found[2].to(dtype))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_edits_are_found_at_every_weight(dtype: torch.dtype) -> None:
    """For every finite weight, masters at and around every point where rounding changes, eager and compiled."""
    weights = torch.arange(-(1 << 15), 1 << 15, dtype=torch.int32).to(torch.int16).view(dtype)
    in_range = 2.0**111 if dtype == torch.bfloat16 else float("inf")
    weights = weights[weights.isfinite() & (weights.float().abs() < in_range)]
    if dtype == torch.bfloat16:
        weights = weights[weights.float().abs() >= 2.0**-125]
    values = weights.float().unique()
    middles = ((values[1:].double() + values[:-1].double()) / 2).float()
    points = torch.cat([values, middles, (values[1:] + middles) / 2, (middles + values[:-1]) / 2])
    masters = torch.cat([(points.view(torch.int32) + d).view(torch.float32) for d in range(-2, 3)])
    nearest = masters.to(dtype)
    keep = nearest.isfinite() & (nearest.float().abs() < in_range)
    if dtype == torch.bfloat16:
        keep &= nearest.float().abs() >= 2.0**-125
    masters, nearest = masters[keep], nearest[keep]
    error = (masters.double() - nearest.double()).abs()
    for offset in range(-2, 3):
        weight = (nearest.view(torch.int16) + offset).view(dtype)
        distance = (masters.double() - weight.double()).abs()
        # At a tie both neighbours are nearest, and either answer is right.
        certain = weight.isfinite() & ((distance != error) | (weight == nearest))
        wanted = torch.where(distance == error, masters, weight.float())[certain]
        assert torch.equal(kernels._current(weight, masters)[certain], wanted)
        compiled = [weight[certain].clone(), torch.zeros_like(weight[certain]), masters[certain].clone()]
        compiled += [torch.zeros_like(compiled[2]), torch.ones_like(compiled[2])]
        step_mixed(compiled, IDLE, 1)
        assert torch.equal(compiled[2], wanted)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("length", [40, 40_000])
def test_weights_that_are_not_finite_win(dtype: torch.dtype, length: int) -> None:
    tensors = states(length, dtype)
    tensors[0][:3] = torch.tensor([float("inf"), float("-inf"), float("nan")])
    tensors[2][3] = float("nan")
    current = kernels._current(tensors[0], tensors[2])
    assert torch.equal(current[:2], tensors[0][:2].float()) and current[2].isnan()
    step_mixed(tensors, IDLE, 1)
    assert not tensors[2][:3].isfinite().any() and not tensors[0][:3].isfinite().any()
    assert tensors[2][3] == current[3] == tensors[0][3].float(), "a user who repairs a NaN is heard"


def test_long_tensors_go_in_slices(monkeypatch: pytest.MonkeyPatch) -> None:
    whole, sliced = states(70_001, torch.bfloat16), states(70_001, torch.bfloat16)
    step_mixed(whole, GROUP, 3)
    monkeypatch.setattr(kernels, "LONGEST", 35_000)
    step_mixed(sliced, GROUP, 3)
    for a, b in zip(whole, sliced, strict=True):
        assert torch.equal(a, b)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("left", [0, 1, 2, 33, 63])
def test_large_tensors_are_bitwise_what_small_slices_are(dtype: torch.dtype, left: int) -> None:
    """Where an element lies decides which kernel takes it, and must not decide its value."""
    whole, sliced = (states(kernels._SMALL + 64 + left, dtype) for _ in range(2))
    for tensors in (whole, sliced):
        tensors[0][::7] *= 1.5
    step_mixed(whole, GROUP, 3)
    for parts in zip(*(t.chunk(3) for t in sliced), strict=True):
        step_mixed(list(parts), GROUP, 3)
    for a, b in zip(whole, sliced, strict=True):
        assert torch.equal(a, b)


@pytest.mark.slow
@pytest.mark.parametrize("longest", [kernels.LONGEST, 35_000])
def test_rows_are_bitwise_what_any_length_is(longest: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """As a GPU's kernels take them, here by a CPU; slices of long ones are whole rows, too."""
    flat, in_rows = (states(64 * 1096, torch.bfloat16) for _ in range(2))
    step_mixed(flat, GROUP, 3)
    monkeypatch.setattr(kernels, "LONGEST", longest)
    monkeypatch.setattr(kernels, "_form_of", lambda *_: "rows")
    step_mixed(in_rows, GROUP, 3)
    for a, b in zip(flat, in_rows, strict=True):
        assert torch.equal(a, b)


def test_slices_of_the_fused_kernel_are_bitwise_the_whole() -> None:
    """What "bitwise wherever it lives" rests on: neither length nor address changes an element's arithmetic."""
    buffer = torch.zeros(5, 4003)
    buffer[:, 1:4001] = torch.randn(5, 4000)
    whole = [t.clone() for t in buffer[:, 1:4001]]
    parts = [t[1:4001] for t in buffer]
    for tensors, pieces in ((whole, 1), (parts, 5)):
        for piece in range(pieces):
            p, g, m, v = (t.chunk(pieces)[piece] for t in (tensors[0], tensors[1], tensors[2], tensors[3].abs_()))
            step_fused([p], [g], [m], [v], [torch.tensor(4.0)])
    for a, b in zip(whole, parts, strict=True):
        assert torch.equal(a, b)


@pytest.mark.usefixtures("uncompiled")
def test_without_a_compiler_it_warns_once_and_is_exact(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object) -> None:
        raise RuntimeError("no compiler here")

    monkeypatch.setattr(kernels, "_compile", fail)
    p = Parameter(torch.randn(300, 200).bfloat16())
    master = Parameter(p.detach().float())
    optimizer, expected = AdamW([p]), torch.optim.AdamW([master], fused=True)
    p.grad = torch.randn(300, 200).bfloat16()
    master.grad = p.grad.float()
    with pytest.warns(RuntimeWarning, match="no compiler here") as caught:
        optimizer.step()
    assert len(caught) == 1, "what needs the kernel that failed does not try its own"
    optimizer.step()
    expected.step()
    expected.step()
    torch.testing.assert_close(optimizer.state[p]["master"], master.detach(), rtol=1e-6, atol=1e-7)


@pytest.mark.usefixtures("uncompiled")
def test_a_kernel_that_computes_something_else_is_not_trusted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kernels, "_compile", lambda *_: lambda tensors: tensors[2].add_(1e-3))
    with pytest.warns(RuntimeWarning, match="disagrees with eager in"):
        kernels.prepare(ADAMW, torch.bfloat16, torch.bfloat16, torch.device("cpu"), 1000)


@pytest.mark.slow
@pytest.mark.usefixtures("uncompiled")
def test_the_users_inductor_passes_are_left_alone() -> None:
    def refuse(_: object) -> None:
        raise AssertionError("this pass is for the user's graphs")

    with inductor_config.patch(post_grad_custom_post_pass=refuse, post_grad_custom_pre_pass=refuse):
        kernels.prepare(ADAMW, torch.bfloat16, torch.bfloat16, torch.device("cpu"), 1000)
        assert inductor_config.post_grad_custom_post_pass is refuse


@pytest.mark.slow
@pytest.mark.usefixtures("uncompiled")
def test_it_compiles_where_warnings_are_errors_and_under_other_defaults() -> None:
    torch.set_default_dtype(torch.float64)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            kernels.prepare(ADAMW, torch.bfloat16, torch.bfloat16, torch.device("cpu"), 1000)
    finally:
        torch.set_default_dtype(torch.float32)


@pytest.mark.slow
def test_neither_length_nor_threads_nor_hyperparameters_compile_again() -> None:
    step_mixed(states(50_000, torch.bfloat16), GROUP, 1)
    count = kernels._compiled.cache_info().misses
    threads = torch.get_num_threads()
    results = []
    try:
        for n in (1, 2):
            torch.set_num_threads(n)
            tensors = states(60_000, torch.bfloat16)
            step_mixed(tensors, {**GROUP, "lr": 0.5, "maximize": True}, 9)
            results.append(tensors)
    finally:
        torch.set_num_threads(threads)
    assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))
    assert kernels._compiled.cache_info().misses == count


def test_the_gil_is_released() -> None:
    tensors = states(4_000_000, torch.bfloat16)
    step_mixed(tensors, GROUP, 1)
    running, done = threading.Event(), threading.Event()

    def work() -> None:
        running.set()
        for step in range(2, 30):  # long enough for a busy machine to let the main thread have its turn
            step_mixed(tensors, GROUP, step)
        done.set()

    thread = threading.Thread(target=work)
    thread.start()
    running.wait()
    turns = 0
    while not done.is_set():
        turns += 1
    thread.join()
    assert turns > 1000, "the main thread runs while the kernel does"


@pytest.mark.parametrize("where", (Optimizer.DEVICE, Optimizer.HOST), ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_a_step_takes_no_device_memory_but_its_states(dtype: torch.dtype, where: Optimizer, tier: HostTier) -> None:
    params = [Parameter(torch.randn(512, 512).to(dtype)) for _ in range(4)]
    optimizer = AdamW(params)
    kernels.prepare(ADAMW, torch.bfloat16, torch.bfloat16, torch.device("cpu"), 1000)
    gc.collect()  # what compiling leaves behind, fake tensors among it, is no business of the meter
    for p in params:
        place_param(p, Placement(params=Params.DEVICE, optimizer=where, tier=tier, block=0))
        p.grad = torch.randn(512, 512).to(dtype)
    for step in range(2):
        with MemoryMeter("cpu") as meter:
            optimizer.step()
        held = sum(optimizer.state_bytes_of(p) for p in params) if step == 0 and where is Optimizer.DEVICE else 0
        assert meter.peak_bytes - meter.start_bytes <= held + 4096


def test_versions_count_the_update() -> None:
    """Autograd must notice a parameter that changed after it was saved for backward."""
    for dtype in (torch.float32, torch.bfloat16):
        p = Parameter(torch.randn(64, 64).to(dtype))
        optimizer = AdamW([p])
        loss = (p * p).sum()
        p.grad = torch.ones_like(p)
        optimizer.step()
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            loss.backward()


class Called(TorchDispatchMode):
    """Notes the fused kernels that are called, and runs none of them."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if "_fused_adamw_" not in str(func):
            return func(*args, **(kwargs or {}))
        self.names.append(str(func))


@pytest.mark.parametrize("is_tensor", [False, True])
def test_an_accelerator_is_not_asked_for_a_rate_that_it_holds(is_tensor: bool):
    """Reading it would hold the thread that launches until the device is done."""
    with FakeTensorMode():
        p, g, m, v, step, lr = (torch.empty(size, device="cuda") for size in ((8,), (8,), (8,), (8,), (), ()))
    with Called() as called:
        assert ADAMW.fused is not None
        ADAMW.fused([p], [g], [[m], [v]], [step], {**GROUP, "lr": lr if is_tensor else 0.01})
    assert called.names == [f"aten._fused_adamw_.{'tensor_lr' if is_tensor else 'default'}"]


def test_other_threads_run_while_an_update_computes():
    """A kernel that kept the interpreter would hold up the thread that launches for all of the time that it should hide in."""
    tensors = states(1 << 22, torch.bfloat16)
    coefs = torch.tensor(ADAMW.coefficients(GROUP, 2.0))
    run = functools.partial(kernels.update, ADAMW, tensors[0], tensors[1], tensors[2:], coefs)
    run()
    over, ticks = threading.Event(), []

    def tick() -> None:
        while not over.wait(1e-4):
            ticks.append(time.perf_counter())

    thread = threading.Thread(target=tick)
    thread.start()
    try:
        for _ in range(200):
            begin_s = time.perf_counter()
            run()
            end_s = time.perf_counter()
            early_s, late_s = (begin_s + share * (end_s - begin_s) for share in (0.3, 0.7))
            if any(early_s < tick_s < late_s for tick_s in ticks):
                return
            ticks.clear()
        pytest.fail("no other thread ran in the middle of any update")
    finally:
        over.set()
        thread.join()
