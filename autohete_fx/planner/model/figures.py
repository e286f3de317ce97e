"""Figures of a decision that do not depend on time: bytes on the host and on disk, seconds of updates and copies.

The simulator and what it judges share these, because there is nothing to replay in them.
"""

from dataclasses import dataclass

from autohete_fx.ir import (
    BlockCost,
    BlockDecision,
    Lane,
    Machine,
    Optimizer,
    Overlap,
    Params,
    Problem,
    staging_bytes,
)
from autohete_fx.ir.decision import MOST_STAGING_BYTES

PRODUCTS_OF_UPDATES = "bfloat16"
"""The dtype of matrix products in updates."""
UPDATED_ON_HOST = tuple(place for place in Optimizer if place.updates_on_host)


def overlap_of(problem: Problem) -> Overlap:
    """The work that updates on the host really overlap with. With clipping none starts before the norm of all gradients is
    known, nor, with replicas, before gradients are averaged."""
    if problem.machine.device_type == "cpu":
        return Overlap.NONE
    comes_late = problem.clips_gradients or problem.num_replicas > 1
    return Overlap.STEP if comes_late and problem.schedule.overlap is Overlap.BACKWARD else problem.schedule.overlap


def limits_of(problem: Problem) -> tuple[int | None, int | None, int]:
    """Bytes that a plan may use of device memory, host memory and disk; None for no limit."""
    return problem.device_budget_bytes, problem.host_budget_bytes, problem.machine.disk_bytes


def sends_at_once(problem: Problem) -> bool:
    """Whether copies up of updates go in what time the lane has left.

    States go from the step on, blocks updated on the host when their update ends.

    Else the forward issues them with its other copies. That comes to nearly the same where the lane gets them in the order in
    which blocks need them, and takes far less to count. Steps come out longer where blocks differ and distances are small. The
    lane is idle beside a long forward then, and a short one after it waits.
    """
    overlap = overlap_of(problem)
    in_turn = overlap is Overlap.STEP and problem.schedule.priority
    return problem.training and overlap is not Overlap.NONE and not in_turn


def host_bytes(problem: Problem, block: int, decision: BlockDecision) -> int:
    """Host memory for the homes of one block, in bytes: parameters, optimizer states, gradients, offloaded activations.

    It includes the host's copies of parameters that it updates and that live in memory of the device's own.
    """
    cost = problem.costs[block]
    total = cost.param_bytes if decision.params is Params.HOST else 0
    total += cost.states_at(decision, Optimizer.HOST, Optimizer.STREAMED)
    if problem.training:
        total += cost.part_at(cost.grad_bytes, decision, *UPDATED_ON_HOST) * (2 if problem.micro_batches > 1 else 1)
        if decision.params is Params.DEVICE and problem.machine.device_type != "cpu":
            total += cost.part_at(cost.param_bytes, decision, *UPDATED_ON_HOST)
        total += problem.in_flight * cost.activations(decision).offloaded_bytes
    return total


def disk_bytes(problem: Problem, block: int, decision: BlockDecision) -> int:
    """Bytes of one block on disk: optimizer states."""
    cost = problem.costs[block]
    return cost.states_at(decision, Optimizer.DISK)


def device_update_s(problem: Problem, block: int, decision: BlockDecision, place: Optimizer) -> float:
    """Seconds in which the device updates those of a block's parameters whose states are at ``place``. Where these are on the
    device, parameters at home take `over_link_s` besides."""
    cost, machine = problem.costs[block], problem.machine
    seconds = cost.updated_at(decision, place) / machine.updates_per_s(on_host=False, mixed_share=cost.mixed_share)
    return seconds + cost.products_at(decision, place) / machine.flops_per_s(PRODUCTS_OF_UPDATES)


def over_link_s(problem: Problem, block: int, decision: BlockDecision) -> float:
    """Seconds in which kernels of the device's updates read and write parameters at home: those whose states are on the device.
    They take the link both ways, and copies stand still."""
    cost, machine = problem.costs[block], problem.machine
    num_params = cost.part_at(cost.num_params, decision, Optimizer.DEVICE)
    if decision.params is not Params.HOST or not num_params:
        return 0.0
    num_bytes = cost.param_bytes * num_params / cost.num_params
    return num_bytes / machine.h2d_bytes_per_s + num_bytes / machine.d2h_bytes_per_s


def streamed_bytes(cost: BlockCost, decision: BlockDecision) -> int:
    """Bytes that a streamed update copies up, and down again: states, and parameters at home."""
    states = cost.states_at(decision, Optimizer.STREAMED)
    at_home = decision.params is Params.HOST
    return states + at_home * cost.part_at(cost.param_bytes, decision, Optimizer.STREAMED)


def states_up_s(problem: Problem, block: int, decision: BlockDecision) -> float:
    """Seconds of the lane that copies up, in a block's streamed update. It copies no more while a matrix is updated, so plans
    take it."""
    cost, machine = problem.costs[block], problem.machine
    products_s = cost.products_at(decision, Optimizer.STREAMED) / machine.flops_per_s(PRODUCTS_OF_UPDATES)
    return copy_s(machine, Lane.H2D, streamed_bytes(cost, decision)) + products_s


def staging_s(problem: Problem, block: int, decision: BlockDecision) -> float:
    """Seconds that go home takes of as much as a block's staging of streamed states."""
    states = problem.costs[block].states_at(decision, Optimizer.STREAMED)
    return staging_bytes(states) / problem.machine.d2h_bytes_per_s


def most_staging_s(machine: Machine) -> float:
    """Likewise of all blocks' staging together, at most."""
    return MOST_STAGING_BYTES / machine.d2h_bytes_per_s


def copy_s(machine: Machine, lane: Lane, num_bytes: int, num_tensors: int = 1) -> float:
    """Seconds to copy so many bytes on a lane, one tensor after another; 0 for none."""
    if not num_bytes:
        return 0.0
    return num_tensors * machine.latency_s + num_bytes / machine.copy_bytes_per_s(lane)


def collective_s(problem: Problem, num_bytes: int) -> float:
    """Seconds of a gather to so many whole bytes, or of a reduce of them, by a ring of all ranks; 0 for none."""
    if not num_bytes or problem.num_ranks == 1:
        return 0.0
    machine, others = problem.machine, problem.num_ranks - 1
    return others * machine.net_latency_s + num_bytes * others / problem.num_ranks / machine.net_bytes_per_s


def average_s(problem: Problem, block: int, decision: BlockDecision) -> float:
    """Seconds in which replicas average the gradients of a block, after the last backward and before any update.

    An all-reduce by a ring of them takes these, and gradients at home on the host a way up to the device and back. Nothing else
    runs meanwhile.
    """
    cost, machine, count = problem.costs[block], problem.machine, problem.num_replicas
    if count == 1 or not cost.grad_bytes or not machine.replica_net_bytes_per_s:
        return 0.0
    on_host = cost.part_at(cost.grad_bytes, decision, *UPDATED_ON_HOST)
    ring_s = 2 * (count - 1) * (machine.net_latency_s + cost.grad_bytes / count / machine.replica_net_bytes_per_s)
    return ring_s + copy_s(machine, Lane.H2D, on_host) + copy_s(machine, Lane.D2H, on_host)


@dataclass(frozen=True, slots=True, kw_only=True)
class Whole:
    """The bytes of a block that collectives move, all 0 with one rank, which shares with nobody.

    Attributes:
        gathered: parameters that its forward reads.
        gathered_again: parameters that its backward reads, where they are not kept.
        reduced: gradients that its backward makes.
    """

    gathered: int = 0
    gathered_again: int = 0
    reduced: int = 0


def whole_of(problem: Problem, block: int) -> Whole:
    """The bytes that collectives move of a block; `BlockDecision.keeps_fetched` spares it those gathered again."""
    cost = problem.costs[block]
    if problem.num_ranks == 1:
        return _NOTHING
    return Whole(gathered=cost.gathered_bytes, gathered_again=cost.gathered_again_bytes, reduced=cost.reduced_bytes)


_NOTHING = Whole()


def replicated_bytes(problem: Problem, block: int, decision: BlockDecision) -> int:
    """Bytes of whole parameters that are always on the device."""
    return whole_of(problem, block).gathered if decision.replicates and problem.training else 0


def kept_bytes(problem: Problem, block: int, decision: BlockDecision) -> int:
    """Bytes of parameters that stay on the device from a block's forward to its backward, beside those at home there."""
    fetched = problem.costs[block].param_bytes if decision.params is Params.HOST else 0
    return (whole_of(problem, block).gathered or fetched) if decision.keeps_fetched else 0


def waiting_bytes(problem: Problem, block: int, decision: BlockDecision) -> int:
    """Device bytes of a block for the other micro-batches in flight: their activations, and copies of parameters that stay."""
    each = kept_bytes(problem, block, decision) + problem.costs[block].activations(decision).staying_bytes
    return (problem.in_flight - 1) * each


def uploaded_bytes(cost: BlockCost, decision: BlockDecision) -> int:
    """Bytes of parameters that are updated on the host and live on the device."""
    goes_up = decision.params is Params.DEVICE and cost.num_params > 0
    return cost.part_at(cost.param_bytes, decision, *UPDATED_ON_HOST) if goes_up else 0


def host_update_s(problem: Problem, block: int, decision: BlockDecision) -> float:
    """Seconds to update a block's parameters on the host: what the slower of computing and of the disk takes."""
    return max(host_computed_s(problem, block, decision), disk_s(problem, block, decision))


def host_computed_s(problem: Problem, block: int, decision: BlockDecision) -> float:
    """Seconds of that which the host computes."""
    cost, machine = problem.costs[block], problem.machine
    lost_s = machine.copy_share * copy_s(machine, Lane.H2D, uploaded_bytes(cost, decision))
    rate = machine.updates_per_s(on_host=True, mixed_share=cost.mixed_share)
    computed_s = cost.updated_at(decision, *UPDATED_ON_HOST) / rate + lost_s
    return computed_s + cost.products_at(decision, *UPDATED_ON_HOST) / machine.host_products_per_s


def last_readers(problem: Problem) -> dict[int, int]:
    """The last block that reads each block's activations, of blocks whose activations any reads."""
    last: dict[int, int] = {}
    for edge in problem.edges:
        last[edge.producer] = max(last.get(edge.producer, 0), edge.consumer)
    return last


def disk_s(problem: Problem, block: int, decision: BlockDecision) -> float:
    """Seconds to read and write a block's states on disk."""
    num_bytes = 2 * disk_bytes(problem, block, decision)
    return num_bytes / problem.machine.disk_bytes_per_s if num_bytes else 0.0
