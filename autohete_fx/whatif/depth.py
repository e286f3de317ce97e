"""Deep models from shallow ones: a step traced with few layers becomes the step of a model with many.

Enter the same model traced at two depths, one period of layers apart. Leaves what a trace of all its layers would give, or None
where that cannot be told. Layers that are built alike cost alike, but not equally. The first and last lie beside something
else, and small things add up over depth. Gradients of small parameters, which stay on the device, are an example. Every figure
is therefore taken to be linear. The figures of a block at a given distance from the beginning or the end are linear in the
depth. Those of layers between are linear in the position. Two traces check a part of that: the layers between lie on one line,
the same in both.

Layers that draw random numbers, as dropout does, cost alike but for a few hundredths, because kernels that draw are fused over
layers. No two depths give equal figures then, and one trace stands for both (`deepened_evenly`). Seconds of the layers between
are their mean. A figure that falls from layer to layer counts something of the layers after it, and grows with their number.
The working memory of backward has in it the gradients of small parameters that later layers have left.
"""

import dataclasses
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from autohete_fx.ir import PARTIAL, ActivationCost, BlockCost, BlockKind, Edge, Problem
from autohete_fx.ir.labels import renumbered

HEAD, TAIL = 2, 1
"""Layers at the beginning and at the end that may cost otherwise than those between."""
_ROUNDING = 1e-9
_UNEVEN = 0.1
"""Seconds of a layer that draws may differ from the mean by so much of it."""

_Figures = tuple[int | float, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Small:
    """The part of a layer in what no decision changes; zeros for other blocks.

    Attributes:
        fixed_bytes: in `Problem.fixed_bytes`.
        grad_bytes: of the gradients of its small parameters.
        num_params: small ones and others.
    """

    fixed_bytes: int
    grad_bytes: int
    num_params: int


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
        small: one a block.
    """

    problem: Problem
    kinds: tuple[BlockKind, ...]
    flops: tuple[int, ...]
    num_params: int
    traced_layers: int
    batch: tuple[int, int]
    small: tuple["Small", ...]


def shallow_layers(num_layers: int, period: int) -> int | None:
    """The fewest layers worth tracing: head, two periods, tail, and as many as make whole periods missing.

    None where tracing twice would not be less than tracing once.
    """
    fewest = _fewest(num_layers, period)
    return fewest if 2 * fewest + period < num_layers else None


def even_layers(num_layers: int, period: int) -> int | None:
    """The layers of the one trace that `deepened_evenly` takes; None where they are not fewer than all."""
    fewest = _fewest(num_layers, period)
    return fewest if fewest < num_layers else None


def _fewest(num_layers: int, period: int) -> int:
    fewest = HEAD + 2 * period + TAIL
    return fewest + (num_layers - fewest) % period


def deepened(shallow: TracedStep, deeper: TracedStep, *, num_layers: int, period: int) -> TracedStep | None:
    """The step with ``num_layers`` layers; ``deeper`` has ``period`` layers more than ``shallow``."""
    layers = _layers_of(deeper)
    if layers is None or _more(shallow.kinds, layers.start + HEAD, period) != deeper.kinds:
        return None
    begin, times = layers.start + HEAD, (num_layers - len(layers)) // period
    if _lengthened_edges(shallow.problem.edges, begin, period, 1) != deeper.problem.edges:
        return None
    end = len(deeper.kinds) - layers.stop + TAIL
    rows = _extrapolated(_figures(shallow), _figures(deeper), begin, end, period, times)
    growth = (
        deeper.problem.fixed_bytes - shallow.problem.fixed_bytes,
        deeper.num_params - shallow.num_params,
    )
    return None if rows is None else _lengthened(deeper, rows, growth, layers, period, times)


def deepened_evenly(step: TracedStep, *, num_layers: int, period: int) -> TracedStep | None:
    """The step with ``num_layers`` layers from one of `even_layers`; None where the layers between are not alike."""
    layers = _layers_of(step)
    if layers is None:
        return None
    begin, times = layers.start + HEAD, (num_layers - len(layers)) // period
    between = range(begin, layers.stop - TAIL)
    rows = _evened(_figures(step), between, period)
    fall = None if rows is None else _plus(rows[begin], rows[begin + period], -1)
    if rows is None or fall is None:
        return None
    small = step.small[begin : begin + period]
    falls = list(fall)
    falls[_HOLDS_GRADIENTS] = sum(layer.grad_bytes for layer in small)
    shallow = _shortened(rows, falls, layers, period)
    end = len(rows) - between.stop
    figures = _extrapolated(shallow, rows, begin, end, period, times)
    growth = sum(layer.fixed_bytes for layer in small), sum(layer.num_params for layer in small)
    return None if figures is None else _lengthened(step, figures, growth, layers, period, times)


def _layers_of(step: TracedStep) -> range | None:
    """Indices of the layers' blocks; None where others lie between them."""
    found = [index for index, kind in enumerate(step.kinds) if kind is BlockKind.LAYER]
    layers = range(found[0], found[-1] + 1)
    return layers if found == list(layers) else None


def _lengthened(
    step: TracedStep, rows: list[_Figures], growth: tuple[int, int], layers: range, period: int, times: int
) -> TracedStep | None:
    """The step with ``times`` periods more, given all blocks' rows; ``growth``: fixed bytes and parameters of a period."""
    assert times >= 0, "the trace has more layers than the model"
    begin = layers.start + HEAD
    edges = _lengthened_edges(step.problem.edges, begin, period, times)
    if edges is None:
        return None
    labels = list(_more(step.problem.labels, begin, period, times))
    for index in range(begin, layers.stop + times * period):
        labels[index] = renumbered(labels[index], min((index - begin) // period, times) * period)
    problem = dataclasses.replace(
        step.problem,
        labels=tuple(labels),
        costs=tuple(_cost_of(row) for row in rows),
        edges=edges,
        fixed_bytes=step.problem.fixed_bytes + times * growth[0],
    )
    return dataclasses.replace(
        step,
        problem=problem,
        kinds=_more(step.kinds, begin, period, times),
        flops=tuple(int(row[0]) for row in rows),
        num_params=step.num_params + times * growth[1],
        small=_more(step.small, begin, period, times),
    )


def _more(values: tuple[Any, ...], begin: int, period: int, times: int = 1) -> tuple[Any, ...]:
    """The values with the period from ``begin`` there ``times`` times more."""
    return (*values[:begin], *values[begin : begin + period] * times, *values[begin:])


def _figures(step: TracedStep) -> list[_Figures]:
    """One row of numbers a block: its FLOPs, its costs, how many of each kind of tensor it lists, and those."""
    return [(flops, *_row_of(cost)) for flops, cost in zip(step.flops, step.problem.costs, strict=True)]


_LISTED = ("offloadable", "trained", "trained_states", "product_flops")
_COST_NAMES = tuple(field.name for field in dataclasses.fields(BlockCost) if field.name not in (*_LISTED, "partial"))
_HOLDS_GRADIENTS = 1 + _COST_NAMES.index("backward_workspace_bytes")
"""Its place in a row."""


def _row_of(cost: BlockCost) -> _Figures:
    partial = {kind: (part.held_bytes, part.recompute_s) for kind, part in cost.partial}
    lists = (*(getattr(cost, name) for name in _LISTED), *(partial.get(kind, ()) for kind in PARTIAL))
    figures = (getattr(cost, name) for name in _COST_NAMES)
    return (*figures, *map(len, lists), *(n for each in lists for n in each))


def _cost_of(row: _Figures) -> BlockCost:
    """The cost that a block's row spells, its FLOPs before it."""
    first = 1 + len(_COST_NAMES)
    costs: dict[str, Any] = dict(zip(_COST_NAMES, row[1:first], strict=True))
    end, lists = first + len(_LISTED) + len(PARTIAL), []
    for length in row[first:end]:
        lists.append(row[end : end + int(length)])
        end += int(length)
    offloadable, trained, states, flops, *partial = lists
    return BlockCost(
        **costs,
        offloadable=tuple(int(n) for n in offloadable),
        trained=tuple(int(n) for n in trained),
        trained_states=tuple(int(n) for n in states),
        product_flops=tuple(flops),
        partial=tuple(
            (kind, ActivationCost(held_bytes=int(part[0]), recompute_s=part[1]))
            for kind, part in zip(PARTIAL, partial, strict=True)
            if part
        ),
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


def _evened(rows: list[_Figures], between: range, period: int) -> list[_Figures] | None:
    """The rows with the mean of their like for seconds of the layers between; None where one is far from it."""
    even = list(rows)
    for t in range(period):
        alike = between[t::period]
        if len({len(rows[index]) for index in alike}) > 1:
            return None
        means = [sum(column) / len(alike) for column in zip(*(rows[index] for index in alike), strict=True)]
        for index in alike:
            row = [(a, mean if isinstance(a, float) else a) for a, mean in zip(rows[index], means, strict=True)]
            if any(abs(a - mean) > _UNEVEN * mean for a, mean in row):
                return None
            even[index] = tuple(a if math.isclose(a, mean, rel_tol=_ROUNDING) else mean for a, mean in row)
    return even


def _shortened(rows: list[_Figures], fall: Sequence[float], layers: range, period: int) -> list[_Figures]:
    """The rows that a trace of a period less would have; ``fall``: of a figure from a layer between to that a period after it.

    Figures that fall count the layers after theirs, and those that rise the ones before. A figure of 0 counts none.
    """
    end = layers.stop - TAIL
    count = 1 + len(_COST_NAMES)

    def less(row: _Figures, sign: int) -> _Figures:
        return tuple(a - max(0, sign * fall[k]) if a and k < count else a for k, a in enumerate(row))

    return [*(less(row, 1) for row in rows[: end - period]), *(less(row, -1) for row in rows[end:])]


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
