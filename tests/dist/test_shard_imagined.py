"""Eight ranks that are not there, each in turn: all of them write the same graphs."""

import re

import pytest
import torch

import autohete_fx
from autohete_fx import Plan
from autohete_fx.runtime.shard import shard
from autohete_fx.runtime.shard.imagined import imagined_mesh
from tests.dist.sharded import make, tokens
from tests.dist.test_shard_plans import BLOCKS, DECISIONS
from tests.layers import EAGER


def graphs_of(rank: int, name: str) -> list[str]:
    torch._dynamo.reset()
    decisions = DECISIONS[name]
    plan = Plan(labels=BLOCKS, decisions=tuple(decisions[at % len(decisions)] for at in range(len(BLOCKS))))
    with imagined_mesh(8, rank) as mesh:
        model = shard(make(layers=2), mesh)
        [compilation] = autohete_fx.explain(model, tokens(0, rank), options={**EAGER, "plan": plan})
    texts = [compilation.readable(graph) for graph in ("forward", "backward")]
    texts = [re.sub("'[0-9a-f]{16}'", "session", text) for text in texts]
    return [re.sub(r"\bs\d+\b", "symbol", text) for text in texts]


@pytest.mark.parametrize("name", ["mixed", "kept from host"])
def test_every_rank_writes_the_same_graphs(name: str):
    # Of the embedding's 131 rows the last rank has 12, and padding; of the single row all but the first have padding alone.
    first, *others = (graphs_of(rank, name) for rank in (0, 3, 7))
    assert "autohete.gather.issue" in first[0] and "8, '8-" in first[0]
    assert all(graphs == first for graphs in others)
