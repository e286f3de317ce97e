"""Ranks of a sharded model that fail, end or refuse a step while they train: the others learn which one, and soon."""

import atexit
import datetime
import functools
import json
import os
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

import autohete_fx
from autohete_fx.errors import AutoHeteError, ShardError
from autohete_fx.internals.groups import meeting
from autohete_fx.internals.versions import timeout_of
from autohete_fx.runtime.lanes.failures import tell_refusal
from autohete_fx.runtime.lanes.net import run_collective
from autohete_fx.runtime.shard.ranks import ranks_of
from tests.dist import ranks
from tests.dist.sharded import DEVICE, make, mesh, refusal, tokens
from tests.dist.test_shard_plans import backend
from tests.thorough import thorough

pytestmark = pytest.mark.slow


def is_killed(_: object) -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def raises(_: object) -> None:
    """As an interpreter ends that an exception leaves."""
    sys.last_value = ValueError("no such batch")
    atexit._run_exitfuncs()


def lingers(_: object) -> None:
    """Likewise, but threads that wait for other ranks keep the process."""
    raises(None)
    wait_for_the_other()


def clips(optimizer: torch.optim.Optimizer) -> None:
    """It alone writes to its gradients, and lives on."""
    nn.utils.clip_grad_norm_([p for group in optimizer.param_groups for p in group["params"]], 1e-3)
    assert "were changed between backward and step()" in refusal(optimizer.step)
    wait_for_the_other()


def wait_for_the_other() -> None:
    store: Any = meeting()
    store.wait(["told"])


FAILURES: dict[str, Callable[[Any], None]] = {f.__name__: f for f in (is_killed, raises, lingers, clips)}


def failing(where: str, how: str) -> Any:
    """What the first rank is told, the seconds until then and those that a group waits, where the last one fails."""
    model = autohete_fx.shard(make(), mesh())
    # Shards alone have no mean of small gradients, only their norm.
    params = [p for p in model.parameters() if where != "norm" or p.nbytes >= 2**16]
    optimizer = autohete_fx.AdamW(params, lr=1e-2, max_grad_norm=1.0 if where == "norm" else None)
    model.compile(**(backend("keep") if where == "forward" else {"backend": "aot_eager"}))
    for step in range(2):
        optimizer.zero_grad()
        model(tokens(step, dist.get_rank())).backward()
        if step == 0:
            optimizer.step()
    if dist.get_rank() == dist.get_world_size() - 1:
        FAILURES[how](optimizer)
        os._exit(0)

    def trains() -> None:
        """A GPU's collectives fail when it comes to them, not as they are given to it."""
        for step in range(2, 50):
            loss = model(tokens(step, 0))
            loss.backward()
            loss.item()

    does = {"forward": trains, "step": optimizer.step, "norm": optimizer.step}
    began = time.monotonic()
    told = refusal(does[where] if where in does else autohete_fx.gathered(model).__enter__)
    waited_s = time.monotonic() - began
    store: Any = meeting()
    store.set("told", "")
    print(json.dumps([told, waited_s, timeout_of(dist.group.WORLD, DEVICE).total_seconds()]), flush=True)
    os._exit(0)  # the group cannot be taken down in order


@pytest.mark.parametrize(
    ("where", "how", "named"),
    [
        *((where, "is_killed", "rank 1 has ended") for where in ("forward", "gathered")),
        *(thorough(where, "is_killed", "rank 1 has ended") for where in ("step", "norm")),
        ("step", "raises", "rank 1 failed with ValueError: no such batch"),
        ("forward", "lingers", "rank 1 failed with ValueError: no such batch"),
        ("step", "clips", "rank 1 failed with ShardError: the gradients of"),
        thorough("norm", "clips", "rank 1 failed with ShardError: the gradients of"),
    ],
)
def test_a_rank_that_fails_is_named_by_the_others_at_once(tmp_path: Path, where: str, how: str, named: str):
    [[told, waited_s, timeout_s]] = ranks.run(
        "tests.dist.test_shard_failures.failing", tmp_path, where, how, survivors=[0]
    )
    assert told.startswith(f"CollectiveError: a collective over the ranks that hold the model failed: {named}"), told
    assert "Look at the output of rank 1, and start all of them again" in told
    assert waited_s < 60 < timeout_s / 10


def test_all_others_name_the_rank_that_fails(tmp_path: Path):
    found = ranks.run(
        "tests.dist.test_shard_failures.failing", tmp_path, "step", "is_killed", num_ranks=3, survivors=[0, 1]
    )
    assert all("failed: rank 2 has ended" in told and waited_s < 60 for told, waited_s, _ in found), found


def beside_another() -> Any:
    """Errors of a rank, or None: of a collective that takes a while, of one with its own error, and of one of all ranks with that.
    Ranks 0 and 1 hold a model, and 2 and 3 another, of which rank 3 refuses a step and ends. All of them have held one before."""
    rank, store = dist.get_rank(), meeting()
    before = ranks_of(init_device_mesh("cpu", (4,)))
    mine = ranks_of(init_device_mesh("cpu", (2, 2), mesh_dim_names=("model", "shards"))["shards"])
    if rank == 3:
        tell_refusal(ValueError("no such batch"), mine.control)
        store.set("refused", "")
        os._exit(0)
    store.wait(["refused"])
    time.sleep(3 * (rank == 1))
    torch.set_default_device("meta")
    number, told = torch.ones(1, device="cpu"), []

    def waits() -> list[Any]:
        return [dist.all_reduce(number, group=mine.group, async_op=True)]

    for start, among in ((waits, mine), (closed, mine), (closed, before)):
        try:
            told.append(run_collective(start, among.control, on_cpu=True))
        except ShardError as error:
            told.append(str(error))
    print(json.dumps(told), flush=True)
    store.set(f"told {rank}", "")
    store.wait(["told 0", "told 1", "told 2"])
    os._exit(0)


def closed() -> list[Any]:
    raise RuntimeError("Connection closed by peer [127.0.0.1]")


def test_ranks_of_another_model_may_fail_and_end(tmp_path: Path):
    beside = ranks.run("tests.dist.test_shard_failures.beside_another", tmp_path, num_ranks=4, survivors=[0, 1, 2])
    for healthy, own, _ in beside[:2]:
        assert healthy is None and "failed: Connection closed by peer" in own and "the other ranks' output" in own, own
    assert all("failed: rank 3 failed with ValueError: no such batch" in told for told in beside[2][:2]), beside[2]
    assert all("failed: rank 3 has ended: Connection closed" in of_all for *_, of_all in beside), beside


@torch.library.custom_op("autohete_tests::checked", mutates_args=())
def checked(x: Tensor, where: str) -> Tensor:
    """A copy, by a kernel that refuses a batch on the ranks of which `FAILING` says so."""
    if (where, dist.get_rank()) in FAILING:
        raise IndexError(f"no such row in {where}")
    return x.clone()


checked.register_fake(lambda x, where: torch.empty_like(x))
checked.register_autograd(lambda ctx, gradient: (checked(gradient, "backward"), None))
FAILING: set[tuple[str, int]] = set()


class Checked(nn.Module):
    """Alike layers, so that all gathers are of one size: a collective of another step would be taken for the right one."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(128, 128, bias=False).double() for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        for number, layer in enumerate(self.layers):
            x = x + torch.tanh(layer(x))
            x = checked(x, "forward") if number == 1 else x
        return x.square().mean()


def caught(where: str) -> Any:
    """By what failed on which ranks, what a rank is told that goes on with its next batch, and then; and seconds until then."""
    found: list[Any] = []
    for failing in ({("forward", 0), ("forward", 1)}, {(where, 1)}):
        torch.manual_seed(0)
        model = autohete_fx.shard(Checked(), mesh())
        optimizer = autohete_fx.AdamW(model.parameters())
        model.compile(**backend())
        began = time.monotonic()
        for step in range(3):
            FAILING.update(failing if step == 1 else ())
            try:
                model(torch.full((4, 128), 0.1 * (1 + dist.get_rank()), dtype=torch.float64)).backward()
                optimizer.step()
                found.append("went on")
            except (AutoHeteError, IndexError) as error:
                found.append(f"{type(error).__name__}: {error}")
            FAILING.clear()
            optimizer.zero_grad()
        found.append(time.monotonic() - began)
    end_together(found)


def end_together(found: object) -> None:
    """Two ranks say what they were told, and end when both have: groups under way would keep either."""
    print(json.dumps(found), flush=True)
    store: Any = meeting()
    store.set(f"done {dist.get_rank()}", "")
    store.wait(["done 0", "done 1"])
    os._exit(0)


@pytest.mark.parametrize("where", ["forward", thorough("backward")])
def test_a_rank_that_catches_an_error_does_not_go_on_alone(tmp_path: Path, where: str):
    """And all ranks may go on that have failed alike."""
    first, second = ranks.run("tests.dist.test_shard_failures.caught", tmp_path, where)
    error = f"IndexError: no such row in {where}"
    for found in (first, second):
        assert found[:3] == ["went on", "IndexError: no such row in forward", "went on"], found
        assert found[4] == "went on" and max(found[3], found[7]) < 60, found
        assert "Start all" in found[6] or "start all" in found[6], found
    assert first[5].startswith("CollectiveError: ") and f"failed: rank 1 failed with {error}" in first[5], first
    assert second[5] == error and second[6].startswith("ShardError: the forward or backward before failed"), second
    assert error in second[6], second


def waiting_alone() -> None:
    """What ranks are told that wait for others: where one compiles, for another batch, what the others have compiled; and where the
    first one evaluates by itself, in vain."""
    found = list[str]()
    for evaluates in (False, True):
        torch._dynamo.reset()
        group, rank = dist.new_group(timeout=datetime.timedelta(seconds=12)), dist.get_rank()
        model = autohete_fx.shard(make(layers=1), DeviceMesh.from_group(group, "cpu"))
        model.compile(**backend(), dynamic=False)
        with torch.set_grad_enabled(not evaluates):
            model(tokens(0, rank))
            batch = 4 if evaluates else 4 + rank
            is_there = rank == 0 or not evaluates
            forward = functools.partial(model, tokens(1, rank, batch=batch))
            found.append(refusal(forward).splitlines()[0] if is_there else "")
    print(json.dumps(found), flush=True)
    os._exit(0)


def test_ranks_that_are_left_alone_do_not_wait_for_ever(tmp_path: Path):
    ran, compiled = ranks.run("tests.dist.test_shard_failures.waiting_alone", tmp_path)
    refused = "ShardError: a rank compiles a graph for inputs of sizes [(5, "
    assert compiled[0].startswith(refused) and compiled[0].count("Expected was") == 1, compiled[0]
    assert ran[0].startswith("ShardError: ranks that hold a model ran different graphs of it at a time"), ran[0]
    assert "elsewhere one that is to be compiled. Expected was" in ran[0], ran[0]
    assert ran[1].startswith("CollectiveError: a collective over the ranks that hold the model failed"), ran[1]


class Normed(Checked):
    """With a small parameter, whose gradient the step averages."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(128).double()

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(self.norm(x))


def leaves_out(what: str, rank: int) -> None:
    """What ranks are told where one leaves out the backward or the step of a batch, and seconds until then."""
    model = autohete_fx.shard(Normed(), mesh())
    optimizer = autohete_fx.AdamW(model.parameters())
    model.compile(**backend())
    told = ""
    for step in range(4):
        is_left_out = step == 1 and dist.get_rank() == rank
        began = time.monotonic()
        try:
            loss = model(torch.full((4, 128), 0.1 * (1 + step), dtype=torch.float64))
            if not (is_left_out and what in ("backward", "both")):
                loss.backward()
            if is_left_out and what == "gradients":
                optimizer.zero_grad()
            if not (is_left_out and what in ("step", "both")):
                optimizer.step()
            optimizer.zero_grad()
        except ShardError as error:
            told = str(error)
            break
    end_together([told, time.monotonic() - began])


@pytest.mark.parametrize("what", ["backward", thorough("both")])
def test_a_rank_that_leaves_out_a_backward_is_named_at_once(tmp_path: Path, what: str):
    first, second = ranks.run("tests.dist.test_shard_failures.leaves_out", tmp_path, what, 1)
    for number, (told, seconds) in enumerate((first, second)):
        assert f"rank {1 - number} has begun " in told and "left out a forward, a backward or a step" in told, told
        assert "Let all of them run as many forwards, backwards and steps" in told and seconds < 60, (told, seconds)


def test_a_rank_that_drops_its_gradients_is_told_before_any_parameter_changes(tmp_path: Path):
    """As where a batch was not finite. The other ranks' rows alone would change."""
    for told, seconds in ranks.run("tests.dist.test_shard_failures.leaves_out", tmp_path, "gradients", 1):
        assert "have gradients set to None" in told or "failed with ShardError: optimizer.step()" in told, told
        assert seconds < 60


def test_a_rank_that_leaves_out_a_step_is_told_at_once(tmp_path: Path):
    (first, first_s), (second, second_s) = ranks.run("tests.dist.test_shard_failures.leaves_out", tmp_path, "step", 1)
    assert first.startswith("optimizer.step() began on this rank, of an optimizer of "), first
    assert (
        "ran different graphs of it at a time" in second or "rank 0 failed with ShardError: optimizer.step()" in second
    )
    assert max(first_s, second_s) < 60


def steps_in_another_order(small: int) -> None:
    """What ranks are told whose optimizers, one of a small parameter of 64 and one of another size, step in another order."""
    first, second = Normed(), Normed()
    second.norm = nn.LayerNorm(128, bias=small == 64).double()
    both = autohete_fx.shard(nn.ModuleList([first, second]), mesh())
    optimizers = [autohete_fx.AdamW(model.parameters()) for model in (first, second)]
    compiled = torch.compile(lambda x: first(x) + second(x), **backend())
    told = ""
    try:
        compiled(torch.ones(4, 128, dtype=torch.float64)).backward()
        for optimizer in optimizers if dist.get_rank() else reversed(optimizers):
            optimizer.step()
    except ShardError as error:
        told = str(error)
    del both
    end_together(told)


@pytest.mark.parametrize("small", [64, thorough(32)])
def test_optimizers_that_step_in_another_order_on_one_rank_are_refused(tmp_path: Path, small: int):
    """Else the mean of one's gradients would be taken with the other's, or gloo would end the process where sizes differ."""
    for told in ranks.run("tests.dist.test_shard_failures.steps_in_another_order", tmp_path, small):
        assert "Step several optimizers in one order" in told, told
