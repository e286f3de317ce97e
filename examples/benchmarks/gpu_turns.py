"""Systems of `gpu_suite.py` that warm up beside each other, and are timed in turn: for a card that is lent for minutes.

    python examples/benchmarks/gpu_turns.py --cap 12 --systems ours ours-backward fsdp2 torchao --caches .caches --json turns.json
    python examples/benchmarks/gpu_turns.py --dry --cap 8 --no-inductor       # tiny models on the CPU

The machine is measured first, alone. Ours then times its blocks, each system of ours when the one before has. The others begin
then, and all compile beside each other. One whose first level is warm waits until all are, and for its turn. What is not warm in
time is ended before any turn. Later levels warm up within a turn. A case that has ended or failed leaves its rows and its reason.
"""

import argparse
import json
import os
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from gpu_child import into, run_case, run_machine
from gpu_process import Processes, Started
from gpu_selection import described
from results import save
from systems import OURS, SYSTEMS, Case, system_class
from systems.base import SIZES

_POLL_S = 0.05


class Turn:
    """Files by which a process tells how far it is, and is told to go on.

    Args:
        place: their path, without the ends of their names.
    """

    def __init__(self, place: Path) -> None:
        self._place = place

    def tell(self, what: str) -> None:
        """That this is so: ``profiled``, ``warm`` or ``go``."""
        self._place.with_suffix(f".{what}").touch()

    def is_told(self, what: str) -> bool:
        """Whether anybody told so."""
        return self._place.with_suffix(f".{what}").exists()

    def wait_for(self, what: str) -> None:
        """Until somebody tells so."""
        while not self.is_told(what):
            time.sleep(_POLL_S)


def main() -> None:
    """Start the cases, give each its turn, and keep the JSON up to date."""
    arguments = parsed()
    if arguments.child:
        train(arguments)
        return
    with tempfile.TemporaryDirectory() as folder:
        caches = (arguments.caches or Path(folder) / "caches").resolve()
        caches.mkdir(parents=True, exist_ok=True)
        processes = Processes(Path(folder), caches, arguments, script=Path(__file__))
        machine, problem = processes.run("machine", arguments.limit)
        found = machine[0] if machine else problem
        take_turns(arguments, processes, lambda rows: save(arguments.json, rows, **{"the machine": found}))


def parsed() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--systems", nargs="+", choices=SYSTEMS, default=["ours", "ours-backward", "fsdp2", "torchao"])
    parser.add_argument("--size", choices=SIZES, default="1b")
    parser.add_argument("--cap", type=float, help="GB of the device that each process may take (MB in dry mode)")
    parser.add_argument("--batch", type=int, default=8, help="sequences a step")
    parser.add_argument("--steps", type=int, default=8, help="measured steps of each level at most, after 3 to warm up")
    parser.add_argument("--limit", type=float, default=300.0, help="seconds until all must be warm, and for each turn")
    parser.add_argument("--dry", action="store_true", help="tiny models on the CPU")
    parser.add_argument("--no-inductor", action="store_true", help="trace only")
    parser.add_argument("--caches", type=Path, help="keep compiled code, plans and traces here")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--child", help=argparse.SUPPRESS)
    parser.add_argument("--result", type=Path, help=argparse.SUPPRESS)
    return parser.parse_args()


def take_turns(
    arguments: argparse.Namespace, processes: Processes, keep: Callable[[list[dict[str, Any]]], None]
) -> None:
    """Start all, time each alone, and keep what each has reported so far."""
    ends_s = time.monotonic() + arguments.limit
    started: dict[str, Started] = {}
    turns: dict[str, Turn] = {}
    rows: list[dict[str, Any]] = []

    def wait_until(names: list[str], *what: str) -> None:
        """All of them told one of it or ended, or time is over."""

        def is_so(name: str) -> bool:
            return started[name].has_ended or any(map(turns[name].is_told, what))

        while time.monotonic() < ends_s and not all(map(is_so, names)):
            time.sleep(_POLL_S)

    def start(name: str) -> None:
        setting = described((arguments.size, arguments.cap, arguments.batch, False))
        case = Case(
            system=name,
            **setting,
            levels=system_class(name).levels,
            steps=arguments.steps,
            dry=arguments.dry,
            inductor=not arguments.no_inductor,
            folder=str(processes.caches),
        )
        started[name] = processes.start(case)
        turns[name] = Turn(started[name].result)

    try:
        for name in sorted(arguments.systems, key=lambda name: name not in OURS):  # in order, and ours first
            start(name)
            if name in OURS:
                wait_until([name], "profiled", "warm")  # a plan in the cache needs no times
        wait_until(list(started), "warm")
        late = {name: process.waited(0.0) for name, process in started.items() if not turns[name].is_told("warm")}
        for name in late:
            started[name].end()
        for name, process in started.items():
            turns[name].tell("go")
            problem = late.get(name) or process.waited(arguments.limit)
            process.end()
            rows += [{"system": name, **row} for row in process.rows()]
            if problem[0]:
                rows.append({"system": name, "outcome": problem[0], "reason": problem[1]})
            keep(rows)
            for row in process.rows():
                print(
                    name, row.get("level", ""), row.get("step s", row.get("reason")), row.get("peak bytes"), flush=True
                )
            if problem[0]:
                print(name, *problem, flush=True)
    finally:
        for process in started.values():
            process.end()


def train(arguments: argparse.Namespace) -> None:
    """In a process of its own: one case, or the machine."""
    if arguments.child == "machine":
        run_machine(torch.device("cpu" if arguments.dry else "cuda"), into(arguments.result))
        return
    case, turn = Case(**json.loads(arguments.child)), Turn(arguments.result)

    def when(what: str) -> None:
        if what == "warm" and not turn.is_told("warm"):
            turn.tell("warm")
            turn.wait_for("go")
        turn.tell(what)

    run_case(case, into(arguments.result), when)
    sys.stdout.flush()
    os._exit(0)  # nothing of what is left needs to be taken down in order


if __name__ == "__main__":
    main()
