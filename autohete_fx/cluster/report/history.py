"""A job as its log tells it: starts, plans, steps, nodes that came and went, bytes by source, tokens and dollars.

Enter the file of JSON lines that ``cluster.join(log=...)`` writes; leave a `History`, its text, and its page by `history_page`.

A GPU costs from the moment when its start of the job began until the next start began. The seconds in which a job finds a loss and
begins again thus count with the GPUs that it had before.
"""

import itertools
import json
import math
import statistics
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from autohete_fx.cluster.plan import ClusterPlan, plan_line
from autohete_fx.errors import ClusterError
from autohete_fx.ir.sizes import format_bytes, format_seconds
from autohete_fx.report.tables import aligned

SOURCES = ("local", "peer", "cloud")
_HOUR_S = 3600.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Step:
    """A step that was trained.

    Attributes:
        step: index.
        loss: before the update.
        seconds: of it.
        end_s: when it ended, since the epoch.
    """

    step: int
    loss: float
    seconds: float
    end_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Start:
    """One start of the job, until the next.

    Attributes:
        begin_s: since the epoch.
        seconds: until it was ready to train.
        step: that it began with.
        gpus: by type, their number.
        agents: of torchrun, or nodes where the log names none.
        plan: that it trained.
        sample_tokens: of a sample; 1 where samples have no sequence.
        read: bytes by source.
        steps: in order.
        told: nodes that were told to leave, and left.
        handed_over: bytes that these gave to others.
    """

    begin_s: float
    seconds: float
    step: int
    gpus: Mapping[str, int]
    agents: frozenset[str]
    plan: ClusterPlan
    sample_tokens: int
    read: Mapping[str, int]
    steps: tuple[Step, ...]
    told: tuple[str, ...]
    handed_over: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Change:
    """Nodes between one start and the next: how many had been told to leave, vanished, and joined."""

    told: int
    vanished: int
    joined: int


@dataclass(frozen=True, slots=True, kw_only=True)
class History:
    """A job.

    Attributes:
        starts: in order.
        end_s: of the last line of the log.
        saved: newest step that all disks have (``local``), and that the cloud has (``cloud``), where there is one.
    """

    starts: tuple[Start, ...]
    end_s: float
    saved: Mapping[str, int]

    @property
    def changes(self) -> list[Change]:
        """Before each start but the first."""
        found = []
        for before, after in itertools.pairwise(self.starts):
            gone = len(before.agents - after.agents)
            told = min(gone, len(before.told))
            joined = len(after.agents - before.agents)
            found.append(Change(told=told, vanished=gone - told, joined=joined))
        return found

    @property
    def steps(self) -> list[Step]:
        """All that were trained, again or not, in order."""
        return [step for start in self.starts for step in start.steps]

    @property
    def tokens(self) -> int:
        """Tokens of all steps, each step counted once."""
        seen = {step.step: start for start in self.starts for step in start.steps}
        return sum(start.plan.global_batch * start.sample_tokens for start in seen.values())

    @property
    def repeated(self) -> int:
        """Steps that were trained again, since their result was lost."""
        return len(self.steps) - len({step.step for step in self.steps})

    @property
    def read(self) -> dict[str, int]:
        """Bytes that all starts read, by source."""
        return {source: sum(start.read.get(source, 0) for start in self.starts) for source in SOURCES}

    def recovery_s(self, index: int) -> float | None:
        """Seconds from the last step before a start to the end of its first; None where either is missing."""
        before = [step for start in self.starts[:index] for step in start.steps]
        if not before or not self.starts[index].steps:
            return None
        return self.starts[index].steps[0].end_s - before[-1].end_s

    def gpu_hours(self) -> dict[str, float]:
        """By type of GPU."""
        found: dict[str, float] = {}
        ends = [*(start.begin_s for start in self.starts[1:]), self.end_s]
        for start, end_s in zip(self.starts, ends, strict=True):
            for gpu, count in start.gpus.items():
                found[gpu] = found.get(gpu, 0.0) + count * max(0.0, end_s - start.begin_s) / _HOUR_S
        return found

    def dollars(self, prices: Mapping[str, float]) -> float | None:
        """The price of all GPUs together. None where one has none.

        Args:
            prices: dollars of an hour, by type.
        """
        hours = self.gpu_hours()
        return None if hours.keys() - prices.keys() else sum(hours[gpu] * prices[gpu] for gpu in hours)


def read_history(path: str | Path) -> History:
    """Read a log. Lines that are damaged are left out, such as a last one that was cut off.

    Raises:
        ClusterError: there is no such file, or it has no start of a job.
    """
    try:
        lines = Path(path).read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError as error:
        raise ClusterError(
            f"the log {str(path)!r} was given: {error.strerror}. Expected was a file that cluster.join(log=...) wrote. Correct the"
            " path"
        ) from error
    rows = [row for row in map(_row, lines) if row]
    if not any(row["event"] == "join" for row in rows):
        raise ClusterError(
            f"{str(path)!r} has no line of a job that began. Expected was a file that cluster.join(log=...) wrote. Correct the path"
        )
    groups: list[list[dict[str, Any]]] = []
    for row in rows:
        if row["event"] == "join":
            groups.append([])
        if groups:
            groups[-1].append(row)
    saves = [row for row in rows if row["event"] in ("save", "finish")]
    newest = {place: max((row[place] for row in saves), default=-1) for place in ("local", "cloud")}
    saved = {place: step for place, step in newest.items() if step >= 0}
    return History(starts=tuple(map(_start, groups)), end_s=rows[-1]["time_s"], saved=saved)


_NEEDED = {
    "join": ("seconds", "step", "members", "plan", "bytes"),
    "step": ("step", "loss", "seconds"),
    "save": ("local", "cloud"),
    "finish": ("local", "cloud"),
    "leave": ("nodes", "peer_bytes"),
}
"""Entries of a line, by its event."""


def _row(line: str) -> dict[str, Any]:
    try:
        row = json.loads(line)
    except ValueError:
        return {}
    is_whole = isinstance(row, dict) and isinstance(row.get("event"), str) and "time_s" in row and "\ufffd" not in line
    return row if is_whole and all(key in row for key in _NEEDED.get(row["event"], ())) else {}


def _start(rows: Sequence[Mapping[str, Any]]) -> Start:
    joined, leaves = rows[0], [row for row in rows if row["event"] == "leave"]
    return Start(
        begin_s=joined["time_s"] - joined["seconds"],
        seconds=joined["seconds"],
        step=joined["step"],
        gpus=dict(Counter(gpu for _, gpu in joined["members"])),
        agents=frozenset(joined.get("agents") or (node for node, _ in joined["members"])),
        plan=ClusterPlan.from_json(joined["plan"]),
        sample_tokens=joined.get("sample_tokens", 1),
        read=joined["bytes"],
        steps=tuple(
            Step(step=row["step"], loss=row["loss"], seconds=row["seconds"], end_s=row["time_s"])
            for row in rows
            if row["event"] == "step"
        ),
        told=tuple(node for row in leaves for node in row["nodes"]),
        handed_over=sum(row["peer_bytes"] for row in leaves),
    )


# -- in words ---------------------------------------------------------------------------------------------------------


def facts(history: History, prices: Mapping[str, float]) -> dict[str, str]:
    """The figures of a job, in words, by name."""
    steps, changes = history.steps, history.changes
    told, vanished, joined = (sum(getattr(change, key) for change in changes) for key in ("told", "vanished", "joined"))
    seconds = history.end_s - history.starts[0].begin_s
    return {
        "steps": f"{len({step.step for step in steps})} in {format_seconds(seconds)}, {history.repeated} trained again",
        "starts": f"{len(history.starts)}, with {len({start.plan for start in history.starts})} plans",
        "preemptions": f"{told + vanished} nodes ({told} told, {vanished} vanished); {joined} joined",
        "handed over": f"{format_bytes(sum(start.handed_over for start in history.starts))} by nodes that were told to leave",
        "restored": ", ".join(f"{source} {format_bytes(count)}" for source, count in history.read.items()),
        "saved": _saved_words(history.saved),
        "tokens": f"{history.tokens:,}, {history.tokens / seconds:,.0f} a second" if seconds > 0 else "0",
        "dollars": _dollars_words(history, prices),
    }


def _saved_words(saved: Mapping[str, int]) -> str:
    words = {place: f"step {step}" for place, step in saved.items()}
    return (
        f"{words.get('local', 'none')} on disks, {words.get('cloud', 'none')} in the cloud" if words else "nothing yet"
    )


def _dollars_words(history: History, prices: Mapping[str, float]) -> str:
    hours = ", ".join(f"{count:.3g} h of {gpu}" for gpu, count in history.gpu_hours().items())
    dollars = history.dollars(prices)
    if dollars is None:
        unknown = ", ".join(sorted(history.gpu_hours().keys() - prices.keys()))
        return f"unknown, since {unknown} has no price (--price TYPE=USD_PER_HOUR); {hours}"
    each = f", ${dollars / history.tokens * 1e6:.3g} for a million tokens" if history.tokens else ""
    return f"${dollars:.3g}{each}; {hours}"


COLUMNS = ("began", "with step", "GPUs", "nodes", "read", "recovery", "steps", "a step", "plan")


def table_rows(history: History) -> list[list[str]]:
    """A row for each start, in the order of `COLUMNS`."""
    found = []
    for index, start in enumerate(history.starts):
        recovery_s = history.recovery_s(index)
        read = ", ".join(f"{source} {format_bytes(start.read[source])}" for source in SOURCES if start.read.get(source))
        step_s = statistics.median(step.seconds for step in start.steps) if start.steps else math.nan
        found.append(
            [
                f"+{start.begin_s - history.starts[0].begin_s:.0f} s",
                str(start.step),
                ", ".join(f"{count} x {gpu}" for gpu, count in start.gpus.items()),
                _change_words(history.changes[index - 1]) if index else "-",
                read or "-",
                format_seconds(recovery_s) if recovery_s is not None else "-",
                str(len(start.steps)),
                format_seconds(step_s) if start.steps else "-",
                plan_line(start.plan).partition(": ")[2],
            ]
        )
    return found


def _change_words(change: Change) -> str:
    counts = {"told to leave": change.told, "vanished": change.vanished, "joined": change.joined}
    return ", ".join(f"{count} {word}" for word, count in counts.items() if count) or "the same"


def history_text(history: History, prices: Mapping[str, float]) -> str:
    """A job as text: its figures, and a table of its starts."""
    width = max(map(len, facts(history, prices)))
    lines = [f"{name.ljust(width)}  {words}" for name, words in facts(history, prices).items()]
    return "\n".join([*lines, "", aligned(COLUMNS, table_rows(history), right_from=5, right_until=8)])
