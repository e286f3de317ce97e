"""From an ATen graph to the kernels that it becomes: which nodes own memory, and what runs together.

Enters a ``GraphModule`` with fake ``meta["val"]``; leaves a `KernelGraph`, kernels in the order of the graph with the storages
that each reads and writes. Inductor does not materialise a graph node by node. A pointwise node is a buffer only where
something needs it in memory, and one kernel computes neighbouring buffers. The rules here restate the ones of
``torch/_inductor/graph.py`` (``run_node``), ``ir.py`` (``StorageBox``) and ``scheduler.py`` (fusion) in terms of graph nodes.
They tell a graph's memory without compiling it.

The ops of `autohete_fx.graph.ops` are known. A tensor that is copied to the device is in memory from the node that issues the
copy. One that is copied to the host takes none.
"""

import operator
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from autohete_fx.graph.collectives import ISSUING_COLLECTIVES, WAITS, gather, issue_gather_once, reduce, result_of
from autohete_fx.profiler.memory import node_kinds as kinds
from autohete_fx.profiler.memory.fusion import fuse_kernels
from autohete_fx.profiler.memory.kernels import Kernel, KernelGraph, Part, Storage
from autohete_fx.profiler.memory.node_kinds import Kind
from autohete_fx.profiler.memory.scratch import collective_scratch_bytes, workspace_bytes


@dataclass(slots=True)
class _Inline:
    """A value that is not in memory: an expression over storages, that of node ``owner`` and of views of it."""

    owner: fx.Node | None
    reads: dict[tuple[int, str], None]
    nodes: dict[str, None]
    heavy: bool


class _Lowering:
    def __init__(
        self, graph_module: fx.GraphModule, device_type: str, after: Mapping[str, Sequence[str]], *, fuse: bool
    ) -> None:
        self.graph = graph_module.graph
        self.on_cpu = device_type == "cpu"
        self.device_type = device_type
        self.fuse = fuse
        self.nodes = {node.name: node for node in self.graph.nodes}
        self.after = {name: others for name, others in after.items() if name in self.nodes}
        self.result = KernelGraph()
        self.inline: dict[fx.Node, _Inline] = {}
        self.thresholds = kinds.realize_thresholds(device_type)
        self.kind = {node: kinds.kind_of(node) for node in self.graph.nodes}
        self.stored: dict[fx.Node, tuple[int, ...]] = {}
        self.view_root: dict[fx.Node, fx.Node] = {}
        self.opaque: dict[fx.Node, Kernel] = {}
        self.relayouts: set[str] = set()
        self.view_tag: dict[fx.Node, str] = {}

    def run(self) -> KernelGraph:
        for node in self.graph.nodes:
            if node.op in ("placeholder", "get_attr"):
                self._input(node)
            elif node.op == "output":
                self._output(node)
            elif node.op == "call_function":
                self._realize_before(node)
                self._call(node)
        self.result.storage_of = {node.name: indexes for node, indexes in self.stored.items() if indexes}
        return self.result

    # values

    def _new_storage(self, name: str, num_bytes: int, value: Any = None, *, is_input: bool = False) -> int:
        dtype = str(value.dtype) if isinstance(value, torch.Tensor) else ""
        self.result.storages.append(Storage(name, num_bytes, is_input, dtype))
        return len(self.result.storages) - 1

    def _input(self, node: fx.Node) -> None:
        value = node.meta.get("val")
        if isinstance(value, torch.Tensor):
            index = self._new_storage(node.name, kinds.extent_bytes(value, self.device_type), value, is_input=True)
            self.stored[node] = (index,)
            self.result.storages[index].believed_bytes = kinds.tensor_bytes(value, self.device_type)
            self.result.inputs[node.name] = index

    def _tensor_inputs(self, node: fx.Node) -> list[fx.Node]:
        return [arg for arg in node.all_input_nodes if kinds.holds_tensor(arg)]

    def _in_memory(self, node: fx.Node) -> tuple[int, ...]:
        """The storages of a node's value; an expression is realised first."""
        if node in self.inline:
            self._realize(node)
        return self.stored.get(node, ())

    def _reads(self, nodes: Iterable[fx.Node]) -> _Inline:
        """What an expression over these nodes reads, and the nodes it is made of."""
        reads: dict[tuple[int, str], None] = {}
        made_of: dict[str, None] = {}
        heavy = False
        for node in nodes:
            expression = self.inline.get(node)
            if expression is not None:
                # read through another index, it is another read
                tag = self.view_tag.get(node, "")
                reads.update({(index, view + tag): None for index, view in expression.reads})
                made_of.update(expression.nodes)
                heavy = heavy or expression.heavy
            else:
                view = self.view_root.get(node, node).name
                reads.update({(index, view): None for index in self.stored.get(node, ())})
        return _Inline(None, reads, made_of, heavy)

    # nodes

    def _call(self, node: fx.Node) -> None:
        kind = self.kind[node]
        if node.all_input_nodes and node.all_input_nodes[0] in self.opaque and node.target is operator.getitem:
            self._opaque_item(node)
        elif node.meta.get("val") is None and any(self.stored.get(a) or a in self.inline for a in node.all_input_nodes):
            # a higher-order operator, such as one that runs with a given random state: its items tell what it makes
            self._extern(node)
        elif not kinds.holds_tensor(node):
            return
        elif kind is Kind.VIEW or node.target is operator.getitem:
            self._view(node)
        elif kind is Kind.WAIT:
            self._wait(node)
        elif kind is Kind.POINTWISE and isinstance(node.meta["val"], torch.Tensor):
            self._pointwise(node)
        elif kind in (Kind.REDUCTION, Kind.SCATTER):
            self._reduction(node)
        else:
            self._extern(node)

    def _view(self, node: fx.Node) -> None:
        source = node.all_input_nodes[0]
        if node.target is operator.getitem and self.kind[source] is not Kind.VIEW:
            position = node.args[1]
            assert isinstance(position, int)
            self.stored[node] = self.stored.get(source, ())[position : position + 1]
        elif source in self.inline:
            # an expression has no layout: every view of it is another way to index it
            self.inline[node] = self.inline[source]
            self.view_tag[node] = self.view_tag.get(source, "") + ("" if kinds.keeps_layout(node) else f":{node.name}")
            if self._needed_in_memory(node):
                self._realize(node)
            else:
                self._realize_if_reused(node)
        elif kinds.can_be_view(node, source):
            self.stored[node] = self.stored.get(source, ())
            same_layout = kinds.keeps_layout(node)
            self.view_root[node] = self.view_root.get(source, source) if same_layout else node
            if not same_layout:
                self.relayouts.add(node.name)
        else:
            self._pointwise(node)

    def _pointwise(self, node: fx.Node) -> None:
        reads = self._reads(self._tensor_inputs(node))
        reads.nodes[node.name] = None
        self.inline[node] = _Inline(node, reads.reads, reads.nodes, reads.heavy or kinds.is_heavy(node))
        if not self.fuse or kinds.always_realized(node) or self._needed_in_memory(node):
            self._realize(node)
        else:
            self._realize_if_reused(node)

    def _needed_in_memory(self, node: fx.Node) -> bool:
        """Several users, one of which needs it in memory: Inductor stores it where it is made."""
        if len(node.users) < 2:
            return False
        needing = {self.kind[user] for user in node.users} & {Kind.EXTERN, Kind.ISSUE, Kind.WAIT, Kind.OUTPUT}
        if needing == {Kind.OUTPUT} and self.thresholds.delays_cheap_outputs:
            # made from nothing, such as indexes: Inductor makes it again where it is read
            return bool(self.inline[node].reads)
        return bool(needing)

    def _realize_if_reused(self, node: fx.Node) -> None:
        expression = self.inline[node]
        limits = self.thresholds
        large = len(expression.nodes) >= limits.ops
        reused = len(node.users) > 1 and (
            len(expression.reads) > limits.reads_when_reused or large or (self.on_cpu and expression.heavy)
        )
        if reused or len(expression.reads) > limits.reads or large:
            self._realize(node)

    def _realize(self, node: fx.Node) -> None:
        """Make the expression of a node a buffer, and so a kernel, here."""
        expression = self.inline[node]
        owner = expression.owner
        assert owner is not None
        index = self._new_storage(owner.name, kinds.dense_bytes(owner, self.device_type), owner.meta["val"])
        for other in [name for name, value in self.inline.items() if value is expression]:
            del self.inline[other]
            self.stored[other] = (index,)
        size = kinds.num_elements(owner.meta["val"])
        self._add_generated(expression, {index: None}, size, size)
        if not self.fuse:  # PyTorch's own kernel
            self.result.kernels[-1].workspace_bytes = workspace_bytes(owner)

    def _reduction(self, node: fx.Node) -> None:
        inputs = self._tensor_inputs(node)
        if not self.fuse:
            self._extern(node)
            return
        writes: dict[int, None] = {}
        if self.kind[node] is Kind.SCATTER:
            target = self._in_memory(inputs[0])
            if self._dies_here(inputs[0], node) and not any(self.result.storages[i].is_input for i in target):
                writes = {index: None for index in target}
                self.stored[node] = target
        expression = self._reads(inputs)
        expression.nodes[node.name] = None
        if not writes:
            self.stored[node] = self._output_storages(node)
            writes = {index: None for index in self.stored[node]}
        largest = max((kinds.num_elements(arg.meta["val"]) for arg in inputs), default=0)
        rows = kinds.rows_of_reduction(node)
        self._add_generated(expression, writes, largest, rows)

    def _dies_here(self, node: fx.Node, user: fx.Node) -> bool:
        return all(other is user for other in node.users)

    def _opaque_item(self, node: fx.Node) -> None:
        kernel = self.opaque[node.all_input_nodes[0]]
        value = node.meta.get("val")
        if isinstance(value, torch.Tensor):
            index = self._new_storage(node.name, kinds.extent_bytes(value, self.device_type), value)
            self.result.storages[index].poolable = False
            self.stored[node] = (index,)
            kernel.writes[index] = None
        else:
            self.opaque[node] = kernel

    def _output_storages(self, node: fx.Node) -> tuple[int, ...]:
        value = node.meta["val"]
        if isinstance(value, torch.Tensor):
            return (self._new_storage(node.name, kinds.extent_bytes(value, self.device_type), value),)
        indexes = tuple(
            self._new_storage(
                f"{node.name}[{position}]",
                kinds.extent_bytes(item, self.device_type) if isinstance(item, torch.Tensor) else 0,
                item,
            )
            for position, item in enumerate(value)
        )
        for index in indexes:
            # an extern call that returns several tensors allocates them itself
            self.result.storages[index].poolable = self.kind[node] is not Kind.EXTERN
        return indexes

    def _extern(self, node: fx.Node) -> None:
        reads = {index: None for arg in node.all_input_nodes for index in self._in_memory(arg)}
        if node.target in ISSUING_COLLECTIVES:
            self.stored[node] = self._together(node)
        elif self.kind[node] is Kind.ISSUE:
            index = self._new_storage(node.name, kinds.issued_bytes(node, self.device_type))
            self.result.storages[index].poolable = False
            if not self.result.storages[index].num_bytes:
                self.result.storages[index].believed_bytes = kinds.copied_bytes(node, self.device_type)
            self.stored[node] = (index,)
        elif node.meta.get("val") is not None:
            self.stored[node] = self._output_storages(node)
        writes = {index: None for index in self.stored.get(node, ())}
        workspace = 0 if self.kind[node] is Kind.ISSUE else workspace_bytes(node)
        kernel = Kernel({node.name: None}, reads, writes, False, workspace, pinned=self.kind[node] is Kind.ISSUE)
        if node.meta.get("val") is None:
            self.opaque[node] = kernel
        self._add(kernel)

    def _together(self, issue: fx.Node) -> tuple[int, ...]:
        """What a collective fills: a buffer for each of its sources, and one for what it takes until it is over. Of a gather once a
        step the former belong to the session."""
        arguments: Any = issue.args
        sources, num_ranks, *_ = arguments
        values = [source.meta["val"] for source in sources]
        results = [result_of(issue.target, value, num_ranks) for value in values]
        taken = sum(collective_scratch_bytes(issue.target, (value, num_ranks)) for value in values)
        sizes = [*(kinds.extent_bytes(value, self.device_type) for value in results), taken]
        indexes = tuple(self._new_storage(f"{issue.name}[{at}]", size) for at, size in enumerate(sizes))
        for index in indexes:
            self.result.storages[index].poolable = False
            self.result.storages[index].is_input = issue.target is issue_gather_once and index != indexes[-1]
        return indexes

    def _wait(self, node: fx.Node) -> None:
        handle, *others = node.all_input_nodes
        reads = {index: None for arg in (handle, *others[:1]) for index in self._in_memory(arg)}
        self.stored[node] = self.stored.get(handle, ())
        if node.target in WAITS:
            at = node.args[2]
            assert isinstance(at, int)
            self.stored[node] = self.stored[node][at : at + 1]
        self._add(Kernel({node.name: None}, reads, {}, False, pinned=True))

    def _add_generated(self, expression: _Inline, writes: dict[int, None], iterations: int, rows: int) -> None:
        reads = {index: None for index, _ in expression.reads}
        elsewhere = {index for index, view in expression.reads if view in self.relayouts or ":" in view}
        part = Part(frozenset(reads), frozenset(reads) - elsewhere, frozenset(writes))
        self._add(Kernel(expression.nodes, reads, writes, True, 0, iterations, rows, parts=[part]))

    def _add(self, kernel: Kernel) -> None:
        others = [self.nodes[other] for name in kernel.nodes for other in self.after.get(name, ())]
        kernel.after = frozenset(index for other in others for index in self.stored.get(other, ()))
        self.result.kernels.append(kernel)

    def _realize_before(self, node: fx.Node) -> None:
        """What the node must come after is in memory before it runs."""
        for other in self.after.get(node.name, ()):
            self._in_memory(self.nodes[other])

    def _output(self, node: fx.Node) -> None:
        values: Any = node.args[0]
        for value in values if isinstance(values, (tuple, list)) else (values,):
            stored = self._in_memory(value) if isinstance(value, fx.Node) else ()
            self.result.outputs.append(stored[0] if stored else None)


def lower(
    graph_module: fx.GraphModule,
    *,
    device_type: str,
    inner_backend: str = "inductor",
    after: Mapping[str, Sequence[str]] | None = None,
    counts_wholes: bool = True,
) -> KernelGraph:
    """The kernels of a graph, in graph order.

    Args:
        graph_module: an ATen graph with fake ``meta["val"]`` on every node.
        device_type: ``cpu`` or ``cuda``; CPU scalars in a CUDA graph take no device memory.
        inner_backend: ``inductor`` fuses; ``eager`` makes every node that is not a view a kernel.
        after: for nodes, others that will have run before them, by name, beside their arguments.
        counts_wholes: whether memory of the graph holds gathered parameters, and gradients that wait for their reduce; else they
            are like inputs, memory of somebody else.
    """
    fuse = inner_backend != "eager"
    result = _Lowering(graph_module, device_type, after or {}, fuse=fuse).run()
    if fuse:
        fuse_kernels(result)
    if not counts_wholes:
        _leave_out_wholes(graph_module, result)
    return result


def _leave_out_wholes(graph_module: fx.GraphModule, result: KernelGraph) -> None:
    reduces = {node.name: node for node in graph_module.graph.nodes if node.target is reduce}
    wholes = [node.name for node in graph_module.graph.nodes if node.target is gather]
    # A gradient that something else reads too, such as one of activations, is memory of the graph all the same.
    otherwise = {index for kernel in result.kernels if kernel.name not in reduces for index in kernel.reads}
    indexes = {index for name in wholes for index in result.storage_of.get(name, ())}
    for node in reduces.values():
        indexes |= {*result.storage_of.get(node.all_input_nodes[0].name, ())} - otherwise
    for index in indexes:
        result.storages[index].is_input = True
