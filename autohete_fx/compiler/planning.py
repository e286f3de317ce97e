"""From a captured graph to a plan: groups, costs, limits and the solver, put together.

In: a default partition and its blocks, the parameters behind them, the options and what other graphs of the model
hold. Out: a `Plan`, and what it was made from. The planner's per-block memory model is checked against a trace of the
rewritten graphs (`traced_peak_bytes`); where a plan's trace is above the budget, the problem is solved again with the
difference taken off.
"""

import dataclasses
import time
from collections.abc import Iterable, Mapping, Sequence, Set
from dataclasses import dataclass

import torch
from torch import fx

from autohete_fx.capture.inputs import GraphInput, is_symbolic, parameter_fqns
from autohete_fx.compiler.compilation import Footprint, LaneEvent
from autohete_fx.errors import PlanError
from autohete_fx.ir import (
    Activations,
    Block,
    BlockCost,
    BlockDecision,
    BlockGraph,
    Machine,
    Optimizer,
    Overlap,
    Params,
    Plan,
    Problem,
    Schedule,
)
from autohete_fx.ir.sizes import format_bytes
from autohete_fx.optim.base import Owner
from autohete_fx.optim.owners import optimizer_of
from autohete_fx.options import Options
from autohete_fx.planner.baselines import fits
from autohete_fx.planner.infeasible import infeasible
from autohete_fx.planner.model.device_use import streaming_peak_bytes
from autohete_fx.planner.model.figures import host_bytes
from autohete_fx.planner.model.simulate import simulate
from autohete_fx.planner.reasons import reasons_of
from autohete_fx.planner.sharing import leanest
from autohete_fx.planner.solve import solve
from autohete_fx.profiler import ParamInfo
from autohete_fx.runtime.placement import is_movable, placement_of
from autohete_fx.runtime.tiers.host import is_home

_COUNTER_BYTES = 4


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """What the plan must keep.

    Attributes:
        device_budget_bytes: None for no limit.
        host_budget_bytes: None for no limit.
        fixed_bytes: device bytes that no decision changes.
    """

    device_budget_bytes: int | None
    host_budget_bytes: int | None
    fixed_bytes: int


def labels_of(blocks: Sequence[Block]) -> tuple[str, ...]:
    """One name a block; a kind that occurs twice gets its index."""
    labels = [block.label for block in blocks]
    return tuple(label if labels.count(label) == 1 else f"{label}@{index}" for index, label in enumerate(labels))


def owners_of(graph: BlockGraph, params: Mapping[str, torch.nn.Parameter]) -> dict[str, int]:
    """Block index by name of each parameter that follows its block's decisions."""
    return {fqn: block.index for block in graph.blocks for fqn in block.param_fqns if is_movable(params[fqn])}


def state_bytes(param: torch.nn.Parameter) -> int:
    """Optimizer states that a parameter will have: what our AdamW says, else two states of its own dtype."""
    if not param.requires_grad:
        return 0
    owner = optimizer_of(param)
    return owner.state_bytes_of(param) if owner is not None else 2 * param.numel() * param.element_size()


def param_infos(
    gm: fx.GraphModule, inputs: Sequence[GraphInput], params: Mapping[str, torch.nn.Parameter]
) -> dict[str, ParamInfo]:
    """What the profiler must know of the parameters that can move, by placeholder of ``gm``."""
    infos = {}
    for placeholder, fqn in parameter_fqns(gm, inputs).items():
        param = params[fqn]
        if not is_movable(param):
            continue
        infos[placeholder] = ParamInfo(
            fqn=fqn,
            num_bytes=param.numel() * param.element_size(),
            num_elements=param.numel(),
            requires_grad=param.requires_grad,
            state_bytes=state_bytes(param),
        )
    return infos


def input_bytes(inputs: Sequence[GraphInput]) -> int:
    """Inputs and buffers: on the device, whatever is decided."""
    return sum(
        item.tensor.numel() * item.tensor.element_size()
        for item in inputs
        if item.tensor is not None and not item.is_parameter and not is_symbolic(item.tensor)
    )


def small_bytes(params: Iterable[torch.nn.Parameter], *, training: bool, micro_batches: int) -> int:
    """Parameters that stay on the device whatever is decided, with their optimizer states and accumulated gradients. Counters of
    optimizer steps, one a parameter, are on the CPU."""
    params = list(params)
    small = [param for param in params if not is_movable(param)]
    total = sum(param.nbytes for param in small)
    if training:
        total += sum(_COUNTER_BYTES for param in params if param.requires_grad and param.device.type == "cpu")
        total += sum(state_bytes(param) for param in small)
        if micro_batches > 1:
            total += sum(param.nbytes for param in small if param.requires_grad)
    return total


def trained_bytes(params: Iterable[torch.nn.Parameter]) -> int:
    """What training has on the device beside parameters: optimizer states, where a plan has them there or none moves them, and
    gradients that are there now."""
    total = 0
    for param in params:
        placement = placement_of(param)
        stays = placement is None or placement.optimizer is Optimizer.DEVICE or optimizer_of(param) is None
        total += state_bytes(param) if stays else 0
        total += param.grad.nbytes if param.grad is not None and not is_home(param.grad) else 0
    return total


def host_optimizer_allowed(params: Sequence[torch.nn.Parameter]) -> bool:
    """Whether every trainable parameter belongs to an autohete_fx optimizer, which can step on the host."""
    trainable = [p for p in params if p.requires_grad]
    return bool(trainable) and all(optimizer_of(p) is not None for p in trainable)


def _owners(params: Iterable[torch.nn.Parameter]) -> list[Owner]:
    """The optimizer of each trainable parameter that has one of ours."""
    return [owner for p in params if p.requires_grad and (owner := optimizer_of(p)) is not None]


def clips_gradients(params: Iterable[torch.nn.Parameter]) -> bool:
    """Whether a step needs the norm of all gradients before its first update."""
    return any(owner.max_grad_norm is not None for owner in _owners(params))


def schedule_of(params: Sequence[torch.nn.Parameter], machine: Machine) -> Schedule:
    """When updates on the host run: as the optimizers say. Where host and device are the same cores, inside the step."""
    overlaps = {owner.overlap for owner in _owners(params)}
    if not overlaps or Overlap.NONE in overlaps or machine.device_type == "cpu":
        return Schedule(overlap=Overlap.NONE)
    in_backward = Overlap.BACKWARD in overlaps
    return Schedule(
        overlap=Overlap.BACKWARD if in_backward else Overlap.STEP, takes_norms=in_backward and clips_gradients(params)
    )


def notes_on_optimizer(params: Sequence[torch.nn.Parameter]) -> tuple[str, ...]:
    """What the user should know about how optimizer states were counted."""
    trainable = [p for p in params if p.requires_grad]
    if not trainable or host_optimizer_allowed(params):
        return ()
    return (
        "no autohete_fx.AdamW holds these parameters: two states per parameter were counted on the device and the"
        " optimizer stays there; construct autohete_fx.AdamW before the first training step to let it move",
    )


NOTE_ON_SHARDS = (
    "FSDP (fully_shard) gathers these parameters for each call and frees them behind it, so no plan moves them: they are counted"
    " whole on the device, with a gradient and two optimizer states each; activations alone can be recomputed or offloaded"
)


def leaving_parameters(problem: Problem) -> Problem:
    """The problem with parameters and optimizer states left where they are."""
    why = "FSDP (fully_shard) moves these parameters itself: shard them over more devices, or train without it"
    return dataclasses.replace(
        problem,
        allow_host_params=False,
        allow_host_optimizer=False,
        fixed_decisions=(),
        obstacles=(("host_params", why), ("host_optimizer", "")),
    )


def refuse_moving(plan: Plan, graph: BlockGraph, sharded: Set[str]) -> None:
    """Raise PlanError where a given plan moves parameters, or their optimizer states, that FSDP shards."""
    for block, label, decision in zip(graph.blocks, labels_of(graph.blocks), plan.decisions, strict=False):
        places = {decision.optimizer, decision.other_states}
        moves = decision.params is not Params.DEVICE or places != {Optimizer.DEVICE}
        if moves and not sharded.isdisjoint(block.param_fqns):
            raise PlanError(
                f"the plan moves parameters or optimizer states of block {label!r}, which FSDP (fully_shard) shards and gathers by"
                " itself. Expected was a plan that leaves them on the device. Make one with the option allow=['recompute',"
                " 'offload_activations'], or train without fully_shard"
            )


def reducing_after_backward(problem: Problem) -> Problem:
    """The problem inside of a DistributedDataParallel, which changes gradients in hooks that nobody sees: no update starts before
    all of backward has run, nor is a norm taken before."""
    overlap = Overlap.STEP if problem.schedule.overlap is Overlap.BACKWARD else problem.schedule.overlap
    return dataclasses.replace(problem, schedule=Schedule(overlap=overlap))


def note_on_reduction(params: Sequence[torch.nn.Parameter], bucket_bytes: int) -> str:
    """What differs for a graph inside of a DistributedDataParallel."""
    waits = any(owner.overlap is Overlap.BACKWARD for owner in _owners(params))
    return (
        f"DistributedDataParallel: its gradient buckets, {format_bytes(bucket_bytes)}, are counted on the device; the graph is"
        " compiled whole, without Dynamo's DDPOptimizer, so reductions start when its backward ends"
        + ("; updates start at optimizer.step() in spite of overlap='backward', because DDP changes gradients" * waits)
    )


def make_problem(
    graph: BlockGraph,
    costs: Sequence[BlockCost],
    machine: Machine,
    options: Options,
    limits: Limits,
    params: Mapping[str, torch.nn.Parameter],
    *,
    training: bool,
    keep_placement: bool,
) -> Problem:
    """The planner's input. ``keep_placement``: parameters that are placed already stay where they are."""
    allow_disk = training and {"host_optimizer", "disk_optimizer"} <= options.allow
    fixed = tuple(_placed_decision(block, params) for block in graph.blocks) if keep_placement else ()
    problem = Problem(
        labels=labels_of(graph.blocks),
        costs=tuple(costs),
        edges=graph.edges,
        machine=machine,
        device_budget_bytes=limits.device_budget_bytes,
        host_budget_bytes=limits.host_budget_bytes,
        fixed_bytes=limits.fixed_bytes,
        allow_recompute="recompute" in options.allow and training,
        allow_offload_activations="offload_activations" in options.allow and training,
        allow_host_params="host_params" in options.allow,
        allow_host_optimizer="host_optimizer" in options.allow and host_optimizer_allowed(list(params.values())),
        allow_moving_some_states=True,
        # Where host and device share a memory, states have no way to go.
        allow_streamed_optimizer=machine.device_type != "cpu",
        micro_batches=options.micro_batches,
        schedule=schedule_of(list(params.values()), machine),
        clips_gradients=training and clips_gradients(params.values()),
        training=training,
        fixed_decisions=fixed if any(d is not None for d in fixed) else (),
        obstacles=_obstacles(params, options) if training else (),
    )
    return with_disk(problem) if allow_disk else problem


def _obstacles(params: Mapping[str, torch.nn.Parameter], options: Options) -> tuple[tuple[str, str], ...]:
    without = [p for p in params.values() if p.requires_grad and optimizer_of(p) is None]
    if "host_optimizer" not in options.allow or not without:
        return ()
    states = format_bytes(sum(map(state_bytes, without)))
    return (
        (
            "host_optimizer",
            f"No autohete_fx.AdamW holds these parameters, so {states} of optimizer states are counted on the device: construct"
            " autohete_fx.AdamW before the first training step, which lets them move to the host",
        ),
    )


def with_disk(problem: Problem) -> Problem:
    """The problem with optimizer states allowed on disk where the host budget may be short. Elsewhere host memory is never
    worse, and what need not be decided takes no time."""
    machine, budget = problem.machine, problem.host_budget_bytes
    if not problem.allow_host_optimizer or budget is None or not machine.disk_bytes or not machine.disk_bytes_per_s:
        return problem
    everything = BlockDecision(activations=Activations.OFFLOAD, params=Params.HOST, optimizer=Optimizer.HOST)
    most = sum(host_bytes(problem, block, everything) for block in range(len(problem.costs)))
    return dataclasses.replace(problem, allow_disk_optimizer=most > budget)


def _placed_decision(block: Block, params: Mapping[str, torch.nn.Parameter]) -> BlockDecision | None:
    """What has been decided for a block whose parameters are placed already; None where none is."""
    placed = [(fqn, params[fqn], found) for fqn in block.param_fqns if (found := placement_of(params[fqn])) is not None]
    if not placed:
        return None
    trained = sorted((param.numel(), name, found.optimizer) for name, param, found in placed if param.requires_grad)
    places = [place for _, _, place in trained]
    optimizer = next((place for place in places if place is not Optimizer.DEVICE), Optimizer.DEVICE)
    count = places.count(optimizer)
    return BlockDecision(
        params=placed[0][2].params,
        optimizer=optimizer,
        num_moved_states=count if 0 < count < len(places) else None,
        other_states=next((place for place in places if place is not optimizer), Optimizer.DEVICE),
    )


def fitted_plan(plan: Plan, graph: BlockGraph, problem: Problem) -> Plan:
    """A given plan with this graph's predictions, and its reasons where it was solved for just this problem.

    Raises PlanError where it was made for another graph.
    """
    labels = labels_of(graph.blocks)
    digests = tuple(block.digest for block in graph.blocks)
    if plan.labels != labels:
        different = [pair for pair in zip(plan.labels, labels, strict=False) if pair[0] != pair[1]]
        what = f"its block {different[0][0]!r} is {different[0][1]!r} here" if different else "the counts differ"
        raise PlanError(
            f"the plan does not fit this graph: it has {len(plan.labels)} blocks, the graph {len(labels)}; {what};"
            " make a plan for this model, or leave the option 'plan' out"
        )
    if plan.block_digests and plan.block_digests != digests:
        index = next(i for i, pair in enumerate(zip(plan.block_digests, digests, strict=True)) if pair[0] != pair[1])
        raise PlanError(
            f"the plan does not fit this graph: block {labels[index]!r} had other operators, shapes or dtypes when the plan"
            " was made; make a plan for this model and batch, or leave the option 'plan' out"
        )
    for label, decision in zip(labels, plan.decisions, strict=True):
        _refuse_unsupported(label, decision, problem.machine)
    problem = dataclasses.replace(problem, schedule=plan.schedule)
    return replayed(dataclasses.replace(plan, block_digests=digests), problem)


def recomputing(plan: Plan, problem: Problem) -> Plan:
    """The plan with all activations recomputed that it keeps, be it in part."""
    kept = (Activations.KEEP, Activations.SELECTIVE)
    decisions = (
        dataclasses.replace(d, activations=Activations.RECOMPUTE) if d.activations in kept else d
        for d in plan.decisions
    )
    return replayed(dataclasses.replace(plan, decisions=tuple(decisions), status="feasible", reasons=None), problem)


def replayed(plan: Plan, problem: Problem) -> Plan:
    """The plan with what is predicted of it for a problem."""
    result = simulate(problem, plan.decisions)
    return dataclasses.replace(
        plan,
        step_s=result.step_s,
        peak_bytes=result.peak_bytes,
        host_bytes=result.host_bytes,
        busy_s=result.busy_s,
        reasons=plan.reasons if plan.problem_digest == problem.digest else None,
        gap=max(0.0, 1 - plan.lower_bound_s / result.step_s) if plan.lower_bound_s else plan.gap,
        problem_digest=problem.digest,
    )


def _refuse_unsupported(label: str, decision: BlockDecision, machine: Machine) -> None:
    """What the runtime cannot do here."""
    if Optimizer.DISK in (decision.optimizer, decision.other_states) and not machine.disk_bytes_per_s:
        raise PlanError(
            f"the plan decides optimizer 'disk' for block {label!r}, but when this machine was measured its disk had no room;"
            " free some there, or give another offload_dir"
        )


def solved_plan(problem: Problem, graph: BlockGraph, options: Options) -> Plan:
    """The solver's plan. Raises InfeasiblePlanError where none fits."""
    plan = solve(problem, time_limit_s=options.solver_time_limit_s)
    return dataclasses.replace(plan, block_digests=tuple(block.digest for block in graph.blocks))


def lean_plan(problem: Problem, graph: BlockGraph) -> Plan:
    """A plan that leaves little on the device for other graphs. Raises InfeasiblePlanError where it does not fit."""
    deadline = time.monotonic()
    decisions = leanest(problem, deadline=deadline)
    if decisions is None or not fits(problem, simulate(problem, decisions, events=False)):
        raise infeasible(problem, deadline=deadline)
    return decided_plan(problem, graph, decisions)


def decided_plan(problem: Problem, graph: BlockGraph, decisions: tuple[BlockDecision, ...]) -> Plan:
    """The plan of these decisions, with what is predicted of it."""
    plan = Plan(
        labels=problem.labels,
        decisions=decisions,
        block_digests=tuple(block.digest for block in graph.blocks),
        schedule=problem.schedule,
        status="feasible",
    )
    return dataclasses.replace(replayed(plan, problem), reasons=reasons_of(problem, decisions))


def footprint_of(problem: Problem, decisions: Sequence[BlockDecision]) -> Footprint:
    """What blocks leave on the device under decisions; nothing of what no decision changes."""
    plan = Plan(labels=problem.labels, decisions=tuple(decisions))
    return Footprint(
        resident_bytes=resident_bytes(problem, plan),
        held_bytes=held_bytes(problem, plan),
        gradient_bytes=device_gradient_bytes(problem, plan),
    )


def lane_events(problem: Problem, plan: Plan) -> tuple[LaneEvent, ...]:
    """The predicted timeline of a step."""
    events = simulate(dataclasses.replace(problem, schedule=plan.schedule), plan.decisions).events
    return tuple(LaneEvent(lane=e.lane, label=e.label, block=e.block, start_s=e.start_s, end_s=e.end_s) for e in events)


def resident_bytes(problem: Problem, plan: Plan) -> int:
    """Parameters and optimizer states on the device."""
    pairs = list(zip(problem.costs, plan.decisions, strict=True))
    params = sum(cost.param_bytes for cost, decision in pairs if decision.params is Params.DEVICE)
    if not problem.training:
        return params
    return params + sum(cost.part_at(cost.optimizer_bytes, d, Optimizer.DEVICE) for cost, d in pairs)


def device_gradient_bytes(problem: Problem, plan: Plan) -> int:
    """Gradients that stay on the device until the step."""
    pairs = zip(problem.costs, plan.decisions, strict=True)
    return sum(cost.part_at(cost.grad_bytes, d, Optimizer.DEVICE, Optimizer.STREAMED) for cost, d in pairs)


def held_bytes(problem: Problem, plan: Plan) -> int:
    """Activations, and copies of parameters that stay, on the device between forward and backward."""
    total = 0
    for cost, decision in zip(problem.costs, plan.decisions, strict=True):
        total += cost.param_bytes if decision.keeps_fetched else 0
        total += cost.held_bytes(decision.activations)
        if decision.activations is Activations.OFFLOAD:
            total -= cost.offloaded_bytes(decision.num_offloaded)
    return total


def traced_peak_bytes(problem: Problem, plan: Plan, intermediate_bytes: int) -> int:
    """Peak device memory of a step, given the traced peak of the rewritten graphs' intermediates.

    The trace knows fusion and the order of nodes, which the per-block model does not. With several micro-batches the
    gradients of the earlier ones are there all along. What streamed states need until their update has only the model.
    """
    resident = problem.fixed_bytes + resident_bytes(problem, plan)
    if not problem.training:
        return resident + intermediate_bytes
    gradients = device_gradient_bytes(problem, plan)
    accumulated = gradients if problem.micro_batches > 1 else 0
    streaming = streaming_peak_bytes(problem, plan.decisions)
    return max(resident + max(accumulated + intermediate_bytes, gradients), streaming)
