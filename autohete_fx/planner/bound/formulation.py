"""The integer program: in comes a problem, out come decisions and a proven bound. OR-Tools' CP-SAT solves it.

Numbers are integers: bytes as they are, seconds in ticks of one 2**20th of the blocks' total work, rounded down. A
memory constraint is therefore exact, and a bound on the rounded times is a bound on the true ones.

Choice (`Variables._add_choices`). Block b = 0..n-1 has treatments k of its activations and places l of its parameters and
states. `choices` leaves out those that are not allowed, pinned, or without a gain:

    x[b,k], y[b,l] in {0,1},   sum over k of x[b,k] = 1,   sum over l of y[b,l] = 1.

Whatever a block takes, of a lane or of memory, its activations and its places take independently of each other. A quantity q of
both is q(0,l) + q(k,0) - q(0,0), where 0 keeps activations and is the first place (`Variables._of_block`). Every pair therefore
needs no variable of its own, and a relaxation loses nothing. Whatever shares x and y have, there are shares of pairs that have
them. Written q[b], a quantity stands for the sum over l of q(0,l) y[b,l] and over k of (q(k,0) - q(0,0)) x[b,k].

Memory (`Program._add_device_memory`, `Program._add_memory_elsewhere`). Bytes of block b on the device while another
block runs do not depend on other blocks' options. With m(b,s) from `device_use.device_bytes` for every span s, and with
h(b) and o(b) what it holds on the host and on disk

    fixed_bytes + sum over b of m[b,s] <= device budget,   sum of h[b] <= host budget,   sum of o[b] <= size of the disk.

m is taken for prefetch distance 1, the smallest there is. The left side is the simulator's own figure at distance 1. From one
span to the next the m of only a few blocks change. The device rows are therefore written as a running sum, which keeps them
short:

    M[s] >= M[s-1] + sum over b of (m[b,s] - m[b,s-1]),  M[s] <= device budget,  with fixed_bytes for M[-1].

Time of one pass (`Program._add_pass`): the forward takes blocks in order, the backward in reverse order, and i is the position.
For block i, w[i] is the work on compute, u[i] the copies up that it needs, d[i] the copies down that it makes. A copy costs
tensors * latency_s + bytes / bandwidth. E[i] is when compute is done with i, waits at its end included. U[i] is when the up
lane is done with i, D[i] the down lane; E[-1] and before is when the pass begins. Copies are issued at most a blocks ahead.

    E[i] >= E[i-1] + w[i]            blocks run in order
    E[i] >= U[i] + w[i]              a block starts once it has what it needs
    U[i] >= U[i-1] + u[i]            the up lane works in order
    U[i] >= E[i-1-a] + u[i]          i's copies are issued at the start of i-a at the earliest
    D[i] >= D[i-1] + d[i]            the down lane works in order
    D[i] >= E[i-1] + w[i] + d[i],  D[i] >= U[i] + w[i] + d[i]      a copy down follows the work that makes it
    E[i] >= D[i-a],  E[n-1] >= D[n-1]                              the source is freed a blocks later at the latest

Where ranks share blocks, a pass has a lane for collectives as well: `gathering` has its rows (`Program._add_gathering_pass`).

Replicas average gradients between the last backward and the updates, while nothing else runs: that is one sum, which the objective
has besides.

Updates have their rows in `updates` (`UpdateRows`). V is when the device has done its own, and R[b] when the update lane has done
blocks 0..b. K[b] is when it has done those of them after whose updates parameters go up. Where a forward waits for updates, Z[b] is
when streamed states of 0..b are home again.

A pass that waits for updates (`Program._add_pass` with K) begins at V. It is a forward, its w, u, d with those of the updates
added. Under a synchronous schedule it is a pass of these alone, at whose end R[n-1] has to be, too, and which a forward
follows.

    U[i] >= K[i] + u[i]              what was updated on the host is copied afterwards (a = 1)

Before anything else goes down, streamed states go home, and i waits for those of 0..i:

    E[i] >= Z[i] + w[i],   D[i] >= Z[i] + w[i] + d[i],   E[n-1] >= Z[n-1] + d[0] + .. + d[n-1]

A block without states waits for those of blocks before it, which these waited for already. A copy down waits for all, which no row
but the last says: a block that copies nothing down does not wait. No row knows that the last slot goes home when all are up.

Where no pass issues copies up of updates, Q[i] is when those that i waits for are there, and u is without them. In the place of
the row above there are

    E[i] >= Q[i] + w[i],   D[i] >= Q[i] + w[i] + d[i]

Objective (`Program.minimize_step`): micro_batches times a forward and a backward. The first forward is the pass that waits for
updates or has that pass before it, and it alone gathers what is replicated (`work.forward_passes`). For a = 1 the program decides,
and adds COPY_WEIGHT times the seconds of all copies; for other distances it does not.

Contention (`Program._add_contention`). Where a machine has any, `contention` has rows of how long lanes take that slow each other
down. All times are those with contention, which other rows bound with the seconds of work alone. The last backward may then have
other times than those before it, since updates run beside it.

For a = 1 the program is the simulator, unless lanes contend, updates send at once, or states are streamed beside a forward.
At prefetch distance 1 copies are queued in the order in which blocks need them. For fixed x and y the simulated times are
therefore the least solution of the inequalities above. Each time is the largest of the right sides. Where a block has no copy,
its U and D add no wait. U[i] is then the larger of U[i-1], for which i-1 waited already, and E[i-2]. D[i] is the larger of
D[i-1], for which the wait at the end of i comes first, and the end of work. Where it uploads nothing, K[i] is that of the last
block before it that does, or no later than V. For the copy of that block i-1 waited already. Lanes are idle where a pass begins
that waits for no update. Each pass ends by waiting for all copies it made, and used all copies that it fetched; so their times
add up. Without priority K is not in that order: then the program has the end of all updates only, and bounds the simulator.

For larger a, where the program decides, all blocks copy a blocks ahead. Copies are queued in their order there, too, so the row
of a = 1 after K holds. All copies down wait until all states are home, as they do where the first blocks offload. Passes that
gather have no such rows:

    D[0] >= Z[n-1] + d[0]

In every other case it is a lower bound on all plans with prefetch distances up to a. Take such a plan and a block i of a pass.
For every j <= i the copies that the blocks j..i need are issued after the work of block j-1-a. They take one lane, and are
complete before i starts, in whatever order. Therefore i starts no sooner than E[j-1-a] + u[j] + ... + u[i], and the largest of
these is the least U[i]. Copies of what was updated on the host may be overtaken by others at larger distances, so for these

    E[i] >= Q[i] + w[i],   D[i] >= Q[i] + w[i] + d[i],   Q[i] >= K[i] + v[i],   Q[i] >= Q[i-1] + v[i]

with v[i] the seconds of such copies only. Then blocks are updated in their order, and those updated after c are copied after c
is updated. The second is as above: i's copy down follows its work, which starts once it has what it needs.

Where updates send at once it is one for a = 1 too, as `updates` says. All other rows hold in every replay. Memory at distance 1
is at most the memory at any distance, since an earlier issue only lengthens the life of a buffer. The plan's x and y are
therefore feasible here, at an objective no larger than its simulated time.

Identical blocks are interchangeable in the sums of work but not in memory or in the chain of waits. No order is therefore
imposed on them. Their symmetry is met outside. `starts` tries patterns, of which there are few however many blocks there are,
and `relaxation` bounds what symmetry does not weaken.
"""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial

import numpy as np
from ortools.sat.python import cp_model

from autohete_fx.ir import BlockDecision, Problem
from autohete_fx.planner.bound.contention import ContentionRows
from autohete_fx.planner.bound.variables import Linear
from autohete_fx.planner.model.choices import joined
from autohete_fx.planner.model.device_use import device_bytes
from autohete_fx.planner.model.figures import disk_bytes, host_bytes
from autohete_fx.planner.model.work import (
    BACKWARD_PASS,
    COPY_LANES,
    GRADIENTS_LANE,
    UPDATES_LANE,
    PassKind,
    Work,
    forward_passes,
    updating_pass,
)

RELATIVE_GAP = 1e-3
DETERMINISTIC_PER_SECOND = 0.15
"""CP-SAT's deterministic seconds per wall-clock second, measured on these programs and rounded down."""
_LEAST_S = 0.05


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """The solver's answer.

    Attributes:
        decisions: the best that it found, at prefetch distance 1; None where it found none.
        bound: no solution has a smaller objective: seconds or bytes, as asked.
        exhausted: it ended by itself: ``decisions`` are best within the gap, or there are none at all.
    """

    decisions: tuple[BlockDecision, ...] | None
    bound: float
    exhausted: bool


class Program(ContentionRows):
    """One integer program over a problem with at least one block; build, set one objective, solve. Device memory is that of plans
    at prefetch distance ``held``: only for 1 the program bounds others, and for more it decides (a = ``held``)."""

    def __init__(self, problem: Problem, *, held: int = 1) -> None:
        super().__init__(problem)
        self.held = held
        self._add_memory_elsewhere()

    def _add_device_memory(self, limit: Linear) -> None:
        """A row for every span."""
        held = self.held
        options = [(b, replace(o, prefetch_distance=held)) for b in range(self.num_blocks) for o in self._options(b)]
        worth = np.split(
            device_bytes(self.problem, *zip(*options, strict=True)), np.cumsum(list(map(len, self.chosen)))[:-1]
        )
        use = [self._added(block, of_block) for block, of_block in enumerate(worth)]
        spans = range(use[0].shape[1])
        changes = [np.diff(table, axis=1, prepend=0) for table in use]
        in_use: Linear = self.problem.fixed_bytes
        for place in range(len(spans)):
            in_use_before, in_use = in_use, self._number(f"M[{spans[place]}]", self.bytes_unit)
            self.model.add(in_use >= in_use_before + self._weighted([change[:, place] for change in changes]))
            self.model.add(in_use <= limit)

    def _bytes_of(self, used: Callable[[Problem, int, BlockDecision], int]) -> Linear:
        return self._weighted(
            [self._of_block(block, partial(used, self.problem, block)) for block in range(self.num_blocks)]
        )

    def _add_memory_elsewhere(self) -> None:
        if self.problem.host_budget_bytes is not None:
            self.model.add(self._bytes_of(host_bytes) <= self.problem.host_budget_bytes)
        if self.problem.allow_disk_optimizer:
            self.model.add(self._bytes_of(disk_bytes) <= self.problem.machine.disk_bytes)

    def _add_pass(
        self,
        kind: PassKind,
        ahead: int,
        *,
        begin: Linear = 0,
        updated: Sequence[Linear] | None = None,
        copied: Sequence[Linear] | None = None,
        home: Sequence[Linear] | None = None,
    ) -> tuple[cp_model.IntVar, list[cp_model.IntVar]]:
        """Rows of one pass; returns when it ends, and when each block has landed: its work and copies down are done.

        ``updated``: when the update lane has done those of each block and the blocks before it that are copied up then.
        ``copied``: when what they need and no pass issues is there. ``home``: when their streamed states are home.
        """
        if self._gathers(kind):
            return self._add_gathering_pass(kind, ahead, begin=begin, updated=updated, copied=copied, home=home)
        add = self.model.add
        order = range(self.num_blocks)[::-1] if kind.reverse else range(self.num_blocks)
        ends = [self._time(f"E[{block}]") for block in order]
        ups = {lane: [self._time(f"U[{block}]") for block in order] for lane in COPY_LANES if lane.before}
        downs = {lane: [self._time(f"D[{block}]") for block in order] for lane in COPY_LANES if lane.after}
        last_copied: Linear = begin
        for i, block in enumerate(order):
            w, before = self._sum([block], kind.computes), ends[i - 1] if i else begin
            u = {lane: self._sum([block], kind.of(lane.before)) for lane in ups}
            d = {lane: self._sum([block], kind.of(lane.after)) for lane in downs}
            add(ends[i] >= before + w)
            for lane, up in ups.items():
                add(ends[i] >= up[i] + w)
                add(up[i] >= (up[i - 1] if i else begin) + u[lane])
                if i - 1 - ahead >= 0:
                    add(up[i] >= ends[i - 1 - ahead] + u[lane])
            for lane, down in downs.items():
                add(down[i] >= (down[i - 1] if i else 0) + d[lane])
                for start in (before, *(up[i] for up in ups.values())):
                    add(down[i] >= start + w + d[lane])
                if i - ahead >= 0:
                    add(ends[i] >= down[i - ahead])
                if home is not None:
                    add(down[i] >= home[i] + w + d[lane])
            if home is not None:
                add(ends[i] >= home[i] + w)
            if copied is not None:
                last_copied = copied[i]
            elif updated is not None and ahead > self.held:
                last_copied = self._add_copies_of_updated(block, kind, updated[i], last_copied)
            elif updated is not None:
                add(ups[UPDATES_LANE][i] >= updated[i] + u[UPDATES_LANE])
                continue
            else:
                continue
            add(ends[i] >= last_copied + w)
            for lane, down in downs.items():
                add(down[i] >= last_copied + w + d[lane])
        for lane, down in downs.items():
            add(ends[-1] >= down[-1])
            if home is not None:
                add(ends[-1] >= home[-1] + self._sum(order, kind.of(lane.after)))
                if self.held > 1:
                    add(down[0] >= home[-1] + self._sum(order[:1], kind.of(lane.after)))
        landed = downs[GRADIENTS_LANE]
        return ends[-1], landed[::-1] if kind.reverse else landed

    def _add_step(self, ahead: int) -> Linear:
        """Rows of a whole step; returns its ticks."""
        problem = self.problem
        forwards: Linear = 0
        for kind, count in forward_passes(problem):
            forward, _ = self._add_pass(kind, ahead)
            self._add_contention(kind, forward)
            forwards += count * forward
        if not problem.training:
            return forwards
        backward, landed = self._add_pass(BACKWARD_PASS, ahead)
        earlier = backward  # and of those without updates beside them
        if problem.micro_batches > 1 and problem.machine.contention and not self.updates_begin_together:
            earlier, _ = self._add_pass(BACKWARD_PASS, ahead)
        if problem.micro_batches > 1:
            self._add_contention(BACKWARD_PASS, earlier)
        device_end, updated, uploaded = self._add_updates(backward, landed)
        ready, copied = uploaded if problem.schedule.priority else None, None
        if self.sends_at_once:
            begin = [backward] * self.num_blocks if self.updates_begin_together else landed
            ready, copied = None, self._add_copies_at_once(backward, begin, updated)
        kind, end, home = updating_pass(problem), self._time("T"), self._add_way_home(backward)
        self.model.add(end >= self._add_pass(kind, ahead, begin=device_end, updated=ready, copied=copied, home=home)[0])
        # The last that the lane does: in its order without priority, block 0.
        last = updated[-1 if problem.schedule.priority else 0]
        self.model.add(end >= last)
        averaged = self._sum(range(self.num_blocks), (Work.AVERAGE,))
        first = backward if self.updates_begin_together else landed[-1]
        self._add_contention_of_updates(backward, first, last, end + averaged)
        return forwards + (problem.micro_batches - 1) * earlier + end + averaged

    def minimize_step(self, *, ahead: int) -> None:
        """Ask for the least seconds of an optimizer step within the budgets; ``Answer.bound`` is in seconds.

        ``ahead`` is how many blocks ahead copies may be issued: as many as the program holds to decide, more to bound.
        """
        if self.problem.device_budget_bytes is not None:
            self._add_device_memory(self.problem.device_budget_bytes)
        step = self._add_step(ahead)
        # Of plans that are as fast, the one that copies least. A bound must not have this term.
        self.model.minimize(step + self._ticks_of_copies() if ahead == 1 else step)

    def minimize_peak(self) -> None:
        """Ask for the least device peak, whatever the device budget; ``Answer.bound`` is in bytes."""
        peak = self._number("peak", self.bytes_unit)
        self._add_device_memory(peak)
        self.model.minimize(peak)

    def minimize_host(self) -> None:
        """Ask for the least host memory within the device budget; ``Answer.bound`` is in bytes."""
        if self.problem.device_budget_bytes is not None:
            self._add_device_memory(self.problem.device_budget_bytes)
        self.model.minimize(self._bytes_of(host_bytes))

    def solve(
        self, *, limit_s: float, deadline: float, hint: Sequence[BlockDecision] | None = None, in_seconds: bool = False
    ) -> Answer:
        """Search for about ``limit_s`` seconds of a usual core, counted so that every run does the same.

        ``deadline``, a time of `time.monotonic`, ends it on a machine that is too slow for that.
        """
        solver = cp_model.CpSolver()
        solver.parameters.num_workers = 1
        solver.parameters.random_seed = 0
        solver.parameters.linearization_level = 2
        solver.parameters.relative_gap_limit = RELATIVE_GAP if in_seconds else 0.0
        solver.parameters.max_deterministic_time = DETERMINISTIC_PER_SECOND * limit_s
        solver.parameters.max_time_in_seconds = max(_LEAST_S, deadline - time.monotonic())
        self.model.clear_hints()
        if hint is not None:
            for block, decision in enumerate(hint):
                plain = replace(decision, prefetch_distance=1)
                wanted = [joined(option, plain) == plain for option in self.treated[block]]
                wanted += [joined(plain, option) == plain for option in self.placed[block]]
                for variable, is_wanted in zip(self.chosen[block], wanted, strict=True):
                    self.model.add_hint(variable, is_wanted)
        status = solver.solve(self.model)
        assert status != cp_model.MODEL_INVALID, self.model.validate()
        decisions = None
        if status in (cp_model.OPTIMAL, cp_model.FEASIBLE):
            decisions = self.decisions([[solver.value(x) for x in of_block] for of_block in self.chosen])
        unit = self.tick_s if in_seconds else 1.0
        exhausted = status in (cp_model.OPTIMAL, cp_model.INFEASIBLE)
        bound = 0.0 if status == cp_model.INFEASIBLE else solver.best_objective_bound * unit
        return Answer(decisions=decisions, bound=bound, exhausted=exhausted)
