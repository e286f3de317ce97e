"""Code outside of the compiled model, between its forward and its backward: what it takes is seen, told and planned for."""

import gc
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import autohete_fx
from autohete_fx.runtime.meter import device_live_bytes
from tests import layers, training
from tests.references import ReferenceAdamW, adamw, copied

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("fresh_plans")]
WORDS, WIDTH, STEPS = 4096, 64, 5
FIRST = 2
"""The first step that is planned for what the one before it was seen to take."""


class Buffered(torch.autograd.Function):
    """Takes a large buffer in either pass, as the fused loss of a trainer does."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        torch.empty(2**21)
        return x * 2

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        torch.empty(2**21)
        return grad * 2


def sines(x: Tensor) -> Tensor:
    """Keeps activations for its backward."""
    for _ in range(64):
        x = x.sin()
    return x


BETWEEN = {
    "buffer": torch.compiler.disable(lambda x: Buffered.apply(x)),
    "activations": torch.compiler.disable(sines),
}
"""Eager code between two graphs of a model."""


class Tagger(nn.Module):
    """A model that returns large logits, or has large eager code between its graphs."""

    def __init__(self, broken: bool, between: str = "") -> None:
        super().__init__()
        self.between, self.words = between, 64 if between else WORDS
        self.embedding = nn.Embedding(self.words, WIDTH)
        self.layers = nn.ModuleList(
            nn.Sequential(nn.Linear(WIDTH, 256), nn.GELU(), nn.Linear(256, WIDTH), nn.Dropout(0.1)) for _ in range(3)
        )
        self.head = nn.Linear(WIDTH, self.words)
        self.broken = broken

    def forward(self, words: Tensor) -> Tensor:
        x = self.embedding(words)
        for layer in self.layers:
            x = x + layer(x)
        if self.between:
            x = BETWEEN[self.between](x)
        if self.broken:
            torch._dynamo.graph_break()
        return self.head(x)


@dataclass
class Job:
    """How a tagger is trained.

    Attributes:
        between: the eager code between its graphs.
        keeps: whether the logits of a step live on in the next one.
        micro_batches: passes of a step.
        retains: whether a backward keeps its graph.
    """

    broken: bool = False
    between: str = ""
    keeps: bool = False
    micro_batches: int = 1
    retains: bool = False
    options: dict[str, Any] = field(default_factory=dict)

    def run(self, budget: int | str | None) -> tuple[list[Tensor], list[int]]:
        """Values that must agree, and the peak of each step above what was there before; no budget: plain."""
        torch._dynamo.reset()
        gc.collect()
        foreign_bytes = device_live_bytes("cpu")
        torch.manual_seed(0)
        model = Tagger(self.broken, self.between)
        optimizer: Any = ReferenceAdamW(model, frozenset()) if budget is None else adamw(model)
        if budget is not None:
            model.compile(
                backend="autohete",
                options={**layers.EAGER, "memory_budget": budget, "micro_batches": self.micro_batches, **self.options},
            )
        seen, peaks, logits = list[Tensor](), list[int](), None
        for step in range(STEPS):
            with autohete_fx.MemoryMeter("cpu") as meter:
                for micro_batch in range(self.micro_batches):
                    torch.manual_seed(10 * step + micro_batch)
                    words = torch.randint(model.words, (512,))
                    logits = model(words) if self.keeps else None
                    loss = F.cross_entropy(model(words) if logits is None else logits, words.roll(1))
                    loss.backward(retain_graph=self.retains)
                    seen.append(copied(loss))
                    del loss
                seen += [copied(p.grad) for p in model.parameters() if p.grad is not None]
                optimizer.step()
                optimizer.zero_grad()
            peaks.append(meter.peak_bytes - foreign_bytes)
        return [*seen, *map(copied, model.parameters())], peaks


def told(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [r.getMessage() for r in caplog.records if r.getMessage().startswith("code outside of the compiled model")]


def least_budget(run: Callable[[int], object]) -> int:
    """The budget that a refusal names."""
    with pytest.raises(autohete_fx.InfeasiblePlanError) as refused:
        run(1000)
    assert refused.value.smallest_budget_bytes is not None
    return refused.value.smallest_budget_bytes


def assert_planned_for(
    job: Job, caplog: pytest.LogCaptureFixture, first: int, *, num_graphs: int, words: str
) -> list[int]:
    """A job is told once of what is outside, and from a first step on keeps a budget that had no room for it. Returns the peaks of
    its steps, less the budget."""
    training.warm_up("cpu")
    expected, _ = job.run(None)
    _, peaks = job.run("1GiB")
    assert told(caplog) == []
    budget = int(0.96 * max(peaks[1:]))
    found, peaks = job.run(budget)
    (message,) = told(caplog)
    assert f"{words} between its forward and its backward" in message
    assert max(peaks[first:]) <= budget
    predicted = max(compilation.plan.peak_bytes for compilation in autohete_fx.compilations()[-num_graphs:])
    assert max(peaks[first:]) == pytest.approx(predicted, rel=0.02)
    training.assert_equal(found, expected, bitwise=True)
    return [peak - budget for peak in peaks]


@pytest.mark.parametrize(
    "job",
    [
        Job(),
        Job(keeps=True),
        Job(broken=True),
        Job(micro_batches=2),
    ],
)
def test_a_loss_of_large_logits_is_told_once_and_planned_for(job: Job, caplog: pytest.LogCaptureFixture):
    assert_planned_for(job, caplog, FIRST, num_graphs=2 if job.broken else 1, words="MiB")


@pytest.mark.parametrize("between", BETWEEN)
def test_eager_code_between_graphs_is_told_once_and_planned_for(between: str, caplog: pytest.LogCaptureFixture):
    """In forward and in backward; its activations stay while later graphs run."""
    over = assert_planned_for(Job(between=between), caplog, FIRST + 1, num_graphs=2, words="8.00 MiB")
    assert max(over[:FIRST]) > 0


def test_a_budget_that_eager_code_does_not_fit_into_is_refused(caplog: pytest.LogCaptureFixture):
    training.warm_up("cpu")
    job = Job(between="buffer")
    with pytest.raises(
        autohete_fx.InfeasiblePlanError, match=r"Code outside of the compiled model takes 8\.0"
    ) as refused:
        job.run(least_budget(job.run) + 2**19)
    enough = refused.value.smallest_budget_bytes
    assert enough is not None
    _, peaks = job.run(enough)
    assert max(peaks[FIRST + 1 :]) <= enough


def test_a_budget_that_the_loss_does_not_fit_into_is_refused_with_one_that_works(caplog: pytest.LogCaptureFixture):
    training.warm_up("cpu")
    job = Job()
    without = least_budget(job.run)
    with pytest.raises(
        autohete_fx.InfeasiblePlanError, match=r"Code outside of the compiled model takes 16\.0 MiB"
    ) as refused:
        job.run(without + 10 * 2**20)
    enough = refused.value.smallest_budget_bytes
    assert len(told(caplog)) == 1 and enough is not None
    _, peaks = job.run(enough)
    assert max(peaks[FIRST:]) <= enough


@pytest.mark.thorough
@pytest.mark.usefixtures("one_thread")
def test_code_of_inductor_is_watched_as_well_and_again_when_it_is_from_the_cache(caplog: pytest.LogCaptureFixture):
    training.warm_up("cpu")
    job = Job(keeps=True, options={"inner_backend": "inductor"})
    _, peaks = job.run("1GiB")
    assert told(caplog) == []
    budget = int(0.96 * max(peaks[1:]))
    runs = [job.run(budget) for _ in range(2)]
    assert autohete_fx.compilations()[-1].cached and len(told(caplog)) == 2
    most = max(runs[0][1][FIRST:])
    assert most <= budget and most == pytest.approx(autohete_fx.compilations()[-1].plan.peak_bytes, rel=0.02)
    training.assert_equal(runs[0][0], runs[1][0], bitwise=True)
    assert runs[0][1][FIRST:] == runs[1][1][FIRST:]


def test_a_loss_in_the_model_and_kept_graphs_have_nothing_outside(caplog: pytest.LogCaptureFixture):
    """Where the plan has room for it, nothing is planned again, either."""
    training.warm_up("cpu")
    model = layers.make()
    model.compile(backend="autohete", options={**layers.EAGER, "memory_budget": "3MiB"})
    layers.train(model, steps=4)
    earlier = autohete_fx.compilations()
    Job(retains=True).run("1GiB")
    made = [each for each in autohete_fx.compilations() if not any(each is other for other in earlier)]
    assert len(made) == 1 and told(caplog) == []


def test_a_meter_around_a_watched_pass_sees_its_peak():
    training.warm_up("cpu")
    torch._dynamo.reset()
    torch.manual_seed(0)
    model = Tagger(broken=False)
    model.compile(backend="autohete", options={**layers.EAGER, "memory_budget": "1GiB"})
    peaks = list[int]()
    for _ in range(5):
        with autohete_fx.MemoryMeter("cpu") as meter:
            loss = F.cross_entropy(model(torch.arange(512)), torch.arange(512))
            most = meter.peak_bytes
            loss.backward()
            del loss
            assert meter.peak_bytes >= most
        peaks.append(meter.peak_bytes - meter.start_bytes)
        model.zero_grad()
    assert len(set(peaks[1:])) == 1


class Scored(Tagger):
    """A model that computes its loss, and returns the logits beside it."""

    def forward(self, words: Tensor) -> dict[str, Tensor]:
        logits = super().forward(words)
        return {"loss": F.cross_entropy(logits.flatten(0, 1), words.flatten()), "logits": logits}


@pytest.mark.parametrize("is_tight", [True, False])
def test_outputs_that_live_on_after_backward_are_planned_for_where_the_budget_was_exceeded(
    is_tight: bool, caplog: pytest.LogCaptureFixture
):
    """The name of a step's outputs keeps them until the next forward has returned. The second budget has room for that."""

    def told(budget: int | None) -> tuple[list[Tensor], list[int], int]:
        torch._dynamo.reset()
        gc.collect()
        torch.manual_seed(0)
        model = Scored(broken=False)
        before = device_live_bytes("cpu") - sum(p.nbytes for p in model.parameters())
        optimizer: Any = ReferenceAdamW(model, frozenset()) if budget is None else autohete_fx.AdamW(model.parameters())
        if budget is not None:
            model.compile(backend="autohete", options={**layers.EAGER, "memory_budget": budget})
        seen, peaks, outputs = list[Tensor](), list[int](), None
        known = autohete_fx.compilations()
        for step in range(STEPS):
            words = torch.randint(WORDS, (8, 64), generator=torch.Generator().manual_seed(step))
            torch.manual_seed(step)
            with autohete_fx.MemoryMeter("cpu") as meter:
                outputs = model(words)
                outputs["loss"].backward()
            peaks.append(meter.peak_bytes - before)
            seen += [copied(outputs["loss"]), *(copied(p.grad) for p in model.parameters() if p.grad is not None)]
            optimizer.step()
            optimizer.zero_grad()
        num_compiled = sum(each not in known for each in autohete_fx.compilations())
        return [*seen, *map(copied, model.parameters())], peaks, num_compiled

    budget = (44 if is_tight else 60) * 2**20
    values, peaks, num_compiled = told(budget)
    layers.assert_bitwise(values, told(None)[0])
    assert max(peaks[FIRST:]) <= budget
    told_of_it = ["outputs of a compiled model take" in record.getMessage() for record in caplog.records]
    assert (sum(told_of_it), num_compiled) == ((1, 2) if is_tight else (0, 1))
