"""The profiler's input: the default partition of a joint graph, and the nature of its inputs."""

import functools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import fx

from autohete_fx.ir import BlockGraph
from autohete_fx.profiler.memory.kernels import KernelGraph
from autohete_fx.profiler.memory.lowering import lower


def device_type_of(graph_module: fx.GraphModule) -> str:
    """The device that a graph computes on, ``cuda`` or ``cpu``: that of its first value that is not on a CPU."""
    for node in graph_module.graph.nodes:
        value = node.meta.get("val")
        if isinstance(value, torch.Tensor) and value.device.type != "cpu":
            return value.device.type
    return "cpu"


@dataclass(frozen=True, slots=True, kw_only=True)
class ParamInfo:
    """One parameter of the graph.

    Attributes:
        fqn: fully qualified name; the placeholders of a tied parameter share it.
        num_bytes, num_elements: of the parameter.
        requires_grad: it is trained.
        state_bytes: optimizer states of a trained parameter, master weights included.
        product_flops: floating point operations of matrix products in its update.
        update_share: bytes that its update reads and writes, over those of an AdamW update.
        is_mixed: its update is by the kernel for 16-bit parameters.
    """

    fqn: str
    num_bytes: int
    num_elements: int
    requires_grad: bool
    state_bytes: int
    update_share: float = 1.0
    is_mixed: bool = False
    product_flops: float = 0.0


@dataclass(frozen=True, kw_only=True)
class Partition:
    """A forward and a backward graph, before any decision is written into them.

    Attributes:
        forward: FX ATen graph with fake ``meta["val"]``. For inference, the whole graph.
        backward: the graph that follows it; None in inference.
        num_outputs: leading outputs of ``forward`` that are the caller's. The others are the leading placeholders
            of ``backward``, in order. The outputs of ``backward`` correspond to the placeholders of ``forward``,
            in order, None where there is no gradient.
        blocks: the blocks in execution order.
        block_of: node name to block index. Nodes that are not in it are placed by dataflow.
        params: placeholder name of ``forward`` to what it is.
        inner_backend: what compiles the graphs, ``inductor`` or ``eager``.
        after: for nodes of ``backward``, others that will have run before them in a plan with copies or recomputation, by name.
    """

    forward: fx.GraphModule
    backward: fx.GraphModule | None
    num_outputs: int
    blocks: BlockGraph
    block_of: Mapping[str, int]
    params: Mapping[str, ParamInfo]
    inner_backend: str = "inductor"
    after: Mapping[str, Sequence[str]] = field(default_factory=dict)

    @functools.cached_property
    def device_type(self) -> str:
        """Whose memory and time are meant: that of the graph's inputs, a CPU only where all of them are there."""
        return device_type_of(self.forward)

    @functools.cached_property
    def forward_kernels(self) -> KernelGraph:
        """The kernels of ``forward``, without memory of gathered parameters: for reading only."""
        return self._lowered(self.forward)

    @functools.cached_property
    def backward_kernels(self) -> KernelGraph:
        """Likewise of ``backward``."""
        assert self.backward is not None
        return self._lowered(self.backward)

    def _lowered(self, graph_module: fx.GraphModule) -> KernelGraph:
        return lower(graph_module, device_type=self.device_type, inner_backend=self.inner_backend, counts_wholes=False)

    @property
    def training(self) -> bool:
        """There is a backward graph."""
        return self.backward is not None

    def placements(self, graph_module: fx.GraphModule) -> dict[str, int]:
        """Block index of every node of ``forward`` or ``backward``, placeholders aside.

        A forward node that the map lacks belongs with the last block it reads from, a backward node with the first. One that
        reads from none belongs with its first user.
        """
        if graph_module is not self.forward and graph_module is not self.backward:
            raise AssertionError("the graph is not of this partition")
        pick = max if graph_module is self.forward else min
        placed: dict[str, int] = {}
        nodes = [node for node in graph_module.graph.nodes if node.op not in ("placeholder", "output")]
        for node in nodes:
            if node.name in self.block_of:
                placed[node.name] = self.block_of[node.name]
                continue
            sources = [placed[arg.name] for arg in node.all_input_nodes if arg.name in placed]
            if sources:
                placed[node.name] = pick(sources)
        last = len(self.blocks.blocks) - 1
        for node in reversed(nodes):
            if node.name not in placed:
                users = [placed[user.name] for user in node.users if user.name in placed]
                default = 0 if graph_module is self.forward else last
                placed[node.name] = (min if graph_module is self.forward else max)(users, default=default)
        return placed
