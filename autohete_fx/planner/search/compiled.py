"""What the search for plans does a million times: in come arrays (`arrays`), in which it leaves seconds of steps, and walks.

`replay` finds the seconds that `simulate` does; `walk_on` anneals (`anneal`). Numba compiles all of it, once a machine, and again
when this file changes: so everything that is compiled is here, with every number that it is compiled with.

``WIDTH`` assignments are replayed side by side, and the innermost loop of nearly everything is over these, without a branch: so
the compiler makes vector instructions of it, and a walked block takes some tens of nanoseconds. What does not happen takes no
time, or is there at ``NEVER``. Copies are looked for in *slots*: how many blocks ahead one up is issued, or after how many one
down is awaited.
"""

from collections.abc import Callable
from typing import Any

import numba
import numpy as np

from autohete_fx.planner.search.arrays import Figures, Heat, Rows, Rules, Scratch, Seconds, Tables, Terms, Walks

_COMPILED: dict[str, Any] = {"nogil": True, "error_model": "numpy", "fastmath": {"nnan", "nsz"}}
"""Without the interpreter's lock. That no number here is undefined the compiler may know: it then takes maxima by vectors, too."""


def compiled(function: Callable[..., Any]) -> Callable[..., Any]:
    """Numba's, which keeps what it compiles beside this file or in the user's cache; where it may write to neither, for this
    process."""
    try:
        return numba.njit(function, cache=True, **_COMPILED)
    except RuntimeError:
        return numba.njit(function, **_COMPILED)


inlined = numba.njit(inline="always", **_COMPILED)
"""For what is called for every block: a call takes longer than what it does."""

WIDTH = 16
NEVER = -np.inf
"""When that is there which nobody waits for."""
SLOTS = 5
"""One more than the farthest prefetch distance."""
NOWHERE = SLOTS
"""The slot of what is not copied."""
KINDS = 5
"""Of figures of a pass, by position."""
WORK, UP, DOWN, AHEAD, BEHIND = range(KINDS)
STATES = 4 + 2 * SLOTS
"""Rows of what a pass that runs knows. They begin at `_CLOCK` and so on; arrivals and departures have a row for each slot."""
_CLOCK, _UP_FREE, _DOWN_FREE, _CLOCKS = 0, WIDTH, 2 * WIDTH, 3 * WIDTH
_ARRIVALS, _DEPARTURES = 4 * WIDTH, (4 + SLOTS) * WIDTH
_POSITION = KINDS * WIDTH
_FIRST, _BACKWARD, _FORWARD = 0, 1, 2


@inlined
def put(figures: Figures, row: int, tables: Tables, block: int, setting: int) -> None:
    """Give a block of an assignment a setting."""
    group, place = row // WIDTH, row % WIDTH
    last, distance = tables.lanes.shape[1] - 1, tables.distance[block, setting]
    for i in range(len(tables.lanes)):
        position = last - block if i == _BACKWARD else block
        up, down = tables.lanes[i, block, setting, 1], tables.lanes[i, block, setting, 2]
        figures.passes[group, i, position, WORK, place] = tables.lanes[i, block, setting, 0]
        figures.passes[group, i, position, UP, place] = up
        figures.passes[group, i, position, DOWN, place] = down
        figures.passes[group, i, position, AHEAD, place] = min(distance, position) if up > 0 else NOWHERE
        figures.passes[group, i, position, BEHIND, place] = min(distance, last - position) if down > 0 else NOWHERE
    for i in range(4):
        figures.updates[group, i, block, place] = tables.updates[block, setting, i]
    figures.waits[group, block, place] = 0.0 if tables.waits[block, setting] else NEVER


@compiled
def replay(tables: Tables, rows: Rows, figures: Figures, scratch: Scratch, found: Seconds) -> None:
    """Leave in ``found`` the seconds of a step under each row. ``figures`` have room for one group."""
    count, blocks = rows.shape
    for first in range(0, count, WIDTH):
        for row in range(WIDTH):
            for block in range(blocks):
                put(figures, row, tables, block, rows[min(first + row, count - 1), block])
        step_of_group(tables.rules, figures, 0, scratch)
        for row in range(first, min(first + WIDTH, count)):
            found[row] = scratch.step[row - first]


@compiled
def step_of_group(rules: Rules, every: Figures, group: int, scratch: Scratch) -> None:
    """Replay a step of each assignment of a group, and leave its seconds in ``scratch.step`` and, of its first pass, when blocks
    are done on average in ``scratch.mean``.

    What follows the last backward is timed from its end on, and runs beside it unless it begins before.
    """
    figures = Figures(every.passes[group], every.updates[group], every.waits[group])
    blocks, state, start, step = len(figures.waits), scratch.state, scratch.start, scratch.step
    step[:] = 0.0
    for index in range(len(figures.passes) - 1, -1, -1):
        times = 1 if index == _FIRST else rules.micro_batches
        if index == _FORWARD and not rules.synchronous:
            times -= 1
        start[:] = 0.0
        scratch.updated[:] = NEVER
        if index == _FIRST:
            for block_s in figures.updates[0]:
                for w in range(WIDTH):
                    start[w] += block_s[w]
            if rules.sends_at_once:
                _each_updated(rules, figures, scratch)
            else:
                _all_updated(rules, figures, scratch)
        if index == _FIRST and rules.sends_at_once:
            _run_shared(figures, scratch)
        else:
            _run(figures.passes[index].reshape(-1), blocks, scratch)
        for w in range(WIDTH):
            end = state[_CLOCK + w]
            if index == _FIRST and rules.synchronous:
                end = max(end, scratch.all_updated[w])
            step[w] += times * end
    for w in range(WIDTH):
        scratch.mean[w] = state[_CLOCKS + w] / blocks


@compiled
def _run(figures: Seconds, blocks: int, scratch: Scratch) -> None:
    """Run a pass from ``scratch.start`` on, whose copies up wait for ``scratch.updated``.

    All that happens at a position is one loop over assignments, in parts of arrays that begin there: a loop over indices such
    as ``i + slot`` is not made vector instructions of, as Numba takes an index that might be negative from the end.
    """
    state = scratch.state
    state[:] = 0.0
    state[:WIDTH] = scratch.start
    state[_ARRIVALS:] = NEVER
    for i in range(blocks):
        f, updated = figures[i * _POSITION : (i + SLOTS) * _POSITION], scratch.updated[i * WIDTH : (i + SLOTS) * WIDTH]
        sent, landed = scratch.sent[i * WIDTH : (i + 1) * WIDTH], scratch.landed[i * WIDTH : (i + 1) * WIDTH]
        for w in range(WIDTH):
            clock, up_free = state[_CLOCK + w], max(state[_UP_FREE + w], state[_CLOCK + w])
            for slot in range(SLOTS):
                issued = f[slot * _POSITION + AHEAD * WIDTH + w] == slot
                done = max(up_free, updated[slot * WIDTH + w]) + f[slot * _POSITION + UP * WIDTH + w]
                up_free = done if issued else up_free
                arrived = done if issued else state[_ARRIVALS + slot * WIDTH + w]
                if slot == 0:
                    clock = max(clock, arrived)
                else:  # one position nearer
                    state[_ARRIVALS + (slot - 1) * WIDTH + w] = arrived
            state[_UP_FREE + w] = sent[w] = up_free
            clock += f[WORK * WIDTH + w]
            down_free = max(state[_DOWN_FREE + w], clock) + f[DOWN * WIDTH + w]
            state[_DOWN_FREE + w] = down_free
            landed[w] = down_free if f[DOWN * WIDTH + w] > 0 else clock
            for slot in range(SLOTS):
                # A lane works in order: of the copies that are awaited there the last is the one to wait for.
                departed = down_free if f[BEHIND * WIDTH + w] == slot else state[_DEPARTURES + slot * WIDTH + w]
                if slot == 0:
                    clock = max(clock, departed)
                else:
                    state[_DEPARTURES + (slot - 1) * WIDTH + w] = departed
            state[_CLOCK + w] = clock
            state[_CLOCKS + w] += clock


@compiled
def _all_updated(rules: Rules, figures: Figures, scratch: Scratch) -> None:
    """When each block's update on the host is done, where all gradients come together.

    By priority blocks 0..b are done one after the other. Else the last block is first.
    """
    host_s, updated, free = figures.updates[1], scratch.updated, scratch.all_updated
    for w in range(WIDTH):
        free[w] = scratch.start[w] if rules.one_memory else 0.0
    for i in range(len(host_s)):
        block = i if rules.priority else len(host_s) - 1 - i
        took, waits, done = host_s[block], figures.waits[block], updated[block * WIDTH : (block + 1) * WIDTH]
        for w in range(WIDTH):
            free[w] += took[w]
            done[w] = free[w] + waits[w]


@compiled
def _each_updated(rules: Rules, figures: Figures, scratch: Scratch) -> None:
    """When each block is updated whose update begins when its gradients land, or when backward ends, which is 0; NEVER for none.

    Without priority in the order in which they come, the last block first. By priority b waits for all that come before it is
    done: for c..b-1, where c-1 is the first to come when those and b are. With H[c] for the updates of 0..c-1, b comes at r[b]
    and is done at r[b] + H[b+1] - H[c], and c is the largest that has r[c-1] + H[c] >= r[b] + H[b+1], or 0.

    Uploads get what time the lane up has left of what backward issued: what is left in ``scratch.updated`` is a point of time
    before or after the end of backward as what the lane is idle from then to there.
    """
    host_s, blocks = figures.updates[1], len(figures.waits)
    backward, updated, landed, sent = figures.passes[_BACKWARD], scratch.updated, scratch.landed, scratch.sent
    ready, after = np.empty(blocks), np.empty(blocks)
    for w in range(WIDTH):
        free, ended = NEVER, scratch.state[_CLOCK + w]
        for block in range(blocks - 1, -1, -1):
            ready[block] = landed[(blocks - 1 - block) * WIDTH + w] - ended if rules.early else 0.0
            if rules.priority:  # blocks without an update, too
                free = ready[block] = max(free, ready[block])
            elif host_s[block, w] > 0:
                free = ready[block] = max(free, ready[block]) + host_s[block, w]
        all_s = 0.0
        for block in range(blocks):
            if rules.priority:
                all_s += host_s[block, w]
                after[block] = all_s
                ready[block] += all_s
                first = 0.0
                for before in range(block):
                    if ready[before] >= ready[block]:
                        first = after[before]
                updated[block * WIDTH + w] = ready[block] - first
            else:
                updated[block * WIDTH + w] = ready[block]
            if host_s[block, w] == 0:
                updated[block * WIDTH + w] = NEVER
        for block in range(blocks):
            ready[block] = updated[block * WIDTH + w]
        for i in range(blocks):
            took = 0.0
            for slot in range(min(SLOTS, blocks - i)):
                if backward[i + slot, AHEAD, w] == slot:
                    took += backward[i + slot, UP, w]
            if took > 0:
                for block in range(blocks):
                    left = sent[i * WIDTH + w] - ended - ready[block]
                    updated[block * WIDTH + w] += min(max(left, 0.0), took)


@compiled
def _run_shared(figures: Figures, scratch: Scratch) -> None:
    """Run a forward from ``scratch.start`` on whose copies up share their lane with those of updates, the lower block always first.

    Updates on the host are done at ``scratch.updated``, where time counts when the lane is idle but for what it is given here.
    Streamed states come at 0.

    Blocks 0..b have all they need when the first of their copies to come, of those that keep the lane busy from then on, and all
    that come after it are done: the largest over copies k of when k comes plus the seconds of those that do not come before.
    """
    f, uploads_s, states_s, blocks = figures.passes[_FIRST], figures.updates[2], figures.updates[3], len(figures.waits)
    comes, through, copies = np.empty(blocks), np.empty(blocks), np.empty(blocks)
    departures = np.empty(blocks + NOWHERE)
    for w in range(WIDTH):
        for block in range(blocks):
            copies[block] = uploads_s[block, w] + f[block, UP, w]
            comes[block] = scratch.updated[block * WIDTH + w] if copies[block] > 0 else NEVER
        departures[:] = NEVER
        clock, clocks, down_free, since, all_states_s = scratch.start[w], 0.0, 0.0, 0.0, 0.0
        for i in range(blocks):
            for slot in range(min(SLOTS, blocks - i)):
                if f[i + slot, AHEAD, w] == slot:
                    comes[i + slot] = max(comes[i + slot], clock)
            all_states_s += states_s[i, w]
            if comes[i] >= 0:
                since += copies[i]
            copied = all_states_s + since
            through[i] = comes[i] + copies[i]
            if comes[i] <= 0:
                through[i] += all_states_s
            for earlier in range(i):
                if comes[earlier] <= comes[i]:
                    through[earlier] += copies[i]
                if comes[earlier] <= 0:
                    through[earlier] += states_s[i, w]
                if comes[earlier] >= comes[i]:
                    through[i] += copies[earlier]
                copied = max(copied, through[earlier])
            clock = max(clock, max(copied, through[i])) + f[i, WORK, w]
            down_free = max(down_free, clock) + f[i, DOWN, w]
            departures[i + int(f[i, BEHIND, w])] = down_free
            clock = max(clock, departures[i])
            clocks += clock
        scratch.state[_CLOCK + w], scratch.state[_CLOCKS + w] = clock, clocks


@compiled
def set_walks(walks: Walks, terms: Terms, at: Rows, rows: Rows) -> None:
    """Let the walks ``at`` some places go on from other assignments."""
    for walk, row in zip(at, rows):  # noqa: B905
        walks.rows[walk] = row
        walks.use[walk] = terms.fixed_bytes
        walks.elsewhere[walk] = 0.0
        walks.paid[walk] = 0.0
        walks.wasted[walk] = 0.0
        for block in range(len(row)):
            walks.use[walk] += terms.use[block, row[block]]
            walks.elsewhere[walk] += terms.elsewhere[block, row[block]]
            walks.paid[walk] += terms.paid[block, row[block]]
            walks.wasted[walk] += terms.wasted[block, row[block]]
            put(walks.figures, walk, terms.tables, block, row[block])


@inlined
def _exchange(walks: Walks, walk: int, terms: Terms, blocks: Rows, settings: Rows, count: int) -> None:
    """Give blocks of a walk other settings, and leave in ``settings`` those that they had."""
    for i in range(count):
        block, new, old = blocks[i], settings[i], walks.rows[walk, blocks[i]]
        for span in range(walks.use.shape[1]):
            walks.use[walk, span] += terms.use[block, new, span] - terms.use[block, old, span]
        for tier in range(walks.elsewhere.shape[1]):
            walks.elsewhere[walk, tier] += terms.elsewhere[block, new, tier] - terms.elsewhere[block, old, tier]
        walks.paid[walk] += terms.paid[block, new] - terms.paid[block, old]
        walks.wasted[walk] += terms.wasted[block, new] - terms.wasted[block, old]
        walks.rows[walk, block], settings[i] = new, old
        put(walks.figures, walk, terms.tables, block, new)


@inlined
def _over(walks: Walks, walk: int, terms: Terms) -> float:
    """Memory of a walk above the limits, of every tier as a share of its limit."""
    peak = walks.use[walk, 0]
    for span in range(1, walks.use.shape[1]):
        peak = max(peak, walks.use[walk, span])
    over = max(peak - terms.limits[0], 0.0) / max(terms.limits[0], 1.0)
    for tier in range(walks.elsewhere.shape[1]):
        limit = terms.limits[1 + tier]
        over += max(walks.elsewhere[walk, tier] - limit, 0.0) / max(limit, 1.0)
    return over


@compiled
def walk_on(
    walks: Walks,
    terms: Terms,
    heat: Heat,
    random: np.random.Generator,
    scratch: Scratch,
    done: int,
    rounds: int,
    all_rounds: int,
) -> None:
    """Go on for so many rounds of ``all_rounds``, where so many are done: a change of every walk in each.

    What a walk pays stays what it was when its last change was taken, though lateness and memory are priced otherwise since.
    """
    count, num_blocks = walks.rows.shape
    changed, hottest = np.zeros(WIDTH, dtype=np.int64), max(heat.coldest, heat.hottest / num_blocks)
    blocks, settings = np.zeros((2, WIDTH, max(2, num_blocks)), dtype=np.int64)
    for first in range(done, done + rounds, heat.mating):
        for group in range(count // WIDTH):  # whose figures stay in the cache
            for at in range(first, min(first + heat.mating, done + rounds)):
                degrees = walks.best_score[0] * hottest * (heat.coldest / hottest) ** (at / all_rounds)
                price = (
                    walks.best_score[0] * heat.first_price * (heat.last_price / heat.first_price) ** (at / all_rounds)
                )
                lateness = heat.lateness * (1 - at / all_rounds) ** 2
                for w in range(WIDTH):
                    walk = group * WIDTH + w
                    if at == 0:
                        changed[w] = 0
                    elif at == first:
                        changed[w] = _mate(walks, walk, random, blocks[w], settings[w])
                    else:
                        changed[w] = _change(walks, walk, terms, heat, random, blocks[w], settings[w])
                for w in range(WIDTH):
                    _exchange(walks, group * WIDTH + w, terms, blocks[w], settings[w], changed[w])
                step_of_group(terms.tables.rules, walks.figures, group, scratch)
                for w in range(WIDTH):
                    walk = group * WIDTH + w
                    score, over = scratch.step[w] + walks.paid[walk], _over(walks, walk, terms)
                    if over == 0 and score < walks.best_score[0]:
                        walks.best[:] = walks.rows[walk]
                        walks.best_score[0] = score
                    paid = walks.prices[walk]
                    pays = score + walks.wasted[walk] + price * over + lateness * scratch.mean[w]
                    if pays <= paid or random.random() < np.exp((paid - pays) / degrees):
                        walks.prices[walk] = pays
                    else:
                        _exchange(walks, walk, terms, blocks[w], settings[w], changed[w])


@inlined
def _change(
    walks: Walks, walk: int, terms: Terms, heat: Heat, random: np.random.Generator, blocks: Rows, settings: Rows
) -> int:
    """What one or two blocks may do instead; returns how many."""
    num_walks, num_blocks = walks.rows.shape
    first, second = _any(random, num_blocks), _any(random, num_blocks)
    if random.random() < 1 / 2:
        far = 1 + _any(random, heat.near)
        second = (first + (far if random.random() < 1 / 2 else -far)) % num_blocks
    kind = random.random() if second != first else 1.0
    blocks[0], blocks[1] = first, second
    count = 2 if kind < heat.exchanges + heat.changes_of_two else 1
    for i in range(count):
        block = blocks[i]
        setting = walks.rows[walk, block]
        treatment, place, distance = (
            terms.parts[block, setting, 0],
            terms.parts[block, setting, 1],
            terms.parts[block, setting, 2],
        )
        part, given = _any(random, 3), random.random() < heat.given
        new = _any(random, terms.counts[block, part])
        if given:
            donor = _any(random, num_blocks)
            new = min(
                terms.parts[donor, walks.rows[_any(random, num_walks), donor], part], terms.counts[block, part] - 1
            )
        if kind < heat.exchanges:
            other = blocks[1 - i]
            theirs = walks.rows[walk, other]
            treatment = min(terms.parts[other, theirs, 0], terms.counts[block, 0] - 1)
            place = min(terms.parts[other, theirs, 1], terms.counts[block, 1] - 1)
            distance = min(terms.parts[other, theirs, 2], terms.counts[block, 2] - 1)
        elif part == 0:
            treatment = new
        elif part == 1:
            place = new
        else:
            distance = new
        settings[i] = terms.settings[block, treatment, place, distance]
    return count


@inlined
def _mate(walks: Walks, walk: int, random: np.random.Generator, blocks: Rows, settings: Rows) -> int:
    """What the blocks from one to another do in some other walk; returns how many do something else."""
    num_walks, num_blocks = walks.rows.shape
    mate, begin, end = _any(random, num_walks), _any(random, num_blocks + 1), _any(random, num_blocks + 1)
    count = 0
    for block in range(min(begin, end), max(begin, end)):
        if walks.rows[mate, block] != walks.rows[walk, block]:
            blocks[count], settings[count] = block, walks.rows[mate, block]
            count += 1
    return count


@inlined
def _any(random: np.random.Generator, count: int) -> int:
    return int(random.random() * count)
