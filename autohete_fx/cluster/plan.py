"""A plan over many devices: pipelines, their stages, and how many micro-batches each takes.

A `ClusterPlan` is a value; its JSON file is versioned.
"""

import enum
import json
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from autohete_fx.errors import ClusterError
from autohete_fx.ir.files import SavedAs, spelled, write_text
from autohete_fx.ir.sizes import format_seconds

SCHEMA_VERSION = 2


class PipelineSchedule(enum.Enum):
    """The order of forward and backward passes in a pipeline."""

    ONE_F_ONE_B = "1f1b"
    GPIPE = "gpipe"


@dataclass(frozen=True, slots=True, kw_only=True)
class Stage:
    """Layers of one unit.

    Attributes:
        node: name of the node that the unit's GPUs are on.
        gpu: their type.
        tp: how many GPUs share each layer by tensor parallelism.
        shards: how many such groups of GPUs the unit has. Each holds its rows of all parameters, and takes its part of every
            micro-batch's samples.
        first: index of the first layer; 0 is the embedding.
        last: index of the last layer, inclusive.
        recomputed: how many of the layers recompute their activations in backward; the others keep them.
        offloaded: how many of the layers have optimizer states on the host, where their steps run.
    """

    node: str
    gpu: str
    tp: int
    first: int
    last: int
    recomputed: int = 0
    offloaded: int = 0
    shards: int = 1

    @property
    def num_gpus(self) -> int:
        """GPUs of the unit."""
        return self.tp * self.shards

    @property
    def layers(self) -> range:
        """Their indexes."""
        return range(self.first, self.last + 1)


@dataclass(frozen=True, slots=True, kw_only=True)
class Pipeline:
    """Stages that hold the model once.

    Attributes:
        stages: in order of layers.
        micro_batch: samples in one.
        micro_batches: in a step.
    """

    stages: tuple[Stage, ...]
    micro_batch: int
    micro_batches: int


@dataclass(frozen=True, slots=True, kw_only=True)
class ClusterPlan:
    """Every decision.

    Attributes:
        model: name.
        pipelines: each holds the model once and takes its part of the global batch.
        schedule: of every pipeline.
        planner: what made it.
        iteration_s: predicted; 0.0 where nobody did.
    """

    model: str
    pipelines: tuple[Pipeline, ...]
    schedule: PipelineSchedule = PipelineSchedule.ONE_F_ONE_B
    planner: str = "given"
    iteration_s: float = 0.0
    schema_version: int = field(default=SCHEMA_VERSION)

    def __post_init__(self) -> None:
        if not self.pipelines:
            raise ClusterError("the plan has no pipelines. At least one was expected. Make the plan again")
        for index, pipeline in enumerate(self.pipelines):
            if not pipeline.stages or min(pipeline.micro_batch, pipeline.micro_batches) < 1:
                raise ClusterError(
                    f"pipeline {index} has {len(pipeline.stages)} stages and {pipeline.micro_batches} micro-batches of"
                    f" {pipeline.micro_batch} samples. Expected was at least one of each. Make the plan again"
                )
            expected = 0
            for stage in pipeline.stages:
                if stage.first != expected or stage.last < stage.first:
                    raise ClusterError(
                        f"pipeline {index} has a stage of layers {stage.first} to {stage.last}. Expected was one that begins with"
                        f" layer {expected}. Make the plan again"
                    )
                expected = stage.last + 1
                if not all(0 <= number <= len(stage.layers) for number in (stage.recomputed, stage.offloaded)):
                    raise ClusterError(
                        f"pipeline {index} has a stage of {len(stage.layers)} layers that recomputes {stage.recomputed} and"
                        f" offloads {stage.offloaded}. Expected were from 0 to all of its layers. Correct the numbers"
                    )
                if stage.tp < 1:
                    raise ClusterError(
                        f"pipeline {index} has a stage of {stage.tp} GPUs a layer. Expected was at least one. Correct tp"
                    )
                if stage.shards < 1 or pipeline.micro_batch % stage.shards:
                    raise ClusterError(
                        f"pipeline {index} has micro-batches of {pipeline.micro_batch} samples, and a stage of {stage.shards}"
                        " shards. Expected were samples that shards divide evenly. Give micro-batches of a multiple of the shards"
                    )
        ends = {pipeline.stages[-1].last for pipeline in self.pipelines}
        if len(ends) > 1:
            raise ClusterError(
                f"pipelines end with different layers: {sorted(ends)}. Expected was the whole model in each. Make the plan again"
            )

    @property
    def num_layers(self) -> int:
        """The number of layers of the model, embedding and head among them."""
        return self.pipelines[0].stages[-1].last + 1

    @property
    def global_batch(self) -> int:
        """Samples of a step."""
        return sum(pipeline.micro_batch * pipeline.micro_batches for pipeline in self.pipelines)

    @property
    def has_shards(self) -> bool:
        """Whether the GPUs of a stage hold shards of it."""
        return any(stage.shards > 1 for _, _, stage in self.stages())

    def stages(self) -> Iterator[tuple[int, int, Stage]]:
        """Every stage with the indexes of its pipeline and of its place."""
        for index, pipeline in enumerate(self.pipelines):
            for place, stage in enumerate(pipeline.stages):
                yield index, place, stage

    def used(self) -> dict[str, int]:
        """GPUs by type."""
        counts: dict[str, int] = {}
        for _, _, stage in self.stages():
            counts[stage.gpu] = counts.get(stage.gpu, 0) + stage.num_gpus
        return counts

    def to_json(self) -> str:
        """The plan as JSON text; ``from_json`` gives back an equal plan."""
        return json.dumps(asdict(self), indent=1, default=lambda e: e.value) + "\n"

    def save(self, path: str | Path) -> None:
        """Write ``to_json()`` to a file, all at once. Raises OSError where it cannot be written."""
        write_text(path, self.to_json())

    @classmethod
    def from_json(cls, text: str) -> "ClusterPlan":
        """Read ``to_json()``'s text. Raises ClusterError for anything else."""
        return _FILES.parse(text, lambda raw: spelled(cls, raw))

    @classmethod
    def load(cls, path: str | Path) -> "ClusterPlan":
        """Read a file that `save` wrote. Raises ClusterError, with its name."""
        return _FILES.load(path, cls.from_json)


def _with_shards(raw: dict[str, Any]) -> dict[str, Any]:
    """A plan of version 1, which logs of jobs may hold."""
    pipelines = [
        {**pipeline, "stages": [{**stage, "shards": 1} for stage in pipeline["stages"]]}
        for pipeline in raw["pipelines"]
    ]
    return {**raw, "schema_version": 2, "pipelines": pipelines}


_FILES = SavedAs(
    kind="cluster plan",
    writer="ClusterPlan.save",
    again="make the plan again",
    schema_version=SCHEMA_VERSION,
    error=ClusterError,
    upgrades={1: _with_shards},
    others={"decisions": "one of a single device or of ranks that are alike, which `autohete show` prints"},
)


def unit_words(stage: Stage) -> str:
    """The GPUs of a stage: their type, after how many share layers and in how many shards where it is not one."""
    shards = f"{stage.shards} shards x " if stage.shards > 1 else ""
    return f"{shards}{f'{stage.tp} ' if stage.tp > 1 else ''}{stage.gpu}"


def plan_line(plan: ClusterPlan) -> str:
    """A plan in a line: for each pipeline its micro-batches, and its stages by GPU and layers."""
    pipelines = "; ".join(
        f"{pipeline.micro_batches} x {pipeline.micro_batch} samples through "
        + " > ".join(f"{unit_words(stage)} {stage.first}-{stage.last}" for stage in pipeline.stages)
        for pipeline in plan.pipelines
    )
    predicted = f"; predicted {format_seconds(plan.iteration_s)} a step" if plan.iteration_s else ""
    return f"plan of {plan.model}: {pipelines}{predicted}"
