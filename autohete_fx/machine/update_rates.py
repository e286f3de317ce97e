"""Rates of optimizer updates, and what an accelerator's host does beside them.

PyTorch's fused AdamW in fp32 is timed. A kernel of ours updates 16-bit parameters. `autohete doctor` gives it to be timed, and what
it finds is remembered for compilations. No first plan waits for that: compilers take seconds, and on a busy machine a ratio of two
rates tells little.
"""

import itertools
import time
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch

from autohete_fx.cache import hardware_key, load_text, store_text
from autohete_fx.ir import Lane, Machine
from autohete_fx.machine.contention import OnThread, measure_contention, work_of
from autohete_fx.machine.timing import MakeTensor, best_seconds
from autohete_fx.runtime.lanes.team import update_team

_MIXED = "mixed_update_speed"
_ROUNDS, _ROUNDS_S = 8, 4.0
# Parameters, gradients and moments together more than a cache holds; beside a GPU that is the cache of a server.
_UPDATE_PARAMS = {"cpu": 2**22, "cuda": 2**24}
_SERVER_UPDATE_PARAMS = 2**25
_UPDATE_PARTS = 8
"""Beside other lanes they are updated in so many parts, by turns: each takes milliseconds, and all are more than a cache holds."""
_HOST_PRODUCT = 2048
"""Rows and columns of matrices that the host multiplies beside a GPU."""

MixedStep = Callable[[torch.Tensor, torch.Tensor, Sequence[torch.Tensor]], Callable[[], None]]
"""From a flat 16-bit parameter, its gradient and its states in fp32, master first, to what updates it as training does."""


def _updated(make: MakeTensor, count: int) -> list[torch.Tensor]:
    """So many parameters in fp32, with gradients and both averages."""
    return [make(count, torch.float32).fill_(0.01) for _ in range(4)]


def _fused_step(device: torch.device, updated: Iterable[torch.Tensor]) -> Callable[[], None]:
    """A fused AdamW step of parameters, which are given with gradients and both averages."""
    params, grads, averages, squares = ([each] for each in updated)
    steps = [torch.ones((), device=device)]

    def step() -> None:
        torch.ops.aten._fused_adamw_.default(
            params,
            grads,
            averages,
            squares,
            [],
            steps,
            lr=1e-3,
            beta1=0.9,
            beta2=0.999,
            weight_decay=0.01,
            eps=1e-8,
            amsgrad=False,
            maximize=False,
        )

    return step


def _rate_of(device: torch.device, updated: Sequence[torch.Tensor]) -> float:
    """Parameters per second of such steps."""
    return updated[0].numel() / best_seconds(device, _fused_step(device, updated))


def update_rate(device: torch.device, make: MakeTensor) -> float:
    """Parameters per second of updates on a device, in memory that ``make`` gives."""
    return _rate_of(device, _updated(make, _UPDATE_PARAMS.get(device.type, _UPDATE_PARAMS["cuda"])))


def host_figures(device: torch.device, make: MakeTensor, num_threads: int | None = None) -> dict[str, Any]:
    """Rates of an accelerator's host with the team of updates, and which lanes slow which others down.

    ``num_threads``: of the team; without it, those of this process.
    """
    host = torch.device("cpu")
    with update_team(device, num_threads) as team:
        # Made by the thread that writes them: no other may write a tensor of inference mode, in which a program may measure.
        updated = team.submit(_updated, make, _SERVER_UPDATE_PARAMS).result()
        rate = team.submit(_rate_of, host, updated).result()
        parts = zip(*(each.chunk(_UPDATE_PARTS) for each in updated), strict=True)
        turns = itertools.cycle([_fused_step(host, part) for part in parts])
        work = {**work_of(device, make), Lane.UPDATE: OnThread(team, lambda: next(turns)())}
        return {
            "host_update_params_per_s": rate,
            "host_flops_per_s": team.submit(_host_product_rate).result(),
            "contention": measure_contention(device, work),
        }


def mixed_update_speed(device: torch.device, make: MakeTensor, mixed_step: MixedStep) -> float:
    """Rate of the host's updates of 16-bit parameters, over that of fp32 ones, in the same memory."""
    host = torch.device("cpu")

    def timed() -> float:
        updated = _updated(make, _UPDATE_PARAMS["cpu"] if device.type == "cpu" else _SERVER_UPDATE_PARAMS)
        master, grads, *moments = updated
        weight, grad = grads.view(torch.bfloat16).fill_(0.01).chunk(2)
        steps = _fused_step(host, updated), mixed_step(weight, grad, (master, *moments))
        # By turns: who else works here for a while holds up both. Without a compiler the kernel takes many times as long.
        deadline, rounds = time.perf_counter() + _ROUNDS_S, list[list[float]]()
        while not rounds or (len(rounds) < _ROUNDS and time.perf_counter() < deadline):
            rounds.append([best_seconds(host, step, repeats=1) for step in steps])
        full_s, mixed_s = (min(seconds) for seconds in zip(*rounds, strict=True))
        return full_s / mixed_s

    if device.type == "cpu":
        return timed()
    with update_team(device) as team:
        return team.submit(timed).result()


def _host_product_rate() -> float:
    """Floating point operations a second of bf16 products on the host."""
    left, product = (torch.ones(_HOST_PRODUCT, _HOST_PRODUCT, dtype=torch.bfloat16) for _ in range(2))
    return 2.0 * _HOST_PRODUCT**3 / best_seconds(torch.device("cpu"), lambda: torch.mm(left, left, out=product))


def remember_mixed_update_speed(device: torch.device, machine: Machine) -> None:
    """Let compilations on this machine know the figure, too, whatever their threads.

    It is rounded: what was planned by another figure is planned again.
    """
    store_text(_MIXED, hardware_key(device), f"{machine.mixed_update_speed:.2g}")


def remembered_mixed_update_speed(device: torch.device) -> float:
    """The figure that is remembered of this machine; 0 where none is."""
    try:
        return float(load_text(_MIXED, hardware_key(device)) or 0.0)
    except ValueError:
        return 0.0
