"""What is said when the device's allocator refuses memory: which plan, what it predicts, what is taken, which budget to ask for."""

from types import SimpleNamespace

import pytest
import torch

from autohete_fx.machine import budgets
from autohete_fx.options import Options
from autohete_fx.runtime.shortage import DeviceUse, budget_that_fits, device_use, requested_bytes, shortage_text

GIB = 2**30
MESSAGE = (
    "CUDA out of memory. Tried to allocate 1.50 GiB. GPU 0 has a total capacity of 79.10 GiB of which 1.06 GiB is free."
)


def use(**how: int) -> DeviceUse:
    return DeviceUse(**{"requested": GIB, "allocated": 38 * GIB, "reserved": 40 * GIB, "capacity": 40 * GIB, **how})


@pytest.mark.parametrize(
    ("message", "expected"),
    [
        (MESSAGE, 3 * GIB // 2),
        ("Tried to allocate 20.00 MiB (GPU 0", 20 * 2**20),
        ("Tried to allocate 512 bytes.", 512),
        ("CUDA error: out of memory", 0),
    ],
)
def test_the_request_is_read_off_the_message(message: str, expected: int):
    assert requested_bytes(message) == expected


@pytest.mark.parametrize("peak", [30 * GIB, 39 * GIB, 50 * GIB])
def test_the_budget_to_ask_for_leaves_room_for_pieces_and_for_what_is_not_the_plans(peak: int):
    taken = use()
    foreign = max(0, taken.allocated + taken.requested - peak)
    budget = budget_that_fits(taken, peak)
    assert 0 < budget < peak
    assert foreign + budget + taken.in_pieces <= taken.capacity


def test_the_text_names_all_of_it():
    text = shortage_text(use(), "plan 9f1c of 42 blocks (feasible)", 39 * GIB, 40 * GIB)
    for words in ("plan 9f1c of 42 blocks", "budget of 40.0 GiB", "peak of 39.0 GiB", "1.00 GiB more were refused"):
        assert words in text
    assert "38.0 GiB in live tensors" in text and "2.00 GiB in pieces" in text and "memory_budget='38912MiB'" in text
    nothing_left = shortage_text(use(capacity=2 * GIB), "plan 9f1c", 39 * GIB, None)
    assert "made without a limit" in nothing_left and "no memory_budget would do" in nothing_left


def test_the_figures_are_the_allocators(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda device: 5 * GIB)
    monkeypatch.setattr(torch.cuda, "memory_allocated", lambda device: 4 * GIB)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (2 * GIB, 80 * GIB))
    monkeypatch.setattr(torch.cuda, "get_per_process_memory_fraction", lambda device: 0.5)
    found = device_use(torch.OutOfMemoryError(MESSAGE), torch.device("cuda", 0))
    assert found == DeviceUse(requested=3 * GIB // 2, allocated=4 * GIB, reserved=5 * GIB, capacity=7 * GIB)
    monkeypatch.setattr(torch.cuda, "get_per_process_memory_fraction", lambda device: 0.05)
    assert device_use(torch.OutOfMemoryError(""), torch.device("cuda", 0)).capacity == 4 * GIB


def test_without_a_budget_some_of_the_card_is_left_to_libraries_and_pieces(monkeypatch: pytest.MonkeyPatch):
    free, total = 70 * GIB, 80 * GIB
    monkeypatch.setattr(budgets, "device_capacity_bytes", lambda device: total)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (free, total))
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda device: 2 * GIB)
    monkeypatch.setattr(torch.cuda, "get_per_process_memory_fraction", lambda device: 1.0)
    device = torch.device("cuda", 0)
    budget = budgets.device_budget_bytes(device, Options())
    assert budget is not None and 65 * GIB < budget < 70 * GIB
    monkeypatch.setattr(torch.cuda, "get_per_process_memory_fraction", lambda device: 0.1)
    capped = budgets.device_budget_bytes(device, Options())
    assert capped is not None and 7 * GIB < capped < 7.75 * GIB
    assert budgets.device_budget_bytes(device, Options.from_user({"memory_budget": "79GiB"}, None)) == 79 * GIB


def test_the_first_step_has_room_to_time_kernels_in(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: SimpleNamespace(L2_cache_size=50 * 2**20))
    cuda, eager = torch.device("cuda", 0), Options.from_user({"inner_backend": "eager"}, None)
    assert budgets.tuning_bytes(cuda, Options()) == 50 * 2**20
    assert budgets.tuning_bytes(cuda, eager) == budgets.tuning_bytes(torch.device("cpu"), Options()) == 0
