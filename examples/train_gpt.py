"""Train a GPT on real text, in half the device memory that plain ``torch.compile`` needs.

1. A subprocess trains a few steps with plain ``torch.compile`` and ``torch.optim.AdamW`` and reports its peak memory,
   step time and losses.
2. The same model, data and seeds are trained with the ``autohete`` backend within ``--budget`` (default: half of that
   peak), under a progress bar with the measured peak beside the budget.
3. The trained model writes some text, and a table compares what was predicted, what was measured, and plain. A page in
   ``--report`` draws the run.

    python examples/train_gpt.py                         # the Python standard library's sources, byte by byte
    python examples/train_gpt.py --text book.txt --budget 200MiB --steps 300
"""

import argparse
import json
import math
import os
import platform
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from gpt import GPT, GPTConfig
from numpy.typing import NDArray
from torch import Tensor

import autohete_fx
from autohete_fx.options import Size, parse_size, resolve_bytes
from autohete_fx.report import (
    ComparisonRow,
    TrainingProgress,
    comparison_table,
    format_bytes,
    format_count,
    format_seconds,
)

Text = NDArray[np.uint8]
"""Bytes, one a token."""

CORPUS_LIMIT_BYTES = 8 << 20
PROMPT = b"def "
REPORT = Path(__file__).resolve().parents[1] / "build" / "demo"
COMPILING_STEPS = 2
"""Steps that are left out of step times: the first compiles, the second is the first to run what was compiled."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Setup:
    """What both phases train alike."""

    device: str
    model: GPTConfig
    batch: int
    steps: int
    learning_rate: float

    @property
    def tokens_per_step(self) -> int:
        return self.batch * self.model.context


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """What a training run measured: seconds and losses by step, bytes at the peak of all steps."""

    step_s: tuple[float, ...]
    losses: tuple[float, ...]
    peak_bytes: int

    @property
    def typical_step_s(self) -> float:
        """Median of the steps that did not compile."""
        return statistics.median(self.step_s[COMPILING_STEPS:])


def main() -> None:
    arguments = parse_arguments()
    setup = choose_setup(arguments)
    text = load_text(arguments.text)
    if len(text) <= setup.model.context:
        sys.exit(
            f"--text {arguments.text} has {len(text)} bytes, no more than the {setup.model.context} of one sequence"
        )
    if arguments.plain_result:
        run = train_plain(setup, text, arguments.plain_steps)
        arguments.plain_result.write_text(
            json.dumps(
                {
                    "step_s": run.step_s,
                    "losses": run.losses,
                    "peak_bytes": run.peak_bytes,
                    "of": sizes_of(setup, arguments),
                }
            )
        )
        return
    describe(setup, text)
    plain = plain_run(setup, arguments)
    print(f"plain torch.compile: peak {format_bytes(plain.peak_bytes)}, {plain.typical_step_s:.3f} s a step")
    budget_bytes = resolve_bytes(arguments.budget, plain.peak_bytes)
    print(f"memory budget: {format_bytes(budget_bytes)} ({budget_bytes / plain.peak_bytes:.0%} of plain)")
    least_s = setup.steps * plain.typical_step_s
    print(f"{setup.steps} steps in it take {format_seconds(least_s)} or more; --steps N trains fewer\n", flush=True)

    try:
        model, run = train_within_budget(setup, text, budget_bytes, arguments.backend, arguments.report)
    except autohete_fx.InfeasiblePlanError as error:
        sys.exit(f"--budget is too small: {str(error).partition(chr(10))[0]}")
    print(f"\n{sample(model, arguments.sample_bytes)}\n")
    print(comparison(setup, plain, run, budget_bytes, arguments.backend))
    if arguments.backend == "autohete":
        print(f"a page of the run: {arguments.report / 'report.html'}")
    if run.peak_bytes > budget_bytes and arguments.backend == "autohete":
        sys.exit("the measured peak is above the budget: this is a bug in autohete_fx, please report it")


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--text", type=Path, help="file to train on; default: the Python standard library's sources")
    parser.add_argument(
        "--budget",
        type=budget_size,
        default="50%",
        metavar="SIZE",
        help='device memory, such as "200MiB"; a "60%%" is of plain\'s peak; default 50%%',
    )
    parser.add_argument("--steps", type=int, metavar="N", help="optimizer steps; default 200 on a CPU, 300 on a GPU")
    parser.add_argument("--layers", type=int, metavar="N", help="transformer layers; default 8 on a CPU, 16 on a GPU")
    parser.add_argument("--width", type=int, metavar="N", help="of the model; default 192 on a CPU, 1024 on a GPU")
    parser.add_argument(
        "--batch", type=int, metavar="N", help="sequences a step; default 4 on a CPU, up to 16 on a GPU"
    )
    parser.add_argument("--device", choices=["cpu", "cuda"], help="default: cuda where there is one")
    parser.add_argument(
        "--sample-bytes",
        type=int,
        default=400,
        metavar="N",
        help="length of the text that the model writes; default 400",
    )
    parser.add_argument(
        "--plain-steps", type=int, default=7, metavar="N", help="steps of plain torch.compile to measure; default 7"
    )
    parser.add_argument(
        "--report",
        type=Path,
        default=REPORT,
        metavar="DIR",
        help="where the report of the run is written; default build/demo",
    )
    parser.add_argument(
        "--plain", type=Path, metavar="FILE", help="plain's measurements at these sizes; taken if there is no such file"
    )
    parser.add_argument("--backend", default="autohete", help=argparse.SUPPRESS)
    parser.add_argument("--plain-result", type=Path, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    steps = COMPILING_STEPS + 1
    least_of = {"steps": steps, "plain_steps": steps, "layers": 1, "width": 1, "batch": 1, "sample_bytes": 0}
    for name, least in least_of.items():
        if getattr(arguments, name) is not None and getattr(arguments, name) < least:
            parser.error(f"--{name.replace('_', '-')} must be at least {least}")
    if arguments.device == "cuda" and not torch.cuda.is_available():
        parser.error("--device cuda: PyTorch finds no CUDA device")
    return arguments


def budget_size(text: str) -> Size:
    """``--budget``; a share is one of plain's peak."""
    try:
        return parse_size(text)
    except autohete_fx.OptionError as error:
        raise argparse.ArgumentTypeError(str(error)) from error


def choose_setup(arguments: argparse.Namespace) -> Setup:
    """A model that trains in minutes: small on a CPU, larger on a GPU, and a batch for which plain has room."""
    device = arguments.device or ("cuda" if torch.cuda.is_available() else "cpu")
    if device == "cuda":
        layers, width, head_width, context, steps = 16, 1024, 64, 512, 300
        batch = max(2, min(16, torch.cuda.get_device_properties(0).total_memory // (3 << 29)))
    else:
        layers, width, head_width, context, steps, batch = 8, 192, 32, 256, 200, 4
    width = arguments.width or width
    if width % head_width:
        sys.exit(f"--width {width} is not a multiple of {head_width}, the width of a head")
    config = GPTConfig(layers=arguments.layers or layers, width=width, heads=width // head_width, context=context)
    return Setup(
        device=device,
        model=config,
        batch=arguments.batch or batch,
        steps=arguments.steps or steps,
        learning_rate=3e-3 * math.sqrt(192 / width),
    )


def load_text(path: Path | None) -> Text:
    """The corpus, from a file or from the standard library's top-level modules.

    No tensor: on a CPU device that would be device memory, and only batches need to be there.
    """
    files = [path] if path else sorted(Path(os.__file__).parent.glob("*.py"))
    try:
        data = b"".join(file.read_bytes() for file in files)[:CORPUS_LIMIT_BYTES]
    except OSError as error:
        sys.exit(f"cannot read --text {path}: {error.strerror}")
    return np.frombuffer(data, dtype=np.uint8)


def describe(setup: Setup, text: Text) -> None:
    config = setup.model
    with torch.device("meta"):
        count = sum(parameter.numel() for parameter in GPT(config).parameters())
    where = torch.cuda.get_device_name() if setup.device == "cuda" else f"CPU, {torch.get_num_threads()} threads"
    print(f"torch {torch.__version__}, Python {platform.python_version()}, {where}")
    print(
        f"GPT with {format_count(count)} parameters: {config.layers} layers of width {config.width}, context"
        f" {config.context}, batch {setup.batch}, dropout {config.dropout}; text of {format_bytes(len(text))}"
    )


def batch_of(setup: Setup, text: Text, step: int) -> tuple[Tensor, Tensor]:
    """Tokens and targets of one step, (batch, context) each; the same in every process."""
    length = setup.model.context
    generator = torch.Generator().manual_seed(step)
    starts = torch.randint(len(text) - length, (setup.batch, 1), generator=generator)
    windows = torch.from_numpy(text[(starts + torch.arange(length + 1)).numpy()]).long().to(setup.device)
    return windows[:, :-1].contiguous(), windows[:, 1:].contiguous()


def learning_rate_factor(setup: Setup) -> Callable[[int], float]:
    """Ten steps of warm-up, then a cosine down to a tenth."""
    return lambda step: min(1.0, (step + 1) / 10) * (0.55 + 0.45 * math.cos(math.pi * min(step / setup.steps, 1.0)))


def train(
    setup: Setup,
    text: Text,
    model: GPT,
    optimizer: torch.optim.Optimizer,
    steps: int,
    on_step: Callable[[int, float, int], None] = lambda step, loss, peak_bytes: None,
) -> Run:
    """The training loop of both phases: nothing in it depends on the backend."""
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, learning_rate_factor(setup))
    step_s, losses = [], []
    torch.manual_seed(0)
    with autohete_fx.MemoryMeter(setup.device) as meter:
        for step in range(steps):
            start_s = time.perf_counter()
            tokens, targets = batch_of(setup, text, step)
            loss = model(tokens, targets)
            loss.backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            schedule.step()
            optimizer.zero_grad()
            losses.append(loss.item())
            step_s.append(time.perf_counter() - start_s)
            on_step(step + 1, losses[-1], meter.peak_bytes)
        return Run(step_s=tuple(step_s), losses=tuple(losses), peak_bytes=meter.peak_bytes)


def new_model(setup: Setup) -> GPT:
    torch.manual_seed(0)
    torch.set_float32_matmul_precision("high")
    return GPT(setup.model).to(setup.device)


def train_plain(setup: Setup, text: Text, steps: int) -> Run:
    """What everybody does today."""
    model = new_model(setup)
    optimizer = torch.optim.AdamW(model.parameters(), lr=setup.learning_rate, weight_decay=0.1, fused=True)
    model.compile(backend="inductor")
    return train(setup, text, model, optimizer, steps)


def sizes_of(setup: Setup, arguments: argparse.Namespace) -> str:
    """What plain's measurements depend on."""
    return f"{setup.device}, batch {setup.batch}, {arguments.plain_steps} steps, {arguments.text}, {setup.model}"


def plain_run(setup: Setup, arguments: argparse.Namespace) -> Run:
    """This script's plain phase, run in a process of its own, so that the phases share no memory; or what a file kept of it."""
    with tempfile.TemporaryDirectory() as folder:
        result = arguments.plain or Path(folder) / "plain.json"
        if not result.is_file():
            print(f"measuring plain torch.compile on one process for {arguments.plain_steps} steps ...", flush=True)
            command = [sys.executable, __file__, *sys.argv[1:], "--plain-result", str(result)]
            if subprocess.run(command, check=False).returncode:
                sys.exit("plain torch.compile failed; try a smaller --batch or --layers")
        raw = json.loads(result.read_text())
        if raw["of"] != sizes_of(setup, arguments):
            sys.exit(
                f"--plain {result} was measured of {raw['of']}, this run is of {sizes_of(setup, arguments)}; give another file"
            )
    return Run(step_s=tuple(raw["step_s"]), losses=tuple(raw["losses"]), peak_bytes=raw["peak_bytes"])


def train_within_budget(setup: Setup, text: Text, budget_bytes: int, backend: str, report: Path) -> tuple[GPT, Run]:
    """The same training, with the lines that autohete_fx asks for."""
    model = new_model(setup)
    if backend == "autohete":
        optimizer = autohete_fx.AdamW(model.parameters(), lr=setup.learning_rate, weight_decay=0.1)
        model.compile(backend="autohete", options={"memory_budget": budget_bytes, "report_dir": report})
    else:
        optimizer = torch.optim.AdamW(model.parameters(), lr=setup.learning_rate, weight_decay=0.1, fused=True)
        model.compile(backend=backend)
    with TrainingProgress(setup.steps, budget_bytes=budget_bytes) as progress:

        def on_step(step: int, loss: float, peak_bytes: int) -> None:
            if step == 1 and backend == "autohete":
                progress.print(f"{autohete_fx.compilations()[-1].plan_table()}\n")
            progress.update(step, loss=loss, tokens=setup.tokens_per_step, peak_bytes=peak_bytes)

        run = train(setup, text, model, optimizer, setup.steps, on_step)
    return model, run


def sample(model: GPT, count: int) -> str:
    """Text that the trained model writes after a prompt."""
    model.eval()
    device = model.embedding.weight.device
    prompt = torch.tensor([list(PROMPT)], device=device)
    written = bytes(model.generate(prompt, count)[0].tolist()).decode(errors="replace")
    rule = "-" * 80
    return f"what the model writes after {PROMPT.decode()!r}:\n{rule}\n{written}\n{rule}"


def comparison(setup: Setup, plain: Run, run: Run, budget_bytes: int, backend: str) -> str:
    """Predicted, measured and plain side by side, and how far the losses of the common steps differ."""
    tokens = setup.tokens_per_step
    rows = [ComparisonRow(name="plain", step_s=plain.typical_step_s, peak_bytes=plain.peak_bytes)]
    if backend == "autohete":
        compilation = next(c for c in autohete_fx.compilations() if c.training)
        predicted_s, predicted_bytes = compilation.predicted_step_s, compilation.predicted_peak_bytes
        rows.append(ComparisonRow(name="predicted", step_s=predicted_s, peak_bytes=predicted_bytes))
    rows.append(ComparisonRow(name="measured", step_s=run.typical_step_s, peak_bytes=run.peak_bytes))
    rows = [
        ComparisonRow(name=r.name, step_s=r.step_s, peak_bytes=r.peak_bytes, tokens_per_s=tokens / r.step_s)
        for r in rows
        if r.step_s
    ]
    pairs = list(zip(plain.losses, run.losses, strict=False))
    difference = max(abs(a - b) for a, b in pairs)
    return (
        f"{comparison_table(rows, baseline='plain')}\n\n"
        f"budget {format_bytes(budget_bytes)}, measured peak {run.peak_bytes / budget_bytes:.1%} of it\n"
        f"loss {run.losses[0]:.3f} -> {statistics.fmean(run.losses[-5:]):.3f};"
        f" in the first {len(pairs)} steps it differs from plain's by {difference:.1e} at most"
    )


if __name__ == "__main__":
    main()
