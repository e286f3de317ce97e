"""Marks of `torch.distributed.pipelining.pipe_split`: put before and after modules, and tidied in a traced graph.

Enter the graph of a forward pass; leaves one in which each mark stands between operators, as PyTorch's ``split_policy``::

    mask = t_1 > 0                      a = linear(t_0, w0)
    a = linear(t_0, w0)                 pipe_split()
    pipe_split()                   =>   mask = t_1 > 0
    b = mul(a, mask)                    b = mul(a, mask)

Values that are made from the batch alone, without a random draw, are made again in each section that reads them. Marks with
nothing between them, before the first operator or after the last one, count as one or not at all.
"""

import functools
import operator
from collections.abc import Collection, Iterable, Mapping

import torch
from torch import fx, nn
from torch.distributed.pipelining import SplitPoint, pipe_split

from autohete_fx.cluster.model.building import BuildModel
from autohete_fx.errors import ClusterError
from autohete_fx.internals.operators import OpOverload, tree_leaves
from autohete_fx.internals.pipelines import PIPE_SPLIT

SplitSpec = Mapping[str, SplitPoint]


def with_marks(build_model: BuildModel, split_spec: SplitSpec) -> BuildModel:
    """A function that makes the same model with marks before or after modules, as `pipeline` takes them as ``split_spec``."""
    for name, point in split_spec.items():
        if not isinstance(point, SplitPoint):
            raise ClusterError(
                f"split_spec= has {point!r} for {name!r}. Expected was a torch.distributed.pipelining.SplitPoint. Give"
                " SplitPoint.BEGINNING to cut before that module, or SplitPoint.END to cut after it"
            )

    @functools.wraps(build_model)
    def build() -> nn.Module:
        model = build_model()
        modules = dict(model.named_modules())
        for name, point in split_spec.items():
            if name not in modules:
                known = ", ".join(repr(child) for child, _ in model.named_children())
                raise ClusterError(
                    f"split_spec= names {name!r}, and {type(model).__name__} has no such module. Expected was a name of"
                    f" named_modules(), such as {known}. Correct it"
                )
            if point is SplitPoint.BEGINNING:
                modules[name].register_forward_pre_hook(lambda *_: pipe_split())
            else:
                modules[name].register_forward_hook(lambda *_: pipe_split())
        return model

    return build


def tidied(traced: fx.GraphModule) -> fx.GraphModule:
    """The graph with one mark between sections that compute something, and each section's values of the batch alone in it.

    Raises:
        ClusterError: an operator changes a tensor of another section in place.
    """
    index, place = 0, dict[fx.Node, int]()
    for node in traced.graph.nodes:
        place[node] = index
        index += node.target is PIPE_SPLIT
    given = _given(traced, place)
    sections: dict[int, list[fx.Node]] = {}
    for node in traced.graph.nodes:
        if node.op in ("call_function", "call_module") and node not in given and not _is_check(node):
            sections.setdefault(place[node], []).append(node)
    tidy, output = fx.Graph(), next(iter(reversed(traced.graph.nodes)))
    copies = {node: tidy.node_copy(node) for node in traced.graph.nodes if node.op in ("get_attr", "placeholder")}
    for count, (at, nodes) in enumerate((sections or {0: []}).items()):
        if count:
            tidy.call_function(PIPE_SPLIT)
        readers = [*nodes, output] if at == max(sections, default=0) else nodes
        for node in _sources(readers, given):
            copies[node] = tidy.node_copy(node, copies.__getitem__)
            stack = node.meta.get("nn_module_stack", {})  # beyond the root, of another section maybe
            copies[node].meta["nn_module_stack"] = dict(list(stack.items())[:1])
        for node in nodes:
            copies[node] = tidy.node_copy(node, copies.__getitem__)
    tidy.node_copy(output, copies.__getitem__)
    traced.graph = tidy
    traced.recompile()
    return traced


def _is_check(node: fx.Node) -> bool:
    """Marks, and assertions about a tensor's type, which the trace knows."""
    return node.target in (PIPE_SPLIT, torch.ops.aten._assert_tensor_metadata.default)


def _sources(nodes: Iterable[fx.Node], among: Collection[fx.Node]) -> list[fx.Node]:
    """Those of a set that these nodes read, and that these are made of, in the order of the graph."""
    found: set[fx.Node] = set()
    wanted = list(nodes)
    while wanted:
        new = [source for source in wanted.pop().all_input_nodes if source in among and source not in found]
        found.update(new)
        wanted += new
    return sorted(found)


def _given(traced: fx.GraphModule, place: Mapping[fx.Node, int]) -> set[fx.Node]:
    """Operators that read the batch and buffers alone, draw nothing, and whose results nobody changes.

    Raises ClusterError where an operator changes a tensor that another section made or reads.
    """
    buffers = {name for name, _ in traced.named_buffers()}
    changed: dict[fx.Node, int] = {}
    for node in traced.graph.nodes:
        for base in map(_base, _written(node)):
            changed[base] = place[node]
            homes = {place[user] for user in base.users} if base.op == "get_attr" else {place[base]}
            if base.op == "placeholder" or homes != {place[node]}:
                whose = "the batch's" if base.op == "placeholder" else "of another side of a mark"
                raise ClusterError(
                    f"{node.target} changes {base.name!r} in place, a tensor {whose}. Expected was one that is made and read"
                    " between the same marks. Make a new tensor there, or move the mark"
                )
    found: set[fx.Node] = set()
    for node in traced.graph.nodes:
        if node.op == "placeholder" or (node.op == "get_attr" and node.target in buffers):
            found.update({node} - changed.keys())
        elif node.op == "call_function" and _is_pure(node) and found.issuperset(node.all_input_nodes):
            found.update({node} if _base(node) not in changed else ())
    return {node for node in found if node.op == "call_function"}


def _is_pure(node: fx.Node) -> bool:
    """Whether an operator gives the same result each time, and changes nothing."""
    if not isinstance(node.target, OpOverload):
        return node.target is operator.getitem
    return not node.target._schema.is_mutable and torch.Tag.nondeterministic_seeded not in node.target.tags


def _aliased(node: fx.Node, *, written: bool) -> list[fx.Node]:
    """The arguments whose memory an operator changes, or else may return."""
    if not isinstance(node.target, OpOverload):
        return []
    schema = node.target._schema
    if not (schema.is_mutable if written else any(row.alias_info for row in schema.returns)):
        return []
    return [
        source
        for place, argument in enumerate(schema.arguments)
        if argument.alias_info is not None and argument.alias_info.is_write >= written
        for source in tree_leaves(node.args[place] if place < len(node.args) else node.kwargs.get(argument.name))
        if isinstance(source, fx.Node)
    ]


def _written(node: fx.Node) -> list[fx.Node]:
    return _aliased(node, written=True)


def _base(node: fx.Node) -> fx.Node:
    """The node that made the memory of a view."""
    while node.op == "call_function":
        sources = node.all_input_nodes if node.target is operator.getitem else _aliased(node, written=False)
        if not sources:
            break
        node = sources[0]
    return node
