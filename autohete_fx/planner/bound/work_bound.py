"""The bound that needs no program: in comes a problem, out come the seconds of the work that every plan does."""

from autohete_fx.ir import Overlap, Problem
from autohete_fx.planner.model.figures import PRODUCTS_OF_UPDATES, overlap_of


def work_bound_s(problem: Problem) -> float:
    """The seconds that no plan can beat: all blocks computed, all parameters updated where that is fastest.

    On a CPU device host and device updates take the same cores. On a CUDA device they overlap, at best perfectly, and under an
    overlapping schedule those on the host also overlap the passes. All updates are as fast as those of the fastest block. Matrix
    products of updates are counted on a CPU device only: elsewhere they make the bound no tighter than it is without.
    """
    forward_s = sum(cost.forward_s for cost in problem.costs)
    if not problem.training:
        return forward_s
    machine = problem.machine
    passes_s = problem.micro_batches * (forward_s + sum(cost.backward_s for cost in problem.costs))
    num_updates = sum(cost.update_share * cost.num_params for cost in problem.costs)
    on_device, on_host = (
        max((machine.updates_per_s(on_host=host, mixed_share=cost.mixed_share) for cost in problem.costs), default=1.0)
        for host in (False, True)
    )
    if machine.device_type == "cpu":
        flops = sum(sum(cost.product_flops) for cost in problem.costs)
        products_s = flops / max(machine.flops_per_s(PRODUCTS_OF_UPDATES), machine.host_products_per_s)
        return passes_s + num_updates / max(on_device, on_host) + products_s
    hidden = on_host * passes_s if overlap_of(problem) is not Overlap.NONE else 0.0
    return passes_s + max(0.0, num_updates - hidden) / (on_device + on_host)
