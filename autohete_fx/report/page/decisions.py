"""The map of decisions: a column a block, a row a decision."""

from autohete_fx.ir import Activations, BlockDecision, Optimizer, Params
from autohete_fx.report.data import ReportData
from autohete_fx.report.page import svg
from autohete_fx.report.page.colours import OF_ACTIVATIONS, OF_OPTIMIZER, OF_PARAMS

_ROW, _GAP = 30, 8
_NUMBERED = 24
"""Where there are more blocks, only every so many are numbered."""


def decision_map(data: ReportData) -> str:
    """Activations, parameters and optimizer of each block; those of a part of it as a part of the cell's height."""
    plan = data.plan
    count = len(plan.decisions)
    rows = ("activations", "parameters", "optimizer")
    height = len(rows) * (_ROW + _GAP) - _GAP
    names = [svg.text(row, x=0, y=i * (_ROW + _GAP) + _ROW / 2 + 4, class_="lane") for i, row in enumerate(rows)]
    cells = []
    for block, decision in enumerate(plan.decisions):
        column = []
        for i, parts in enumerate(_parts(decision)):
            top = i * (_ROW + _GAP)
            for name, share in parts:
                column.append(svg.box(0.0, 1.0, top, share * _ROW, class_=f"cell {name}"))
                top += share * _ROW
        words = svg.hint(_words(plan.labels[block], block, decision))
        place = {"x": svg.percent(block / count), "width": svg.percent(1 / count), "height": height}
        cells.append(svg.element("svg", svg.element("g", words, *column), **place))
    every = -(-count // _NUMBERED)
    marks = tuple(block + 0.5 for block in range(0, count, every))
    x = svg.Axis(low=0.0, high=max(1, count), marks=marks)
    picture = svg.plot(
        "decisions", decisions_sentence(data), height, x, lambda at: str(int(at)), "".join(names), *cells
    )
    return picture + svg.legend(_entries(data))


def decisions_sentence(data: ReportData) -> str:
    """How many blocks are decided how."""
    decisions = data.plan.decisions
    named = {
        "Activations": [d.activations.value for d in decisions],
        "Parameters": [d.params.value for d in decisions],
        "Optimizer": [d.optimizer.value for d in decisions],
    }
    said = (
        f"{name}: {', '.join(f'{values.count(value)} {value}' for value in dict.fromkeys(values))}."
        for name, values in named.items()
    )
    return " ".join([f"{len(decisions)} blocks.", *said])


def _parts(decision: BlockDecision) -> list[list[tuple[str, float]]]:
    """The colours of each row's cell, from the top, with their shares of its height."""
    activations = [(OF_ACTIVATIONS[decision.activations], 1.0)]
    if decision.num_offloaded is not None:
        activations = [(OF_ACTIVATIONS[Activations.OFFLOAD], 0.5), ("faint", 0.5)]
    optimizer = [(OF_OPTIMIZER[decision.optimizer], 1.0)]
    if decision.num_moved_states is not None:
        optimizer = [(OF_OPTIMIZER[decision.optimizer], 0.5), (OF_OPTIMIZER[decision.other_states], 0.5)]
    return [activations, [(OF_PARAMS[decision.params], 1.0)], optimizer]


def _words(label: str, block: int, decision: BlockDecision) -> str:
    largest = "" if decision.num_offloaded is None else f", the {decision.num_offloaded} largest tensors"
    kept = ", kept from forward to backward" if decision.keeps_fetched else ""
    kept = ", replicated" if decision.replicates else kept
    smallest = "" if decision.num_moved_states is None else f" for the {decision.num_moved_states} smallest parameters"
    others = "" if decision.num_moved_states is None else f", {decision.other_states.value} for the others"
    moves = decision.activations is Activations.OFFLOAD or decision.params is Params.HOST or decision.streams
    ahead = f"\ncopies are issued {decision.prefetch_distance} blocks ahead" if moves else ""
    return (
        f"{label} (block {block})\nactivations: {decision.activations.value}{largest}\n"
        f"parameters: {decision.params.value}{kept}\noptimizer: {decision.optimizer.value}{smallest}{others}{ahead}"
    )


def _entries(data: ReportData) -> list[tuple[str, str]]:
    decisions = data.plan.decisions
    found = [("faint", "kept, on the device")]
    for activations in Activations:
        if activations is not Activations.KEEP and any(d.activations is activations for d in decisions):
            found.append((OF_ACTIVATIONS[activations], f"activations: {activations.value}"))
    if any(d.params is Params.HOST for d in decisions):
        found.append((OF_PARAMS[Params.HOST], "parameters: host"))
    for place in (Optimizer.HOST, Optimizer.STREAMED, Optimizer.DISK):
        if any(place in (d.optimizer, d.other_states) for d in decisions):
            found.append((OF_OPTIMIZER[place], f"optimizer: {place.value}"))
    if any(d.num_offloaded is not None or d.num_moved_states is not None for d in decisions):
        found.append(("halved", "a part of the block"))
    return found
