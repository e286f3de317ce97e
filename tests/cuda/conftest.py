"""What the tests on a GPU share. All of tests/cuda has the marker ``cuda`` and is skipped where there is none.

They run in the order in which a failure says the most: what all others assume first, and all that is quick before what is slow.
"""

import functools
import gc
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from autohete_fx.runtime.lanes.stream import StreamTicket
from autohete_fx.runtime.session import Session
from tests.held_updates import use_lanes

CARD_BYTES = 768 * 2**20

_MOST_TELLING = ("tiers", "races", "optim", "main_job", "overlap", "placed_job", "budget", "ranks")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    def place(item: pytest.Item) -> tuple[bool, int]:
        name = item.path.stem.removeprefix("test_").removesuffix("_cuda")
        return item.get_closest_marker("slow") is not None, _MOST_TELLING.index(name)

    mine = [item for item in items if item.path.parent == Path(__file__).parent]
    items[:] = [item for item in items if item not in mine] + sorted(mine, key=place)


@pytest.fixture
def small_card() -> Iterator[int]:
    """A card that PyTorch takes for one of so many bytes."""
    gc.collect()
    torch.cuda.empty_cache()
    _, total = torch.cuda.mem_get_info()
    torch.cuda.set_per_process_memory_fraction(CARD_BYTES / total)
    yield CARD_BYTES
    torch.cuda.set_per_process_memory_fraction(1.0)
    torch._dynamo.reset()


@pytest.fixture
def late(monkeypatch: pytest.MonkeyPatch) -> None:
    """Everything is late at random: kernels before a copy is issued, the copy itself, updates on the host."""
    chance = random.Random(0)
    issue_copy, issue = StreamTicket.issue, Session.issue

    @functools.wraps(issue_copy)
    def late_copy(ticket: StreamTicket, stream: torch.Stream) -> None:
        with stream:
            torch.cuda._sleep(chance.randrange(4_000_000))  # up to 2 milliseconds
        issue_copy(ticket, stream)

    @functools.wraps(issue)
    def after_late_kernels(session: Session, *args: Any, **how: Any) -> torch.Tensor:
        torch.cuda._sleep(chance.randrange(2_000_000))
        return issue(session, *args, **how)

    monkeypatch.setattr(StreamTicket, "issue", late_copy)
    monkeypatch.setattr(Session, "issue", after_late_kernels)
    use_lanes(monkeypatch, pace=lambda ticket: chance.uniform(0, 0.005))
