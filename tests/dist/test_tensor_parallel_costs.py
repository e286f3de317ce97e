"""Collectives of tensor parallelism in the costs of blocks, over ranks that are not there."""

import dataclasses
from collections.abc import Iterator
from typing import Any
from unittest import mock

import pytest
import torch
from torch import fx

import autohete_fx
from autohete_fx.graph.collectives import is_functional
from autohete_fx.ir import BlockCost, Machine
from autohete_fx.profiler import measured
from autohete_fx.runtime.shard.imagined import imagined_mesh
from tests.dist.tensor_parallel import make, parallel, tokens
from tests.layers import EAGER

RATE, LATENCY_S, RANKS = 1e9, 1e-3, 4
REDUCED_BYTES, GATHERED_BYTES = 4 * 32 * 96 * 8, 4 * 32 * 100 * 8


@pytest.fixture(scope="module", autouse=True)
def _imagined() -> Iterator[None]:
    """Once, for DTensors find an equal mesh of groups that are gone in a cache."""
    with imagined_mesh(RANKS):
        yield


def costs(rate: float, latency_s: float, **options: Any) -> tuple[BlockCost, ...]:
    def known(machine: Machine, *others: Any) -> Machine:
        return dataclasses.replace(machine, net_bytes_per_s=rate, net_latency_s=latency_s)

    torch._dynamo.reset()
    with mock.patch("autohete_fx.compiler.agreement.load_or_measure_net", known):
        [compilation] = autohete_fx.preview(parallel(make()), tokens(0), options={**EAGER, **options})
    assert compilation.problem is not None
    return compilation.problem.costs


@pytest.mark.slow
def test_blocks_wait_for_their_collectives_as_for_a_ring():
    slow, instant = costs(RATE, LATENCY_S), costs(1e30, 0.0)

    def added(block: int, name: str) -> float:
        return getattr(slow[block], name) - getattr(instant[block], name)

    gather_s = (RANKS - 1) * (LATENCY_S + GATHERED_BYTES / RANKS / RATE)
    reduce_s = 2 * (RANKS - 1) * (LATENCY_S + REDUCED_BYTES / RANKS / RATE)
    for layer in (1, 2):
        assert added(layer, "forward_s") == pytest.approx(2 * reduce_s)
        assert added(layer, "backward_s") == pytest.approx(4 * reduce_s)
        # Eager dropout makes its mask from what was reduced; whatever was reduced is kept by selective recomputation.
        assert added(layer, "recompute_s") == pytest.approx(2 * reduce_s)
        [(_, kept)], [(_, same)] = slow[layer].partial, instant[layer].partial
        assert kept.recompute_s == pytest.approx(same.recompute_s)
    assert added(0, "forward_s") == 0.0 and added(3, "forward_s") == pytest.approx(gather_s)
    # Bytes are those of this rank, and of what can move: the local shards of attention are too small.
    assert slow[1].param_bytes == 8 * 2 * 4 * 96 * 96 // RANKS


def test_timing_blocks_runs_no_collective():
    timed: list[fx.GraphModule] = []

    class Timed:
        best_s, run, fakes = 1e-3, None, ()

        def __init__(self, graph_module: fx.GraphModule, *_: Any) -> None:
            timed.append(graph_module)

        def time(self, known: Any) -> dict[str, torch.Tensor]:
            return {}

    with mock.patch.object(measured, "TimedGraph", Timed), mock.patch.object(measured, "load_text", lambda *_: None):
        costs(RATE, LATENCY_S, profile="measured", memory_budget="1GiB")
    assert timed and not any(is_functional(node.target) for each in timed for node in each.graph.nodes)
