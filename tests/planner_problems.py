"""Problems for the planner's tests: blocks made by hand, and hypothesis strategies over costs, machines and limits."""

import dataclasses
from collections.abc import Sequence
from typing import Any

import pytest
from hypothesis import HealthCheck, Phase
from hypothesis import strategies as st

from autohete_fx.ir import (
    ActivationCost,
    Activations,
    BlockCost,
    BlockDecision,
    Edge,
    Machine,
    Overlap,
    Problem,
    Schedule,
)
from autohete_fx.planner.bound.formulation import Program
from autohete_fx.planner.model.choices import MAX_PREFETCH_DISTANCE, joined
from autohete_fx.planner.model.simulate import simulate
from autohete_fx.planner.model.simulation import Simulation
from autohete_fx.planner.search.arrays import Rows
from autohete_fx.planner.search.replays import Replays

MACHINE = Machine(
    device_name="test",
    device_type="cuda",
    device_bytes=1 << 40,
    host_bytes=1 << 40,
    disk_bytes=1 << 40,
    device_flops_per_s=(("float32", 1e12),),
    device_bytes_per_s=1e12,
    h2d_bytes_per_s=100.0,
    d2h_bytes_per_s=100.0,
    disk_bytes_per_s=30.0,
    device_update_params_per_s=100.0,
    host_update_params_per_s=10.0,
    latency_s=0.0,
)

QUIET: dict[str, Any] = {
    "phases": [Phase.explicit, Phase.generate],
    "deadline": None,
    "suppress_health_check": list(HealthCheck),
    "derandomize": True,
}
"""Settings of hypothesis: the same examples every time, however long each takes, and no search for smaller ones that fail."""


def cost(**changes: Any) -> BlockCost:
    """A block of round figures."""
    base: dict[str, Any] = {
        "forward_s": 1.0,
        "backward_s": 2.0,
        "recompute_s": 1.0,
        "saved_bytes": 100,
        "boundary_bytes": 10,
        "offloadable": (50, 30),
        "forward_workspace_bytes": 5,
        "backward_workspace_bytes": 7,
        "param_bytes": 20,
        "grad_bytes": 20,
        "optimizer_bytes": 40,
        "num_params": 5,
    }
    return BlockCost(**{**base, **changes})


def problem(costs: Sequence[BlockCost], **changes: object) -> Problem:
    """A problem of these blocks on `MACHINE`."""
    labels = tuple(f"layers.{i}" for i in range(len(costs)))
    given: dict[str, Any] = {"labels": labels, "costs": tuple(costs), "edges": (), "machine": MACHINE}
    return Problem(**{**given, **changes})


def _tensors(num_bytes: int, count: int) -> tuple[int, ...]:
    """At most ``count`` tensors of so many bytes in all, largest first."""
    smaller = [num_bytes >> (i + 1) for i in range(count - 1)]
    return tuple(sorted((size for size in (num_bytes - sum(smaller), *smaller) if size), reverse=True))


@st.composite
def _costs(draw: st.DrawFn) -> BlockCost:
    forward_s = draw(st.floats(0.05, 4.0))
    saved = draw(st.integers(10, 400))
    param = draw(st.integers(0, 200))
    trained = draw(st.sampled_from([True, True, True, False]))
    sizes = _tensors(param // 4 if trained else 0, draw(st.sampled_from([1, 1, 2])))[::-1]
    boundary = int(saved * draw(st.floats(0.0, 0.6)))
    recompute_s = forward_s * draw(st.floats(0.5, 1.1))
    selective = ActivationCost(
        held_bytes=boundary + (saved - boundary) * draw(st.integers(1, 9)) // 10,
        recompute_s=recompute_s * draw(st.floats(0.0, 0.5)),
    )
    return BlockCost(
        forward_s=forward_s,
        backward_s=forward_s * draw(st.floats(1.5, 2.5)),
        recompute_s=recompute_s,
        saved_bytes=saved,
        boundary_bytes=boundary,
        partial=draw(st.sampled_from([((Activations.SELECTIVE, selective),), ()])),
        offloadable=_tensors(int(saved * draw(st.floats(0.0, 0.95))), draw(st.sampled_from([1, 1, 1, 3]))),
        forward_workspace_bytes=draw(st.integers(0, 60)),
        backward_workspace_bytes=draw(st.integers(0, 90)),
        param_bytes=param,
        grad_bytes=param if trained else 0,
        optimizer_bytes=param * draw(st.integers(2, 3)) if trained else 0,
        num_params=sum(sizes),
        trained=sizes,
        num_param_tensors=max(1, len(sizes)),
        num_grad_tensors=max(1, len(sizes)),
    )


_machines = st.builds(
    lambda device_type, up, down, on_device, on_host, latency_s: dataclasses.replace(
        MACHINE,
        device_type=device_type,
        h2d_bytes_per_s=up,
        d2h_bytes_per_s=down,
        device_update_params_per_s=on_device,
        host_update_params_per_s=on_host,
        latency_s=latency_s,
    ),
    st.sampled_from(["cuda", "cpu"]),
    st.floats(20, 1000),
    st.floats(20, 1000),
    st.floats(10, 1000),
    st.floats(3, 300),
    st.sampled_from([0.0, 0.01, 0.1]),
)


_SELDOM = st.sampled_from([False, False, False, True])


@st.composite
def problems(
    draw: st.DrawFn, *, least_blocks: int = 1, most_blocks: int, budgets: bool = True, early: bool = False
) -> Problem:
    """Different or equal blocks, any machine; budgets from far too small to more than enough.

    ``early``: updates start in backward.
    """
    count = draw(st.integers(least_blocks, most_blocks))
    alike = draw(st.booleans()) and draw(st.booleans())
    costs = draw(_costs()) if alike else None
    training = draw(st.sampled_from([True, True, True, False]))
    some_states = draw(_SELDOM)
    given = problem(
        [costs if costs is not None else draw(_costs()) for _ in range(count)],
        machine=draw(_machines),
        edges=tuple(Edge(producer=i, consumer=min(count - 1, i + 1 + i % 2), num_bytes=1) for i in range(count - 1)),
        fixed_bytes=draw(st.integers(0, 50)),
        allow_recompute=draw(st.sampled_from([True, True, False])),
        allow_host_params=draw(st.sampled_from([True, True, False])),
        allow_host_optimizer=draw(st.sampled_from([True, True, False])),
        allow_keeping_fetched=draw(_SELDOM),
        allow_moving_some_states=some_states,
        allow_streamed_optimizer=draw(_SELDOM),
        allow_disk_optimizer=draw(_SELDOM) and not some_states,  # all places together are too many to try them all
        schedule=Schedule(overlap=draw(st.sampled_from(Overlap)), priority=draw(st.sampled_from([True, True, False]))),
        clips_gradients=draw(st.booleans()),
        micro_batches=(passes := draw(st.sampled_from([1, 1, 2, 4]))),
        copies_gradients=draw(st.booleans()),
        in_flight=draw(st.sampled_from([1, 1, passes])),
        training=training,
    )
    if early:
        given = dataclasses.replace(
            given,
            machine=dataclasses.replace(given.machine, device_type="cuda"),
            allow_host_optimizer=True,
            schedule=dataclasses.replace(given.schedule, overlap=Overlap.BACKWARD),
            clips_gradients=False,
            training=True,
        )
    return limited(given, draw(st.floats(0.1, 1.1)), draw(st.none() | st.floats(0.0, 1.0))) if budgets else given


def limited(free: Problem, share: float, host_share: float | None = None) -> Problem:
    """The same problem with budgets as shares of what keeping everything takes."""
    peak = simulate(free, [BlockDecision()] * len(free.costs), events=False).peak_bytes
    host = None if host_share is None else int(peak * host_share)
    return dataclasses.replace(free, device_budget_bytes=int(peak * share), host_budget_bytes=host)


@st.composite
def sharded(draw: st.DrawFn, of: st.SearchStrategy[Problem], *, budgets: bool = True) -> Problem:
    """The same with blocks whose parameters two or four ranks hold shards of, among others. Problems ``of`` have no budgets."""
    free, ranks = draw(of), draw(st.sampled_from([2, 4]))
    machine = dataclasses.replace(
        free.machine,
        net_bytes_per_s=draw(st.floats(50, 5000)),
        net_latency_s=draw(st.sampled_from([0.0, 0.01, 0.1])),
        replica_net_bytes_per_s=draw(st.floats(50, 5000)),
    )
    all_of_them, costs = draw(st.booleans()), []
    for own in free.costs:
        gathers = own.param_bytes * ranks * (all_of_them or draw(st.sampled_from([1, 1, 1, 0])))
        read_again = draw(st.sampled_from([1.0, 1.0, 1.0, 0.5, 0.0]))
        reduces = own.grad_bytes * ranks * (draw(st.sampled_from([1, 0])) if not gathers else 1)
        costs.append(
            dataclasses.replace(
                own, gathered_bytes=gathers, gathered_again_bytes=int(gathers * read_again), reduced_bytes=reduces
            )
        )
    given = dataclasses.replace(
        free,
        costs=tuple(costs),
        machine=machine,
        num_ranks=ranks,
        num_replicas=draw(st.sampled_from([1, 1, 3])),
        allow_keeping_fetched=draw(st.booleans()),
        allow_replicating=draw(st.booleans()),
    )
    return limited(given, draw(st.floats(0.1, 1.1)), draw(st.none() | st.floats(0.0, 1.0))) if budgets else given


def program_of(free: Problem, decisions: Sequence[BlockDecision], *, held: int = 1) -> Program:
    """The program that bounds the step, or that decides at distance ``held`` > 1, with all choices made but the distances."""
    program = Program(free, held=held)
    for block, decision in enumerate(decisions):
        plain = dataclasses.replace(decision, prefetch_distance=1)
        is_made = [joined(option, plain) == plain for option in program.treated[block]]
        is_made += [joined(plain, option) == plain for option in program.placed[block]]
        for variable, value in zip(program.chosen[block], is_made, strict=True):
            program.model.add(variable == value)
    program.minimize_step(ahead=held if held > 1 else MAX_PREFETCH_DISTANCE)
    return program


@st.composite
def updated_anywhere(draw: st.DrawFn) -> Problem:
    """Problems without budgets whose blocks may be updated anywhere, with any overlap of updates, on a device with a link."""
    free = problems(most_blocks=5, budgets=False)
    given = draw(free | sharded(free, budgets=False))
    flops = draw(st.sampled_from([0.0, 0.0, 2e12]))  # of matrix products in the update of each parameter
    return dataclasses.replace(
        given,
        training=True,
        costs=tuple(
            dataclasses.replace(
                own, param_bytes=own.param_bytes + 40, product_flops=(flops,) * (len(own.trained) if flops else 0)
            )
            for own in given.costs
        ),
        machine=dataclasses.replace(given.machine, device_type="cuda"),
        schedule=Schedule(overlap=draw(st.sampled_from(Overlap)), priority=draw(st.booleans())),
        allow_host_params=True,
        allow_host_optimizer=True,
        allow_streamed_optimizer=True,
        allow_offload_activations=True,
    )


def judged(replays: Replays, rows: Rows, *, bounded: int) -> list[Simulation]:
    """Replays of assignments by the simulator, which the search's are to equal. The program is to bound the first ``bounded``."""
    decisions = [list(replays.decisions(row)) for row in rows]
    found = [simulate(replays.problem, made) for made in decisions]
    assert replays.seconds(rows) == pytest.approx([replayed.step_s for replayed in found], rel=1e-9)
    for made, replayed in zip(decisions[:bounded], found, strict=False):
        answer = program_of(replays.problem, made).solve(limit_s=10, deadline=float("inf"), in_seconds=True)
        assert answer.decisions is not None and 0 < answer.bound <= replayed.step_s * (1 + 1e-9)
    return found
