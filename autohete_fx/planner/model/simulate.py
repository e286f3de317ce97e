"""Replay of one optimizer step under given decisions: in come a problem and decisions, out come its time and memory.

The replay walks the program that the runtime executes, in its order. It knows nothing of the integer program in `formulation`:
it judges that program's plans. One optimizer step is ``micro_batches`` forward and backward passes and the optimizer's updates.
The replay is of a step in steady state, in the middle of many that are alike.

Time. Lanes work in order. The compute lane runs blocks; at fixed points of its program it *issues* copies to the lanes
h2d and d2h and *waits* for them. A copy starts when it is issued, what it copies is there, and its lane has done all
that was issued before; it takes ``tensors * latency_s + bytes / bandwidth``. Copies of nothing are not issued. A streamed
matrix is taken to be updated on the lane that copied its states up, before that copies on.

    forward of b      issue the copies up due now; wait for b's; compute; issue b's offload; wait for the copies down due
    backward of b     issue the fetches and reloads due now; wait for b's; recompute; compute; issue b's gradients to
                      their home; wait for the gradients due
    mean              where there are replicas: lane net averages all gradients, and all else waits
    updates           those on the device, in block order, on compute; those on the host on the update lane; a block that
                      was updated on the host and whose parameters are on the device is *uploaded* on h2d; streamed
                      optimizer states go up, with parameters at home, the device updates, they go back

Parameters at home whose states are on the device are read and written over the link by the kernel that updates them. From the step
on copies stand still for as long as that takes, whichever block's kernel comes first.

Collectives. Where ranks hold shards of b's parameters, a *gather* of them is issued to lane net one block ahead, after the
copies up due there. In forward that is at the start of ``max(0, b - 1)``, and in backward, where they are not kept, of
``min(last, b + 1)``. Replicated parameters are gathered in the first forward of a step alone. Before a gather the program waits for
what it reads: b's fetch and, in the forward that waits for updates, b's update. Before b computes it waits for the gather. A
forward waits in the order of blocks: what nobody gathers comes before the next one's gather. Copies up that a gather reads are
due one block earlier than others. A *reduce* of b's gradients follows its backward and is waited for at the end of the backward
of ``max(0, b - 1)``. Then b's gradients are issued to their home, before those of the block there, and waited for one block later
than others. Net works in the order of the program, on every rank in the same. A collective of so many whole bytes among n ranks
takes ``(n - 1) * net_latency_s + bytes * (n - 1) / n / net_bytes_per_s``.

Contention. Where the machine has any (`Machine.contention`), pieces of work take longer beside those of other lanes, as
`contention` says. An update whose states are on disk takes its computation's time then, or the disk's if that is longer.

A copy up for b is due at the start of the forward of ``max(0, b - prefetch_distance)``. For backward, with reloads, it is due
at the start of the backward of ``min(last, b + prefetch_distance)``. A copy down of b is waited for as many blocks after it.
That is at the end of the forward of ``min(last, b + prefetch_distance)`` and of the backward of ``max(0, b -
prefetch_distance)``.

The schedule says what updates overlap with (`autohete_fx.ir.Overlap`; a CPU device always has NONE, since host and device are
the same cores there).

    NONE        after the last backward: device updates; then for each block in order its uploads and its streamed update,
                like a forward that computes nothing else; the next step begins when all lanes are done
    STEP        after the last backward: device updates; then the next forward at once. There block b waits for its
                update on the host and for its upload, or its fetch, of what was updated, and does its streamed update
                before it computes. All streamed states go home from the step on, before anything else goes down: they pass
                through a few slots, and what fills one waits for what empties it. b's are home a slot's way after those of
                blocks up to b are up, at the earliest: for that, as if states alone went up, from the step on. b waits for
                its own to be home
    BACKWARD    as STEP, but an update on the host starts when its gradients are there, in the last backward already, an upload
                when its update ends, and streamed states when the optimizer steps: what backward fetches goes first, and from
                then on what block the next forward needs first, a little at a time, so that what is more urgent goes first at
                once. Where gradients are clipped, updates start as under STEP

The update lane takes the block that the next forward needs first. An update is done in buckets so small that a more urgent one
is taken for going first at once. Without priority it takes them as gradients came, and what updates copy up goes as under
BACKWARD. An update of states on disk takes what the slower of updating and of reading and writing takes. Under STEP and
BACKWARD all lanes are idle at the end of the forward that waited for updates. Every step repeats the one before from there on:
the replay begins and ends at that point.

On a CPU device updates on the host start after those on the device. The work of a block takes ``Machine.copy_share`` of the
seconds of its copies longer, whether they are hidden or not.

Memory. Buffers appear when they are issued or computed and go at the waits above. Gathered parameters go with the block's work
or, kept, with its backward's, the fetched shard with the wait for the gather. Whole gradients go with the wait for the reduce.
Those of the shard come when the reduce is issued, of block 0, after which no block comes, when its backward begins. The use of
memory so depends on the order of the program and not on its timing. Gradients that stay on the device exist twice in every
micro-batch but the first: autograd adds them to ``.grad`` only after the whole compiled backward. Gradients of streamed states
stay until their update, and the memory that streamed states pass through is taken when the optimizer steps, for all updates.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence

from autohete_fx.ir import BlockDecision, Lane, LaneTime, Optimizer, Overlap, Params, Problem, staging_bytes
from autohete_fx.ir.decision import STAGING_SLOTS
from autohete_fx.planner.model.block_program import BlockProgram
from autohete_fx.planner.model.contention import Factors, Piece, settled
from autohete_fx.planner.model.figures import (
    average_s,
    copy_s,
    device_update_s,
    disk_bytes,
    disk_s,
    host_bytes,
    host_computed_s,
    most_staging_s,
    over_link_s,
    overlap_of,
    replicated_bytes,
    sends_at_once,
    staging_s,
)
from autohete_fx.planner.model.lane_clocks import LaneClocks
from autohete_fx.planner.model.shared_lane import SharedLane
from autohete_fx.planner.model.simulation import (
    FORWARD,
    OPTIMIZER_STEP,
    Simulation,
    events_since,
    levels_since,
)
from autohete_fx.planner.model.update_lane import serve


def simulate(problem: Problem, decisions: Sequence[BlockDecision], *, events: bool = True) -> Simulation:
    """Replay one optimizer step of ``problem`` under one decision a block.

    ``events=False`` leaves events, contributors and levels out, which is several times faster.
    """
    assert len(decisions) == len(problem.costs), "one decision a block"
    assert all(decision.prefetch_distance >= 1 for decision in decisions), "a copy is issued at least one block ahead"

    return _Replay(problem, decisions, events, _settled(problem, decisions)).run()


def seconds_beside(problem: Problem, decisions: Sequence[BlockDecision]) -> list[tuple[Piece, float, float]]:
    """Each piece of a step's work, or part of one, with its seconds alone and beside the others. Empty without contention."""
    factors = _settled(problem, decisions)
    lanes = _lanes(problem, decisions, factors)
    times = [each for each in lanes.times if each[1] >= lanes.counted_from]
    return [(piece, (end - begin) / factors.get(piece, 1.0), end - begin) for piece, begin, end in times]


def _settled(problem: Problem, decisions: Sequence[BlockDecision]) -> Factors:
    return settled(problem.machine, lambda factors: _lanes(problem, decisions, factors).times)


def _lanes(problem: Problem, decisions: Sequence[BlockDecision], factors: Factors) -> LaneClocks:
    replay = _Replay(problem, decisions, False, factors)
    replay.run()
    return replay.lanes


class _Replay(BlockProgram):
    """One replay: passes and updates in their order."""

    def run(self) -> Simulation:
        self._hold_residents()
        began = self._pass(range(self.num_blocks), self._forward)
        forward_s, backward_s = self.lanes.clock - began, 0.0
        overlaps = self.problem.training and overlap_of(self.problem) is not Overlap.NONE
        if overlaps:
            began = self.lanes.clock  # the forward so far was the end of the step before
            self.lanes.forget()
            self.memory.levels.clear()
        self.is_first_forward = False
        for micro_batch in range(self.problem.micro_batches if self.problem.training else 0):
            self._hold_others_in_flight(self.problem.in_flight - 1)
            if micro_batch > 0:
                self._pass(range(self.num_blocks), self._forward)
            gradients = "gradients" if micro_batch == 0 else "gradients of a later micro-batch"
            self._hold_copies()
            middle = self._pass(
                reversed(range(self.num_blocks)), lambda block, name=gradients: self._backward(block, name)
            )
            backward_s = self.lanes.clock - middle
            for block in range(self.num_blocks):
                self.memory.hold("copies of gradients", block, 0)
                if micro_batch > 0:
                    self.memory.hold(gradients, block, 0)
        self._hold_others_in_flight(0)
        if self.problem.training:
            self._optimizer_step()
        step_s = max(self.lanes.free_at.values()) - began
        passes = self.problem.micro_batches if self.problem.training else 1
        pairs = list(enumerate(self.decisions))
        return Simulation(
            step_s=step_s,
            forward_s=forward_s,
            backward_s=backward_s,
            optimizer_s=step_s - passes * (forward_s + backward_s),
            peak_bytes=self.memory.peak,
            peak_block=self.memory.peak_block,
            peak_phase=self.memory.peak_phase,
            host_bytes=sum(host_bytes(self.problem, b, decision) for b, decision in pairs),
            disk_bytes=sum(disk_bytes(self.problem, b, decision) for b, decision in pairs),
            busy_s=tuple(LaneTime(lane=lane, busy_s=busy_s) for lane, busy_s in self.lanes.busy.items()),
            events=events_since(began, self.lanes.events),
            contributors=self.memory.contributors(),
            levels=levels_since(began, self.memory.levels),
        )

    def _pass(self, blocks: Iterable[int], run: Callable[[int], None]) -> float:
        """Run a pass; returns when it began."""
        began = self.lanes.clock
        for block in blocks:
            run(block)
        return began

    def _hold_residents(self) -> None:
        self.memory.hold("inputs, buffers and other graphs", -1, self.problem.fixed_bytes)
        for block, (cost, decision) in enumerate(zip(self.costs, self.decisions, strict=True)):
            if decision.params is Params.DEVICE:
                self.memory.hold("parameters", block, cost.param_bytes)
            self.memory.hold("optimizer states", block, cost.states_at(decision, Optimizer.DEVICE))
            self.memory.hold("replicated parameters", block, replicated_bytes(self.problem, block, decision))
        self.memory.observe(0, FORWARD, self.lanes.clock)

    def _hold_copies(self) -> None:
        """Hold copies of the gradients of the only micro-batch. Those of several are in the place of earlier ones."""
        for block, cost in enumerate(self.costs) if self.problem.copies_gradients else ():
            own = self._part_at(block, cost.grad_bytes, Optimizer.DEVICE, Optimizer.STREAMED)
            self.memory.hold("copies of gradients", block, own if self.problem.micro_batches == 1 else 0)

    def _hold_others_in_flight(self, count: int) -> None:
        """Hold between forward and backward what so many more micro-batches keep."""
        for block, decision in enumerate(self.decisions):
            fetched = self.costs[block].param_bytes if decision.params is Params.HOST else 0
            copies = (self.whole[block].gathered or fetched) if decision.keeps_fetched else 0
            each = self.activations[block].staying_bytes + copies
            self.memory.hold("activations of other micro-batches", block, count * each)

    def _optimizer_step(self) -> None:
        """Updates after the last backward, and under an overlapping schedule the next forward with them."""
        for block in range(self.num_blocks):
            states = self.costs[block].states_at(self.decisions[block], Optimizer.STREAMED)
            self.memory.hold("streamed optimizer states", block, staging_bytes(states))
        if any(decision.streams for decision in self.decisions):
            self.memory.hold("slots of streamed parameters", -1, self.problem.slot_bytes)
        # On an accelerator it is taken where the device updates any.
        on_device = [not d.updates_on_host or d.num_moved_states is not None for d in self.decisions]
        workspace = self.problem.update_workspace_bytes
        self.memory.hold(
            "workspace of updates", -1, workspace if any(on_device) or self.machine.device_type == "cpu" else 0
        )
        self.memory.observe(0, OPTIMIZER_STEP, self.lanes.clock)
        self.memory.hold("workspace of updates", -1, 0)
        self._average()
        stepped_at = self.lanes.clock
        over_link = [over_link_s(self.problem, *each) for each in enumerate(self.decisions)]
        copies_from = self.lanes.stop_copies(sum(over_link))
        for block, (cost, decision) in enumerate(zip(self.costs, self.decisions, strict=True)):
            here_s = device_update_s(self.problem, block, decision, Optimizer.DEVICE)
            self.lanes.work(Lane.COMPUTE, "update", block, here_s + over_link[block])
            if decision.streams:
                streamed = self._part_at(block, cost.grad_bytes, Optimizer.STREAMED)
                self.memory.hold("gradients", block, cost.grad_bytes - streamed)
                self.memory.hold("gradients of streamed states", block, streamed)
        on_host = [b for b, cost in enumerate(self.costs) if cost.num_params and self.decisions[b].updates_on_host]
        early = overlap_of(self.problem) is Overlap.BACKWARD
        start = self.lanes.clock if self.machine.device_type == "cpu" else stepped_at
        updated_at = self._update_on_host({block: self.landed_at[block] if early else start for block in on_host})
        if overlap_of(self.problem) is Overlap.NONE:
            self._pass(range(self.num_blocks), lambda block: self._update_alone(block, updated_at))
            return
        for block in range(self.num_blocks):
            self.memory.hold("gradients", block, 0)
        self._send_states_home(copies_from)
        if sends_at_once(self.problem):
            self.lanes.share_up(SharedLane(self.lanes.copied_up))
            for block in range(self.num_blocks):
                upload_s = copy_s(self.machine, Lane.H2D, self._uploaded_bytes(block))
                self.lanes.share("upload", block, upload_s, updated_at.get(block, stepped_at))
                self.lanes.share("states", block, self._states_up_s(block), stepped_at)
        self.is_first_forward = True
        self._pass(range(self.num_blocks), lambda block: self._forward(block, updated_at))

    def _average(self) -> None:
        """The mean of gradients over replicas, block by block."""
        for block, decision in enumerate(self.decisions):
            self.lanes.start(Lane.NET, "average", block, average_s(self.problem, block, decision))
            self.lanes.wait("average", block)

    def _update_on_host(self, ready_at: Mapping[int, float]) -> dict[int, float]:
        """Run the update lane; returns when each block is updated."""
        pieces: dict[int, Piece] = {}
        took_s, updated_at = dict[int, float](), dict[int, float]()
        for block in ready_at:
            own = self.problem, block, self.decisions[block]
            pieces[block], computed_s = self.lanes.lengthened(Lane.UPDATE, "update", block, host_computed_s(*own))
            took_s[block] = max(computed_s, disk_s(*own))
        for block, begin, end in serve(ready_at, took_s, priority=self.problem.schedule.priority):
            self.lanes.note(pieces[block], begin, end)
            if disk_bytes(self.problem, block, self.decisions[block]):
                self.lanes.note(Piece(Lane.DISK, "disk", block, 0), begin, end)
            updated_at[block] = self.lanes.free_at[Lane.UPDATE] = end
        return updated_at

    def _send_states_home(self, begin_s: float) -> None:
        """Streamed states go home from then on, one block after another. The last slot of a block leaves when all are up."""
        staged_s = sum(staging_s(self.problem, *each) for each in enumerate(self.decisions))
        slot_s, up_at = min(staged_s, most_staging_s(self.machine)) / STAGING_SLOTS, begin_s
        for block in range(self.num_blocks):
            if home_s := self._states_home_s(block):
                up_at += self._states_up_s(block)
                ready_at = max(begin_s, up_at + min(slot_s, home_s) - home_s)
                self.home_at[block] = self.lanes.work(Lane.D2H, "states", block, home_s, ready_at)

    def _update_alone(self, block: int, updated_at: Mapping[int, float]) -> None:
        """What is left of a block's update after a synchronous step's device and host updates: uploads and streams."""
        for due in self.due.before[block]:
            self._issue_update_copies(due, updated_at)
        self.memory.observe(block, OPTIMIZER_STEP, self.lanes.clock)
        self._update_with_copies(block)
        self._return_states(block)
        for sender in self.due.after[block]:
            self._end_return(sender)
