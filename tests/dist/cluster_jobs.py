"""Jobs that train a plan's pipelines, compared with one process that has the whole model and the whole batch."""

import json
import shutil
import warnings
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

import autohete_fx
from autohete_fx import cluster
from autohete_fx.cluster.job.automatic import held_layers
from autohete_fx.cluster.model.pieces import Piece
from autohete_fx.cluster.plan import ClusterPlan, Pipeline, PipelineSchedule, Stage
from autohete_fx.errors import AutoHeteError
from autohete_fx.runtime import placement
from tests.tiny_models import GPT, VOCAB

TOKENS, STEPS, CLIP, SEED = 6, 4, 0.5, 3
UNPLANNED_BATCH = 7


class Model(nn.Module):
    """A tiny GPT with a loss of its own tokens; ``scale`` is a parameter of the root, which its head alone reads."""

    def __init__(self, depth: int, tied: bool, dropout: float = 0.0) -> None:
        super().__init__()
        self.body = GPT(depth, tied=tied)
        self.scale = nn.Parameter(torch.ones(()))
        self.unused = nn.Parameter(torch.ones(3))
        for module in self.modules():
            if isinstance(module, nn.Dropout):
                module.p = dropout

    def reset_parameters(self) -> None:
        nn.init.constant_(self.scale, 1.25)
        nn.init.constant_(self.unused, 1.0)

    def forward(self, ids: Tensor) -> Tensor:
        return self.scale * self.body(ids)


TP_PLAN = {
    "body.embed": "embedding_rowwise",
    "body.head": "colwise_gather_output",
    "body.layers.*.mlp.0": "colwise",
    "body.layers.*.mlp.2": "rowwise",
}


class Causal(nn.Module):
    """A transformers model that has a tensor-parallel plan of its own, whose norms of single heads stand between cut layers."""

    def __init__(self) -> None:
        super().__init__()
        from transformers import Qwen3Config, Qwen3ForCausalLM

        config = Qwen3Config(
            vocab_size=VOCAB,
            hidden_size=16,
            intermediate_size=24,
            num_hidden_layers=2,
            num_attention_heads=4,
            num_key_value_heads=2,
            head_dim=4,
            tie_word_embeddings=True,
            attention_dropout=0.0,
        )
        self.inner = Qwen3ForCausalLM(config)

    def forward(self, ids: Tensor) -> Tensor:
        return self.inner(input_ids=ids).logits


def made_model(depth: int, tied: bool) -> nn.Module:
    """The tiny GPT; of depth 0, the transformers model."""
    return Model(depth, tied) if depth else Causal()


def nodes_of(plan: ClusterPlan | None, ranks: int) -> list[str]:
    """By rank, its node in a plan of `plan_of`; ranks that have no part are nodes of their own."""
    if plan is None:
        return [f"node-{rank}" for rank in range(ranks)]
    named = [stage.node for _, _, stage in plan.stages() for _ in range(stage.num_gpus)]
    return [*named, *(f"node-{rank}" for rank in range(len(named), ranks))]


def loss_of(logits: Tensor, ids: Tensor) -> Tensor:
    return F.cross_entropy(logits[:, :-1].flatten(0, 1), ids[:, 1:].flatten())


def load(samples: range) -> Tensor:
    rows = [torch.randint(VOCAB, (TOKENS,), generator=torch.Generator().manual_seed(index)) for index in samples]
    return torch.stack(rows)


def rate(step: int) -> float:
    return 0.01 / (1 + step)


def plan_of(rows: Sequence[Any], schedule: str = "1f1b") -> ClusterPlan:
    """Of (micro-batch, micro-batches, last layers of stages, and degree and shards of all stages, or by stage) for each pipeline.

    Every stage is a node, called after its first rank. Every second one recomputes.
    """
    pipelines, node = [], 0
    for micro_batch, micro_batches, lasts, *units in rows:
        stages, (degree, shards) = [], (*units, 1, 1)[:2]
        degrees, counts = (given if isinstance(given, list) else [given] * len(lasts) for given in (degree, shards))
        for index, (first, last) in enumerate(zip([0, *(last + 1 for last in lasts)], lasts, strict=False)):
            stages.append(
                Stage(
                    node=f"node-{node}",
                    gpu="cpu",
                    tp=degrees[index],
                    first=first,
                    last=last,
                    recomputed=(node + len(pipelines) + index) % 2 * (last + 1 - first),
                    shards=counts[index],
                )
            )
            node += stages[-1].num_gpus
        pipelines.append(Pipeline(stages=tuple(stages), micro_batch=micro_batch, micro_batches=micro_batches))
    return ClusterPlan(model="tiny", pipelines=tuple(pipelines), schedule=PipelineSchedule(schedule))


def backend_of(plan: ClusterPlan) -> str | None:
    """Stages run as they are, but where shards need a compiler."""
    return "eager" if plan.has_shards else None


def trained_alone(
    depth: int, tied: bool, global_batch: int, optimizer: str, steps: int = STEPS
) -> tuple[list[Any], dict[str, Tensor], dict[str, Tensor], dict[str, Any]]:
    torch.manual_seed(SEED)
    model = made_model(depth, tied).train()
    start = {name: param.detach().clone() for name, param in model.named_parameters()}
    optim = made_optimizer(optimizer)(list(model.parameters()))
    seen = []
    for step in range(steps):
        for group in optim.param_groups:
            group["lr"] = rate(step)
        ids = load(range(step * global_batch, (step + 1) * global_batch))
        loss = loss_of(model(ids), ids)
        loss.backward()
        norm = nn.utils.clip_grad_norm_(model.parameters(), CLIP)
        optim.step()
        optim.zero_grad()
        seen.append((float(loss), float(norm)))
    params = dict(model.named_parameters())
    states = {name: dict(optim.state[param]) for name, param in params.items()}
    return seen, start, {name: param.detach() for name, param in params.items()}, states


def made_optimizer(name: str) -> Any:
    if name == "autohete":
        return lambda params: autohete_fx.AdamW(params, lr=1.0, weight_decay=0.1)
    return lambda params: torch.optim.AdamW(params, lr=1.0, weight_decay=0.1)


def joined(plan: ClusterPlan, build: Callable[[], nn.Module] | None = None, **how: Any) -> cluster.Job:
    """A job of a plan: of the tiny GPT, in eager code, on the plan's nodes, but for ``how``."""
    nodes = nodes_of(plan, dist.get_world_size())
    given = {
        "example": load(range(1)),
        "global_batch": plan.global_batch,
        "plan": plan,
        "optimizer": made_optimizer("torch"),
        "backend": None,
        "member": cluster.Member(node=nodes[dist.get_rank()], gpu="cpu"),
    }
    return cluster.join(build or (lambda: Model(3, True)), loss_of, **{**given, **how})


def warned() -> list[list[str]]:
    """The file and the words of each warning of a job whose plan has states on the host and shards."""
    torch.set_default_dtype(torch.float64)
    plan = plan_of([(2, 1, [4], 1, 2)])
    (pipeline,) = plan.pipelines
    stages = tuple(replace(stage, offloaded=2) for stage in pipeline.stages)
    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("always")
        cluster.join(
            lambda: made_model(3, True),
            loss_of,
            example=load(range(1)),
            global_batch=plan.global_batch,
            plan=replace(plan, pipelines=(replace(pipeline, stages=stages),)),
            optimizer=made_optimizer("torch"),
            backend="eager",
            member=cluster.Member(node="node-0", gpu="cpu"),
        )
    return [[Path(each.filename).name, str(each.message)] for each in found if "the plan" in str(each.message)]


def early_sums(job: cluster.Job) -> list[int]:
    """By step from now on, how many sums this rank has begun when its last backward pass ends."""
    seen: list[int] = []
    run: Any = job._run
    passes = run and run.passes

    def noted(*args: Any) -> Tensor:
        found = passes(*args)
        seen.append(job._sums._num_begun)
        return found

    if run is not None:
        run.passes = noted
    return seen


def difference(
    depth: int,
    tied: bool,
    rows: Sequence[Any] | None,
    backend: str | None,
    schedule: str,
    optimizer: str,
    steps: int = STEPS,
) -> dict[str, float]:
    """The largest differences of a job from one process, of this rank; ``rows`` None: the job makes its plan."""
    torch.set_default_dtype(torch.float64)
    plan = plan_of(rows, schedule) if rows else None
    global_batch = plan.global_batch if plan else UNPLANNED_BATCH
    seen, _, params, states = trained_alone(depth, tied, global_batch, optimizer, steps)
    rank = dist.get_rank()
    job = cluster.join(
        lambda: made_model(depth, tied),
        loss_of,
        example=load(range(1)),
        global_batch=global_batch,
        plan=plan,
        optimizer=made_optimizer(optimizer),
        learning_rate=rate,
        max_grad_norm=CLIP,
        seed=SEED,
        backend=backend,
        member=cluster.Member(node=nodes_of(plan, dist.get_world_size())[rank], gpu="cpu"),
        tp_plan=TP_PLAN if depth else None,
    )
    found = {"loss": 0.0, "norm": 0.0, "weights": 0.0, "states": 0.0, "held": 0.0}
    early = early_sums(job)
    for loss, norm in seen:
        step = job.train_step(load)
        found["loss"] = max(found["loss"], abs(step.loss - loss))
        found["norm"] = max(found["norm"], abs(step.grad_norm - norm))
    found["early"] = sum(early)
    if job.stage is not None:
        assert job.optimizer is not None
        compare_states(job, params, states, found)
    return found


def compare_states(job: cluster.Job, params: Any, states: Any, found: dict[str, Any]) -> None:
    """Note the largest differences of this rank's parts of weights and optimizer states from whole ones."""
    assert job.optimizer is not None
    found.setdefault("held", 0.0)
    for name, param in job.params.items():
        piece, whole = job.held[name], params[name]
        found["held"] += param.numel()
        apart = piece.of(param.detach(), piece) - piece.of(whole, Piece(name))
        found["weights"] = max(found["weights"], float(apart.abs().max()))
        mine = job.optimizer.state[param]
        assert set(mine) == set(states[name]), (name, set(mine), set(states[name]))
        for key, value in states[name].items():
            expected, own = torch.as_tensor(value), torch.as_tensor(mine[key])
            if expected.shape == whole.shape:
                expected, own = piece.of(expected, Piece(name)), piece.of(own, piece)
            apart = own.double() - expected.double()
            found["states"] = max(found["states"], float(apart.abs().max()))


def differences(cases: Sequence[Any]) -> list[dict[str, float]]:
    """`difference` of each case, one after another."""
    found = []
    for case in cases:
        torch._dynamo.reset()
        found.append(difference(*case))
    return found


def leg(
    root: str,
    rows: Sequence[Any],
    nodes: Sequence[str],
    steps: int,
    store: dict[str, Any],
    optimizer: str = "torch",
    options: dict[str, Any] | None = None,
    depth: int = 3,
) -> dict[str, Any]:
    """Go on with the job of a store until so many steps are done, on nodes of these names, of each rank, whose disks are folders of
    ``root``; with our backend where there are options.

    Returns the step it began with, what was read from where, and the largest differences from one process.
    """
    torch.set_default_dtype(torch.float64)
    plan, rank = plan_of(rows), dist.get_rank()
    moved = dict(zip(nodes_of(plan, len(nodes)), nodes, strict=True))
    pipelines = tuple(
        replace(pipeline, stages=tuple(replace(stage, node=moved[stage.node]) for stage in pipeline.stages))
        for pipeline in plan.pipelines
    )
    plan = replace(plan, pipelines=pipelines)
    seen, start, params, states = trained_alone(depth, True, plan.global_batch, optimizer, steps)
    logged = Path(root) / f"log-{rank}.jsonl"
    logged.unlink(missing_ok=True)
    try:
        job = cluster.join(
            lambda: Model(depth, True),
            loss_of,
            example=load(range(1)),
            global_batch=plan.global_batch,
            plan=plan,
            optimizer=made_optimizer(optimizer),
            store=cluster.Store(**{"local": f"{root}/{nodes[rank]}", "every": 2, "cloud_every": 4, **store}),
            learning_rate=rate,
            max_grad_norm=CLIP,
            weights=lambda name: start[name],
            backend="autohete" if options else backend_of(plan),
            options=options,
            member=cluster.Member(node=nodes[rank], gpu="cpu"),
            tp_plan=TP_PLAN,
            log=str(logged),
        )
    except AutoHeteError as error:
        return {"error": str(error)}
    found: dict[str, Any] = {"first": job.step, "loss": 0.0, "weights": 0.0, "states": 0.0}
    found["early"] = early_sums(job)
    while job.step < steps:
        step = job.train_step(load)
        found["loss"] = max(found["loss"], abs(step.loss - seen[step.step][0]))
    saved = job.finish()
    if job.stage is not None:
        compare_states(job, params, states, found)
    disks = held_layers(cluster.Store(local=f"{root}/{nodes[rank]}"), job.layer_map, job.members, None)
    found["layers"] = {node: sorted(layers) for node, layers in disks.items()}
    newest = autohete_fx.compilations()[-1:] if options else ()
    found["states at"] = sorted({d.optimizer.value for c in newest for d in c.plan.decisions})
    rows_logged = [json.loads(line) for line in logged.read_text().splitlines()] if rank == 0 else []
    joined = next((row for row in rows_logged if row["event"] == "join"), None)
    found |= {
        "bytes": joined["bytes"] if joined else None,
        "saved": [saved.local, saved.cloud],
        "save_error": job.saver.error if job.saver else None,
    }
    return found


def legs(root: str, given: Sequence[tuple[Any, Sequence[str], int, str | None, Sequence[str]]]) -> list[dict[str, Any]]:
    """`leg` of (rows, nodes, steps, cloud, what of ``root`` is lost before) in turn, and the steps saved on this rank's disk."""
    found = []
    for rows, nodes, steps, cloud, lost in given:
        dist.barrier()
        for path in (path for pattern in lost if dist.get_rank() == 0 for path in Path(root).glob(pattern)):
            shutil.rmtree(path) if path.is_dir() else path.unlink()
        dist.barrier()
        row = leg(root, rows, nodes, steps, {"cloud": cloud})
        saves = Path(root, nodes[dist.get_rank()]).glob("step-*")
        found.append({**row, "steps saved": sorted(int(path.name.split("-")[1]) for path in saves)})
    return found


def states_on_hosts(root: str) -> list[dict[str, Any]]:
    """A job whose stages keep optimizer states on hosts, and plain ones that go on with it, and at last stages with states on
    disk."""
    placement.SMALLEST_COPY_BYTES = 512
    stages, nodes = [(2, 4, [2, 4])], ["a", "b"]
    budget = {
        "memory_budget": 150_000,
        "allow": ["host_optimizer"],
        "inner_backend": "eager",
        "profile": "analytic",
        "solver_time_limit_s": 1,
    }
    found = []
    disk = {**budget, "allow": ["host_optimizer", "disk_optimizer"], "host_budget": 75_000}
    for steps, options in ((4, budget), (6, None), (8, disk)):
        torch._dynamo.reset()
        found.append(leg(root, stages, nodes, steps, {}, "autohete", options))
        dist.barrier()
    return found
