"""Deep models from shallow ones: a step traced with few layers becomes the step of a model with many.

Enter the same model traced at two depths, one period of layers apart. Leaves what a trace of all its layers would give, or None
where that cannot be told. Layers that are built alike cost alike, but not equally. The first and last lie beside something
else, and small things add up over depth. Gradients of small parameters, which stay on the device, are an example. Every figure
is therefore taken to be linear. The figures of a block at a given distance from the beginning or the end are linear in the
depth. Those of layers between are linear in the position. Two traces check a part of that: the layers between lie on one line,
the same in both.
"""

import dataclasses
import math
from dataclasses import dataclass
from typing import Any

from autohete_fx.ir import ActivationCost, BlockCost, BlockKind, Edge, Problem
from autohete_fx.ir.labels import renumbered

HEAD, TAIL = 2, 1
"""Layers at the beginning and at the end that may cost otherwise than those between."""
_ROUNDING = 1e-9

_Figures = tuple[int | float, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class TracedStep:
    """A training step as the planner sees it.

    Attributes:
        problem: blocks, costs, edges, machine, and what may be decided; budgets are set later.
        kinds: one a block.
        flops: of a block's products in forward and backward, one a block, recomputation not included.
        num_params: of the whole model, those included that stay on the device because they are small.
        traced_layers: how many layers were traced.
        batch: sequences of a micro-batch, and tokens of each.
    """

    problem: Problem
    kinds: tuple[BlockKind, ...]
    flops: tuple[int, ...]
    num_params: int
    traced_layers: int
    batch: tuple[int, int]


def shallow_layers(num_layers: int, period: int) -> int | None:
    """The fewest layers worth tracing: head, two periods, tail, and as many as make whole periods missing.

    None where tracing twice would not be less than tracing once.
    """
    fewest = HEAD + 2 * period + TAIL
    fewest += (num_layers - fewest) % period
    return fewest if 2 * fewest + period < num_layers else None


def deepened(shallow: TracedStep, deeper: TracedStep, *, num_layers: int, period: int) -> TracedStep | None:
    """The step with ``num_layers`` layers; ``deeper`` has ``period`` layers more than ``shallow``."""
    layers = [index for index, kind in enumerate(deeper.kinds) if kind is BlockKind.LAYER]
    assert (num_layers - len(layers)) % period == 0, "whole periods are missing"
    begin, times = layers[0] + HEAD, (num_layers - len(layers)) // period
    if layers != list(range(layers[0], layers[-1] + 1)) or _more(shallow.kinds, begin, period) != deeper.kinds:
        return None
    if _lengthened_edges(shallow.problem.edges, begin, period, 1) != deeper.problem.edges:
        return None
    edges = _lengthened_edges(deeper.problem.edges, begin, period, times)
    end = len(deeper.kinds) - layers[-1] - 1 + TAIL
    figures = _extrapolated(_figures(shallow), _figures(deeper), begin, end, period, times)
    if edges is None or figures is None:
        return None
    labels = list(_more(deeper.problem.labels, begin, period, times))
    for index in range(begin, layers[-1] + 1 + times * period):
        repeat = min(max(0, index - begin) // period, times)
        labels[index] = renumbered(labels[index], repeat * period)
    growth = deeper.problem.fixed_bytes - shallow.problem.fixed_bytes
    problem = dataclasses.replace(
        deeper.problem,
        labels=tuple(labels),
        costs=tuple(_cost_of(row) for row in figures),
        edges=edges,
        fixed_bytes=deeper.problem.fixed_bytes + times * growth,
    )
    kinds = _more(deeper.kinds, begin, period, times)
    return TracedStep(
        problem=problem,
        kinds=kinds,
        flops=tuple(int(row[0]) for row in figures),
        num_params=deeper.num_params + times * (deeper.num_params - shallow.num_params),
        traced_layers=deeper.traced_layers,
        batch=deeper.batch,
    )


def _more(values: tuple[Any, ...], begin: int, period: int, times: int = 1) -> tuple[Any, ...]:
    """The values with the period from ``begin`` there ``times`` times more."""
    return (*values[:begin], *values[begin : begin + period] * times, *values[begin:])


def _figures(step: TracedStep) -> list[_Figures]:
    """One row of numbers a block: its FLOPs, its costs, how many of each kind of tensor it lists, and those."""
    return [(flops, *_row_of(cost)) for flops, cost in zip(step.flops, step.problem.costs, strict=True)]


_LISTED = ("offloadable", "trained", "trained_states", "product_flops", "selective")
_COST_NAMES = tuple(field.name for field in dataclasses.fields(BlockCost) if field.name not in _LISTED)


def _row_of(cost: BlockCost) -> _Figures:
    kept = cost.selective
    selective = () if kept is None else (kept.held_bytes, kept.recompute_s)
    lists = (cost.offloadable, cost.trained, cost.trained_states, cost.product_flops, selective)
    figures = (getattr(cost, name) for name in _COST_NAMES)
    return (*figures, *map(len, lists), *(n for each in lists for n in each))


def _cost_of(row: _Figures) -> BlockCost:
    """The cost that a block's row spells, its FLOPs before it."""
    first = 1 + len(_COST_NAMES)
    costs: dict[str, Any] = dict(zip(_COST_NAMES, row[1:first], strict=True))
    end, lists = first + len(_LISTED), []
    for length in row[first:end]:
        lists.append(row[end : end + int(length)])
        end += int(length)
    offloadable, trained, states, flops, selective = lists
    return BlockCost(
        **costs,
        offloadable=tuple(int(n) for n in offloadable),
        trained=tuple(int(n) for n in trained),
        trained_states=tuple(int(n) for n in states),
        product_flops=tuple(flops),
        selective=ActivationCost(held_bytes=int(selective[0]), recompute_s=selective[1]) if selective else None,
    )


def _extrapolated(
    shallow: list[_Figures], deeper: list[_Figures], begin: int, end: int, period: int, times: int
) -> list[_Figures] | None:
    """Rows of all blocks; ``begin`` blocks from the beginning and ``end`` from the end are not between."""
    steps = [_plus(deeper[begin + period + t], deeper[begin + t], -1) for t in range(period)]
    firsts = [_grown(shallow[begin + t], deeper[begin + t], times) for t in range(period)]
    if any(row is None for row in (*steps, *firsts)):
        return None
    for rows in (shallow, deeper):
        for index in range(begin, len(rows) - end):
            repeat, t = divmod(index - begin, period)
            if not _alike(rows[index], _plus(rows[begin + t], steps[t], repeat)):
                return None
    head = [_grown(shallow[i], deeper[i], times) for i in range(begin)]
    between = [
        _plus(firsts[i % period], steps[i % period], i // period)
        for i in range(len(deeper) + times * period - begin - end)
    ]
    tail = [_grown(shallow[i], deeper[i], times) for i in range(-end, 0)]
    rows = [*head, *between, *tail]
    return None if any(row is None for row in rows) else [row for row in rows if row is not None]


def _grown(shallow: _Figures, deeper: _Figures, times: int) -> _Figures | None:
    """A block's row ``times`` periods deeper than ``deeper``."""
    return _plus(deeper, _plus(deeper, shallow, -1), times)


def _plus(row: _Figures | None, other: _Figures | None, factor: int) -> _Figures | None:
    """``row + factor * other``; None where they are not of one length."""
    if row is None or other is None or len(row) != len(other):
        return None
    return tuple(a + factor * b for a, b in zip(row, other, strict=True))


def _alike(one: _Figures | None, other: _Figures | None) -> bool:
    """Equal bytes and counts; seconds equal but for the rounding of sums."""
    if one is None or other is None or len(one) != len(other):
        return False
    return all(
        math.isclose(a, b, rel_tol=_ROUNDING, abs_tol=_ROUNDING) if isinstance(a, float) else a == b
        for a, b in zip(one, other, strict=True)
    )


def _lengthened_edges(edges: tuple[Edge, ...], begin: int, period: int, times: int) -> tuple[Edge, ...] | None:
    """The edges with the blocks from ``begin`` to before ``begin + period`` there ``times`` times more.

    What lies before the layers is read by every repetition; what a layer makes is read by those that follow it as closely.
    """
    first_layer, middle, end = begin - HEAD, begin + period, begin + 2 * period

    def moved(edge: Edge, by: int) -> Edge:
        producer = edge.producer if edge.producer < first_layer else edge.producer + by
        return Edge(producer=producer, consumer=edge.consumer + by, num_bytes=edge.num_bytes)

    inside = [edge for edge in edges if begin <= edge.consumer < middle]
    if {moved(edge, period) for edge in inside} != {edge for edge in edges if middle <= edge.consumer < end}:
        return None
    behind = [edge for edge in edges if edge.consumer >= middle]
    if any(first_layer <= edge.producer < begin for edge in behind):
        return None  # something far behind reads the first layers
    result = [edge for edge in edges if edge.consumer < begin]
    result += [moved(edge, k * period) for k in range(times + 1) for edge in inside]
    result += [moved(edge, times * period) for edge in behind]
    return tuple(sorted(result, key=lambda edge: (edge.producer, edge.consumer)))
