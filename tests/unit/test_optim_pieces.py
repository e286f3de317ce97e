"""Device memory that pieces of streamed states pass through: how tensors are cut, and what each piece follows."""

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.nn import Parameter

from autohete_fx.optim import streamed
from autohete_fx.optim.adamw import ADAMW
from autohete_fx.optim.in_place import Update
from autohete_fx.optim.muon import MUON
from autohete_fx.optim.state import StatePlacement
from autohete_fx.optim.streamed import Staging


@settings(deadline=None, max_examples=60)
@given(length=st.integers(1, 20_000), widest=st.integers(1, 40_000))
def test_pieces_cover_a_tensor_and_fit_their_slots(length: int, widest: int):
    param, largest = Parameter(torch.zeros(length)), Parameter(torch.zeros(widest))
    place = StatePlacement(torch.device("cpu"))
    update, other = (Update(ADAMW, p, p, {}, {}, place) for p in (param, largest))
    staging = Staging([update, other])
    pieces = staging.pieces(update)
    assert [n for piece in pieces for n in range(piece.start, piece.stop)] == list(range(length))
    lengths = [piece.stop - piece.start for piece in pieces]
    assert all(n % 64 == 0 for n in lengths[:-1]) and (len(pieces) == 1 or lengths[-1] >= 64)
    for n in lengths:
        (first, second), _ = staging.take(update, n)
        assert len(first) == len(second) == n and (second.data_ptr() - first.data_ptr()) % 256 == 0


@settings(deadline=None, max_examples=60)
@given(st.lists(st.integers(1, 1_000), min_size=1, max_size=12), st.booleans())
def test_memory_of_pieces_is_taken_again_after_all_that_was_there(lengths: list[int], is_whole: bool):
    """Whatever their sizes, each follows the pieces whose memory it takes, and no others."""
    rule, place = (MUON if is_whole else ADAMW), StatePlacement(torch.device("cpu"))
    params = [Parameter(torch.zeros(n, 1)) for n in lengths]
    updates = [Update(rule, p, p, {}, dict(rule.hyperparameters), place) for p in params]
    staging, there = Staging(updates), dict[int, object]()  # by 64 bytes
    first, end = staging._memory.data_ptr(), staging._memory.data_ptr() + len(staging._memory)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(streamed, "Settled", lambda ticket: ticket)
        patch.setattr(streamed, "_PIECES_AHEAD", 10**6)
        for u in updates * 3:
            for piece in staging.pieces(u):
                (*_, last), freed = staging.take(u, piece.stop - piece.start)
                own = staging._taken
                assert first <= first + own.start and last.data_ptr() + last.nbytes <= first + own.stop <= end
                taken = range(own.start // 64, -(-own.stop // 64))
                assert {there[at] for at in taken if at in there} == set(freed)
                ticket: Any = object()
                there |= dict.fromkeys(taken, ticket)
                staging.give_back(ticket)
    assert rule is ADAMW or len(staging._memory) >= 2 * max(lengths) * 4
