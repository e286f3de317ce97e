"""One process of `gpu_suite.py`: train one case and report after every level, or measure the machine.

In: a `Case`. Out: lines of JSON in a file, one a level, written as soon as it is known, so that a process that dies or is
killed loses only what it had not finished. What does not fit is a result; anything else that fails ends the process with
its error.
"""

import json
import math
import os
import statistics
import time
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
import torch
from systems import CannotRun, Case, System, system_class
from torch import Tensor
from train_gpt import Text, load_text

import autohete_fx
from autohete_fx.commands.doctor import link_of
from autohete_fx.errors import HostMemoryError, InfeasiblePlanError
from autohete_fx.ir import Machine
from autohete_fx.machine.measure import load_or_measure_machine
from autohete_fx.report import format_bytes

FITS, DOES_NOT_FIT, CANNOT_RUN, FAILED, OUT_OF_TIME = "fits", "does not fit", "cannot run", "failed", "out of time"
_LEVEL_S, _FEWEST = 10.0, 3
"""A level is measured for so long at most, but for so many steps at least."""

Emit = Callable[[dict[str, Any]], None]
When = Callable[[str], None]
"""Told that blocks are ``profiled`` or steps of a level are ``warm``; timing goes on when it returns."""


def run_case(case: Case, emit: Emit, when: When = lambda what: None) -> None:
    """Train; ``emit`` gets a row a level, and ``when`` is called as a stage of it begins."""
    try:
        _run_levels(case, emit, when)
    except CannotRun as error:
        emit({"outcome": CANNOT_RUN, "reason": str(error)})
    except ModuleNotFoundError as error:
        emit({"outcome": CANNOT_RUN, "reason": f"the package {error.name} is not installed"})
    except (InfeasiblePlanError, HostMemoryError) as error:
        emit({"outcome": DOES_NOT_FIT, "reason": str(error)})
    except RuntimeError as error:  # torch.OutOfMemoryError, and what wraps it
        if "out of memory" not in str(error):
            raise
        emit({"outcome": DOES_NOT_FIT, "reason": str(error).splitlines()[0]})


def _run_levels(case: Case, emit: Emit, when: When) -> None:
    torch.set_float32_matmul_precision("high")
    if case.device.type == "cuda" and case.cap_bytes is not None:
        total = torch.cuda.get_device_properties(0).total_memory
        if case.cap_bytes > total:
            raise CannotRun(f"the cap of {case.cap_gb} GB is above the device's {total / 1e9:.1f} GB")
        torch.cuda.set_per_process_memory_fraction(case.cap_bytes / total)
    began_s = time.perf_counter()
    torch.manual_seed(0)
    system = system_class(case.system)(case)
    built_s = time.perf_counter() - began_s
    run = _Run(case, system, when)
    system.when_profiled = lambda: when("profiled")
    for level in case.levels:
        system.set_level(level)
        emit({"outcome": FITS, "level": level, "build s": built_s, **run.measure(level)})
    system.finish()


class _Run:
    """Steps of one system; they go on from level to level."""

    def __init__(self, case: Case, system: System, when: When) -> None:
        self.case = case
        self.when = when
        self.system = system
        self.text = load_text(None)
        self.steps = 0

    def measure(self, level: str) -> dict[str, Any]:
        """Warm up, then time steps."""
        began_s, first_step = time.perf_counter(), self.steps
        losses, step_s = [], []
        with autohete_fx.MemoryMeter(self.case.device) as meter:
            for _ in range(self.case.warm_up):
                losses.append(self.step())
            ready_s = time.perf_counter()
            self.when("warm")
            losses.append(self.step())  # what overlaps with a step may have ended since
            began_at, timed_s = time.time(), time.perf_counter()
            while len(step_s) < self.case.steps:
                begin_s = time.perf_counter()
                losses.append(self.step())
                step_s.append(time.perf_counter() - begin_s)
                if len(step_s) >= _FEWEST and time.perf_counter() - timed_s > _LEVEL_S:
                    break
        if self.case.dry and self.case.cap_bytes is not None and meter.peak_bytes > self.case.cap_bytes:
            raise RuntimeError(f"a CPU has no cap, and this took {format_bytes(meter.peak_bytes)}: as if out of memory")
        if not all(map(math.isfinite, losses)):
            raise ArithmeticError(f"losses are not finite: {losses}")
        tokens, median_s = self.case.batch * self.case.config.context, statistics.median(step_s)
        shares = self.system.shares()
        return {
            "micro batches": self.case.micro_batches,
            "step s": median_s,
            "steps s": step_s,
            "timed at": [began_at, time.time()],
            "tokens/s": tokens / median_s,
            "warm-up s": ready_s - began_s,
            "peak bytes": meter.peak_bytes,
            **(_of_the_device() if self.case.device.type == "cuda" else {}),
            "first step": first_step,
            "losses": losses,
            "shares": {name: getattr(shares, name) for name in shares.__slots__},
            **self.system.figures(),
        }

    def step(self) -> float:
        """One optimizer step on real text; returns its loss, which waits for the device."""
        tokens, targets = batch_of(self.case, self.text, self.steps)
        self.steps += 1
        return self.system.train(tokens, targets).item()


def _of_the_device() -> dict[str, int]:
    """What PyTorch's allocator took, and what of the device is taken beside it: by CUDA, libraries, kernels and other processes."""
    free, total = torch.cuda.mem_get_info()
    return {
        "reserved bytes": torch.cuda.max_memory_reserved(),
        "outside bytes": total - free - torch.cuda.memory_reserved(),
    }


def batch_of(case: Case, text: Text, step: int) -> tuple[Tensor, Tensor]:
    """Tokens and targets of one step, (batch, context) each, the same in every process. A token is a pair of bytes."""
    length = case.config.context + 1
    generator = torch.Generator().manual_seed(step)
    starts = torch.randint(len(text) - 2 * length, (case.batch, 1), generator=generator).numpy()
    pairs = text[starts + np.arange(2 * length)].reshape(case.batch, length, 2).astype(np.int64)
    windows = torch.from_numpy((pairs[..., 0] * 256 + pairs[..., 1]) % case.config.vocab_size).to(case.device)
    return windows[:, :-1].contiguous(), windows[:, 1:].contiguous()


def run_machine(device: torch.device, emit: Emit) -> None:
    """The figures that `autohete doctor` finds, which runs after this one find in the cache, and more."""
    machine, link = load_or_measure_machine(device), link_of(device)
    emit({"machine": json.loads(machine.to_json()), **_host_bandwidth(device), "link": link and asdict(link)})


def _host_bandwidth(device: torch.device) -> dict[str, float]:
    """Bytes a second of ``a += b`` on the host's cores, which reads and writes 12 bytes an element.

    In place, as an optimizer works: a third array would be read before it is written, and that is not counted.
    """
    count = 1 << (28 if device.type == "cuda" else 22)
    a, b = (torch.ones(count) for _ in range(2))
    best_s = min(_seconds(lambda: a.add_(b)) for _ in range(4))
    return {"host_bytes_per_s": 12 * count / best_s}


def _seconds(run: Callable[[], object]) -> float:
    begin_s = time.perf_counter()
    run()
    return time.perf_counter() - begin_s


def machine_of(found: dict[str, Any]) -> Machine:
    """The machine of a row that `run_machine` emitted."""
    return Machine.from_json(json.dumps(found["machine"]))


def into(path: Path) -> Emit:
    """Append rows to a file, each safe on disk before the next begins."""

    def emit(row: dict[str, Any]) -> None:
        with path.open("a") as file:
            file.write(json.dumps(row) + "\n")
            file.flush()
            os.fsync(file.fileno())

    return emit
