"""Labels of layers: those of one stack differ in their last number only, so runs of layers are named together."""

import re
from collections.abc import Sequence

from autohete_fx.ir.block import Block

_LAST_NUMBER = re.compile(r"\d+(?!.*\d)")


def label_pattern(label: str) -> str:
    """The label with its last number left out: equal for layers of one stack."""
    return _LAST_NUMBER.sub("*", label)


def renumbered(label: str, by: int) -> str:
    """The label of the layer that many places later, in the same stack."""
    return _LAST_NUMBER.sub(lambda match: str(int(match.group()) + by), label)


def run_label(labels: Sequence[str]) -> str:
    """``model.layers.0-11 (12)`` for a run of one pattern; consecutive equal labels keep their name."""
    if len(labels) == 1:
        return labels[0]
    first, last = _LAST_NUMBER.search(labels[0]), _LAST_NUMBER.search(labels[-1])
    if first is None or last is None or labels[0] == labels[-1]:
        return f"{labels[0]} ({len(labels)})"
    return f"{labels[0][: first.end()]}-{last.group()}{labels[0][first.end() :]} ({len(labels)})"


def labels_of(blocks: Sequence[Block]) -> tuple[str, ...]:
    """One name a block; a kind that occurs twice gets its index."""
    labels = [block.label for block in blocks]
    return tuple(label if labels.count(label) == 1 else f"{label}@{index}" for index, label in enumerate(labels))
