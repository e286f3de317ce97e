"""The stages of a step at work: instructions carried out event by event, and messages that share the ports of nodes.

Enter a plan with the costs of its stages; leave the spans of each `Process`. A heap holds what ends next. `simulate` says what is
modelled.
"""

import enum
import heapq
from collections import Counter, deque
from collections.abc import Sequence
from dataclasses import dataclass

from autohete_fx.cluster.costs import CostTable, StageCost
from autohete_fx.cluster.links import Links
from autohete_fx.cluster.plan import ClusterPlan
from autohete_fx.cluster.simulation.gradient_sums import gather_time
from autohete_fx.cluster.simulation.instructions import Instruction, Kind, instructions


class Sends(enum.Enum):
    """The effect of a send on the unit that sends."""

    BLOCKING = "blocking"
    BUFFERED = "buffered"


@dataclass(frozen=True, slots=True, kw_only=True)
class Span:
    """Something that one unit did.

    Attributes:
        what: ``forward``, ``backward``, ``send``, ``receive``, ``reduce`` or ``update``.
        micro_batch: index; -1 where it is of the whole step.
        begin_s: since the step began.
        end_s: since the step began.
    """

    what: str
    micro_batch: int
    begin_s: float
    end_s: float


class Process:
    """One stage: its instructions, where it is in them, and its clock."""

    __slots__ = ("begun_s", "cost", "here", "pipeline", "place", "program", "spans", "time_s")

    def __init__(self, pipeline: int, place: int, program: Sequence[Instruction], cost: StageCost) -> None:
        self.pipeline, self.place = pipeline, place
        self.program, self.here = program, 0
        self.cost = cost
        self.time_s = self.begun_s = 0.0
        self.spans: list[Span] = []


class _Channel:
    """One direction between two neighbouring stages: messages in order, one under way at a time."""

    __slots__ = ("arrived", "bytes", "flow", "gather_s", "pairs", "rates", "receiver", "route", "sender", "waiting")

    def __init__(
        self, sender: int, receiver: int, route: tuple[str, str], num_bytes: float, pairs: int, gather_s: float
    ) -> None:
        self.sender, self.receiver, self.route = sender, receiver, route
        self.bytes, self.pairs, self.gather_s = num_bytes, pairs, gather_s
        self.arrived = 0
        self.rates: dict[int, float] = {}  # by how many pairs share its ports
        self.waiting: deque[float] = deque()
        self.flow: _Flow | None = None


class _Flow:
    """A message under way."""

    __slots__ = ("begun_s", "channel", "left", "rate", "since_s", "version")

    def __init__(self, channel: _Channel, begun_s: float) -> None:
        self.channel, self.begun_s, self.since_s = channel, begun_s, begun_s
        self.left, self.rate, self.version = channel.bytes * channel.pairs, 0.0, 0


class Engine:
    """Runs all processes of a step; a heap holds what ends next."""

    def __init__(
        self, plan: ClusterPlan, costs: CostTable, table: list[list[StageCost]], links: Links, sends: Sends
    ) -> None:
        self._links, self._blocking = links, sends is Sends.BLOCKING
        self.processes: list[Process] = []
        self._channels: dict[tuple[int, bool], _Channel] = {}
        self._events: list[tuple[float, int, Process | _Flow, int]] = []
        self._count = 0
        self._flows: dict[str, dict[_Flow, None]] = {}  # by the nodes whose ports they take
        self._leaving: Counter[str] = Counter()  # pairs that send to other nodes
        self._coming: Counter[str] = Counter()
        for index, pipeline in enumerate(plan.pipelines):
            depth = len(pipeline.stages)
            for place, stage in enumerate(pipeline.stages):
                program = instructions(place, depth, pipeline.micro_batches, plan.schedule)
                number = len(self.processes)
                self.processes.append(Process(index, place, program, table[index][place]))
                if place + 1 == depth:
                    continue
                after = pipeline.stages[place + 1]
                num_bytes = costs.boundary_bytes(stage.last, pipeline.micro_batch)
                pairs = min(stage.num_gpus, after.num_gpus)
                for ahead, (source, target) in ((True, (stage, after)), (False, (after, stage))):
                    ends = (number, number + 1) if ahead else (number + 1, number)
                    part, route = num_bytes / pairs, (source.node, target.node)
                    within = links.within(target.node) if target.tp > 1 else None
                    gather_s = gather_time(num_bytes / target.shards, target.tp, within, target.shards)
                    self._channels[number, ahead] = _Channel(*ends, route, part, pairs, gather_s)

    def run(self) -> None:
        """Until every process has ended."""
        for number in range(len(self.processes)):
            self._advance(number, 0.0)
        numbers = {id(process): number for number, process in enumerate(self.processes)}
        while self._events:
            now, _, subject, version = heapq.heappop(self._events)
            if isinstance(subject, Process):
                self._computed(numbers[id(subject)], now)
            elif version == subject.version:
                self._arrived(subject, now)
        assert all(process.here == len(process.program) for process in self.processes), "a pipeline stands still"

    def _push(self, time_s: float, subject: "Process | _Flow", version: int = 0) -> None:
        self._count += 1
        heapq.heappush(self._events, (time_s, self._count, subject, version))

    def _channel(self, number: int, instruction: Instruction) -> _Channel:
        sends = instruction.kind is Kind.SEND
        lower = number if sends == instruction.ahead else number - 1
        return self._channels[lower, instruction.ahead]

    def _advance(self, number: int, now: float) -> None:
        """Go on with the instructions of a process until one takes time or has to wait."""
        process = self.processes[number]
        process.time_s = max(process.time_s, now)
        while process.here < len(process.program):
            instruction = process.program[process.here]
            process.begun_s = process.time_s
            if instruction.kind in (Kind.FORWARD, Kind.BACKWARD):
                cost = process.cost
                seconds = cost.forward_s if instruction.kind is Kind.FORWARD else cost.backward_s
                if instruction.kind is Kind.BACKWARD and instruction.micro_batch:
                    seconds += cost.accumulate_s
                self._push(process.time_s + seconds, process)
                return
            channel = self._channel(number, instruction)
            if instruction.kind is Kind.SEND:
                channel.waiting.append(process.time_s)
                self._start(channel, process.time_s)
                if self._blocking:
                    return
                process.here += 1
                continue
            if channel.arrived > instruction.micro_batch:
                process.here += 1
                process.time_s += channel.gather_s
                continue
            if self._blocking:
                self._start(channel, process.time_s)
            return

    def _receiver_is_there(self, channel: _Channel) -> bool:
        process = self.processes[channel.receiver]
        if process.here == len(process.program):
            return False
        instruction = process.program[process.here]
        return instruction.kind is Kind.RECEIVE and self._channel(channel.receiver, instruction) is channel

    def _start(self, channel: _Channel, now: float) -> None:
        """Let the next message go, if there is one and nothing holds it."""
        if channel.flow is not None or not channel.waiting:
            return
        if self._blocking and not self._receiver_is_there(channel):
            return
        channel.waiting.popleft()
        channel.flow = _Flow(channel, now)
        for node in set(channel.route):
            self._flows.setdefault(node, {})[channel.flow] = None
        self._count_pairs(channel, channel.pairs)
        self._share(channel.route, now)

    def _count_pairs(self, channel: _Channel, pairs: int) -> None:
        source, target = channel.route
        if source != target:
            self._leaving[source] += pairs
            self._coming[target] += pairs

    def _share(self, route: tuple[str, str], now: float) -> None:
        """Give every message at the ports of a route its part of what they carry."""
        for node in dict.fromkeys(route):
            for flow in self._flows.get(node, ()):
                rate = self._rate(flow.channel)
                if rate != flow.rate:
                    flow.left -= flow.rate * (now - flow.since_s)
                    flow.rate, flow.since_s = rate, now
                    flow.version += 1
                    self._push(now + max(0.0, flow.left) / rate, flow, flow.version)

    def _rate(self, channel: _Channel) -> float:
        source, target = channel.route
        shared = channel.pairs if source == target else max(self._leaving[source], self._coming[target])
        if shared not in channel.rates:
            link = self._links.within(source) if source == target else self._links.between(source, target)
            channel.rates[shared] = channel.pairs / shared * link.bytes_per_s(channel.bytes, shared)
        return channel.rates[shared]

    def _computed(self, number: int, now: float) -> None:
        process = self.processes[number]
        instruction = process.program[process.here]
        process.spans.append(
            Span(
                what=instruction.kind.value,
                micro_batch=instruction.micro_batch,
                begin_s=process.begun_s,
                end_s=now,
            )
        )
        process.here += 1
        self._advance(number, now)

    def _arrived(self, flow: _Flow, now: float) -> None:
        channel = flow.channel
        channel.flow = None
        for node in set(channel.route):
            del self._flows[node][flow]
        self._count_pairs(channel, -channel.pairs)
        self._share(channel.route, now)
        channel.arrived += 1
        receiving = self._receiver_is_there(channel)
        if self._blocking:
            self._passed(channel.sender, "send", channel.arrived - 1, flow.begun_s, now)
        else:
            self._start(channel, now)
        if receiving:
            waits_since_s = max(flow.begun_s, self.processes[channel.receiver].begun_s)
            self._passed(channel.receiver, "receive", channel.arrived - 1, waits_since_s, now)
            self._advance(channel.receiver, now + channel.gather_s)
        if self._blocking:
            self._advance(channel.sender, now)

    def _passed(self, number: int, what: str, micro_batch: int, begin_s: float, end_s: float) -> None:
        process = self.processes[number]
        process.spans.append(Span(what=what, micro_batch=micro_batch, begin_s=begin_s, end_s=end_s))
        process.here += 1
