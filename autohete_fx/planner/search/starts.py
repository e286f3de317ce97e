"""Where the search begins: in come a problem's settings, out come assignments of few kinds that keep the budgets.

Most blocks of a model are alike, and good plans treat them in few ways. The paper's own are boundaries between blocks that do
one thing and blocks that do another. A *pattern* has two settings, one for a chosen set of blocks and one for the rest. The set
is the first so many, the last so many, or so many spread evenly. There are some ten thousand patterns whatever the number of
blocks, so that many identical blocks cost no more than few. All that keep the budgets are ranked by the busiest lanes, and the
best of these are replayed. The hand-made strategies in `baselines` are patterns.
"""

from collections.abc import Iterable
from dataclasses import replace
from itertools import combinations

import numpy as np

from autohete_fx.ir import BlockDecision, Optimizer, Params, Problem
from autohete_fx.planner.model.choices import choices, copies, joined
from autohete_fx.planner.model.work import BY_DEVICE, Pass, Work
from autohete_fx.planner.search.arrays import Rows
from autohete_fx.planner.search.improve import Search
from autohete_fx.planner.search.passes import Seconds
from autohete_fx.planner.search.replays import Replays

_SIZES = 24
"""How many sizes of the chosen set are tried where there are more blocks than that."""
_DISTANCES = (1, 3)
_REPLAYED = 2048
_CHUNK = 1024


def simple_choices(problem: Problem) -> list[list[BlockDecision]]:
    """The choices of every block that treat all of it alike, as other systems do: patterns are made of them. The states of a block
    that an earlier graph has placed may be streamed or in two places already, which then is no choice."""
    found = []
    for block in range(len(problem.costs)):
        alike = [
            c
            for c in choices(problem, block)
            if c.num_offloaded is None and not (c.keeps_fetched and c.params is Params.HOST)
        ]
        found.append(
            [c for c in alike if c.num_moved_states is None and c.optimizer is not Optimizer.STREAMED] or alike
        )
    return found


def starts(replays: Replays, search: Search, count: int) -> list[Rows]:
    """At most ``count`` assignments within the budgets, best first, each of another pair of decisions; maybe none."""
    kinds = sorted({setting for settings in replays.settings for setting in settings}, key=_order)
    kinds = [kind for kind in kinds if kind.prefetch_distance in _DISTANCES or not copies(kind)]
    blocks = range(replays.num_blocks)
    index = np.array([[_index_of(kind, replays, block) for block in blocks] for kind in kinds])
    # Settings of blocks whose places are given may come to the same.
    distinct = sorted(np.unique(index, axis=0, return_index=True)[1])
    kinds, index = [kinds[i] for i in distinct], index[distinct]
    chosen = _chosen_sets(replays.num_blocks)
    found, pairs = [np.zeros((1, replays.num_blocks), dtype=np.int64)], [np.zeros(1, dtype=np.int64)]
    plain = [_order(kind)[:-1] for kind in kinds]
    numbers: dict[object, int] = {}
    for one, other in combinations(range(len(kinds)), 2):
        rows = np.where(chosen, index[one], index[other])
        found.append(rows)
        pairs.append(np.full(len(rows), numbers.setdefault((plain[one], plain[other]), len(numbers) + 1)))
    rows, pair = np.concatenate(found), np.concatenate(pairs)
    fitting = np.concatenate([search.fitting(rows[i : i + _CHUNK]) for i in range(0, len(rows), _CHUNK)])
    rows, pair = rows[fitting], pair[fitting]
    busiest = np.argsort(_busiest_s(replays, rows), kind="stable")[:_REPLAYED]
    rows, pair = rows[busiest], pair[busiest]
    best = np.argsort(search.score(rows), kind="stable")
    _, first = np.unique(pair[best], return_index=True)
    return [rows[best[i]] for i in sorted(first)[:count]]


def _index_of(setting: BlockDecision, replays: Replays, block: int) -> int:
    """Where a block may not have a setting: of its own first one, which moves nothing; where its places are given, of the one that
    treats activations so."""
    own, fixed = replays.index[block], replays.problem.fixed_decisions
    there = fixed[block] if fixed else None
    if setting not in own and there is not None:
        here = joined(setting, there)
        setting = replace(here, prefetch_distance=setting.prefetch_distance if copies(here) else 1)
    return own.get(setting, 0)


def _order(setting: BlockDecision) -> tuple[str, int, str, bool, bool, str, int, str, int]:
    """All that a setting decides, its distance last: an order that is the same in every process."""
    offloaded, moved = (-1 if n is None else n for n in (setting.num_offloaded, setting.num_moved_states))
    places = setting.params.value, setting.keeps_fetched, setting.replicates, setting.optimizer.value
    return setting.activations.value, offloaded, *places, moved, setting.other_states.value, setting.prefetch_distance


def _chosen_sets(num_blocks: int) -> np.ndarray:
    """Sets of blocks as rows of booleans, from none to all."""
    at = np.arange(num_blocks)
    sizes = np.unique(np.linspace(0, num_blocks, min(num_blocks, _SIZES) + 1).round().astype(int))
    spread = [np.isin(at, np.linspace(0, num_blocks - 1, size).round().astype(int)) for size in sizes]
    return np.unique([*(at < size for size in sizes), *(at >= num_blocks - size for size in sizes), *spread], axis=0)


def _busiest_s(replays: Replays, rows: Rows) -> Seconds:
    """Seconds of the busiest lane in forward, backward and optimizer step: less than a replay's, and quickly found."""
    blocks = np.arange(replays.num_blocks)

    def all_blocks(works: Iterable[Work]) -> Seconds:
        return replays.takes(works)[blocks, rows].sum(axis=1)

    def busiest(*passes: Pass) -> Seconds:
        works = [work for work in Work if work.in_pass in passes]
        return np.maximum.reduce([all_blocks(w for w in works if w.lane is lane) for lane in {w.lane for w in works}])

    updates_s = np.maximum(all_blocks(BY_DEVICE) + busiest(Pass.UPDATES), all_blocks((Work.HOST_UPDATE,)))
    forward_s = busiest(Pass.FORWARD)
    once_s = busiest(Pass.FORWARD, Pass.FIRST_FORWARD) - forward_s
    return replays.micro_batches * (forward_s + busiest(Pass.BACKWARD)) + once_s + updates_s
