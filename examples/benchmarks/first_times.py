"""What a newcomer waits for: the import, the first words and the answer of ``autohete plan``, and the first plan on a new machine.

Every figure is the median of processes of their own. The import is the difference of neighbours, either first in turn: ``import
torch`` without its entry points, and with this package imported after it. ``autohete plan`` is asked first with empty caches, then
with those that it left, and prints its stages as on a terminal. The first plan is that of a small GPT's first compilation, with
empty caches: measuring the machine, profiling and solving, without tracing and without what the inner compiler takes.

    python examples/benchmarks/first_times.py --json examples/benchmarks/results/first_times_cpu.json
"""

import argparse
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

from results import environment, print_figures, save

_PLAN = ("plan", "gpt2", "--device", "rtx-4090", "--budget", "4GiB")
_IMPORTS = 6
_FIRST_PLAN = """
import logging, sys, time
sys.path.insert(0, {examples!r})
import torch, autohete_fx
from autohete_fx.compiler import captured
from autohete_fx.report.stages import Stages
from gpt import GPT, GPTConfig
seconds, begun = {{}}, {{}}
machine_of = captured.machine_of
def timed(*arguments):
    began = time.perf_counter()
    machine = machine_of(*arguments)
    seconds["measuring"] = time.perf_counter() - began
    return machine
captured.machine_of = timed
begin, end = Stages.begin, Stages.end
def begins(self, name, **how):
    self.told = name
    begun[name] = time.perf_counter()
    return begin(self, name, **how)
def ends(self, *said, **how):
    seconds[self.told] = seconds.get(self.told, 0.0) + time.perf_counter() - begun[self.told]
    return end(self, *said, **how)
Stages.begin, Stages.end = begins, ends
model = GPT(GPTConfig(layers=8, width=192, heads=4, context=128))
optimizer = autohete_fx.AdamW(model.parameters())
model.compile(backend="autohete", options={{"memory_budget": "60MiB"}})
tokens = torch.randint(256, (4, 128))
model(tokens, tokens).backward()
print(sum(seconds[name] for name in ("measuring", "profiling", "planning")))
"""


def main() -> None:
    """Time all, print the figures, and write JSON where asked."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    print_figures(environment())
    figures: dict[str, list[float]] = {}
    for _ in range(arguments.repeats):
        with tempfile.TemporaryDirectory() as caches:
            for name, seconds in once(Path(caches)).items():
                figures.setdefault(name, []).append(seconds)
    row = {name: statistics.median(seconds) for name, seconds in figures.items()}
    print_figures(row)
    save(arguments.json, {**row, "repeats": arguments.repeats})


def once(caches: Path) -> dict[str, float]:
    """Seconds of each."""
    settings = {"AUTOHETE_CACHE_DIR": str(caches / "autohete"), "TORCHINDUCTOR_CACHE_DIR": str(caches / "inductor")}
    imports = statistics.median(import_s(settings, is_first=bool(turn % 2)) for turn in range(_IMPORTS))
    first_words, first_answer = spoken(settings)
    _, again = spoken(settings)
    examples = str(Path(__file__).resolve().parents[1])
    found = run(["-c", _FIRST_PLAN.format(examples=examples)], settings).stdout.split()
    return {
        "import s": imports,
        "plan: first line s": first_words,
        "plan: answer s": first_answer,
        "plan: answer again s": again,
        "first plan s": float(found[-1]),
    }


def import_s(settings: dict[str, str], *, is_first: bool) -> float:
    """Seconds that our import adds to PyTorch's, of two processes; ``is_first``: whether ours is that of the first."""
    ours = ["-c", "import torch, autohete_fx"], settings
    plain = ["-c", "import torch"], {**settings, "TORCH_DEVICE_BACKEND_AUTOLOAD": "0"}
    if is_first:
        return timed(*ours) - timed(*plain)
    return -timed(*plain) + timed(*ours)


def run(arguments: list[str], settings: dict[str, str]) -> "subprocess.CompletedProcess[str]":
    """A process of Python that has to succeed."""
    command = [sys.executable, *arguments]
    return subprocess.run(command, env={**os.environ, **settings}, text=True, check=True, stdout=subprocess.PIPE)


def timed(arguments: list[str], settings: dict[str, str]) -> float:
    """Seconds of such a process."""
    return clock(lambda: run(arguments, settings))


def clock(work: Callable[[], object]) -> float:
    """Seconds of some work."""
    began_s = time.perf_counter()
    work()
    return time.perf_counter() - began_s


def spoken(settings: dict[str, str]) -> tuple[float, float]:
    """Seconds until ``autohete plan`` prints its first line, and until it has ended."""
    began_s = time.perf_counter()
    command = [sys.executable, "-m", "autohete_fx.cli", *_PLAN]
    with subprocess.Popen(
        command,
        env={**os.environ, **settings, "AUTOHETE_PROGRESS": "1"},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    ) as process:
        assert process.stdout is not None
        process.stdout.readline()
        first_s = time.perf_counter() - began_s
        process.stdout.read()
    if process.returncode:
        sys.exit(f"autohete {' '.join(_PLAN)} ended with status {process.returncode}")
    return first_s, time.perf_counter() - began_s


if __name__ == "__main__":
    main()
