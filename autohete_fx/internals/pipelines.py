"""Stages of pipelines whose neighbours have more or fewer GPUs than they have, and the operator of `pipe_split`'s marks."""

import inspect
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.pipelining import PipelineStage

from autohete_fx.errors import ClusterError

PIPE_SPLIT = torch.ops.pippy._pipe_split.default
"""In a graph, where a model's forward calls `torch.distributed.pipelining.pipe_split`."""

CROSS_WITHOUT_GRADIENT = "output_grads" in inspect.signature(PipelineStage).parameters
"""Whether stages hand on tensors that have no gradient, such as integers. PyTorch 2.11 expects one of each."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Peer:
    """A rank of a neighbouring stage, and the samples that both compute with.

    Attributes:
        rank: in the group of all ranks of all stages.
        rows: indexes of these samples among this rank's own; None: all of them.
        scale: of gradients that are sent.
    """

    rank: int
    rows: range | None = None
    scale: float = 1.0


class ToldStage(PipelineStage):
    """A rank's stage that says when the last backward pass of a step begins.

    Attributes:
        before_last: is called with the outputs of the forward pass whose backward that is.

    Args:
        output_args: tensors shaped as those that the next stage receives.
    """

    before_last: Callable[[Sequence[Tensor]], None] | None = None

    def __init__(self, *args: Any, output_args: tuple[Tensor, ...], **kwargs: Any) -> None:
        super().__init__(*args, output_args=output_args, **kwargs)
        self._hands_on = () if self.is_last else output_args

    def forward_one_chunk(self, *args: Any, **kwargs: Any) -> Any:
        """One forward pass. Raises ClusterError where it gives other shapes than the next stage waits for."""
        output = super().forward_one_chunk(*args, **kwargs)
        made = (output,) if isinstance(output, Tensor) else output
        for mine, expected in zip(made, self._hands_on, strict=False):
            if (mine.shape, mine.dtype) != (expected.shape, expected.dtype):
                raise ClusterError(
                    f"a stage hands on a tensor of shape {tuple(mine.shape)} and {mine.dtype}, where the example batch gave"
                    f" {tuple(expected.shape)} and {expected.dtype}. Expected was one shape for all batches, because the next stage"
                    " waits for as many bytes. Pad the batches of load to the example's length"
                )
        return output

    def backward_maybe_with_nosync(
        self, backward_type: str, bwd_kwargs: dict[str, Any], last_backward: bool = False
    ) -> Any:
        """One backward pass."""
        if last_backward and self.before_last is not None:
            outputs = bwd_kwargs["stage_output"]
            self.before_last((outputs,) if isinstance(outputs, Tensor) else outputs)
        return super().backward_maybe_with_nosync(backward_type, bwd_kwargs, last_backward=last_backward)

    def _validate_fwd_outputs(self, outputs: tuple[Tensor, ...]) -> None:
        """2.11 would compare here what `forward_one_chunk` has compared, and losses, whose dtype nobody knows ahead."""


class FannedStage(ToldStage):
    """A rank's stage that exchanges hidden states and gradients with any number of ranks of the stages before and after.

    Where a peer has other samples, tensors have samples as their first dimension. Shapes are given, so stages need not tell each
    other; PyTorch's way of telling expects that each rank has one neighbour on each side.

    Args:
        module: the stage.
        index: of the stage.
        count: of stages.
        device: of this rank.
        chain: a group with one rank of each stage, which PyTorch wants.
        everyone: of all ranks of all stages.
        forward_from: peers that have this one's hidden states.
        forward_to: peers that need those that this one makes.
        backward_from: likewise, of gradients.
        backward_to: likewise.
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
        forward_from: tuple[Peer, ...],
        forward_to: tuple[Peer, ...],
        backward_from: tuple[Peer, ...],
        backward_to: tuple[Peer, ...],
        **arguments: Any,
    ) -> None:
        super().__init__(module, index, count, device, group=chain, **arguments)
        self.group, self.group_rank = everyone, dist.get_rank(everyone)
        self.stage_index_to_group_rank = dict.fromkeys(range(count), 0)  # peers are told by `_fanned`
        self._forward_from, self._forward_to = forward_from, forward_to
        self._backward_from, self._backward_to = backward_from, backward_to

    def get_fwd_recv_ops(self, fwd_chunk_id: int) -> list[dist.P2POp]:
        """Receipts of a micro-batch's hidden state."""
        return self._fanned(super().get_fwd_recv_ops(fwd_chunk_id), self._forward_from)

    def get_bwd_recv_ops(self, bwd_chunk_id: int) -> list[dist.P2POp]:
        """Receipts of its gradient."""
        return self._fanned(super().get_bwd_recv_ops(bwd_chunk_id), self._backward_from)

    def get_fwd_send_ops(self, fwd_chunk_id: int) -> list[dist.P2POp]:
        """Sends of a micro-batch's hidden state."""
        return self._fanned(super().get_fwd_send_ops(fwd_chunk_id), self._forward_to)

    def get_bwd_send_ops(self, bwd_chunk_id: int) -> list[dist.P2POp]:
        """Sends of its gradient."""
        return self._fanned(super().get_bwd_send_ops(bwd_chunk_id), self._backward_to, is_gradient=True)

    def _fanned(
        self, given: list[dist.P2POp], peers: tuple[Peer, ...], *, is_gradient: bool = False
    ) -> list[dist.P2POp]:
        found: list[dist.P2POp] = []
        for op in given:
            for peer in peers:
                tensor = op.tensor if peer.rows is None else op.tensor[peer.rows.start : peer.rows.stop]
                tensor = tensor * peer.scale if is_gradient and peer.scale != 1.0 else tensor
                found.append(dist.P2POp(op.op, tensor, group=self.group, group_peer=peer.rank))
        return found

    def _get_init_p2p_neighbors_ops(self) -> list[dist.P2POp]:
        return []

    def _warmup_forward_vote(self, has_backward: bool, received_acc: Tensor | None = None) -> Tensor:
        return self._shapes_are_given()

    def _warmup_backward_result(self, received_result: Tensor | None = None) -> Tensor:
        return self._shapes_are_given()

    def _shapes_are_given(self) -> Tensor:
        return torch.ones(1, dtype=torch.int32, device=self.device)
