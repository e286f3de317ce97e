"""The rows of a pass in which blocks gather or reduce.

In come its kind and when updates are done, out come variables of its ends.

The rows of `formulation` hold, with what follows in the place of those of one pass. Blocks are by position i, as there. Seconds
of i's gather and reduce are g[i] and r[i]. The up lane copies u[i] that i itself waits for, and c[i] that its gather waits for.
An update's work before the gather is x[i], all other work w[i]. F[i] is when compute is done with i, E[i] when it is with the
waits at its end, too. A gather of i is issued at the begin of j = max(0, i-1), at A[i]. G[i] is when it ends, N[i] when the
reduce of i does, V[i] when the up lane is done with c[i]. I[j] is when the program comes to issue gathers at j: E[j-1] in most
cases.

    V[i] >= U[j-1] + c[i],  V[i] >= E[j-1-a] + c[i],  V[1] >= V[0] + c[1]
    A[i] >= I[j] + x[i],    A[i] >= V[i] + x[i],  A[1] >= A[0] + x[1],  A[i] >= Q[i] + x[i],  A[i] >= Z[i] + x[i]
    G[i] >= A[i] + g[i],    G[i] >= what net was given before + g[i]
    U[i] >= V[i+1] + u[i],  U[i] >= U[i-1] + u[i],  U[i] >= E[i-1-a] + u[i]
    F[i] >= I[i] + w[i],    F[i] >= A[i+1] + w[i],  F[i] >= U[i] + w[i],  F[i] >= G[i] + w[i],  F[i] >= Q[i] + w[i]
    N[i] >= F[i] + r[i],    N[i] >= what net was given before + r[i]
    E[i] >= F[i],           E[i] >= N[i-1],  E[n-1] >= N[n-1]

A forward begins a block j that gathers nothing before it issues the next gather. It waits for what j reads, and does j's
update, x[j]. Then H[j] is when the up lane is done with that, V[j+1] follows H[j] in the place of U[j-1] and E[j-1-a], and U[j]
is V[j+1].

    H[j] >= U[j-1] + u[j],  H[j] >= E[j-1-a] + u[j],  I[j] >= x[j] + each of E[j-1], H[j], Q[j]

Copies down of what is reduced follow N[i] and F[i+1] and are waited for a block later; others follow F[i] and N[i-1].

    D[i] >= N[i] + d[i],  D[i] >= F[i+1] + d[i],  E[i+1+a] >= D[i]     where i reduces
    D[i] >= F[i] + d[i],  D[i] >= N[i-1] + d[i],  E[i+a] >= D[i]       where it does not
    D[i] >= D[i-1] + d[i],  E[n-1] >= D[n-1]

Z[i] is when streamed states are home, as in `updates`, and is wherever Q is. Q is the chain of copies of what was updated on
the host. `formulation` has it where it bounds distances above 1, and `updates` for what is sent at once. A forward waits for blocks
in their order, so that all up to i have what they need at A[i].

These rows bound all plans with prefetch distances up to a. Net works in the order of the program, so its rows are what happens.
Copies up that are waited for up to A[i] are V[i]'s, and issued no sooner than a blocks before that. They take one lane, in
whatever order. For a = 1 they are the simulator, with two exceptions. The up lane may do a backward's reloads before it does c, and
states may be streamed beside a forward.
"""

from collections.abc import Iterable, Sequence

from ortools.sat.python import cp_model

from autohete_fx.planner.bound.variables import Linear, Variables
from autohete_fx.planner.model.work import GRADIENTS_LANE, UPDATES_LANE, PassKind, Work, slots_of


class GatheringRows(Variables):
    """Rows of passes with collectives, beside the choices of a problem."""

    def _gathers(self, kind: PassKind) -> bool:
        """Whether any block gathers or reduces in a pass of that kind."""
        slots = (slots_of(self.problem, block, kind) for block in range(self.num_blocks))
        return any(each.gathers or each.reduces for each in slots)

    def _add_gathering_pass(
        self,
        kind: PassKind,
        ahead: int,
        *,
        begin: Linear = 0,
        updated: Sequence[Linear] | None = None,
        copied: Sequence[Linear] | None = None,
        home: Sequence[Linear] | None = None,
    ) -> tuple[cp_model.IntVar, list[cp_model.IntVar]]:
        """Rows of one pass, as those of `Program._add_pass`."""
        order = range(self.num_blocks)[::-1] if kind.reverse else range(self.num_blocks)
        if updated is not None:
            copied, last = [], begin
            for block in order:
                last = self._add_copies_of_updated(block, kind, updated[block], last)
                copied.append(last)
        rows = _Pass(self, kind, ahead, order, begin, copied, home)
        for i in range(len(order)):
            rows.add_begin(i)
            rows.add_end(i)
        if home is not None:
            self.model.add(rows.ends[-1] >= home[-1] + self._sum(order, kind.of(GRADIENTS_LANE.after)))
        return rows.ends[-1], rows.downs[::-1] if kind.reverse else rows.downs

    def _add_copies_of_updated(self, block: int, kind: PassKind, updated: Linear, previous: Linear) -> cp_model.IntVar:
        """The chain Q, where copies may overtake others."""
        copied, copies = self._time(f"Q[{block}]"), self._sum([block], kind.of(UPDATES_LANE.before), waiting=True)
        self.model.add(copied >= updated + copies)
        self.model.add(copied >= previous + copies)
        return copied


class _Pass:
    """One pass, position after position; ``ends`` is E, ``downs`` is D."""

    def __init__(
        self,
        program: GatheringRows,
        kind: PassKind,
        ahead: int,
        order: range,
        begin: Linear,
        copied: Sequence[Linear] | None,
        home: Sequence[Linear] | None,
    ) -> None:
        self.program, self.ahead, self.order = program, ahead, order
        self.begin, self.add = begin, program.model.add
        self.needed = [each for each in (copied, home) if each is not None]
        self.begins_first = not kind.reverse
        self.slots = [slots_of(program.problem, block, kind) for block in order]
        names = "EUDF"
        self.ends, self.ups, self.downs, self.works = (
            [program._time(f"{name}[{block}]") for block in order] for name in names
        )
        self.issued: dict[int, cp_model.IntVar] = {}  # A
        self.gathered: dict[int, cp_model.IntVar] = {}  # G
        self.reduced: dict[int, cp_model.IntVar] = {}  # N
        self.net: Linear = begin
        self.down: Linear = 0
        self.last = len(order) - 1

    def add_begin(self, i: int) -> None:
        """The gathers issued at a position, and its work."""
        slots = self.slots[i]
        copies, work = self._sum(i, slots.up), self._sum(i, slots.work)
        came: Linear = self.ends[i - 1] if i else self.begin
        lane = [self.ups[i - 1] if i else self.begin, *([self.ends[i - 1 - self.ahead]] if i > self.ahead else [])]
        if self.begins_first and not slots.gathers:
            came, lane, copies = *self._add_first(i, came, lane), 0
        starts = [came]
        for at in range(i + (i > 0), min(self.last, i + 1) + 1):
            if self.slots[at].gathers:
                lane[0] = self._add_gather(at, lane, starts[-1])
                starts.append(self.issued[at])
        for earliest in lane:
            self.add(self.ups[i] >= earliest + copies)
        starts.append(self.ups[i])
        if slots.gathers:
            starts.append(self.gathered[i])
        starts += [each[i] for each in self.needed]
        for start in starts:
            self.add(self.works[i] >= start + work)

    def _add_first(self, i: int, came: Linear, lane: Sequence[Linear]) -> tuple[cp_model.IntVar, list[Linear]]:
        """What a forward does of a block before others' gathers; returns I, and H as the times that later copies follow."""
        block, slots = self.order[i], self.slots[i]
        read, begun = self.program._time(f"H[{block}]"), self.program._time(f"I[{block}]")
        copies, work = self._sum(i, slots.up), self._sum(i, slots.work_first)
        for earliest in lane:
            self.add(read >= earliest + copies)
        for earliest in (came, read, *(each[i] for each in self.needed)):
            self.add(begun >= earliest + work)
        return begun, [read]

    def _add_gather(self, at: int, lane: Sequence[Linear], before: Linear) -> Linear:
        """The gather of a block; returns when the up lane is done with what it reads."""
        program, block = self.program, self.order[at]
        read, self.issued[at], self.gathered[at] = (program._time(f"{name}[{block}]") for name in "VAG")
        slots = self.slots[at]
        copies, work, gather = (self._sum(at, works) for works in (slots.ahead, slots.work_ahead, slots.gather))
        for earliest in lane:
            self.add(read >= earliest + copies)
        for earliest in (before, read, *(each[at] for each in self.needed)):
            self.add(self.issued[at] >= earliest + work)
        for earliest in (self.issued[at], self.net):
            self.add(self.gathered[at] >= earliest + gather)
        self.net = self.gathered[at]
        return read

    def add_end(self, i: int) -> None:
        """The collectives and copies down that follow the work at a position, and the waits."""
        end, work = self.ends[i], self.works[i]
        self.add(end >= work)
        if self.slots[i].reduces:
            self.reduced[i] = self.program._time(f"N[{self.order[i]}]")
            reduce = self._sum(i, self.slots[i].reduce)
            for earliest in (work, self.net):
                self.add(self.reduced[i] >= earliest + reduce)
            self.net = self.reduced[i]
        after = [work]
        for at in (i - 1, *([i] if i == self.last else [])):
            if at >= 0 and self.slots[at].reduces:
                self.add(end >= self.reduced[at])
                after.append(self.reduced[at])
                self._add_down(at, after)
        if not self.slots[i].reduces:
            self._add_down(i, after)
        for at in range(self.last + 1) if i == self.last else (i - self.ahead - 1, i - self.ahead):
            if at >= 0 and (i == self.last or at + self.slots[at].reduces + self.ahead == i):
                self.add(end >= self.downs[at])

    def _add_down(self, at: int, after: Sequence[Linear]) -> None:
        copies = self._sum(at, (*self.slots[at].down, *self.slots[at].late))
        for earliest in (*after, self.down):
            self.add(self.downs[at] >= earliest + copies)
        self.down = self.downs[at]

    def _sum(self, at: int, works: Iterable[Work]) -> Linear:
        return self.program._sum([self.order[at]], works)
