"""AdamW's arguments and what it is asked for: errors that say what to do, owners, bytes of states."""

import copy
import gc
import weakref
from typing import Any

import pytest
import torch
from torch.nn import Parameter

from autohete_fx.errors import AutoHeteError, OptimizerStateError
from autohete_fx.optim import SGD, AdamW, optimizer_of
from tests.main_job import slow


def test_the_record_of_owners_keeps_nothing_alive() -> None:
    p = Parameter(torch.ones(3, 3))
    optimizer = AdamW([p])
    gone = weakref.ref(optimizer)
    del optimizer
    gc.collect()
    assert gone() is None and optimizer_of(p) is None
    optimizer, gone = AdamW([p]), weakref.ref(p)
    assert optimizer_of(p) is optimizer
    del optimizer, p
    gc.collect()
    assert gone() is None


def test_the_latest_optimizer_that_lives_has_a_parameter_or_one_that_steps_for_the_first_time() -> None:
    p = Parameter(torch.ones(3, 3))
    first = AdamW([p])
    second = SGD([p], lr=0.1)
    assert optimizer_of(p) is second
    p.grad = torch.ones_like(p)
    first.step()
    assert optimizer_of(p) is first
    second.step()
    first.step()
    assert optimizer_of(p) is second, "a step that is not the first changes nothing"
    copied = copy.copy(second)
    assert optimizer_of(p) is copied
    del copied, second
    gc.collect()
    assert optimizer_of(p) is first


@pytest.mark.parametrize(
    ("dtype", "per_element"),
    [(torch.float32, 8), (torch.float64, 16), *(slow(dtype, 12) for dtype in (torch.bfloat16, torch.float16))],
    ids=str,
)
def test_state_bytes_before_and_after_the_first_step(dtype: torch.dtype, per_element: int) -> None:
    p = Parameter(torch.ones(10, 10, dtype=dtype))
    optimizer = AdamW([p])
    assert optimizer.state_bytes_of(p) == 100 * per_element
    p.grad = torch.ones_like(p)
    optimizer.step()
    held = sum(t.nbytes for name, t in optimizer.state[p].items() if name != "step")
    assert held == optimizer.state_bytes_of(p) == 100 * per_element
    frozen = Parameter(torch.ones(3), requires_grad=False)
    assert AdamW([frozen]).state_bytes_of(frozen) == 0


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"lr": -1.0}, "lr is -1.0"),
        ({"lr": float("nan")}, "lr is nan"),
        ({"lr": "1e-3"}, "lr is '1e-3'; expected a number"),
        ({"lr": None}, "lr is None"),
        ({"lr": torch.ones(2)}, "expected one element"),
        ({"eps": -1e-8}, "eps is"),
        ({"weight_decay": -0.1}, "weight_decay is"),
        ({"betas": (0.9, 1.0)}, r"betas\[1\] is 1.0"),
        ({"betas": (0.9,)}, r"betas is \(0.9,\); expected two numbers"),
        ({"betas": 0.9}, "betas is 0.9; expected two numbers"),
        ({"amsgrad": True}, "amsgrad=True is not supported"),
        ({"capturable": True}, "capturable=True is not supported"),
        ({"differentiable": True}, "differentiable=True is not supported"),
    ],
)
def test_bad_hyperparameters(options: dict[str, Any], message: str) -> None:
    p = Parameter(torch.ones(2))
    with pytest.raises(OptimizerStateError, match=message):
        AdamW([p], **options)
    with pytest.raises(ValueError, match=message):
        AdamW([{"params": [p], **options}])
    optimizer = AdamW([Parameter(torch.ones(2))])
    with pytest.raises(AutoHeteError, match=message):
        optimizer.add_param_group({"params": [p], **options})
    assert len(optimizer.param_groups) == 1


def test_implementation_choices_are_accepted() -> None:
    p = Parameter(torch.ones(2))
    choices: tuple[dict[str, Any], ...] = ({"fused": True}, {"fused": False}, {"foreach": True}, {"foreach": None})
    for options in choices:
        optimizer = AdamW([p], **options)
        assert optimizer.param_groups[0]["fused"] is True and optimizer.param_groups[0]["foreach"] is None
    with pytest.raises(TypeError, match="decoupled"):
        AdamW([p], decoupled=True)  # pyright: ignore[reportCallIssue]


def test_groups_are_the_callers_dictionaries() -> None:
    groups = [{"params": iter([Parameter(torch.ones(2))]), "lr": 0.1}, {"params": [Parameter(torch.ones(2))]}]
    optimizer = AdamW(groups, lr=0.2)
    optimizer.add_param_group(late := {"params": Parameter(torch.ones(2))})
    assert all(map(lambda a, b: a is b, optimizer.param_groups, [*groups, late])), "as of torch.optim"
    groups[0]["lr"] = 0.5
    assert [group["lr"] for group in optimizer.param_groups] == [0.5, 0.2, 0.2]


def test_parameters_and_gradients_it_cannot_use() -> None:
    optimizer = AdamW([Parameter(torch.ones(2))])
    with pytest.raises(OptimizerStateError, match="complex64"):
        optimizer.add_param_group({"params": [Parameter(torch.ones(2, dtype=torch.complex64))]})
    assert len(optimizer.param_groups) == 1
    optimizer.add_param_group({"params": [Parameter(torch.ones(2, dtype=torch.uint8), requires_grad=False)]})
    good, embedding = Parameter(torch.ones(2)), torch.nn.Embedding(4, 2, sparse=True)
    optimizer = AdamW([good, embedding.weight])
    embedding(torch.tensor([1])).sum().backward()
    good.grad = torch.ones(2)
    with pytest.raises(OptimizerStateError, match="sparse"):
        optimizer.step()
    assert torch.equal(good, torch.ones(2)) and not optimizer.state, "nothing has changed"
