"""What a block may be decided to, and what each decision takes: in come a problem and a block, out come seconds and bytes.

Both the integer program (`formulation`) and the search (`improve`) are made of these figures. The simulator is not: it
walks the runtime's program by itself and judges both.
"""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from autohete_fx.ir import Activations, BlockDecision, Optimizer, Params, Problem
from autohete_fx.planner.simulate import copy_share, device_update_s

Bytes = NDArray[np.int64]

MAX_PREFETCH_DISTANCE = 4
COPY_WEIGHT = 1 / 512
"""What a second of copying counts against a second of the step, so that of plans that are as fast the one that copies
least is chosen. The two copying lanes work for two seconds in a second at most: for this a plan is at most 1/256 slower."""


def choices(problem: Problem, block: int) -> tuple[BlockDecision, ...]:
    """Every decision that a block may get, at prefetch distance 1; the one that moves nothing comes first."""
    cost = problem.costs[block]
    activations, params, optimizer = [Activations.KEEP], [Params.DEVICE], [Optimizer.DEVICE]
    if problem.training and problem.allow_recompute and cost.boundary_bytes < cost.saved_bytes:
        activations.append(Activations.RECOMPUTE)
    if problem.training and problem.allow_recompute and cost.selective is not None:
        activations.append(Activations.SELECTIVE)
    if problem.training and problem.allow_offload_activations and cost.offloadable:
        activations.append(Activations.OFFLOAD)
    if problem.allow_host_params and cost.param_bytes:
        params.append(Params.HOST)
    if problem.training and problem.allow_host_optimizer and cost.optimizer_bytes + cost.grad_bytes:
        optimizer.append(Optimizer.HOST)
    pinned = problem.fixed_decisions[block] if problem.fixed_decisions else None
    if pinned is not None:
        params, optimizer = [pinned.params], [pinned.optimizer]
    return tuple(
        BlockDecision(activations=a, params=p, optimizer=o) for a in activations for p in params for o in optimizer
    )


def fetches_ahead(decision: BlockDecision) -> bool:
    """Whether the block's prefetch distance means anything: something of it is copied to the device ahead of its use."""
    return decision.params is Params.HOST or decision.activations is Activations.OFFLOAD


@dataclass(frozen=True, slots=True, kw_only=True)
class Durations:
    """Seconds of one block's work under one decision, by lane.

    Attributes:
        forward_work, backward_work: on compute, recomputation included.
        forward_up, backward_up: copies up that a pass needs: parameters, in backward also reloaded activations.
        forward_down, backward_down: copies down that a pass makes: offloaded activations, in backward gradients.
        device_update, host_update, upload: of the optimizer step: on compute, on the update lane, on the lane up.
    """

    forward_work: float
    forward_up: float
    forward_down: float
    backward_work: float = 0.0
    backward_up: float = 0.0
    backward_down: float = 0.0
    device_update: float = 0.0
    host_update: float = 0.0
    upload: float = 0.0

    def copies(self, passes: int) -> float:
        """All copies of a step with so many passes forward and backward."""
        return passes * (self.forward_up + self.forward_down + self.backward_up + self.backward_down) + self.upload


def durations(problem: Problem, block: int, decision: BlockDecision) -> Durations:
    """What a block's work takes."""
    cost, machine = problem.costs[block], problem.machine
    share = copy_share(machine)

    def up_s(num_bytes: int) -> float:
        return machine.latency_s + num_bytes / machine.h2d_bytes_per_s if num_bytes else 0.0

    def down_s(num_bytes: int) -> float:
        return machine.latency_s + num_bytes / machine.d2h_bytes_per_s if num_bytes else 0.0

    fetch_s = up_s(cost.param_bytes) if decision.params is Params.HOST else 0.0
    if not problem.training:
        return Durations(forward_work=cost.forward_s + share * fetch_s, forward_up=fetch_s, forward_down=0.0)
    offloads, on_host = decision.activations is Activations.OFFLOAD, decision.optimizer is Optimizer.HOST
    offload_s = down_s(cost.offloaded_bytes(decision.num_offloaded)) if offloads else 0.0
    backward_up_s = fetch_s + (up_s(cost.offloaded_bytes(decision.num_offloaded)) if offloads else 0.0)
    gradients_s = down_s(cost.grad_bytes) if on_host else 0.0
    trained = cost.num_params > 0
    upload_s = up_s(cost.param_bytes) if trained and on_host and decision.params is Params.DEVICE else 0.0
    host_update_s = cost.num_params / machine.host_update_params_per_s + share * upload_s
    return Durations(
        forward_work=cost.forward_s + share * (fetch_s + offload_s),
        forward_up=fetch_s,
        forward_down=offload_s,
        backward_work=cost.backward_s + cost.again_s(decision.activations) + share * (backward_up_s + gradients_s),
        backward_up=backward_up_s,
        backward_down=gradients_s,
        device_update=device_update_s(problem, block, decision) if trained and not on_host else 0.0,
        host_update=host_update_s if trained and on_host else 0.0,
        upload=upload_s,
    )


def device_bytes(problem: Problem, block: int, decision: BlockDecision) -> Bytes:
    """What a block holds on the device in every span: the forwards of blocks 0..n-1, then their backwards 0..n-1.

    In the last micro-batch, at the decision's own prefetch distance. Without training there are forwards only.
    """
    cost, n = problem.costs[block], len(problem.costs)
    at = np.arange(n)
    first, last = max(0, block - decision.prefetch_distance), min(n - 1, block + decision.prefetch_distance)
    fetched = cost.param_bytes if decision.params is Params.HOST else 0
    always = cost.param_bytes - fetched + (cost.optimizer_bytes if decision.optimizer is Optimizer.DEVICE else 0)
    forward = np.full(n, always, dtype=np.int64)
    forward[first : block + 1] += fetched
    forward[block] += cost.saved_bytes + cost.forward_workspace_bytes
    if not problem.training:
        reader = max((edge.consumer for edge in problem.edges if edge.producer == block), default=n)
        forward[(block < at) & (at <= reader)] += cost.boundary_bytes
        return forward
    # What the block's activations hold after its forward, while they leave, in between, and once they are due back.
    held = around = cost.held_bytes(decision.activations)
    if decision.activations is Activations.OFFLOAD:
        held -= cost.offloaded_bytes(decision.num_offloaded)
    staying = cost.grad_bytes if decision.optimizer is Optimizer.DEVICE else 0
    sent = cost.grad_bytes - staying
    always += staying if problem.micro_batches > 1 else 0
    forward += staying if problem.micro_batches > 1 else 0
    forward[block + 1 : block + 2] += around
    forward[block + 2 :] += held
    backward = np.full(n, always, dtype=np.int64)
    backward[block : last + 1] += fetched
    backward[block] += cost.saved_bytes + cost.backward_workspace_bytes
    backward[block + 1 : last + 1] += around
    backward[last + 1 :] += held
    backward[: block + 1] += staying
    backward[max(0, block - 1) : block + 1] += sent
    return np.concatenate([forward, backward])
