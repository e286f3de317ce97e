"""`join`: take part in a training job, whatever GPUs there are today.

The ranks of the process group say what they have, and the plan is deployed on them. Each rank builds, compiles and restores its
own stage alone. Training goes on with the newest complete save.
"""

import contextlib
import os
import socket
import time
import uuid
from collections.abc import Callable, Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch.distributed import HashStore  # pyright: ignore[reportPrivateImportUsage]
from torch.distributed.device_mesh import DeviceMesh

from autohete_fx.cluster.automatic import automatic_plan
from autohete_fx.cluster.batches import batch_of
from autohete_fx.cluster.building import BuildModel
from autohete_fx.cluster.deploy import Deployment, Member, Seat, check_runs, deploy, warn_of_offloads, warn_of_wholes
from autohete_fx.cluster.job import Job, JobLog, MakeOptimizer, Recipe
from autohete_fx.cluster.layers import LayerMap, map_layers
from autohete_fx.cluster.marks import SplitSpec, with_marks
from autohete_fx.cluster.memory import in_flight
from autohete_fx.cluster.plan import ClusterPlan
from autohete_fx.cluster.restore import Restored, restore
from autohete_fx.cluster.stage import Weights, build_stage
from autohete_fx.cluster.stage_module import Loss, StageModule
from autohete_fx.cluster.stage_run import StageRun, pipeline_groups
from autohete_fx.cluster.store import Store, restore_states
from autohete_fx.cluster.sums import sum_groups
from autohete_fx.cluster.tensor_parallel import TensorLayout, TpPlan, layout_of
from autohete_fx.cluster.unit import Unit
from autohete_fx.errors import ClusterError
from autohete_fx.internals.cut_off import remove_cut_off_libraries
from autohete_fx.internals.groups import mesh_of
from autohete_fx.optim.base import PlannedOptimizer

TIMEOUT_S = 300.0
MakePlan = Callable[[Sequence[Member], LayerMap], ClusterPlan]


def join(
    build_model: BuildModel,
    loss: Loss,
    *,
    example: Any,
    global_batch: int,
    optimizer: MakeOptimizer,
    plan: ClusterPlan | MakePlan | None = None,
    split_spec: SplitSpec | None = None,
    tp_plan: TpPlan | None = None,
    store: Store | None = None,
    learning_rate: Callable[[int], float] | None = None,
    max_grad_norm: float | None = None,
    weights: Weights = None,
    seed: int = 0,
    backend: str | Callable[..., Any] | None = "inductor",
    options: dict[str, Any] | None = None,
    device: torch.device | str | None = None,
    member: Member | None = None,
    memory_budget: str | int | None = None,
    cache_dir: str | Path | None = None,
    expected_lifetime_s: float | None = None,
    log: str | None = None,
    timeout_s: float = TIMEOUT_S,
) -> Job:
    """Take part in a job. All ranks call it with equal arguments, but for ``device`` and ``member``.

    Args:
        build_model: makes the model. Its layers are those of one list, or what runs between its marks of
            `torch.distributed.pipelining.pipe_split`. No rank ever holds the whole of it.
        loss: of the model's output and a batch, the mean over the batch's samples.
        example: a batch as ``load`` will give it; its first sample tells shapes.
        global_batch: samples of a step, over all ranks.
        optimizer: of a list of parameters, their optimizer. Its update of a parameter must not depend on other parameters.
        plan: which rank trains what, or a function that makes it of the members and the model's layers, the same on all ranks.
            None: `automatic` measures what there is, and plans for it.
        split_spec: marks for models without such a list, as `torch.distributed.pipelining.pipeline` takes them: names of modules,
            with `SplitPoint.BEGINNING` or ``END``. Plans count what lies between marks as layers.
        tp_plan: how the GPUs of a stage share its layers, for models without a plan in their transformers configuration. It
            maps names of modules, with a star for each index, to ``colwise``, ``rowwise``, ``colwise_gather_output`` or
            ``embedding_rowwise``.
        store: where the job saves, and goes on from; None: nowhere.
        learning_rate: of a step's index.
        max_grad_norm: to which the norm of all gradients is clipped.
        weights: to begin with: a safetensors file or folder, a function of a parameter's name, or None: those that
            ``torch.manual_seed(seed); build_model()`` gives.
        seed: of dropout and initial weights.
        backend: that compiles the stages; None: they run as they are.
        options: of that backend.
        device: of this rank; None: its CUDA device, else the CPU.
        member: this rank's node and type of GPU as the plan calls them; None: by the host's name and the device.
        memory_budget: of each GPU, as ``"20GiB"``, ``"60%"`` or bytes. It holds for the plan that is made, and for each stage
            that ``backend="autohete"`` compiles. None: nearly all that there is.
        cache_dir: where measurements for that plan are kept; None: `autohete_fx.cache.cache_dir`.
        expected_lifetime_s: seconds until the nodes are expected to change again, for the plan that is made. One that moves
            fewer bytes may then be taken before a faster one. None: the fastest step is best.
        log: a file of JSON lines, which the first rank writes.
        timeout_s: after which a rank that does not answer is an error.

    Raises:
        ClusterError: the plan does not fit the model, the batch or the ranks; no plan fits the memory; or the store has no
            complete save. Also where another rank could not begin.
    """
    start = time.perf_counter()
    batch = batch_of(example)
    build_model = with_marks(build_model, split_spec) if split_spec else build_model
    device = torch.device(device) if device is not None else _own_device()
    group = _connect(device, timeout_s)
    rank = dist.get_rank()
    said: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(said, (member or this_member(device), uuid.uuid4().hex[:8], _agent()), group=group)
    members: list[Member] = [row[0] for row in said]
    job_log = JobLog(log, rank == 0)
    if backend is not None:
        for library in remove_cut_off_libraries():
            job_log.say(f"{library} was cut off when a rank ended, and is compiled again")

    def compiled(stage: StageModule, more: dict[str, Any] | None = None) -> Any:
        if backend is None:
            return stage
        return torch.compile(stage, backend=backend, options={**more, **(options or {})} if more else options)

    plan = plan or automatic_plan(
        build_model,
        loss,
        optimizer,
        batch,
        compiled,
        f"{getattr(backend, '__qualname__', backend)} {options}",
        members,
        device,
        group,
        global_batch=global_batch,
        memory_budget=memory_budget,
        cache_dir=cache_dir,
        store=store,
        tp_plan=tp_plan,
        expected_lifetime_s=expected_lifetime_s,
        gathers=_is_autohete(backend),
        say=job_log.say,
    )
    if not isinstance(plan, ClusterPlan):
        find = plan
        plan = _on_each_rank(lambda: find(members, map_layers(build_model, batch.of_samples(1))), members, group)
    if plan.global_batch != global_batch:
        raise ClusterError(
            f"the plan has a global batch of {plan.global_batch} samples, and {global_batch} were given. Expected were equal ones."
            " Make the plan again, or give its number"
        )
    deployment = deploy(plan, members)
    seat = deployment.seat(rank)
    samples = len(deployment.rows(seat)) if seat else plan.pipelines[0].micro_batch
    degrees = {stage.tp for _, _, stage in plan.stages()}

    def looked() -> tuple[LayerMap, TensorLayout]:
        """At the model, which every rank builds for itself."""
        layer_map = map_layers(build_model, batch.of_samples(samples))
        name = getattr(build_model, "__name__", "the model")
        check_runs(plan, layer_map, name, samples=samples, is_compiled=backend is not None)
        return layer_map, layout_of(build_model, layer_map, degrees, tp_plan)

    layer_map, layout = _on_each_rank(looked, members, group)
    timeout = timedelta(seconds=timeout_s)
    watch: Any = dist.new_group(backend="gloo", timeout=timeout)
    unit = _unit_of(deployment, seat, layout, device, timeout)
    groups, summing = pipeline_groups(deployment, timeout), sum_groups(deployment.owners(layer_map, layout), timeout)
    needs = list(deployment.held(seat, layer_map, layout).values()) if seat else []
    restored = restore(store, needs, list(layer_map.readers), members[rank].node, group) if store else None
    if restored:
        weights = restored.weight
    recipe = Recipe(
        build_model=build_model,
        loss=loss,
        global_batch=global_batch,
        make_optimizer=optimizer,
        learning_rate=learning_rate,
        max_grad_norm=max_grad_norm,
        seed=seed,
    )
    if unit is not None:
        unit = unit.with_ranks()

    def begun() -> Job:
        """This rank's part of the job, which it makes alone."""
        stage = _stage_of(recipe, deployment, seat, layer_map, device, weights, unit) if seat else None
        run = None
        if seat and stage:
            run = StageRun(
                stage,
                compiled(stage, _stage_options(deployment, seat, memory_budget) if _is_autohete(backend) else None),
                seat=seat,
                deployment=deployment,
                layer_map=layer_map,
                groups=groups,
                example=batch,
                device=device,
            )
        job = Job(
            recipe,
            deployment,
            members,
            layer_map,
            layout=layout,
            unit=unit,
            stage=stage,
            run=run,
            group=group,
            watch=watch,
            groups=summing,
            store=store,
            generation=said[0][1],
            job_log=job_log,
            began=restored.save if restored else None,
        )
        if not (_is_autohete(backend) and isinstance(job.optimizer, PlannedOptimizer | None)):
            warn_of_offloads(plan, job.optimizer)
        if not _is_autohete(backend):
            warn_of_wholes(plan, str(getattr(backend, "__name__", backend)))
        if restored is not None:
            job.step = restored.step
            restore_states(job.params, job.optimizer, restored.tensors, job.held)
        return job

    job = _on_each_rank(begun, members, group)
    _report(job, job_log, restored, group, time.perf_counter() - start, [row[2] for row in said])
    if backend is not None:
        job_log.say("the first step compiles the stages, where no cache has them")
    return job


def _is_autohete(backend: object) -> bool:
    return getattr(backend, "__name__", backend) == "autohete"


def _stage_options(deployment: Deployment, seat: Seat, memory_budget: str | int | None) -> dict[str, Any]:
    """The options that tell our backend which passes a stage runs, and in how much memory."""
    pipeline = deployment.plan.pipelines[seat.pipeline]
    held = in_flight(seat.place, len(pipeline.stages), pipeline.micro_batches, deployment.plan.schedule)
    return {"micro_batches": pipeline.micro_batches, "in_flight": held, "memory_budget": memory_budget}


def _unit_of(
    deployment: Deployment,
    seat: Seat | None,
    layout: TensorLayout,
    device: torch.device,
    timeout: timedelta,
) -> Unit | None:
    """The unit of this rank; None where it has its layers alone. All ranks call it, because they make process groups together."""
    meshes: dict[str, DeviceMesh] = {}
    for seats in deployment.peers():
        group: Any = dist.new_group([deployment.ranks[peer] for peer in seats], timeout=timeout)
        if seat in seats:
            along = "sharded" if seats[0].shard != seats[1].shard else "tensor_parallel"
            meshes[along] = mesh_of({along: group}, device.type)
    if not (seat and meshes):
        return None
    parallel, sharded = meshes.get("tensor_parallel"), meshes.get("sharded")
    return Unit(layout=layout, place=deployment.place(seat), tensor_parallel=parallel, sharded=sharded)


def _stage_of(
    recipe: Recipe,
    deployment: Deployment,
    seat: Seat,
    layer_map: LayerMap,
    device: torch.device,
    weights: Weights,
    unit: Unit | None,
) -> StageModule:
    """This rank's stage, with its weights."""
    planned = deployment.stage(seat)
    return build_stage(
        recipe.build_model,
        layer_map,
        planned.layers,
        loss=recipe.loss,
        share=deployment.plan.pipelines[seat.pipeline].micro_batch / recipe.global_batch,
        device=device,
        weights=weights,
        seed=recipe.seed,
        recomputed=planned.recomputed,
        unit=unit,
    )


_Made = TypeVar("_Made")


def _on_each_rank(make: Callable[[], _Made], members: Sequence[Member], group: dist.ProcessGroup | None) -> _Made:
    """What this rank makes by itself, once all have made theirs. Where one fails, none waits for it: each raises its words."""

    def told(words: str) -> list[str]:
        said = [""] * len(members)
        dist.all_gather_object(said, words, group=group)
        return said

    try:
        made = make()
    except Exception as error:
        with contextlib.suppress(Exception):  # what is wrong here is what this rank has to say
            told(f"{type(error).__name__}: {error}")
        raise
    for rank, words in enumerate(told("")):
        if words:
            raise ClusterError(
                f"rank {rank}, on node {members[rank].node}, could not begin its part of the job. Expected was that all ranks"
                f" can. Mend what it says, and start all of them again: {words}"
            )
    return made


def _report(
    job: Job,
    job_log: JobLog,
    restored: Restored | None,
    group: dist.ProcessGroup | None,
    seconds: float,
    agents: list[str],
) -> None:
    """Tell how the job begins: the plan, what was read from where, and how long it took."""
    rows: list[Any] = [None] * len(job.members)
    dist.all_gather_object(rows, (restored.num_bytes, restored.seconds) if restored else ({}, {}), group=group)
    num_bytes = {source: sum(row[0].get(source, 0) for row in rows) for source in ("local", "peer", "cloud")}
    parts_s = {
        part: max((row[1].get(part, 0.0) for row in rows), default=0.0) for part in ("look", "local", "cloud", "peer")
    }
    depths = " + ".join(str(len(pipeline.stages)) for pipeline in job.deployment.plan.pipelines)
    job_log.say(
        f"{len(job.members)} ranks on {len({member.node for member in job.members})} nodes; pipelines of {depths} stages;"
        f" {len(job.deployment.idle)} idle; step {job.step}; ready after {seconds:.1f} s"
    )
    if restored is not None:
        if restored.trouble:
            job_log.say(f"{restored.trouble} Disks have all that is needed; training goes on")
        read = ", ".join(f"{source} {count / 2**20:.1f} MiB" for source, count in num_bytes.items())
        took = ", ".join(f"{part} {part_s:.2f} s" for part, part_s in parts_s.items())
        job_log.say(f"restored step {job.step}: {read}; {took}")
    job_log.write(
        "join",
        step=job.step,
        members=[[member.node, member.gpu] for member in job.members],
        agents=agents,
        sample_tokens=job.layer_map.sample_tokens,
        plan=job.deployment.plan.to_json(),
        idle=len(job.deployment.idle),
        seconds=seconds,
        bytes=num_bytes,
        restore_s=parts_s,
        restored=restored is not None,
        missing_bytes=restored.missing_bytes if restored else 0,
    )


def _connect(device: torch.device, timeout_s: float) -> dist.ProcessGroup | None:
    """Make the process group where there is none, of torchrun's ranks or of this process alone. Returns the group for tensors in
    host memory; None: the default group can."""
    if not dist.is_initialized():
        kind = "gloo" if device.type == "cpu" else "cpu:gloo,cuda:nccl"
        if device.type == "cuda":
            torch.cuda.set_device(device)
        timeout = timedelta(seconds=timeout_s)
        if "RANK" in os.environ:
            dist.init_process_group(kind, timeout=timeout)
        else:
            dist.init_process_group(kind, timeout=timeout, store=HashStore(), rank=0, world_size=1)
        return None
    if "gloo" in str(dist.get_backend_config()):
        return None
    group: Any = dist.new_group(backend="gloo", timeout=timedelta(seconds=timeout_s))
    return group


def _own_device() -> torch.device:
    if torch.cuda.is_available():
        return torch.device("cuda", int(os.environ.get("LOCAL_RANK", torch.cuda.current_device())))
    return torch.device("cpu")


def _agent() -> str:
    """The parent of this process on its host: torchrun's agent, which stays the same when ranks begin again."""
    return f"{socket.gethostname()}/{os.getppid()}"


def this_member(device: torch.device) -> Member:
    """This rank's node and GPU."""
    node = f"{socket.gethostname()}-{os.environ.get('GROUP_RANK', '0')}"
    return Member(node=node, gpu="cpu" if device.type == "cpu" else torch.cuda.get_device_name(device))
