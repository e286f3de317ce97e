"""What `gpu_suite.py` runs, in which order, and until when.

In: the command line. Out: settings and systems by importance, and a clock. The time is shared out: a part may take a share of what
is left, so that one that is slow leaves the others theirs; what it did not get to comes again at the end, as long as there is time.
"""

import argparse
import math
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from gpu_child import CANNOT_RUN, DOES_NOT_FIT, OUT_OF_TIME
from systems import OURS, SYSTEMS, Case, system_class
from systems.base import SIZES

from autohete_fx.report import format_bytes

PARTS = ("machine", "compare", "ablation", "largest")
HEADLINES = (
    ("1b", 12.0, 8, False),
    ("3b", 24.0, 8, False),
    ("1b", None, 8, False),
    ("3b", 12.0, 8, True),
    ("6b", 24.0, 8, False),
    ("3b", 24.0, 32, False),
)
"""What is compared first: model, cap, batch, clipping. The smallest whose optimizer must leave the device compiles soonest."""
_FASTEST_FIRST = ("ours", "fsdp2", "torchao", "zero-offload", "zero-3", "ours-backward")
"""Where the optimizer must leave the device: who is likely to win, so that a comparison that is cut short tells something."""
_LEAST_S = 20.0
"""In less no process begins to train."""

REPLAYS = (
    ("planned", ("from backward on, by priority",)),
    ("three-integers", ("next forward, by priority", "next forward, as gradients came")),
    ("three-integers", ("from backward on, by priority",)),
    ("planned", ("from backward on, as gradients came",)),
)
"""What the ablation trains beside the schedules that a row of ours has: plans, and the schedules that the code compiled for the
first of them serves, one after another."""

SHARES = {"machine": 0.2, "first": 0.7, "ablation": 0.6, "others": 0.6, "headlines": 0.6}
"""Of the time that is left, what each stage may take where another part is asked for behind it. What can be compared at all and
the ablation come before a second baseline."""

Setting = tuple[str, float | None, int, bool]
"""Model, cap, batch, clipping."""


def parsed(description: str | None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=list(PARTS))
    parser.add_argument("--systems", nargs="+", choices=SYSTEMS, help="default: all but compile-autocast")
    parser.add_argument("--sizes", nargs="+", choices=SIZES, help="default: 3b, 1b and 6b")
    parser.add_argument("--caps", nargs="+", type=_cap, help='GB of the device, or "full"; default: 24, 12, 40, full')
    parser.add_argument("--batches", nargs="+", type=int, help="sequences a step; default: 8 and 32")
    parser.add_argument("--clip", nargs="+", choices=["off", "on"], help="default: both")
    parser.add_argument("--minutes", type=float, help="stop after so many; default: 8.5, in dry mode no limit")
    parser.add_argument("--case-minutes", type=float, default=4.0, help="limit of one process (default: 4)")
    parser.add_argument("--steps", type=int, default=8, help="measured steps at most, after 3 to warm up")
    parser.add_argument("--dry", action="store_true", help="tiny models on the CPU; caps are MB")
    parser.add_argument("--no-inductor", action="store_true", help="trace only, which makes a dry run quick")
    parser.add_argument("--resume", action="store_true", help="keep the rows of --json, and do not run them again")
    parser.add_argument(
        "--again", nargs="+", choices=SYSTEMS, default=[], help="with --resume: do not keep rows of these"
    )
    parser.add_argument(
        "--caches", type=Path, help="keep compiled code and the machine's figures here for the next run"
    )
    parser.add_argument("--json", type=Path)
    parser.add_argument("--child", help=argparse.SUPPRESS)
    parser.add_argument("--result", type=Path, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.resume and arguments.json is None:
        parser.error("--resume continues a --json file; name it")
    if arguments.minutes is None:
        arguments.minutes = 1e6 if arguments.dry else 8.5
    return arguments


def _cap(text: str) -> float | None:
    return None if text == "full" else float(text)


def settings(asked: argparse.Namespace) -> Iterator[Setting]:
    """Model, cap, batch and clipping by importance: headlines, then the rest of the grid."""
    sizes, caps = asked.sizes or ["3b", "1b", "6b"], asked.caps or [24.0, 12.0, 40.0, None]
    batches, clips = asked.batches or [8, 32], [word == "on" for word in asked.clip or ["off", "on"]]
    grid = [(s, c, b, k) for k in clips for b in batches for c in caps for s in sizes]
    yield from (setting for setting in HEADLINES if setting in grid)
    yield from (setting for setting in grid if setting not in HEADLINES)


def systems(asked: argparse.Namespace, cap_gb: float | None) -> list[str]:
    """Those asked for, else all but compile-autocast; ours first, then who is likely to be the best of the others."""
    if asked.systems:
        return asked.systems
    names = [name for name in SYSTEMS if name != "compile-autocast"]
    if cap_gb is None:
        return sorted(names, key=lambda name: (name not in OURS, not name.startswith(("compile", "memory"))))
    return [*_FASTEST_FIRST, *(name for name in names if name not in _FASTEST_FIRST)]


def until_a_baseline(names: list[str]) -> list[str]:
    """Of systems in their order, those up to the first that is not ours: the least that can be compared."""
    return names[: next((place for place, name in enumerate(names, 1) if name not in OURS), len(names))]


def described(setting: Setting) -> dict[str, Any]:
    """A setting as the fields of a row."""
    return dict(zip(("size", "cap_gb", "batch", "clip"), setting, strict=True))


def known_ahead(case: Case) -> tuple[str, str] | None:
    """An outcome and its reason, where no process need try: the system cannot run the case, or it leaves nothing on the host and
    its states alone exceed the cap."""
    if reason := system_class(case.system).reason_against(case):
        return CANNOT_RUN, reason
    cap_bytes = case.cap_bytes
    if cap_bytes is None or system_class(case.system).is_offloading or case.state_bytes <= cap_bytes:
        return None
    return DOES_NOT_FIT, f"parameters, gradients and states alone take {format_bytes(case.state_bytes)}; not tried"


class Clock:
    """The time there is, for everything and for one process.

    Args:
        minutes: for everything.
        case_minutes: for a process.
        now_s: tells the time.
    """

    def __init__(self, minutes: float, case_minutes: float, now_s: Callable[[], float] = time.monotonic) -> None:
        self._now_s = now_s
        self._began_s = self._until_s = now_s()
        self._total_s, self.case_s = 60 * minutes, 60 * case_minutes
        self._quickest_s = math.inf
        self.let(1.0)

    def let(self, share: float) -> None:
        """What follows may take so much of the time that is left."""
        self._until_s = self._began_s + self.passed_s + share * (self._total_s - self.passed_s)

    @property
    def passed_s(self) -> float:
        """Since the beginning."""
        return self._now_s() - self._began_s

    @property
    def limit_s(self) -> float:
        """For a process that begins now."""
        return min(self.case_s, self._until_s - self._now_s())

    def has_cut(self, outcome: str, limit_s: float) -> bool:
        """Whether a process that was given so long ended because of this clock, and not because it took all that one may."""
        return outcome == OUT_OF_TIME and limit_s < self.case_s

    def note(self, seconds: float) -> None:
        """That a process trained to its end in so much."""
        self._quickest_s = min(seconds, self._quickest_s)

    @property
    def is_over(self) -> bool:
        """Whether a process had better not begin, because none that trained was done in what is left."""
        least_s = _LEAST_S if math.isinf(self._quickest_s) else max(_LEAST_S, self._quickest_s)
        return self.limit_s < min(least_s, self.case_s)
