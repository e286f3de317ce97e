"""Which modules are the transformer layers.

In: forward nodes with their module stacks. Out: `Layer` values in execution order, or none where no container repeats.

A *family* is what one container repeats. Members are children of one class (``layers.0``, ``layers.1``, ...; ``block1``,
``block2``; entries of a ModuleDict), or several calls of one child (ALBERT). It counts if every member does at least two matrix
products and most members feed the next one. The experts of a mixture do not, so they are not layers. The outermost family wins,
unless the families inside its members cover most of their work with members that are alike. ``stages.0.blocks.3`` beats
``stages.0``, while ``layers.0.mlp`` is part of its layer.
"""

import re
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from torch import fx

from autohete_fx.capture.dataflow import JointNodes, is_heavy, tensors_of, work
from autohete_fx.capture.paths import Path, Scope, module_stack, scopes

MIN_HEAVY_NODES = 2
"""Matrix products that a member does at least: less is a single projection, not a layer."""
MIN_INNER_SHARE = 0.6
"""Share of a family's work that families inside its members must cover to take its place."""
MIN_FAMILY_SHARE = 0.02
"""Share of all forward work below which a family is not worth decisions of its own."""
MIN_SIBLING_SHARE = 0.2
"""Work, relative to the mean member, from which a sibling of another class counts as a layer too (hybrid models)."""

_NUMBERED = re.compile(r"^(.*?)(\d+)$")


@dataclass(frozen=True, slots=True)
class Layer:
    """One repeated module call.

    Attributes:
        scope: the module's path and call.
        stack: the container that repeats it; layers of one stack have nothing between them.
        first: position of its first matrix product.
    """

    scope: Scope
    stack: Path
    first: int


@dataclass(slots=True)
class _Module:
    type_name: str | None = None
    children: dict[str, Path] = field(default_factory=dict)
    calls: dict[str, "_Call"] = field(default_factory=dict)


@dataclass(slots=True)
class _Call:
    """What one call of one module does in forward."""

    nodes: list[fx.Node] = field(default_factory=list)
    first: int = -1
    num_heavy: int = 0
    work: int = 0
    signature: list[object] = field(default_factory=list)


_Tree = dict[Path, _Module]


def module_layers(joint: JointNodes) -> tuple[Layer, ...]:
    """The layers that the module stacks show, in execution order; empty if nothing repeats."""
    tree = _module_tree(joint)
    total = sum(work(node) for node in joint.forward)
    roots = [path for path in tree if len(path) == 1]
    layers = [layer for root in roots for layer in _choose(joint, tree, root)]
    by_stack: dict[Path, int] = Counter()
    for layer in layers:
        by_stack[layer.stack] += _call(tree, layer).work
    large = [layer for layer in layers if by_stack[layer.stack] >= MIN_FAMILY_SHARE * total]
    return tuple(sorted(large or layers, key=lambda layer: layer.first))


def _module_tree(joint: JointNodes) -> _Tree:
    tree: _Tree = {}
    for node in joint.forward:
        stack = module_stack(node)
        if not stack or joint.order[node] >= joint.forward_end:
            continue
        types = {entry.path: entry.type_name for entry in stack}
        for path, call in scopes(stack):
            module = tree.setdefault(path, _Module())
            module.type_name = module.type_name or types.get(path)
            if len(path) > 1:
                tree.setdefault(path[:-1], _Module()).children[path[-1]] = path
            _count(module.calls.setdefault(call, _Call()), node, joint.order[node])
    return tree


def _count(call: _Call, node: fx.Node, position: int) -> None:
    call.nodes.append(node)
    call.work += work(node)
    if is_heavy(node):
        call.first = position if call.num_heavy == 0 else call.first
        call.num_heavy += 1
        call.signature.append((str(node.target), tuple(str(tuple(t.shape)) for t in tensors_of(node))))


def _call(tree: _Tree, layer: Layer) -> _Call:
    path, call = layer.scope
    return tree[path].calls[call]


def _choose(joint: JointNodes, tree: _Tree, path: Path) -> list[Layer]:
    """The layers at or below one module."""
    chosen: list[Layer] = []
    family = _family(joint, tree, path)
    members = {layer.scope[0] for layer in family}
    inner = [layer for member in sorted(members) for layer in _choose(joint, tree, member)]
    family_work = sum(_call(tree, layer).work for layer in family)
    inner_work = sum(_call(tree, layer).work for layer in inner)
    refine = inner and inner_work >= MIN_INNER_SHARE * family_work and _alike(tree, inner)
    chosen += inner if refine else family
    for child in tree[path].children.values():
        if child not in members:
            chosen += _choose(joint, tree, child)
    return chosen


def _alike(tree: _Tree, layers: Iterable[Layer]) -> bool:
    """Whether in every stack more than half of the layers do the same matrix products."""
    by_stack: dict[Path, Counter[str]] = {}
    for layer in layers:
        by_stack.setdefault(layer.stack, Counter())[repr(_call(tree, layer).signature)] += 1
    return all(2 * max(counts.values()) > counts.total() for counts in by_stack.values())


def _family(joint: JointNodes, tree: _Tree, container: Path) -> list[Layer]:
    """Calls of a container's repeated children, in execution order; empty if it repeats none."""
    groups: dict[object, list[Layer]] = {}
    others: list[Layer] = []
    children = tree[container].children
    for name, path in children.items():
        for call, facts in tree[path].calls.items():
            if facts.num_heavy >= MIN_HEAVY_NODES:
                layer = Layer((path, call), container, facts.first)
                groups.setdefault((_class_of(tree, path), _naming(tree, container, name)), []).append(layer)
    family: list[Layer] = []
    for layers in groups.values():
        repeated = len(layers) > 1 and _feeds_next(joint, tree, sorted(layers, key=lambda layer: layer.first))
        (family if repeated else others).extend(layers)
    if family:
        mean = sum(_call(tree, layer).work for layer in family) / len(family)
        numbered = [layer for layer in others if layer.scope[0][-1].isdigit()]
        family += [layer for layer in numbered if _call(tree, layer).work >= MIN_SIBLING_SHARE * mean]
    return sorted(family, key=lambda layer: layer.first)


def _class_of(tree: _Tree, path: Path) -> str:
    """A module's class; for a container that is only indexed, what it contains."""
    module = tree[path]
    if module.type_name is not None:
        return module.type_name
    return repr([(name, _class_of(tree, child)) for name, child in sorted(module.children.items())])


def _naming(tree: _Tree, container: Path, name: str) -> str:
    """A key that siblings share if their names say that they are repeated.

    ``0`` and ``1``, ``block1`` and ``block2``; any two names in a container that is itself never called, which is
    how a ModuleDict looks. ``q_proj`` and ``k_proj`` of an attention module do not.
    """
    match = _NUMBERED.match(name)
    if match:
        return match.group(1)
    indexed_only = tree[container].type_name is None and len(container) > 1
    return "" if indexed_only else f"={name}"


def _feeds_next(joint: JointNodes, tree: _Tree, layers: Sequence[Layer]) -> bool:
    """Whether at least half of the layers depend on the one before."""
    member = {node: index for index, layer in enumerate(layers) for node in _call(tree, layer).nodes}
    positions = [joint.order[node] for node in member]
    begin, end = min(positions), max(positions)
    ancestors: dict[fx.Node, int] = {}
    depends = [0] * len(layers)
    for node in joint.forward:
        if not begin <= joint.order[node] <= end:
            continue
        mask = 0
        for source in node.all_input_nodes:
            mask |= ancestors.get(source, 0)
        index = member.get(node)
        if index is not None:
            depends[index] |= mask
            mask |= 1 << index
        ancestors[node] = mask
    fed = sum(depends[index] >> (index - 1) & 1 for index in range(1, len(layers)))
    return 2 * fed >= len(layers) - 1
