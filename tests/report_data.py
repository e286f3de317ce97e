"""Reports made by hand: a replayed plan of many blocks, and a step as it could have run."""

import dataclasses
from collections.abc import Sequence

from autohete_fx.ir import (
    Activations,
    BlockDecision,
    Lane,
    MemoryRecord,
    Optimizer,
    Overlap,
    Params,
    Plan,
    Schedule,
    StepRecord,
)
from autohete_fx.planner.baselines import evaluate
from autohete_fx.planner.model.simulate import simulate
from autohete_fx.planner.reasons import reasons_of
from autohete_fx.report.data import HELD, Bar, CurvePoint, Measured, ReportData, Stage
from tests.planner_problems import MACHINE, cost, problem

GB = 10**9
MACHINE_OF_REPORT = dataclasses.replace(
    MACHINE,
    device_name="Test GPU",
    h2d_bytes_per_s=12.0 * GB,
    d2h_bytes_per_s=12.0 * GB,
    device_update_params_per_s=60.0 * GB,
    host_update_params_per_s=2.0 * GB,
    latency_s=1e-5,
)
DECISIONS = (
    BlockDecision(activations=Activations.OFFLOAD, params=Params.HOST, optimizer=Optimizer.HOST, prefetch_distance=2),
    BlockDecision(activations=Activations.RECOMPUTE, params=Params.HOST, optimizer=Optimizer.HOST),
    BlockDecision(activations=Activations.OFFLOAD, num_offloaded=1, optimizer=Optimizer.STREAMED, num_moved_states=1),
    BlockDecision(activations=Activations.RECOMPUTE),
    BlockDecision(),
)


def report_data(
    num_blocks: int = 10, *, is_measured: bool = True, with_reasons: bool = True, labels: Sequence[str] = ()
) -> ReportData:
    """A report of so many blocks; each kind of decision for an even run of them."""
    costs = [
        cost(
            forward_s=0.010,
            backward_s=0.021,
            recompute_s=0.010,
            saved_bytes=400_000_000,
            boundary_bytes=16_000_000,
            offloadable=(250_000_000, 80_000_000),
            forward_workspace_bytes=50_000_000,
            backward_workspace_bytes=70_000_000,
            param_bytes=100_000_000,
            grad_bytes=100_000_000,
            optimizer_bytes=600_000_000,
            num_params=50_000_000,
            trained=(20_000_000, 30_000_000),
        )
        for _ in range(num_blocks)
    ]
    given = problem(
        costs,
        machine=MACHINE_OF_REPORT,
        device_budget_bytes=900_000_000 * num_blocks,
        schedule=Schedule(overlap=Overlap.BACKWARD),
        allow_streamed_optimizer=True,
        allow_moving_some_states=True,
    )
    if labels:
        given = dataclasses.replace(given, labels=tuple(labels))
    decisions = tuple(DECISIONS[len(DECISIONS) * block // num_blocks] for block in range(num_blocks))
    plan = evaluate(given, decisions, "feasible")
    if with_reasons:
        plan = dataclasses.replace(plan, reasons=reasons_of(given, decisions))
    replay = simulate(given, decisions)
    steps = [StepRecord(number=0, step_s=5 * plan.step_s, peak_bytes=plan.peak_bytes)]
    steps += [
        StepRecord(
            number=n,
            step_s=plan.step_s * (1.05 + 0.04 * (n % 3)),
            peak_bytes=int(plan.peak_bytes * (1 - 0.002 * (n % 2))),
        )
        for n in range(1, 24)
    ]
    return ReportData(
        device_name="Test GPU",
        torch_version="2.13.0",
        training_graph=1,
        budget_bytes=given.device_budget_bytes,
        plan=plan,
        events=replay.events,
        levels=replay.levels,
        curve=_curve(plan),
        step=_measured(plan, replay.events, replay.levels) if is_measured else None,
        steps=tuple(steps) if is_measured else (),
        measured_step_s=1.09 * plan.step_s if is_measured else None,
        measured_peak_bytes=plan.peak_bytes if is_measured else None,
        notes=("a note of the compilation",),
        profile_source="measured on Test GPU",
        compile_s=(Stage(name="profiling", seconds=3.2), Stage(name="total", seconds=41.0)),
    )


def _curve(plan: Plan) -> tuple[CurvePoint, ...]:
    return tuple(
        CurvePoint(budget_bytes=int(plan.peak_bytes * share), step_s=plan.step_s * (0.7 + 0.3 / share**1.5))
        for share in (0.6, 0.8, 1.1, 1.3, 1.5)
    )


def _measured(plan: Plan, events: Sequence, levels: Sequence) -> Measured:
    """The step as planned, a little slower, and with a wait."""
    slower = 1.08
    bars = [
        Bar(lane=e.lane, label=e.label, start_s=slower * e.start_s, end_s=slower * e.end_s, num_bytes=1 << 24)
        for e in events
        if e.lane is not Lane.COMPUTE
    ]
    turn_s = slower * max(e.end_s for e in events if e.label == "backward")
    end_s = slower * plan.step_s
    bars += [
        Bar(lane=Lane.COMPUTE, label="backward", start_s=0.0, end_s=turn_s),
        Bar(lane=Lane.COMPUTE, label="between", start_s=turn_s, end_s=turn_s + 0.02 * end_s),
        Bar(lane=Lane.COMPUTE, label="forward", start_s=turn_s + 0.02 * end_s, end_s=end_s),
        Bar(lane=Lane.COMPUTE, label=f"{HELD}: prefetch", start_s=0.4 * turn_s, end_s=0.46 * turn_s),
    ]
    memory = tuple(
        MemoryRecord(at_s=slower * level.at_s + ahead * 1e-3, num_bytes=int(level.num_bytes * share))
        for level in levels
        for ahead, share in ((0.0, 0.97), (3.0, 0.99))
    )
    return Measured(number=21, step_s=end_s, bars=tuple(bars), memory=memory)
