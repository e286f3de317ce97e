"""The bytes that ranks exchange, block by block: whole parameters that a block gathers, whole gradients that it reduces.

In: a `Partition` whose parameters are shards. Out: bytes by block. A plan decides when a whole is on the device, so the planner
counts it; the workspaces of `autohete_fx.profiler.analytic` leave it out.
"""

from dataclasses import dataclass

from torch import fx

from autohete_fx.graph.collectives import gather, reduce
from autohete_fx.graph.readers import readers_of
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
