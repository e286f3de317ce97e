"""Random plans under random delays with random reads between the steps: bit-identical to training without overlap.

``AUTOHETE_STRESS_EXAMPLES=500 pytest tests/e2e/test_overlap_stress.py`` tries more schedules than a normal run does.
"""

import contextlib
import copy
import dataclasses
import functools
import gc
import os
import random
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

import autohete_fx
from autohete_fx import Activations, BlockDecision, Optimizer, Params, Plan
from autohete_fx.ir import Overlap, Schedule
from tests import training
from tests.held_updates import Stack, saved, use_lanes, weight_of
from tests.thorough import thorough
from tests.training import assert_equal, collecting

EXAMPLES = int(os.environ.get("AUTOHETE_STRESS_EXAMPLES", "6"))
STEPS = 4


class Pairs(Stack):
    """Two matrices of different sizes a layer, so that a block's states can be in two places."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(
            nn.Sequential(nn.Linear(128, 128), nn.GELU(), nn.Linear(128, 192), nn.GELU(), nn.Linear(192, 128))
            for _ in range(3)
        )


LABELS = (*(f"layers.{i}" for i in range(3)), "epilogue")


@torch.no_grad()
def evaluated(model: nn.Module) -> Tensor:
    return model(torch.ones(3, 128))


@torch.no_grad()
def eager(model: nn.Module) -> Tensor:
    return Stack.forward(model, torch.ones(3, 128))  # type: ignore[arg-type]


READS: dict[str, Callable[[nn.Module, Any], Any]] = {
    "state_dict": lambda model, optimizer: saved(model.state_dict()),
    "state": lambda model, optimizer: copy.deepcopy(optimizer.state_dict()["state"]),
    "last first": lambda model, optimizer: [p.detach().clone() for p in reversed(list(model.parameters()))],
    "norm": lambda model, optimizer: weight_of(model).norm(),
    "moment": lambda model, optimizer: optimizer.state[weight_of(model)]["exp_avg_sq"].clone(),
    "evaluation": lambda model, optimizer: evaluated(model),
    "eager forward": lambda model, optimizer: eager(model),
}


@dataclass(frozen=True, slots=True)
class Loop:
    """How the loop trains."""

    micro_batches: int
    clips: bool
    sets_to_none: bool


MAX_NORM = 1e-3


def train(model: nn.Module, optimizer: Any, loop: Loop, reads: list[frozenset[str]]) -> list[Any]:
    """Losses, norms and what is read after each step, by name. An optimizer that clips by itself need not be told to."""
    seen: list[Any] = []
    clips_itself = getattr(optimizer, "max_grad_norm", None) is not None
    for step in range(STEPS):
        for group in optimizer.param_groups:
            group["lr"] = 1e-2 / (step + 1)
        for micro_batch in range(loop.micro_batches):
            x = torch.sin(torch.arange(8 * 128.0) * (1 + step + 0.3 * micro_batch)).view(8, 128)
            with collecting(optimizer) if micro_batch < loop.micro_batches - 1 else contextlib.nullcontext():
                loss = model(x)
                loss.backward()
            seen.append(loss.detach())
        norm = nn.utils.clip_grad_norm_(model.parameters(), MAX_NORM) if loop.clips and not clips_itself else None
        optimizer.step()
        if loop.clips:
            seen.append(optimizer.grad_norm if clips_itself else norm)
        optimizer.zero_grad(set_to_none=loop.sets_to_none)
        seen.append({name: READS[name](model, optimizer) for name in sorted(reads[step])})
    seen.append([READS[name](model, optimizer) for name in ("state_dict", "state")])
    return seen


@functools.cache
def reference(loop: Loop) -> list[Any]:
    """What eager code gives, with every read."""
    model = Pairs()
    return train(model, torch.optim.AdamW(model.parameters(), fused=True), loop, [frozenset(READS)] * STEPS)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("overlap", "num_workers", "how", "is_host"),
    [
        thorough(Overlap.STEP, 4, {"clip": True, "micro_batches": 2, "between": training.evaluate}, False),
        (Overlap.BACKWARD, 1, {}, True),
    ],
    ids=[
        "step, 4 workers, accumulation, clipping and evaluation, two memories",
        "backward, 1 worker, one memory",
    ],
)
def test_twenty_steps_under_long_delays(
    overlap: Overlap, num_workers: int, how: dict[str, Any], is_host: bool, monkeypatch: pytest.MonkeyPatch
):
    """Up to 50 ms, on every lane, for every twelfth piece of work: for all of it they would take minutes. test_overlap.py and
    test_overlap_backward.py have every number of workers and memories."""
    chance = random.Random(num_workers)

    def pace(ticket: object) -> float:
        return chance.uniform(0, 0.05) if chance.random() < 1 / 12 else 0.0

    use_lanes(monkeypatch, num_update_workers=num_workers, is_host=is_host, pace=pace)
    monkeypatch.setattr(training, "STEPS", 20)
    plan = dataclasses.replace(training.plan("mixed"), schedule=Schedule(overlap=overlap))
    options = {"plan": plan, "micro_batches": how.get("micro_batches", 1)}
    given = training.ours(training.make("cpu"), "eager", options, overlap=overlap.value, **how)
    assert_equal(given, training.plain(training.make("cpu"), "eager", **how), bitwise=True)


@st.composite
def decisions(draw: st.DrawFn) -> BlockDecision:
    params = draw(st.sampled_from((Params.DEVICE, Params.HOST)))
    optimizer = draw(st.sampled_from((Optimizer.HOST, Optimizer.HOST, *Optimizer)))
    is_split = optimizer is not Optimizer.DEVICE and draw(st.booleans())
    others = [place for place in Optimizer if place is not optimizer]
    return BlockDecision(
        activations=draw(st.sampled_from((Activations.KEEP, Activations.RECOMPUTE, Activations.OFFLOAD))),
        params=params,
        optimizer=optimizer,
        num_moved_states=draw(st.integers(1, 2)) if is_split else None,
        other_states=draw(st.sampled_from(others)) if is_split else Optimizer.DEVICE,
        prefetch_distance=draw(st.integers(1, 3)),
        keeps_fetched=params is Params.HOST and draw(st.booleans()),
    )


@pytest.mark.slow
@pytest.mark.timeout(7200)
@settings(max_examples=EXAMPLES, deadline=None, suppress_health_check=list(HealthCheck))
@given(data=st.data())
def test_every_schedule_gives_the_same_bits(data: st.DataObject):
    overlap = data.draw(st.sampled_from((Overlap.STEP, Overlap.BACKWARD)))
    likely = 3 if overlap is Overlap.BACKWARD else 1  # what lets updates start in backward
    micro_batches = data.draw(st.sampled_from((*[1] * likely, 2)))
    clips = data.draw(st.sampled_from((*[False] * likely, True)))
    loop = Loop(micro_batches, clips, data.draw(st.sampled_from((*[True] * likely, False))))
    reads = data.draw(
        st.lists(st.frozensets(st.sampled_from(sorted(READS)), max_size=3), min_size=STEPS, max_size=STEPS)
    )
    clips_itself = loop.clips and (overlap is Overlap.BACKWARD or data.draw(st.booleans()))
    plan = Plan(
        labels=LABELS,
        decisions=tuple(data.draw(st.lists(decisions(), min_size=len(LABELS), max_size=len(LABELS)))),
        schedule=Schedule(
            overlap=overlap,
            priority=data.draw(st.booleans()),
            takes_norms=clips_itself and overlap is Overlap.BACKWARD,
        ),
    )
    delays = data.draw(st.lists(st.integers(0, 10), min_size=1, max_size=5), label="milliseconds")
    expected = reference(loop)

    with pytest.MonkeyPatch.context() as patch:
        chance = random.Random(repr(delays))
        use_lanes(
            patch,
            num_update_workers=data.draw(st.sampled_from((1, 4))),
            is_host=data.draw(st.booleans()),
            pace=lambda ticket: chance.choice(delays) * 1e-3,
        )
        torch._dynamo.reset()
        gc.collect()
        model = Pairs()
        model.compile(
            backend="autohete",
            options={
                "inner_backend": "eager",
                "profile": "analytic",
                "plan": plan,
                "micro_batches": loop.micro_batches,
            },
        )
        max_norm = MAX_NORM if clips_itself else None
        optimizer = autohete_fx.AdamW(model.parameters(), overlap=overlap.value, max_grad_norm=max_norm)
        found = train(model, optimizer, loop, reads)
    for ours, theirs in zip(found, expected, strict=True):
        if isinstance(ours, dict):
            theirs = {name: theirs[name] for name in ours}
        torch.testing.assert_close(ours, theirs, rtol=0, atol=0)
