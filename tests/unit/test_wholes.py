"""Whole parameters that stay: which are current, and how a write to a shard is found."""

import pytest
import torch

from autohete_fx.errors import ShardError
from autohete_fx.runtime import wholes as module
from autohete_fx.runtime.lanes.lanes import Lanes
from autohete_fx.runtime.wholes import Wholes, note_change


def kept(dtype: torch.dtype, rows: int = 3) -> tuple[Wholes, torch.Tensor, torch.Tensor]:
    """Of the second of two ranks."""
    shard, wholes = torch.arange(3 * rows).view(rows, 3).to(dtype), Wholes()
    whole = torch.cat([shard + 100, shard])
    wholes.keep([shard], [whole], Lanes("cpu").now())
    return wholes, shard, whole


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16, torch.uint8])
def test_a_whole_is_current_until_something_changes(dtype: torch.dtype):
    wholes, shard, whole = kept(dtype)
    found = wholes.current([shard], rank=1)
    assert found is not None and found[0][0] is whole
    assert wholes.current([shard, torch.ones(1, 3)], rank=1) is None  # one is missing
    note_change()
    assert wholes.current([shard], rank=1) is None
    assert wholes.memory_of(shard, 2) is whole and wholes.memory_of(torch.ones(1, 3), 2).shape == (2, 3)
    wholes.forget()
    assert wholes.memory_of(shard, 2) is not whole


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16, torch.uint8])
def test_a_write_to_a_shard_is_found(dtype: torch.dtype):
    wholes, shard, _ = kept(dtype)
    shard.data[1, 1] = 77  # which no version counter tells
    with pytest.raises(ShardError, match="a shard was written to between micro-batches"):
        wholes.current([shard], rank=1)


def test_not_a_number_is_as_good_as_a_number():
    wholes, shard, whole = kept(torch.float32)
    shard[0, 0] = whole[3, 0] = float("nan")
    assert wholes.current([shard], rank=1) is not None


def test_a_gather_that_failed_is_begun_again():
    wholes, shard, whole = kept(torch.float32)
    failed = Lanes("cpu").now()
    failed.error = RuntimeError("no answer")
    wholes.keep([shard], [whole], failed)
    assert wholes.current([shard], rank=1) is None


def test_a_flag_of_an_accelerator_is_read_at_the_next_step():
    wholes, _, _ = kept(torch.float32)
    wholes._were_written += [torch.tensor(False), torch.tensor(True)]
    with pytest.raises(ShardError, match="other ranks could not know of that"):
        module.check_unwritten()
    module.check_unwritten()  # told once
