"""A training job on GPUs that may not be alike: `join` deploys a plan on the ranks of a process group, `Job` trains.

Each rank builds its own stage alone, compiles it, and runs it in `torch.distributed.pipelining`'s schedule. The global batch of a
step is the same whatever the plan: step k trains on the samples from k G to (k + 1) G - 1, where G is their number. Each
micro-batch's mean loss counts by its share of the samples, so losses and gradients are those of one process with the whole batch,
but for the rounding of sums. Clipping, the learning rate and the optimizer's step do not depend on the plan either.
"""

import os
import socket
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleGPipe

from autohete_fx.cluster.batches import Batch, batch_of
from autohete_fx.cluster.deploy import Deployment, Member, Seat, check_runs, deploy
from autohete_fx.cluster.layers import BuildModel, LayerMap, map_layers
from autohete_fx.cluster.plan import ClusterPlan, PipelineSchedule
from autohete_fx.cluster.stage import Loss, StageModule, Weights, build_stage, materialize
from autohete_fx.cluster.sums import GradientSums, clip_factor
from autohete_fx.errors import ClusterError

Load = Callable[[range], Any]
"""A function of indices of samples: the batch of these samples, in that order."""
MakeOptimizer = Callable[[list[nn.Parameter]], torch.optim.Optimizer]


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainStep:
    """The results of a step.

    Attributes:
        step: its index.
        loss: mean over the global batch, before the update.
        grad_norm: of all gradients, before clipping.
        seconds: of this rank.
    """

    step: int
    loss: float
    grad_norm: float
    seconds: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Recipe:
    """The model and its training; nothing of it depends on the plan.

    Attributes:
        build_model: makes the model.
        loss: of its output and a batch, the mean over the batch's samples.
        global_batch: samples of a step.
        make_optimizer: of the parameters of a stage.
        learning_rate: of a step's index; None: as the optimizer has it.
        max_grad_norm: to which gradients of all parameters together are clipped; None: not.
        seed: of dropout, and of weights that modules initialise.
    """

    build_model: BuildModel
    loss: Loss
    global_batch: int
    make_optimizer: MakeOptimizer
    learning_rate: Callable[[int], float] | None
    max_grad_norm: float | None
    seed: int


class Job:
    """One rank's part of a training job. Made by `join`.

    Attributes:
        step: index of the next step.
        deployment: the plan and who takes which stage.
        layer_map: of the model.
        device: of this rank.
        seat: what this rank does; None where it is idle.
        stage: its layers; None where it is idle.
        optimizer: of the stage's parameters; None where it is idle or all are frozen.
    """

    def __init__(
        self,
        recipe: Recipe,
        deployment: Deployment,
        layer_map: LayerMap,
        example: Batch,
        *,
        device: torch.device,
        compiled: Callable[[StageModule], Any],
        weights: Weights,
    ) -> None:
        self.step, self.deployment, self.layer_map, self.device = 0, deployment, layer_map, device
        self._recipe = recipe
        self.seat = deployment.seat(dist.get_rank())
        self.stage: StageModule | None = None
        self.optimizer: torch.optim.Optimizer | None = None
        self._schedule: Schedule1F1B | ScheduleGPipe | None = None
        params: dict[str, nn.Parameter] = {}
        groups = _pipeline_groups(deployment)
        if self.seat is not None:
            pipeline = deployment.plan.pipelines[self.seat.pipeline]
            layers = pipeline.stages[self.seat.place].layers
            share = pipeline.micro_batch / recipe.global_batch
            self.stage = build_stage(
                recipe.build_model, layer_map, layers, loss=recipe.loss, share=share, device=device
            )
            materialize(self.stage, device, weights, recipe.seed)
            self.stage.reads(example)
            params = self.stage.named()
            trained = [param for param in params.values() if param.requires_grad]
            self.optimizer = recipe.make_optimizer(trained) if trained else None
            ranks, group = groups[self.seat.pipeline, self.seat.part]
            self._schedule = self._scheduled(compiled(self.stage), ranks, group)
        self._sums = GradientSums(deployment.owners(layer_map), layer_map, params)

    def _scheduled(
        self, stage: nn.Module, ranks: tuple[int, ...], group: dist.ProcessGroup
    ) -> Schedule1F1B | ScheduleGPipe:
        seat, plan = self.seat, self.deployment.plan
        assert seat is not None, "this rank has a stage"
        pipeline = plan.pipelines[seat.pipeline]
        hidden = self.layer_map.hidden
        sizes = pipeline.micro_batch, *hidden.sizes[1:]
        first, last = seat.place == 0, seat.place == len(pipeline.stages) - 1
        received = torch.empty(sizes, dtype=hidden.dtype, device="meta", requires_grad=True)
        made = (
            torch.empty((), dtype=hidden.dtype, device="meta")
            if last
            else torch.empty(sizes, dtype=hidden.dtype, device="meta", requires_grad=True)
        )
        piped = PipelineStage(
            stage,
            seat.place,
            len(pipeline.stages),
            self.device,
            input_args=() if first else (received,),
            output_args=(made,),
            group=group,
        )
        by_rank = {rank: place for place, rank in enumerate(sorted(ranks))}
        piped.stage_index_to_group_rank = {place: by_rank[rank] for place, rank in enumerate(ranks)}
        make = Schedule1F1B if plan.schedule is PipelineSchedule.ONE_F_ONE_B else ScheduleGPipe
        return make(piped, pipeline.micro_batches, loss_fn=lambda loss, _: loss, scale_grads=False)

    # -- training -------------------------------------------------------------------------------------------------

    def train_step(self, load: Load) -> TrainStep:
        """Train on the next global batch.

        Args:
            load: of indices of samples, the batch of these; called with those of this rank's pipeline, or not at all.

        Returns:
            The same loss and norm on every rank.
        """
        start = time.perf_counter()
        loss = self._passes(load)
        self._sums.reduce()
        totals = torch.stack([loss, self._sums.squares()])
        totals = self._all_sum(totals)
        norm = float(totals[1].sqrt())
        factor = clip_factor(norm, self._recipe.max_grad_norm)
        if factor != 1.0:
            self._sums.scale(factor)
        if self.optimizer is not None:
            if self._recipe.learning_rate is not None:
                for group in self.optimizer.param_groups:
                    group["lr"] = self._recipe.learning_rate(self.step)
            self.optimizer.step()
            self.optimizer.zero_grad()
        done = TrainStep(step=self.step, loss=float(totals[0]), grad_norm=norm, seconds=time.perf_counter() - start)
        self.step += 1
        return done

    def _passes(self, load: Load) -> torch.Tensor:
        """Forward and backward passes of the step; the loss's sum over this rank's micro-batches, in fp64 on the CPU."""
        total = torch.zeros((), dtype=torch.float64)
        if self._schedule is None or self.seat is None:
            return total
        pipeline = self.deployment.plan.pipelines[self.seat.pipeline]
        samples = self.deployment.samples(self.seat.pipeline)
        first = self.step * self._recipe.global_batch
        batch = batch_of(load(range(first + samples.start, first + samples.stop)))
        if batch.samples != len(samples):
            raise ClusterError(
                f"load gave {batch.samples} samples where it was asked for {len(samples)}. Expected was a batch of the samples that"
                " load is called with. Correct load"
            )
        torch.manual_seed(_seed_of_step(self._recipe.seed, self.step, self.seat))
        losses: list[torch.Tensor] = []
        named = {f"batch_{name}": tensor.to(self.device) for name, tensor in batch.tensors.items()}
        micro_batches: Any = torch.zeros(
            pipeline.micro_batches
        )  # the loss is the last stage's output, and needs no target
        self._schedule.step(target=micro_batches, losses=losses, return_outputs=False, **cast(Any, named))
        return total + sum(loss.detach().double().cpu() for loss in losses)

    def _all_sum(self, values: torch.Tensor) -> torch.Tensor:
        on_device = dist.get_backend() == "nccl"
        values = values.to(self.device) if on_device else values
        dist.all_reduce(values)
        return values.cpu()


def _seed_of_step(seed: int, step: int, seat: Seat) -> int:
    return hash((seed, step, seat.pipeline, seat.place)) % 2**63


def _pipeline_groups(deployment: Deployment) -> dict[tuple[int, int], tuple[tuple[int, ...], dist.ProcessGroup]]:
    """By pipeline and part of its units: the ranks in order of stages, and their group. All ranks call it."""
    found = {}
    for index, pipeline in enumerate(deployment.plan.pipelines):
        for part in range(pipeline.stages[0].tp):
            ranks = deployment.pipeline(index, part)
            found[index, part] = ranks, dist.new_group(list(ranks))
    return found


def join(
    build_model: BuildModel,
    loss: Loss,
    *,
    example: Any,
    global_batch: int,
    plan: ClusterPlan,
    optimizer: MakeOptimizer,
    learning_rate: Callable[[int], float] | None = None,
    max_grad_norm: float | None = None,
    weights: Weights = None,
    seed: int = 0,
    backend: str | Callable[..., Any] | None = "inductor",
    options: dict[str, Any] | None = None,
    device: torch.device | str | None = None,
    member: Member | None = None,
) -> Job:
    """Take part in a job.

    Args:
        build_model: makes the model, any module whose layers one list has. No rank ever holds the whole of it.
        loss: of the model's output and a batch, the mean over the batch's samples.
        example: a batch as ``load`` will give it; its first sample tells shapes.
        global_batch: samples of a step, over all ranks.
        plan: which rank trains what.
        optimizer: of a list of parameters, their optimizer.
        learning_rate: of a step's index.
        max_grad_norm: to which the norm of all gradients is clipped.
        weights: a safetensors file or folder, a function of a parameter's name, or None: modules initialise themselves.
        seed: of dropout and initial weights.
        backend: that compiles the stages; None: they run as they are.
        options: of that backend.
        device: of this rank; None: its CUDA device, else the CPU.
        member: this rank's node and type of GPU as the plan calls them; None: by the host's name and the device.

    Raises:
        ClusterError: the plan does not fit the model, the batch or the ranks.
    """
    batch = batch_of(example)
    device = torch.device(device) if device is not None else _own_device()
    if plan.global_batch != global_batch:
        raise ClusterError(
            f"the plan has a global batch of {plan.global_batch} samples, and {global_batch} were given. Expected were equal ones."
            " Make the plan again, or give its number"
        )
    members: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(members, member or this_member(device))
    deployment = deploy(plan, members)
    seat = deployment.seat(dist.get_rank())
    micro_batch = plan.pipelines[seat.pipeline if seat else 0].micro_batch
    layer_map = map_layers(build_model, batch.of_samples(micro_batch))
    check_runs(plan, layer_map, getattr(build_model, "__name__", "the model"))
    recipe = Recipe(
        build_model=build_model,
        loss=loss,
        global_batch=global_batch,
        make_optimizer=optimizer,
        learning_rate=learning_rate,
        max_grad_norm=max_grad_norm,
        seed=seed,
    )

    def compiled(stage: StageModule) -> Any:
        return stage if backend is None else torch.compile(stage, backend=backend, options=options)

    return Job(recipe, deployment, layer_map, batch, device=device, compiled=compiled, weights=weights)


def _own_device() -> torch.device:
    if torch.cuda.is_available():
        return torch.device("cuda", torch.cuda.current_device())
    return torch.device("cpu")


def this_member(device: torch.device) -> Member:
    """This rank's node and GPU."""
    node = f"{socket.gethostname()}-{os.environ.get('GROUP_RANK', '0')}"
    return Member(node=node, gpu="cpu" if device.type == "cpu" else torch.cuda.get_device_name(device))
