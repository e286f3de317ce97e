"""A step of a plan, event by event: what each unit computes, sends and waits for, and when the step ends.

Enter a `ClusterPlan`, a `Cluster` and a `CostTable`; leaves a `Timeline`. Every unit is a process that works through its pipeline
schedule's instructions in order. Messages share the ports of the nodes: while several are under way, each gets its part of what the
port carries for all of them. The GPUs of a unit each receive a part of a message and gather the whole. After the last backward,
replicas sum their gradients over rings, and each GPU runs its optimizer's step.

``blocking`` sends are those of NCCL on the stream that computes. Sender and receiver both stand still from the moment that both
are there until the message has arrived. ``buffered`` ones leave the sender at once; one message at a time goes over each
direction of a pair of stages. The published runs had blocking ones.
"""

import enum
import heapq
import itertools
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from autohete_fx.cluster.costs import CostTable, StageCost
from autohete_fx.cluster.links import Links
from autohete_fx.cluster.memory import in_flight
from autohete_fx.cluster.plan import ClusterPlan, Pipeline, PipelineSchedule
from autohete_fx.cluster.spec import Cluster, Link

_FAST_BYTES_PER_S, _BOTH_WAYS_SHARE = 10e9, 0.5
"""A GPU in a ring sends and receives at once. Fast fabrics then give about half of what they carry one way, which is what links
state; slow ports give all of it."""


class Sends(enum.Enum):
    """The effect of a send on the unit that sends."""

    BLOCKING = "blocking"
    BUFFERED = "buffered"


class _Kind(enum.Enum):
    FORWARD = "forward"
    BACKWARD = "backward"
    SEND = "send"
    RECEIVE = "receive"


@dataclass(frozen=True, slots=True)
class _Instruction:
    """``ahead``: of a message, towards later stages; ``micro_batch``: its index."""

    kind: _Kind
    micro_batch: int
    ahead: bool = True


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


@dataclass(frozen=True, slots=True, kw_only=True)
class UnitTime:
    """One stage's part of the step.

    Attributes:
        pipeline: index.
        place: of the stage in it.
        compute_s: forward and backward.
        backward_end_s: when its last backward ended.
        spans: what it did, in order.
    """

    pipeline: int
    place: int
    compute_s: float
    backward_end_s: float
    spans: tuple[Span, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Timeline:
    """A simulated step.

    Attributes:
        iteration_s: of the step.
        pipelines_s: until the last backward of all.
        reduce_s: gradient sums after it.
        update_s: optimizer's step after them.
        units: every stage's part.
    """

    iteration_s: float
    pipelines_s: float
    reduce_s: float
    update_s: float
    units: tuple[UnitTime, ...]


def simulate(
    plan: ClusterPlan, cluster: Cluster, costs: CostTable, *, sends: Sends = Sends.BLOCKING, links: Links | None = None
) -> Timeline:
    """The step of a plan. Raises ClusterError where costs or links lack what the plan needs."""
    links = links or Links(cluster)
    table = [[_cost(costs, pipeline, place) for place in range(len(pipeline.stages))] for pipeline in plan.pipelines]
    engine = _Engine(plan, costs, table, links, sends)
    engine.run()
    pipelines_s = max(process.time_s for process in engine.processes)
    reduce_s = reduce_seconds(plan, costs, links)
    update_s = max(cost.update_s for row in table for cost in row)
    units = tuple(
        UnitTime(
            pipeline=process.pipeline,
            place=process.place,
            compute_s=sum(span.end_s - span.begin_s for span in process.spans if span.what in ("forward", "backward")),
            backward_end_s=max((span.end_s for span in process.spans if span.what == "backward"), default=0.0),
            spans=(
                *process.spans,
                Span(what="reduce", micro_batch=-1, begin_s=pipelines_s, end_s=pipelines_s + reduce_s),
                Span(
                    what="update",
                    micro_batch=-1,
                    begin_s=pipelines_s + reduce_s,
                    end_s=pipelines_s + reduce_s + table[process.pipeline][process.place].update_s,
                ),
            ),
        )
        for process in engine.processes
    )
    return Timeline(
        iteration_s=pipelines_s + reduce_s + update_s,
        pipelines_s=pipelines_s,
        reduce_s=reduce_s,
        update_s=update_s,
        units=units,
    )


def _cost(costs: CostTable, pipeline: Pipeline, place: int) -> StageCost:
    stage = pipeline.stages[place]
    return costs.stage(
        stage.layers,
        stage.gpu,
        stage.tp,
        pipeline.micro_batch,
        recomputed=stage.recomputed,
        offloaded=stage.offloaded,
    )


def instructions(place: int, depth: int, micro_batches: int, schedule: PipelineSchedule) -> Iterator[_Instruction]:
    """All that the stage at ``place`` of ``depth`` does in a step, in order.

    Sends and receives of neighbours stand in the same order in both, so that blocking ones always meet. Towards the previous
    stage, the activation is received before the last gradient is sent. Towards the next one, the activation is sent before the
    gradient is received.
    """
    warm = in_flight(place, depth, micro_batches, schedule)
    first, last = place == 0, place == depth - 1
    order: list[tuple[bool, int]] = [(True, index) for index in range(warm)]
    for index in range(micro_batches):
        order.append((False, index))
        if warm + index < micro_batches:
            order.append((True, warm + index))
    unsent: int | None = None
    for forward, index in order:
        if forward:
            if not first:
                yield _Instruction(_Kind.RECEIVE, index)
                if unsent is not None:
                    yield _Instruction(_Kind.SEND, unsent, ahead=False)
            unsent = None
            yield _Instruction(_Kind.FORWARD, index)
            if not last:
                yield _Instruction(_Kind.SEND, index)
        else:
            if not first and unsent is not None:
                yield _Instruction(_Kind.SEND, unsent, ahead=False)
            if not last:
                yield _Instruction(_Kind.RECEIVE, index, ahead=False)
            yield _Instruction(_Kind.BACKWARD, index)
            unsent = index
    if not first and unsent is not None:
        yield _Instruction(_Kind.SEND, unsent, ahead=False)


class _Process:
    """One stage: its instructions, where it is in them, and its clock."""

    __slots__ = ("begun_s", "cost", "here", "pipeline", "place", "program", "spans", "time_s")

    def __init__(self, pipeline: int, place: int, program: Sequence[_Instruction], cost: StageCost) -> None:
        self.pipeline, self.place = pipeline, place
        self.program, self.here = program, 0
        self.cost = cost
        self.time_s = self.begun_s = 0.0
        self.spans: list[Span] = []


class _Channel:
    """One direction between two neighbouring stages: messages in order, one under way at a time."""

    __slots__ = ("arrived", "bytes", "flow", "gather_s", "pairs", "receiver", "route", "sender", "waiting")

    def __init__(
        self, sender: int, receiver: int, route: tuple[str, str], num_bytes: float, pairs: int, gather_s: float
    ) -> None:
        self.sender, self.receiver, self.route = sender, receiver, route
        self.bytes, self.pairs, self.gather_s = num_bytes, pairs, gather_s
        self.arrived = 0
        self.waiting: deque[float] = deque()
        self.flow: _Flow | None = None


class _Flow:
    """A message under way."""

    __slots__ = ("begun_s", "channel", "left", "rate", "since_s", "version")

    def __init__(self, channel: _Channel, begun_s: float) -> None:
        self.channel, self.begun_s, self.since_s = channel, begun_s, begun_s
        self.left, self.rate, self.version = channel.bytes * channel.pairs, 0.0, 0


class _Engine:
    """Runs all processes of a step; a heap holds what ends next."""

    def __init__(
        self, plan: ClusterPlan, costs: CostTable, table: list[list[StageCost]], links: Links, sends: Sends
    ) -> None:
        self._links, self._blocking = links, sends is Sends.BLOCKING
        self.processes: list[_Process] = []
        self._channels: dict[tuple[int, bool], _Channel] = {}
        self._events: list[tuple[float, int, _Process | _Flow, int]] = []
        self._count = 0
        self._flows: dict[str, set[_Flow]] = {}
        for index, pipeline in enumerate(plan.pipelines):
            depth = len(pipeline.stages)
            for place, stage in enumerate(pipeline.stages):
                program = tuple(instructions(place, depth, pipeline.micro_batches, plan.schedule))
                number = len(self.processes)
                self.processes.append(_Process(index, place, program, table[index][place]))
                if place + 1 == depth:
                    continue
                after = pipeline.stages[place + 1]
                num_bytes = costs.boundary_bytes(stage.last, pipeline.micro_batch)
                pairs = min(stage.tp, after.tp)
                for ahead, (source, target) in ((True, (stage, after)), (False, (after, stage))):
                    ends = (number, number + 1) if ahead else (number + 1, number)
                    part, route = num_bytes / pairs, (source.node, target.node)
                    gather_s = gather_time(num_bytes, target.tp, links.within(target.node) if target.tp > 1 else None)
                    self._channels[number, ahead] = _Channel(*ends, route, part, pairs, gather_s)

    def run(self) -> None:
        """Until every process has ended."""
        for number in range(len(self.processes)):
            self._advance(number, 0.0)
        numbers = {id(process): number for number, process in enumerate(self.processes)}
        while self._events:
            now, _, subject, version = heapq.heappop(self._events)
            if isinstance(subject, _Process):
                self._computed(numbers[id(subject)], now)
            elif version == subject.version:
                self._arrived(subject, now)
        assert all(process.here == len(process.program) for process in self.processes), "a pipeline stands still"

    def _push(self, time_s: float, subject: "_Process | _Flow", version: int = 0) -> None:
        self._count += 1
        heapq.heappush(self._events, (time_s, self._count, subject, version))

    def _channel(self, number: int, instruction: _Instruction) -> _Channel:
        sends = instruction.kind is _Kind.SEND
        lower = number if sends == instruction.ahead else number - 1
        return self._channels[lower, instruction.ahead]

    def _advance(self, number: int, now: float) -> None:
        """Go on with the instructions of a process until one takes time or has to wait."""
        process = self.processes[number]
        process.time_s = max(process.time_s, now)
        while process.here < len(process.program):
            instruction = process.program[process.here]
            process.begun_s = process.time_s
            if instruction.kind in (_Kind.FORWARD, _Kind.BACKWARD):
                cost = process.cost
                seconds = cost.forward_s if instruction.kind is _Kind.FORWARD else cost.backward_s
                if instruction.kind is _Kind.BACKWARD and instruction.micro_batch:
                    seconds += cost.accumulate_s
                self._push(process.time_s + seconds, process)
                return
            channel = self._channel(number, instruction)
            if instruction.kind is _Kind.SEND:
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
        return instruction.kind is _Kind.RECEIVE and self._channel(channel.receiver, instruction) is channel

    def _start(self, channel: _Channel, now: float) -> None:
        """Let the next message go, if there is one and nothing holds it."""
        if channel.flow is not None or not channel.waiting:
            return
        if self._blocking and not self._receiver_is_there(channel):
            return
        channel.waiting.popleft()
        channel.flow = _Flow(channel, now)
        for node in set(channel.route):
            self._flows.setdefault(node, set()).add(channel.flow)
        self._share(channel.route, now)

    def _share(self, route: tuple[str, str], now: float) -> None:
        """Give every message at the ports of a route its part of what they carry."""
        for flow in {flow for node in set(route) for flow in self._flows.get(node, ())}:
            rate = self._rate(flow)
            flow.left -= flow.rate * (now - flow.since_s)
            flow.rate, flow.since_s = rate, now
            flow.version += 1
            self._push(now + max(0.0, flow.left) / rate, flow, flow.version)

    def _rate(self, flow: _Flow) -> float:
        source, target = flow.channel.route
        pairs, num_bytes = flow.channel.pairs, flow.channel.bytes
        if source == target:
            return self._links.within(source).bytes_per_s(num_bytes, pairs)
        link = self._links.between(source, target)
        leaving = sum(
            other.channel.pairs
            for other in self._flows[source]
            if other.channel.route[0] == source != other.channel.route[1]
        )
        coming = sum(
            other.channel.pairs
            for other in self._flows[target]
            if other.channel.route[1] == target != other.channel.route[0]
        )
        shared = max(leaving, coming)
        return pairs / shared * link.bytes_per_s(num_bytes, shared)

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
            self._flows[node].discard(flow)
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


def gather_time(num_bytes: float, tp: int, within: Link | None) -> float:
    """Seconds in which the GPUs of a unit give each other the parts of a message of so many bytes that each received: a ring."""
    if tp == 1 or within is None:
        return 0.0
    return (tp - 1) * within.seconds(num_bytes / tp, tp)


def reduce_seconds(plan: ClusterPlan, costs: CostTable, links: Links) -> float:
    """Seconds in which replicas sum the gradients of all layers, nothing beside it.

    The owners of a layer form rings, one for each slice of its largest degree. A ring crosses each of its nodes' ports once,
    whatever number of owners is on the node. Rings of one node leave it by different GPUs.
    """
    width = len(plan.pipelines)
    if width < 2:
        return 0.0
    leaving: dict[str, float] = {}
    inside: dict[str, float] = {}
    senders: dict[str, dict[tuple[int, int], int]] = {}
    peers: dict[str, set[str]] = {}
    for layers, owners in owned(plan):
        nodes: dict[str, list[tuple[int, int]]] = {}
        for index, place in enumerate(owners):
            nodes.setdefault(plan.pipelines[index].stages[place].node, []).append((index, place))
        whole = sum(costs.whole_bytes(layer) for layer in layers)
        moved = 2 * (width - 1) / width * whole * costs.gradient_bytes_per_byte
        for node, here in nodes.items():
            degrees = {(index, place): plan.pipelines[index].stages[place].tp for index, place in here}
            if len(nodes) > 1:
                leaving[node] = leaving.get(node, 0.0) + moved
                senders.setdefault(node, {}).update(degrees)
                peers.setdefault(node, set()).update(nodes.keys() - {node})
            if len(here) > 1:
                inside[node] = inside.get(node, 0.0) + moved / min(degrees.values())
    seconds = [0.0]
    for node, num_bytes in leaving.items():
        pairs = sum(senders[node].values())
        rate = min(links.between(node, peer).bytes_per_s(num_bytes / pairs, pairs) for peer in peers[node])
        if rate / pairs > _FAST_BYTES_PER_S:
            rate *= _BOTH_WAYS_SHARE
        seconds.append(num_bytes / rate)
    for node, num_bytes in inside.items():
        seconds.append(num_bytes / links.within(node).bytes_per_s(num_bytes))
    return max(seconds)


def owned(plan: ClusterPlan) -> Iterator[tuple[range, tuple[int, ...]]]:
    """Runs of layers with the same owners: for each pipeline the place of its stage."""
    firsts = sorted({stage.first for pipeline in plan.pipelines for stage in pipeline.stages})
    places = [0] * len(plan.pipelines)
    for first, stop in itertools.pairwise([*firsts, plan.num_layers]):
        for index, pipeline in enumerate(plan.pipelines):
            if pipeline.stages[places[index]].last < first:
                places[index] += 1
        yield range(first, stop), tuple(places)
