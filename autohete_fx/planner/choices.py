"""What a block may be decided to, and what each decision takes: in come a problem and a block, out come seconds and bytes.

Both the integer program (`formulation`) and the search (`improve`) are made of these figures. The simulator is not: it
walks the runtime's program by itself and judges both.
"""

import functools
from collections.abc import Sequence
from dataclasses import dataclass, replace
from operator import attrgetter

import numpy as np
from numpy.typing import NDArray

from autohete_fx.ir import (
    Activations,
    BlockCost,
    BlockDecision,
    Lane,
    Optimizer,
    Overlap,
    Params,
    Problem,
    staging_bytes,
)
from autohete_fx.planner.figures import (
    copy_s,
    device_update_s,
    host_update_s,
    moved_params,
    overlap_of,
    uploaded_bytes,
)

Bytes = NDArray[np.int64]

MAX_PREFETCH_DISTANCE = 4
COPY_WEIGHT = 1 / 512
"""What a second of copying counts against a second of the step, so that of plans that are as fast the one that copies
least is chosen. The two copying lanes work for two seconds in a second at most: for this a plan is at most 1/256 slower."""


def choices(problem: Problem, block: int) -> tuple[BlockDecision, ...]:
    """Every decision that a block may get, at prefetch distance 1; the one that moves nothing comes first."""
    treated, placed = activation_choices(problem, block), place_choices(problem, block)
    return tuple(joined(activations, place) for activations in treated for place in placed)


def joined(activations: BlockDecision, place: BlockDecision) -> BlockDecision:
    """What one decision says about activations and another about everything else."""
    return replace(place, activations=activations.activations, num_offloaded=activations.num_offloaded)


def activation_choices(problem: Problem, block: int) -> tuple[BlockDecision, ...]:
    """What may happen to a block's activations, as decisions that say no more."""
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
    params = [(Params.DEVICE, False)]
    optimizer: list[tuple[Optimizer, int | None]] = [(Optimizer.DEVICE, None)]
    if problem.allow_host_params and cost.param_bytes:
        params.append((Params.HOST, False))
        if problem.training and problem.allow_keeping_fetched:
            params.append((Params.HOST, True))
    if problem.training and problem.allow_host_optimizer and cost.optimizer_bytes + cost.grad_bytes:
        places = [Optimizer.HOST]
        if problem.allow_streamed_optimizer and cost.optimizer_bytes:
            places.append(Optimizer.STREAMED)
        if problem.allow_disk_optimizer and cost.optimizer_bytes and problem.machine.disk_bytes_per_s:
            places.append(Optimizer.DISK)
        parts = (None, *(_moved_counts(cost) if problem.allow_moving_some_states else ()))
        optimizer.extend((place, count) for place in places for count in parts)
    pinned = problem.fixed_decisions[block] if problem.fixed_decisions else None
    if pinned is not None:
        params = [(place, kept) for place, kept in params if place is pinned.params] or [(pinned.params, False)]
        optimizer = [(pinned.optimizer, pinned.num_moved_states)]
    return tuple(
        BlockDecision(params=place, keeps_fetched=kept, optimizer=home, num_moved_states=moved)
        for place, kept in params
        for home, moved in optimizer
    )


def _offloaded_counts(problem: Problem, block: int) -> tuple[int, ...]:
    """How many tensors to offload where not all leave: about half of the bytes, and what hides behind a usual forward."""
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
                min(counts, key=lambda n, p=part: abs(cost.moved_params(n) - p * cost.num_params))
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
        forward_down, backward_down: copies down that a pass makes: offloaded activations, in backward gradients.
        update_work, update_up, update_down: of the pass that waits for updates, on top of a forward where it is one:
            on compute a streamed update, up its states or an upload, down its states.
        upload: of ``update_up``, what was updated on the host: where updates start in backward it waits for no pass.
        device_update, host_update: updates on compute of states that are there, and on the update lane.
    """

    forward_work: float
    forward_up: float
    forward_down: float
    backward_work: float = 0.0
    backward_up: float = 0.0
    backward_down: float = 0.0
    update_work: float = 0.0
    update_up: float = 0.0
    update_down: float = 0.0
    upload: float = 0.0
    device_update: float = 0.0
    host_update: float = 0.0

    def copies(self, passes: int) -> float:
        """All copies of a step with so many passes forward and backward."""
        in_passes = self.forward_up + self.forward_down + self.backward_up + self.backward_down
        return passes * in_passes + self.update_up + self.update_down


DURATIONS = attrgetter(*Durations.__dataclass_fields__)
"""All of them as a tuple; `dataclasses.astuple` copies, which for thousands of decisions is most of the work."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PassKind:
    """What a pass does: whether it takes blocks in reverse, and which durations it takes on compute, up and down."""

    reverse: bool
    work: tuple[str, ...]
    up: tuple[str, ...]
    down: tuple[str, ...]


FORWARD_PASS = PassKind(reverse=False, work=("forward_work",), up=("forward_up",), down=("forward_down",))
BACKWARD_PASS = PassKind(reverse=True, work=("backward_work",), up=("backward_up",), down=("backward_down",))
UPDATES_PASS = PassKind(reverse=False, work=("update_work",), up=("update_up",), down=("update_down",))
FORWARD_AND_UPDATES_PASS = PassKind(
    reverse=False,
    work=("forward_work", "update_work"),
    up=("forward_up", "update_up"),
    down=("forward_down", "update_down"),
)


def durations(problem: Problem, block: int, decision: BlockDecision) -> Durations:
    """What a block's work takes."""
    cost, machine = problem.costs[block], problem.machine

    up_s, down_s = (functools.partial(copy_s, machine, lane) for lane in (Lane.H2D, Lane.D2H))
    fetch_s = up_s(cost.param_bytes, cost.num_param_tensors) if decision.params is Params.HOST else 0.0
    if not problem.training:
        return Durations(
            forward_work=cost.forward_s + machine.copy_share * fetch_s, forward_up=fetch_s, forward_down=0.0
        )
    on_host, streamed = decision.updates_on_host, decision.optimizer is Optimizer.STREAMED
    offloads, tensors = decision.activations is Activations.OFFLOAD, cost.offloaded_tensors(decision.num_offloaded)
    offloaded = cost.offloaded_bytes(decision.num_offloaded) if offloads else 0
    offload_s = down_s(offloaded, tensors)
    backward_up_s = up_s(offloaded, tensors) + (0.0 if decision.keeps_fetched else fetch_s)
    count, moved = decision.num_moved_states, moved_params(cost, decision)
    gradients_s = down_s(cost.moved_part(cost.grad_bytes, count), cost.moved_tensors(count)) if on_host else 0.0
    upload_s = up_s(uploaded_bytes(cost, decision))
    states = cost.moved_part(cost.optimizer_bytes, count) if streamed else 0
    return Durations(
        forward_work=cost.forward_s + machine.copy_share * (fetch_s + offload_s),
        forward_up=fetch_s,
        forward_down=offload_s,
        backward_work=cost.backward_s
        + cost.again_s(decision.activations)
        + machine.copy_share * (backward_up_s + gradients_s),
        backward_up=backward_up_s,
        backward_down=gradients_s,
        update_work=device_update_s(problem, block, decision, moved) if streamed else 0.0,
        update_up=upload_s + up_s(states),
        update_down=down_s(states),
        upload=upload_s,
        device_update=device_update_s(problem, block, decision, cost.num_params - moved),
        host_update=host_update_s(problem, block, decision) if moved and on_host else 0.0,
    )


def device_bytes(problem: Problem, block: int, decision: BlockDecision) -> Bytes:
    """What a block holds on the device in every span, at the decision's own prefetch distance.

    Spans are the pieces of work of blocks 0..n-1 in a pass, pass after pass: the first forward of a step, which under an
    overlapping schedule waits for updates; in training the last backward; with several micro-batches a forward of a
    later one, where gradients are there already; and where states may be streamed, the pass of the updates, of which an
    overlapping schedule has only the begin. In the last micro-batch's backward its gradients come on top of accumulated ones.
    """
    if not problem.training:
        return _inference_bytes(problem, block, decision)
    return np.concatenate(_Use(problem, block, decision).passes())


def streaming_peak_bytes(problem: Problem, decisions: Sequence[BlockDecision]) -> int:
    """The most device memory in use while states are streamed: in the forward that waits for them, or by themselves. 0 where
    none are."""
    streamed = [block for block, d in enumerate(decisions) if d.optimizer is Optimizer.STREAMED]
    if not streamed or not problem.training:
        return 0
    uses = [_Use(problem, block, decision) for block, decision in enumerate(decisions)]
    passes = [np.sum([use.update_pass() for use in uses], axis=0)]
    if overlap_of(problem) is not Overlap.NONE:
        passes = [passes[0][:1], np.sum([use.first_pass() for use in uses], axis=0)[: streamed[-1] + 1]]
    return problem.fixed_bytes + int(np.concatenate(passes).max())


class _Use:
    """Device bytes of one block under one decision, pass by pass."""

    def __init__(self, problem: Problem, block: int, decision: BlockDecision) -> None:
        self.problem, self.block, self.decision = problem, block, decision
        self.cost, self.num_blocks = problem.costs[block], len(problem.costs)
        self.first = max(0, block - decision.prefetch_distance)
        self.last = min(self.num_blocks - 1, block + decision.prefetch_distance)
        cost, moves = self.cost, decision.optimizer is not Optimizer.DEVICE
        moved_states, moved_gradients = (
            cost.moved_part(num_bytes, decision.num_moved_states) if moves else 0
            for num_bytes in (cost.optimizer_bytes, cost.grad_bytes)
        )
        self.fetched = cost.param_bytes if decision.params is Params.HOST else 0
        self.always = cost.param_bytes - self.fetched + cost.optimizer_bytes - moved_states
        streamed = decision.optimizer is Optimizer.STREAMED
        self.streamed_gradients, self.staging = (moved_gradients, staging_bytes(moved_states)) if streamed else (0, 0)
        self.staying = cost.grad_bytes if streamed else cost.grad_bytes - moved_gradients
        self.accumulated = self.staying if problem.micro_batches > 1 else 0
        # What the block's activations hold after its forward, while they leave, in between, and once they are due back.
        self.held = self.around = cost.held_bytes(decision.activations)
        if decision.activations is Activations.OFFLOAD:
            self.held -= cost.offloaded_bytes(decision.num_offloaded)

    def passes(self) -> list[Bytes]:
        overlaps = overlap_of(self.problem) is not Overlap.NONE
        found = [self.first_pass() if overlaps else self._forward(), self._backward()]
        if self.problem.micro_batches > 1:
            found.append(self._forward() + self.accumulated)
        if self.problem.allow_streamed_optimizer:
            found.append(self.update_pass()[: 1 if overlaps else None])
        return found

    def first_pass(self) -> Bytes:
        """The forward that waits for updates."""
        return self._forward() + self._updates()

    def update_pass(self) -> Bytes:
        """The updates by themselves."""
        return self.always + self.staying - self.streamed_gradients + self._updates()

    def _forward(self) -> Bytes:
        use = np.full(self.num_blocks, self.always, dtype=np.int64)
        use[self.first : self.num_blocks if self.decision.keeps_fetched else self.block + 1] += self.fetched
        use[self.block] += self.cost.saved_bytes + self.cost.forward_workspace_bytes
        use[self.block + 1 : self.last + 1] += self.around
        use[self.last + 1 :] += self.held
        return use

    def _updates(self) -> Bytes:
        """Of a streamed update: its gradients until then, and until all are done its part of what states pass through."""
        use = np.full(self.num_blocks, self.staging, dtype=np.int64)
        use[: self.block + 1] += self.streamed_gradients
        return use

    def _backward(self) -> Bytes:
        block, last = self.block, self.last
        use = np.full(self.num_blocks, self.always + self.accumulated, dtype=np.int64)
        use[block : self.num_blocks if self.decision.keeps_fetched else last + 1] += self.fetched
        use[block] += self.cost.saved_bytes + self.cost.backward_workspace_bytes
        use[block + 1 : last + 1] += self.around
        use[last + 1 :] += self.held
        use[: block + 1] += self.staying
        use[self.first : block + 1] += self.cost.grad_bytes - self.staying
        return use


def _inference_bytes(problem: Problem, block: int, decision: BlockDecision) -> Bytes:
    cost, at = problem.costs[block], np.arange(len(problem.costs))
    fetched = cost.param_bytes if decision.params is Params.HOST else 0
    always = cost.param_bytes - fetched + (cost.optimizer_bytes if decision.optimizer is Optimizer.DEVICE else 0)
    use = np.full(len(at), always, dtype=np.int64)
    use[max(0, block - decision.prefetch_distance) : block + 1] += fetched
    use[block] += cost.saved_bytes + cost.forward_workspace_bytes
    reader = max((edge.consumer for edge in problem.edges if edge.producer == block), default=len(at))
    use[(block < at) & (at <= reader)] += cost.boundary_bytes
    return use
