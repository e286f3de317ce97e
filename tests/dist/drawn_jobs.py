"""Jobs of plans that hypothesis draws, of dropout, and of a rank that is told to leave."""

import functools
import json
import os
import signal
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from hypothesis import given, settings
from hypothesis import strategies as st

from autohete_fx import cluster
from autohete_fx.cluster.report.history import read_history
from autohete_fx.errors import ClusterError
from tests.dist.cluster_jobs import Model, difference, joined, load, plan_of

LAST = 4
"""Index of the model's last layer."""


@st.composite
def drawn_rows(draw: st.DrawFn, ranks: int) -> list[Any]:
    """Rows of `plan_of` for at most so many ranks."""
    free, rows = ranks, []
    while free and (not rows or draw(st.booleans())):
        depth = draw(st.integers(1, min(free, LAST)))
        ends = draw(st.sets(st.integers(0, LAST - 1), min_size=depth - 1, max_size=depth - 1))
        rows.append((draw(st.integers(1, 3)), depth + draw(st.integers(0, 2)), [*sorted(ends), LAST]))
        free -= depth
    return rows


def exact(examples: int, steps: int, limit: float) -> list[Any]:
    """Train plans that hypothesis draws on the first rank for all; it shrinks one that is not exact. Returns what was trained."""
    trained: list[Any] = []

    def follow(rows: list[Any] | None) -> bool:
        said: list[Any] = [rows]
        dist.broadcast_object_list(said)
        if said[0] is None:
            return False
        torch._dynamo.reset()
        found: list[Any] = [None] * dist.get_world_size()
        mine = difference(LAST - 1, len(said[0]) % 2 == 0, said[0], None, "1f1b", "torch", steps)
        dist.all_gather_object(found, mine)
        trained.append(said[0])
        worst = {key: max(row[key] for row in found) for key in ("loss", "norm", "weights", "states")}
        assert dist.get_rank() or max(worst.values()) < limit, (worst, said[0])
        return True

    @settings(max_examples=examples, deadline=None, database=None, derandomize=True)
    @given(drawn_rows(dist.get_world_size()))
    def lead(rows: list[Any]) -> None:
        follow(rows)

    if dist.get_rank():
        while follow(None):
            pass
    else:
        try:
            lead()
        finally:
            follow(None)
    return trained


def of_another_length() -> str:
    """What a rank is told of batches that are longer than the example."""
    torch.set_default_dtype(torch.float64)
    job = joined(plan_of([(1, 2, [2, 4])]))
    try:
        job.train_step(lambda samples: load(samples).repeat(1, 2))
    except ClusterError as error:
        return str(error)
    return "nothing"


def told(root: str) -> dict[str, Any]:
    """Losses of two jobs of one plan with dropout, and of one with another seed. In the last of them rank 2, which alone has its
    layers, is told to leave in its second step, and ranks 0 and 1 go on in a smaller job."""
    torch.set_default_dtype(torch.float64)
    rank, losses = dist.get_rank(), []
    store = cluster.Store(local=f"{root}/{rank}", every=100, cloud_every=100)

    def job_of(rows: Any, seed: int, log: str | None = None) -> cluster.Job:
        model = functools.partial(Model, LAST - 1, True, dropout=0.3)
        return joined(plan_of(rows), model, seed=seed, store=store if log else None, log=log)

    rows = [(1, 4, [1, 2, 4])]
    for seed in (3, 3, 4):
        job = job_of(rows, seed)
        losses.append([job.train_step(load).loss for _ in range(2)])
    log, ended = f"{root}/log-{rank}.jsonl", ""
    job = job_of(rows, 4, log)
    try:
        job.train_step(load)
        if rank == 2:
            os.kill(os.getpid(), signal.SIGTERM)
        job.train_step(load)
    except ClusterError as error:
        ended = str(error)
    except SystemExit as error:
        ended = f"left with {error.code}"
    expected = {name: param.detach().clone() for name, param in job.params.items()}
    whole: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(whole, expected)
    if rank == 2:
        return {"losses": losses, "ended": ended}
    dist.destroy_process_group()
    dist.init_process_group("gloo", init_method=f"file://{root}/smaller", rank=rank, world_size=2)
    again = job_of([(1, 4, [2, 4])], 4, log)
    params = {name: param for part in whole for name, param in part.items()}
    history = read_history(log) if not rank else None
    read = (
        [json.loads(line)["bytes"] for line in Path(log).read_text().splitlines() if '"join"' in line]
        if history
        else []
    )
    return {
        "losses": losses,
        "ended": ended,
        "step": again.step,
        "equal": all(torch.equal(param, params[name]) for name, param in again.params.items()),
        "told": history.starts[0].told if history else [],
        "handed_over": history.starts[0].handed_over if history else 0,
        "read": read,
    }
