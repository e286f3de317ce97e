"""Ranks that do not agree while they compile: all of them get an error that names what differs, in time."""

import os
import shutil
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import fx, nn

import autohete_fx
from autohete_fx.compiler.agreement import Agreement
from autohete_fx.runtime.shard import shard
from tests.dist import ranks
from tests.dist.sharded import mesh, refusal
from tests.layers import EAGER, Layers


def made() -> nn.Module:
    torch._dynamo.reset()
    torch.manual_seed(0)
    return shard(Layers(), mesh())


def step(batch: int = 64, **options: Any) -> nn.Module:
    model = made()
    model.compile(backend="autohete", options={**EAGER, "solver_time_limit_s": 1, **options})
    optimizer = autohete_fx.AdamW(model.parameters())
    model(torch.ones(batch, 128)).backward()
    optimizer.step()
    return model


def fails_on_the_second(gm: fx.GraphModule, context: object) -> None:
    if dist.get_rank() == 1:
        raise ValueError("not here")


def disagreements() -> dict[str, Any]:
    rank, found = dist.get_rank(), {}
    found["options"] = refusal(lambda: step(memory_budget=(20 + rank) << 20))
    found["graph"] = refusal(lambda: step(batch=64 + rank))
    found["failure"] = refusal(lambda: step(passes={"joint": [fails_on_the_second]}))
    found["infeasible"] = refusal(lambda: step(memory_budget=1 << 18))
    found["fine"] = refusal(step)
    agreement = Agreement(made().parameters())
    found["numbers"] = [
        agreement.least("budget", 10 - rank),
        agreement.least("budget", None if rank else 7),
        agreement.most("above", rank),
        agreement.share_of_host(2 * 9 + rank),
        agreement.first("plan", lambda: f"of rank {rank}"),
        agreement.common("cache", "same"),
        agreement.common("cache", f"of rank {rank}"),
        agreement.common("cache", "one has it" if rank else None),
    ]
    found["places"] = refusal(lambda: agreement.exchange("plan" if rank else "profile", 1))
    return found


def test_ranks_that_differ_get_errors_that_name_it(tmp_path: Path):
    for rank, found in enumerate(ranks.run("tests.dist.test_shard_agreement.disagreements", tmp_path)):
        assert f"the options: memory_budget is {20 << 20} on rank 0; {21 << 20} on rank 1" in found["options"]
        assert "differ in the graph: inputs is [[64, 128]] on rank 0; [[65, 128]] on rank 1" in found["graph"]
        assert ("rank 1 failed: PassError" if rank == 0 else "PassError: the pass fails_on_the_second") in found["failure"]
        assert found["infeasible"].startswith("InfeasiblePlanError") and found["fine"] == "went on"
        assert found["numbers"] == [9, 7, 1, 9, "of rank 0", "same", None, None]
        assert "rank 0 profile; rank 1 plan" in found["places"]


def one_cache(folder: str) -> dict[str, Any]:
    own = Path(folder) / str(dist.get_rank())
    os.environ["AUTOHETE_CACHE_DIR"] = str(own)
    results = []
    for _ in range(2):
        model = step()
        results.append([p.detach().clone() for p in model.parameters()])
        notes = autohete_fx.compilations()[-1].compile_s
        del model
        if dist.get_rank() == 1:
            shutil.rmtree(own)
    return {"same": all(map(torch.equal, *results)), "solved again": "solving" in notes}


def test_what_one_rank_has_cached_counts_for_none(tmp_path: Path):
    found = ranks.run("tests.dist.test_shard_agreement.one_cache", tmp_path, str(tmp_path))
    assert found == [{"same": True, "solved again": True}] * 2
