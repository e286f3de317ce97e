"""An allocator that refuses memory in a step of training: the error says what to do, and nothing stays behind."""

from typing import Any

import pytest
import torch

import autohete_fx
from autohete_fx import BlockDecision, Params, Plan
from autohete_fx.ir.sizes import format_bytes
from autohete_fx.optim import state
from autohete_fx.runtime import shortage
from autohete_fx.runtime.session import Session
from tests.held_updates import Stack, labels
from tests.training import training_compilation

X = torch.ones(8, 128)


def refused(*args: Any) -> torch.Tensor:
    raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 64.00 KiB.")


@pytest.mark.parametrize("inner", ["eager", pytest.param("inductor", marks=pytest.mark.slow)])
@pytest.mark.parametrize("graph", ["forward", "backward"])
def test_the_error_names_the_plan_and_the_copies_under_way_are_let_go(
    graph: str, inner: str, monkeypatch: pytest.MonkeyPatch
):
    plan = Plan(labels=labels(), decisions=(BlockDecision(params=Params.HOST),) * len(labels()))
    model = Stack()
    model.compile(backend="autohete", options={"inner_backend": inner, "profile": "analytic", "plan": plan})
    expected = model(X)
    expected.backward()
    gradients = [p.grad for p in model.parameters()]
    model.zero_grad()

    sessions: list[Session] = []
    issue = Session.issue

    def third_is_refused(session: Session, *args: Any) -> torch.Tensor:
        sessions.append(session)
        return refused() if len(sessions) == 3 else issue(session, *args)

    use = shortage.DeviceUse(requested=2**16, allocated=2**30, reserved=2**30, capacity=2**30)
    monkeypatch.setattr(shortage, "device_use", lambda error, device: use)
    with monkeypatch.context() as patch:
        loss = model(X) if graph == "backward" else None
        patch.setattr(Session, "issue", third_is_refused)
        with pytest.raises(torch.OutOfMemoryError, match="out of memory") as caught:
            (model(X) if loss is None else loss).backward()
    (note,) = caught.value.__notes__
    used = training_compilation().plan
    for words in (f"plan {used.digest} of 6 blocks", format_bytes(used.peak_bytes), "1.00 GiB that it could take"):
        assert words in note
    assert not sessions[0]._in_flight
    again = model(X)
    again.backward()
    assert torch.equal(again, expected)
    assert all(map(torch.equal, [p.grad for p in model.parameters()], gradients))


def test_a_step_that_finds_no_room_for_states_says_so_too_and_can_be_taken_again(monkeypatch: pytest.MonkeyPatch):
    plan = Plan(labels=labels(), decisions=(BlockDecision(),) * len(labels()))
    model = Stack()
    model.compile(backend="autohete", options={"inner_backend": "eager", "profile": "analytic", "plan": plan})
    optimizer = autohete_fx.AdamW(model.parameters(), lr=1e-2)
    model(X).backward()
    use = shortage.DeviceUse(requested=2**16, allocated=2**30, reserved=2**30, capacity=2**30)
    monkeypatch.setattr(shortage, "device_use", lambda error, device: use)
    before = [p.detach().clone() for p in model.parameters()]
    with monkeypatch.context() as patch:
        patch.setattr(state.StatePlacement, "empty", refused)
        with pytest.raises(torch.OutOfMemoryError, match="out of memory") as caught:
            optimizer.step()
    (note,) = caught.value.__notes__
    assert f"plan {training_compilation().plan.digest} of 6 blocks" in note
    assert all(map(torch.equal, model.parameters(), before))
    optimizer.step()
    assert not any(map(torch.equal, model.parameters(), before))
