"""The costs of a block, in seconds and bytes."""

from collections.abc import Collection, Sequence
from dataclasses import dataclass

from autohete_fx.ir.decision import Activations, BlockDecision, Optimizer


@dataclass(frozen=True, slots=True, kw_only=True)
class ActivationCost:
    """The cost of one treatment of a block's activations: all that the rest of the planner knows of a treatment.

    Attributes:
        held_bytes: device bytes from forward to backward, before anything leaves; at least the block's ``boundary_bytes``.
        recompute_s: extra seconds in backward for what is computed again.
        offloaded_bytes: of ``held_bytes``, what leaves for host memory after forward and is back for backward.
        offloaded_tensors: in how many copies each way.
    """

    held_bytes: int
    recompute_s: float = 0.0
    offloaded_bytes: int = 0
    offloaded_tensors: int = 0

    @property
    def staying_bytes(self) -> int:
        """Device bytes between forward and backward, once everything that leaves has left."""
        return self.held_bytes - self.offloaded_bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class BlockCost:
    """One block's cost. Activations are attributed to the block that *produces* them, so nothing is counted twice.

    Attributes:
        forward_s, backward_s: compute seconds with everything it needs on the device and activations kept.
        recompute_s: extra seconds in backward when the block's activations are recomputed.
        saved_bytes: device bytes that live from the block's forward to its backward when its activations are kept. They are
            what it produces and the partition saves, its outputs to other blocks (``boundary_bytes``) included.
        boundary_bytes: the part of ``saved_bytes`` that stays when the block is recomputed. It is of values that other blocks
            read, and of values that cannot be drawn again (random seeds).
        offloadable: of the tensors in ``saved_bytes`` that can leave for host memory after forward, their bytes, largest
            first.
        forward_workspace_bytes: peak of the block's forward above what it holds at its end and its start.
        backward_workspace_bytes: peak of its backward above what is saved and above its own gradients' final bytes. The
            recomputed activations themselves are not in it (the planner adds ``saved_bytes - boundary_bytes``).
        param_bytes: the parameters that it owns, as stored (frozen ones included).
        grad_bytes: gradients of its trainable parameters.
        optimizer_bytes: optimizer states of its trainable parameters, master weights included.
        num_params: trainable parameters, in elements.
        trained: the elements of each trainable parameter, smallest first, ``num_params`` in all; empty where it is not
            known how they divide.
        trained_states: bytes of the optimizer states of each of ``trained``, in its order; empty where they are as its elements.
        product_flops: operations of matrix products in the update of each of ``trained``, in its order; empty for none.
        update_share: bytes that an update of ``num_params`` reads and writes, over those of an AdamW update, whose rates are known.
        mixed_share: of these bytes, those of updates by the kernel for 16-bit parameters.
        partial: the costs of those `PARTIAL` treatments that free something here.
        num_param_tensors, num_grad_tensors: in how many copies the parameters move, and their gradients.
        gathered_bytes: the whole parameters that the block's forward reads and ranks hold shards of, before any cast. They are
            on the device from the issue of their gather to the end of the forward. Where they are kept, they stay to the end of
            the backward. No workspace has them. ``param_bytes``, ``grad_bytes`` and all that belongs to the optimizer are this
            rank's alone.
        gathered_again_bytes: the part of them that the backward reads.
        reduced_bytes: the whole gradients that the backward makes, of which each rank gets the rows of its shard. They are on the
            device until their reduce is waited for.
    """

    forward_s: float
    backward_s: float
    recompute_s: float
    saved_bytes: int
    boundary_bytes: int
    offloadable: tuple[int, ...]
    forward_workspace_bytes: int
    backward_workspace_bytes: int
    param_bytes: int
    grad_bytes: int
    optimizer_bytes: int
    num_params: int
    trained: tuple[int, ...] = ()
    trained_states: tuple[int, ...] = ()
    product_flops: tuple[float, ...] = ()
    update_share: float = 1.0
    mixed_share: float = 0.0
    partial: tuple[tuple[Activations, ActivationCost], ...] = ()
    num_param_tensors: int = 1
    num_grad_tensors: int = 1
    gathered_bytes: int = 0
    gathered_again_bytes: int = 0
    reduced_bytes: int = 0

    def activations(self, decision: BlockDecision) -> ActivationCost:
        """The cost of the decision's treatment of the activations. A treatment that the block has no figures of keeps them."""
        if decision.activations is Activations.RECOMPUTE:
            return ActivationCost(held_bytes=self.boundary_bytes, recompute_s=self.recompute_s)
        if decision.activations is Activations.OFFLOAD:
            return ActivationCost(
                held_bytes=self.saved_bytes,
                offloaded_bytes=self.offloaded_bytes(decision.num_offloaded),
                offloaded_tensors=len(self.offloadable[: decision.num_offloaded]),
            )
        for kind, cost in self.partial:
            if kind is decision.activations:
                return cost
        return ActivationCost(held_bytes=self.saved_bytes)

    def updated_at(self, decision: BlockDecision, *places: Optimizer) -> float:
        """Updates of the trainable parameters that belong to ``places``, as so many of AdamW's that take as long."""
        return self.update_share * self.part_at(self.num_params, decision, *places)

    def states_at(self, decision: BlockDecision, *places: Optimizer) -> int:
        """Bytes of the optimizer states at ``places``."""
        if not self.trained_states:
            return self.part_at(self.optimizer_bytes, decision, *places)
        return int(_of_each(self.trained_states, decision, places))

    def products_at(self, decision: BlockDecision, *places: Optimizer) -> float:
        """Floating point operations of the matrix products in updates of parameters with optimizer states at ``places``."""
        return _of_each(self.product_flops, decision, places)

    def part_at(self, num_bytes: int, decision: BlockDecision, *places: Optimizer) -> int:
        """The part of a quantity of all trainable parameters, bytes or elements, that belongs to parameters whose optimizer
        states are at one of ``places``."""
        count = decision.num_moved_states
        first = num_bytes if count is None else num_bytes * sum(self.trained[:count]) // max(1, self.num_params)
        return first * (decision.optimizer in places) + (num_bytes - first) * (decision.other_states in places)

    def offloaded_bytes(self, count: int | None = None) -> int:
        """Bytes of the ``count`` largest tensors that can leave; of all of them where None."""
        return sum(self.offloadable[:count])

    def tensors_at(self, decision: BlockDecision, *places: Optimizer) -> int:
        """Gradients of parameters with optimizer states at ``places``."""
        count = decision.num_moved_states
        if count is None:
            return self.num_grad_tensors * (decision.optimizer in places)
        return count * (decision.optimizer in places) + (len(self.trained) - count) * (decision.other_states in places)


def _of_each(amounts: Sequence[float], decision: BlockDecision, places: Collection[Optimizer]) -> float:
    """The sum of what belongs to trainable parameters, smallest parameter first, with optimizer states at ``places``."""
    count = len(amounts) if decision.num_moved_states is None else decision.num_moved_states
    first, others = sum(amounts[:count]), sum(amounts[count:])
    return first * (decision.optimizer in places) + others * (decision.other_states in places)


@dataclass(frozen=True, slots=True, kw_only=True)
class Profile:
    """The costs of all blocks, in execution order, and where they come from (``"measured"`` or ``"analytic"``)."""

    costs: tuple[BlockCost, ...]
    source: str
    profile_s: float
