"""The work of a block: in come a problem, a block and its decision, out come seconds by pass and lane.

`Work` is a table with a row for each kind of work. A row has the pass that does it, its lane, and its turn beside the block's
other work. The integer program (`formulation`) and the search (`replays`) know of lanes what this table says, and of seconds
what `durations` says. A new lane adds rows to the table, and their seconds to `durations`. The simulator walks the runtime's
program by itself and judges both.
"""

import enum
import functools
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import groupby

from autohete_fx.ir import BlockDecision, Lane, Optimizer, Overlap, Params, Problem
from autohete_fx.planner.model.figures import (
    UPDATED_ON_HOST,
    average_s,
    collective_s,
    copy_s,
    device_update_s,
    host_update_s,
    over_link_s,
    overlap_of,
    sends_at_once,
    states_up_s,
    streamed_bytes,
    uploaded_bytes,
    whole_of,
)

COPY_WEIGHT = 1 / 512
"""The weight of a second of copying against a second of the step.

Among plans that are as fast, the one that copies least is chosen; collectives count like copies. The lanes that move something
work for three seconds in a second at most: for this a plan is at most 3/512 slower."""


class Pass(enum.Enum):
    """A pass over all blocks. ``FIRST_FORWARD`` is the first forward of a step, on top of what all forwards do. ``UPDATES`` waits
    for updates, on top of that forward where they overlap with it. ``BETWEEN`` is none: it comes after the last backward and
    before that pass, in no order of blocks."""

    FORWARD = enum.auto()
    FIRST_FORWARD = enum.auto()
    BACKWARD = enum.auto()
    UPDATES = enum.auto()
    BETWEEN = enum.auto()


class Turn(enum.Enum):
    """When work is done in a block's part of a pass, in this order.

    ``AHEAD`` is before the block's gather where it gathers, a block earlier; elsewhere before its work, as ``BEFORE`` is. A gather
    is issued a block ahead and a reduce waited for a block later. Work ``AFTER`` follows the reduce.
    """

    AHEAD = enum.auto()
    GATHER = enum.auto()
    BEFORE = enum.auto()
    WORK = enum.auto()
    REDUCE = enum.auto()
    AFTER = enum.auto()


class Work(enum.Enum):
    """A kind of work: what it does, its pass, lane and turn. Kinds of one pass, lane and side of the block's work stand together.

    ``FORWARD`` and ``BACKWARD`` include what copies take from computation, the latter recomputation as well. ``UPLOAD`` is what
    was updated on the host, ``STATES`` what is streamed, parameters at home with it. ``STATES_BACK`` is its way home, from the step
    on where a forward waits for updates. ``GATHER_ONCE`` is of what is replicated. ``OVER_LINK`` is what ``DEVICE_UPDATE`` takes
    longer where parameters are at home.
    """

    FORWARD = "forward", Pass.FORWARD, Lane.COMPUTE, Turn.WORK
    FETCH = "fetch", Pass.FORWARD, Lane.H2D, Turn.AHEAD
    OFFLOAD = "offload", Pass.FORWARD, Lane.D2H, Turn.AFTER
    BACKWARD = "recompute, backward", Pass.BACKWARD, Lane.COMPUTE, Turn.WORK
    RELOAD = "reload", Pass.BACKWARD, Lane.H2D, Turn.BEFORE
    FETCH_AGAIN = "fetch", Pass.BACKWARD, Lane.H2D, Turn.AHEAD
    GRADIENTS = "gradients", Pass.BACKWARD, Lane.D2H, Turn.AFTER
    GATHER = "gather", Pass.FORWARD, Lane.NET, Turn.GATHER
    GATHER_ONCE = "gather", Pass.FIRST_FORWARD, Lane.NET, Turn.GATHER
    GATHER_AGAIN = "gather", Pass.BACKWARD, Lane.NET, Turn.GATHER
    REDUCE = "reduce", Pass.BACKWARD, Lane.NET, Turn.REDUCE
    STREAMED_UPDATE = "update", Pass.UPDATES, Lane.COMPUTE, Turn.AHEAD
    UPLOAD = "upload", Pass.UPDATES, Lane.H2D, Turn.AHEAD
    STATES = "states", Pass.UPDATES, Lane.H2D, Turn.AHEAD
    STATES_BACK = "states", Pass.UPDATES, Lane.D2H, Turn.AFTER
    DEVICE_UPDATE = "update", Pass.BETWEEN, Lane.COMPUTE, Turn.WORK
    OVER_LINK = "update over the link", Pass.BETWEEN, Lane.COMPUTE, Turn.WORK
    HOST_UPDATE = "update", Pass.BETWEEN, Lane.UPDATE, Turn.WORK
    AVERAGE = "average", Pass.BETWEEN, Lane.NET, Turn.REDUCE

    def __init__(self, label: str, in_pass: Pass, lane: Lane, turn: Turn) -> None:
        self.label, self.in_pass, self.lane, self.turn = label, in_pass, lane, turn
        self.index = len(type(self).__members__)

    @property
    def moves(self) -> bool:
        """Whether it moves something, and so is no computation."""
        return self.lane not in (Lane.COMPUTE, Lane.UPDATE)

    @property
    def is_copy(self) -> bool:
        """Whether it is a copy that a pass issues as far ahead as the block's prefetch distance says, or waits for as late."""
        return self.moves and self.turn in (Turn.AHEAD, Turn.BEFORE, Turn.AFTER)


SENT = Work.UPLOAD, Work.STATES
"""Copies up of updates, which a pass need not issue (`figures.sends_at_once`)."""
BY_DEVICE = Work.DEVICE_UPDATE, Work.OVER_LINK
"""Updates that the device does by itself; copies stand still for as long as the second takes."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CopyLane:
    """A lane that copies for blocks: before their work, after it, or both.

    Attributes:
        before, after: all such copies, of any pass.
    """

    before: tuple[Work, ...]
    after: tuple[Work, ...]

    @property
    def sides(self) -> tuple[tuple[Work, ...], ...]:
        """Those of the two that it has."""
        return tuple(side for side in (self.before, self.after) if side)


def _copy_lane(lane: Lane) -> CopyLane:
    copies = [work for work in Work if work.lane is lane and work.is_copy]
    return CopyLane(
        before=tuple(work for work in copies if work.turn is not Turn.AFTER),
        after=tuple(work for work in copies if work.turn is Turn.AFTER),
    )


COPY_LANES = tuple(_copy_lane(lane) for lane in dict.fromkeys(work.lane for work in Work if work.is_copy))
UPDATES_LANE = next(lane for lane in COPY_LANES if Work.UPLOAD in lane.before)
"""The lane that copies up what updates change."""
GRADIENTS_LANE = next(lane for lane in COPY_LANES if Work.GRADIENTS in lane.after)
"""The lane for whose copies down updates on the host wait."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PassKind:
    """A pass as it is replayed and bounded: its work, and whether it takes blocks in reverse."""

    works: tuple[Work, ...]
    reverse: bool = False

    def of(self, works: Iterable[Work]) -> tuple[Work, ...]:
        """Those of ``works`` that it does."""
        return tuple(work for work in works if work in self.works)

    def at(self, *turns: Turn, moves: bool) -> tuple[Work, ...]:
        """Its copies and collectives, or its computations, at these turns."""
        return tuple(work for work in self.works if work.turn in turns and work.moves is moves)

    @property
    def computes(self) -> tuple[Work, ...]:
        """All its work on compute."""
        return self.at(*Turn, moves=False)


def _pass(*passes: Pass, without: tuple[Work, ...] = ()) -> PassKind:
    works = tuple(work for work in Work if work.in_pass in passes and work not in without)
    return PassKind(works=works, reverse=Pass.BACKWARD in passes)


FORWARD_PASS, BACKWARD_PASS, UPDATES_PASS = _pass(Pass.FORWARD), _pass(Pass.BACKWARD), _pass(Pass.UPDATES)
FIRST_FORWARD_PASS = _pass(Pass.FORWARD, Pass.FIRST_FORWARD)
_FORWARD_AND_UPDATES = _pass(Pass.FORWARD, Pass.FIRST_FORWARD, Pass.UPDATES, without=(Work.STATES_BACK,))
_FORWARD_AND_SENT_UPDATES = _pass(Pass.FORWARD, Pass.FIRST_FORWARD, Pass.UPDATES, without=(*SENT, Work.STATES_BACK))


def updating_pass(problem: Problem) -> PassKind:
    """The pass that waits for updates: of them alone, or the first forward as well; without what they send by themselves, and
    streamed states home."""
    if overlap_of(problem) is Overlap.NONE:
        return UPDATES_PASS
    return _FORWARD_AND_SENT_UPDATES if sends_at_once(problem) else _FORWARD_AND_UPDATES


def copies_of_updated(problem: Problem) -> tuple[Work, ...]:
    """The copies up that wait for their block's update on the host. A pass of updates alone fetches no parameters."""
    return (Work.UPLOAD,) if overlap_of(problem) is Overlap.NONE else (Work.FETCH, Work.UPLOAD)


def forward_passes(problem: Problem) -> tuple[tuple[PassKind, int], ...]:
    """The kinds of a step's forwards but for one that waits for updates, and how many there are of each.

    Where nothing can be replicated they are all of one kind.
    """
    if not problem.training:
        return ((FORWARD_PASS, 1),)
    waits = overlap_of(problem) is not Overlap.NONE
    if waits or not problem.allow_replicating:
        return ((FORWARD_PASS, problem.micro_batches - waits),) if problem.micro_batches > waits else ()
    first, later = (FIRST_FORWARD_PASS, 1), (FORWARD_PASS, problem.micro_batches - 1)
    return (first, later) if problem.micro_batches > 1 else (first,)


def added_up(works: Iterable[Work]) -> Iterator[tuple[Work, ...]]:
    """The same, in groups: what one lane does on one side of a block's work in one pass. A group's seconds are added up before
    they are rounded."""
    for _, together in groupby(
        works, key=lambda work: (work.in_pass, work.lane, work.turn in (Turn.REDUCE, Turn.AFTER))
    ):
        yield tuple(together)


@dataclass(frozen=True, slots=True, kw_only=True)
class Slots:
    """The work of one block in a pass, by the order in which the program has it.

    Attributes:
        ahead: copies up that its gather waits for, a block before the block itself.
        work_ahead: work before the gather; ``work_first`` where it has none, which others' gathers wait for.
        gather: on net, for which the block waits.
        up: copies up that the block itself waits for.
        work: on compute.
        reduce: on net, waited for a block later.
        down: copies down after the work; ``late`` where they wait for the reduce.
    """

    ahead: tuple[Work, ...]
    work_ahead: tuple[Work, ...]
    gather: tuple[Work, ...]
    work_first: tuple[Work, ...]
    up: tuple[Work, ...]
    work: tuple[Work, ...]
    reduce: tuple[Work, ...]
    down: tuple[Work, ...]
    late: tuple[Work, ...]

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
    gather, reduce, down = (kind.at(turn, moves=True) for turn in (Turn.GATHER, Turn.REDUCE, Turn.AFTER))
    ahead, own = kind.at(Turn.AHEAD, moves=True), kind.at(Turn.BEFORE, moves=True)
    first = kind.at(Turn.AHEAD, moves=False) if gather else ()
    gathers = bool(gather) and (whole.gathered_again if kind.reverse else whole.gathered) > 0
    reduces = bool(reduce) and whole.reduced > 0
    return Slots(
        ahead=ahead if gathers else (),
        work_ahead=first if gathers else (),
        gather=gather if gathers else (),
        work_first=() if gathers else first,
        up=own if gathers else kind.of((*own, *ahead)),
        work=tuple(work for work in kind.computes if work not in first),
        reduce=reduce if reduces else (),
        down=() if reduces else down,
        late=down if reduces else (),
    )


@dataclass(frozen=True, slots=True)
class Durations:
    """Seconds of one block's work under one decision, one for every member of `Work` in its order."""

    seconds: tuple[float, ...]

    def __getitem__(self, work: Work) -> float:
        return self.seconds[work.index]

    def of(self, works: Iterable[Work]) -> float:
        """Seconds of several, added up."""
        return sum(self[work] for work in works)

    def moving_s(self, passes: int) -> float:
        """All copies and collectives of a step with so many passes forward and backward."""
        found = passes * sum(self.of(together) for together in added_up(MOVED_IN_PASSES))
        for together in added_up(MOVED_ONCE):
            found += self.of(together)
        return found


_MOVED = [work for work in Work if work.moves]
MOVED_IN_PASSES = tuple(work for work in _MOVED if work.in_pass in (Pass.FORWARD, Pass.BACKWARD))
"""The work of every pass in which something is moved."""
MOVED_ONCE = tuple(work for work in _MOVED if work not in MOVED_IN_PASSES)
"""Likewise of every step."""


def durations(problem: Problem, block: int, decision: BlockDecision) -> Durations:
    """The seconds of a block's work, as if nothing else worked meanwhile."""
    found = _of_training(problem, block, decision) if problem.training else _of_inference(problem, block, decision)
    return Durations(tuple(found.get(work, 0.0) for work in Work))


def _of_inference(problem: Problem, block: int, decision: BlockDecision) -> dict[Work, float]:
    cost, machine = problem.costs[block], problem.machine
    fetch_s = _fetch_s(problem, block, decision)
    return {
        Work.FORWARD: cost.forward_s + machine.copy_share * fetch_s,
        Work.FETCH: fetch_s,
        Work.GATHER: collective_s(problem, whole_of(problem, block).gathered),
    }


def _of_training(problem: Problem, block: int, decision: BlockDecision) -> dict[Work, float]:
    cost, machine = problem.costs[block], problem.machine
    up_s, down_s = (functools.partial(copy_s, machine, lane) for lane in (Lane.H2D, Lane.D2H))
    whole, activations = whole_of(problem, block), cost.activations(decision)
    offloaded = activations.offloaded_bytes, activations.offloaded_tensors
    offload_s, reload_s = down_s(*offloaded), up_s(*offloaded)
    fetch_s = _fetch_s(problem, block, decision)
    again_s = 0.0 if decision.keeps_fetched else fetch_s
    gradient_bytes = cost.part_at(cost.grad_bytes, decision, *UPDATED_ON_HOST)
    gradients_s = down_s(gradient_bytes, cost.tensors_at(decision, *UPDATED_ON_HOST))
    share = machine.copy_share
    gather_s, keeps = collective_s(problem, whole.gathered), decision.keeps_fetched or decision.replicates
    return {
        Work.FORWARD: cost.forward_s + share * (fetch_s + offload_s),
        Work.FETCH: fetch_s,
        Work.OFFLOAD: offload_s,
        Work.BACKWARD: cost.backward_s + activations.recompute_s + share * (reload_s + again_s + gradients_s),
        Work.RELOAD: reload_s,
        Work.FETCH_AGAIN: again_s,
        Work.GRADIENTS: gradients_s,
        Work.GATHER: 0.0 if decision.replicates else gather_s,
        Work.GATHER_ONCE: gather_s if decision.replicates else 0.0,
        Work.GATHER_AGAIN: 0.0 if keeps else collective_s(problem, whole.gathered_again),
        Work.REDUCE: collective_s(problem, whole.reduced),
        Work.STREAMED_UPDATE: device_update_s(problem, block, decision, Optimizer.STREAMED),
        Work.UPLOAD: up_s(uploaded_bytes(cost, decision)),
        Work.STATES: states_up_s(problem, block, decision),
        Work.STATES_BACK: down_s(streamed_bytes(cost, decision)),
        Work.DEVICE_UPDATE: device_update_s(problem, block, decision, Optimizer.DEVICE),
        Work.OVER_LINK: over_link_s(problem, block, decision),
        Work.HOST_UPDATE: host_update_s(problem, block, decision) if cost.num_params else 0.0,
        Work.AVERAGE: average_s(problem, block, decision),
    }


def _fetch_s(problem: Problem, block: int, decision: BlockDecision) -> float:
    cost = problem.costs[block]
    fetches = decision.params is Params.HOST
    return copy_s(problem.machine, Lane.H2D, cost.param_bytes, cost.num_param_tensors) if fetches else 0.0
