"""Device memory under each decision: in come blocks and decisions, out come the bytes that each holds while any block runs.

The bytes that a block holds depend on its own decision alone, so those of all blocks are a sum. The simulator does not use these
figures: it holds and frees buffers by itself, and judges them.
"""

from collections.abc import Sequence
from dataclasses import dataclass, fields

import numpy as np
from numpy.typing import NDArray

from autohete_fx.ir import (
    BlockCost,
    BlockDecision,
    Optimizer,
    Overlap,
    Params,
    Problem,
    staging_bytes,
)
from autohete_fx.ir.decision import GATHER_DISTANCE
from autohete_fx.planner.model.choices import place_of, treatment_of
from autohete_fx.planner.model.figures import last_readers, overlap_of, replicated_bytes, waiting_bytes, whole_of

Bytes = NDArray[np.int64]


def device_bytes(problem: Problem, blocks: Sequence[int], decisions: Sequence[BlockDecision]) -> Bytes:
    """Device bytes of blocks in every span, each under the decision at its place, at its own prefetch distance: by
    place and span.

    Spans are the pieces of work of blocks 0..n-1 in a pass, pass after pass. First comes the first forward of a step, which
    under an overlapping schedule waits for updates. In training the last backward follows. With several micro-batches there is
    a forward of a later one, where gradients are there already. Where states may be streamed or updates need a workspace, the
    pass of the updates comes last. An overlapping schedule has only the begin of it. Slots for whole parameters are there in every
    plan where any may be streamed. In the last micro-batch's backward its gradients come on top of accumulated ones. All passes
    but the first forward and the updates have the other micro-batches in flight beside them.
    """
    use = _Use(problem, blocks, decisions)
    if not problem.training:
        return use.inference()
    overlaps = overlap_of(problem) is not Overlap.NONE
    passes = [use.first_pass() if overlaps else use.forward(), use.backward()]
    if problem.micro_batches > 1:
        passes.append(use.forward() + (use.held.accumulated + use.held.waiting)[:, None])
    if problem.allow_streamed_optimizer or problem.update_workspace_bytes:
        passes.append(use.update_pass()[:, : 1 if overlaps else None])
    return np.concatenate(passes, axis=1)


def streaming_peak_bytes(problem: Problem, decisions: Sequence[BlockDecision]) -> int:
    """The most device memory in use while states are streamed: in the forward that waits for them, or by themselves. 0 where
    none are."""
    streamed = [block for block, d in enumerate(decisions) if d.streams]
    if not streamed or not problem.training:
        return 0
    use = _Use(problem, range(len(decisions)), decisions)
    passes = [use.update_pass().sum(axis=0)]
    if overlap_of(problem) is not Overlap.NONE:
        first = use.first_pass().sum(axis=0)
        passes = [passes[0][:1], first[: streamed[-1] + 1]]
    return problem.fixed_bytes + int(np.concatenate(passes).max())


@dataclass(frozen=True, slots=True)
class _Held:
    """What blocks hold, whatever their prefetch distances: bytes of one, or of several as arrays.

    Attributes:
        always: parameters, replicated ones included, and optimizer states that are always there.
        fetched: parameters, from when they are fetched on; of a block that gathers, its shard.
        gathered, gathered_again: whole parameters in forward, and in backward, where they may have been kept; 0 where they are
            replicated.
        reduced: whole gradients.
        in_forward, in_backward: activations and workspace while the block runs.
        around, held: activations while they leave and once they are due back; in between.
        waiting: of the other micro-batches in flight.
        boundary: of the activations, what other blocks read.
        gradients, staying, accumulated: all gradients; those that stay until the step; of these, those on top of which others
            come.
        streamed_gradients, staging: gradients of streamed states, and what these pass through.
    """

    always: Bytes
    fetched: Bytes
    gathered: Bytes
    gathered_again: Bytes
    reduced: Bytes
    in_forward: Bytes
    in_backward: Bytes
    around: Bytes
    held: Bytes
    waiting: Bytes
    boundary: Bytes
    gradients: Bytes
    staying: Bytes
    accumulated: Bytes
    streamed_gradients: Bytes
    staging: Bytes


def _held(problem: Problem, block: int, decision: BlockDecision) -> tuple[int, ...]:
    """The bytes of `_Held` for one block, in its order."""
    cost, whole = problem.costs[block], whole_of(problem, block)
    fetched = cost.param_bytes if decision.params is Params.HOST else 0
    activations = cost.activations(decision)
    staying = cost.part_at(cost.grad_bytes, decision, Optimizer.DEVICE, Optimizer.STREAMED)
    replicated = replicated_bytes(problem, block, decision)
    again = whole.gathered if decision.keeps_fetched else whole.gathered_again
    return (
        cost.param_bytes - fetched + cost.states_at(decision, Optimizer.DEVICE) + replicated,
        fetched,
        0 if replicated else whole.gathered,
        0 if replicated else again,
        whole.reduced,
        cost.saved_bytes + cost.forward_workspace_bytes,
        cost.saved_bytes + cost.backward_workspace_bytes,
        activations.held_bytes,
        activations.staying_bytes,
        waiting_bytes(problem, block, decision),
        cost.boundary_bytes,
        cost.grad_bytes,
        staying,
        staying if problem.accumulates else 0,
        cost.part_at(cost.grad_bytes, decision, Optimizer.STREAMED),
        staging_bytes(cost.states_at(decision, Optimizer.STREAMED)),
    )


class _Use:
    """Device bytes of blocks under decisions, by place and block that runs, pass by pass."""

    def __init__(self, problem: Problem, blocks: Sequence[int], decisions: Sequence[BlockDecision]) -> None:
        self.problem, self.num_blocks = problem, len(problem.costs)
        self.streams = problem.allow_streamed_optimizer or any(decision.streams for decision in decisions)
        numbers: dict[BlockCost, int] = {}  # identical blocks hold the same
        number_of = [numbers.setdefault(cost, len(numbers)) for cost in problem.costs]
        known: dict[tuple[object, ...], tuple[int, ...]] = {}
        rows = []
        for block, decision in zip(blocks, decisions, strict=True):
            key = number_of[block], *treatment_of(decision), *place_of(decision)  # all but the distance
            if key not in known:
                known[key] = _held(problem, block, decision)
            rows.append(known[key])
        columns = np.array(rows, dtype=np.int64).reshape(len(rows), len(fields(_Held))).T
        self.held = _Held(*columns)
        self.block = np.array(blocks, dtype=np.int64)
        held, last = self.held, self.num_blocks - 1
        distance = np.array([decision.prefetch_distance for decision in decisions], dtype=np.int64)
        ahead, again, late = (
            GATHER_DISTANCE * (each > 0) for each in (held.gathered, held.gathered_again, held.reduced)
        )
        # Where what is issued or waited for at its distance is: copies up and down, and where collectives read or make them.
        self.last = np.minimum(last, self.block + distance)
        self.fetch, self.fetch_again = np.maximum(0, self.block - distance - ahead), np.minimum(last, self.last + again)
        self.home = np.maximum(0, self.block - distance - late)
        # Where gathers are issued, and reduces waited for, from when on the shard's gradients are there.
        self.before, self.after = np.maximum(0, self.block - GATHER_DISTANCE), self.block + 1
        self.gather_again = np.minimum(last, self.block + GATHER_DISTANCE)
        self.made = np.where(late & (self.block > 0), self.block, self.after)
        self.kept = np.array([decision.keeps_fetched for decision in decisions], dtype=bool)
        self.shard_kept = self.kept & (held.gathered == 0)

    def first_pass(self) -> Bytes:
        """The forward that waits for updates."""
        return self.forward() + self._updates()

    def update_pass(self) -> Bytes:
        """The updates by themselves."""
        held = self.held
        workspace = self.problem.update_workspace_bytes * (self.block == 0)  # once, in every plan
        return (held.always + held.staying - held.streamed_gradients + workspace)[:, None] + self._updates()

    def forward(self) -> Bytes:
        """A forward that waits for nothing."""
        held, after, end = self.held, self.after, self.num_blocks
        return self._from(
            (0, held.always),
            (self.fetch, held.fetched),
            (np.where(self.shard_kept, end, after), -held.fetched),
            (self.before, held.gathered),
            (np.where(self.kept, end, after), -held.gathered),
            (self.block, held.in_forward),
            (after, held.around - held.in_forward),
            (self.last + 1, held.held - held.around),
        )

    def backward(self) -> Bytes:
        """The last micro-batch's backward, on top of accumulated gradients."""
        held, after, end = self.held, self.after, self.num_blocks
        fetched = np.where(self.kept & ~self.shard_kept, 0, held.fetched)
        return self._from(
            (0, held.always + held.accumulated + held.staying + held.waiting),
            (self.block, fetched),
            (np.where(self.shard_kept, end, self.fetch_again + 1), -fetched),
            (self.block, held.gathered_again),
            (np.where(self.kept, end, self.gather_again + 1), -held.gathered_again),
            (self.before, held.reduced),
            (after, -held.reduced),
            (self.block, held.in_backward),
            (after, held.around - held.in_backward),
            (self.last + 1, held.held - held.around),
            (self.home, held.gradients - held.staying),
            (self.made, -held.gradients),
        )

    def inference(self) -> Bytes:
        """A forward without a backward, where what no other block reads goes at once."""
        held, after = self.held, self.after
        readers = last_readers(self.problem)
        read = np.array([readers.get(int(block), self.num_blocks - 1) for block in self.block])
        return self._from(
            (0, held.always),
            (self.fetch, held.fetched),
            (self.before, held.gathered),
            (after, held.boundary - held.fetched - held.gathered - held.in_forward),
            (self.block, held.in_forward),
            (read + 1, -held.boundary),
        )

    def _updates(self) -> Bytes:
        """Of a streamed update: its gradients until then, and until all are done its part of what states pass through."""
        streamed, slots = self.held.streamed_gradients, self.streams * self.problem.slot_bytes
        staging = self.held.staging + slots * (self.block == 0)
        return self._from((0, staging + streamed), (self.block + 1, -streamed))

    def _from(self, *changes: tuple[Bytes | int, Bytes]) -> Bytes:
        """Bytes over a pass, given by how many they change where: from which block on, in the order of the forward."""
        places = np.arange(len(self.block))
        use = np.zeros((len(places), self.num_blocks + 1), dtype=np.int64)
        for at, num_bytes in changes:
            use[places, at] += num_bytes
        return np.cumsum(use, axis=1)[:, :-1]
