"""The decisions that a block may get, and the seconds of each: in come a problem and a block, out come decisions and seconds.

Both the integer program (`formulation`) and the search (`improve`) are made of these figures, and of those of `device_use`.
The simulator is not: it walks the runtime's program by itself and judges both.
"""

import functools
from dataclasses import dataclass, replace
from operator import attrgetter

from autohete_fx.ir import (
    Activations,
    BlockCost,
    BlockDecision,
    Lane,
    Optimizer,
    Params,
    Problem,
)
from autohete_fx.planner.model.figures import (
    UPDATED_ON_HOST,
    average_s,
    collective_s,
    copy_s,
    device_update_s,
    host_update_s,
    streamed_bytes,
    uploaded_bytes,
    whole_of,
)

MAX_PREFETCH_DISTANCE = 4
COPY_WEIGHT = 1 / 512
"""The weight of a second of copying against a second of the step.

Among plans that are as fast, the one that copies least is chosen; collectives count like copies. The lanes that move something
work for three seconds in a second at most: for this a plan is at most 3/512 slower."""


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


def place_of(decision: BlockDecision) -> tuple[object, ...]:
    """The part of a decision that is about parameters and optimizer states, without the prefetch distance."""
    return decision.params, decision.keeps_fetched, *states_of(decision)


def activation_choices(problem: Problem, block: int) -> tuple[BlockDecision, ...]:
    """The treatments that a block's activations may get, as decisions that say no more."""
    cost = problem.costs[block]
    activations: list[tuple[Activations, int | None]] = [(Activations.KEEP, None)]
    if problem.training and problem.allow_recompute and cost.boundary_bytes < cost.saved_bytes:
        activations.append((Activations.RECOMPUTE, None))
    if problem.training and problem.allow_recompute and cost.selective is not None:
        activations.append((Activations.SELECTIVE, None))
    if problem.training and problem.allow_offload_activations and cost.offloadable:
        activations.extend((Activations.OFFLOAD, count) for count in (None, *_offloaded_counts(problem, block)))
    return tuple(BlockDecision(activations=kind, num_offloaded=count) for kind, count in activations)


def place_choices(problem: Problem, block: int) -> tuple[BlockDecision, ...]:
    """Where a block's parameters and optimizer states may be, as decisions that keep all activations."""
    cost = problem.costs[block]
    keeps = problem.training and problem.allow_keeping_fetched
    params = [(Params.DEVICE, False)]
    if keeps and whole_of(problem, block).gathered_again:
        params.append((Params.DEVICE, True))
    optimizer: list[tuple[Optimizer, int | None, Optimizer]] = [(Optimizer.DEVICE, None, Optimizer.DEVICE)]
    if problem.allow_host_params and cost.param_bytes:
        params.append((Params.HOST, False))
        if keeps:
            params.append((Params.HOST, True))
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
        params = [(place, kept) for place, kept in params if place is pinned.params] or [(pinned.params, False)]
        optimizer = [(pinned.optimizer, pinned.num_moved_states, pinned.other_states)]
    return tuple(
        BlockDecision(params=place, keeps_fetched=kept, optimizer=home, num_moved_states=count, other_states=other)
        for place, kept in params
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


@dataclass(frozen=True, slots=True, kw_only=True)
class Durations:
    """Seconds of one block's work under one decision, by lane.

    Attributes:
        forward_work, backward_work: on compute, recomputation included.
        forward_up, backward_up: copies up that a pass needs: parameters, in backward also reloaded activations.
        reload, fetch_again: of ``backward_up``, activations and parameters.
        forward_down, backward_down: copies down that a pass makes: offloaded activations, in backward gradients.
        update_work, update_up, update_down: seconds of the pass that waits for updates, on top of a forward where it is one. On
            compute it is a streamed update, up what it streams or an upload, down what it streams.
        upload, states: of ``update_up``, what was updated on the host, and what is streamed.
        forward_gather, backward_gather, reduce: on net, the last of them in backward.
        device_update, host_update: updates on compute of states that are there, and on the update lane.
        average: of gradients over replicas, before all updates.
    """

    forward_work: float
    forward_up: float
    forward_down: float
    backward_work: float = 0.0
    backward_up: float = 0.0
    backward_down: float = 0.0
    reload: float = 0.0
    fetch_again: float = 0.0
    update_work: float = 0.0
    update_up: float = 0.0
    update_down: float = 0.0
    upload: float = 0.0
    states: float = 0.0
    device_update: float = 0.0
    host_update: float = 0.0
    forward_gather: float = 0.0
    backward_gather: float = 0.0
    reduce: float = 0.0
    average: float = 0.0

    def copies(self, passes: int) -> float:
        """All copies and collectives of a step with so many passes forward and backward."""
        in_passes = sum(getattr(self, name) for name in MOVED_IN_PASSES)
        return passes * in_passes + self.update_up + self.update_down + self.average


MOVED_IN_PASSES = (
    "forward_up",
    "forward_down",
    "backward_up",
    "backward_down",
    "forward_gather",
    "backward_gather",
    "reduce",
)
"""The durations of every pass in which something is moved."""
DURATIONS = attrgetter(*Durations.__dataclass_fields__)
"""All of them as a tuple; `dataclasses.astuple` copies, which for thousands of decisions is most of the work."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PassKind:
    """A kind of pass: whether it takes blocks in reverse, and which durations it takes on which lane.

    Attributes:
        work, up, down: on compute, up and down.
        gather, reduce: on net, before the block's work and after it.
        own: of ``up``, what a block that gathers waits for itself; its gather waits for ``ahead``.
        work_ahead: of ``work``, what a block does before it gathers.
    """

    reverse: bool
    work: tuple[str, ...]
    up: tuple[str, ...]
    down: tuple[str, ...]
    gather: tuple[str, ...] = ()
    reduce: tuple[str, ...] = ()
    own: tuple[str, ...] = ()
    ahead: tuple[str, ...] = ()
    work_ahead: tuple[str, ...] = ()


FORWARD_PASS = PassKind(
    reverse=False,
    work=("forward_work",),
    up=("forward_up",),
    down=("forward_down",),
    gather=("forward_gather",),
    ahead=("forward_up",),
)
BACKWARD_PASS = PassKind(
    reverse=True,
    work=("backward_work",),
    up=("backward_up",),
    down=("backward_down",),
    gather=("backward_gather",),
    reduce=("reduce",),
    own=("reload",),
    ahead=("fetch_again",),
)
UPDATES_PASS = PassKind(reverse=False, work=("update_work",), up=("update_up",), down=("update_down",))
FORWARD_AND_UPDATES_PASS = PassKind(
    reverse=False,
    work=("forward_work", "update_work"),
    up=("forward_up", "update_up"),
    down=("forward_down", "update_down"),
    gather=("forward_gather",),
    ahead=("forward_up", "update_up"),
    work_ahead=("update_work",),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Slots:
    """The durations of one block in a pass, by the order in which the program has them, names as in `Durations`.

    Attributes:
        ahead: copies up that its gather waits for, a block before the block itself.
        work_ahead: work before the gather; ``work_first`` where it has none, which others' gathers wait for.
        gather: on net, for which the block waits.
        up: copies up that the block itself waits for.
        work: on compute.
        reduce: on net, waited for a block later.
        down: copies down after the work; ``late`` where they wait for the reduce.
    """

    ahead: tuple[str, ...]
    work_ahead: tuple[str, ...]
    gather: tuple[str, ...]
    work_first: tuple[str, ...]
    up: tuple[str, ...]
    work: tuple[str, ...]
    reduce: tuple[str, ...]
    down: tuple[str, ...]
    late: tuple[str, ...]

    @property
    def gathers(self) -> bool:
        """Whether the block gathers in this pass, unless what it gathered is kept."""
        return bool(self.gather)

    @property
    def reduces(self) -> bool:
        """Whether it reduces in this pass."""
        return bool(self.reduce)


def slots_of(problem: Problem, block: int, kind: PassKind) -> Slots:
    """The order of a block's work in a pass: the one statement of what collectives put ahead and what they make late."""
    whole = whole_of(problem, block)
    gathers = bool(kind.gather) and (whole.gathered_again if kind.reverse else whole.gathered) > 0
    reduces = bool(kind.reduce) and whole.reduced > 0
    return Slots(
        ahead=kind.ahead if gathers else (),
        work_ahead=kind.work_ahead if gathers else (),
        gather=kind.gather if gathers else (),
        work_first=() if gathers else kind.work_ahead,
        up=kind.own if gathers else kind.up,
        work=tuple(name for name in kind.work if name not in kind.work_ahead),
        reduce=kind.reduce if reduces else (),
        down=() if reduces else kind.down,
        late=kind.down if reduces else (),
    )


def durations(problem: Problem, block: int, decision: BlockDecision) -> Durations:
    """The seconds of a block's work."""
    cost, machine = problem.costs[block], problem.machine

    up_s, down_s = (functools.partial(copy_s, machine, lane) for lane in (Lane.H2D, Lane.D2H))
    fetch_s = up_s(cost.param_bytes, cost.num_param_tensors) if decision.params is Params.HOST else 0.0
    whole = whole_of(problem, block)
    gather_s = collective_s(problem, whole.gathered)
    if not problem.training:
        return Durations(
            forward_work=cost.forward_s + machine.copy_share * fetch_s,
            forward_up=fetch_s,
            forward_down=0.0,
            forward_gather=gather_s,
        )
    activations = cost.activations(decision)
    offloaded = activations.offloaded_bytes, activations.offloaded_tensors
    offload_s = down_s(*offloaded)
    reload_s, fetch_again_s = up_s(*offloaded), 0.0 if decision.keeps_fetched else fetch_s
    backward_up_s = reload_s + fetch_again_s
    gradient_bytes = cost.part_at(cost.grad_bytes, decision, *UPDATED_ON_HOST)
    gradients_s = down_s(gradient_bytes, cost.tensors_at(decision, *UPDATED_ON_HOST))
    upload_s, states_s = up_s(uploaded_bytes(cost, decision)), up_s(streamed_bytes(cost, decision))
    return Durations(
        forward_work=cost.forward_s + machine.copy_share * (fetch_s + offload_s),
        forward_up=fetch_s,
        forward_down=offload_s,
        backward_work=cost.backward_s + activations.recompute_s + machine.copy_share * (backward_up_s + gradients_s),
        backward_up=backward_up_s,
        backward_down=gradients_s,
        reload=reload_s,
        fetch_again=fetch_again_s,
        update_work=device_update_s(problem, block, decision, Optimizer.STREAMED),
        update_up=upload_s + states_s,
        update_down=down_s(streamed_bytes(cost, decision)),
        upload=upload_s,
        states=states_s,
        device_update=device_update_s(problem, block, decision, Optimizer.DEVICE),
        host_update=host_update_s(problem, block, decision) if cost.num_params else 0.0,
        forward_gather=gather_s,
        backward_gather=0.0 if decision.keeps_fetched else collective_s(problem, whole.gathered_again),
        reduce=collective_s(problem, whole.reduced),
        average=average_s(problem, block, decision),
    )
