"""Checkpoints of sharded models: saved by two ranks, loaded by three, by one, and by a model that was never sharded."""

from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.tensor import DTensor

import autohete_fx
from autohete_fx.runtime.shard import shard
from tests.dist import ranks
from tests.dist.sharded import make, mesh, refusal, tokens, whole


def stepped(model: torch.nn.Module, optimizer: torch.optim.Optimizer, steps: int) -> torch.nn.Module:
    model.compile(backend="aot_eager")
    for step in range(steps):
        model(tokens(step, 0)).backward()  # the same batch on each rank
        optimizer.step()
        optimizer.zero_grad()
    return model


def ours(params: Any) -> torch.optim.Optimizer:
    return autohete_fx.AdamW(params, lr=1e-2)


def plain(params: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(params, lr=1e-2, fused=True)


def expected(optimizer_of: Any) -> dict[str, Tensor]:
    """Parameters and states of one process after two steps, by their keys in a checkpoint."""
    model = make(dropout=0.0, layers=1)
    optimizer = optimizer_of(model.parameters())
    stepped(model, optimizer, 2)
    return {f"model.{n}": p.detach() for n, p in model.named_parameters(remove_duplicate=False)} | {
        f"optim.state.{n}.{key}": value
        for n, p in model.named_parameters()
        for key, value in optimizer.state.get(p, {}).items()
    }


def is_close(given: Any, expected: Tensor) -> bool:
    full = given.full_tensor() if isinstance(given, DTensor) else given
    return torch.allclose(full.double(), expected.double(), rtol=1e-12, atol=1e-14)


def save(folder: str) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for name, optimizer_of in {"ours": ours, "plain": plain}.items():
        model = shard(make(dropout=0.0, layers=1), mesh())
        optimizer = optimizer_of(model.parameters())
        stepped(model, optimizer, 2)
        state = {"model": get_model_state_dict(model), "optim": get_optimizer_state_dict(model, optimizer)}
        assert torch.equal(state["model"]["row"].to_local(), model.state_dict()["row"].to_local())
        flat = {f"model.{key}": value for key, value in state["model"].items()}
        flat |= {f"optim.state.{n}.{k}": v for n, entry in state["optim"]["state"].items() for k, v in entry.items()}
        right = expected(optimizer_of)
        found[name] = sorted(set(right) - set(flat)) + [k for k in right if not is_close(flat[k], right[k])]
        found[f"{name} shards"] = sum(isinstance(value, DTensor) for value in flat.values())
        dcp.save(state, checkpoint_id=f"{folder}/{name}")
        full = get_model_state_dict(model, options=StateDictOptions(full_state_dict=True))
        found[f"{name} full"] = not any(isinstance(value, DTensor) for value in full.values())
    return found


def load(folder: str) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for name, optimizer_of in {"ours": ours, "plain": plain}.items():
        model = make(dropout=0.0, layers=1, seed=5)
        if dist.get_world_size() > 1:
            shard(model, mesh())
        optimizer = optimizer_of(model.parameters())
        state = {"model": get_model_state_dict(model), "optim": get_optimizer_state_dict(model, optimizer)}
        # Asked for its states, a new optimizer has some of parameters that nothing trains, too.
        dcp.load(state, checkpoint_id=f"{folder}/{name}", planner=DefaultLoadPlanner(allow_partial_load=True))
        set_model_state_dict(model, state["model"])
        set_optimizer_state_dict(model, optimizer, state["optim"])
        # Two steps were taken before they were saved: the next ones are those of a process that was never stopped.
        reference = make(dropout=0.0, layers=1)
        other = optimizer_of(reference.parameters())
        stepped(reference, other, 2)
        for trained, theirs in ((model, optimizer), (reference, other)):
            trained.compile(backend="aot_eager")
            trained(tokens(9, 0)).backward()
            theirs.step()
        found[name] = [n for (n, p), q in zip(model.named_parameters(), reference.parameters(), strict=True) if not close(p, q)]
        if dist.get_world_size() > 1:
            found[f"{name} again"] = loaded_whole(model, optimizer)
    return found


def close(param: Tensor, other: Tensor) -> bool:
    return torch.allclose(whole(param, param) if dist.get_world_size() > 1 else param, other, rtol=1e-12, atol=1e-14)


def loaded_whole(model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> bool:
    """Whole tensors and the optimizer's own dict load too; wrong sizes do not."""
    given = get_model_state_dict(model, options=StateDictOptions(full_state_dict=True))
    full = {key: value.clone() for key, value in given.items()}  # what is not sharded is the parameter itself
    before = [p.detach().clone() for p in model.parameters()]
    states = optimizer.state_dict()
    with torch.no_grad():
        for p in model.parameters():
            p.mul_(0.0)
    model.load_state_dict(full)
    kept = [p.detach().clone() for p in model.parameters()]
    copied = {id(p): {k: v.clone() for k, v in s.items()} for p, s in optimizer.state.items()}
    optimizer.load_state_dict(states)
    same = all(torch.equal(v, copied[id(p)][k]) for p, s in optimizer.state.items() for k, v in s.items())
    local = {name: p.detach().clone() for name, p in model.named_parameters()}
    try:
        model.load_state_dict({**full, "frozen.weight": local["frozen.weight"]})
    except RuntimeError as error:
        same &= "give the whole tensor or a DTensor" in str(error)
    else:
        return False
    same &= "without assign" in refusal(lambda: model.load_state_dict(full, assign=True))
    return same and all(map(torch.equal, before, kept))


def test_two_ranks_save_what_three_and_one_load_with_optimizer_states(tmp_path: Path):
    for found in ranks.run("tests.dist.test_shard_states.save", tmp_path, str(tmp_path)):
        for name in ("ours", "plain"):
            assert found[name] == [] and found[f"{name} full"]
            assert found[f"{name} shards"] == 7 + 2 * 4  # tied twice, frozen and unused ones; two moments of those that are trained
    for num_ranks in (3, 1):
        for found in ranks.run("tests.dist.test_shard_states.load", tmp_path, str(tmp_path), num_ranks=num_ranks):
            assert found["ours"] == found["plain"] == []
            assert all(found[f"{name} again"] for name in ("ours", "plain") if num_ranks > 1)
