"""Four ranks in one process: rewritten graphs run on real numbers, by PyTorch's LocalTensor mode, and give what eager code gives.

Graphs are those of a rank that is imagined. Each of their inputs becomes one tensor a rank; collectives become PyTorch's functional
ones, which the mode carries out among these tensors, and copies become what they copy.
"""

from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor, fx
from torch.distributed._local_tensor import LocalTensor, LocalTensorMode

from autohete_fx import Plan
from autohete_fx.graph import collectives
from autohete_fx.internals import versions
from autohete_fx.runtime.shard import shard
from autohete_fx.runtime.shard.imagined import imagined_mesh
from autohete_fx.runtime.shard.parts import Part, shard_of
from tests.dist.sharded import Net, make, tokens
from tests.dist.test_shard_plans import BLOCKS, DECISIONS
from tests.layers import EAGER

RANKS = 4


class Lowered(fx.Interpreter):
    """A rewritten graph whose collectives are over a process group, and whose copies are done when they are issued."""

    def __init__(self, gm: fx.GraphModule, group: str) -> None:
        super().__init__(gm)
        self.group = group

    def call_function(self, target: Any, args: Any, kwargs: Any) -> Any:
        if target is collectives.issue_gather:
            return [self.collective("all_gather_into_tensor", shard, RANKS) for shard in args[0]]
        if target is collectives.issue_reduce:
            return [self.collective("reduce_scatter_tensor", grad, "avg", RANKS) for grad in args[0]]
        if target in collectives.WAITS:
            return args[0][args[2]]
        if getattr(target, "namespace", "") == "autohete":
            return args[0]  # the source of a copy, or the handle that stands for it
        return super().call_function(target, args, kwargs)

    def collective(self, name: str, src: Tensor, *args: Any) -> Tensor:
        functional = torch.ops._c10d_functional
        return functional.wait_tensor(getattr(functional, name)(src.contiguous(), *args, self.group))


def captured(model: Net, name: str) -> tuple[list[fx.GraphModule], list[Tensor]]:
    """The forward and backward of a plan, and what the forward was called with. Collectives of imagined ranks move nothing."""
    graphs: list[fx.GraphModule] = []
    called: list[list[Tensor]] = []
    run_as_is = versions.run_as_is

    def noting(gm: fx.GraphModule, inputs: Any) -> Any:
        graphs.append(gm)
        run = run_as_is(gm, inputs)

        def call(args: list[Tensor]) -> object:
            called.append(list(args))
            return run(args)

        call._boxed_call = True  # type: ignore[attr-defined]
        return call

    decisions = DECISIONS[name]
    plan = Plan(labels=BLOCKS, decisions=tuple(decisions[at % len(decisions)] for at in range(len(BLOCKS))))
    with mock.patch.object(versions, "run_as_is", noting):
        model.compile(backend="autohete", options={**EAGER, "plan": plan})
        model(tokens(0, 0))
    return graphs, called[0]


def of_ranks(whole: Tensor, part: Part | None) -> dict[int, Tensor]:
    """A parameter as ranks have it: each its shard, or all of them the whole."""
    if part is None:
        return {rank: whole.detach().clone() for rank in range(RANKS)}
    padded = whole.new_zeros((RANKS * part.rows, *part.size[1:]))
    padded[: part.size[0]] = whole.detach()
    return {rank: rows.clone() for rank, rows in enumerate(padded.split(part.rows))}


@pytest.mark.parametrize("name", ["mixed", "kept from host"])
def test_rewritten_graphs_of_four_ranks_compute_what_eager_code_does(name: str):
    torch._dynamo.reset()
    reference = make(dropout=0.0)
    with imagined_mesh(RANKS) as mesh:
        model = shard(make(dropout=0.0), mesh)
        (forward, backward), given = captured(model, name)
        names = {p.data_ptr(): n for n, p in model.named_parameters()}
        read = [names.get(tensor.data_ptr()) for tensor in given]
        parts = {n: shard_of(p) for n, p in model.named_parameters()}
        whole = dict(reference.named_parameters())
        batch = {rank: tokens(0, rank) for rank in range(RANKS)}
        group = mesh.get_group().group_name
        with LocalTensorMode(RANKS):
            inputs = [LocalTensor(batch if n is None else of_ranks(whole[n], parts[n])) for n in read]
            loss, *saved = Lowered(forward, group).run(*inputs)
            one = LocalTensor({rank: torch.ones_like(of_rank) for rank, of_rank in loss._local_tensors.items()})
            grads = Lowered(backward, group).run(*saved, one)
    losses = [reference(batch[rank]) for rank in range(RANKS)]
    assert all(torch.allclose(loss._local_tensors[rank], losses[rank], rtol=1e-13) for rank in range(RANKS))
    (sum(losses) / RANKS).backward()
    seen = 0
    for n, grad in zip(read, grads, strict=True):
        if grad is None or n is None:
            continue
        part, expected, found = parts[n], whole[n].grad, grad._local_tensors
        mine = of_ranks(expected, part) if part is not None else {0: expected}
        if part is None:  # averaged by the step
            found = {0: sum(found.values()) / RANKS}
        assert all(torch.allclose(found[rank], mine[rank], rtol=1e-12, atol=1e-15) for rank in mine), n
        seen += 1
    assert seen == len([p for p in whole.values() if p.grad is not None])
