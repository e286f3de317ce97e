"""Whole parameters of sharded models in eager code: ``gathered``, and what the page says of counts and norms."""

import re
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

import autohete_fx
from autohete_fx.ir.sizes import format_bytes
from autohete_fx.runtime.shard import gathered, shard
from autohete_fx.runtime.shard import whole as whole_file
from autohete_fx.runtime.shard.parts import shard_of
from tests.dist import ranks
from tests.dist.sharded import (
    Net,
    make,
    mesh,
    refusal,
    tokens,
    whole,
)
from tests.layers import EAGER

SHARDS_PAGE = Path(__file__).parents[2] / "docs" / "shards.md"


@pytest.fixture(scope="module")
def of_two(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[Any]]:
    return ranks.run_each([measured, parts_in_whole, in_whole, evaluating_alone], tmp_path_factory.mktemp("ranks"))


def measured() -> list[float]:
    """How far the page's count and norms of a sharded model are from those of one that is not."""
    (recipe,) = re.findall(r"```python\n(whole = .*?)```", SHARDS_PAGE.read_text(), flags=re.DOTALL)
    expected, known = make(), {"torch": torch, "DTensor": DTensor, "model": shard(make(), mesh())}
    exec(recipe, known)
    norms = [float((a - p.norm()).abs()) for a, p in zip(known["norms"], expected.parameters(), strict=True)]
    return [known["count"] - sum(p.numel() for p in expected.parameters()), max(norms)]


def test_the_page_counts_and_measures_whole_parameters(of_two: dict[str, list[Any]]):
    for count, norm in of_two["measured"]:
        assert count == 0 and norm < 1e-13


def parts_in_whole() -> dict[str, Any]:
    """One layer of a model within ``gathered``, and ranks of which the second has no room for all of it."""
    rank, found = dist.get_rank(), {}
    expected, model = make(), shard(make(), mesh())
    first, second = model.layers
    with gathered(first), torch.no_grad():
        found["seen"] = torch.equal(first.up.weight, expected.layers[0].up.weight)
        found["other"] = refusal(lambda: second.up.weight.sum())
        first.up.weight.mul_(2.0)
    found["after"] = refusal(lambda: first.up.weight.sum())
    with gathered(model):
        found["written"] = torch.equal(first.up.weight, 2 * expected.layers[0].up.weight)
    result_of, taken = whole_file.result_of, []

    def has_no_room(*args: Any) -> Tensor:
        taken.append(args)
        if rank == 1 and len(taken) == 2:
            raise torch.OutOfMemoryError("Tried to allocate 5.00 GiB\nmore of it")
        return result_of(*args)

    with mock.patch.object(whole_file, "result_of", has_no_room):
        found["no room"] = refusal(gathered(model).__enter__)
    found["bytes"] = sum(2 * p.nbytes for p in model.parameters() if shard_of(p) is not None)
    found["same as before"] = refusal(lambda: gathered(model).__enter__())
    return found


def test_a_part_may_be_whole_alone_and_all_ranks_learn_where_one_has_no_room(of_two: dict[str, list[Any]]):
    for found in of_two["parts_in_whole"]:
        assert found["seen"] and found["written"] and found["same as before"] == "went on"
        assert all("each rank holds a shard" in found[name] for name in ("other", "after"))
        told = f"gathered(Net) takes {format_bytes(found['bytes'])} for whole parameters on each rank's device, for which rank 1"
        assert told in found["no room"] and "5.00 GiB. Expected" in found["no room"], found["no room"]
        assert "gathered(model.layers[0])" in found["no room"]


def in_whole() -> dict[str, Any]:
    rank, found = dist.get_rank(), {}
    expected = make()
    model: Net = shard(make(), mesh())
    with gathered(model):
        found["seen"] = all(map(torch.equal, model.parameters(), expected.parameters()))
        found["forward"] = torch.equal(model.eval()(tokens(0, rank)), expected.eval()(tokens(0, rank)))
        found["tied"] = model.head.weight is model.embedding.weight
        with torch.no_grad():
            model.head.weight.mul_(2.0)
            model.row.data += 1.0
        model.frozen.weight = nn.Parameter(torch.full_like(model.frozen.weight, 3.0), requires_grad=False)
        torch.manual_seed(rank)  # the first rank's values count, also for what is not sharded
        nn.init.normal_(model.layers[0].up.weight)
        nn.init.normal_(model.layers[0].up.bias)
        kept = [p.detach().clone() for p in model.parameters()]
        dist.broadcast(kept[4], 0)
    after = {n: whole(p, p) for n, p in model.named_parameters()}
    found["written"] = torch.equal(after["embedding.weight"], 2 * expected.embedding.weight)
    found["written"] &= torch.equal(after["row"], expected.row + 1.0)
    found["replaced"] = bool((after["frozen.weight"] == 3.0).all())
    everywhere: list[Any] = [None, None]
    dist.all_gather_object(everywhere, after)
    found["agreed"] = all(torch.equal(everywhere[0][n], everywhere[1][n]) for n in after)
    torch.manual_seed(0)
    found["first"] = torch.equal(
        after["layers.0.up.weight"], nn.init.normal_(torch.empty(301, 96, dtype=torch.float64))
    )
    found["shards"] = shard_of(dict(model.named_parameters())["row"]) is not None

    def backward() -> None:
        with gathered(model):
            model(tokens(0, rank)).backward()

    def other_rank() -> None:
        with gathered(model), torch.no_grad():
            model.row.data += rank

    def failing() -> None:
        with gathered(model):
            model.row.data += 1.0
            if rank == 1:
                raise autohete_fx.AutoHeteError("mine")

    found["errors"] = [
        refusal(backward),
        refusal(other_rank),
        refusal(failing),
        refusal(lambda: gathered(make()).__enter__()),
    ]
    model.zero_grad()
    found["restored"] = all(torch.equal(whole(p, p), after[n]) for n, p in model.named_parameters())
    return found


def test_gathered_shows_whole_parameters_and_scatters_what_the_first_rank_wrote(of_two: dict[str, list[Any]]):
    for rank, found in enumerate(of_two["in_whole"]):
        backward, other_rank, failing, not_sharded = found.pop("errors")
        assert all(found.values()), found
        assert "ran a backward within gathered" in backward and "wrote row, and the first did not" in other_rank
        assert ("rank 1 raised AutoHeteError" in failing) if rank == 0 else failing == "AutoHeteError: mine"
        assert "Shard it first" in not_sharded


def evaluating_alone() -> dict[str, Any]:
    """The first rank evaluates batches of other sizes between two steps, and the others train as if it had not."""
    rank = dist.get_rank()
    expected, model = make(dropout=0.0), shard(make(dropout=0.0), mesh())
    model.compile(backend="autohete", options=EAGER)
    optimizer = autohete_fx.AdamW(model.parameters(), lr=1e-2)
    plain = torch.optim.AdamW(expected.parameters(), lr=1e-2, fused=True)
    found, before = {"alike": True, "compiled": 0}, len(autohete_fx.compilations())
    for step in range(3):
        model(tokens(step, rank)).backward()
        optimizer.step()
        optimizer.zero_grad()
        (sum(expected(tokens(step, each)) for each in range(2)) / 2).backward()
        plain.step()
        plain.zero_grad()
        with gathered(model), torch.no_grad():
            for batch in (8, 5) if rank == 0 else ():
                found["alike"] &= torch.allclose(model(tokens(9, 0, batch=batch)), expected(tokens(9, 0, batch=batch)))
        found["compiled"] = len(autohete_fx.compilations()) - before
    return found


def test_a_rank_evaluates_alone_without_any_rank_compiling_again(of_two: dict[str, list[Any]]):
    assert of_two["evaluating_alone"] == [{"alike": True, "compiled": 1}] * 2
