"""Training a model whose optimizer states are three times the host budget: how exact, how fast, and how much of it is in RAM.

A bf16 model of feed-forward layers has 12 bytes of states a parameter, fp32 master and moments. ``host_budget`` is a third of them,
``memory_budget`` leaves room for little but the parameters; the planner decides. Beside it ``torch.optim.AdamW(fused=True)``
updates fp32 copies of the parameters with the same gradients. Figures:

* the largest difference of an fp32 master, and of a moment, from PyTorch's, relative to the largest value of its tensor; and how
  many 16-bit parameters are not the rounding of PyTorch's masters;
* predicted and measured seconds of a step;
* the share of the disk's bandwidth that ``optimizer.step()`` uses: bytes read and written in its seconds, against a file that is
  written and read in the same run, before and after. On a machine that others use the time of a core says how much of the step
  would be left;
* bytes of states in RAM, at most in samples 50 ms apart: pages of their files that the kernel holds, and the windows' buffers.

    python examples/benchmarks/disk_states.py --save examples/benchmarks/results/disk_states_cpu.json
"""

import argparse
import ctypes
import mmap
import statistics
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path

import torch
from results import environment, print_figures, save
from torch import Tensor, nn

import autohete_fx
from autohete_fx import Optimizer
from autohete_fx.ir import Lane
from autohete_fx.machine.disk_rate import measure_disk
from autohete_fx.runtime.disk import RESIDENT_BYTES, WINDOW_BYTES
from autohete_fx.runtime.placement import placement_of

LR = 1e-3


class Layers(nn.Module):
    def __init__(self, width: int, count: int) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList(
            nn.Sequential(nn.LayerNorm(width), nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))
            for _ in range(count)
        )

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = x + layer(x)
        return x.float().square().mean()


def main() -> None:
    """Train both, print the figures, save them."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--width", type=int, default=512)
    parser.add_argument("--layers", type=int, default=12)
    parser.add_argument("--tokens", type=int, default=128)
    parser.add_argument("--steps", type=int, default=6)
    parser.add_argument("--offload-dir", help="a directory on the disk; default: the system's for temporary files")
    parser.add_argument("--save", type=Path)
    arguments = parser.parse_args()
    directory = arguments.offload_dir or tempfile.gettempdir()
    print_figures(environment())
    rates = [measure_disk(directory)]
    model = Layers(arguments.width, arguments.layers).bfloat16()
    params = sum(p.numel() for p in model.parameters())
    options = {"memory_budget": 3 * params, "host_budget": 4 * params, "offload_dir": directory}
    optimizer = autohete_fx.AdamW(model.parameters(), lr=LR)
    model.compile(backend="autohete", options=options)
    reference = Reference(model)
    with Samples(lambda: bytes_in_ram(model, optimizer)) as samples:
        step_s, update_s, update_cpu_s = train(model, optimizer, reference, arguments)
    rates.append(measure_disk(directory))
    compilation = next(c for c in reversed(autohete_fx.compilations()) if c.training)
    bandwidth, moved = statistics.mean(rates), 2 * compilation.plan.disk_bytes
    figures = {
        "parameters": params,
        "states, MB": 12 * params / 1e6,
        "host budget, MB": 4 * params / 1e6,
        "states on disk, MB": compilation.plan.disk_bytes / 1e6,
        "blocks with states on disk": sum(d.optimizer is Optimizer.DISK for d in compilation.plan.decisions),
        **reference.differences(model, optimizer),
        "predicted step, s": compilation.predicted_step_s,
        "measured step, s": step_s,
        "of it optimizer.step(), s": update_s,
        "of it time of a core, s": update_cpu_s,
        "of it the disk lane works, s": compilation.trace().busy_s(Lane.DISK) or 0.0,
        "disk, MB/s before": rates[0] / 1e6,
        "disk, MB/s after": rates[1] / 1e6,
        "read and written in optimizer.step(), MB/s": moved / update_s / 1e6,
        "share of the disk's bandwidth": moved / update_s / bandwidth,
        "states in RAM at most, MB": samples.most / 1e6,
        "of stated at most, MB": RESIDENT_BYTES / 1e6,
    }
    print_figures(figures)
    save(arguments.save, [figures])


class Reference:
    """PyTorch's optimizer on fp32 copies of a model's parameters."""

    def __init__(self, model: nn.Module) -> None:
        self.masters = [p.detach().float() for p in model.parameters()]
        self.optimizer = torch.optim.AdamW(self.masters, lr=LR, fused=True)

    def step(self, grads: list[Tensor]) -> None:
        for master, grad in zip(self.masters, grads, strict=True):
            master.grad = grad
        self.optimizer.step()

    def differences(self, model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, float]:
        largest, rounded_otherwise = {"exp_avg": 0.0, "exp_avg_sq": 0.0, "master": 0.0}, 0
        for p, master in zip(model.parameters(), self.masters, strict=True):
            expected = {**self.optimizer.state[master], "master": master}
            for name in largest:
                apart = (optimizer.state[p][name] - expected[name]).abs().max() / expected[name].abs().max()
                largest[name] = max(largest[name], apart.item())
            rounded_otherwise += int((p != master.bfloat16()).sum())
        found: dict[str, float] = {f"largest difference of {name}, relative": value for name, value in largest.items()}
        return {**found, "parameters rounded otherwise": rounded_otherwise}


def train(
    model: nn.Module, optimizer: torch.optim.Optimizer, reference: Reference, arguments: argparse.Namespace
) -> tuple[float, float, float]:
    """Median seconds of a whole step, of its update, and of the update's time on a core, behind the two first."""
    steps_s, updates_s, cpu_s = [], [], []
    for number in range(arguments.steps):
        begin = time.perf_counter()
        model.zero_grad()
        model(batch(number, arguments)).backward()
        backward_s = time.perf_counter() - begin
        grads = [p.grad.float() for p in model.parameters() if p.grad is not None]
        begin, cpu_begin = time.perf_counter(), time.process_time()
        optimizer.step()
        updates_s.append(time.perf_counter() - begin)
        cpu_s.append(time.process_time() - cpu_begin)
        steps_s.append(backward_s + updates_s[-1])
        reference.step(grads)
    return statistics.median(steps_s[2:]), statistics.median(updates_s[2:]), statistics.median(cpu_s[2:])


def batch(number: int, arguments: argparse.Namespace) -> Tensor:
    generator = torch.Generator().manual_seed(number)
    return torch.randn(arguments.tokens, arguments.width, generator=generator).bfloat16()


def bytes_in_ram(model: nn.Module, optimizer: torch.optim.Optimizer) -> int:
    """Bytes of those in RAM: their pages that the kernel holds, and the buffers of windows."""
    total = 0
    for param in model.parameters():
        found = placement_of(param)
        if found is None or found.disk is None:
            continue
        total += sum(pages_in_ram(t) for t in list(optimizer.state.get(param, {}).values()) if found.disk.owns(t))
    return total + 3 * WINDOW_BYTES


def pages_in_ram(t: Tensor) -> int:
    count = -(-t.nbytes // mmap.PAGESIZE)
    found = (ctypes.c_ubyte * count)()
    if ctypes.CDLL(None).mincore(ctypes.c_void_p(t.data_ptr()), ctypes.c_size_t(t.nbytes), found):
        raise OSError("mincore failed")
    return int(torch.frombuffer(found, dtype=torch.uint8).bitwise_and_(1).sum()) * mmap.PAGESIZE


class Samples:
    """The most that a count has been, while it is open."""

    def __init__(self, count: Callable[[], int]) -> None:
        self.most = 0
        self._count = count
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._sample)

    def _sample(self) -> None:
        while not self._over.wait(0.05):
            self.most = max(self.most, self._count())

    def __enter__(self) -> "Samples":
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()
        self._thread.join()


if __name__ == "__main__":
    main()
