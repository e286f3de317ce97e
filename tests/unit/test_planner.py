"""The planner on problems made by hand: replays, what is moved and what stays, plan files."""

import dataclasses
import itertools

import pytest

from autohete_fx.errors import InfeasiblePlanError, PlanError
from autohete_fx.ir import (
    SCHEMA_VERSION,
    ActivationCost,
    Activations,
    BlockDecision,
    Lane,
    Optimizer,
    Overlap,
    Params,
    Plan,
    Schedule,
)
from autohete_fx.planner.baselines import BASELINES, fits
from autohete_fx.planner.bound.formulation import Program
from autohete_fx.planner.bound.relaxation import branch, lumps_of, relax
from autohete_fx.planner.model.choices import MAX_PREFETCH_DISTANCE, states_of
from autohete_fx.planner.model.simulate import simulate
from autohete_fx.planner.model.work import Work, durations
from autohete_fx.planner.solve import OPTIMAL_GAP, solve
from tests.planner_problems import MACHINE, cost, problem
from tests.thorough import thorough

KEEP = BlockDecision()
RECOMPUTE = BlockDecision(activations=Activations.RECOMPUTE)
SELECTIVE = BlockDecision(activations=Activations.SELECTIVE)


def test_keep_everything_takes_the_sum_of_its_blocks():
    replayed = simulate(problem([cost(), cost()]), [KEEP, KEEP])
    assert replayed.step_s == pytest.approx(2 * (1 + 2) + 2 * 5 / 100)
    # parameters and states of both, activations of both, workspace of the last forward or first backward plus gradient
    assert replayed.peak_bytes == 2 * (20 + 40) + 2 * 100 + 20 + 7
    assert replayed.host_bytes == 0


def test_recompute_adds_its_seconds_and_leaves_the_boundary():
    replayed = simulate(problem([cost(), cost()]), [RECOMPUTE, KEEP])
    assert replayed.step_s == pytest.approx(2 * 3 + 1 + 0.1)
    # in the backward of block 0: its recomputed activations, the gradients of both
    assert replayed.peak_bytes == 120 + 100 + 40 + 7


def test_selective_recomputation_adds_its_seconds_and_leaves_what_it_holds():
    some = cost(partial=((Activations.SELECTIVE, ActivationCost(held_bytes=60, recompute_s=0.25)),))
    replayed = simulate(problem([some, some]), [SELECTIVE, KEEP])
    assert replayed.step_s == pytest.approx(2 * 3 + 0.25 + 0.1)
    # in the backward of block 1: what block 0 holds, the gradient of block 1
    assert replayed.peak_bytes == 120 + 60 + 100 + 20 + 7


@pytest.mark.parametrize("needed", [SELECTIVE, RECOMPUTE])
def test_recomputation_is_selective_where_that_frees_enough(needed: BlockDecision):
    some = cost(partial=((Activations.SELECTIVE, ActivationCost(held_bytes=60, recompute_s=0.25)),))
    allowed = {"allow_offload_activations": False, "allow_host_params": False, "allow_host_optimizer": False}
    given = problem([some] * 3, **allowed)
    budget_bytes = simulate(given, [needed, KEEP, KEEP]).peak_bytes
    plan = solve(dataclasses.replace(given, device_budget_bytes=budget_bytes))
    assert plan.peak_bytes <= budget_bytes
    assert plan.decisions.count(needed) == 1 and plan.decisions.count(KEEP) == 2
    assert plan.step_s == pytest.approx(simulate(given, [needed, KEEP, KEEP]).step_s)


def test_host_optimizer_moves_states_and_its_step():
    replayed = simulate(problem([cost()]), [BlockDecision(optimizer=Optimizer.HOST)])
    # forward, backward, gradient down (20/100), update (5/10), parameters up (20/100)
    assert replayed.step_s == pytest.approx(1 + 2 + 0.2 + 0.5 + 0.2)
    assert replayed.peak_bytes == 20 + 100 + 20 + 7
    assert replayed.host_bytes == 40 + 20 + 20  # states, gradient, and the host's copy of the parameters
    busy = {t.lane: t.busy_s for t in replayed.busy_s}
    assert busy[Lane.UPDATE] == pytest.approx(0.5) and busy[Lane.D2H] == pytest.approx(0.2)


def test_a_copy_on_a_cpu_device_costs_a_share_of_its_seconds():
    on_cpu = dataclasses.replace(MACHINE, device_type="cpu", copy_share=0.25)
    replayed = simulate(
        problem([cost()], machine=on_cpu), [BlockDecision(params=Params.HOST, optimizer=Optimizer.HOST)]
    )
    # two fetches and the gradients, 20/100 each, are in nobody's shadow here and slow their block down besides
    assert replayed.step_s == pytest.approx(1 + 2 + 3 * 0.2 * (1 + on_cpu.copy_share) + 0.5)


def test_no_budget_needs_no_search_and_moves_nothing():
    plan = solve(problem([cost()] * 5))
    assert plan.decisions == (KEEP,) * 5 and plan.status == "optimal"
    # host and device could share the updates on this machine: what is not proven is not said
    assert 5 * 3 < plan.lower_bound_s < plan.step_s and 0 < plan.gap <= OPTIMAL_GAP


@pytest.mark.slow
def test_something_moves_without_a_budget_where_it_is_worth_the_copies():
    """One block's update takes 20 s on the host, that of the others 22 s on the device meanwhile: 2 s in 60 are worth it."""
    slow_updates = problem([cost(num_params=200)] * 12)
    stay, plan = simulate(slow_updates, [KEEP] * 12), solve(slow_updates)
    assert any(decision.optimizer is Optimizer.HOST for decision in plan.decisions)
    assert plan.lower_bound_s <= plan.step_s < stay.step_s * (1 - OPTIMAL_GAP)
    nearly_even = problem([cost(num_params=5, forward_s=0.8)] * 4)
    assert solve(nearly_even).decisions == (KEEP,) * 4


def test_every_tensor_of_a_block_costs_the_latency_of_a_transfer():
    machine = dataclasses.replace(MACHINE, latency_s=0.25)
    moved = BlockDecision(params=Params.HOST, optimizer=Optimizer.HOST, activations=Activations.OFFLOAD)

    def step_s(**tensors: int) -> float:
        alone = problem([cost(**tensors)], machine=machine)
        assert durations(alone, 0, moved)[Work.FETCH] == simulate(alone, [moved]).events[0].end_s
        return simulate(alone, [moved]).step_s

    # Parameters come twice, gradients go once; nothing of a lone block's copies is hidden.
    assert step_s(num_param_tensors=4) == pytest.approx(step_s() + 2 * 3 * 0.25)
    assert step_s(num_grad_tensors=4) == pytest.approx(step_s() + 3 * 0.25)


def test_as_fast_plans_copy_as_little_as_they_can():
    """Every fetch but the first block's hides behind compute, so many plans take the same time."""
    blocks = problem([cost(num_params=0, grad_bytes=0, optimizer_bytes=0, forward_s=9.0)] * 6, training=False)
    peak = simulate(blocks, [KEEP] * 6).peak_bytes
    blocks = dataclasses.replace(blocks, device_budget_bytes=peak - 30)
    plan = solve(blocks)
    assert plan.step_s == pytest.approx(6 * 9.0)
    enough = [
        sum(decision.params is Params.HOST for decision in decisions)
        for decisions in itertools.product((KEEP, BlockDecision(params=Params.HOST)), repeat=6)
        if fits(blocks, simulate(blocks, decisions))
    ]
    assert min(enough) < max(enough)
    assert sum(decision.params is Params.HOST for decision in plan.decisions) == min(enough)


@pytest.mark.parametrize("count", [24, thorough(96)])
def test_many_identical_blocks_fit_prove_their_gap_and_are_decided_alike(count: int):
    many = problem([cost()] * count, device_budget_bytes=count * 60 + 900)
    plan = solve(many)
    assert plan.peak_bytes <= count * 60 + 900
    assert plan.gap < 0.05 and (plan.status == "optimal") == (plan.gap <= OPTIMAL_GAP)
    again = solve(many)
    # Work is counted, so that plans are equal; only on a machine that is slow or busy for so many blocks the clock ends it.
    assert again.decisions == plan.decisions or (count > 24 and max(plan.solve_s, again.solve_s) > 9.0)


@pytest.mark.slow
def test_a_dozen_blocks_are_bounded_by_more_than_the_relaxation():
    sizes = [40 + i * 37 % 90 for i in range(12)]
    blocks = [
        cost(param_bytes=size, grad_bytes=size, optimizer_bytes=3 * size, saved_bytes=200 - size) for size in sizes
    ]
    tight = problem(blocks, device_budget_bytes=sum(sizes) * 3)
    program = Program(tight)
    program.minimize_step(ahead=MAX_PREFETCH_DISTANCE)
    relaxed, plan = relax(program, deadline=float("inf")), solve(tight)
    assert relaxed is not None and relaxed.bound_s * 1.002 < plan.lower_bound_s <= plan.step_s


@pytest.mark.slow
def test_a_block_with_one_large_parameter_is_not_bounded_by_a_mixture_of_its_places():
    head = cost(param_bytes=200, grad_bytes=200, optimizer_bytes=600, num_params=50, trained=(50,))
    tight = problem([*[cost()] * 9, head], device_budget_bytes=1400)
    program = Program(tight)
    program.minimize_step(ahead=MAX_PREFETCH_DISTANCE)
    relaxed, plan = relax(program, deadline=float("inf")), solve(tight)
    assert lumps_of(tight) == [9]
    proven = branch(program, branches=60, deadline=float("inf"), blocks=[9])
    assert relaxed is not None and proven.shares is not None
    assert max(proven.shares[9]) == 1 and relaxed.bound_s * 1.02 < proven.bound_s <= plan.step_s
    assert relaxed.bound_s * 1.02 < plan.lower_bound_s <= plan.step_s


def test_without_time_there_is_a_plan_and_its_gap_is_said():
    sizes = [40 + i * 37 % 90 for i in range(24)]
    blocks = [
        cost(param_bytes=size, grad_bytes=size, optimizer_bytes=3 * size, saved_bytes=200 - size) for size in sizes
    ]
    plan = solve(problem(blocks, device_budget_bytes=sum(sizes) * 3), time_limit_s=1e-3)
    assert plan.peak_bytes <= sum(sizes) * 3
    assert plan.gap > OPTIMAL_GAP and plan.status == "feasible"
    assert plan.gap == pytest.approx((plan.step_s - plan.lower_bound_s) / plan.step_s)


def test_no_blocks_give_an_empty_plan_or_say_what_is_held():
    for training in (True, False):
        plan = solve(problem([], fixed_bytes=7, training=training))
        assert plan.decisions == () and plan.step_s == 0 and plan.peak_bytes == 7 and plan.status == "optimal"
        with pytest.raises(InfeasiblePlanError) as caught:
            solve(problem([], fixed_bytes=7, device_budget_bytes=6, training=training))
        assert caught.value.smallest_budget_bytes == 7


def test_what_is_pinned_to_the_host_is_fetched_early():
    """A block of 0.1 s hides none of the next one's fetch of 1 s: three blocks ahead do."""
    pinned = BlockDecision(params=Params.HOST)
    costs = [cost(forward_s=0.5, backward_s=1.0)] * 3 + [cost(forward_s=0.1, backward_s=0.1), cost(param_bytes=100)]
    plan = solve(problem(costs, training=False, fixed_decisions=(None, None, None, None, pinned)))
    late = simulate(problem(costs, training=False), [*plan.decisions[:4], pinned])
    assert plan.decisions[4].params is Params.HOST and plan.decisions[4].prefetch_distance > 1
    assert plan.step_s < late.step_s


def test_fixed_decisions_are_kept():
    fixed = BlockDecision(params=Params.HOST, optimizer=Optimizer.HOST)
    plan = solve(problem([cost()] * 3, fixed_decisions=(None, fixed, None)))
    assert (plan.decisions[1].params, plan.decisions[1].optimizer) == (Params.HOST, Optimizer.HOST)
    assert plan.decisions[0] == KEEP


@pytest.mark.parametrize(
    "fixed",
    [
        BlockDecision(optimizer=Optimizer.STREAMED),
        BlockDecision(optimizer=Optimizer.HOST, num_moved_states=1),
        BlockDecision(
            params=Params.HOST, optimizer=Optimizer.STREAMED, num_moved_states=1, other_states=Optimizer.DISK
        ),
    ],
    ids=["streamed", "in part", "in two places"],
)
def test_states_that_are_elsewhere_already_leave_activations_to_decide(fixed: BlockDecision):
    """As in the second graph of a model, for a new shape."""
    given = problem([cost(trained=(2, 3))] * 3, fixed_decisions=(fixed, None, fixed))
    budget_bytes = simulate(given, [fixed, KEEP, fixed]).peak_bytes - 120
    plan = solve(dataclasses.replace(given, device_budget_bytes=budget_bytes))
    assert plan.peak_bytes <= budget_bytes
    for decision in (plan.decisions[0], plan.decisions[2]):
        assert decision.params is fixed.params and states_of(decision) == states_of(fixed)


def test_inference_only_moves_parameters():
    limited = problem([cost(optimizer_bytes=0)] * 4, device_budget_bytes=60 + 125, training=False)
    plan = solve(limited)
    assert plan.peak_bytes <= 60 + 125 and any(d.params is Params.HOST for d in plan.decisions)
    assert all(d.activations is Activations.KEEP and d.optimizer is Optimizer.DEVICE for d in plan.decisions)


@pytest.mark.parametrize("name", sorted(BASELINES))
@pytest.mark.parametrize("share", [pytest.param(1.0, marks=pytest.mark.slow), 0.6])
def test_baselines_are_replayed_and_never_beat_the_plan(name: str, share: float):
    free = problem([cost()] * 6)
    peak = simulate(free, [KEEP] * 6).peak_bytes
    limited = dataclasses.replace(free, device_budget_bytes=int(share * peak))
    baseline = BASELINES[name](limited)
    scheduled = dataclasses.replace(limited, schedule=baseline.schedule)
    replayed = simulate(scheduled, baseline.decisions)
    assert (baseline.step_s, baseline.peak_bytes) == (replayed.step_s, replayed.peak_bytes)
    if fits(limited, baseline):
        assert solve(scheduled).step_s <= baseline.step_s * (1 + OPTIMAL_GAP)
    else:
        assert name in ("keep-all", "full-recompute")


@pytest.mark.parametrize(("length", "is_smaller"), [(9, False), (10, None), (12, True)])
def test_segments_of_sqrt_blocks_take_less_memory_than_single_ones_from_the_square_of_saved_by_boundary_on(
    length: int, is_smaller: bool | None
):
    """Why sqrt(n) checkpointing is no baseline. A segment is spelled in costs: its last block computes all of it again,
    whose activations are there until their own backward, and its boundary alone was kept."""
    saved, boundary = 100, 10
    frozen = {"param_bytes": 0, "grad_bytes": 0, "optimizer_bytes": 0, "num_params": 0}
    blocks = [cost(saved_bytes=saved, boundary_bytes=boundary, **frozen)] * length**2
    segment = [
        cost(
            saved_bytes=saved,
            boundary_bytes=boundary if last else 0,
            recompute_s=length * 1.0 if last else 0.0,
            backward_workspace_bytes=7 + before * saved,
            **frozen,
        )
        for before in range(length)
        for last in (before == length - 1,)
    ]
    whole, parts = (problem(costs, allow_offload_activations=False) for costs in (blocks, segment * length))
    single, joint = BASELINES["full-recompute"](whole), BASELINES["full-recompute"](parts)
    assert single.step_s == pytest.approx(joint.step_s)
    if is_smaller is None:
        assert joint.peak_bytes == single.peak_bytes
    else:
        assert (joint.peak_bytes < single.peak_bytes) == is_smaller


def test_the_first_block_is_updated_first_or_what_came_first_is():
    """Updates of 4 s each: by priority the next forward waits for one of them, as they arrive for all three."""
    hosted = [BlockDecision(optimizer=Optimizer.HOST)] * 3
    blocks = problem([cost(num_params=40)] * 3)
    step_s = {
        priority: simulate(
            dataclasses.replace(blocks, schedule=Schedule(overlap=Overlap.STEP, priority=priority)), hosted
        ).step_s
        for priority in (True, False)
    }
    synchronous = simulate(blocks, hosted).step_s
    # backward, last gradients down, then: block 0's update and upload, and what follows overlaps; or all updates first
    assert step_s[True] == pytest.approx(3 * 2 + 0.2 + 3 * 4 + 0.2 + 1)
    assert step_s[False] == pytest.approx(3 * 2 + 0.2 + 3 * 4 + 0.2 + 3 * 1)
    assert synchronous == pytest.approx(3 * 2 + 0.2 + 3 * 4 + 0.2 + 3 * 1)


@pytest.mark.parametrize(("clips", "step_s"), [(False, 12.7), (True, 16.7)])
def test_uploads_begin_in_backward_and_the_first_block_goes_first(clips: bool, step_s: float):
    """Gradients land at 2.2, 4.2 and 6.2 s, updates take 0.5 s, uploads 3 s. That of block 2 gives way to that of block 1 at
    4.7 s, and this to that of block 0 at 6.7 s; then they end at 9.7, 10.7 and 11.7 s. With clipping all begin at 6.7 s."""
    blocks = problem(
        [cost(param_bytes=60)] * 3,
        machine=dataclasses.replace(MACHINE, h2d_bytes_per_s=20.0),
        schedule=Schedule(overlap=Overlap.BACKWARD),
        clips_gradients=clips,
    )
    replayed = simulate(blocks, [BlockDecision(optimizer=Optimizer.HOST)] * 3)
    assert replayed.step_s == pytest.approx(step_s)
    uploads = [e for e in replayed.events if e.label == "upload"]
    assert sum(e.end_s - e.start_s for e in uploads) == pytest.approx(9)
    assert [e.block for e in uploads] == ([0, 1, 2] if clips else [2, 1, 0, 1, 2])


def test_plan_files_round_trip_and_refuse_what_they_do_not_know(tmp_path):
    plan = solve(problem([cost()] * 3, device_budget_bytes=400))
    plan.save(tmp_path / "plan.json")
    assert Plan.load(tmp_path / "plan.json") == plan
    text = plan.to_json()
    with pytest.raises(PlanError, match="schema version 999"):
        Plan.from_json(text.replace(f'"schema_version": {SCHEMA_VERSION}', '"schema_version": 999'))
    with pytest.raises(PlanError, match="not a plan file"):
        Plan.from_json("{")
    with pytest.raises(PlanError, match="damaged"):
        Plan.from_json(text.replace('"keep"', '"kept"').replace('"recompute"', '"again"').replace('"offload"', '"out"'))
    with pytest.raises(PlanError, match="cannot read"):
        Plan.load(tmp_path / "none.json")
