"""Replay of one optimizer step under given decisions: in come a problem and decisions, out come its time and memory.

The replay walks the program that the runtime executes, in its order, and knows nothing of the integer program in
`formulation`: it judges that program's plans. One optimizer step is ``micro_batches`` forward and backward passes and
then the optimizer step, which starts after the last backward and ends inside ``optimizer.step()``.

Time. Four lanes work in order. The compute lane runs blocks; at fixed points of its program it *issues* copies to the
lanes h2d and d2h and *waits* for them. A copy starts when it is issued and its lane is free, and takes
``latency_s + bytes / bandwidth``. Copies of nothing are not issued.

    forward of b      issue the parameter fetches due now; wait for b's; compute; issue b's offload;
                      wait for the offload of b-1 (the last block: its own too)
    backward of b     issue the fetches and reloads due now; wait for b's; recompute; compute; issue b's gradients to
                      their home; wait for the gradients of b+1 (block 0: its own too)
    optimizer step    device updates on compute and host updates on the update lane, each in block order; a block
                      updated on the host whose parameters are on the device is then uploaded on h2d

A fetch for b is due at the start of the forward of ``max(0, b - prefetch_distance)``, and for backward, with reloads,
at the start of the backward of ``min(last, b + prefetch_distance)``. On a CPU device everything runs on the same cores:
host updates start after the device updates, and the work of a block takes ``Machine.copy_share`` of the seconds of its
copies longer, whether they are hidden or not.

Memory. Buffers appear when they are issued or computed and go at the waits above, so the use of memory depends on the
order of the program and not on its timing. Gradients that stay on the device exist twice in every micro-batch but
the first: autograd adds them to ``.grad`` only after the whole compiled backward.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from autohete_fx.ir import Activations, BlockDecision, Lane, LaneTime, Machine, Optimizer, Params, Problem

FORWARD = "forward"
BACKWARD = "backward"
OPTIMIZER_STEP = "optimizer step"


@dataclass(frozen=True, slots=True, kw_only=True)
class Event:
    """A lane at work on a block, in seconds since the step began.

    ``label`` is ``forward``, ``recompute``, ``backward``, ``fetch``, ``offload``, ``reload``, ``gradients``, ``update``
    or ``upload``.
    """

    lane: Lane
    label: str
    block: int
    start_s: float
    end_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Contributor:
    """Device bytes of one kind, over all blocks, at the moment of the peak."""

    name: str
    num_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Simulation:
    """What a replay found.

    Attributes:
        step_s: seconds of one optimizer step, all its micro-batches included.
        forward_s, backward_s: seconds of the last micro-batch's forward and backward (all micro-batches are alike).
        optimizer_s: seconds of the optimizer step.
        peak_bytes: most device memory in use at once.
        peak_block, peak_phase: where the peak is first reached: block index, and ``forward``, ``backward`` or
            ``optimizer step``.
        host_bytes: host memory for homes.
        busy_s: seconds of work per lane.
        events: every piece of work, by start time; empty where they were not asked for.
        contributors: what the peak consists of, largest first; empty where events were not asked for.
    """

    step_s: float
    forward_s: float
    backward_s: float
    optimizer_s: float
    peak_bytes: int
    peak_block: int
    peak_phase: str
    host_bytes: int
    busy_s: tuple[LaneTime, ...]
    events: tuple[Event, ...]
    contributors: tuple[Contributor, ...]


def simulate(problem: Problem, decisions: Sequence[BlockDecision], *, events: bool = True) -> Simulation:
    """Replay one optimizer step of ``problem`` under one decision a block.

    ``events=False`` leaves events and contributors out, which is several times faster.
    """
    assert len(decisions) == len(problem.costs), "one decision a block"
    assert all(decision.prefetch_distance >= 1 for decision in decisions), "a copy is issued at least one block ahead"
    return _Replay(problem, decisions, events).run()


def host_bytes(problem: Problem, block: int, decision: BlockDecision) -> int:
    """Host memory for the homes of one block: parameters, optimizer states, gradients, offloaded activations."""
    cost = problem.costs[block]
    total = cost.param_bytes if decision.params is Params.HOST else 0
    if decision.optimizer is Optimizer.HOST:
        total += cost.optimizer_bytes
        if problem.training:
            total += cost.grad_bytes * (2 if problem.micro_batches > 1 else 1)
    if problem.training and decision.activations is Activations.OFFLOAD:
        total += cost.offloaded_bytes(decision.num_offloaded)
    return total


class _DeviceMemory:
    """Named device buffers, and the largest sum of them there ever was."""

    def __init__(self, keep_contributors: bool) -> None:
        self.buffers: dict[tuple[str, int], int] = {}
        self.used = 0
        self.peak = -1
        self.peak_block = 0
        self.peak_phase = FORWARD
        self.peak_buffers: dict[tuple[str, int], int] = {}
        self.keep_contributors = keep_contributors

    def hold(self, name: str, block: int, num_bytes: int) -> None:
        """Make a buffer's size ``num_bytes``; 0 frees it."""
        self.used += num_bytes - self.buffers.get((name, block), 0)
        if num_bytes:
            self.buffers[name, block] = num_bytes
        else:
            self.buffers.pop((name, block), None)

    def observe(self, block: int, phase: str) -> None:
        if self.used > self.peak:
            self.peak, self.peak_block, self.peak_phase = self.used, block, phase
            if self.keep_contributors:
                self.peak_buffers = dict(self.buffers)

    def contributors(self) -> tuple[Contributor, ...]:
        total: dict[str, int] = {}
        for (name, _), num_bytes in self.peak_buffers.items():
            total[name] = total.get(name, 0) + num_bytes
        largest_first = sorted(total.items(), key=lambda item: (-item[1], item[0]))
        return tuple(Contributor(name=name, num_bytes=num_bytes) for name, num_bytes in largest_first)


class _Replay:
    """One replay: the compute lane's clock, the other lanes' queues, and device memory."""

    def __init__(self, problem: Problem, decisions: Sequence[BlockDecision], keep_events: bool) -> None:
        self.problem, self.decisions, self.costs = problem, decisions, problem.costs
        self.machine = problem.machine
        self.copy_share = copy_share(problem.machine)
        self.num_blocks = len(problem.costs)
        self.keep_events = keep_events
        self.events: list[Event] = []
        self.busy = dict.fromkeys(Lane, 0.0)
        self.free_at = dict.fromkeys(Lane, 0.0)  # of the compute lane: the program's clock
        self.done_at: dict[tuple[str, int], float] = {}  # copies under way: label and block to end
        self.memory = _DeviceMemory(keep_events)
        self.fetch_due = self._due(lambda block, distance: max(0, block - distance))
        self.backward_due = self._due(lambda block, distance: min(self.num_blocks - 1, block + distance))
        self.last_reader = dict.fromkeys(range(self.num_blocks), self.num_blocks)
        for edge in sorted(problem.edges, key=lambda edge: edge.consumer):
            self.last_reader[edge.producer] = edge.consumer

    def _due(self, issued_at: Callable[[int, int], int]) -> list[list[int]]:
        """For each block, the blocks whose copies are issued at its start, in ascending order."""
        due: list[list[int]] = [[] for _ in self.costs]
        for block, decision in enumerate(self.decisions):
            due[issued_at(block, decision.prefetch_distance)].append(block)
        return due

    def run(self) -> Simulation:
        self._hold_residents()
        forward_s = backward_s = 0.0
        for micro_batch in range(self.problem.micro_batches if self.problem.training else 1):
            start = self.free_at[Lane.COMPUTE]
            for block in range(self.num_blocks):
                self._forward(block)
            middle = self.free_at[Lane.COMPUTE]
            forward_s = middle - start
            if self.problem.training:
                gradients = "gradients" if micro_batch == 0 else "gradients of a later micro-batch"
                for block in reversed(range(self.num_blocks)):
                    self._backward(block, gradients)
                if micro_batch > 0:
                    for block in range(self.num_blocks):
                        self.memory.hold(gradients, block, 0)
                backward_s = self.free_at[Lane.COMPUTE] - middle
        optimizer_s = self._optimizer_step() if self.problem.training else 0.0
        end = max(self.free_at.values())
        return Simulation(
            step_s=end,
            forward_s=forward_s,
            backward_s=backward_s,
            optimizer_s=optimizer_s,
            peak_bytes=self.memory.peak,
            peak_block=self.memory.peak_block,
            peak_phase=self.memory.peak_phase,
            host_bytes=sum(host_bytes(self.problem, b, decision) for b, decision in enumerate(self.decisions)),
            busy_s=tuple(LaneTime(lane=lane, busy_s=busy_s) for lane, busy_s in self.busy.items()),
            events=tuple(sorted(self.events, key=lambda event: (event.start_s, event.end_s))),
            contributors=self.memory.contributors(),
        )

    def _hold_residents(self) -> None:
        self.memory.hold("inputs, buffers and other graphs", -1, self.problem.fixed_bytes)
        for block, (cost, decision) in enumerate(zip(self.costs, self.decisions, strict=True)):
            if decision.params is Params.DEVICE:
                self.memory.hold("parameters", block, cost.param_bytes)
            if decision.optimizer is Optimizer.DEVICE:
                self.memory.hold("optimizer states", block, cost.optimizer_bytes)
        self.memory.observe(0, FORWARD)

    def _work(self, lane: Lane, label: str, block: int, seconds: float, ready_at: float = 0.0) -> float:
        """Occupy a lane; returns when it ends."""
        start = max(self.free_at[lane], ready_at)
        end = start + seconds
        self.free_at[lane] = end
        self.busy[lane] += seconds
        if self.keep_events and seconds > 0:
            self.events.append(Event(lane=lane, label=label, block=block, start_s=start, end_s=end))
        return end

    def _copy_s(self, lane: Lane, num_bytes: int) -> float:
        if not num_bytes:
            return 0.0
        bandwidth = self.machine.h2d_bytes_per_s if lane is Lane.H2D else self.machine.d2h_bytes_per_s
        return self.machine.latency_s + num_bytes / bandwidth

    def _lost_s(self, *copies: tuple[Lane, int]) -> float:
        """Seconds that a block's copies take from computation, given as lanes and bytes."""
        return self.copy_share * sum(self._copy_s(*copy) for copy in copies)

    def _issue(self, lane: Lane, label: str, block: int, num_bytes: int, ready_at: float | None = None) -> None:
        """Queue a copy on a lane, ready when the compute lane comes here unless ``ready_at`` says when."""
        if num_bytes:
            ready = self.free_at[Lane.COMPUTE] if ready_at is None else ready_at
            self.done_at[label, block] = self._work(lane, label, block, self._copy_s(lane, num_bytes), ready)

    def _wait(self, label: str, block: int) -> None:
        """Hold the compute lane until a copy is complete, if one is under way."""
        done_at = self.done_at.pop((label, block), None)
        if done_at is not None:
            self.free_at[Lane.COMPUTE] = max(self.free_at[Lane.COMPUTE], done_at)

    def _moved_bytes(self, block: int) -> tuple[int, int]:
        """A block's fetched parameters and its activations that leave and return."""
        offloads = self.problem.training and self.decisions[block].activations is Activations.OFFLOAD
        fetched = self.costs[block].param_bytes if self.decisions[block].params is Params.HOST else 0
        return fetched, self._offloaded_bytes(block) if offloads else 0

    def _offloaded_bytes(self, block: int) -> int:
        return self.costs[block].offloaded_bytes(self.decisions[block].num_offloaded)

    def _fetch_params(self, block: int) -> None:
        if self.decisions[block].params is Params.HOST:
            self.memory.hold("fetched parameters", block, self.costs[block].param_bytes)
            self._issue(Lane.H2D, "fetch", block, self.costs[block].param_bytes)

    def _forward(self, block: int) -> None:
        cost = self.costs[block]
        for due in self.fetch_due[block]:
            self._fetch_params(due)
        self.memory.hold("activations", block, cost.saved_bytes)
        self.memory.hold("workspace", block, cost.forward_workspace_bytes)
        self.memory.observe(block, FORWARD)
        self._wait("fetch", block)
        fetched, offloaded = self._moved_bytes(block)
        lost_s = self._lost_s((Lane.H2D, fetched), (Lane.D2H, offloaded))
        self._work(Lane.COMPUTE, "forward", block, cost.forward_s + lost_s)
        self.memory.hold("workspace", block, 0)
        self.memory.hold("fetched parameters", block, 0)
        if self.problem.training:
            self._settle_activations(block)
        else:
            self._release_read_values(block)

    def _settle_activations(self, block: int) -> None:
        """At the end of a block's forward: issue its offload, and end the previous block's."""
        activations = self.decisions[block].activations
        if activations is Activations.RECOMPUTE:
            self.memory.hold("activations", block, self.costs[block].boundary_bytes)
        elif activations is Activations.OFFLOAD:
            self._issue(Lane.D2H, "offload", block, self._offloaded_bytes(block))
        self._end_offload(block - 1)
        if block == self.num_blocks - 1:
            self._end_offload(block)

    def _end_offload(self, block: int) -> None:
        if block >= 0 and self.decisions[block].activations is Activations.OFFLOAD:
            self._wait("offload", block)
            self.memory.hold("activations", block, self.costs[block].saved_bytes - self._offloaded_bytes(block))

    def _release_read_values(self, block: int) -> None:
        """Without a backward, what other blocks read goes after the last of them; what no block reads is an output."""
        self.memory.hold("activations", block, self.costs[block].boundary_bytes)
        for producer, reader in self.last_reader.items():
            if reader == block:
                self.memory.hold("activations", producer, 0)

    def _backward(self, block: int, gradients: str) -> None:
        cost, decision = self.costs[block], self.decisions[block]
        for due in reversed(self.backward_due[block]):
            self._fetch_params(due)
            if self.decisions[due].activations is Activations.OFFLOAD:
                self.memory.hold("activations", due, self.costs[due].saved_bytes)
                self._issue(Lane.H2D, "reload", due, self._offloaded_bytes(due))
        host_gradients = decision.optimizer is Optimizer.HOST
        self.memory.hold("activations", block, cost.saved_bytes)
        self.memory.hold("workspace", block, cost.backward_workspace_bytes)
        self.memory.hold("gradients on their way to the host" if host_gradients else gradients, block, cost.grad_bytes)
        self.memory.observe(block, BACKWARD)
        self._wait("fetch", block)
        self._wait("reload", block)
        if decision.activations is Activations.RECOMPUTE:
            self._work(Lane.COMPUTE, "recompute", block, cost.recompute_s)
        fetched, reloaded = self._moved_bytes(block)
        sent = cost.grad_bytes if host_gradients else 0
        lost_s = self._lost_s((Lane.H2D, fetched), (Lane.H2D, reloaded), (Lane.D2H, sent))
        self._work(Lane.COMPUTE, "backward", block, cost.backward_s + lost_s)
        self.memory.hold("workspace", block, 0)
        self.memory.hold("activations", block, 0)
        self.memory.hold("fetched parameters", block, 0)
        if host_gradients:
            self._issue(Lane.D2H, "gradients", block, cost.grad_bytes)
        for sender in (block + 1, 0) if block == 0 else (block + 1,):
            self._wait("gradients", sender)
            self.memory.hold("gradients on their way to the host", sender, 0)

    def _optimizer_step(self) -> float:
        """Run the synchronous optimizer step after the last backward; returns its seconds."""
        start = self.free_at[Lane.COMPUTE]
        self.memory.observe(0, OPTIMIZER_STEP)
        machine = self.machine
        trained = [block for block in range(self.num_blocks) if self.costs[block].num_params]
        for block in trained:
            if self.decisions[block].optimizer is Optimizer.DEVICE:
                self._work(Lane.COMPUTE, "update", block, device_update_s(self.problem, block, self.decisions[block]))
        host_ready = self.free_at[Lane.COMPUTE] if machine.device_type == "cpu" else start
        for block in trained:
            if self.decisions[block].optimizer is Optimizer.HOST:
                uploaded = self.costs[block].param_bytes if self.decisions[block].params is Params.DEVICE else 0
                seconds = self.costs[block].num_params / machine.host_update_params_per_s
                seconds += self._lost_s((Lane.H2D, uploaded))
                updated = self._work(Lane.UPDATE, "update", block, seconds, host_ready)
                self._issue(Lane.H2D, "upload", block, uploaded, updated)
        return max(self.free_at.values()) - start


def copy_share(machine: Machine) -> float:
    """Of the seconds of a copy, the share by which it lengthens the computation of its block."""
    return machine.copy_share


def device_update_s(problem: Problem, block: int, decision: BlockDecision) -> float:
    """Seconds of a block's update on the device; a home on the host is read and written through the link."""
    cost, machine = problem.costs[block], problem.machine
    seconds = cost.num_params / machine.device_update_params_per_s
    if decision.params is Params.HOST:
        seconds += cost.param_bytes / machine.h2d_bytes_per_s + cost.param_bytes / machine.d2h_bytes_per_s
    return seconds
