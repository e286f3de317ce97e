"""The decisions that a block may get: in come a problem and a block, out come decisions. `work` says what each takes."""

from dataclasses import replace

from autohete_fx.ir import Activations, BlockCost, BlockDecision, Optimizer, Params, Problem
from autohete_fx.planner.model.figures import whole_of

MAX_PREFETCH_DISTANCE = 4


def choices(problem: Problem, block: int) -> tuple[BlockDecision, ...]:
    """Every decision that a block may get, at prefetch distance 1; the one that moves nothing comes first."""
    treated, placed = activation_choices(problem, block), place_choices(problem, block)
    return tuple(joined(activations, place) for activations in treated for place in placed)


def joined(activations: BlockDecision, place: BlockDecision) -> BlockDecision:
    """The decision that says of activations what the first says, and of everything else what the second says."""
    return replace(place, activations=activations.activations, num_offloaded=activations.num_offloaded)


def treatment_of(decision: BlockDecision) -> tuple[object, ...]:
    """The part of a decision that is about activations."""
    return decision.activations, decision.num_offloaded


def states_of(decision: BlockDecision) -> tuple[object, ...]:
    """The part of a decision that is about optimizer states."""
    return decision.optimizer, decision.num_moved_states, decision.other_states


def params_of(decision: BlockDecision) -> tuple[Params, bool, bool]:
    """The part of a decision that is about parameters: where they are, whether they are kept till backward, or replicated."""
    return decision.params, decision.keeps_fetched, decision.replicates


def place_of(decision: BlockDecision) -> tuple[object, ...]:
    """The part of a decision that is about parameters and optimizer states, without the prefetch distance."""
    return *params_of(decision), *states_of(decision)


def activation_choices(problem: Problem, block: int) -> tuple[BlockDecision, ...]:
    """The treatments that a block's activations may get, as decisions that say no more."""
    cost = problem.costs[block]
    activations: list[tuple[Activations, int | None]] = [(Activations.KEEP, None)]
    if problem.training and problem.allow_recompute and cost.boundary_bytes < cost.saved_bytes:
        activations.append((Activations.RECOMPUTE, None))
    if problem.training and problem.allow_recompute:
        activations.extend((kind, None) for kind, _ in cost.partial)
    if problem.training and problem.allow_offload_activations and cost.offloadable:
        activations.extend((Activations.OFFLOAD, count) for count in (None, *_offloaded_counts(problem, block)))
    return tuple(BlockDecision(activations=kind, num_offloaded=count) for kind, count in activations)


def place_choices(problem: Problem, block: int) -> tuple[BlockDecision, ...]:
    """Where a block's parameters and optimizer states may be, as decisions that keep all activations."""
    cost = problem.costs[block]
    keeps = problem.training and problem.allow_keeping_fetched
    params = [(Params.DEVICE, False, False)]
    if keeps and whole_of(problem, block).gathered_again:
        params.append((Params.DEVICE, True, False))
    if problem.training and problem.allow_replicating and whole_of(problem, block).gathered:
        params.append((Params.DEVICE, False, True))
    optimizer: list[tuple[Optimizer, int | None, Optimizer]] = [(Optimizer.DEVICE, None, Optimizer.DEVICE)]
    if problem.allow_host_params and cost.param_bytes:
        params.append((Params.HOST, False, False))
        if keeps:
            params.append((Params.HOST, True, False))
    if problem.training and problem.allow_host_optimizer and cost.optimizer_bytes + cost.grad_bytes:
        places = [Optimizer.HOST]
        if problem.allow_streamed_optimizer and cost.optimizer_bytes:
            places.append(Optimizer.STREAMED)
        if problem.allow_disk_optimizer and cost.optimizer_bytes and problem.machine.disk_bytes_per_s:
            places.append(Optimizer.DISK)
        parts = _moved_counts(cost) if problem.allow_moving_some_states else ()
        optimizer.extend((place, count, Optimizer.DEVICE) for place in places for count in (None, *parts))
        optimizer.extend((Optimizer.HOST, count, place) for place in places[1:] for count in parts)
        optimizer.extend((place, count, Optimizer.HOST) for place in places[1:] for count in parts[:1])
    pinned = problem.fixed_decisions[block] if problem.fixed_decisions else None
    if pinned is not None:
        params = [each for each in params if each[0] is pinned.params] or [(pinned.params, False, False)]
        optimizer = [(pinned.optimizer, pinned.num_moved_states, pinned.other_states)]
    return tuple(
        BlockDecision(
            params=place,
            keeps_fetched=kept,
            replicates=replicates,
            optimizer=home,
            num_moved_states=count,
            other_states=other,
        )
        for place, kept, replicates in params
        for home, count, other in optimizer
    )


def _offloaded_counts(problem: Problem, block: int) -> tuple[int, ...]:
    """How many tensors to offload where not all leave: about half of the bytes, and what hides under a usual forward."""
    cost, machine = problem.costs[block], problem.machine
    usual_s = sum(each.forward_s for each in problem.costs) / len(problem.costs)
    hidden = (usual_s - machine.latency_s) * machine.d2h_bytes_per_s
    counts = range(1, len(cost.offloadable))
    half = [n for n in counts if 2 * cost.offloaded_bytes(n) >= cost.offloaded_bytes()][:1]
    hiding = [n for n in counts if cost.offloaded_bytes(n) <= hidden][-1:]
    return tuple(sorted({*half, *hiding}))


def _moved_counts(cost: BlockCost) -> tuple[int, ...]:
    """Of how many trainable parameters to move the states where not all are: about an eighth, a third, two thirds."""
    counts = range(1, len(cost.trained))
    if not counts:
        return ()
    return tuple(
        sorted(
            {
                min(counts, key=lambda n, p=part: abs(sum(cost.trained[:n]) - p * cost.num_params))
                for part in _MOVED_SHARES
            }
        )
    )


_MOVED_SHARES = (1 / 8, 1 / 3, 2 / 3)


def copies(decision: BlockDecision) -> bool:
    """Whether the block's prefetch distance means anything: something of it is copied."""
    return (
        decision.params is Params.HOST
        or decision.activations is Activations.OFFLOAD
        or decision.optimizer is not Optimizer.DEVICE
    )
