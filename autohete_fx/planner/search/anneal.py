"""Annealing: in come assignments that keep the budgets, out come some that keep them, of which the first scores no worse.

Local search (`improve`) looks at every change before it makes one: for many blocks that is too many. Here many assignments walk
side by side, each by a change at random. It is taken where it helps, and where it does not with a chance that shrinks as work
runs out. A change is of what a block does with its activations or of its places, sometimes with another prefetch distance, or
of that alone. It is in one block or in two, which may also exchange what they do. It changes more often than not to what some
block of some walk does, since most choices are in no good plan. Now and then walks *mate*: blocks that follow each other are
good together, so a walk takes some from another. A walk may leave the budgets, at a price that rises; what is returned keeps
them.

Most changes of a good plan change nothing. The step takes what its longest chain of work and waits takes, and whatever is not
on that chain is free. Walks therefore also pay what settings *waste*. That is their reduced costs in the relaxation, which has
a price for every lane in every pass and for memory at every moment. That leads them to assignments which leave lanes and memory
to others, and from which a better step is not far. And they pay for *lateness*: of all blocks of the first pass, not only of
the last one. That pass is the forward wherever updates overlap with it, and waits for them. The sooner a block is done, the
more can be copied in what is left of the step. Among many plans in which one thing alone decides when a step ends, lateness
tells which is near a better one.

The random numbers are those of a seed, the same on every run. All is counted by NumPy, for many walks at once (`walks`,
`arrays`). Walks cool as their work is done. Where the clock will end it first, on a slow or busy machine, they cool with the
clock: hot walks are of no use.
"""

import time
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from autohete_fx.ir import BlockDecision
from autohete_fx.planner.model.choices import copies, place_of, treatment_of
from autohete_fx.planner.model.figures import limits_of
from autohete_fx.planner.model.work import COPY_WEIGHT
from autohete_fx.planner.search.arrays import Rows
from autohete_fx.planner.search.improve import Search
from autohete_fx.planner.search.passes import Seconds
from autohete_fx.planner.search.replays import Replays
from autohete_fx.planner.search.walks import Heat, Prices, Terms, Walks

WALKS = 256
DISTANCES, SHARED_DISTANCES = (1, 3), (1, 4)
"""The prefetch distances that walks give unless they are told, the latter where `figures.sends_at_once`. Each takes time in every
replay, and local search knows the others."""
HEAT = Heat(
    hottest=0.2,
    coldest=1e-4,
    first_price=0.5,  # about what memory is worth
    last_price=4.0,
    near=4,
    exchanges=0.2,
    changes_of_two=0.45,
    given=0.6,
    far=0.3,
    mating=10,
    offers=8,
    lateness=(0.2, 0.8),
)
_OTHERS = 32
"""Walks whose ends are looked at."""
_MOST_UNITS = 2**23
"""Units of memory: half as many as float32 counts, since what blocks take is rounded up."""
_CLOCK_SHARE = 0.95
"""The share of the time left that walks may take, so that some is for what comes after."""
_FOLLOWING = 5
"""After each of so many parts of the rounds some walks follow the best: more often all end in one place."""


def anneal(
    search: Search,
    terms: Terms,
    starts: Rows,
    *,
    work: int,
    enough_s: float = 0.0,
    heat: Heat = HEAT,
    seed: int = 0,
) -> Rows:
    """Walk from all ``starts``, which keep the budgets.

    It ends when ``work`` blocks are replayed, a step takes ``enough_s`` or less, or the search's deadline is there. Returns the
    best found, and after it where the best of other walks are that keep the budgets. ``terms`` are of the search's replays.
    """
    random, blocks = np.random.default_rng(seed), search.replays.num_blocks
    numbers = at_distances(search.replays, terms, starts)
    scores = search.score(starts)
    walks = Walks(terms, numbers, int(np.argmin(scores)), float(scores.min()), WALKS)
    hottest, rounds = max(heat.coldest, heat.hottest / blocks), max(1, work // (WALKS * blocks))
    lateness, began, clock = np.resize(heat.lateness, WALKS), time.monotonic(), 0.0
    for at in range(rounds):
        if at % heat.mating == 0:
            clock = _spent(began, search.deadline)
            if clock >= 1 or walks.best_score <= enough_s:
                break
        # Squared: walks that have just enough time may be slower than the clock for a while, and cool by their work alone.
        done = max(at / rounds, clock**2)
        prices = Prices(
            degrees=walks.best_score * hottest * (heat.coldest / hottest) ** done,
            memory=walks.best_score * heat.first_price * (heat.last_price / heat.first_price) ** done,
            lateness=lateness * (1 - done) ** 2,
        )
        if at and at % max(1, rounds // _FOLLOWING) == 0:
            walks.follow_the_best()
        if at % heat.mating or not at:
            walks.change(heat, prices, random)
        else:
            walks.mate(prices, random)
    found = np.concatenate([starts, (walks.best - search.replays.first)[None]])
    others = (
        np.unique(walks.rows[:, np.argsort(walks.prices, kind="stable")[:_OTHERS]], axis=1).T - search.replays.first
    )
    found = np.concatenate([found, others[search.fitting(others)]])
    return found[np.argsort(search.score(found), kind="stable")]


def _spent(began: float, deadline: float) -> float:
    """The share that is over of the time that walks may take."""
    left_s = _CLOCK_SHARE * (deadline - began)
    return (time.monotonic() - began) / left_s if left_s > 0 else 1.0


def at_distances(replays: Replays, terms: Terms, starts: Rows) -> Rows:
    """Numbers of settings by block and start, at the farthest distances that walks give and that are no farther."""
    treatments, places, distances = (table[replays.numbers(starts)] for table in terms.parts)
    return np.ascontiguousarray(terms.settings[np.arange(replays.num_blocks)[:, None], treatments, places, distances])


def terms_of(
    replays: Replays,
    wasted_s: Seconds | None = None,
    bound_s: float = 0.0,
    distances: Sequence[int] | None = None,
) -> Terms:
    """The figures that annealing looks at.

    ``wasted_s``: by block and setting, what walks pay besides what their steps take; None for nothing. No step takes less than
    ``bound_s`` and what its settings waste. ``distances``: the prefetch distances that walks give, 1 first; None for `DISTANCES` or
    `SHARED_DISTANCES`.
    """
    if distances is None:
        distances = SHARED_DISTANCES if replays.tables.rules.sends_at_once else DISTANCES
    distances = [far for far in distances if far <= replays.farthest]
    settings, counts, parts = _parts(replays, distances)
    tables, limits = replays.tables, [np.inf if limit is None else float(limit) for limit in limits_of(replays.problem)]
    limits[0] -= replays.problem.fixed_bytes
    tiers = [replays.use, *replays.elsewhere]
    units = [_unit(table) for table in tiers]
    use, *elsewhere = (np.ceil(table / unit).astype(np.float32) for table, unit in zip(tiers, units, strict=True))
    wasted = np.zeros(replays.copies_s.shape) if wasted_s is None else wasted_s
    return Terms(
        tables=tables,
        distances=distances,
        use=use.reshape(-1, use.shape[-1]),
        elsewhere=np.stack(elsewhere).reshape(len(elsewhere), -1),
        limits=np.floor(np.array(limits) / units),
        paid=COPY_WEIGHT * replays.copies_s.reshape(-1),
        wasted=wasted.reshape(-1),
        bound_s=bound_s,
        parts=parts,
        counts=counts,
        settings=settings + replays.first[:, None, None, None],
    )


def _unit(table: NDArray[np.int64]) -> float:
    """Of bytes by block and setting, and maybe span: so large that what all blocks can take are fewer than float32 tells apart."""
    most = float(table.reshape(len(table), -1).max(axis=1).sum())
    return max(1.0, np.ceil(most / _MOST_UNITS))


def _parts(replays: Replays, distances: Sequence[int]) -> tuple[Rows, Rows, Rows]:
    """The parts of settings: what is done with activations, places, distance. The farthest distance that walks give and that is no
    farther stands for others.

    Returns which setting has which parts, by block and parts (the one that moves nothing where none has them), how many there
    are of each part, by kind and block, and the parts of every setting, by kind and setting.
    """
    found = [_parts_of(settings, distances) for settings in replays.settings]
    counts = np.array([table.shape for table, _ in found]).T
    settings = np.zeros((len(found), *counts.max(axis=1)), dtype=np.int64)
    parts = np.zeros((len(counts), len(found), replays.tables.settings), dtype=np.int64)
    for block, (table, of_block) in enumerate(found):
        settings[block][tuple(slice(count) for count in table.shape)] = table
        parts[:, block, : len(of_block)] = of_block.T
    return settings, counts, parts.reshape(len(counts), -1)


def _parts_of(settings: list[BlockDecision], distances: Sequence[int]) -> tuple[Rows, Rows]:
    """Of one block: which setting has which parts, and the parts of every setting."""
    treatments: dict[object, int] = {}
    places: dict[object, int] = {}
    farthest = max(setting.prefetch_distance for setting in settings)
    distances = [far for far in distances if far <= farthest]
    parts = []
    for s in settings:
        treatment, place = treatment_of(s), place_of(s)
        treatments.setdefault(treatment, len(treatments))
        places.setdefault(place, len(places))
        nearer = sum(far <= s.prefetch_distance for far in distances) - 1
        parts.append((treatments[treatment], places[place], nearer))
    table = np.zeros((len(treatments), len(places), len(distances)), dtype=np.int64)
    for index, (setting, (treatment, place, nearer)) in enumerate(zip(settings, parts, strict=True)):
        if not copies(setting):
            table[treatment, place] = index
        elif setting.prefetch_distance == distances[nearer]:
            table[treatment, place, nearer] = index
    return table, np.array(parts)
