"""Fingerprints: equal for equal bits, and changed by every edit that a user may think of."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from autohete_fx.optim import fingerprint as module
from autohete_fx.optim.fingerprint import _words, fingerprint, fingerprint_into
from autohete_fx.runtime.meter import MemoryMeter
from tests.main_job import slow

EDITS: dict[str, Callable[[Tensor], object]] = {
    "negation": lambda t: t.neg_(),
    "doubling": lambda t: t.mul_(2),
    "zeros": lambda t: t.zero_(),
    "reversal": lambda t: t.copy_(t.flip(0)),
    "rotation": lambda t: t.copy_(t.roll(1, 0)),
    "a swap of halves": lambda t: t.copy_(torch.cat(t.chunk(2)[::-1])),
    "two signs": lambda t: t[3:5].neg_(),
    "a sign of zero": lambda t: t[0].fill_(-0.0) if t[0] == 0 else t[0].zero_(),
    "not a number": lambda t: t[-1].fill_(float("nan")),
}


def taken_as(word: torch.dtype, length: int, dtype: torch.dtype) -> Any:
    """A tensor that is read as words of this kind. Each kind has a kernel, which takes seconds to compile."""
    assert word is _words(torch.empty(length, dtype=dtype)).dtype
    return (length, dtype) if word is torch.int64 else slow(length, dtype)


@pytest.mark.slow
def test_a_kernel_is_compiled_in_hardly_any_memory():
    """The first step, which needs it, may be at the peak that the budget allows."""
    with MemoryMeter("cpu") as meter:
        assert module._compiled.__wrapped__(torch.int64, torch.device("cpu")) is not None
    assert meter.peak_bytes - meter.start_bytes < 2**16


@pytest.mark.parametrize(
    ("length", "dtype"),
    [
        taken_as(torch.int32, 6, torch.bfloat16),
        taken_as(torch.int64, 1000, torch.bfloat16),
        taken_as(torch.int16, 4099, torch.bfloat16),
        taken_as(torch.int64, 6, torch.float32),
        taken_as(torch.int64, 1000, torch.float32),
        taken_as(torch.int32, 4099, torch.float32),
        taken_as(torch.int64, 6, torch.float64),
        taken_as(torch.int64, 1000, torch.float64),
        taken_as(torch.int64, 4099, torch.float64),
    ],
    ids=str,
)
@pytest.mark.parametrize("name", EDITS)
def test_an_edit_shows(name: str, length: int, dtype: torch.dtype):
    t = torch.randn(length, dtype=dtype)
    before = fingerprint(t)
    assert before.shape == (1,) and torch.equal(before, fingerprint(t.clone()))
    EDITS[name](t)
    assert not torch.equal(before, fingerprint(t))


@pytest.mark.slow
@settings(max_examples=60, deadline=None)
@given(st.integers(1, 300), st.integers(0, 2**16 - 1), st.data())
def test_every_bit_counts(length: int, seed: int, data: st.DataObject):
    t = torch.randn(length, generator=torch.Generator().manual_seed(seed)).bfloat16()
    before = fingerprint(t)
    at, bit = data.draw(st.integers(0, length - 1)), data.draw(st.integers(0, 14))
    t.view(torch.int16)[at] ^= 1 << bit
    assert not torch.equal(before, fingerprint(t))
    t.view(torch.int16)[at] ^= 1 << bit
    assert torch.equal(before, fingerprint(t))


@pytest.mark.slow
def test_any_layout_in_memory_order_and_any_offset():
    base = torch.randn(64, 33).bfloat16()
    views = [base.t(), base.view(-1)[1:], base[3:5]]
    for view in views:
        before = fingerprint(view)
        view.mul_(1)
        assert torch.equal(before, fingerprint(view))
        view.select(0, -1).add_(1)
        assert not torch.equal(before, fingerprint(view))
    assert fingerprint(torch.empty(0)).item() == 0


def test_a_tensor_too_long_for_one_call_is_taken_in_parts(monkeypatch: pytest.MonkeyPatch):
    t = torch.randn(5000)
    monkeypatch.setattr(module, "LONGEST", 600)
    before = fingerprint(t)
    for edit in (lambda: t[-1].neg_(), lambda: t.copy_(t.roll(1200))):
        edit()
        assert not torch.equal(before, fingerprint(t))


def test_without_a_compiler_it_is_the_same(monkeypatch: pytest.MonkeyPatch):
    t, compiled = torch.randn(3002), torch.empty(1, dtype=torch.int64)
    fingerprint_into(t, compiled)
    monkeypatch.setattr(module, "_TILE", 256)
    monkeypatch.setattr(module, "_compiled", lambda word, device: None)
    assert torch.equal(fingerprint(t), compiled)
