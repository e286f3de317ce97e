"""Meshes of two dimensions: replicas of shards train as one process with all batches."""

from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Replicate, Shard

import autohete_fx
from autohete_fx import Plan
from autohete_fx.ir import Overlap, Schedule
from autohete_fx.runtime.pending.backward import Early
from autohete_fx.runtime.shard import gathered, shard
from tests.dist import ranks
from tests.dist.sharded import FAST, alone, differences, from_first, make, mesh, refusal, together, tokens, whole
from tests.dist.test_shard import ours, ours_clipped, sgd
from tests.dist.test_shard_plans import BLOCKS, backend
from tests.dist.test_shard_uses import HOST


def furthest(given: dict[str, Tensor], expected: dict[str, Tensor]) -> float:
    return max(differences(given, expected).values(), default=0.0)


def of_two() -> dict[str, float]:
    """How far two ranks are from one process, which are replicas, or hold shards of one."""
    found, how = {}, {"tied": False, "steps": 2}
    for optimizer_of in (sgd, ours):
        expected = from_first(lambda optimizer_of=optimizer_of: alone(optimizer_of, **how))
        for replicas in (1, 2):
            given = together(optimizer_of, compiled=backend("mixed"), replicas=replicas, **how)
            found[f"{optimizer_of.__name__} {replicas}"] = furthest(given, expected)
    return found


@pytest.mark.slow
def test_two_ranks_in_either_dimension_are_bitwise_one_process(tmp_path: Path):
    for found in ranks.run("tests.dist.test_shard_replicas.of_two", tmp_path):
        assert len(found) == 4 and not any(found.values()), found


def exactness() -> dict[str, Any]:
    """How far two replicas of two ranks are from one process."""
    found: dict[str, Any] = {}
    clipped = from_first(lambda: alone(ours, clip=0.3, micro=2, steps=2))
    options = {"micro_batches": 2}
    given = together(ours_clipped, compiled=backend("mixed", **options), micro=2, steps=2, replicas=2)
    found["plan"] = furthest(given, clipped)
    compilation = autohete_fx.compilations()[-1]
    assert compilation.problem is not None
    found["problem"] = [compilation.problem.num_ranks, compilation.problem.num_replicas]
    found["priced"] = [e.label for e in compilation.events].count("average")
    found["digest"] = compilation.plan.digest
    return found


def more_exactness() -> dict[str, float]:
    """How far they are under PyTorch's backend, and with its SGD."""
    found = {}
    clipped = from_first(lambda: alone(ours, clip=0.3, micro=2, steps=2))
    found["aot_eager"] = furthest(together(ours_clipped, micro=2, steps=2, replicas=2), clipped)
    expected = from_first(lambda: alone(sgd, steps=2))
    found["sgd"] = furthest(together(sgd, compiled=backend(), steps=2, replicas=2), expected)
    return found


def overlapping() -> list[Any]:
    """Likewise on a device with memory of its own, whose updates would start in backward; how many did, and notes."""
    from examples.benchmarks.emulated import Emulation, Speeds

    started, start = [], Early.start

    def noting(early: Early, *args: Any) -> bool:
        started.append(start(early, *args))
        return started[-1]

    def optimizer(params: Any) -> torch.optim.Optimizer:
        return autohete_fx.AdamW(params, lr=1e-2, overlap="backward")

    fast = Speeds(**FAST)
    expected = from_first(lambda: alone(ours, steps=3))
    with Emulation(fast).running() as emulation, mock.patch.object(Early, "start", noting):
        schedule = Schedule(overlap=Overlap.BACKWARD)
        plan = Plan(labels=BLOCKS, decisions=tuple(HOST[at % 2] for at in range(4)), schedule=schedule)
        options = {**emulation.options, "plan": plan}
        given = together(optimizer, compiled={"backend": "autohete", "options": options}, steps=3, replicas=2)
    return [furthest(given, expected), sum(started), list(autohete_fx.compilations()[-1].notes)]


def states() -> dict[str, Any]:
    """What state dicts have, and what becomes of them."""
    found: dict[str, Any] = {}
    model, expected = shard(make(), mesh(2)), make()
    given = model.state_dict()
    found["placements"] = all(
        value.placements == (Replicate(), Shard(0)) and value.device_mesh.shape == (2, 2)
        for value in given.values()
        if isinstance(value, DTensor)
    )
    full = {name: value.full_tensor() if isinstance(value, DTensor) else value.clone() for name, value in given.items()}
    found["full"] = all(torch.equal(full[name], value) for name, value in expected.state_dict().items())
    other = shard(make(seed=5), mesh(2))
    other.load_state_dict(given)
    found["loaded"] = all(map(torch.equal, other.parameters(), model.parameters()))
    # Shards of four, and whole tensors.
    for name, source in {"1-D": shard(make(seed=6), mesh()).state_dict(), "plain": full}.items():
        other.load_state_dict(source)
        found[name] = all(
            torch.equal(whole(p, p), source[n].full_tensor() if isinstance(source[n], DTensor) else source[n])
            for n, p in other.named_parameters()
        )
    with gathered(model):
        torch.manual_seed(dist.get_rank())
        nn.init.normal_(model.row)
        nn.init.normal_(model.scale.view(1))
    torch.manual_seed(0)
    row, scale = nn.init.normal_(torch.empty_like(expected.row)), nn.init.normal_(torch.empty(1).double())
    found["gathered"] = torch.equal(whole(model._parameters["row"], model._parameters["row"]), row)
    found["gathered"] &= torch.equal(model.scale, scale[0])
    return found


class Half(nn.Module):
    """A large parameter that only the second replica's batches use, and a small one."""

    def __init__(self) -> None:
        super().__init__()
        self.large, self.other, self.small = nn.Linear(128, 128), nn.Linear(128, 128), nn.Linear(128, 8)

    def forward(self, x: Tensor, is_used: bool) -> Tensor:
        y = self.large(x)
        return (self.other(y) if is_used else y).square().mean() + self.small(y).square().mean()


def corners() -> dict[str, Any]:
    """Gradients that one replica has; a step that is taken twice; what is refused."""
    rank, found = dist.get_rank(), {}
    torch.manual_seed(0)
    model, reference = shard(Half(), mesh(2)), Half()
    reference.load_state_dict(
        {n: v.full_tensor() if isinstance(v, DTensor) else v for n, v in model.state_dict().items()}
    )
    model.compile(backend="aot_eager")
    model(torch.ones(4, 128), rank > 1).backward()
    torch.optim.SGD(model.parameters(), lr=1.0).step()
    sum(reference(torch.ones(4, 128), at > 1) / 4 for at in range(4)).backward()
    torch.optim.SGD(reference.parameters(), lr=1.0).step()
    found["half"] = all(
        torch.allclose(whole(p, p), q) for p, q in zip(model.parameters(), reference.parameters(), strict=True)
    )
    weight = model.other._parameters["weight"]
    found["again"] = refusal(torch.optim.SGD(model.parameters(), lr=1.0).step)
    weight.grad.mul_(2.0)
    found["written"] = refusal(torch.optim.SGD(model.parameters(), lr=1.0).step)
    options = {"memory_budget": (20 + rank // 3) << 20}
    torch._dynamo.reset()
    model = shard(make(), mesh(2))
    model.compile(**backend("", **options))
    found["options"] = refusal(lambda: model(tokens(0, rank)).backward())
    return found


def of_four() -> dict[str, Any]:
    return {"exact": exactness(), "overlapping": overlapping(), "states": states(), "corners": corners()}


@pytest.mark.slow
def test_two_replicas_of_two_ranks_are_within_rounding_of_one_process(tmp_path: Path):
    everywhere = ranks.run("tests.dist.test_shard_replicas.of_four", tmp_path, num_ranks=4)
    assert len({found["exact"]["digest"] for found in everywhere}) == 1
    for found in everywhere:
        exact = found["exact"]
        assert exact["plan"] < 1e-12, exact
        assert exact["problem"] == [2, 2] and exact["priced"] == 3  # of blocks with gradients
        far, num_started, notes = found["overlapping"]
        assert far < 1e-12 and num_started == 0
        assert [note for note in notes if "because replicas average" in note]
        assert all(found["states"].values()), found["states"]
        corners = found["corners"]
        assert corners["half"] and corners["again"] == "went on" and "max_grad_norm" in corners["written"]
        assert (
            f"memory_budget is {20 << 20} on rank 0" in corners["options"]
            and f"{21 << 20} on rank 3" in corners["options"]
        )


@pytest.mark.thorough
def test_they_are_by_a_backend_and_an_optimizer_of_pytorch(tmp_path: Path):
    for found in ranks.run("tests.dist.test_shard_replicas.more_exactness", tmp_path, num_ranks=4):
        assert len(found) == 2 and max(found.values()) < 1e-12, found
