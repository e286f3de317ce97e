"""Updates that overlap the next forward, on a GPU: exact whatever is late, waited for by every read, edits not lost."""

import dataclasses
from typing import Any

import pytest
import torch
from torch import nn

import autohete_fx
from autohete_fx import BlockDecision, Plan
from autohete_fx.ir import Overlap, Schedule
from tests import training
from tests.e2e.test_host_copy import EDITS, assert_comes_down_and_counts
from tests.e2e.test_host_copy import Pair as CopiedPair
from tests.e2e.test_overlap import READS
from tests.held_updates import ALL_ON_HOST, OPTIMIZER_ON_HOST, Gate, Stack, Training, labels
from tests.main_job import slow
from tests.placed_job import WIDTH
from tests.training import PLANS, STREAMED, assert_equal, make, ours, plain

LOOPS: list[Any] = [{"clip": True}, slow({"micro_batches": 2, "between": training.evaluate})]


def overlapping(name: str, overlap: str) -> Plan:
    return dataclasses.replace(training.plan(name), schedule=Schedule(overlap=Overlap(overlap)))


@pytest.mark.parametrize("how", LOOPS, ids=["clipping", "accumulation, evaluation"])
@pytest.mark.parametrize("name", [n if n in ("host-optimizer", "mixed", "streamed") else slow(n) for n in PLANS])
def test_training_is_bitwise_exact_whatever_is_late(name: str, how: dict[str, Any], late: None):
    options = {"plan": overlapping(name, "step"), "micro_batches": how.get("micro_batches", 1)}
    given = ours(make("cuda"), "eager", options, **how)
    assert_equal(given, plain(make("cuda"), "eager", **how), bitwise=True)


@pytest.mark.parametrize("name", [n if n in ("host-optimizer", "mixed") else slow(n) for n in PLANS])
def test_updates_that_start_in_backward_are_bitwise_exact_whatever_is_late(name: str, late: None):
    given = ours(make("cuda"), "eager", {"plan": overlapping(name, "backward")}, overlap="backward")
    assert_equal(given, plain(make("cuda"), "eager"), bitwise=True)


@pytest.mark.parametrize("name", ["offload", "mixed", slow("mixed in part"), slow("kept")])
def test_buffers_that_inductor_reuses_are_neither_read_nor_written_too_late(name: str, late: None):
    """Three micro-batches: no gradient is dropped, no reload overwrites an activation that is still of use."""
    options = {"plan": overlapping(name, "step"), "micro_batches": 3}
    given = ours(make("cuda"), "inductor", options, micro_batches=3)
    assert_equal(given, plain(make("cuda"), "inductor", micro_batches=3), bitwise=False)


@pytest.mark.parametrize("decision", [OPTIMIZER_ON_HOST, ALL_ON_HOST, STREAMED], ids=["device", "host", "streamed"])
@pytest.mark.parametrize("name", READS)
def test_a_read_waits_for_the_update(name: str, decision: BlockDecision, gate: Gate):
    Training(gate, decision, device="cuda").assert_waits(READS[name])


def test_metadata_waits_for_nothing(gate: Gate):
    state = Training(gate, device="cuda")
    weight, _ = state.weights
    assert weight.shape == (128, 128) and weight.is_cuda and weight.grad is None
    state.optimizer.zero_grad()
    assert not gate.opened.is_set() and state.updates.is_pending


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
@pytest.mark.parametrize("name", EDITS)
def test_an_edit_comes_down_and_counts(name: str, dtype: torch.dtype):
    assert_comes_down_and_counts(EDITS[name], CopiedPair(dtype, "cuda"))


@pytest.mark.parametrize("overlap", ["step", "backward"])
def test_the_optimizer_clips_as_pytorch_does_whatever_is_late(overlap: str, late: None):
    """In backward the device takes the norms of gradients before they leave it; at a step the CPU does, in their homes."""
    model, twin = (Stack(width=WIDTH).cuda() for _ in range(2))
    names = labels()
    decisions = ((ALL_ON_HOST, OPTIMIZER_ON_HOST, STREAMED, BlockDecision()) * len(names))[: len(names)]
    schedule = Schedule(overlap=Overlap(overlap), takes_norms=overlap == "backward")
    plan = Plan(labels=names, decisions=decisions, schedule=schedule)
    model.compile(backend="autohete", options={"inner_backend": "eager", "profile": "analytic", "plan": plan})
    optimizer = autohete_fx.AdamW(model.parameters(), lr=1e-2, overlap=overlap, max_grad_norm=1e-3)
    reference = torch.optim.AdamW(twin.parameters(), lr=1e-2, fused=True)
    for step in range(4):
        x = torch.sin(torch.arange(8 * WIDTH, device="cuda") * (1.0 + step)).view(8, WIDTH)
        model(x).backward()
        optimizer.step()
        twin(x).backward()
        norm = nn.utils.clip_grad_norm_(twin.parameters(), 1e-3)
        reference.step()
        assert optimizer.grad_norm is not None and norm > 1e-3
        torch.testing.assert_close(optimizer.grad_norm.to(norm.device), norm, rtol=1e-5, atol=0.0)
        torch.testing.assert_close(list(model.parameters()), list(twin.parameters()), rtol=1e-5, atol=1e-6)
        optimizer.zero_grad()
        reference.zero_grad()


def test_a_user_may_train_on_a_stream_of_their_own(late: None):
    """Lanes, the arena's fences and the update thread all have to follow the stream that computes."""
    with torch.cuda.stream(torch.cuda.Stream()):
        given = ours(make("cuda"), "eager", {"plan": overlapping("mixed", "step")})
    torch.cuda.synchronize()
    assert_equal(given, plain(make("cuda"), "eager"), bitwise=True)
