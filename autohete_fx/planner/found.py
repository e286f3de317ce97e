"""Decisions and a bound for a problem: in comes a `Problem`, out come the best decisions found and what no plan is below.

    nothing moves, fits, and its time is within OPTIMAL_GAP of the work that every plan does -> that is the plan
    patterns that fit (`starts`), the best improved (`improve`)                              -> a first plan
    the program that bounds (`formulation`), without whole numbers (`relaxation`)            -> the lower bound
    with whole numbers for blocks with large parameters in one piece                         -> a better one
    its shares in whole blocks (`rounding`), for many blocks those of a `dive` at one prefetch distance, too; repaired, improved
    within ENOUGH of the bound, the best improved                                            -> that is the plan
    for more than a few blocks, cutting planes and branches beside the search                -> a better bound
    for a few blocks, the programs that bound and decide, and their decisions improved
    random changes to all of these, and exchanges among them (`anneal`), the best improved   -> the plan
    where work takes longer beside other work, as long as it does under that plan: the same  -> a better one
    nothing fits                                                                -> InfeasiblePlanError (`infeasible`)

The search ends early where the best plan has reached the bound. A plan that moves nothing, where it fits, gives way only to one
that is faster by more than OPTIMAL_GAP. On a CUDA device there can be one without any budget. Host and device can share
the updates, so keeping everything is not a lower bound on time, and is not said to be.
"""

import time
from collections.abc import Container, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from autohete_fx.ir import BlockDecision, Problem
from autohete_fx.planner.baselines import fits
from autohete_fx.planner.bound.formulation import RELATIVE_GAP, Program
from autohete_fx.planner.bound.relaxation import Branched, Relaxed, branch, dive, ends_of, lumps_of, relax
from autohete_fx.planner.bound.work_bound import work_bound_s
from autohete_fx.planner.infeasible import infeasible, least_peak
from autohete_fx.planner.model.choices import MAX_PREFETCH_DISTANCE, choices, copies
from autohete_fx.planner.model.figures import Whole, sends_at_once, whole_of
from autohete_fx.planner.model.simulate import simulate
from autohete_fx.planner.search import effort
from autohete_fx.planner.search.anneal import anneal, terms_of
from autohete_fx.planner.search.arrays import Rows
from autohete_fx.planner.search.improve import Search
from autohete_fx.planner.search.judge import Judge
from autohete_fx.planner.search.lengthening import Lengthening, lengthening
from autohete_fx.planner.search.passes import Seconds
from autohete_fx.planner.search.replays import Replays
from autohete_fx.planner.search.rounding import Decisions, rounded, supported_choices, wasted_seconds
from autohete_fx.planner.search.starts import simple_choices, starts

OPTIMAL_GAP = 0.005
"""A plan whose gap is at most this has status ``optimal``; for less, nothing is moved."""


def found_of(
    problem: Problem, time_limit_s: float, work_s: float, near: Sequence[Decisions]
) -> tuple[Decisions, float]:
    """Decisions that keep the budgets and a lower bound in seconds. Arguments are those of `solve.solve`.

    Raises InfeasiblePlanError where no plan keeps the budgets.
    """
    stay = tuple(choices(problem, block)[0] for block in range(len(problem.costs)))
    replayed = simulate(problem, stay, events=False)
    bound_s = work_bound_s(problem)
    stays = fits(problem, replayed) and not any(copies(decision) for decision in stay)
    if stays and replayed.step_s - bound_s <= OPTIMAL_GAP * replayed.step_s:
        return stay, bound_s
    deadline = time.monotonic() + (1 - effort.REASONS_SHARE) * time_limit_s
    if not problem.costs:
        raise infeasible(problem, deadline=deadline)
    found = _Found(problem, time_limit_s, work_s, deadline, near)
    found.look(bound_s)
    best, best_s = found.judged()
    if stays and replayed.step_s <= best_s * (1 + OPTIMAL_GAP):
        return stay, found.bound_s
    return best, found.bound_s


def _is_mixture(shares: NDArray[np.float64]) -> bool:
    """Whether a block does more than a little of this and a little of that."""
    return bool(((shares > effort.LEAST_MIXED) & (shares < 1 - effort.LEAST_MIXED)).any())


def _is_among(decision: BlockDecision, allowed: Container[BlockDecision]) -> bool:
    """Whether it is one of these, at whatever distance."""
    return replace(decision, prefetch_distance=1) in allowed


class _Found:
    """The best decisions and the best bound so far."""

    def __init__(
        self, problem: Problem, time_limit_s: float, work_s: float, deadline: float, given: Sequence[Decisions]
    ) -> None:
        self.problem, self.time_limit_s, self.work_s, self.deadline = problem, time_limit_s, work_s, deadline
        self.num_blocks = len(problem.costs)
        allowed = [set(choices(problem, block)) for block in range(self.num_blocks)]
        self.given = [each for each in given if all(map(_is_among, each, allowed))]
        self.best: Decisions = ()
        self.patterns: list[Decisions] = []  # that keep the budgets, and differ
        self.near: list[Decisions] = []  # likewise, the relaxation
        self.best_s = self.best_score = float("inf")
        self.bound_s = self.relaxed_s = 0.0
        self.shares: list[tuple[NDArray[np.float64], ...]] = []  # of the relaxation, and with whole numbers for lumps
        self.lengthening: Lengthening = {}
        self.judge = Judge(problem, work_s)

    def look(self, bound_s: float) -> None:
        """Search, with a bound to begin with. Raises InfeasiblePlanError."""
        self.bound_s = bound_s
        self._look_at_patterns()
        self._learn()
        bounding = Program(self.problem)
        bounding.minimize_step(ahead=MAX_PREFETCH_DISTANCE)
        every = sum(len(choices(self.problem, block)) for block in range(self.num_blocks)) * self.num_blocks
        relaxed = self._relax(bounding, mixtures=every <= effort.MOST_CHOICES)
        # A relaxation that has been solved is rounded, whatever the clock says: that takes less time, and finds more than patterns.
        if self._is_best or (relaxed is None and self._is_done):
            return
        options = None
        if every > effort.MOST_CHOICES and relaxed is None:
            options = simple_choices(self.problem)
        elif every > effort.MOST_CHOICES:
            used = [np.maximum.reduce(of_block) for of_block in zip(*self.shares, strict=True)]
            options = supported_choices(self.problem, used)
        search = self._search(options)
        if relaxed is not None:
            self._look_near(search)
            search = self._learned(search)
        if self._is_enough or self.num_blocks <= effort.PROGRAM_BLOCKS:
            for ahead, share in ((MAX_PREFETCH_DISTANCE, effort.BOUND_SHARE), (1, effort.DECIDE_SHARE)):
                self._solve_program(search, ahead, share)
            self._search_far(search, relaxed)
            self._search_beside(search)
            return
        with ThreadPoolExecutor(1) as beside:
            branched = beside.submit(self._branch, bounding)
            self._search_far(search, relaxed)
            self._search_beside(search)
            self.bound_s = max(self.bound_s, branched.result().bound_s)

    def judged(self) -> tuple[Decisions, float]:
        """The best and its step. Contention the search estimates only: then the simulator chooses among the best."""
        if self.problem.machine.contention:
            self.best, self.best_s = self.judge.best_of(max(effort.FEWEST_JUDGED, self.judge.most))
        return self.best, self.best_s

    def _learn(self) -> None:
        """Where the machine has contention, let the simulator choose among what was found, and tell how long work takes there.

        And in what the search thought best: where that is another plan, it found one of which it knows too little.
        """
        if self.judge.teaches:
            self.best, self.best_s = self.judge.best_of(self.judge.most)
            self.lengthening = lengthening(self.problem, dict.fromkeys((self.best, self.judge.favourite)))

    def _learned(self, search: Search) -> Search:
        """The search with what is learned now."""
        if not self.judge.teaches:
            return search
        self._learn()
        return self._begun(search.replays)

    def _branch(self, bounding: Program) -> Branched:
        """A better bound. Where there was no time for a relaxation, there is none for branches on many blocks."""
        if self.num_blocks > effort.BRANCHED_BLOCKS and not self.shares:
            return Branched(bound_s=0.0, shares=None)
        if self.num_blocks > effort.BRANCHED_BLOCKS or self._walks_first:
            ends = ends_of(self.problem)
            return branch(bounding, branches=effort.LUMP_BRANCHES, deadline=self.deadline, blocks=ends)
        in_a_second = min(effort.MOST_BRANCHES_PER_SECOND, effort.BRANCHES_PER_SECOND / self.num_blocks**3)
        branches = 1 + int(self.work_s * in_a_second / self._slower)
        return branch(bounding, branches=branches, deadline=self.deadline)

    def _search_far(self, search: Search, relaxed: Relaxed | None) -> None:
        """Anneal, unless a plan is near enough the bound, and polish what that finds."""
        if self._is_done:
            return
        wasted_s = None
        if relaxed is not None:
            wasted_s = wasted_seconds(self.problem, relaxed.wasted_s, search.replays.settings)
        for row in self._anneal(search, wasted_s):
            self._allow(search, effort.POLISHING_SHARE / effort.POLISHED)
            self._keep(search, search.improve(row))

    def _search_beside(self, search: Search) -> None:
        """Anneal and polish again, with work that takes as long as it does beside other work under the best plan so far."""
        for seed, share in enumerate(effort.BESIDE_SHARES[1:] if self.judge.teaches else ()):
            search = self._learned(search)
            if self._is_done:
                return
            begin = np.array([search.replays.row(each) for each in self.judge.ranked[: effort.POLISHED]])
            terms = terms_of(search.replays, None, 0.0, None)
            found = anneal(search, terms, begin, work=int(share * self._annealed), seed=seed)
            order = np.argsort(search.score(found), kind="stable")
            for row in np.concatenate([begin[:1], found[order[: effort.POLISHED]]]):
                self._allow(search, effort.POLISHING_SHARE / effort.POLISHED)
                self._keep(search, search.improve(row))

    @property
    def _is_best(self) -> bool:
        return self.best_s - self.bound_s <= RELATIVE_GAP * self.best_s

    @property
    def _is_done(self) -> bool:
        return self._is_best or time.monotonic() > self.deadline

    @property
    def _is_enough(self) -> bool:
        return self.best_s <= self.bound_s * (1 + effort.ENOUGH) or time.monotonic() > self.deadline

    @property
    def _walks_first(self) -> bool:
        """Whether walks begin at the rounded relaxation as it is."""
        return sends_at_once(self.problem) and self.num_blocks > effort.MANY_BLOCKS

    @property
    def _relaxes_first(self) -> bool:
        """Whether the relaxation may take all the time there is, and patterns are not improved before: replays are slowest here."""
        return self._walks_first and self._slower > 1

    @property
    def _slower(self) -> int:
        gathers = any(whole_of(self.problem, block) != Whole() for block in range(self.num_blocks))
        return effort.GATHERING if gathers else 1

    @property
    def _annealed(self) -> float:
        """The work of annealing, all together."""
        share = effort.ANNEALING_SHARE if self.num_blocks > effort.PROGRAM_BLOCKS else effort.POLISHING_SHARE
        share *= min(1.0, self.num_blocks / effort.MANY_BLOCKS)
        if sends_at_once(self.problem):
            share /= max(effort.SHARED_LANE, self.num_blocks / effort.SHARED_LANE_BLOCKS)
        share *= (effort.RUN_INSTEAD if self._walks_first else 1) / self._slower
        return share * self.work_s * effort.WALKED_BLOCKS_PER_SECOND

    def _search(self, options: Sequence[Sequence[BlockDecision]] | None) -> Search:
        """A search among ``options``, or all choices, and always those of what was found so far."""
        if options is not None and self.best:
            known = zip(*(self.best, *self.patterns, *self.judge.ranked, *self.given), strict=True)
            near = [[replace(d, prefetch_distance=1) for d in of_block] for of_block in known]
            options = [list(dict.fromkeys([*of_block, *more])) for of_block, more in zip(options, near, strict=True)]
        return self._begun(Replays(self.problem, options))

    def _begun(self, replays: Replays) -> Search:
        """A search with what is known of contention, from the best so far."""
        replays = replays.beside(self.lengthening) if self.lengthening else replays
        search = Search(replays, deadline=self.deadline)
        if self.best:
            row = search.replays.row(self.best)[None]
            self.best_score, self.best_s = float(search.score(row)[0]), float(search.replays.seconds(row)[0])
        return search

    def _look_at_patterns(self) -> None:
        search = self._search(simple_choices(self.problem))
        begin = starts(search.replays, search, effort.STARTS)
        if not begin:
            decisions = self._anything()
            self.best = tuple(replace(d, prefetch_distance=1) for d in decisions)
            search = self._search(simple_choices(self.problem))
            begin = [search.replays.row(decisions)]
        self._allow(search, effort.STARTS_SHARE)
        for start in begin:
            self._keep(search, start)
            self.patterns.append(search.replays.decisions(start))
        for start in begin[: 0 if self._relaxes_first else effort.IMPROVED_STARTS]:
            self._keep(search, search.improve(start))

    def _relax(self, bounding: Program, *, mixtures: bool) -> Relaxed | None:
        """Bound the step."""
        deadline = min(self.deadline, time.monotonic() + effort.RELAXATION_SHARE * self.time_limit_s)
        relaxed = relax(bounding, deadline=self.deadline if self._relaxes_first else deadline, mixtures=mixtures)
        if relaxed is None:
            return None
        self.relaxed_s, self.shares = relaxed.bound_s, [relaxed.shares]
        self.bound_s = max(self.bound_s, relaxed.bound_s)
        lumps = lumps_of(self.problem) if self.num_blocks > effort.PROGRAM_BLOCKS else []
        if any(_is_mixture(relaxed.shares[block]) for block in lumps):
            branched = branch(bounding, branches=effort.LUMP_BRANCHES, deadline=deadline, blocks=lumps)
            self.bound_s = max(self.bound_s, branched.bound_s)
            self.shares += [branched.shares] if branched.shares is not None else []
        if self.num_blocks > effort.NEAR_BLOCKS and not self._relaxes_first:
            program = Program(self.problem, held=effort.NEAR_DISTANCE)
            program.minimize_step(ahead=effort.NEAR_DISTANCE)
            near = dive(program, deadline=deadline)
            self.shares += near[:: max(1, len(near) - 1)]
        return relaxed

    def _look_near(self, search: Search) -> None:
        """Round the relaxation, and search from there."""
        self._allow(search, effort.ROUNDING_SHARE)
        distances = range(1, search.replays.farthest + 1)
        roundings = (each for shares in self.shares[::-1] for each in rounded(self.problem, shares, distances))
        near = dict.fromkeys((*self.given, *roundings))
        fitting = [row for row in (search.repair(search.replays.row(each)) for each in near) if row is not None]
        if not fitting:
            return
        self.near += map(search.replays.decisions, fitting)
        scores = search.score(np.array(fitting))
        self._keep(search, fitting[int(np.argmin(scores))])
        if self._walks_first:
            return
        order = [i for n, i in enumerate(np.argsort(scores, kind="stable")) if not n or scores[i] > min(scores)]
        for i in order[: effort.ROUNDINGS]:
            if not self._is_done:
                self._keep(search, search.improve(fitting[i]))

    def _anneal(self, search: Search, wasted_s: Seconds | None) -> Iterator[Rows]:
        """Walk from what was found; yields the best of each kind of runs, of which the next begins when these are polished."""
        work, enough_s = self._annealed, self.bound_s * (1 + effort.ENOUGH)
        work *= effort.BESIDE_SHARES[0] if self.judge.teaches else 1
        begin = np.array([search.replays.row(each) for each in (self.best, *self.patterns, *self.near)])
        far, relaxed_s = range(1, search.replays.farthest + 1), self.relaxed_s if wasted_s is not None else 0.0
        few = effort.PROGRAM_BLOCKS < self.num_blocks <= effort.MANY_BLOCKS
        kinds = [(None, effort.FEW_RUNS), (far, effort.LAST_RUNS)] if few else [(None, ((0, 1.0),))]
        first_score = best_score = self.best_score
        for distances, runs in kinds:
            terms, found = terms_of(search.replays, wasted_s, relaxed_s, distances), begin[:0]
            for seed, part in runs:
                run = anneal(search, terms, begin, work=int(part * work), enough_s=enough_s, seed=seed)
                found = np.unique(np.concatenate([found, run]), axis=0)
                scores = search.score(found)
                found, last_score = found[np.argsort(scores, kind="stable")], best_score
                best_score = min(best_score, float(scores.min()))
                if best_score <= enough_s or best_score > last_score * (1 - effort.STAGNANT):
                    break
            yield from found[: effort.POLISHED]
            best_score = min(best_score, self.best_score)
            if self._is_done or best_score <= enough_s or best_score > first_score * (1 - effort.STAGNANT):
                return

    def _anything(self) -> Decisions:
        decisions = least_peak(self.problem, deadline=self.deadline)
        if decisions is None or not fits(self.problem, simulate(self.problem, decisions, events=False)):
            raise infeasible(self.problem, deadline=self.deadline)
        return decisions

    def _allow(self, search: Search, share: float) -> None:
        search.work_left = int(share * self.work_s * effort.REPLAYED_BLOCKS_PER_SECOND)

    def _solve_program(self, search: Search, ahead: int, share: float) -> None:
        """Improve what a program decides, and learn from what it proves."""
        if self._is_enough:
            return
        program = Program(self.problem)
        program.minimize_step(ahead=ahead)
        limit_s = share * self.work_s
        answer = program.solve(limit_s=limit_s, deadline=self.deadline, hint=self.best, in_seconds=True)
        if ahead > 1:
            self.bound_s = max(self.bound_s, answer.bound)
        if answer.decisions is not None:
            self._allow(search, effort.PROGRAMS_SHARE)
            self._keep(search, search.improve(search.replays.row(answer.decisions)))

    def _keep(self, search: Search, row: Rows) -> None:
        score = float(search.score(row[None])[0])
        if self.problem.machine.contention:
            self.judge.note(search.replays.decisions(row), score)
        if score < self.best_score:
            self.best, self.best_score = search.replays.decisions(row), score
            self.best_s = float(search.replays.seconds(row[None])[0])
