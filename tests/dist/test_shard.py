"""``shard`` under PyTorch's own backends: the traced op is exact, and wrong use is an error on all ranks."""

import copy
import functools
import os
import pickle
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh

import autohete_fx
from autohete_fx.compiler import captured
from autohete_fx.machine.measure import load_or_measure_machine
from autohete_fx.runtime.shard import shard
from tests.dist import ranks
from tests.dist.sharded import (
    OptimizerOf,
    alone,
    differences,
    graphs_in,
    make,
    mesh,
    recorded,
    refusal,
    together,
    tokens,
    whole,
)
from tests.layers import EAGER


@pytest.fixture(scope="module")
def of_two(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[Any]]:
    return ranks.run_each(
        [exactness, odd_uses, local_writes, kept_gradients, refusals],
        tmp_path_factory.mktemp("ranks"),
    )


def sgd(params: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(params, lr=0.1, momentum=0.9)


def ours(params: Any) -> torch.optim.Optimizer:
    return autohete_fx.AdamW(params, lr=1e-2)


def ours_clipped(params: Any) -> torch.optim.Optimizer:
    return autohete_fx.AdamW(params, lr=1e-2, max_grad_norm=0.3)


def exactness() -> dict[str, float]:
    """How far the usual ways to train are from one process, at most."""
    how: dict[str, Any] = {"layers": 1}
    found = {"ours": differences(together(ours, tied=False, **how), alone(ours, tied=False, **how))}
    found["tied and accumulated"] = differences(together(sgd, micro=2, **how), alone(sgd, micro=2, **how))
    return {name: max(found[name].values(), default=0.0) for name in found}


def test_two_ranks_are_bitwise_one_process_and_ties_and_accumulation_within_rounding(of_two: dict[str, list[Any]]):
    for found in of_two["exactness"]:
        assert found["ours"] == 0.0 < found["tied and accumulated"] < 1e-13, found


def one_rank(folder: str) -> dict[str, Any]:
    """Of a model as it is and of one that a single rank has sharded, both under our backend in a budget: what is compiled, and how
    far their steps are from each other; likewise under PyTorch's own. Both have one machine, and neither finds the other's plan."""
    machine = load_or_measure_machine(torch.device("cpu"))
    how: dict[str, Any] = {"layers": 2, "steps": 2}
    options = {**EAGER, "memory_budget": "3MiB"}
    compiled = {"backend": "autohete", "options": options}
    found: dict[str, Any] = {"made": []}

    def noted(train: Callable[[], dict[str, Tensor]]) -> dict[str, Tensor]:
        torch._dynamo.reset()
        cache = {"AUTOHETE_CACHE_DIR": f"{folder}/{len(found['made'])}"}
        with mock.patch.dict(os.environ, cache), mock.patch.object(captured, "machine_of", lambda *_: machine):
            records = train()
        made = autohete_fx.compilations()[-1]
        found["made"].append([made.plan.digest, *graphs_in(made)])
        return records

    def plain(optimizer_of: OptimizerOf) -> dict[str, Tensor]:
        model = make(layers=2)
        optimizer = optimizer_of(model.parameters())
        model.compile(**compiled)
        return recorded(model, optimizer, steps=2, read=lambda t, _: t.detach().clone())

    for name, optimizer_of in {"ours": ours, "ours clipped": ours_clipped}.items():
        expected = noted(functools.partial(plain, optimizer_of))
        given = noted(functools.partial(together, optimizer_of, compiled=compiled, **how))
        found[name] = differences(given, expected)
    found["sgd"] = differences(together(sgd, **how), alone(sgd, backend="aot_eager", **how))
    model = shard(make(), mesh())
    found["rows"] = tuple(model.embedding.weight.shape)
    return found


@pytest.mark.slow
def test_one_rank_has_the_model_its_plan_and_its_graphs_as_they_were_bitwise(tmp_path: Path):
    [found] = ranks.run("tests.dist.test_shard.one_rank", tmp_path, str(tmp_path), num_ranks=1)
    plain, sharded, plain_clipped, clipped = found["made"]
    assert plain == sharded and plain_clipped == clipped
    assert "autohete.offload" in plain[1] and "autohete.gather" not in plain[1]
    assert found["ours"] == found["ours clipped"] == found["sgd"] == {}
    assert found["rows"] == [131, 96]


class Adapted(nn.Module):
    """A frozen weight that is sharded, and beside it two that are trained and whole on each rank."""

    def __init__(self) -> None:
        super().__init__()
        self.base = nn.Linear(256, 256, bias=False).requires_grad_(False)
        self.down, self.up = nn.Linear(256, 4, bias=False), nn.Linear(4, 256, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return (self.base(x) + self.up(self.down(x))).square().mean()


class Shared(nn.Module):
    """A small parameter that only the first rank's batches use."""

    def __init__(self) -> None:
        super().__init__()
        self.large, self.small = nn.Linear(128, 128), nn.Linear(8, 8)

    def forward(self, x: Tensor, is_used: bool) -> Tensor:
        y = self.large(x)
        return (self.small(y[:, :8]) if is_used else y).square().mean()


def odd_uses() -> dict[str, Any]:
    rank, found = dist.get_rank(), {}
    torch.manual_seed(0)
    model = shard(Shared(), mesh())
    model.compile(backend="aot_eager")
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    model(torch.ones(4, 128), rank == 0).backward()
    mine = None if model.small.weight.grad is None else model.small.weight.grad.clone()
    before = model.small.weight.detach().clone()
    optimizer.step()
    theirs: list[Any] = [None, None]
    dist.all_gather_object(theirs, (mine, before - model.small.weight.detach()))
    found["half"] = theirs[1][0] is None and all(torch.allclose(d, theirs[0][0] / 2, atol=1e-7) for _, d in theirs)

    # An optimizer made before, a copy, and a closure train as one made behind shard.
    def trained(model: nn.Module, optimizer: torch.optim.Optimizer) -> list[Tensor]:
        torch._dynamo.reset()
        model.compile(backend="aot_eager")

        def closure() -> Tensor:
            optimizer.zero_grad()
            loss = model(tokens(0, rank))
            loss.backward()
            return loss

        optimizer.step(closure)
        return [whole(p, p) for p in model.parameters()]

    first = make(dropout=0.0, layers=1)
    early = sgd(first.parameters())
    copied = copy.deepcopy(shard(first, mesh()))
    other = shard(make(dropout=0.0, layers=1), mesh())
    expected = trained(other, sgd(other.parameters()))
    found["early"] = all(map(torch.equal, trained(first, early), expected))
    found["copied"] = all(map(torch.equal, trained(copied, sgd(copied.parameters())), expected))
    reference = make(dropout=0.0, layers=1)
    losses = [reference(tokens(0, r)) for r in range(2)]
    (sum(losses) / 2).backward()
    sgd(reference.parameters()).step()
    found["right"] = all(map(torch.allclose, expected, reference.parameters()))
    return found


def test_gradients_that_some_ranks_have_early_optimizers_copies_and_closures(of_two: dict[str, list[Any]]):
    for found in of_two["odd_uses"]:
        assert found == {"half": True, "early": True, "copied": True, "right": True}


def local_writes() -> dict[str, list[str]]:
    """What becomes of a step, and of a micro-batch, after writes to gradients that each rank makes by its own: to those of
    parameters that are whole on each rank, of a shard that was frozen before, and one that replaces the gradient."""

    def clip(model: Adapted) -> None:
        nn.utils.clip_grad_norm_([p for p in model.parameters() if p.requires_grad], 1e-3)

    def clip_shard(model: Adapted) -> None:
        nn.utils.clip_grad_norm_([p for p in model.parameters() if p.dim() and p.shape[1] == p.shape[0] * 2], 1e-3)

    def replace(model: Adapted) -> None:
        model.up.weight.grad = model.up.weight.grad * 0.5

    found: dict[str, list[str]] = {}
    for write in (clip, clip_shard, replace):
        torch._dynamo.reset()
        torch.manual_seed(0)
        model = shard(Adapted(), mesh())
        model.compile(backend="autohete", options=EAGER)
        model.base.requires_grad_(write is clip_shard)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        before = [p.detach().clone() for p in model.parameters()]
        model(torch.ones(4, 256)).backward()
        write(model)
        told = [refusal(optimizer.step), refusal(lambda model=model: model(torch.ones(4, 256)))]
        unchanged = all(map(torch.equal, before, model.parameters()))
        optimizer.zero_grad()
        model(torch.ones(4, 256)).backward()
        if write is replace:
            time.sleep(1.5 * dist.get_rank())  # the other one looks whether this one has failed: no more than itself
        found[write.__name__] = [*told, "unchanged" if unchanged else "changed", refusal(optimizer.step)]
    return found


def test_a_gradient_that_a_rank_has_written_by_itself_is_refused_whichever_it_is(of_two: dict[str, list[Any]]):
    for found in of_two["local_writes"]:
        for write, (at_step, at_forward, parameters, at_next) in found.items():
            assert "were changed between backward and step()" in at_step and "max_grad_norm" in at_step, (
                write,
                at_step,
            )
            assert "were changed between backward and the next forward" in at_forward, (write, at_forward)
            assert (parameters, at_next) == ("unchanged", "went on"), write


class Optional(nn.Module):
    """Two layers of shards and small parameters, of which a batch may leave out the second."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(128, 128), nn.Linear(128, 128)

    def forward(self, x: Tensor, is_used: bool) -> Tensor:
        y = self.first(x)
        return (self.second(y) if is_used else y).square().mean()


def kept_gradients() -> dict[str, list[Any]]:
    """Steps after gradients that a program keeps were set to zero, of which a batch adds to some, second steps after clipping, and
    steps with gradients that no backward has left: errors, and whether they are as in one process."""
    found: dict[str, list[Any]] = {}
    made = {"plain": sgd, "clips": lambda params: autohete_fx.SGD(params, lr=0.1, momentum=0.9, max_grad_norm=1e-3)}
    for name, optimizer_of in made.items():
        trained, told = [], []
        for is_sharded in (False, True):
            torch._dynamo.reset()
            torch.manual_seed(0)
            model = Optional().double()
            if is_sharded:
                shard(model, mesh()).compile(backend="autohete", options=EAGER)
            optimizer = optimizer_of(model.parameters())
            for is_used in (True, False, True):
                optimizer.zero_grad(set_to_none=False)
                model(torch.ones(4, 128, dtype=torch.float64), is_used).backward()  # the same on all ranks
                told += [refusal(optimizer.step), refusal(optimizer.step)]
            optimizer.zero_grad()
            params = list(model.parameters())
            loss = model(torch.ones(4, 128, dtype=torch.float64), True)
            for param, grad in zip(params, torch.autograd.grad(loss, params), strict=True):
                param.grad = grad
            told.append(refusal(optimizer.step))
            trained.append([whole(p, p) if is_sharded else p.detach() for p in model.parameters()])
        found[name] = [sorted(set(told)), max(float((a - b).abs().max()) for a, b in zip(*trained, strict=True))]
    return found


def test_gradients_that_are_zeros_or_that_our_step_has_clipped_are_not_refused(of_two: dict[str, list[Any]]):
    for found in of_two["kept_gradients"]:
        assert found["plain"] == [["went on"], 0.0]
        told, apart = found["clips"]
        assert told == ["went on"] and apart < 1e-15, found


def refusals() -> dict[str, Any]:
    rank, found = dist.get_rank(), {}
    model = shard(make(), mesh())
    found["read"] = refusal(lambda: model.head.weight.sum())
    found["forward"] = refusal(lambda: model(tokens(0, rank)))
    weight = model.head.weight
    found["known"] = [list(weight.shape), str(weight.dtype), weight.is_floating_point(), str(weight.device)]
    found["tied"] = weight is model.embedding.weight and weight is not model.row
    found["pickle"] = refusal(lambda: pickle.dumps(model))
    model.compile(backend="aot_eager")
    optimizer = sgd(model.parameters())
    model(tokens(0, rank)).backward()
    before = [p.detach().clone() for p in model.parameters()]
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1e9)
    found["clip"] = refusal(optimizer.step)
    found["untouched"] = all(map(torch.equal, before, model.parameters()))
    optimizer.zero_grad()
    model(tokens(0, rank)).backward()
    optimizer.step()
    found["goes on"] = not all(map(torch.equal, before, model.parameters()))
    found["twice"] = refusal(lambda: shard(model, mesh()))
    found["Muon"] = refusal(lambda: autohete_fx.Muon(model))
    early = make()
    muon = autohete_fx.Muon(early, is_matrix=lambda name, param: param.ndim == 2)
    shard(early, mesh())
    early.layers[0].up._parameters["weight"].grad = torch.zeros_like(early.layers[0].up._parameters["weight"])
    found["early Muon"] = refusal(muon.step)
    found["3-D"] = refusal(lambda: shard(make(), init_device_mesh("cpu", (1, 1, 2))))
    found["mesh"] = refusal(lambda: shard(make(), 2))  # type: ignore[arg-type]
    found["differ"] = refusal(lambda: shard(make(layers=1 + rank), mesh()))
    elsewhere = make()
    elsewhere.register_buffer("mask", torch.zeros(2, device="meta" if rank else "cpu"))
    found["elsewhere"] = refusal(lambda: shard(elsewhere, mesh()))
    found["LSTM"] = refusal(lambda: shard(nn.LSTM(128, 128), mesh()))
    found["meta"] = refusal(lambda: shard(nn.Linear(128, 128, device="meta"), mesh()))
    found["one meta"] = refusal(lambda: shard(nn.Linear(128, 128, device="meta" if rank else "cpu"), mesh()))
    found["one lazy"] = refusal(lambda: shard([nn.Identity(), nn.LazyBatchNorm1d(affine=False)][rank], mesh()))
    kept = nn.Linear(128, 128)
    kept.also = [kept.weight] if rank else []
    found["one keeps"] = refusal(lambda: shard(kept, mesh()))
    replaced = shard(make(), mesh())
    replaced.head.weight = nn.Parameter(torch.zeros(131, 96))
    found["replaced"] = refusal(lambda: replaced.head.weight)
    return found


def test_wrong_use_is_an_error_that_says_what_to_do(of_two: dict[str, list[Any]]):
    for found in of_two["refusals"]:
        for name in ("read", "forward"):
            assert "autohete_fx.gathered(model)" in found[name] and "size (131, 96)" in found[name]
        assert found["known"] == [[131, 96], "torch.float64", True, "cpu"] and found["tied"]
        assert "torch.distributed.checkpoint" in found["pickle"]
        assert "max_grad_norm" in found["clip"] and found["untouched"] and found["goes on"]
        assert (
            "was sharded before" in found["twice"] and "3 dimensions" in found["3-D"] and "DeviceMesh" in found["mesh"]
        )
        assert "the models of ranks" in found["differ"] and "layers.1.norm.weight" in found["differ"]
        assert "the models of ranks" in found["elsewhere"] and "'meta'" in found["elsewhere"], found["elsewhere"]
        assert "_flat_weights" in found["LSTM"] and "no values yet" in found["meta"]
        assert "Replace parameters within" in found["replaced"]
        for name in ("Muon", "early Muon"):
            text = found.pop(name)
            assert text.startswith("OptimizerStateError") and "of which this rank holds (151, 96)" in text, text
        assert all(text.startswith("ShardError") for text in found.values() if isinstance(text, str))
    for name, words in (
        ("one meta", "weight has no values yet"),
        ("one lazy", "buffer running_mean has no values yet"),
        ("one keeps", "its attribute also"),
    ):
        told, own = (found[name] for found in of_two["refusals"])
        assert "rank 1 cannot shard its model: the " in told and words in told, told
        assert "rank 1 cannot" not in own and words in own, own
