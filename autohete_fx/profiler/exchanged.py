"""The bytes that ranks exchange, block by block: whole parameters that a block gathers, whole gradients that it reduces.

In: a `Partition` whose parameters are shards. Out: bytes by block. A plan decides when a whole is on the device, so the planner
counts it; the workspaces of `autohete_fx.profiler.analytic` leave it out.

Functional collectives, such as those of tensor parallelism, stand where the program has them, and the next kernel needs their
results. Computation waits for them, and so `Waits` adds to the seconds of a block. The time of a whole of S bytes over n ranks
is that of a ring, an all-reduce's twice as long::

    seconds = (n - 1) * (net_latency_s + S / (n * net_bytes_per_s))
"""

from collections.abc import Collection
from dataclasses import dataclass

from torch import fx

from autohete_fx.graph.collectives import exchanged_bytes, gather, reduce, starts_functional
from autohete_fx.graph.readers import readers_of
from autohete_fx.internals.versions import size_of_group
from autohete_fx.ir import Machine
from autohete_fx.profiler.memory.node_kinds import tensor_bytes
from autohete_fx.profiler.partition import Partition


@dataclass(slots=True)
class Exchanged:
    """The fields of the same names of a block's `BlockCost`."""

    gathered_bytes: int = 0
    gathered_again_bytes: int = 0
    reduced_bytes: int = 0


def exchanged(partition: Partition) -> list[Exchanged]:
    """The bytes that each block's collectives move. Each block that reads a shard gathers it once, however often it reads it."""
    found = [Exchanged() for _ in partition.blocks.blocks]
    for (block, _), num_bytes in _wholes(partition, partition.forward).items():
        found[block].gathered_bytes += num_bytes
    if partition.backward is not None:
        for (block, _), num_bytes in _wholes(partition, partition.backward).items():
            found[block].gathered_again_bytes += num_bytes
        placed = partition.placements(partition.backward)
        for node in _calls(partition.backward, reduce):
            gradient = node.all_input_nodes[0].meta["val"]
            found[placed[node.name]].reduced_bytes += tensor_bytes(gradient, partition.device_type)
    return found


class Waits:
    """Seconds by block that computation waits for functional collectives.

    Args:
        partition: whose graphs.
        machine: with the rate of a rank's link; without one, collectives take no time.

    Attributes:
        any: whether anything waits.
    """

    def __init__(self, partition: Partition, machine: Machine) -> None:
        self._partition, self._machine = partition, machine
        graphs = [gm for gm in (partition.forward, partition.backward) if gm is not None]
        self.any = bool(machine.net_bytes_per_s) and any(
            starts_functional(n.target) for g in graphs for n in g.graph.nodes
        )

    def forward(self, among: Collection[str] | None = None) -> list[float]:
        """Those in forward, or of its nodes of these names alone."""
        return self._of(self._partition.forward, among)

    def backward(self) -> list[float]:
        """Those in backward, where there is one."""
        graph_module = self._partition.backward
        return [0.0] * len(self._partition.blocks.blocks) if graph_module is None else self._of(graph_module, None)

    def _of(self, graph_module: fx.GraphModule, among: Collection[str] | None) -> list[float]:
        found = [0.0] * len(self._partition.blocks.blocks)
        placed = self._partition.placements(graph_module)
        for node in graph_module.graph.nodes:
            if starts_functional(node.target) and (among is None or node.name in among):
                found[placed[node.name]] += _seconds(node, self._machine)
        return found


def _seconds(node: fx.Node, machine: Machine) -> float:
    group = next(arg for arg in reversed(node.args) if isinstance(arg, str))
    num_ranks, rounds = size_of_group(group), 2 if "all_reduce" in str(node.target) else 1
    message_s = machine.net_latency_s + exchanged_bytes(node) / num_ranks / machine.net_bytes_per_s
    return rounds * (num_ranks - 1) * message_s


def _wholes(partition: Partition, graph_module: fx.GraphModule) -> dict[tuple[int, fx.Node], int]:
    """Bytes of the wholes that a graph gathers, by the block that reads them, and shard."""
    placed = partition.placements(graph_module)
    found = {}
    for node in _calls(graph_module, gather):
        readers = [user.name for _, user in readers_of(node) if user.op != "output"]
        for block in {placed[name] for name in readers or [node.name]}:
            found[block, node.all_input_nodes[0]] = tensor_bytes(node.meta["val"], partition.device_type)
    return found


def _calls(graph_module: fx.GraphModule, target: object) -> list[fx.Node]:
    return [node for node in graph_module.graph.nodes if node.target is target]
