"""Jobs of a model without a chain of layers, which is divided at marks, compared with one process."""

from typing import Any

import torch
import torch.distributed as dist
from safetensors.torch import load_file
from torch import Tensor, nn

from autohete_fx import cluster
from autohete_fx.errors import ClusterError
from autohete_fx.internals.pipelines import CROSS_WITHOUT_GRADIENT
from tests.branched import WIDTH, UNet, split_spec
from tests.dist.cluster_jobs import compare_states, made_optimizer, nodes_of, plan_of, rate
from tests.layers import EAGER

GLOBAL_BATCH, STEPS, CLIP, SEED = 6, 4, 0.5, 3


def made() -> nn.Module:
    return UNet(routes=CROSS_WITHOUT_GRADIENT)


def load(samples: range) -> tuple[Tensor, Tensor]:
    rows = [torch.randn(WIDTH, generator=torch.Generator().manual_seed(index)) for index in samples]
    return torch.stack(rows), torch.tensor([[index % 3] for index in samples])


def loss_of(out: dict[str, Any], batch: tuple[Tensor, Tensor]) -> Tensor:
    return (out["out"] - batch[0].flip(-1)).square().sum(-1).mean() / out["width"]


def trained_alone(optimizer: str) -> tuple[list[tuple[float, float]], list[Any]]:
    """Losses and norms of each step, and parameters with their optimizer states before it and at the end."""
    torch.manual_seed(SEED)
    model = made()
    optim = made_optimizer(optimizer)(list(model.parameters()))
    params, seen, after = dict(model.named_parameters()), [], []
    for step in range(STEPS):
        for group in optim.param_groups:
            group["lr"] = rate(step)
        batch = load(range(step * GLOBAL_BATCH, (step + 1) * GLOBAL_BATCH))
        loss = loss_of(model(*batch), batch)
        loss.backward()
        norm = nn.utils.clip_grad_norm_(model.parameters(), CLIP)
        optim.step()
        optim.zero_grad()
        seen.append((float(loss.detach()), float(norm)))
        states = {
            name: {key: torch.as_tensor(value).clone() for key, value in optim.state[param].items()}
            for name, param in params.items()
        }
        after.append(({name: param.detach().clone() for name, param in params.items()}, states))
    return seen, after


def trained(
    rows: list[Any] | None, stops: int, backend: str | None, optimizer: str, alone: Any, **more: Any
) -> dict[str, float]:
    """Train until a step; the largest differences of this rank from one process."""
    torch._dynamo.reset()
    plan = plan_of(rows) if rows else None
    job = cluster.join(
        made,
        loss_of,
        example=load(range(1)),
        global_batch=GLOBAL_BATCH,
        plan=plan,
        split_spec=split_spec(),
        optimizer=made_optimizer(optimizer),
        learning_rate=rate,
        max_grad_norm=CLIP,
        seed=SEED,
        backend=backend,
        member=cluster.Member(node=nodes_of(plan, dist.get_world_size())[dist.get_rank()], gpu="cpu"),
        **more,
    )
    seen, after = alone
    found = {"first": job.step, "loss": 0.0, "norm": 0.0, "weights": 0.0, "states": 0.0, "held": 0.0}
    while job.step < stops:
        done = job.train_step(load)
        found["loss"] = max(found["loss"], abs(done.loss - seen[done.step][0]))
        found["norm"] = max(found["norm"], abs(done.grad_norm - seen[done.step][1]))
    job.finish()
    if job.stage is not None:
        compare_states(job, after[stops - 1][0], after[stops - 1][1], found)
    return found


def jobs(root: str) -> dict[str, Any]:
    """Three stages that save, two unlike pipelines that go on; compiled stages; a job without a plan; and what is refused."""
    torch.set_default_dtype(torch.float64)
    alone = {name: trained_alone(name) for name in ("torch", "autohete")}
    store = cluster.Store(local=f"{root}/disk", cloud=f"{root}/cloud", every=1, cloud_every=1)
    found: dict[str, Any] = {
        "three": trained([(2, 3, [0, 2, 4])], 2, None, "torch", alone["torch"], store=store),
        "on": trained([(1, 2, [1, 4]), (4, 1, [4])], STEPS, None, "torch", alone["torch"], store=store),
        "autohete": trained([(2, 3, [2, 4])], 2, "autohete", "autohete", alone["autohete"], options=EAGER),
        "no plan": trained(None, 2, None, "torch", alone["torch"], cache_dir=f"{root}/cache"),
    }
    dist.barrier()
    if not dist.get_rank():
        cluster.export(store, f"{root}/model.safetensors")
        saved, (params, _) = load_file(f"{root}/model.safetensors"), alone["torch"][1][-1]
        found["exported"] = {name: float((saved[name] - param).abs().max()) for name, param in params.items()}
    try:
        trained([(3, 2, [4], 2)], 1, None, "torch", alone["torch"])
    except ClusterError as error:
        found["refused"] = str(error)
    return found
