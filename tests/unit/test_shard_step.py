"""The mean of small gradients at a step, on tensors of the meta device: it has no values, so to read one fails."""

from types import SimpleNamespace
from unittest import mock

import pytest
import torch
from torch import nn

from autohete_fx.runtime.shard import step


def mean_over_ranks(*, of_all: bool) -> list[nn.Parameter]:
    """Parameters of two sizes whose gradients are averaged, that of the last one only where it has any."""
    params = [nn.Parameter(torch.empty(size, device="meta")) for size in ((4, 4), (3,))]
    for param in params if of_all else params[:-1]:
        param.grad = torch.empty_like(param)
    ranks = mock.Mock(control=type("Group", (), {})(), total=1)
    part = SimpleNamespace(group="ranks", ranks=ranks, number=0, is_shard=False, averaged_over=object(), groups=())
    with mock.patch.object(step, "part_of", lambda _: part), mock.patch.object(step, "all_reduce") as reduced:
        step.prepare(params)
    ((flat, *_), _) = reduced.call_args
    assert flat.shape == (2 + 16 + 3,), "two flags, then all elements"
    return params


def test_the_program_waits_for_no_device_where_it_has_all_gradients():
    gradients = [param.grad for param in mean_over_ranks(of_all=True)]
    assert [None if grad is None else grad._version for grad in gradients] == [1, 1], "each was written once"


def test_the_program_reads_which_gradients_others_have_where_one_is_missing():
    with pytest.raises(RuntimeError, match="meta"):
        mean_over_ranks(of_all=False)
