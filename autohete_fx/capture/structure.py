"""Layers by the shape of the graph, for graphs whose module paths are missing or show no layers.

In: the joint graph's nodes and its parameters. Out: a `Structure`: which stretches of the forward activations repeat,
in execution order.

Activations are the forward nodes that depend on data and on a parameter. Their *cut nodes* are those that every path
from an entry to the end passes: on a residual stream, the sums. They are the chain of immediate post-dominators
(networkx), and divide the activations into segments. A segment is known by what it computes;
the layers are the period of segments, repeated at least twice, that covers most work. Values that distant places read
(an encoder's output, a position bias) would hide every cut, so long edges may be left out of the search.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import networkx as nx
import numpy as np
from torch import fx

from autohete_fx.capture.assign import Parameters, SlotMap, Slots, find_parameters
from autohete_fx.capture.dataflow import JointNodes, is_heavy, tensors_of, work
from autohete_fx.capture.digest import combine, group_digest

MIN_COVERED_SHARE = 0.3
"""Share of the activations' work that the layers must cover: below it nothing that matters repeats."""
MIN_STACK_SHARE = 0.1
"""The same for every further stack."""
GOOD_SHARE = 0.6
"""Share from which no other way to cut is tried."""
MIN_HEAVY_NODES = 2
"""Matrix products that a layer does at least, unless it repeats exactly and `MANY` times."""
MANY = 4
REACHES = (1.0, 0.5, 0.25, 0.125)
"""Longest edges, relative to the number of activations, that are followed; tried in this order."""
MIN_REACH_NODES = 64
"""Edges at least this long are what distant places read; shorter ones are a layer's own (residuals, projections)."""
MIN_ENTRY_HEAVY_NODES = 4
"""Matrix products after an entry before it meets the cuts of another one: a decoder's embedding, not a projection."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Structure:
    """Repeated stretches of the forward pass.

    Attributes:
        segment_of: by activation, the number of its segment.
        layers: (first segment, segment after the last, number of the stack) of each layer, in execution order.
        covered: matrix products of the layers as a share of the activations' work.
    """

    segment_of: dict[fx.Node, int]
    layers: tuple[tuple[int, int, int], ...]
    covered: float

    def slots(self) -> Slots:
        """A numbering with these layers."""
        return Slots(tuple(stack for _, _, stack in self.layers))

    def known(self) -> SlotMap:
        """Slots of all activations."""
        slots = self.slots()
        slot_of_segment: dict[int, int] = {}
        gap = 0
        segment = 0
        for index, (begin, end, _) in enumerate(self.layers):
            slot_of_segment.update((number, gap) for number in range(segment, begin))
            slot_of_segment.update((number, Slots.of_layer(index)) for number in range(begin, end))
            gap, segment = Slots.of_layer(index) + 1, end
        return {node: slot_of_segment.get(number, slots.last) for node, number in self.segment_of.items()}


def repeated_structure(joint: JointNodes, parameters: Parameters) -> Structure | None:
    """The best repeated structure, or None where nothing that matters repeats."""
    data = [node for node in joint.placeholders if node not in parameters.placeholders]
    if not parameters.placeholders:
        parameters = find_parameters(joint, [node.name for node in joint.placeholders if _is_weight_like(node)])
    activations = _activations(joint, parameters, data)
    best: Structure | None = None
    for reach in REACHES if activations else ():
        if reach < 1.0 and reach * len(activations) < MIN_REACH_NODES:
            break
        segments = _segments(joint, activations, reach * len(activations))
        for exact in (True, False):
            found = _layers(segments, parameters, exact)
            # Exact repetition gives the better borders; a looser one has to find clearly more.
            if best is None or found.covered > best.covered + 0.01:
                best = found
        if best is not None and best.covered >= GOOD_SHARE:
            break
    return best if best is not None and best.covered >= MIN_COVERED_SHARE else None


def _is_weight_like(placeholder: fx.Node) -> bool:
    return any(tensor.is_floating_point() and tensor.dim() > 0 for tensor in tensors_of(placeholder))


def _activations(joint: JointNodes, parameters: Parameters, data: Iterable[fx.Node]) -> list[fx.Node]:
    """Forward nodes that depend on both a parameter and data; what only transforms a weight is none."""
    from_data = set(data)
    from_parameter: set[fx.Node] = set(parameters.placeholders)
    found = []
    for node in joint.forward:
        sources = node.all_input_nodes
        if any(source in from_data for source in sources):
            from_data.add(node)
        if any(source in from_parameter for source in sources):
            from_parameter.add(node)
        early = joint.order[node] < joint.forward_end
        if early and node in from_data and node in from_parameter and node not in parameters.views:
            found.append(node)
    return found


Segments = list[list[fx.Node]]


def _segments(joint: JointNodes, activations: Sequence[fx.Node], max_edge: float) -> Segments:
    """Activations between consecutive cut nodes, in execution order."""
    position = {node: index for index, node in enumerate(activations)}
    returned = [node for node in joint.output.all_input_nodes if node in position]
    end = max(returned or activations, key=position.__getitem__)
    backwards = nx.DiGraph()
    backwards.add_node(end)
    for node in activations:
        for source in node.all_input_nodes:
            if source in position and position[node] - position[source] <= max_edge:
                backwards.add_edge(node, source)
    dominators = {node: above for node, above in nx.immediate_dominators(backwards, end).items() if node is not end}
    entries = [node for node in dominators if backwards.out_degree(node) == 0]
    cuts = _cuts(activations, dominators, entries, end)
    number = {node: index for index, node in enumerate(sorted(cuts, key=position.__getitem__))}
    segments: Segments = [[] for _ in number]
    segment_of: dict[fx.Node, int] = {}
    for node in reversed(activations):
        if node in number:
            segment_of[node] = number[node]
        elif node in dominators:
            segment_of[node] = segment_of[dominators[node]]
    for node in activations:  # what never reaches the end, such as statistics kept for backward, goes with its inputs
        if node not in segment_of:
            inputs = [segment_of[source] for source in node.all_input_nodes if source in segment_of]
            segment_of[node] = max(inputs, default=0)
        segments[segment_of[node]].append(node)
    return segments


def _cuts(
    activations: Sequence[fx.Node], dominators: dict[fx.Node, fx.Node], entries: Iterable[fx.Node], end: fx.Node
) -> set[fx.Node]:
    """Nodes that all paths from some entry to the end pass, for every entry that leads through layers of its own."""
    position = {node: index for index, node in enumerate(activations)}
    heavy_before = np.cumsum([0, *(is_heavy(node) for node in activations)])
    depth = {end: 0}
    for node in sorted(dominators, key=position.__getitem__, reverse=True):
        depth[node] = depth[dominators[node]] + 1
    cuts = {end}
    for entry in sorted(entries, key=lambda node: (-depth[node], position[node])):
        chain = []
        node = entry
        while node not in cuts:
            chain.append(node)
            node = dominators[node]
        num_heavy = heavy_before[position[node]] - heavy_before[position[entry]]
        if len(cuts) == 1 or num_heavy >= MIN_ENTRY_HEAVY_NODES:
            cuts.update(chain)
    return cuts


def _layers(segments: Segments, parameters: Parameters, exact: bool) -> Structure:
    """The repeated stretches among segments; approximate ones need only the same matrix products."""
    if not exact:
        segments = _merge_light(segments)
    keys = [_key(segment, parameters, exact) for segment in segments]
    work_before = np.cumsum([0, *(sum(work(node) for node in segment) for segment in segments)])
    heavy_before = np.cumsum([0, *(sum(is_heavy(node) for node in segment) for segment in segments)])
    total = max(int(work_before[-1]), 1)
    layers: list[tuple[int, int, int]] = []
    covered = 0
    ranges = [(0, len(segments))]
    while ranges:
        begin, end = ranges.pop()
        found = _best_period(keys, work_before, heavy_before, (begin, end), MANY if exact else len(keys))
        if found is None:
            continue
        start, period, count = found
        stop = start + period * count
        gain = int(work_before[stop] - work_before[start])
        if gain < MIN_STACK_SHARE * total:
            continue
        covered += sum(work(node) for segment in segments[start:stop] for node in segment if is_heavy(node))
        layers += [(first, first + period, start) for first in range(start, stop, period)]
        ranges += [(begin, start), (stop, end)]
    segment_of = {node: number for number, segment in enumerate(segments) for node in segment}
    return Structure(segment_of=segment_of, layers=tuple(sorted(layers)), covered=covered / total)


def _merge_light(segments: Segments) -> Segments:
    """Segments without a matrix product become part of the next one that has some."""
    merged: Segments = []
    pending: list[fx.Node] = []
    for segment in segments:
        pending = [*pending, *segment]
        if any(is_heavy(node) for node in segment):
            merged.append(pending)
            pending = []
    return [*merged, pending] if pending else merged


def _key(segment: Sequence[fx.Node], parameters: Parameters, exact: bool) -> str:
    if exact:
        return group_digest(segment, parameters.placeholders, ())
    heavy = [node for node in segment if is_heavy(node)]
    if not heavy:
        return ""
    return combine(f"{node.target} {[tuple(map(str, t.shape)) for t in tensors_of(node)]}" for node in heavy)


def _best_period(
    keys: Sequence[str], work_before: np.ndarray, heavy_before: np.ndarray, within: tuple[int, int], many: int
) -> tuple[int, int, int] | None:
    """Start, period and count of the repetition that covers most work; of several that cover alike, the shortest."""
    begin, end = within
    numbers = {key: index for index, key in enumerate(dict.fromkeys(keys[begin:end]))}
    codes = np.array([numbers[key] for key in keys[begin:end]])
    best: tuple[int, int, int] | None = None
    best_gain = 0.0
    for period in range(1, len(codes) // 2 + 1):
        same = np.concatenate(([False], codes[:-period] == codes[period:], [False]))
        changes = np.flatnonzero(same[1:] != same[:-1])
        for run_begin, run_end in zip(changes[::2].tolist(), changes[1::2].tolist(), strict=True):
            count = (run_end - run_begin) // period + 1
            if count < 2:
                continue
            for offset in range((run_end - run_begin) % period + 1):
                start = begin + run_begin + offset
                heavy = int(heavy_before[start + period] - heavy_before[start])
                if heavy < (1 if count >= many else MIN_HEAVY_NODES):
                    continue
                gain = float(work_before[start + period * count] - work_before[start])
                if gain > best_gain * 1.001:
                    best, best_gain = (start, period, count), gain
    return best
