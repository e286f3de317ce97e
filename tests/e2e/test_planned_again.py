"""Plans that follow another one find what that has left: they count it, or bring it to where they want it before the next pass."""

import dataclasses
import gc
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import nn

import autohete_fx
from autohete_fx import BlockDecision, Optimizer, Params, Plan
from autohete_fx.optim import others
from autohete_fx.runtime.meter import device_live_bytes
from autohete_fx.runtime.tiers.host import is_home
from tests import training as job
from tests.steps import OPTIONS, SIZES, Steps, equal_to_plain
from tests.thorough import thorough

pytestmark = pytest.mark.slow


@pytest.fixture(autouse=True)
def _prepared() -> Iterator[None]:
    job.warm_up("cpu")
    yield
    torch._dynamo.reset()


def test_gradients_that_earlier_micro_batches_left_on_the_device_go_where_the_new_plan_collects_them():
    budget = 15 * 2**20

    def story(steps: Steps) -> None:
        steps.compile(memory_budget=budget)
        steps.train(0, 1)
        steps.train(2, 3, micro_batches=2)

    ours = equal_to_plain(story)
    assert autohete_fx.compilations()[-1].moved.keys() > autohete_fx.compilations()[-2].moved.keys()
    assert max(ours.peaks) <= budget


@pytest.mark.parametrize("dynamic", [None, thorough(True)])
def test_code_for_sizes_that_may_change_serves_no_larger_ones_than_it_was_planned_for(dynamic: bool | None):
    """Such as that of an epoch's last batch, which Dynamo makes for sizes that change."""
    budget, num_compiled = 18 * 2**20, list[int]()

    def story(steps: Steps) -> None:
        steps.compile(memory_budget=budget, dynamic=dynamic)
        before = autohete_fx.compilations()
        for step, batch in enumerate((4, 4, 2, 4, 3, 4, 6, 4, 6)):
            steps.train(step, batch=batch)
            num_compiled.append(sum(c not in before for c in autohete_fx.compilations()))

    ours = equal_to_plain(story)
    assert max(ours.peaks) <= budget
    assert num_compiled[9:] == ([1, 1, 2, 2, 3, 3, 4, 4, 4] if dynamic is None else [1, 1, 1, 1, 1, 1, 2, 2, 2])


class Shallow(job.Model):
    """A single layer."""

    def __init__(self, sizes: job.Sizes) -> None:
        super().__init__(dataclasses.replace(sizes, layers=1))


def test_sizes_that_keep_growing_are_compiled_a_few_times_and_then_for_all_sizes(caplog: pytest.LogCaptureFixture):
    def story(steps: Steps) -> None:
        steps.compile(memory_budget=30 * 2**20)
        for step in range(9):
            steps.train(step, batch=2 + step)

    before = autohete_fx.compilations()
    equal_to_plain(story, Shallow)
    assert sum(c not in before for c in autohete_fx.compilations()) == 1 + 4 + 1
    assert sum("compiled 4 times for inputs" in record.getMessage() for record in caplog.records) == 1


def test_sizes_of_evaluations_are_none_of_those_that_training_is_compiled_for(caplog: pytest.LogCaptureFixture):
    """As of a text that is generated, whose length grows. Code for all sizes would serve the larger batch, too."""
    budget = 18 * 2**20

    def story(steps: Steps) -> None:
        steps.compile(memory_budget=budget)
        steps.train(0, batch=6)
        for batch in range(1, 9):
            steps.evaluate(batch)
        for step, batch in enumerate((2, 6, 2, 6), 1):
            steps.train(step, batch=batch)

    ours = equal_to_plain(story)
    assert max(ours.peaks) <= budget
    (told,) = (r.getMessage() for r in caplog.records if "compiled 4 times for inputs" in r.getMessage())
    assert told.startswith("a graph without gradients")


@pytest.mark.parametrize("how", ["data", "vector", thorough("dtype")])
def test_parameters_that_are_given_other_memory_go_back_to_the_host(how: str, caplog: pytest.LogCaptureFixture):
    def story(steps: Steps) -> None:
        steps.compile(memory_budget=int(5.5 * 2**20))
        steps.train(0, 1)
        parameters = list(steps.model.parameters())
        if how == "data":
            for p in parameters:
                p.data = p.data.clone()
        elif how == "vector":
            vector = nn.utils.parameters_to_vector(parameters).detach()
            nn.utils.vector_to_parameters(vector, parameters)
        else:
            steps.model.double().float()
        steps.train(2, 3)
        if steps.is_ours:
            on_host.append(sum(map(is_home, parameters)))

    on_host = list[int]()
    ours = equal_to_plain(story)
    moved = sum(d.params is Params.HOST for d in autohete_fx.compilations()[-1].plan.decisions)
    assert moved and on_host[0] > moved
    told = [r.getMessage() for r in caplog.records if "were given other memory" in r.getMessage()]
    assert len(told) == 1 and told[0].startswith(f"{on_host[0]} parameters")
    if how != "vector":  # whose memory the small ones keep
        assert max(ours.peaks) <= int(5.5 * 2**20)


class Wide(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(256, 1024), nn.Linear(1024, 256)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(nn.functional.gelu(self.up(x)))


class Dropping(nn.Module):
    """A stochastic depth: the data say which layers run. Dynamo compiles the layers one by one, and the first call runs one."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Wide() for _ in range(2))

    def forward(self, x: torch.Tensor, runs: torch.Tensor) -> torch.Tensor:
        for layer, does in zip(self.layers, runs, strict=True):
            if does:
                x = layer(x)
        return x.square().mean()


def test_layers_that_a_later_call_runs_beside_the_first_are_planned_for():
    def trained(budget: int | None) -> tuple[list[torch.Tensor], list[int]]:
        torch.manual_seed(0)
        model, seen, peaks = Dropping(), list[torch.Tensor](), list[int]()
        foreign = device_live_bytes("cpu") - sum(p.nbytes for p in model.parameters())
        optimizer: Any = job.ReferenceAdamW(model, frozenset()) if budget is None else job.adamw(model)
        if budget is not None:
            model.compile(backend="autohete", options={**OPTIONS, "memory_budget": budget})
        for step, runs in enumerate(([1, 0], [1, 1], [0, 1], [1, 1], [1, 0], [1, 1])):
            x = torch.randn(512, 256, generator=torch.Generator().manual_seed(step))
            with autohete_fx.MemoryMeter("cpu") as meter:
                loss = model(x, torch.tensor(runs))
                loss.backward()
            peaks.append(meter.peak_bytes - foreign)
            seen += [job.copied(loss), *(job.copied(p.grad) for p in model.parameters() if p.grad is not None)]
            del loss
            optimizer.step()
            optimizer.zero_grad()
        return [*seen, *map(job.copied, model.parameters())], peaks

    expected, _ = trained(None)
    gc.collect()
    budget = 18 * 2**20
    given, peaks = trained(budget)
    job.assert_equal(given, expected, bitwise=True)
    assert max(peaks) <= budget


def test_a_model_that_is_only_evaluated_by_code_that_another_trains_with_is_compiled_again_once():
    """Such as the reference of preference training. To forget its code is to forget that of the other."""
    options = {**OPTIONS, "memory_budget": 40 * 2**20}

    def trained(loss_of: Callable[[nn.Module, torch.Tensor], torch.Tensor]) -> tuple[list[torch.Tensor], list[int]]:
        policy, reference = job.make("cpu", SIZES), job.make("cpu", SIZES).eval()
        optimizer, seen, counts = job.adamw(policy), list[torch.Tensor](), list[int]()
        for step in range(4):
            tokens, before = job.batch("cpu", step, 0, SIZES), autohete_fx.compilations()
            with torch.no_grad():
                seen.append(job.copied(loss_of(reference, tokens)))
            torch.manual_seed(step)
            loss_of(policy, tokens).backward()
            optimizer.step()
            optimizer.zero_grad()
            counts.append(sum(c not in before for c in autohete_fx.compilations()))
        return [*seen, *map(job.copied, policy.parameters())], counts

    def loss_of(model: nn.Module, tokens: torch.Tensor) -> torch.Tensor:
        return model(tokens)

    expected, _ = trained(loss_of)
    values, counts = trained(torch.compile(loss_of, backend="autohete", options=options))
    job.assert_equal(values, expected, bitwise=True)
    assert counts[2:] == [0, 0]


class Scaled(job.Model):
    """Gets a number that grows from call to call."""

    step = -1

    def forward(self, tokens: torch.Tensor, step: int | None = None) -> torch.Tensor:
        return super().forward(tokens) * (1 if step is None else 1 + step)

    def __call__(self, tokens: torch.Tensor) -> torch.Tensor:
        self.step += 1
        return super().__call__(tokens, self.step)


def test_a_number_that_is_no_size_may_grow_without_another_compilation():
    def story(steps: Steps) -> None:
        steps.compile(memory_budget=18 * 2**20)
        steps.train(*range(4))

    before = autohete_fx.compilations()
    equal_to_plain(story, Scaled)
    assert sum(c not in before for c in autohete_fx.compilations()) == 2


class Broken(job.Model):
    """Two graphs."""

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embedding(tokens)
        for layer in self.layers[:2]:
            x = layer(x)
        torch._dynamo.graph_break()
        for layer in self.layers[2:]:
            x = layer(x)
        return nn.functional.cross_entropy(self.head(self.norm(x)).flatten(0, 1), tokens.roll(-1, 1).flatten())


def test_no_graph_of_a_call_keeps_what_a_forgotten_plan_decided():
    """PyTorch's optimizer, which is made after ours, has all states on the device, whichever graph the parameters are of."""
    moved = list[bool]()

    def story(steps: Steps) -> None:
        steps.compile(memory_budget=12 * 2**20)
        steps.train(0, 1)
        moved.append(any(c.moved for c in autohete_fx.compilations()[-2:]))
        steps.compile(memory_budget=20 * 2**20)
        steps.optimizer = torch.optim.AdamW(steps.model.parameters(), lr=1e-3, fused=True)
        steps.train(2, 3)
        moved.append(any(c.moved for c in autohete_fx.compilations()[-2:]))

    equal_to_plain(story, Broken)
    assert moved[2:] == [True, False]


def test_evaluation_before_the_first_step_is_planned_again_once_training_has_put_parameters_elsewhere():
    """As trainers do that evaluate once before they begin. Afterwards no code is compiled again."""
    found = list[autohete_fx.Compilation]()

    def story(steps: Steps) -> None:
        steps.compile(memory_budget=19 * 2**20, allow=["host_params"])  # which it needs, whatever copies cost
        steps.evaluate()
        steps.train(0, 1)
        steps.evaluate()
        found.extend(autohete_fx.compilations()[-2:])
        steps.train(2)
        steps.evaluate()

    equal_to_plain(story)
    *_, trained, evaluated = found
    assert trained.training and not evaluated.training
    where = [[decision.params for decision in c.plan.decisions] for c in (trained, evaluated)]
    assert where[0] == where[1] and Params.HOST in where[0]
    assert autohete_fx.compilations()[-1] is evaluated


class Towered(job.Model):
    """Has layers that only evaluation reads."""

    def __init__(self, sizes: job.Sizes) -> None:
        super().__init__(sizes)
        self.tower = nn.ModuleList(job.Layer(sizes.width, sizes.heads) for _ in range(8)).requires_grad_(False)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embedding(tokens)
        for layer in (*self.layers, *(() if self.training else self.tower)):
            x = layer(x)
        return nn.functional.cross_entropy(self.head(self.norm(x)).flatten(0, 1), tokens.roll(-1, 1).flatten())


def test_parameters_that_only_evaluation_reads_stay_where_it_has_put_them():
    found = list[set[str]]()

    def story(steps: Steps) -> None:
        for budget, numbers in ((8 * 2**20, ()), (18 * 2**20, (0, 1))):
            steps.compile(memory_budget=budget)
            steps.train(*numbers)
            steps.evaluate()
            plan = autohete_fx.compilations()[-1].plan if steps.is_ours else Plan(labels=(), decisions=())
            where = zip(plan.labels, plan.decisions, strict=True)
            found.append({label for label, decision in where if decision.params is Params.HOST and "tower" in label})

    equal_to_plain(story, Towered)
    assert found[2] and found[2] == found[3]


def test_evaluation_counts_the_states_of_steps_before_anything_was_compiled():
    def story(steps: Steps) -> None:
        steps.train(0)
        steps.compile(memory_budget=19 * 2**20)
        steps.evaluate()

    ours, compilation = equal_to_plain(story), autohete_fx.compilations()[-1]
    assert not compilation.training
    assert abs(compilation.plan.peak_bytes - ours.peaks[-1]) <= 0.02 * ours.peaks[-1]


def planned(*on_host: int) -> Plan:
    """States of these blocks on the host, and nothing else."""
    host = BlockDecision(optimizer=Optimizer.HOST)
    labels = ("prologue", *(f"layers.{layer}" for layer in range(SIZES.layers)), "epilogue")
    return Plan(labels=labels, decisions=tuple(host if at in on_host else BlockDecision() for at in range(len(labels))))


def test_states_of_parameters_that_are_frozen_now_are_counted_or_stay_on_the_host():
    def story(steps: Steps) -> None:
        steps.compile(plan=planned(1))
        steps.train(0, 1)
        steps.model.layers[:3].requires_grad_(False)
        steps.train(2, 3)

    ours = equal_to_plain(story)
    assert autohete_fx.compilations()[-1].plan.peak_bytes == pytest.approx(ours.peaks[-1], rel=0.01)
    ours.optimizer.load_state_dict(ours.optimizer.state_dict())
    for layer, is_there in ((0, True), (1, False)):
        up = ours.model.layers[layer].up.weight
        assert is_home(ours.optimizer.state[up]["exp_avg"]) is is_there


def test_plans_that_exchange_what_is_on_the_host_do_so_within_host_budget():
    """There is no room for states that leave the device before those that come to it have left."""

    def story(steps: Steps) -> None:
        moved = sum(p.nbytes for layer in (0, 1) for p in steps.model.layers[layer].parameters())
        for step, blocks in enumerate(((3, 4), (1, 2))):
            steps.compile(plan=planned(*blocks), host_budget=int(3.4 * moved))
            steps.train(2 * step, 2 * step + 1)

    ours = equal_to_plain(story)
    for layer, is_there in ((0, True), (1, True), (2, False), (3, False)):
        up = ours.model.layers[layer].up.weight
        assert is_home(ours.optimizer.state[up]["exp_avg"]) is is_there


def test_states_of_an_optimizer_that_has_more_than_two_are_counted_once_they_are_there(
    caplog: pytest.LogCaptureFixture,
):
    budget = 17 * 2**20

    def story(steps: Steps) -> None:
        steps.optimizer = torch.optim.AdamW(steps.model.parameters(), lr=1e-3, amsgrad=True, fused=True)
        steps.compile(memory_budget=budget)
        steps.train(0, 1, 2, 3)
        steps.seen += [job.copied(t) for state in steps.optimizer.state.values() for t in state.values()]

    before = autohete_fx.compilations()
    ours = equal_to_plain(story)
    print([peak / 2**20 for peak in ours.peaks])
    assert sum(c not in before for c in autohete_fx.compilations()) == 2
    assert max(ours.peaks) <= budget
    assert sum("of states after 1 steps, where" in record.getMessage() for record in caplog.records) == 1


def test_states_that_an_optimizer_keeps_under_one_parameter_are_counted_once(caplog: pytest.LogCaptureFixture):
    params = [nn.Parameter(torch.ones(8192)) for _ in range(4)]
    others.watch(params)
    lbfgs, sizes = torch.optim.LBFGS(params, max_iter=2, history_size=2), list[int]()

    def loss() -> torch.Tensor:
        lbfgs.zero_grad()
        found = torch.stack([(p - number).square().square().sum() for number, p in enumerate(params)]).sum()
        found.backward()
        return found

    for _ in range(2):
        lbfgs.step(loss)
        sizes.append(sum(map(others.counted_state_bytes, params)))
        assert others.absent_state_bytes(params) == 0
    assert sizes == [2 * 131072, pytest.approx(4 * 131072, rel=1e-3)], "two vectors of all parameters, and two more"
    (told,) = (record.getMessage() for record in caplog.records)
    assert told.startswith("LBFGS holds 512 KiB of states after 2 steps, where 256 KiB were counted: the model is")
