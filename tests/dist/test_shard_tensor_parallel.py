"""Shards of models under ``parallelize_module``: a mesh of data x tensor parallelism trains as one process with all batches."""

import contextlib
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import (
    get_model_state_dict,
    get_optimizer_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module

import autohete_fx
from autohete_fx.runtime.shard import gathered, shard
from autohete_fx.runtime.shard.parts import part_of
from autohete_fx.runtime.shard.state import to_dtensor
from tests.dist import ranks
from tests.dist.sharded import from_first, refusal
from tests.dist.tensor_parallel import WIDTH, make, parallel, sequence_parallel, tokens
from tests.dist.test_tensor_parallel import apart, compiled, plan_of

HIDDEN = 4 * WIDTH + 2  # a rank of tensor parallelism has an odd part of it


def mesh() -> Any:
    return init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))


def made(over: Any, *, is_sequence: bool = False, dropout: float = 0.1, layers: int = 2) -> nn.Module:
    model = make(dropout=dropout, hidden=HIDDEN, layers=layers)
    with torch.no_grad():
        for param in model.parameters():
            param.add_(over["dp"].get_local_rank())  # the first rank's values count
    return shard((sequence_parallel if is_sequence else parallel)(model, over["tp"]), over["dp"])


def whole(tensor: Tensor, param: Tensor) -> Tensor:
    """That all ranks hold together: of the parameter, its gradient or a state."""
    part = part_of(param)
    assert part is not None
    return (to_dtensor(tensor.detach(), part).full_tensor() if part.is_dtensor else tensor.detach()).clone()


def rows(step: int, micro: int, dp: int) -> Tensor:
    """Of a rank of data parallelism, with the seed of its masks."""
    torch.manual_seed(7 + 100 * step + 10 * micro + dp)
    return tokens(10 * step + dp, micro)


Read = Callable[[Tensor, Tensor], Tensor]


def note(found: dict[str, Tensor], step: int, model: nn.Module, optimizer: torch.optim.Optimizer, read: Read) -> None:
    for name, param in model.named_parameters():
        found[f"{step}/{name}"] = read(param, param)
        states = {key: value for key, value in optimizer.state[param].items() if value.dim()}
        found |= {f"{step}/{name}/{key}": read(value, param) for key, value in states.items()}


OptimizerOf = Callable[[Iterable[nn.Parameter]], torch.optim.Optimizer]


def alone(
    optimizer_of: OptimizerOf, *, micro: int = 1, clip: float | None = None, steps: int = 3, **how: Any
) -> dict[str, Tensor]:
    """One process, which computes the batches of both ranks of data parallelism in turn."""
    model, found = make(hidden=HIDDEN, **how), {}
    optimizer = optimizer_of(model.parameters())
    for step in range(steps):
        for at in range(micro):
            for dp in range(2):
                batch = rows(step, at, dp)
                loss = model(batch)
                (loss / 2).backward()
                found[f"{step}/loss{at}/{dp}"] = loss.detach()
        for name, param in model.named_parameters():
            found[f"{step}/{name}/grad"] = param.grad.clone()
        if clip is not None:
            found[f"{step}/norm"] = torch.nn.utils.clip_grad_norm_(model.parameters(), clip)
        optimizer.step()
        optimizer.zero_grad()
        note(found, step, model, optimizer, lambda t, _: t.detach().clone())
    return found


def together(
    model: nn.Module, optimizer: torch.optim.Optimizer, *, micro: int = 1, first: int = 0, steps: int = 3, dp: int = 0
) -> dict[str, Tensor]:
    found: dict[str, Tensor] = {}
    for step in range(first, steps):
        for at in range(micro):
            batch = rows(step, at, dp)
            is_ours = isinstance(optimizer, autohete_fx.AdamW)
            with optimizer.accumulate() if is_ours and at < micro - 1 else contextlib.nullcontext():
                loss = model(batch)
                loss.backward()
            found[f"{step}/loss{at}/{dp}"] = loss.detach().clone()
        kept = {name: param.grad.clone() for name, param in model.named_parameters() if part_of(param).is_shard}
        optimizer.step()
        found |= {f"{step}/{n}/grad": whole(kept[n], p) for n, p in model.named_parameters() if n in kept}
        if getattr(optimizer, "grad_norm", None) is not None:
            found[f"{step}/norm"] = optimizer.grad_norm.clone()
        optimizer.zero_grad()
        note(found, step, model, optimizer, whole)
    return found


def furthest(given: dict[str, Tensor], expected: dict[str, Tensor]) -> float:
    """Of all that a rank has; the gradients of parameters that are no shards are the step's."""
    assert len(given) > 50, sorted(given)
    return apart(given, {name: expected[name] for name in given})


def adamw(params: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.AdamW(params, lr=1e-2, fused=True)


def sgd(params: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.SGD(params, lr=0.1, momentum=0.9)


def exactness(folder: str) -> dict[str, Any]:
    """How far four ranks are from one process under a plan, and how they hold parameters. They are saved in the folder after two of
    three steps."""
    over, found = mesh(), {}
    dp = over["dp"].get_local_rank()
    expected = from_first(lambda: alone(adamw, clip=0.3))
    model = compiled(made(over), plan=plan_of("mixed"))
    found["shapes"] = {name: list(param.shape) for name, param in model.named_parameters()}
    optimizer = autohete_fx.AdamW(model.parameters(), lr=1e-2, max_grad_norm=0.3)
    given = together(model, optimizer, steps=2, dp=dp)
    saved = {"model": get_model_state_dict(model), "optim": get_optimizer_state_dict(model, optimizer)}
    dcp.save(saved, checkpoint_id=folder)
    found["mixed"] = furthest(given | together(model, optimizer, first=2, dp=dp), expected)
    compilation = autohete_fx.compilations()[-1]
    found["plan"] = [compilation.plan.step_s, compilation.plan.peak_bytes]
    found["ops"] = sorted({each.op for each in compilation.transfers if each.lane.value == "net"})
    return found


def more_exactness() -> dict[str, float]:
    """How far they are under PyTorch's backend, and with parts of sequences."""
    over, found = mesh(), {}
    dp = over["dp"].get_local_rank()
    expected = from_first(lambda: alone(sgd, layers=1))
    torch._dynamo.reset()
    model = made(over, layers=1)
    model.compile(backend="aot_eager")
    found["aot_eager"] = furthest(together(model, sgd(model.parameters()), dp=dp), expected)
    how = {"micro": 2, "steps": 2}
    expected = from_first(lambda: alone(adamw, clip=0.3, dropout=0.0, **how))
    model = compiled(made(over, is_sequence=True, dropout=0.0), plan=plan_of("mixed"))
    optimizer = autohete_fx.AdamW(model.parameters(), lr=1e-2, max_grad_norm=0.3)
    found["sequence"] = furthest(together(model, optimizer, dp=dp, **how), expected)
    return found


def states(folder: str) -> dict[str, Any]:
    """What state dicts have, and a run that goes on from the checkpoint of `exactness`, with states in other places."""
    over, found = mesh(), {}
    dp = over["dp"].get_local_rank()
    model, expected = made(over), make(hidden=HIDDEN)
    given = model.state_dict()
    up = given["layers.0.up.weight"]
    found["placements"] = tuple(up.placements) == (Shard(0), Shard(0)) and up.shape == (HIDDEN, WIDTH)
    found["small"] = tuple(given["layers.0.q.weight"].placements) == (Shard(0), Replicate())
    full = {name: value.full_tensor() if isinstance(value, DTensor) else value for name, value in given.items()}
    found["full"] = all(torch.equal(full[name], value) for name, value in expected.state_dict().items())
    other = made(over)
    for source in (full, given, parallel(make(hidden=HIDDEN), over["tp"]).state_dict()):
        with torch.no_grad():
            for param in other.parameters():
                param.zero_()
        other.load_state_dict(source)
        found[f"loaded {len(found)}"] = all(map(torch.equal, other.parameters(), model.parameters()))

    right = from_first(lambda: alone(adamw, clip=0.3))
    fresh = compiled(made(over), plan=plan_of("keep"))
    anew = autohete_fx.AdamW(fresh.parameters(), lr=1e-2, max_grad_norm=0.3)
    template = {"model": get_model_state_dict(fresh), "optim": get_optimizer_state_dict(fresh, anew)}
    dcp.load(template, checkpoint_id=folder)
    set_model_state_dict(fresh, template["model"])
    set_optimizer_state_dict(fresh, anew, optim_state_dict=template["optim"])
    found["went on"] = apart(given := together(fresh, anew, first=2, dp=dp), {n: right[n] for n in given}) < 1e-12
    return found


def in_whole() -> dict[str, Any]:
    """Eager code within ``gathered``: DTensors of tensor parallelism, whose writes count."""
    over, found = mesh(), {}
    model, expected = made(over, dropout=0.0), make(hidden=HIDDEN, dropout=0.0)
    batch, rank = tokens(3), dist.get_rank()
    with gathered(model), torch.no_grad():
        found["kinds"] = isinstance(model.layers[0].up.weight, DTensor) and not isinstance(
            model.embedding.weight, DTensor
        )
        found["forward"] = torch.allclose(model(batch), expected(batch))
        torch.manual_seed(rank)
        model.layers[0].up.weight.mul_(2 + over["dp"].get_local_rank())
        model.layers[0].q.weight.zero_()
        model.layers[1].o.weight = nn.Parameter(torch.ones_like(model.layers[1].o.weight))
        nn.init.normal_(model.embedding.weight)
    read = {name: whole(param, param) for name, param in model.named_parameters()}
    torch.manual_seed(0)
    before = expected.state_dict()
    found["first counts"] = torch.equal(read["layers.0.up.weight"], 2 * before["layers.0.up.weight"])
    found["written"] = not read["layers.0.q.weight"].any() and bool((read["layers.1.o.weight"] == 1).all())
    found["drawn"] = torch.equal(read["embedding.weight"], nn.init.normal_(torch.empty_like(expected.embedding.weight)))
    found["eager"] = "each rank holds a shard" in refusal(lambda: model.layers[0].up.weight + 1)
    found["small read"] = isinstance(model.layers[0].q.weight, DTensor)
    return found


def refusals() -> dict[str, str]:
    over, found = mesh(), {}
    found["same"] = refusal(lambda: shard(parallel(make(), over["tp"]), over["tp"]))
    model = parallel(make(), over["tp"])
    optimizer = autohete_fx.AdamW(model.parameters())
    found["late"] = refusal(lambda: shard(model, over["dp"]))
    del optimizer
    both = parallelize_module(nn.Linear(128, 128), over["tp"], ColwiseParallel())
    other = parallelize_module(nn.Linear(128, 128), over["dp"], ColwiseParallel())
    found["meshes"] = refusal(lambda: shard(nn.ModuleList([both, other]), over["dp"]))
    found["Muon"] = refusal(lambda: autohete_fx.Muon(made(over)))
    small = made(over).layers[0].q  # no shard, but a part of a DTensor
    small.weight.to_local().sum().backward()
    mine = small._parameters["weight"]
    found["LBFGS"] = refusal(lambda: torch.optim.LBFGS([mine]).step(lambda: torch.zeros(())))
    torch.nn.utils.clip_grad_norm_([mine], 0.1)
    found["clipped"] = refusal(torch.optim.SGD([mine], lr=0.1).step)
    return found


def of_four(folder: str) -> dict[str, Any]:
    return {"exact": exactness(folder), "states": states(folder), "whole": in_whole(), "refused": refusals()}


@pytest.mark.slow
def test_shards_of_a_model_under_tensor_parallelism_are_within_rounding_of_one_process(tmp_path: Path):
    everywhere = ranks.run(
        "tests.dist.test_shard_tensor_parallel.of_four", tmp_path, str(tmp_path / "saved"), num_ranks=4
    )
    assert len({repr(found["exact"]["plan"]) for found in everywhere}) == 1
    for found in everywhere:
        exact = found["exact"]
        assert exact["mixed"] < 1e-12, exact
        assert exact["shapes"]["layers.0.up.weight"] == [97, WIDTH]  # 193 rows, padded
        assert exact["shapes"]["layers.0.q.weight"] == [48, WIDTH]  # too small for shards
        assert exact["shapes"]["embedding.weight"] == [50, WIDTH]
        assert {"gather", "reduce", "all_reduce"} <= set(exact["ops"]), exact["ops"]
        assert all(found["states"].values()), found["states"]
        assert all(found["whole"].values()), found["whole"]
        refused = found["refused"]
        assert "two dimensions of one mesh" in refused["same"] and "before the optimizer is made" in refused["late"]
        assert "over 2 meshes" in refused["meshes"] and "of which this rank holds" in refused["Muon"]
        assert (
            "updates an element by others" in refused["LBFGS"] and "were changed between backward" in refused["clipped"]
        )


@pytest.mark.thorough
def test_they_are_by_a_backend_of_pytorch_and_with_parts_of_sequences(tmp_path: Path):
    for found in ranks.run("tests.dist.test_shard_tensor_parallel.more_exactness", tmp_path, num_ranks=4):
        assert len(found) == 2 and max(found.values()) < 1e-12, found
