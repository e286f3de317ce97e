"""The link between ranks: its figures explain what was timed, and all ranks have the same ones."""

import contextlib
import io
import json
import os
import time
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch.distributed.elastic.utils.distributed import get_free_port

import autohete_fx
from autohete_fx import cli
from autohete_fx.compiler.agreement import Agreement
from autohete_fx.ir import Lane, Machine
from autohete_fx.machine import measure, net
from autohete_fx.machine.net import figures_of
from autohete_fx.runtime.lanes import team
from autohete_fx.runtime.shard import shard
from tests import planner_problems
from tests.dist import ranks
from tests.dist.sharded import mesh
from tests.layers import EAGER, Layers


@pytest.mark.parametrize("num_ranks", [2, 8])
def test_figures_are_those_that_made_the_seconds(num_ranks: int):
    sizes = (2**16, 2**22)
    seconds = [(num_ranks - 1) * (2e-5 + size / (num_ranks * 5e9)) for size in sizes]
    assert figures_of(sizes, seconds, num_ranks) == pytest.approx((5e9, 2e-5))


def test_a_large_whole_that_is_no_slower_gives_finite_figures():
    rate, latency_s = figures_of((2**16, 2**22), (1e-3, 1e-3), 2)
    assert 0 < rate < 1e11 and 0 <= latency_s <= 1e-3


def measured(folder: str) -> list[Any]:
    """Figures of a rank, twice, and how often they were timed; the second rank's machine is another one."""
    os.environ["AUTOHETE_CACHE_DIR"] = folder
    calls, timed = [], net.measure_net

    def counted(*args: Any) -> tuple[float, float]:
        calls.append(1)
        return timed(*args)

    net.measure_net = counted
    agreement = Agreement(shard(Layers(), mesh()).parameters())
    rank, given = dist.get_rank(), planner_problems.MACHINE
    mine = replace(given, h2d_bytes_per_s=3.0 - rank, d2h_bytes_per_s=2.0 + rank, latency_s=1.0 + rank)
    found = [agreement.machine(mine, torch.device("cpu")) for _ in range(2)]
    of_all = [found[0].h2d_bytes_per_s, found[0].d2h_bytes_per_s, found[0].latency_s]
    return [*([each.net_bytes_per_s, each.net_latency_s] for each in found), len(calls), of_all]


def test_ranks_measure_together_and_once(tmp_path: Path):
    first, second = ranks.run("tests.dist.test_net.measured", tmp_path, str(tmp_path))
    assert first == second
    (rate, latency_s), again, calls, of_all = first
    assert again == [rate, latency_s] and calls == 1 and of_all == [2.0, 2.0, 2.0]
    assert 1e6 < rate < 1e12 and 0 <= latency_s < 1


def by_turns(folder: str, own_caches: bool) -> dict[str, Any]:
    """When this rank measured its host, what its plan counts with, and how many threads its updates have."""
    cache = f"{folder}/{dist.get_rank()}" if own_caches else folder
    os.environ |= {"AUTOHETE_CACHE_DIR": cache, "TORCHELASTIC_RUN_ID": "none", "LOCAL_WORLD_SIZE": "2"}
    began, timed = list[float](), measure.measure_machine

    def noted(*args: Any, **how: Any) -> Machine:
        began.append(time.time())
        machine = timed(*args, **how)
        began.append(time.time())
        return machine

    model = shard(Layers(), mesh())
    model.compile(backend="autohete", options=EAGER)
    with mock.patch.object(measure, "measure_machine", noted):
        model(torch.ones(64, 128))
    problem = autohete_fx.compilations()[-1].problem
    assert problem is not None
    whole = measure.load_or_measure_machine(torch.device("cpu"), num_ranks=2)
    with mock.patch.object(team, "num_cores", lambda: 64):
        threads = team.update_threads()
    rates = [(m.host_update_params_per_s, m.host_flops_per_s, m.disk_bytes_per_s) for m in (problem.machine, whole)]
    return {"measured": began, "rates": rates, "threads": threads}


@pytest.mark.slow
def test_ranks_of_one_host_measure_it_one_after_another_and_share_it(tmp_path: Path):
    first, second = ranks.run("tests.dist.test_net.by_turns", tmp_path, str(tmp_path), True)
    assert first["measured"][1] <= second["measured"][0]
    both = ranks.run("tests.dist.test_net.by_turns", tmp_path, str(tmp_path), False)
    assert [len(found["measured"]) for found in both] == [2, 0]
    for found in both:
        part, whole = found["rates"]
        assert part == [rate / 2 for rate in whole] and found["threads"] == 28  # though each computes with one


def test_a_process_alone_has_no_net():
    agreement = Agreement([torch.nn.Parameter(torch.ones(2))])
    assert agreement.machine(planner_problems.MACHINE, torch.device("cpu")) == planner_problems.MACHINE
    assert net.ranks_of_job("cpu") is None


def doctored(path: str) -> None:
    """Print what doctor prints on a rank that meets the others as torchrun tells it to."""
    rank, count, port = dist.get_rank(), dist.get_world_size(), [get_free_port()]
    dist.broadcast_object_list(port)
    dist.destroy_process_group()
    os.environ |= {"RANK": f"{rank}", "WORLD_SIZE": f"{count}", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": f"{port[0]}"}
    os.environ["AUTOHETE_CACHE_DIR"] = os.path.dirname(path)
    with contextlib.redirect_stdout(io.StringIO()) as printed:
        assert cli.main(["doctor", "--device", "cpu", "--save", path]) == 0
    print(json.dumps(printed.getvalue()), flush=True)
    os._exit(0)  # it has taken its group down


def test_doctor_of_two_ranks_prints_and_saves_it_once(tmp_path: Path):
    """test_cluster_doctor.py has one that torchrun itself starts."""
    printed, other = ranks.run("tests.dist.test_net.doctored", tmp_path, str(tmp_path / "machine.json"))
    assert printed.count("link to other ranks") == printed.count("latency between ranks") == 1 and not other.strip()
    saved = Machine.load(tmp_path / "machine.json")
    assert saved.net_bytes_per_s > 0 and json.loads((tmp_path / "machine.json").read_text())["net_latency_s"] >= 0


ALONE = (("update", "h2d", 0.5), ("h2d", "update", 0.9), ("h2d", "d2h", 0.8))
TOGETHER = (("h2d", "d2h", 0.6), ("compute", "net", 0.9), ("net", "compute", 0.7))


@pytest.mark.parametrize("device_type", ["cuda", "cpu"])
def test_training_counts_with_what_collectives_cost_the_other_lanes_and_times_it_once(
    device_type: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """By ranks of accelerators that are not there: only the timing itself is told."""
    monkeypatch.setenv("AUTOHETE_CACHE_DIR", str(tmp_path))
    timed: list[list[Lane]] = []

    class Stream:
        stream = contextlib.nullcontext()

        def __init__(self, device: torch.device, issue: object) -> None:
            assert device.type == "cuda"

    def measure_contention(device: torch.device, work: dict[Lane, Any], agree: Any) -> Any:
        assert agree(1.0) == 2.0 and not torch.is_grad_enabled(), "the slowest rank's seconds count"
        timed.append([*work])
        return TOGETHER

    ones = torch.ones
    monkeypatch.setattr(net.torch, "ones", lambda *size, device: ones(*size))
    monkeypatch.setattr(net, "work_of", lambda device, make: {Lane.COMPUTE: None, Lane.H2D: None, Lane.D2H: None})
    monkeypatch.setattr(net, "OnStream", Stream)
    monkeypatch.setattr(net, "measure_contention", measure_contention)
    monkeypatch.setattr(net, "measure_net", lambda *_: (3e9, 1e-5))
    monkeypatch.setattr(net, "machine_key", lambda device: device.type)
    monkeypatch.setattr(net.dist, "get_backend", lambda group: "nccl")
    ranks_there: Any = SimpleNamespace(count=2, num_replicas=1, replicas=None, hosts=(0, 0), digest="2-ab", group=None)

    def exchange(what: str, value: Any) -> list[Any]:
        return [value, 2 * value if what.startswith("seconds") else value]

    device = torch.device(device_type)
    machine = replace(planner_problems.MACHINE, contention=ALONE if device_type == "cuda" else ())
    first, again = (net.load_or_measure_net(machine, ranks_there, device, exchange) for _ in range(2))
    assert first == again and first.net_bytes_per_s == 3e9
    if device_type == "cpu":
        assert not first.contention and not timed
    else:
        assert timed == [[Lane.COMPUTE, Lane.H2D, Lane.D2H, Lane.NET]]
        assert first.contention == (*ALONE[:2], *TOGETHER)  # updates as the machine alone has them
        assert first.kept(Lane.NET, Lane.COMPUTE) == 0.7


@pytest.mark.parametrize("short", ["this", "another"])
def test_contention_is_left_out_where_a_rank_has_no_room_and_measured_when_all_have(
    short: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """No rank waits in a gather for one that could not take memory; nor is it kept as a link that costs nothing."""
    monkeypatch.setenv("AUTOHETE_CACHE_DIR", str(tmp_path))
    ones, is_short = torch.ones, True

    def made(*size: int, device: torch.device) -> torch.Tensor:
        if is_short and short == "this":
            raise torch.OutOfMemoryError("CUDA out of memory")
        return ones(1)

    monkeypatch.setattr(net.torch, "ones", made)
    monkeypatch.setattr(net, "work_of", lambda device, make: {})
    monkeypatch.setattr(net, "OnStream", lambda device, issue: SimpleNamespace(stream=contextlib.nullcontext()))
    monkeypatch.setattr(net, "measure_contention", lambda device, work, agree: 1 // (not is_short) and TOGETHER)
    monkeypatch.setattr(net, "measure_net", lambda *_: (3e9, 1e-5))
    monkeypatch.setattr(net, "machine_key", lambda device: device.type)
    monkeypatch.setattr(net.dist, "get_backend", lambda group: "nccl")
    ranks_there: Any = SimpleNamespace(count=2, num_replicas=1, replicas=None, hosts=(0, 0), digest="2-ab", group=None)
    asked: list[Any] = []

    def exchange(what: str, value: Any) -> list[Any]:
        asked.append((what, value))
        return [value, not is_short if what.startswith("room") else value]

    machine = replace(planner_problems.MACHINE, contention=ALONE)
    first = net.load_or_measure_net(machine, ranks_there, torch.device("cuda"), exchange)
    assert first.contention == ALONE and ("room to measure", short == "another") in asked
    is_short = False
    again = net.load_or_measure_net(machine, ranks_there, torch.device("cuda"), exchange)
    assert again.contention == (*ALONE[:2], *TOGETHER)


def test_one_rank_has_the_figures_of_a_copy():
    """As the mesh of a model may have whose layers are parallel on as many ranks as there are."""
    assert figures_of((1000, 3000), (3e-6, 5e-6), 1) == pytest.approx((1e9, 2e-6))
