"""The runtime's program, block by block, as a replay walks it: what a block's forward and backward issue, await, compute and hold.
`simulate` says how it is, and puts the blocks together.
"""

from collections.abc import Mapping, Sequence

from autohete_fx.ir import ActivationCost, BlockDecision, Lane, Optimizer, Params, Problem
from autohete_fx.planner.model.contention import Factors
from autohete_fx.planner.model.device_memory import DeviceMemory
from autohete_fx.planner.model.due import Due
from autohete_fx.planner.model.figures import (
    UPDATED_ON_HOST,
    collective_s,
    copy_s,
    device_update_s,
    last_readers,
    replicated_bytes,
    states_up_s,
    streamed_bytes,
    uploaded_bytes,
    whole_of,
)
from autohete_fx.planner.model.lane_clocks import LaneClocks
from autohete_fx.planner.model.simulation import BACKWARD, FORWARD


class BlockProgram:
    """The program of every block, the compute lane's clock, the other lanes' queues, and device memory."""

    def __init__(
        self, problem: Problem, decisions: Sequence[BlockDecision], keep_events: bool, factors: Factors
    ) -> None:
        self.problem, self.decisions, self.costs = problem, decisions, problem.costs
        self.whole = [whole_of(problem, block) for block in range(len(decisions))]
        self.machine = problem.machine
        self.num_blocks = len(problem.costs)
        self.lanes = LaneClocks(problem.machine, keep_events=keep_events, factors=factors)
        self.landed_at: dict[int, float] = {}  # gradients of the last micro-batch, on the host
        self.home_at: dict[int, float] = {}  # streamed states, where updates overlap
        self.memory = DeviceMemory(keep_levels=keep_events)
        self.due = Due(problem, decisions)
        self.is_first_forward = True  # of a step
        self.activations = [
            cost.activations(decision) if problem.training else ActivationCost(held_bytes=cost.saved_bytes)
            for cost, decision in zip(self.costs, decisions, strict=True)
        ]
        self.last_reader = dict.fromkeys(range(self.num_blocks), self.num_blocks)
        self.last_reader |= last_readers(problem)

    def _lost_s(self, *copies: tuple[Lane, int, int]) -> float:
        """Seconds that a block's copies take from computation, given as lanes, bytes and tensors."""
        return self.machine.copy_share * sum(copy_s(self.machine, *copy) for copy in copies)

    def _moved(self, block: int) -> tuple[tuple[int, int], tuple[int, int]]:
        """A block's fetched parameters and its activations that leave and return: bytes and tensors."""
        cost, activations = self.costs[block], self.activations[block]
        fetched = cost.param_bytes if self.decisions[block].params is Params.HOST else 0
        return (fetched, cost.num_param_tensors), (activations.offloaded_bytes, activations.offloaded_tensors)

    def _part_at(self, block: int, num_bytes: int, *places: Optimizer) -> int:
        return self.costs[block].part_at(num_bytes, self.decisions[block], *places)

    def _fetch_params(self, block: int, ready_at: float = 0.0) -> None:
        if self.decisions[block].params is Params.HOST:
            self.memory.hold("fetched parameters", block, self.costs[block].param_bytes)
            cost = self.costs[block]
            self.lanes.issue(Lane.H2D, "fetch", block, cost.param_bytes, cost.num_param_tensors, ready_at)

    def _forward(self, block: int, updated_at: Mapping[int, float] | None = None) -> None:
        """Forward of a block; ``updated_at``, of the blocks updated on the host, where this is the step's first."""
        cost, decision = self.costs[block], self.decisions[block]
        for due in self.due.before_gather[block]:
            self._fetch_params(due, (updated_at or {}).get(due, 0.0))
            if updated_at is not None:
                self._issue_update_copies(due, updated_at)
        for due in self.due.gathers_in_forward(block):
            gathered = 0 if replicated_bytes(self.problem, due, self.decisions[due]) else self.whole[due].gathered
            self.memory.hold("gathered parameters", due, gathered)
        self.memory.hold("activations", block, cost.saved_bytes)
        self.memory.hold("workspace", block, cost.forward_workspace_bytes)
        self.memory.observe(block, FORWARD, self.lanes.clock)
        if not self.whole[block].gathered:
            self._begin_forward(block, updates=updated_at is not None)
        for due in self.due.gathers_in_forward(block):
            if gathered := self.whole[due].gathered:
                self._begin_forward(due, updates=updated_at is not None)
                if self.is_first_forward or not self.decisions[due].replicates:
                    self.lanes.start(Lane.NET, "gather", due, collective_s(self.problem, gathered))
        if self.whole[block].gathered:
            self._end_gather(block)
        fetched, offloaded = self._moved(block)
        lost_s = self._lost_s((Lane.H2D, *fetched), (Lane.D2H, *offloaded))
        self.lanes.work(Lane.COMPUTE, "forward", block, cost.forward_s + lost_s)
        self.memory.hold("workspace", block, 0)
        if not (self.problem.training and decision.keeps_fetched):
            self._release_params(block)
        if not self.problem.training:
            self._release_read_values(block)
            return
        self.memory.hold("activations", block, self.activations[block].held_bytes)
        self.lanes.issue(Lane.D2H, "offload", block, *offloaded)
        if updated_at is not None and decision.streams:
            self.memory.hold("gradients of streamed states", block, 0)
        for sender in self.due.after[block]:
            self._end_offload(sender)

    def _begin_forward(self, block: int, *, updates: bool) -> None:
        """Wait until a block's own parameters are there, and updated where this is the step's first forward."""
        self.lanes.serve_up(block)
        self.lanes.wait("fetch", block)
        if updates:
            self._update_with_copies(block)

    def _end_gather(self, block: int) -> None:
        self.lanes.wait("gather", block)
        self.memory.hold("fetched parameters", block, 0)

    def _release_params(self, block: int) -> None:
        self.memory.hold("fetched parameters", block, 0)
        self.memory.hold("gathered parameters", block, 0)

    def _end_offload(self, block: int) -> None:
        self.lanes.wait("offload", block)
        self.memory.hold("activations", block, self.activations[block].staying_bytes)

    def _release_read_values(self, block: int) -> None:
        """Without a backward, what other blocks read goes after the last of them; what no block reads is an output."""
        self.memory.hold("activations", block, self.costs[block].boundary_bytes)
        for producer, reader in self.last_reader.items():
            if reader == block:
                self.memory.hold("activations", producer, 0)

    def _backward(self, block: int, gradients: str) -> None:
        cost, decision = self.costs[block], self.decisions[block]
        self._issue_for_backward(block)
        self.memory.hold("activations", block, cost.saved_bytes)
        self.memory.hold("workspace", block, cost.backward_workspace_bytes)
        self.memory.hold("whole gradients", block, self.whole[block].reduced)
        if not (self.whole[block].reduced and block):
            self._hold_gradients(block, gradients)
        self.memory.observe(block, BACKWARD, self.lanes.clock)
        self.lanes.wait("fetch", block)
        if self.whole[block].gathered_again:
            self._end_gather(block)
        self.lanes.wait("reload", block)
        self.lanes.work(Lane.COMPUTE, "recompute", block, self.activations[block].recompute_s)
        fetched, reloaded = self._moved(block)
        copies = ((Lane.H2D, *fetched),) if not decision.keeps_fetched else ()
        lost_s = self._lost_s(*copies, (Lane.H2D, *reloaded), (Lane.D2H, *self._gradients_moved(block)))
        self.lanes.work(Lane.COMPUTE, "backward", block, cost.backward_s + lost_s)
        self.memory.hold("workspace", block, 0)
        self.memory.hold("activations", block, 0)
        self._release_params(block)
        self._end_backward(block, gradients)

    def _issue_for_backward(self, block: int) -> None:
        """Issue the copies up due at a block's backward, and the gathers."""
        fetched, reloaded = self.due.after_gather[block], self.due.after[block]
        for due in sorted({*fetched, *reloaded}, reverse=True):
            if due in fetched and not self.decisions[due].keeps_fetched:
                self._fetch_params(due)
            if due in reloaded:
                self.memory.hold("activations", due, self.activations[due].held_bytes)
                self.lanes.issue(Lane.H2D, "reload", due, *self._moved(due)[1])
        for due in self.due.gathers_in_backward(block):
            is_there = self.decisions[due].keeps_fetched or self.decisions[due].replicates
            if (gathered := self.whole[due].gathered_again) and not is_there:
                self.memory.hold("gathered parameters", due, gathered)
                self.lanes.wait("fetch", due)
                self.lanes.start(Lane.NET, "gather", due, collective_s(self.problem, gathered))

    def _end_backward(self, block: int, gradients: str) -> None:
        """Reduce a block's gradients or send them home, and wait for the reduces and the gradients due."""
        if reduced := self.whole[block].reduced:
            self._hold_gradients(block, gradients)
            self.lanes.start(Lane.NET, "reduce", block, collective_s(self.problem, reduced))
        for due in self.due.reduces(block):
            if self.whole[due].reduced:
                self.lanes.wait("reduce", due)
                self.memory.hold("whole gradients", due, 0)
                self._send_gradients(due)
        if not reduced:
            self._send_gradients(block)
        for sender in reversed(self.due.before_reduced[block]):
            self.lanes.wait("gradients", sender)
            self.memory.hold("gradients on their way to the host", sender, 0)

    def _gradients_moved(self, block: int) -> tuple[int, int]:
        """The gradients that a block's backward sends to the host: bytes and tensors."""
        cost, decision = self.costs[block], self.decisions[block]
        return self._part_at(block, cost.grad_bytes, *UPDATED_ON_HOST), cost.tensors_at(decision, *UPDATED_ON_HOST)

    def _hold_gradients(self, block: int, gradients: str) -> None:
        to_host = self._gradients_moved(block)[0]
        self.memory.hold("gradients on their way to the host", block, to_host)
        self.memory.hold(gradients, block, self.costs[block].grad_bytes - to_host)

    def _send_gradients(self, block: int) -> None:
        if self.decisions[block].updates_on_host:
            self.lanes.issue(Lane.D2H, "gradients", block, *self._gradients_moved(block))
            self.landed_at[block] = self.lanes.done_at("gradients", block)

    def _uploaded_bytes(self, block: int) -> int:
        """What was updated on the host and is then copied up."""
        return uploaded_bytes(self.costs[block], self.decisions[block])

    def _states_up_s(self, block: int) -> float:
        return states_up_s(self.problem, block, self.decisions[block])

    def _states_home_s(self, block: int) -> float:
        return copy_s(self.machine, Lane.D2H, streamed_bytes(self.costs[block], self.decisions[block]))

    def _issue_update_copies(self, block: int, updated_at: Mapping[int, float]) -> None:
        if not self.lanes.shares_up:
            self.lanes.issue(Lane.H2D, "upload", block, self._uploaded_bytes(block), 1, updated_at.get(block, 0.0))
            self.lanes.start(Lane.H2D, "states", block, self._states_up_s(block))

    def _update_with_copies(self, block: int) -> None:
        """Wait for what a block's update copies up, and do the update if its states are streamed."""
        self.lanes.wait("upload", block)
        self.lanes.wait("states", block)
        self.lanes.hold(self.home_at.get(block, 0.0))
        if self.decisions[block].streams:
            streamed_s = device_update_s(self.problem, block, self.decisions[block], Optimizer.STREAMED)
            self.lanes.work(Lane.COMPUTE, "update", block, streamed_s)

    def _return_states(self, block: int) -> None:
        if self.decisions[block].streams:
            self.memory.hold("gradients of streamed states", block, 0)
            self.lanes.start(Lane.D2H, "states", block, self._states_home_s(block))

    def _end_return(self, block: int) -> None:
        if self.decisions[block].streams:
            self.lanes.wait("states", block)
