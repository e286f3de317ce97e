"""The kinds of a model's layers: which are alike, so that one of each is traced and priced for all.

In: a model as `autohete plan` takes it, and steps of it that are captured. Out: a kind for each layer, embedding and head too.
"""

import re
from collections.abc import Iterable, Sequence

from torch import nn

from autohete_fx.errors import ClusterError
from autohete_fx.ir import BlockKind
from autohete_fx.whatif.blueprint import Blueprint
from autohete_fx.whatif.depth import HEAD, TAIL
from autohete_fx.whatif.trace import Captured

FIRST, LAYER, BRIDGE, LAST = "first", "layer", "bridge", "last"
_ENDS = {BlockKind.PROLOGUE: FIRST, BlockKind.BRIDGE: BRIDGE, BlockKind.EPILOGUE: LAST}
_NUMBERED = re.compile(r"(.+?)\.(\d+)\.")


class LayerKinds:
    """The kinds of a model's layers, and how many layers to trace.

    Attributes:
        kinds: of all layers, embedding and head among them; where all layers are traced, known after the first `kinds_of`.
        depth: layers to trace; None for all of them.
    """

    def __init__(self, blueprint: Blueprint, whole: nn.Module) -> None:
        self._shapes = {name: tuple(param.shape) for name, param in whole.named_parameters()}
        self._types = blueprint.layer_types if len(set(blueprint.layer_types)) > 1 else ()
        self.kinds: tuple[str, ...] = ()
        self.depth: int | None = None
        if blueprint.num_layers is None:
            return
        fewest = HEAD + blueprint.period + TAIL
        fewest += (blueprint.num_layers - fewest) % blueprint.period
        found = self._named(_params_of_layers(self._shapes, blueprint.num_layers))
        if fewest < blueprint.num_layers and len(set(found)) == len(set(self._types or (LAYER,))):
            self.kinds, self.depth = (FIRST, *found, LAST), fewest

    def kinds_of(self, captured: Captured) -> tuple[str, ...]:
        """The kind of each block of a captured step. Raises ClusterError where it is not divided by layers."""
        blocks = captured.partition.blocks.blocks
        inner = [block for block in blocks if block.kind is BlockKind.LAYER]
        if not inner or [blocks[0].kind, blocks[-1].kind] != [BlockKind.PROLOGUE, BlockKind.EPILOGUE]:
            raise ClusterError(
                f"a model was given whose graph has the blocks {', '.join(block.label for block in blocks)}. Expected were layers"
                " between an embedding and a head. Give a model of which stages can be made"
            )
        if self.depth is not None:
            assert len(blocks) - 2 == len(inner) == self.depth, "layers are grouped by their modules"
            return (*self.kinds[: 1 + self.depth - TAIL], *self.kinds[-1 - TAIL :])
        names = iter(self._named([block.param_fqns for block in inner]))
        self.kinds = tuple(_ENDS.get(block.kind) or next(names) for block in blocks)
        return self.kinds

    def _named(self, params: Sequence[Sequence[str]]) -> list[str]:
        """The kind of each layer by its parameters: its type, numbered where layers of one type have unlike parameters."""
        types = self._types if len(self._types) == len(params) else (LAYER,) * len(params)
        seen: dict[str, list[list[tuple[int, ...]]]] = {}
        names = []
        for kind, mine in zip(types, params, strict=True):
            shapes = [self._shapes[name] for name in mine]
            known = seen.setdefault(kind, [])
            if shapes not in known:
                known.append(shapes)
            place = known.index(shapes)
            names.append(f"{kind}-{place + 1}" if place else kind)
        return names


def _params_of_layers(names: Iterable[str], num_layers: int) -> list[list[str]]:
    """The names of each layer's parameters; of no layer where no stack is as deep."""
    stacks: dict[str, dict[int, list[str]]] = {}
    for name in names:
        found = _NUMBERED.match(name)
        if found:
            stacks.setdefault(found[1], {}).setdefault(int(found[2]), []).append(name)
    for stack in stacks.values():
        if sorted(stack) == list(range(num_layers)):
            return [stack[index] for index in range(num_layers)]
    return [[] for _ in range(num_layers)]
