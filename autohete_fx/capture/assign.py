"""Every node into one slot, so that slots can run one after the other.

In: the joint graph's nodes and, for some forward nodes (and backward ones, where a path says so), the slot they belong to. Out:
a slot for every node. Slots are numbered in forward execution order: one before the first layer, one per layer, one after each
layer (used where two stacks meet). The last one is the epilogue.

The result has three properties, whatever the input (`check_order` checks them). No forward edge goes from a higher slot to a
lower one, no backward edge from a lower slot to a higher one. The results of one operator stay with it. A node whose slot is
unknown or would break that is placed by dataflow:

* constants, what derives from inputs only, views and casts of one parameter: with their users. If several slots use them, they
  are in the last slot before all of these that is not a layer;
* other forward nodes: by position among the layers; between two layers of one stack, with their producers;
* backward nodes: with the forward nodes they differentiate, else as early as their inputs allow. A gradient that is accumulated
  over several slots goes to the lowest of them.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

import torch
from torch import fx

from autohete_fx.capture.dataflow import JointNodes, is_getitem, is_scalar, is_view
from autohete_fx.capture.paths import Stack, module_stack

_CASTS = (torch.ops.aten._to_copy.default, torch.ops.prims.convert_element_type.default)

SlotMap = dict[fx.Node, int]


@dataclass(frozen=True, slots=True)
class Slots:
    """The numbering: layer i stands in slot 2 i + 1.

    Attributes:
        stacks: for each layer, in execution order, a key of the stack it belongs to.
    """

    stacks: tuple[object, ...]

    @property
    def last(self) -> int:
        """The epilogue's slot."""
        return 2 * len(self.stacks)

    @staticmethod
    def of_layer(layer: int) -> int:
        """The slot of a layer."""
        return 2 * layer + 1

    @staticmethod
    def is_layer(slot: int) -> bool:
        """Whether a slot holds a layer."""
        return slot % 2 == 1

    def before(self, slot: int) -> int:
        """The last slot at or before this one that lies outside all stacks."""
        slot -= slot % 2
        while 0 < slot < self.last and self.stacks[slot // 2 - 1] == self.stacks[slot // 2]:
            slot -= 2
        return slot

    def between(self, lower: int | None, upper: int | None) -> int | None:
        """The slot of what stands between two layers' slots (None: there is none); None if dataflow has to decide."""
        if lower is None:
            return 0
        if upper is None:
            return self.last
        if lower == upper:
            return lower
        if lower < upper and self.stacks[lower // 2] != self.stacks[upper // 2]:
            return lower + 1
        return None


@dataclass(frozen=True, slots=True)
class Parameters:
    """Where parameters enter the graph.

    Attributes:
        placeholders: those that stand for parameters.
        views: by node, the placeholder of which it is a view or a cast, for views and casts of parameters only.
    """

    placeholders: frozenset[fx.Node]
    views: Mapping[fx.Node, fx.Node]

    def real_users(self, placeholder: fx.Node) -> list[fx.Node]:
        """Nodes that read a parameter, through its views and casts; the views themselves if nothing else reads them."""
        users, queue = [], list(placeholder.users)
        while queue:
            user = queue.pop()
            if user in self.views and user.users:
                queue.extend(user.users)
            elif user.op != "output":
                users.append(user)
        return users


def find_parameters(joint: JointNodes, names: Iterable[str]) -> Parameters:
    """The placeholders named ``names`` and everything that is a view or a cast of one of them."""
    wanted = frozenset(names)
    placeholders = frozenset(node for node in joint.placeholders if node.name in wanted)
    views: dict[fx.Node, fx.Node] = {}
    for node in joint.forward:
        sources = node.all_input_nodes
        if len(sources) == 1 and (is_view(node) or node.target in _CASTS):
            origin = views.get(sources[0], sources[0])
            if origin in placeholders:
                views[node] = origin
    return Parameters(placeholders, views)


def assign_forward(joint: JointNodes, slots: Slots, known: Mapping[fx.Node, int], parameters: Parameters) -> SlotMap:
    """A slot for every forward node. ``known`` holds those of layers (or of anything else that is certain)."""
    floating = _floating(joint, known, parameters)
    early = [node for node in joint.forward if joint.order[node] < joint.forward_end and node not in floating]
    neighbours = _neighbours(early, known)
    by_stack: dict[Stack, set[int]] = {}
    result: SlotMap = {}
    for node in joint.forward:
        if node in floating:
            continue
        lowest = max((result[source] for source in node.all_input_nodes if source in result), default=0)
        stack = module_stack(node)
        if node in known:
            slot = known[node]
        elif node in neighbours:
            lower, upper = neighbours[node]
            slot = slots.between(lower, upper)
            if slot is None:
                assert lower is not None and upper is not None
                slot = upper if lowest < lower < upper else lowest
        else:  # behind the first backward node: computed in forward terms, for the backward pass
            same = by_stack.get(stack, set())
            slot = next(iter(same)) if len(same) == 1 else lowest
        result[node] = lowest if is_getitem(node) else max(slot, lowest)
        if stack and node in neighbours:
            by_stack.setdefault(stack, set()).add(result[node])
    for node in reversed(joint.forward):
        if node in floating:
            users = {result[user] for user in node.users if user in result}
            if users:
                result[node] = users.pop() if len(users) == 1 else slots.before(min(users))
    return result


def _floating(joint: JointNodes, known: Mapping[fx.Node, int], parameters: Parameters) -> set[fx.Node]:
    """Forward nodes that could run anywhere before their users: no activation reaches them and no path places them."""
    floating: set[fx.Node] = set()
    for node in joint.forward:
        placed = node in known or (module_stack(node) and not is_scalar(node))
        if placed or any(is_getitem(user) for user in node.users):
            continue
        views_parameter = node in parameters.views
        if all(
            source in floating
            or (source.op == "placeholder" and (views_parameter or source not in parameters.placeholders))
            for source in node.all_input_nodes
        ):
            floating.add(node)
    return floating


def _neighbours(nodes: Iterable[fx.Node], known: Mapping[fx.Node, int]) -> dict[fx.Node, tuple[int | None, int | None]]:
    """For nodes without a layer: the layer slots seen last before and first after them, in graph order."""
    ordered = list(nodes)
    before: dict[fx.Node, int | None] = {}
    seen: int | None = None
    for node in ordered:
        if node in known and Slots.is_layer(known[node]):
            seen = known[node]
        before[node] = seen
    result: dict[fx.Node, tuple[int | None, int | None]] = {}
    seen = None
    for node in reversed(ordered):
        if node in known and Slots.is_layer(known[node]):
            seen = known[node]
        result[node] = (before[node], seen)
    return result


@dataclass(slots=True)
class BackwardAssignment:
    """Places backward nodes once forward nodes have their slots.

    Attributes:
        joint, slots, parameters: as for `assign_forward`.
        known: slots of backward nodes that a layer's path says.
        forward: the forward nodes' slots; completed here by what serves the backward pass only.
        gradients: nodes that the graph returns as a parameter's gradient, with that parameter's slot.
    """

    joint: JointNodes
    slots: Slots
    parameters: Parameters
    known: Mapping[fx.Node, int]
    forward: SlotMap
    gradients: Mapping[fx.Node, int]
    _by_stack: dict[Stack, set[int]] = field(default_factory=dict)
    _by_sequence: dict[int, set[int]] = field(default_factory=dict)
    _sinks: dict[fx.Node, set[int | None]] = field(default_factory=dict)

    def run(self) -> SlotMap:
        """A slot for every backward node, and in ``forward`` for every forward node that only they use."""
        self._index_forward()
        self._find_sinks()
        wanted = self._wanted()
        result: SlotMap = {}
        for node in self.joint.backward:
            highest = min((result[s] for s in node.all_input_nodes if s in result), default=self.slots.last)
            slot = wanted.get(node)
            result[node] = highest if slot is None or is_getitem(node) else min(slot, highest)
        self._place_backward_constants(result)
        return result

    def _place_backward_constants(self, backward: SlotMap) -> None:
        """Forward nodes that only backward nodes use: with these users, and not before what they read themselves."""
        lowest: SlotMap = {}
        for node in self.joint.forward:
            if node not in self.forward:
                sources = [source for source in node.all_input_nodes if source.op != "placeholder"]
                lowest[node] = max((self.forward.get(s, lowest.get(s, 0)) for s in sources), default=0)
        for node in reversed(lowest):
            readers = [user for user in node.users if user.op != "output"]
            users = {backward[user] if user in backward else self.forward[user] for user in readers}
            slot = users.pop() if len(users) == 1 else self.slots.before(min(users, default=0))
            self.forward[node] = max(slot, lowest[node])

    def _index_forward(self) -> None:
        for node, slot in self.forward.items():
            if is_scalar(node):
                continue
            stack = module_stack(node)
            if stack and self.joint.order[node] < self.joint.forward_end:
                self._by_stack.setdefault(stack, set()).add(slot)
            sequence = node.meta.get("seq_nr")
            if sequence is not None:
                self._by_sequence.setdefault(sequence, set()).add(slot)

    def _find_sinks(self) -> None:
        """For every node, the slots of the parameters whose gradients it leads to; None stands for other results."""
        for node in reversed(self.joint.backward):
            found: set[int | None] = set()
            for user in node.users:
                found |= {self.gradients.get(node)} if user is self.joint.output else self._sinks[user]
            self._sinks[node] = found

    def _wanted(self) -> dict[fx.Node, int | None]:
        """Where each backward node should go; None: as early as its inputs allow."""
        neighbours = _neighbours(self.joint.backward, self.known)
        wanted: dict[fx.Node, int | None] = {}
        for node in reversed(self.joint.backward):
            stack = module_stack(node)
            if node in self.known:
                wanted[node] = self.known[node]
            elif len(same := self._by_stack.get(stack, set())) == 1:
                wanted[node] = next(iter(same))
            elif stack and self.known:
                upper, lower = neighbours[node]
                wanted[node] = self.slots.between(lower, upper)
            else:
                wanted[node] = self._by_dataflow(node, wanted)
        return wanted

    def _by_dataflow(self, node: fx.Node, wanted: Mapping[fx.Node, int | None]) -> int | None:
        incoming = [source for source in node.all_input_nodes if source in self._sinks]
        if len(incoming) > 1:
            return None
        same = self._by_sequence.get(node.meta.get("seq_nr", -1), set())
        if len(same) == 1:
            return next(iter(same))
        saved = [self._last_use(source) for source in node.all_input_nodes if source not in self._sinks]
        known = [slot for slot in saved if slot is not None]
        if known:
            return min(known)
        sinks = self._sinks[node]
        if len(sinks) == 1 and None not in sinks:
            return next(iter(sinks))
        users = [wanted.get(user) for user in node.users]
        placed = [slot for slot in users if slot is not None]
        return max(placed) if placed and len(placed) == len(users) else None

    def _last_use(self, source: fx.Node) -> int | None:
        """The last slot that reads a saved value or a parameter in forward; None if that says nothing."""
        origin = self.parameters.views.get(source, source)
        readers = [source, *source.users]
        if origin in self.parameters.placeholders:
            readers = self.parameters.real_users(origin)
        slots = [self.forward[user] for user in readers if user in self.forward]
        return max(slots, default=None)


def check_order(joint: JointNodes, slot_of: Mapping[fx.Node, int]) -> None:
    """Assert that slots (or group indices) can run one after the other: up in forward, down in backward."""
    backward = set(joint.backward)
    for node in joint.order:
        assert node in slot_of, f"{node.name} is in no group"
        for source in node.all_input_nodes:
            if source.op == "placeholder" or (source not in backward and node in backward):
                continue
            ends = slot_of[source], slot_of[node]
            ordered = ends[0] >= ends[1] if node in backward else ends[0] <= ends[1]
            assert ordered, f"{source.name} (group {ends[0]}) feeds {node.name} (group {ends[1]}) against the order"
            assert ends[0] == ends[1] or not is_getitem(node), f"{node.name} is not with {source.name}"
