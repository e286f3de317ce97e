"""`join`: take part in a training job, whatever GPUs there are today.

The ranks of the process group say what they have, and the plan is deployed on them. Each rank builds, compiles and restores its
own stage alone. Training goes on with the newest complete save.
"""

import time
import warnings
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch

from autohete_fx.cluster.deploy import Member
from autohete_fx.cluster.job.automatic import automatic_plan
from autohete_fx.cluster.job.job import Job, JobLog, MakeOptimizer, Recipe
from autohete_fx.cluster.job.rank_part import RankPart, take_part
from autohete_fx.cluster.job.rendezvous import Rendezvous, meet
from autohete_fx.cluster.model.batches import Batch, batch_of
from autohete_fx.cluster.model.building import BuildModel
from autohete_fx.cluster.model.layers import LayerMap, map_layers
from autohete_fx.cluster.model.marks import SplitSpec, with_marks
from autohete_fx.cluster.model.tensor_parallel import TpPlan
from autohete_fx.cluster.plan import ClusterPlan
from autohete_fx.cluster.stages.compiler import StageCompiler
from autohete_fx.cluster.stages.module import Loss
from autohete_fx.cluster.stages.stage import Weights
from autohete_fx.cluster.store.about import check_optimizer, differences
from autohete_fx.cluster.store.restore import Restored, restore
from autohete_fx.cluster.store.states import restore_states
from autohete_fx.cluster.store.store import Store
from autohete_fx.errors import ClusterError
from autohete_fx.internals.cut_off import remove_cut_off_libraries
from autohete_fx.optim.arguments import checked_norm

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
        learning_rate: of a step's index, for all groups of the optimizer, whatever rates they have; None: as the groups say.
        max_grad_norm: to which the norm of all gradients is clipped, above 0; None: not.
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
        OptimizerStateError: ``max_grad_norm`` is no number above 0.
    """
    start = time.perf_counter()
    _check_plan(plan)
    batch = batch_of(example)
    recipe = Recipe(
        build_model=with_marks(build_model, split_spec) if split_spec else build_model,
        loss=loss,
        global_batch=global_batch,
        make_optimizer=optimizer,
        learning_rate=learning_rate,
        max_grad_norm=checked_norm(max_grad_norm),
        seed=seed,
    )
    compiler = StageCompiler(backend=backend, options=options, memory_budget=memory_budget)
    ranks = meet(device, member, timeout_s)
    job_log = JobLog(log, ranks.rank == 0)
    if backend is not None:
        for library in remove_cut_off_libraries():
            job_log.say(f"{library} was cut off when a rank ended, and is compiled again")

    def measured() -> ClusterPlan:
        return automatic_plan(
            recipe,
            batch,
            compiler,
            ranks,
            cache_dir=cache_dir,
            store=store,
            tp_plan=tp_plan,
            expected_lifetime_s=expected_lifetime_s,
            say=job_log.say,
        )

    chosen = measured() if plan is None else _given(plan, recipe, batch, ranks)
    part = take_part(chosen, recipe, batch, ranks, tp_plan=tp_plan, is_compiled=backend is not None)
    node = ranks.members[ranks.rank].node
    restored = restore(store, part.pieces(), list(part.layer_map.readers), node, ranks.group) if store else None
    weights = restored.weight if restored else weights
    job = ranks.on_each(
        lambda: _begun(recipe, part, ranks, compiler, batch, weights, store=store, restored=restored, job_log=job_log)
    )
    for words in compiler.more_memory(job.deployment.plan, job.optimizer):
        warnings.warn(words, stacklevel=2)
    _report(job, job_log, restored, ranks, time.perf_counter() - start)
    if backend is not None:
        job_log.say("the first step compiles the stages, where no cache has them")
    job.notice.listen()  # a join that fails leaves SIGTERM as it was
    return job


def _check_plan(plan: object) -> None:
    if not (plan is None or callable(plan) or isinstance(plan, ClusterPlan)):
        raise ClusterError(
            f"plan={plan!r} was given. Expected was a ClusterPlan, or a function that makes one. Read a file with ClusterPlan.load"
        )


def _given(plan: ClusterPlan | MakePlan, recipe: Recipe, example: Batch, ranks: Rendezvous) -> ClusterPlan:
    """The plan of an argument: itself, or what the function makes."""
    if isinstance(plan, ClusterPlan):
        return plan
    return ranks.on_each(lambda: plan(ranks.members, map_layers(recipe.build_model, example.of_samples(1))))


def _begun(
    recipe: Recipe,
    part: RankPart,
    ranks: Rendezvous,
    compiler: StageCompiler,
    example: Batch,
    weights: Weights,
    *,
    store: Store | None,
    restored: Restored | None,
    job_log: JobLog,
) -> Job:
    """This rank's part of the job, which it makes alone."""
    stage = part.stage(recipe, weights, ranks.device)
    job = Job(
        recipe,
        part.deployment,
        ranks.members,
        part.layer_map,
        layout=part.layout,
        unit=part.unit,
        stage=stage,
        run=part.stage_run(stage, compiler, example, ranks.device) if stage else None,
        group=ranks.group,
        watch=part.watch,
        groups=part.sums,
        store=store,
        generation=ranks.generation,
        job_log=job_log,
        began=restored.save if restored else None,
    )
    if restored is not None:
        job.step = restored.step
        check_optimizer(restored.about, job.optimizer)
        restore_states(job.params, job.optimizer, restored.tensors, job.held)
    return job


def _report(
    job: Job,
    job_log: JobLog,
    restored: Restored | None,
    ranks: Rendezvous,
    seconds: float,
) -> None:
    """Tell how the job begins: the plan, what was read from where, and how long it took."""
    rows = ranks.gather((restored.num_bytes, restored.seconds) if restored else ({}, {}))
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
        if words := differences(restored.about, job.facts):
            job_log.say(words)
    job_log.write(
        "join",
        step=job.step,
        members=[[member.node, member.gpu] for member in job.members],
        agents=ranks.agents,
        sample_tokens=job.layer_map.sample_tokens,
        plan=job.deployment.plan.to_json(),
        idle=len(job.deployment.idle),
        seconds=seconds,
        bytes=num_bytes,
        restore_s=parts_s,
        restored=restored is not None,
        missing_bytes=restored.missing_bytes if restored else 0,
    )
