"""The memory of each GPU at the worst moment of a step."""

from dataclasses import dataclass

from autohete_fx.cluster.costs import CostTable, StageCost
from autohete_fx.cluster.plan import ClusterPlan, PipelineSchedule, Stage

OVERHEAD_BYTES = 2 * 2**30
"""Bytes of each GPU's memory beside the reserve: CUDA's context, collectives' buffers, and gaps of the allocator."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StageMemory:
    """Memory of each GPU of a stage.

    Attributes:
        states_bytes: weights, gradients, and what of the optimizer's states is on the device.
        activations_bytes: of all micro-batches in flight.
        working_bytes: of the backward of one layer, and of weights that shards have gathered for it.
        overhead_bytes: of what nobody plans.
    """

    states_bytes: int
    activations_bytes: int
    working_bytes: int
    overhead_bytes: int

    @property
    def peak_bytes(self) -> int:
        """All of it."""
        return self.states_bytes + self.activations_bytes + self.working_bytes + self.overhead_bytes


def planned_cost(costs: CostTable, stage: Stage, micro_batch: int) -> StageCost:
    """Costs of a stage for one of its pipeline's micro-batches, on each GPU; without the seconds of gathers."""
    return costs.stage(
        stage.layers,
        stage.gpu,
        stage.tp,
        micro_batch,
        shards=stage.shards,
        recomputed=stage.recomputed,
        offloaded=stage.offloaded,
    )


def memory_of(cost: StageCost, costs: CostTable, in_flight: int) -> StageMemory:
    """The memory of a stage with so many micro-batches in flight."""
    of_optimizer = costs.optimizer_bytes_per_byte * (cost.params_bytes - cost.offloaded_bytes)
    return StageMemory(
        states_bytes=int((1 + costs.gradient_bytes_per_byte) * cost.params_bytes + of_optimizer),
        activations_bytes=in_flight * cost.kept_bytes,
        working_bytes=cost.working_bytes,
        overhead_bytes=costs.overhead_bytes,
    )


def in_flight(place: int, depth: int, micro_batches: int, schedule: PipelineSchedule) -> int:
    """Micro-batches whose activations the stage at ``place`` of ``depth`` holds at most."""
    return micro_batches if schedule is PipelineSchedule.GPIPE else min(depth - place, micro_batches)


def memory_of_plan(plan: ClusterPlan, costs: CostTable) -> list[list[StageMemory]]:
    """By pipeline and place."""
    found = []
    for pipeline in plan.pipelines:
        row = []
        for place, stage in enumerate(pipeline.stages):
            cost = planned_cost(costs, stage, pipeline.micro_batch)
            held = in_flight(place, len(pipeline.stages), pipeline.micro_batches, plan.schedule)
            row.append(memory_of(cost, costs, held))
        found.append(row)
    return found
