"""The lanes of a replay: in come pieces of work in the order of the program, out come clocks, busy seconds and events.

Every lane works in the order in which it is given work. The compute lane's clock is the program's. Work is given to another
lane at that time, and the program waits for it by name and block.
"""

from collections import Counter

from autohete_fx.ir import Lane, Machine
from autohete_fx.planner.model.contention import Factors, Piece, Times
from autohete_fx.planner.model.figures import copy_s
from autohete_fx.planner.model.shared_lane import SharedLane
from autohete_fx.planner.model.simulation import Event


class LaneClocks:
    """The compute lane's clock, and the other lanes' queues.

    Attributes:
        busy: seconds of work by lane.
        free_at: when each lane is done with what it was given; of the compute lane, the program's clock.
        events: pieces of work, where they are kept.
        copied_up: begin and end of all copies up, and of what they stand still for.
        counted_from: when the step began that is replayed.
        times: of all work that takes longer beside other work, where the machine has contention.
    """

    def __init__(self, machine: Machine, *, keep_events: bool, factors: Factors) -> None:
        self.machine, self.keep_events = machine, keep_events
        self.events: list[Event] = []
        self.busy = dict.fromkeys(Lane, 0.0)
        self.free_at = dict.fromkeys(Lane, 0.0)
        self.copied_up: list[tuple[float, float]] = []
        self._done_at: dict[tuple[str, int], float] = {}  # under way: label and block to end
        self._shared_up: SharedLane | None = None  # h2d, where updates send at once
        self._served = 0  # blocks whose shared copies up are known
        self.times: list[Times] = []
        self.counted_from = 0.0
        self._factors, self._numbers = factors, Counter[tuple[Lane, str, int]]()
        self._shared_pieces: dict[tuple[str, int], Piece] = {}

    @property
    def clock(self) -> float:
        """The program's time."""
        return self.free_at[Lane.COMPUTE]

    @property
    def shares_up(self) -> bool:
        """Whether copies up take what is left of their lane."""
        return self._shared_up is not None

    def forget(self) -> None:
        """Let what is under way end, but count no work until now."""
        self.events, self.busy, self.counted_from = [], dict.fromkeys(Lane, 0.0), self.clock

    def work(self, lane: Lane, label: str, block: int, seconds: float, ready_at: float = 0.0) -> float:
        """Occupy a lane; returns when it ends."""
        start = max(self.free_at[lane], ready_at)
        piece, seconds = self.lengthened(lane, label, block, seconds)
        end = start + seconds
        self.free_at[lane] = end
        self.note(piece, start, end)
        if lane is Lane.H2D:
            self.copied_up.append((start, end))
        return end

    def lengthened(self, lane: Lane, label: str, block: int, seconds: float) -> tuple[Piece, float]:
        """The next piece of a kind, and the seconds that it takes beside others."""
        piece = Piece(lane, label, block, self._numbers[lane, label, block])
        self._numbers[lane, label, block] += 1
        return piece, seconds * self._factors.get(piece, 1.0)

    def note(self, piece: Piece, start_s: float, end_s: float) -> None:
        """Record when a piece of work, or a part of one, begins and ends."""
        self.busy[piece.lane] += end_s - start_s
        if self.machine.contention:
            self.times.append((piece, start_s, end_s))
        if self.keep_events and end_s > start_s:
            own = Event(lane=piece.lane, label=piece.label, block=piece.block, start_s=start_s, end_s=end_s)
            self.events.append(own)

    def start(self, lane: Lane, label: str, block: int, seconds: float) -> None:
        """Queue work on a lane, which the program waits for later."""
        if seconds:
            self._done_at[label, block] = self.work(lane, label, block, seconds, self.clock)

    def issue(
        self, lane: Lane, label: str, block: int, num_bytes: int, num_tensors: int = 1, ready_at: float = 0.0
    ) -> None:
        """Queue copies on a lane, of something that is there ``ready_at``."""
        if num_bytes:
            ready, seconds = max(self.clock, ready_at), copy_s(self.machine, lane, num_bytes, num_tensors)
            if lane is Lane.H2D and self._shared_up is not None:
                self.share(label, block, seconds, ready)
            else:
                self._done_at[label, block] = self.work(lane, label, block, seconds, ready)

    def wait(self, label: str, block: int) -> None:
        """Hold the program until work is complete, if it is under way."""
        self.hold(self._done_at.pop((label, block), 0.0))

    def hold(self, until_s: float) -> None:
        """Hold the program until then."""
        self.free_at[Lane.COMPUTE] = max(self.clock, until_s)

    def done_at(self, label: str, block: int) -> float:
        """When work is complete; now, if none is under way."""
        return self._done_at.get((label, block), self.clock)

    def stop_copies(self, seconds: float) -> float:
        """Let the lanes that copy stand still from now on, when they are done with what they were given; returns until when."""
        begin = self.clock
        if seconds:
            self.free_at |= {lane: begin + seconds for lane in (Lane.H2D, Lane.D2H)}
            self.copied_up.append((begin, begin + seconds))
        return begin + seconds

    def share_up(self, lane: SharedLane) -> None:
        """From now on copies up take what is left of their lane."""
        self._shared_up = lane

    def share(self, label: str, block: int, seconds: float, ready_at: float) -> None:
        """Give the shared lane a copy, which can begin from ``ready_at`` on."""
        assert self._shared_up is not None
        self._shared_pieces[label, block], seconds = self.lengthened(Lane.H2D, label, block, seconds)
        self._shared_up.add(label, block, seconds, ready_at)

    def serve_up(self, block: int) -> None:
        """Settle when shared copies up end for all blocks up to this one. All that they need has been issued."""
        if self._shared_up is None:
            return
        while self._served <= block:
            for label, begin, end in self._shared_up.serve(self._served):
                self.note(self._shared_pieces[label, self._served], begin, end)
                self._done_at[label, self._served] = end
            self._served += 1
