"""Ranks that do not agree while they compile: all of them get an error that names what differs, in time."""

import contextlib
import os
import shutil
import tempfile
import time
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import fx, nn
from torch._dynamo.utils import counters

import autohete_fx
from autohete_fx import backend
from autohete_fx.compiler import captured, graph
from autohete_fx.compiler.agreement import Agreement
from autohete_fx.compiler.graph import GraphCompiler
from autohete_fx.internals.versions import timeout_of
from autohete_fx.runtime import cpu_counter
from autohete_fx.runtime.shard import shard
from tests.dist import ranks
from tests.dist.sharded import mesh, refusal
from tests.layers import EAGER, Layers


@pytest.fixture(scope="module")
def of_two(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[Any]]:
    functions = [disagreements, failures, one_cache, changed_gradients]
    return ranks.run_each(functions, tmp_path_factory.mktemp("ranks"))


def made(depth: int = 2) -> nn.Module:
    torch._dynamo.reset()
    torch.manual_seed(0)
    model = Layers()
    model.layers = model.layers[:depth]
    return shard(model, mesh())


def step(batch: int = 64, depth: int = 2, **options: Any) -> nn.Module:
    model = made(depth)
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
    found["infeasible"] = refusal(lambda: step(memory_budget=1 << 16))
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


@pytest.mark.slow
def test_ranks_that_differ_get_errors_that_name_it(of_two: dict[str, list[Any]]):
    for rank, found in enumerate(of_two["disagreements"]):
        assert f"the options: memory_budget is {20 << 20} on rank 0; {21 << 20} on rank 1" in found["options"]
        assert "differ in the graph: inputs is [[64, 128]] on rank 0; [[65, 128]] on rank 1" in found["graph"]
        assert ("rank 1 failed: PassError" if rank == 0 else "PassError: the pass fails_on_the_second") in found[
            "failure"
        ]
        assert found["infeasible"].startswith("InfeasiblePlanError") and found["fine"] == "went on"
        assert found["numbers"] == [9, 7, 1, 9, "of rank 0", "same", None, None]
        assert "rank 0 profile; rank 1 plan" in found["places"]


PARTS = {
    "model": (backend, "find_model"),
    "machine": (captured, "machine_of"),
    "allocator": (cpu_counter, "keep_freed"),
    "placement": (graph, "place_parameters"),
    "report": (backend, "reported"),
}
"""Of a compilation, in order: a module, and the function that it calls for that."""


def failures() -> dict[str, Any]:
    """By where the second rank fails, the errors of this rank, seconds until then, and of those that a group waits."""

    def fail(*_: Any, **__: Any) -> None:
        raise autohete_fx.AutoHeteError(f"no {where}")

    second, found = dist.get_rank() == 1, {}
    for where in ("options", *PARTS):
        options: dict[str, Any] = {"inner_backend": "nonsense"} if second and where == "options" else {}
        patched = mock.patch.object(*PARTS[where], fail) if second and where in PARTS else None
        began = time.monotonic()
        with patched or contextlib.nullcontext():
            found[where] = refusal(lambda options=options: step(memory_budget=20 << 20, **options))
        found[f"{where}_s"] = time.monotonic() - began
    return {**found, "fine": refusal(step), "group_s": timeout_of(dist.group.WORLD, "cpu").total_seconds()}


@pytest.mark.slow
def test_a_rank_that_fails_anywhere_in_a_compilation_is_named_at_once(of_two: dict[str, list[Any]]):
    first, second = of_two["failures"]
    errors = {where: f"AutoHeteError: no {where}" for where in PARTS}
    for where, error in {"options": "OptionError: unknown value of option 'inner_backend'", **errors}.items():
        assert second[where].startswith(error)
        assert first[where].startswith("ShardError") and f"rank 1 failed: {error}" in first[where]
    assert first["fine"] == second["fine"] == "went on"
    waited_s = [found[f"{where}_s"] for found in (first, second) for where in ("options", *errors)]
    assert max(waited_s) < 60 < first["group_s"] / 10


def changed_gradients() -> list[str]:
    """What becomes of a micro-batch after gradients were clipped that a step has taken, that none has, and that were set to
    zero."""
    model, found = step(), []

    def add() -> None:
        model(torch.ones(64, 128)).backward()

    for change in (lambda: nn.utils.clip_grad_norm_(model.parameters(), 1e9),) * 2 + (
        lambda: model.zero_grad(set_to_none=False),
    ):
        change()
        found.append(refusal(add))
    return found


@pytest.mark.slow
def test_gradients_that_were_clipped_between_micro_batches_are_refused(of_two: dict[str, list[Any]]):
    for taken, clipped, zeroed in of_two["changed_gradients"]:
        assert taken == zeroed == "went on"
        assert "were changed between backward and the next forward" in clipped and "max_grad_norm" in clipped


def one_cache() -> dict[str, Any]:
    own = Path(tempfile.mkdtemp())
    os.environ["AUTOHETE_CACHE_DIR"] = str(own)
    results = []
    for _ in range(2):
        model = step()
        results.append([p.detach().clone() for p in model.parameters()])
        notes = autohete_fx.compilations()[-1].compile_s
        del model
        if dist.get_rank() == 1:
            shutil.rmtree(own)
    shutil.rmtree(own, ignore_errors=True)
    return {"same": all(map(torch.equal, *results)), "solved again": "solving" in notes}


def cached_code(folder: str) -> dict[str, Any]:
    """Of compilations with caches of ranks' own, of which the second rank loses one before some: the hits of AOTAutograd's
    cache, by how much each code was above the budget, and whether the step was the same."""
    own, hits, results = Path(folder) / str(dist.get_rank()), {}, []
    judged, judge = [], GraphCompiler._judge

    def missing_once(compiler: GraphCompiler, *, is_last: bool) -> int:
        """Of the first code the second rank says that it takes more than the budget."""
        judged.append(judge(compiler, is_last=is_last) or (4096 if dist.get_rank() == 1 and not judged else 0))
        return judged[-1]

    os.environ |= {"AUTOHETE_CACHE_DIR": str(own / "plans"), "TORCHINDUCTOR_CACHE_DIR": str(own / "code")}
    for lost in ("all", "none", "code", "plans"):
        if dist.get_rank() == 1 and lost in ("code", "plans"):
            shutil.rmtree(own / lost)
        counters["aot_autograd"].clear()
        with mock.patch.object(GraphCompiler, "_judge", missing_once):
            model = step(depth=1, inner_backend="inductor")
        hits[lost] = counters["aot_autograd"]["autograd_cache_hit"]
        results.append([p.detach().clone() for p in model.parameters()])
    return {
        "hits": hits,
        "judged": judged,
        "same": all(all(map(torch.equal, results[0], other)) for other in results[1:]),
    }


@pytest.mark.slow
def test_code_is_found_in_the_cache_of_each_rank_where_all_have_the_plan(tmp_path: Path):
    first, second = ranks.run("tests.dist.test_shard_agreement.cached_code", tmp_path, str(tmp_path))
    assert first == {"hits": {"all": 0, "none": 1, "code": 1, "plans": 0}, "judged": [0] * 5, "same": True}
    # All compiled again for the second rank, and found that again.
    assert second == {"hits": {"all": 0, "none": 1, "code": 0, "plans": 0}, "judged": [4096, 0, 0, 0, 0], "same": True}


@pytest.mark.slow
def test_what_one_rank_has_cached_counts_for_none(of_two: dict[str, list[Any]]):
    assert of_two["one_cache"] == [{"same": True, "solved again": True}] * 2
