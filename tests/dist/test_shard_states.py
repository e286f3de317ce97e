"""Checkpoints of sharded models: saved by two ranks, loaded by three, by one, and by a model that was never sharded."""

import contextlib
import dataclasses
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from safetensors.torch import load_file
from torch import Tensor
from torch.distributed.checkpoint import HuggingFaceStorageWriter
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
from autohete_fx import BlockDecision, Optimizer, Params, Plan
from autohete_fx.ir import Machine
from autohete_fx.runtime.placement import placement_of
from autohete_fx.runtime.shard import shard
from tests.dist import ranks
from tests.dist.sharded import FAST, make, mesh, refusal, tokens, whole

PLACES = (
    BlockDecision(),
    BlockDecision(optimizer=Optimizer.STREAMED),
    BlockDecision(optimizer=Optimizer.DISK),
    BlockDecision(params=Params.HOST, optimizer=Optimizer.HOST),
)
FULL = StateDictOptions(full_state_dict=True, cpu_offload=True, strict=False)


def stepped(model: torch.nn.Module, optimizer: torch.optim.Optimizer, steps: int, **how: Any) -> torch.nn.Module:
    """Compiled with ``how``; without it, eagerly."""
    if how:
        model.compile(**how)
    for step in range(steps):
        model(tokens(step, 0)).backward()  # the same batch on each rank
        optimizer.step()
        optimizer.zero_grad()
    return model


def ours(params: Any) -> torch.optim.Optimizer:
    return autohete_fx.AdamW(params, lr=1e-2)


def plain(params: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(params, lr=1e-2, fused=True)


@contextlib.contextmanager
def device_of(name: str) -> Iterator[dict[str, Any]]:
    """How a model is compiled: with optimizer states in all places, on a device that has a memory of its own, or plainly."""
    if name != "placed":
        yield {"backend": "aot_eager"}
        return
    from examples.benchmarks.emulated import Emulation, Speeds

    class WithDisk(Speeds):
        @property
        def machine(self) -> Machine:
            return dataclasses.replace(super().machine, disk_bytes=1 << 40, disk_bytes_per_s=1e9)

    fast = WithDisk(**FAST)
    with Emulation(fast).running() as emulation:
        plan = Plan(labels=("prologue", "layers.0", "layers.1", "epilogue"), decisions=PLACES)
        yield {"backend": "autohete", "options": {**emulation.options, "plan": plan}}


def expected(optimizer_of: Any) -> dict[str, Tensor]:
    """Parameters and states of one process after two steps, by their keys in a checkpoint."""
    model = make(dropout=0.0, layers=2)
    optimizer = optimizer_of(model.parameters())
    stepped(model, optimizer, 2)
    return {f"model.{n}": p.detach() for n, p in model.named_parameters(remove_duplicate=False)} | {
        f"optim.state.{n}.{key}": value
        for n, p in model.named_parameters()
        for key, value in optimizer.state.get(p, {}).items()
    }


OPTIMIZERS = {"ours": ours, "plain": plain, "placed": ours}


def is_close(given: Any, expected: Tensor) -> bool:
    full = given.full_tensor() if isinstance(given, DTensor) else given
    return torch.allclose(full.double(), expected.double(), rtol=1e-12, atol=1e-14)


def save(folder: str) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for name, optimizer_of in OPTIMIZERS.items():
        with device_of(name) as compiled:
            found |= save_one(name, optimizer_of, folder, compiled)
    return found


def save_one(name: str, optimizer_of: Any, folder: str, compiled: dict[str, Any]) -> dict[str, Any]:
    """Save a model of a name; what is wrong with its state dicts."""
    found: dict[str, Any] = {}
    torch._dynamo.reset()
    model = shard(make(dropout=0.0, layers=2), mesh())
    optimizer = optimizer_of(model.parameters())
    stepped(model, optimizer, 2, **compiled)
    found[f"{name} places"] = sorted(
        {placement.optimizer.value for p in model.parameters() if (placement := placement_of(p)) is not None}
    )
    state = {"model": get_model_state_dict(model), "optim": get_optimizer_state_dict(model, optimizer)}
    assert torch.equal(state["model"]["row"].to_local(), model.state_dict()["row"].to_local())
    flat = {f"model.{key}": value for key, value in state["model"].items()}
    flat |= {f"optim.state.{n}.{k}": v for n, entry in state["optim"]["state"].items() for k, v in entry.items()}
    right = expected(optimizer_of)
    found[name] = sorted(set(right) - set(flat)) + [k for k in right if not is_close(flat[k], right[k])]
    found[f"{name} shards"] = sum(isinstance(value, DTensor) for value in flat.values())
    dcp.save(state, checkpoint_id=f"{folder}/{name}")
    full = {f"model.{n}": v for n, v in get_model_state_dict(model, options=FULL).items()}
    states = get_optimizer_state_dict(model, optimizer, options=FULL)
    entries = states["state"].items() if states else ()
    full |= {f"optim.state.{n}.{k}": v for n, entry in entries for k, v in entry.items()}
    found[f"{name} full"] = full.keys() == (flat.keys() if dist.get_rank() == 0 else set())
    found[f"{name} full"] &= all(is_close(full[key], right[key]) for key in right.keys() & full.keys())
    found[f"{name} broadcast"] = is_loaded_from_the_first(model, optimizer, optimizer_of)
    if name == "ours":
        found["safetensors"] = as_safetensors(model, f"{folder}/safetensors")
    return found


def is_loaded_from_the_first(model: torch.nn.Module, optimizer: torch.optim.Optimizer, optimizer_of: Any) -> bool:
    """Whether another model and its optimizer are the same when they were given what the first rank alone has."""
    from_first = dataclasses.replace(FULL, broadcast_from_rank0=True)
    other = shard(make(dropout=0.0, layers=2, seed=4), mesh())
    loaded = optimizer_of(other.parameters())
    set_model_state_dict(other, get_model_state_dict(model, options=FULL), options=from_first)
    set_optimizer_state_dict(
        other, loaded, get_optimizer_state_dict(model, optimizer, options=FULL), options=from_first
    )
    pairs = list(zip(model.parameters(), other.parameters(), strict=True))
    same = [torch.equal(p.detach(), q.detach()) for p, q in pairs]
    same += [torch.equal(v, loaded.state[q][k]) for p, q in pairs for k, v in optimizer.state.get(p, {}).items()]
    return all(same) and len(same) > 2 * 6


def as_safetensors(model: torch.nn.Module, folder: str) -> bool:
    """Whether plain safetensors reads whole tensors from what ranks wrote together. It takes one name of tied weights; PyTorch's
    consolidation writes zeros for tensors without dimensions."""
    state = {n: v for n, v in get_model_state_dict(model).items() if n not in ("head.weight", "scale")}
    dcp.save(state, storage_writer=HuggingFaceStorageWriter(folder, save_distributed=True, enable_consolidation=True))
    dist.barrier()
    read = {n: v for file in Path(folder).glob("*.safetensors") for n, v in load_file(file).items()}
    same = [torch.equal(read[n], whole(p, p)) for n, p in model.named_parameters() if n != "scale"]
    return read.keys() == state.keys() and all(same)


def load(folder: str) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for name, optimizer_of in OPTIMIZERS.items():
        with device_of(name) as compiled:
            found |= load_one(name, optimizer_of, folder, compiled)
    return found


def load_one(name: str, optimizer_of: Any, folder: str, compiled: dict[str, Any]) -> dict[str, Any]:
    """Load a model of a name; which of its parameters are wrong after another step."""
    found: dict[str, Any] = {}
    torch._dynamo.reset()
    model = make(dropout=0.0, layers=2, seed=5)
    if dist.get_world_size() > 1:
        shard(model, mesh())
    optimizer = optimizer_of(model.parameters())
    if name == "placed":
        stepped(model, optimizer, 1, **compiled)  # its states are where the plan has them
    state = {"model": get_model_state_dict(model), "optim": get_optimizer_state_dict(model, optimizer)}
    # Asked for its states, a new optimizer has some of parameters that nothing trains, too.
    dcp.load(state, checkpoint_id=f"{folder}/{name}", planner=DefaultLoadPlanner(allow_partial_load=True))
    set_model_state_dict(model, state["model"])
    # One that has stepped has none of these.
    set_optimizer_state_dict(model, optimizer, state["optim"], options=StateDictOptions(strict=False))
    # Two steps were taken before they were saved: the next ones are those of a process that was never stopped.
    reference = make(dropout=0.0, layers=2)
    other = optimizer_of(reference.parameters())
    stepped(reference, other, 2)
    if name != "placed":
        model.compile(backend="aot_eager")
    for trained, theirs in ((model, optimizer), (reference, other)):
        trained(tokens(9, 0)).backward()
        theirs.step()
    found[name] = [
        n for (n, p), q in zip(model.named_parameters(), reference.parameters(), strict=True) if not close(p, q)
    ]
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


@pytest.mark.slow
def test_two_ranks_save_what_three_and_one_load_with_optimizer_states(tmp_path: Path):
    for found in ranks.run("tests.dist.test_shard_states.save", tmp_path, str(tmp_path)):
        assert found["safetensors"] and {"disk", "host", "streamed"} <= set(found["placed places"])
        for name in OPTIMIZERS:
            assert found[name] == [] and found[f"{name} full"] and found[f"{name} broadcast"], name
            assert (
                found[f"{name} shards"] == 9 + 2 * 6
            )  # tied twice, frozen and unused ones; two moments of those that are trained
    for num_ranks in (3, 1):
        for found in ranks.run("tests.dist.test_shard_states.load", tmp_path, str(tmp_path), num_ranks=num_ranks):
            assert found["ours"] == found["plain"] == found["placed"] == []
            assert all(found[f"{name} again"] for name in OPTIMIZERS if num_ranks > 1)
