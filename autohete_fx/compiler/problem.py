"""From a captured graph to a problem: costs, limits, places that are taken already, and what parameters and optimizers allow.

In: the blocks of a default partition and what they cost, their parameters, the options and what other graphs of the model
hold. Out: a `Problem`, which `autohete_fx.planner.given` and the solver make plans for, and notes for the user.
"""

import dataclasses
from collections.abc import Collection, Iterable, Mapping, Sequence, Set
from dataclasses import dataclass

import torch
from torch import fx

from autohete_fx.capture.inputs import GraphInput, parameter_fqns
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
from autohete_fx.ir.labels import labels_of
from autohete_fx.ir.sizes import format_bytes
from autohete_fx.machine.budgets import CUBLAS_WORKSPACE_BYTES
from autohete_fx.optim.others import counted_state_bytes
from autohete_fx.optim.owners import Owner, optimizer_of
from autohete_fx.optim.streamed import WHOLE_SLOTS
from autohete_fx.options import Options
from autohete_fx.planner.model.figures import host_bytes
from autohete_fx.profiler import ParamInfo
from autohete_fx.runtime.placement import is_movable, placement_of
from autohete_fx.runtime.shard.parts import part_of, shard_of

_LIBRARY_BYTES = 2**18
"""Bytes that a CPU's library of products takes, however small they are."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """The limits that the plan must keep.

    Attributes:
        device_budget_bytes: None for no limit.
        host_budget_bytes: None for no limit.
        fixed_bytes: device bytes that no decision changes.
    """

    device_budget_bytes: int | None
    host_budget_bytes: int | None
    fixed_bytes: int


def owners_of(graph: BlockGraph, params: Mapping[str, torch.nn.Parameter]) -> dict[str, int]:
    """Block index by name of each parameter that follows its block's decisions."""
    return {fqn: block.index for block in graph.blocks for fqn in block.param_fqns if is_movable(params[fqn])}


def moved_states(
    decisions: Sequence[BlockDecision], owners: Mapping[str, int], params: Mapping[str, torch.Tensor]
) -> dict[str, Optimizer]:
    """Where the optimizer states are of the trainable parameters whose states leave the device, by name. Where a block's decision
    says of how many, they are the smallest, and of equally large ones the first by name.

    Args:
        owners: block by name of each movable parameter.
    """
    trained: dict[int, list[str]] = {}
    for name, block in owners.items():
        if params[name].requires_grad and decisions[block].optimizer is not Optimizer.DEVICE:
            trained.setdefault(block, []).append(name)
    for names in trained.values():
        names.sort(key=lambda name: (params[name].numel(), name))
    moved = {}
    for block, names in trained.items():
        decision = decisions[block]
        count = len(names) if decision.num_moved_states is None else decision.num_moved_states
        moved.update(dict.fromkeys(names[:count], decision.optimizer))
        if decision.other_states is not Optimizer.DEVICE:
            moved.update(dict.fromkeys(names[count:], decision.other_states))
    return moved


def state_bytes(param: torch.nn.Parameter) -> int:
    """Optimizer states that a parameter will have: what an optimizer of ours says, or what is known of another's."""
    if not param.requires_grad:
        return 0
    owner = optimizer_of(param)
    return counted_state_bytes(param) if owner is None else owner.state_bytes_of(param)


def update_share(param: torch.nn.Parameter) -> float:
    """Bytes that an update moves, over those of an update of AdamW's; 1 where the optimizer is none of ours."""
    owner = optimizer_of(param)
    return 1.0 if owner is None else owner.update_share_of(param)


def is_mixed(param: torch.nn.Parameter) -> bool:
    """Whether the kernel for 16-bit parameters will update it."""
    owner = optimizer_of(param) if param.requires_grad else None
    return owner is not None and owner.uses_mixed(param)


def product_flops(param: torch.nn.Parameter) -> float:
    """Floating point operations of matrix products in an update."""
    owner = optimizer_of(param) if param.requires_grad else None
    return 0.0 if owner is None else owner.product_flops_of(param)


def update_workspace_bytes(params: Iterable[torch.nn.Parameter]) -> int:
    """Memory that updates of whole parameters need beside states.

    The updates run one after the other. A CPU's products reorder what they multiply, in as much memory as the matrix itself takes
    in fp32.
    """
    most = 0
    for param in params:
        owner = optimizer_of(param) if param.requires_grad else None
        needed = 0 if owner is None else owner.workspace_bytes_of(param)
        if needed and param.device.type == "cpu":
            needed += 4 * param.numel() + _LIBRARY_BYTES
        most = max(most, needed)
    return most


def slot_bytes(params: Iterable[torch.nn.Parameter]) -> int:
    """Memory that updates of streamed whole parameters need; 0 where pieces of parameters can be updated.

    States pass through slots, each of which takes all of a parameter's and the parameter. The updates have a workspace of their own
    beside the device's, and on a GPU cuBLAS has one for their stream.
    """
    owned = [(param, optimizer_of(param)) for param in params if param.requires_grad]
    whole = [param for param, owner in owned if owner is not None and not owner.rule_of(param).is_elementwise]
    if not whole:
        return 0
    library = CUBLAS_WORKSPACE_BYTES * any(param.device.type == "cuda" for param in whole)
    return WHOLE_SLOTS * max(state_bytes(p) + p.nbytes for p in whole) + update_workspace_bytes(whole) + library


def num_ranks(params: Iterable[torch.nn.Parameter]) -> int:
    """How many ranks hold shards of the parameters: 1 where they are this process's alone."""
    return max((part.ranks.count for param in params if (part := shard_of(param)) is not None), default=1)


def num_replicas(params: Iterable[torch.nn.Parameter]) -> int:
    """How many ranks hold the same as this one, and average its gradients at a step."""
    parts = [part for param in params if (part := part_of(param)) is not None]
    return max((part.ranks.num_replicas for part in parts), default=1)


def is_elementwise(params: Iterable[torch.nn.Parameter]) -> bool:
    """Whether all updates may be cut into windows, as plans count states on disk: whole states would take more memory."""
    owned = ((p, optimizer_of(p)) for p in params if p.requires_grad)
    return all(owner.rule_of(p).is_elementwise for p, owner in owned if owner is not None)


def param_infos(
    gm: fx.GraphModule, inputs: Sequence[GraphInput], params: Mapping[str, torch.nn.Parameter]
) -> dict[str, ParamInfo]:
    """The facts that the profiler needs of the parameters that can move, by placeholder of ``gm``."""
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
            update_share=update_share(param),
            is_mixed=is_mixed(param),
            product_flops=product_flops(param),
        )
    return infos


def host_optimizer_allowed(params: Sequence[torch.nn.Parameter]) -> bool:
    """Whether every trainable parameter that can move belongs to an autohete_fx optimizer, which can step on the host."""
    return not any(map(_lacks_owner, params))


def _lacks_owner(param: torch.nn.Parameter) -> bool:
    return param.requires_grad and is_movable(param) and optimizer_of(param) is None


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
    """Remarks for the user about how optimizer states were counted."""
    if host_optimizer_allowed(params):
        return ()
    return (
        "no optimizer of autohete_fx holds these parameters: two states per parameter were counted on the device and the"
        " optimizer stays there; construct one, such as autohete_fx.AdamW, before the first training step to let it move",
    )


NOTE_ON_SHARDS = (
    "FSDP (fully_shard) gathers these parameters for each call and frees them after it, so no plan moves them: they are counted"
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


NOTE_ON_UNAGREED = (
    "the graph has collectives, and no parameter is a DTensor or a shard that tells with which ranks: each rank plans for itself,"
    " and no plan computes activations again; give all ranks one plan that does, or parallelize the model with parallelize_module"
)


def never_computing_again(problem: Problem) -> Problem:
    """The problem with every forward run once."""
    why = "The graph has collectives of ranks that do not plan together: parallelize the model with parallelize_module"
    return dataclasses.replace(problem, allow_recompute=False, obstacles=(*problem.obstacles, ("recompute", why)))


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
    """The problem with replicas, which average gradients at the step, and inside of a DistributedDataParallel, which changes
    them in hooks that nobody sees.

    No update starts before all of backward has run, nor is a norm taken before.
    """
    overlap = Overlap.STEP if problem.schedule.overlap is Overlap.BACKWARD else problem.schedule.overlap
    return dataclasses.replace(problem, schedule=Schedule(overlap=overlap))


def note_on_reduction(params: Sequence[torch.nn.Parameter], bucket_bytes: int) -> str:
    """The remark about a graph inside of a DistributedDataParallel."""
    waits = any(owner.overlap is Overlap.BACKWARD for owner in _owners(params))
    return (
        f"DistributedDataParallel: its gradient buckets, {format_bytes(bucket_bytes)}, are counted on the device; the graph is"
        " compiled whole, without Dynamo's DDPOptimizer, so reductions start when its backward ends"
        + ("; updates start at optimizer.step() in spite of overlap='backward', because DDP changes gradients" * waits)
    )


def notes_on_replicas(params: Sequence[torch.nn.Parameter]) -> tuple[str, ...]:
    """The remark about a graph whose parameters have replicas, where an optimizer would start updates earlier."""
    if num_replicas(params) == 1 or not any(owner.overlap is Overlap.BACKWARD for owner in _owners(params)):
        return ()
    return (
        "updates start at optimizer.step() in spite of overlap='backward', because replicas average their gradients there",
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
    placed: Collection[str] = (),
    copies_gradients: bool = False,
) -> Problem:
    """The planner's input.

    ``placed``: names of parameters that stay where they are. ``copies_gradients``: somebody takes copies of
    gradients while the last backward runs.
    """
    given = () if options.plan is None else options.plan.decisions
    is_again = options.micro_batches > 1 and host_optimizer_allowed(list(params.values()))
    allow_disk = training and {"host_optimizer", "disk_optimizer"} <= options.allow
    fixed = tuple(_placed_decision(block, params, placed) for block in graph.blocks)
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
        # One micro-batch gains nothing. A loop that updates parameters by itself is not told from one that leaves them.
        allow_replicating=training and (is_again or any(decision.replicates for decision in given)),
        allow_moving_some_states=True,
        # Where host and device share a memory, states have no way to go.
        allow_streamed_optimizer=machine.device_type != "cpu",
        update_workspace_bytes=update_workspace_bytes(params.values()) if training else 0,
        slot_bytes=slot_bytes(params.values()) if training else 0,
        micro_batches=options.micro_batches,
        in_flight=options.in_flight if training else 1,
        num_ranks=num_ranks(params.values()),
        num_replicas=num_replicas(params.values()),
        schedule=schedule_of(list(params.values()), machine),
        clips_gradients=training and clips_gradients(params.values()),
        copies_gradients=training and copies_gradients,
        training=training,
        fixed_decisions=fixed if any(d is not None for d in fixed) else (),
        obstacles=_obstacles(params, options) if training else (),
    )
    if problem.num_replicas > 1:
        problem = reducing_after_backward(problem)
    return with_disk(problem) if allow_disk and is_elementwise(params.values()) else problem


def _obstacles(params: Mapping[str, torch.nn.Parameter], options: Options) -> tuple[tuple[str, str], ...]:
    without = {name: param for name, param in params.items() if _lacks_owner(param)}
    if "host_optimizer" not in options.allow or not without:
        return ()
    names, states = list(without), sum(map(state_bytes, without.values()))
    return (
        (
            "host_optimizer",
            f"No optimizer of autohete_fx holds {names[0]} and {len(names) - 1} others, so no optimizer states may leave the"
            f" device, where {format_bytes(states)} are counted for these: construct one, such as autohete_fx.AdamW, before the"
            " first training step, which lets them move to the host",
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


def _placed_decision(
    block: Block, params: Mapping[str, torch.nn.Parameter], placed: Collection[str]
) -> BlockDecision | None:
    """What has been decided for a block whose parameters are placed already; None where none is."""
    own = [(fqn, params[fqn]) for fqn in block.param_fqns if fqn in placed]
    found = [(fqn, param, where) for fqn, param in own if (where := placement_of(param)) is not None]
    if not found:
        return None
    trained = sorted((param.numel(), name, where.optimizer) for name, param, where in found if param.requires_grad)
    places = [place for _, _, place in trained]
    optimizer = next((place for place in places if place is not Optimizer.DEVICE), Optimizer.DEVICE)
    count = places.count(optimizer)
    return BlockDecision(
        params=found[0][2].params,
        optimizer=optimizer,
        num_moved_states=count if 0 < count < len(places) else None,
        other_states=next((place for place in places if place is not optimizer), Optimizer.DEVICE),
    )
