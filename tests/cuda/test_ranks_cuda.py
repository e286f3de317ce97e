"""Ranks that share a model, on GPUs: NCCL on memory of every tier, collectives behind late kernels, and whole training runs.

In the first two a single rank gathers from itself. The others have two, with a GPU each, or with one for both, between which NCCL
then goes through sockets.
"""

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh

from autohete_fx.runtime.session import Session
from autohete_fx.runtime.shard.ranks import Ranks, ranks_of
from autohete_fx.runtime.tiers.host import open_tier
from tests.dist import ranks

COUNT = 2**20
LONG = 100_000_000  # cycles: some 50 milliseconds


@pytest.fixture
def alone(tmp_path: Path) -> Iterator[Ranks]:
    dist.init_process_group("nccl", init_method=f"file://{tmp_path}/meeting", rank=0, world_size=1)
    yield ranks_of(init_device_mesh("cuda", (1,)))
    dist.destroy_process_group()


def gathered(shards: list[Tensor], of: Ranks, session: Session) -> list[Tensor]:
    gather = torch.ops.autohete.gather
    handle = gather.issue(shards, of.count, of.digest, session.digest)
    return [gather.wait(handle, shard, at, of.count, session.digest) for at, shard in enumerate(shards)]


def test_nccl_reads_and_writes_pinned_memory_that_is_mapped(alone: Ranks):
    tier = open_tier("cuda")
    tier.reserve(4 * COUNT)
    home = tier.empty_strided((COUNT,), (1,), torch.float32).fill_(3.0)
    torch.cuda.synchronize()
    whole = torch.empty(COUNT, device="cuda")
    dist.all_gather_into_tensor(whole, home, group=alone.group)
    assert whole.eq(3.0).all()
    dist.all_gather_into_tensor(home, whole + 1, group=alone.group)
    torch.cuda.synchronize()
    assert tier.host_view(home).eq(4.0).all()


def test_a_collective_is_behind_what_makes_its_source_and_ahead_of_what_reads_its_result(alone: Ranks):
    session = Session("net on a GPU", torch.device("cuda"))
    for round_ in range(4):
        torch.cuda._sleep(LONG)
        shards = [torch.full((COUNT,), float(round_), device="cuda"), torch.full((7,), float(-round_), device="cuda")]
        wholes = gathered(shards, alone, session)
        for shard in shards:
            shard.fill_(100.0)  # the wait is over
        assert [float(whole.sum()) for whole in wholes] == [round_ * COUNT, -7.0 * round_]
    records = [record for record in session.lanes.records() if record.lane.value == "net"]
    assert len(records) == 4 and all(record.end_s > record.begin_s for record in records)
    session.close()


def test_two_ranks_train_as_one_process_under_every_plan(tmp_path: Path):
    for found in ranks.run("tests.dist.test_shard_plans.plans", tmp_path, device="cuda"):
        apart = {name: value for name, value in found.items() if isinstance(value, float)}
        assert len(apart) > 6 and max(apart.values()) < 1e-9, apart


@pytest.mark.slow
def test_compiled_by_inductor_two_ranks_are_within_rounding(tmp_path: Path):
    assert max(ranks.run("tests.dist.test_shard_plans.compiled", tmp_path, device="cuda")) < 1e-9


@pytest.mark.slow
def test_two_ranks_train_parameters_in_16_bits(tmp_path: Path):
    for found in ranks.run("tests.dist.test_shard_uses.in_16_bits", tmp_path, device="cuda"):
        assert max(found.values(), default=0.0) < 1e-2, found


@pytest.mark.slow
def test_evaluation_between_steps_sees_the_weights_of_the_step(tmp_path: Path):
    for found in ranks.run("tests.dist.test_shard_uses.evaluated", tmp_path, device="cuda"):
        assert max(found) < 1e-12, found


@pytest.mark.slow
def test_lengths_that_differ_by_rank_and_step(tmp_path: Path):
    for found in ranks.run("tests.dist.test_shard_uses.lengths", tmp_path, device="cuda"):
        assert max(found) < 1e-9, found


def test_a_rank_does_not_go_on_when_another_one_was_killed(tmp_path: Path):
    """NCCL tells its own thread, which may end the process before the program asks."""
    try:
        failing = "tests.dist.test_shard_failures.failing"
        [[told, *_]] = ranks.run(failing, tmp_path, "forward", "is_killed", survivors=[0], device="cuda")
    except AssertionError as ended:
        told = str(ended)
    # -6: NCCL's thread aborts. One that hangs is killed, which is -9.
    assert told.startswith("ShardError") or ("ended with -6" in told and "NCCL" in told), told
