"""The bytes that ranks exchange, block by block: whole parameters that a block gathers, whole gradients that it reduces.

In: a `Partition` whose parameters are shards. Out: bytes by block. A plan decides when a whole is on the device, so the planner
counts it; the workspaces of `autohete_fx.profiler.analytic` leave it out.
"""

from dataclasses import dataclass

from torch import fx

from autohete_fx.graph.collectives import gather, reduce
from autohete_fx.graph.saved import output_args
from autohete_fx.profiler.memory.node_kinds import tensor_bytes
from autohete_fx.profiler.partition import Partition


@dataclass(slots=True)
class Exchanged:
    """The fields of the same names of a block's `BlockCost`."""

    gathered_bytes: int = 0
    gathered_again_bytes: int = 0
    reduced_bytes: int = 0


def exchanged(partition: Partition) -> list[Exchanged]:
    """The bytes that each block's collectives move. A block gathers a shard once, however often its forward reads it."""
    found = [Exchanged() for _ in partition.blocks.blocks]
    placed = partition.placements(partition.forward)
    again = _gathered_in_backward(partition)
    wholes = {(placed[node.name], node.all_input_nodes[0]): node for node in _calls(partition.forward, gather)}
    for (block, shard), node in wholes.items():
        num_bytes = tensor_bytes(node.meta["val"], partition.device_type)
        found[block].gathered_bytes += num_bytes
        found[block].gathered_again_bytes += num_bytes if shard in again else 0
    if partition.backward is not None:
        placed = partition.placements(partition.backward)
        for node in _calls(partition.backward, reduce):
            gradient = node.all_input_nodes[0].meta["val"]
            found[placed[node.name]].reduced_bytes += tensor_bytes(gradient, partition.device_type)
    return found


def _gathered_in_backward(partition: Partition) -> set[fx.Node | None]:
    """Shards that backward gathers, as nodes of the forward graph that saves them."""
    if partition.backward is None:
        return set()
    placeholders = [node for node in partition.backward.graph.nodes if node.op == "placeholder"]
    shard_of = dict(zip(placeholders, output_args(partition.forward)[partition.num_outputs :], strict=False))
    return {shard_of.get(node.all_input_nodes[0]) for node in _calls(partition.backward, gather)}


def _calls(graph_module: fx.GraphModule, target: object) -> list[fx.Node]:
    return [node for node in graph_module.graph.nodes if node.target is target]
