"""What the runtime takes of a step for itself: the record of what the lanes did, and the launching thread's part of updates.

A GPT trains with its activations, parameters and optimizer states in host memory, so that every lane has as much to do as it can
have, and with updates under way behind the next forward. Two costs are given as shares of a step:

* Recording is always on. Steps with it and steps whose records are replaced by a constant are taken in turns, and the figure is
  the median of the ratios of neighbours. Machines are noisier than what is looked for here, so the cost is also counted: records
  of a step, times what one takes.
* The launching thread's time in the path of updates: ``optimizer.step()`` as a whole, and what the next forward does to wait for
  parameters. It is the processor time of that thread, in which waiting does not count.

    python examples/benchmarks/recording_cost.py --json examples/benchmarks/results/recording_cost_cpu.json
"""

import argparse
import contextlib
import functools
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from results import environment, print_figures, save
from torch import Tensor, nn
from trained import Loss, Trained

import autohete_fx
from autohete_fx import Activations, BlockDecision, Optimizer, Params, Plan
from autohete_fx.ir import Lane, LaneRecord, Overlap, Schedule
from autohete_fx.runtime import session
from autohete_fx.runtime.lanes.lanes import Lanes
from autohete_fx.runtime.lanes.ticket import Ticket
from autohete_fx.runtime.pending.updates import Updates

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from gpt import GPT, GPTConfig

DECISION = BlockDecision(activations=Activations.OFFLOAD, params=Params.HOST, optimizer=Optimizer.HOST)


def main() -> None:
    """Train, print the figures, and write JSON where asked."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--pairs", type=int, default=40, help="pairs of steps")
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--width", type=int, default=192)
    parser.add_argument("--batch", type=int, default=4)
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    print_figures(environment())
    with mock.patch.object(session, "Lanes", functools.partial(Lanes, in_background=True)):
        figures = measure(trained(arguments), arguments.pairs)
    print_figures(figures)
    save(arguments.json, [figures])


def trained(arguments: argparse.Namespace) -> Trained:
    """The model in training."""
    config = GPTConfig(layers=arguments.layers, width=arguments.width)
    labels = ("prologue", *(f"layers.{i}" for i in range(config.layers)), "epilogue")
    plan = Plan(labels=labels, decisions=(DECISION,) * len(labels), schedule=Schedule(overlap=Overlap.STEP))

    def make() -> tuple[nn.Module, Any, Loss]:
        model = GPT(config)

        def loss_of(tokens: Tensor) -> Tensor:
            return model(tokens, tokens)

        return model, autohete_fx.AdamW(model.parameters(), lr=1e-4), loss_of

    tokens = torch.randint(256, (arguments.batch, config.context))
    return Trained(make, tokens, backend="autohete", options={"plan": plan, "profile": "analytic"})


def measure(training: Trained, pairs: int) -> dict[str, object]:
    """Both costs."""
    compilation = next(c for c in reversed(autohete_fx.compilations()) if c.training)
    ratios, seconds, count = [], [], 0
    for _ in range(pairs):
        begin_s = time.perf_counter()
        seconds.append(training.step())
        training.optimizer.synchronize()
        count = sum(record.begin_s > begin_s for record in compilation.trace().records)
        with no_records():
            ratios.append(seconds[-1] / training.step())
            training.optimizer.synchronize()
    record_s = seconds_of_a_record()
    shares = [update_path_s(training) for _ in range(pairs)]
    step_s = statistics.median(seconds)
    return {
        "step ms": step_s * 1e3,
        "records a step": count,
        "us a record": record_s * 1e6,
        "recording, counted / step": count * record_s / step_s,
        "step time, with records / without (median of pairs)": statistics.median(ratios),
        "step time, with records / without (quartiles)": ", ".join(
            f"{q:.3f}" for q in statistics.quantiles(ratios)[::2]
        ),
        "launching thread in the path of updates / step": statistics.median(shares),
    }


@contextlib.contextmanager
def no_records() -> Iterator[None]:
    """Inside, tickets give one constant record, and waits are not recorded."""
    constant = LaneRecord(lane=Lane.COMPUTE, label="", priority=0, num_bytes=0, begin_s=0.0, end_s=0.0)
    nothing = mock.patch.object(Ticket, "record", lambda *_: constant)
    with nothing, mock.patch.object(Lanes, "wait", lambda _, ticket: ticket.wait()):
        yield


def seconds_of_a_record(count: int = 100_000) -> float:
    """Two readings of the clock, a record, and its place in the queue: what a lane does for a piece of work."""
    records, ticket = Lanes("cpu")._records, Lanes("cpu").now()
    begin_s = time.perf_counter()
    for _ in range(count):
        start_s = time.perf_counter()
        records.append(ticket.record(start_s, time.perf_counter()))
    return (time.perf_counter() - begin_s) / count


def update_path_s(training: Trained) -> float:
    """The launching thread's share of a step that goes to updates."""
    spent_s, depth = 0.0, 0

    def timed(function: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(function)
        def run(*args: Any, **kwargs: Any) -> Any:
            nonlocal spent_s, depth
            depth += 1
            begin_s = time.thread_time()
            try:
                return function(*args, **kwargs)
            finally:
                depth -= 1
                spent_s += 0.0 if depth else time.thread_time() - begin_s

        return run

    waiting: dict[str, Any] = {
        name: timed(getattr(Updates, name)) for name in ("wait_for", "wait_all", "tickets_of", "prune")
    }
    with (
        mock.patch.multiple(Updates, **waiting),
        mock.patch.object(autohete_fx.AdamW, "step", timed(autohete_fx.AdamW.step)),
    ):
        step_s = training.step()
    return spent_s / step_s


if __name__ == "__main__":
    main()
