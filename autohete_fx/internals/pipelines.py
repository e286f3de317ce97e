"""Stages of pipelines whose neighbours have more or fewer GPUs than they have, and the operator of `pipe_split`'s marks."""

import inspect
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.pipelining import PipelineStage

PIPE_SPLIT = torch.ops.pippy._pipe_split.default
"""In a graph, where a model's forward calls `torch.distributed.pipelining.pipe_split`."""

CROSS_WITHOUT_GRADIENT = "output_grads" in inspect.signature(PipelineStage).parameters
"""Whether stages hand on tensors that have no gradient, such as integers. PyTorch 2.11 expects one of each."""


class FannedStage(PipelineStage):
    """A rank's stage that sends hidden states to any number of ranks of the next stage, and gradients to any of the one before.

    It receives from one rank of each, as ``stage_index_to_group_rank`` says. Shapes are given, so stages need not tell each other;
    PyTorch's way of telling expects that each rank has one neighbour on each side.

    Args:
        module: the stage.
        index: of the stage.
        count: of stages.
        device: of this rank.
        chain: a group with one rank of each stage, which PyTorch wants.
        everyone: of all ranks of all stages.
        sources: by index of a neighbour, the rank in ``everyone`` from which this one receives.
        forward_to: ranks in ``everyone`` that need this one's hidden states.
        backward_to: likewise, of gradients.
        arguments: of `PipelineStage`.
    """

    def __init__(
        self,
        module: nn.Module,
        index: int,
        count: int,
        device: torch.device,
        *,
        chain: dist.ProcessGroup,
        everyone: dist.ProcessGroup,
        sources: dict[int, int],
        forward_to: tuple[int, ...],
        backward_to: tuple[int, ...],
        **arguments: Any,
    ) -> None:
        super().__init__(module, index, count, device, group=chain, **arguments)
        self.group, self.group_rank = everyone, dist.get_rank(everyone)
        self.stage_index_to_group_rank = {**dict.fromkeys(range(count), 0), **sources}
        self._forward_to, self._backward_to = forward_to, backward_to

    def get_fwd_send_ops(self, fwd_chunk_id: int) -> list[dist.P2POp]:
        """Sends of a micro-batch's hidden state."""
        return self._fanned(super().get_fwd_send_ops(fwd_chunk_id), self._forward_to)

    def get_bwd_send_ops(self, bwd_chunk_id: int) -> list[dist.P2POp]:
        """Sends of its gradient."""
        return self._fanned(super().get_bwd_send_ops(bwd_chunk_id), self._backward_to)

    def _fanned(self, sends: list[dist.P2POp], peers: tuple[int, ...]) -> list[dist.P2POp]:
        return [dist.P2POp(send.op, send.tensor, group=self.group, group_peer=peer) for send in sends for peer in peers]

    def _get_init_p2p_neighbors_ops(self) -> list[dist.P2POp]:
        return []

    def _warmup_forward_vote(self, has_backward: bool, received_acc: Tensor | None = None) -> Tensor:
        return self._shapes_are_given()

    def _warmup_backward_result(self, received_result: Tensor | None = None) -> Tensor:
        return self._shapes_are_given()

    def _shapes_are_given(self) -> Tensor:
        return torch.ones(1, dtype=torch.int32, device=self.device)
