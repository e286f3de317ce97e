"""Annealing: in come assignments that keep the budgets, out comes one that keeps them and scores no worse.

Local search (`improve`) looks at every change before it makes one: for many blocks that is too many. Here many assignments walk
side by side, each by a change at random that is taken where it helps, and where it does not with a chance that shrinks as
work runs out. A change is of what a block does with its activations, of its places or of its prefetch distance alone, in one
block or in two, which may also exchange what they do; what it changes to is more often than not what some block of some walk
does, since most choices are in no good plan. Now and then walks *mate*: blocks that follow each other are good together, so a
walk takes some from another. A walk may leave the budgets, at a price that rises; what is returned does not.

Most changes of a good plan change nothing: the step takes what its longest chain of work and waits takes, and whatever is
not on that chain is free. So walks also pay what settings *waste*: their reduced costs in the relaxation, which
has a price for every lane in every pass and for memory at every moment. That leads them to assignments which leave lanes and
memory to others, and from which a better step is not far. And they pay for *lateness*: of all blocks of the first pass, not only of
the last one. That pass is the forward wherever updates overlap with it, and waits for them; the sooner a block is done, the more
can be copied in what is left of the step. So of many plans in which one thing alone decides when a step ends, lateness tells
which is near a better one.

The walks themselves are `compiled`. The random numbers are the same on every run.
"""

import functools
import time

import numpy as np

from autohete_fx.ir import BlockDecision
from autohete_fx.planner.model.choices import COPY_WEIGHT, copies, place_of, treatment_of
from autohete_fx.planner.model.figures import limits_of
from autohete_fx.planner.search.arrays import Heat, Rows, Rules, Seconds, Tables, Terms, Walks
from autohete_fx.planner.search.compiled import WIDTH, set_walks, walk_on
from autohete_fx.planner.search.improve import Search
from autohete_fx.planner.search.replays import Replays, new_figures, new_scratch, seconds

_WALKED_BLOCKS = 26_624
"""Of all walks together. Where blocks are few walks are many, which else would soon be all in one valley."""
_MOST_WALKS = 1024
HEAT = Heat(
    hottest=0.2,
    coldest=1e-4,
    first_price=0.5,  # about what memory is worth
    last_price=4.0,
    near=4,
    exchanges=0.2,
    changes_of_two=0.45,
    given=0.6,
    mating=10,
    lateness=0.4,  # of which `anneal` is told
)
_ROUNDS = 100
"""After so many some walks follow the best."""


def anneal(search: Search, terms: Terms, starts: Rows, *, work: int, lateness: float, enough_s: float = 0.0) -> Rows:
    """Walk from all ``starts``, which keep the budgets, until ``work`` blocks are replayed, a step takes ``enough_s`` or less, or
    the search's deadline is there. Other threads run meanwhile. ``terms`` are of the search's replays; ``lateness``: see `Heat`.
    """
    scores = search.score(starts)
    best, blocks = int(np.argmin(scores)), search.replays.num_blocks
    walks = min(_MOST_WALKS, max(1, _WALKED_BLOCKS // blocks // WIDTH) * WIDTH)
    state = new_walks(terms, starts, best, float(scores[best]), walks)
    random, scratch, heat = np.random.default_rng(0), new_scratch(blocks), HEAT._replace(lateness=lateness)
    rounds = max(1, work // (walks * blocks))
    for done in range(0, rounds, _ROUNDS):
        if time.monotonic() > search.deadline or search.replays.seconds(state.best[None])[0] <= enough_s:
            break
        walk_on(state, terms, heat, random, scratch, done, min(_ROUNDS, rounds - done), rounds)
        follow_the_best(state, terms)
    return state.best


def new_walks(terms: Terms, starts: Rows, best: int, best_score: float, count: int) -> Walks:
    """``count`` walks, a multiple of ``WIDTH``, that begin at ``starts``, of which one is the best."""
    walks = Walks(
        rows=np.zeros((count, starts.shape[1]), dtype=np.int64),
        use=np.zeros((count, terms.use.shape[2])),
        elsewhere=np.zeros((count, terms.elsewhere.shape[2])),
        paid=np.zeros(count),
        wasted=np.zeros(count),
        prices=np.full(count, np.inf),
        figures=new_figures(terms.tables, count),
        best=starts[best].copy(),
        best_score=np.array([best_score]),
    )
    at = np.arange(count)
    set_walks(walks, terms, at, starts[at % len(starts)])
    return walks


def follow_the_best(walks: Walks, terms: Terms) -> None:
    """The worst quarter of the walks goes on from where the best quarter is."""
    order = np.argsort(walks.prices, kind="stable")
    quarter = len(order) // 4
    best, worst = order[:quarter], order[::-1][:quarter].copy()
    walks.prices[worst] = walks.prices[best]
    set_walks(walks, terms, worst, walks.rows[best])


def terms_of(replays: Replays, wasted_s: Seconds | None = None) -> Terms:
    """What annealing looks at.

    ``wasted_s``: by block and setting, what walks pay besides what their steps take; None for nothing.
    """
    settings, counts, parts = _parts(replays)
    return Terms(
        tables=replays.tables,
        use=replays.use.astype(float),
        elsewhere=np.stack([*replays.elsewhere.astype(float)], axis=-1),
        fixed_bytes=float(replays.problem.fixed_bytes),
        limits=np.array([np.inf if limit is None else limit for limit in limits_of(replays.problem)], dtype=float),
        paid=COPY_WEIGHT * replays.copies_s,
        wasted=np.zeros(replays.copies_s.shape) if wasted_s is None else wasted_s,
        parts=parts,
        counts=counts,
        settings=settings,
    )


def _parts(replays: Replays) -> tuple[Rows, Rows, Rows]:
    """The parts of settings: what is done with activations, places, distance.

    Returns which setting has which parts, by block and parts (the one that moves nothing where none has them), how many there
    are of each part, by block, and the parts of every setting, by block and setting.
    """
    found = [_parts_of(settings) for settings in replays.settings]
    counts = np.array([table.shape for table, _ in found])
    settings = np.zeros((len(found), *counts.max(axis=0)), dtype=np.int64)
    parts = np.zeros((len(found), max(map(len, replays.settings)), counts.shape[1]), dtype=np.int64)
    for block, (table, of_block) in enumerate(found):
        settings[block][tuple(slice(count) for count in table.shape)] = table
        parts[block, : len(of_block)] = of_block
    return settings, counts, parts


def _parts_of(settings: list[BlockDecision]) -> tuple[Rows, Rows]:
    """Of one block: which setting has which parts, and the parts of every setting."""
    numbers: tuple[dict[object, int], ...] = ({}, {}, {})
    parts = []
    for s in settings:
        values = treatment_of(s), place_of(s), s.prefetch_distance
        parts.append([number.setdefault(value, len(number)) for number, value in zip(numbers, values, strict=True)])
    table = np.zeros([len(number) for number in numbers], dtype=np.int64)
    for index, (setting, (activations, place, distance)) in enumerate(zip(settings, parts, strict=True)):
        table[activations, place, distance if copies(setting) else slice(None)] = index
    return table, np.array(parts)


@functools.cache
def prepare() -> None:
    """Compile what annealing and replays run, or load it where this machine has compiled it before."""
    nothing = np.zeros((1, 1))
    rules = Rules(True, False, False, False, True, False, 1)
    tables = Tables(rules, np.zeros((2, 1, 1, 3)), np.ones((1, 1), dtype=np.int64), np.zeros((1, 1, 4)), nothing > 0)
    choices = np.zeros((1, 1, 3), dtype=np.int64), np.ones((1, 3), dtype=np.int64), np.zeros((1,) * 4, dtype=np.int64)
    terms = Terms(tables, np.zeros((1, 1, 1)), np.zeros((1, 1, 2)), 0.0, np.ones(3), nothing, nothing, *choices)
    row = np.zeros((1, 1), dtype=np.int64)
    state = new_walks(terms, row, 0, float(seconds(tables, row)[0]), WIDTH)
    walk_on(state, terms, HEAT, np.random.default_rng(0), new_scratch(1), 0, 1, 1)
    follow_the_best(state, terms)
