"""Machine figures: plausible, complete, cached by what they depend on."""

import errno
import os
import shutil
import sys
import threading
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from autohete_fx.errors import HostMemoryError
from autohete_fx.ir import Lane, Machine
from autohete_fx.machine import measure as machine_module
from autohete_fx.machine import timing, update_rates
from autohete_fx.machine.budgets import machine_of
from autohete_fx.machine.contention import LaneWork
from autohete_fx.machine.described import machine_text
from autohete_fx.machine.disk_rate import measure_disk
from autohete_fx.machine.measure import (
    device_capacity_bytes,
    disk_capacity_bytes,
    host_capacity_bytes,
    load_or_measure_machine,
    machine_key,
    measure_machine,
)
from autohete_fx.optim.adamw import ADAMW, AdamW, mixed_step
from autohete_fx.options import Options
from autohete_fx.runtime.lanes.team import update_threads
from autohete_fx.runtime.session import Session

CPU = torch.device("cpu")


@pytest.fixture(autouse=True)
def _own_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AUTOHETE_CACHE_DIR", str(tmp_path / "cache"))


@pytest.mark.parametrize("free_bytes", [0, 5, 10**9, 71 * 2**30, 2**40 - 1])
def test_what_is_free_on_a_disk_counts_in_eighths(monkeypatch: pytest.MonkeyPatch, free_bytes: int) -> None:
    """Else what was compiled a minute ago for another gibibyte would be compiled again."""
    usage = [SimpleNamespace(free=free_bytes)]
    monkeypatch.setattr(shutil, "disk_usage", lambda directory: usage[0])
    monkeypatch.setattr(machine_module, "_is_in_ram", lambda directory: False)
    counted = disk_capacity_bytes()
    assert counted == host_capacity_bytes(CPU) and 7 / 8 * free_bytes <= counted <= free_bytes
    usage[0] = SimpleNamespace(free=counted)
    assert disk_capacity_bytes() == counted
    usage[0] = SimpleNamespace(free=int(counted * 1.05))
    assert disk_capacity_bytes() == counted


def test_every_rate_of_a_cpu_is_measured(tmp_path: Path) -> None:
    asked: list[int] = []

    def host_tensor(num_bytes: int) -> torch.Tensor:
        asked.append(num_bytes)
        return torch.empty(num_bytes, dtype=torch.uint8)

    found = measure_machine(CPU, make_host_tensor=host_tensor, offload_dir=str(tmp_path))
    assert asked
    assert [name for name, _ in found.device_flops_per_s] == ["float32", "bfloat16", "float16"]
    rates = [found.device_bytes_per_s, found.h2d_bytes_per_s, found.d2h_bytes_per_s, found.host_update_params_per_s]
    rates.append(found.disk_bytes_per_s)
    assert all(rate > 1e6 for rate in rates)
    assert found.flops_per_s("float32") > 1e8
    assert 0 < found.latency_s < 0.1
    assert found.device_bytes == device_capacity_bytes(CPU) > 2**28
    assert list(tmp_path.glob("tmp*")) == []
    assert found.copy_share == 0.0  # nobody said how training copies


def test_copies_are_timed_as_training_issues_them(tmp_path: Path) -> None:
    issued: list[tuple[Lane, int]] = []

    def issue(lane: Lane, src: torch.Tensor) -> Callable[[], torch.Tensor]:
        issued.append((lane, src.nbytes))
        return src.clone

    found = measure_machine(CPU, issue_copy=issue, offload_dir=str(tmp_path))
    assert {*issued} == {(lane, size) for lane in (Lane.D2H, Lane.H2D) for size in (64, 2**20)}
    assert found.h2d_bytes_per_s > 1e6 and found.d2h_bytes_per_s > 1e6
    assert 0.0 <= found.copy_share <= 2.0
    inline = measure_machine(CPU, issue_copy=issue, copies_run_beside=False, offload_dir=str(tmp_path))
    assert inline.copy_share == 1.0


@pytest.mark.slow
def test_what_a_copy_costs_whatever_its_size_is_no_part_of_the_rates(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    latency_s, bytes_per_s, now_s = 2e-3, 1e9, 0.0

    def clock() -> float:
        nonlocal now_s
        now_s += 1e-9
        return now_s

    def issue(lane: Lane, src: torch.Tensor) -> Callable[[], torch.Tensor]:
        nonlocal now_s
        now_s += latency_s + src.nbytes / bytes_per_s
        return src.clone

    monkeypatch.setattr(timing, "time", SimpleNamespace(perf_counter=clock))
    found = measure_machine(CPU, issue_copy=issue, copies_run_beside=False, offload_dir=str(tmp_path))
    assert found.latency_s == pytest.approx(latency_s, rel=1e-3)  # 64 bytes are part of it
    assert (found.h2d_bytes_per_s, found.d2h_bytes_per_s) == pytest.approx((bytes_per_s, bytes_per_s), rel=1e-3)


def test_measuring_draws_no_random_numbers(tmp_path: Path) -> None:
    before = torch.random.get_rng_state()
    measure_machine(CPU, offload_dir=str(tmp_path))
    assert torch.equal(before, torch.random.get_rng_state())


def test_products_are_of_random_numbers(monkeypatch: pytest.MonkeyPatch) -> None:
    """A GPU multiplies constants faster."""
    spreads: list[float] = []
    mm = torch.mm

    def noted(left: torch.Tensor, right: torch.Tensor, *, out: torch.Tensor) -> torch.Tensor:
        spreads.extend(each.float().std().item() for each in (left, right))
        return mm(left, right, out=out)

    monkeypatch.setattr(torch, "mm", noted)
    machine_module._product_rates(CPU, lambda count, dtype: torch.empty(count, dtype=dtype))
    assert min(spreads) > 0.5


@pytest.mark.parametrize(("rate", "sides"), [(1e12, (96, 768)), (2e10, (96, 256)), (1e9, (96,))])
def test_slow_products_are_timed_small(rate: float, sides: tuple[int, ...], monkeypatch: pytest.MonkeyPatch) -> None:
    """A first plan does not wait seconds for 16-bit products that a CPU has no instructions for."""
    asked: dict[torch.dtype, list[int]] = {}

    def timed(_: object, make: object, dtype: torch.dtype, side: int, *rest: object, **how: int) -> float:
        asked.setdefault(dtype, []).append(side)
        return rate * 96 / side

    monkeypatch.setattr(machine_module, "_product_rate", timed)
    rates = machine_module._product_rates(CPU, lambda count, dtype: torch.empty(count, dtype=dtype))
    assert asked == {torch.float32: [768], torch.bfloat16: [*sides], torch.float16: [*sides]}
    assert rates == tuple((str(dtype)[6:], rate * 96 / asked[dtype][-1]) for dtype in asked)


@pytest.mark.parametrize("in_inference_mode", [False, True])
def test_beside_a_gpu_the_host_updates_all_parts_by_turns_with_its_team(
    in_inference_mode: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    made: list[torch.Tensor] = []
    teams: list[int] = []
    pairs = (("update", "h2d", 0.5),)

    def make(count: int, dtype: torch.dtype) -> torch.Tensor:
        teams.append(torch.get_num_threads())
        made.append(torch.empty(count, dtype=dtype))
        return made[-1]

    def measure(device: torch.device, work: dict[Lane, LaneWork]) -> tuple[tuple[str, str, float], ...]:
        assert list(work) == [Lane.UPDATE]
        params, before = made[0].view(8, -1), made[0].view(8, -1).clone()
        for count, expected in ((3, 3), (4, 7), (1, 8)):
            work[Lane.UPDATE].begin(count)
            work[Lane.UPDATE].finish()
            assert (params != before).all(dim=1).tolist() == [part < expected for part in range(8)]
        return pairs

    monkeypatch.setattr(update_rates, "work_of", lambda device, make: {})
    monkeypatch.setattr(update_rates, "measure_contention", measure)
    monkeypatch.setattr(update_rates, "_SERVER_UPDATE_PARAMS", 2**13)
    monkeypatch.setattr(update_rates, "_HOST_PRODUCT", 64)
    with torch.inference_mode(in_inference_mode):
        found = update_rates.host_figures(torch.device("cuda"), make)
    assert found["contention"] == pairs and set(teams) == {update_threads()}
    assert found["host_update_params_per_s"] > 1e5 and found["host_flops_per_s"] > 1e6


def test_the_interpreter_is_free_while_the_host_updates() -> None:
    """Or launches that wait for it would count as contention."""
    step = update_rates._fused_step(
        CPU, update_rates._updated(lambda count, dtype: torch.empty(count, dtype=dtype), 2**21)
    )

    def goes_on_beside() -> bool:
        done: list[bool] = []

        def run() -> None:
            step()
            done.append(True)

        thread = threading.Thread(target=run)
        thread.start()
        goes_on = not done
        thread.join()
        return goes_on

    interval_s = sys.getswitchinterval()
    sys.setswitchinterval(1000.0)  # nobody takes it from a thread that keeps it
    try:
        assert any(goes_on_beside() for _ in range(20))
    finally:
        sys.setswitchinterval(interval_s)


def test_a_machine_is_measured_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    first = load_or_measure_machine(CPU, offload_dir=str(tmp_path))

    def never(*_: object, **__: object) -> None:
        raise AssertionError("measured again")

    monkeypatch.setattr(machine_module, "measure_machine", never)
    again = load_or_measure_machine(CPU, offload_dir=str(tmp_path))
    assert replace(again, host_bytes=0, disk_bytes=0) == replace(first, host_bytes=0, disk_bytes=0)


@pytest.mark.slow
def test_ranks_of_a_host_get_even_parts_of_what_all_of_them_do(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """And one rank alone has what it always had; none takes the other's figures from the cache."""
    threads: list[int] = []

    def rate(device: torch.device, make: object) -> float:
        threads.append(torch.get_num_threads())
        return 1e9 * len(threads)

    monkeypatch.setattr(machine_module, "update_rate", rate)
    monkeypatch.setattr("autohete_fx.runtime.lanes.team.num_cores", lambda: 8)
    own = torch.get_num_threads()
    session, options = Session("ranks of a host", CPU), Options(offload_dir=str(tmp_path))
    found: dict[int, list[Machine]] = {}
    try:
        for count in (1, 2, 3):
            monkeypatch.setattr("autohete_fx.runtime.lanes.team._count", lambda count=count: count)
            found[count] = [machine_of(CPU, session, options, count) for _ in range(2)]
        bound = machine_of(CPU, session, options, 4)
    finally:
        session.close()
    assert threads == [own, own, min(8, 2 * own), own, min(8, 3 * own)]
    (alone, _), (half, _), (third, _) = found.values()
    assert all(first == again for first, again in found.values())
    assert [m.host_update_params_per_s for m in (alone, half, third)] == [1e9, 3e9 / 2, 5e9 / 3]
    assert alone.device_update_params_per_s == 1e9 and half.device_update_params_per_s == 2e9
    assert alone.host_flops_per_s == 0.0 and half.host_flops_per_s > 0.0
    assert (half.host_bytes, half.disk_bytes) == (alone.host_bytes // 2, alone.disk_bytes // 2)
    assert bound.host_bytes == alone.host_bytes // 4, "memory is the host's, also where only three share the cores"
    assert bound.host_update_params_per_s == third.host_update_params_per_s


def test_beside_a_gpu_the_teams_of_all_ranks_are_timed_as_one(monkeypatch: pytest.MonkeyPatch) -> None:
    threads: list[int | None] = []

    def figures(device: torch.device, make: object, num_threads: int | None) -> dict[str, float]:
        threads.append(num_threads)
        return {"host_flops_per_s": 1e12}

    monkeypatch.setattr(machine_module, "host_figures", figures)
    for name in ("_copy_rates", "_product_rates", "_device_bandwidth", "device_capacity_bytes", "device_name"):
        monkeypatch.setattr(machine_module, name, lambda *_, name=name: (1.0,) * 3 if name == "_copy_rates" else 1)
    monkeypatch.setattr(machine_module, "update_rate", lambda *_: 1.0)
    monkeypatch.setattr("autohete_fx.runtime.lanes.team.num_cores", lambda: 64)
    monkeypatch.setattr(torch, "get_num_threads", lambda: 4)
    monkeypatch.setenv("OMP_NUM_THREADS", "4")
    make, empty = (lambda count: torch.empty(count, dtype=torch.uint8)), torch.empty
    monkeypatch.setattr(torch, "empty", lambda *size, device=None, **how: empty(*size, **how))
    for count in (1, 2, 32):
        measure_machine(torch.device("cuda", 0), make_host_tensor=make, num_ranks=count)
    assert threads == [4, 8, 56]


def test_all_of_it_at_once(tmp_path: Path) -> None:
    found = measure_machine(CPU, offload_dir=str(tmp_path), mixed_step=mixed_step)
    assert 0.05 < found.mixed_update_speed < 20.0
    assert f"{'AdamW on the host, 16 bits':<28}" in machine_text(found)


def test_beside_a_gpu_the_team_of_updates_does_them(monkeypatch: pytest.MonkeyPatch) -> None:
    """On what a host's update of a 16-bit parameter reads and writes, in memory of homes."""
    made: list[torch.Tensor] = []
    seen: list[tuple[torch.Tensor, ...]] = []
    threads: list[int] = []

    def make(count: int, dtype: torch.dtype) -> torch.Tensor:
        made.append(torch.empty(count, dtype=dtype))
        return made[-1]

    def step(weight: torch.Tensor, grad: torch.Tensor, states: Sequence[torch.Tensor]) -> Callable[[], None]:
        seen.append((weight, grad, *states))
        return lambda: threads.append(torch.get_num_threads())

    monkeypatch.setattr(update_rates, "_SERVER_UPDATE_PARAMS", 2**13)
    assert update_rates.mixed_update_speed(torch.device("cuda"), make, step) > 0.0
    assert {*threads} == {update_threads()} and {t.numel() for t in seen[0]} == {2**13}
    assert [t.dtype for t in seen[0]] == [torch.bfloat16] * 2 + [torch.float32] * 3
    homes = {t.untyped_storage().data_ptr() for t in made}
    assert len(made) == 4 and {t.untyped_storage().data_ptr() for t in seen[0]} == homes


def test_what_is_timed_is_what_trains() -> None:
    """The step of AdamW of a bf16 parameter, bit by bit."""
    start = torch.randn(5000, generator=torch.Generator().manual_seed(0))
    param = torch.nn.Parameter(start.bfloat16())
    param.grad = torch.full_like(param, 0.5)
    mine = [param.detach().clone(), param.grad.clone(), param.detach().float(), torch.zeros(5000), torch.zeros(5000)]
    group = dict(ADAMW.hyperparameters)
    trained = AdamW([param], **group)
    mixed_step(mine[0], mine[1], mine[2:])()  # of a second step
    state = {"step": torch.tensor(1.0), "master": param.detach().float()}
    trained.state[param] = {**state, "exp_avg": torch.zeros(5000), "exp_avg_sq": torch.zeros(5000)}
    trained.step()
    assert torch.equal(param, mine[0]) and not torch.equal(param, start.bfloat16())
    for name, expected in zip(("master", "exp_avg", "exp_avg_sq"), mine[2:], strict=True):
        assert torch.equal(trained.state[param][name], expected), name


def test_figures_depend_on_the_number_of_threads() -> None:
    key, threads = machine_key(CPU), torch.get_num_threads()
    torch.set_num_threads(threads + 1)
    try:
        assert machine_key(CPU) != key
    finally:
        torch.set_num_threads(threads)
    assert machine_key(CPU) == key


def test_the_host_tier_of_a_cpu_is_the_directorys_file_system(tmp_path: Path) -> None:
    assert 0 < host_capacity_bytes(CPU, str(tmp_path)) < 2**60


def test_files_that_are_kept_in_ram_are_no_disk(tmp_path: Path) -> None:
    if not Path("/dev/shm").is_dir():
        pytest.skip("there is no directory in RAM")
    assert disk_capacity_bytes("/dev/shm") == 0 < host_capacity_bytes(CPU, "/dev/shm")
    assert os.stat(tmp_path).st_dev == os.stat("/dev/shm").st_dev or disk_capacity_bytes(str(tmp_path)) > 0


def test_a_disk_without_room_has_no_rate(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "posix_fallocate", refuse)
    assert measure_disk(str(tmp_path)) == 0.0
    monkeypatch.undo()
    assert measure_disk(str(tmp_path)) > 1e6
    assert list(tmp_path.iterdir()) == []


def test_an_offload_dir_without_room_is_warned_of_and_measured_again_next_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def refuse(*_: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    session, options = Session("a full disk", CPU), Options(offload_dir=str(tmp_path))
    try:
        with monkeypatch.context() as full:
            full.setattr(os, "posix_fallocate", refuse)
            pressed = [machine_of(CPU, session, options) for _ in range(2)]
            with pytest.raises(HostMemoryError, match="No space left on device"):
                measure_machine(CPU, offload_dir=str(tmp_path))
        assert caplog.text.count("is measured as if it offloaded into RAM") == 2
        assert all(machine.h2d_bytes_per_s > 1e6 and machine.disk_bytes_per_s == 0 for machine in pressed)
        assert machine_of(CPU, session, options).disk_bytes_per_s > 0
    finally:
        session.close()
    assert len(caplog.records) == 2
