"""Plans: every decision, with what it predicts, saved as a versioned JSON file."""

import hashlib
import json
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from autohete_fx.errors import PlanError
from autohete_fx.ir.decision import BlockDecision, Schedule
from autohete_fx.ir.files import SavedAs, check_numbers, spelled, write_text
from autohete_fx.ir.lane import LaneTime
from autohete_fx.ir.reasons import Reasons

SCHEMA_VERSION = 5

DIFFERENCES = ("more_copies_s",)
"""Entries of a plan that may be below 0."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """Every decision, with what it predicts.

    Attributes:
        labels: one name a block, in execution order; a replay checks them against the graph.
        block_digests: one digest a block; a replay checks them against the graph. Empty: only labels are checked.
        decisions: one a block.
        schedule: of the updates on the host, for which the predictions hold.
        step_s: predicted seconds of one optimizer step.
        peak_bytes: predicted peak device memory of a step.
        host_bytes: predicted host memory for homes.
        disk_bytes: predicted bytes on disk.
        busy_s: predicted work per lane.
        lower_bound_s: no plan that the planner could have made is faster, as the simulator counts.
        gap: ``(step_s - lower_bound_s) / step_s``, proven by the solver.
        status: ``optimal`` where ``gap`` is at most 0.5%, else ``feasible``; a baseline's name; ``given`` for a plan made
            by hand.
        problem_digest: of the problem that it solves; empty for a plan made by hand.
        solve_s: seconds that the solver took.
        reasons: why it decides so, for `Compilation.why`; None where nobody recorded any.
    """

    labels: tuple[str, ...]
    decisions: tuple[BlockDecision, ...]
    block_digests: tuple[str, ...] = ()
    schedule: Schedule = field(default_factory=Schedule)
    step_s: float = 0.0
    peak_bytes: int = 0
    host_bytes: int = 0
    disk_bytes: int = 0
    busy_s: tuple[LaneTime, ...] = ()
    lower_bound_s: float = 0.0
    gap: float = 0.0
    status: str = "given"
    problem_digest: str = ""
    solve_s: float = 0.0
    reasons: Reasons | None = None
    schema_version: int = SCHEMA_VERSION

    def __post_init__(self) -> None:
        if len(self.labels) != len(self.decisions):
            raise PlanError(
                f"a plan was given {len(self.labels)} labels and {len(self.decisions)} decisions; expected one decision"
                " a block. Give as many of both"
            )
        if self.reasons is not None and len(self.reasons.blocks) != len(self.decisions):
            raise PlanError(
                f"reasons were given {len(self.reasons.blocks)} entries for {len(self.decisions)} decisions; expected one"
                " entry a block. Leave the reasons out, or solve again"
            )

    @property
    def digest(self) -> str:
        """A digest of the decisions, not of the predictions; stable across processes."""
        decisions, schedule = [asdict(d) for d in self.decisions], asdict(self.schedule)
        decided = [self.schema_version, self.labels, self.block_digests, decisions, schedule]
        return hashlib.sha256(json.dumps(decided, sort_keys=True, default=lambda e: e.value).encode()).hexdigest()[:16]

    def to_json(self) -> str:
        """The plan as JSON text; ``from_json`` gives back an equal plan."""
        return json.dumps(asdict(self), indent=1, default=lambda e: e.value) + "\n"

    def save(self, path: str | Path) -> None:
        """Write ``to_json()`` to a file, all at once. Raises OSError where it cannot be written."""
        write_text(path, self.to_json())

    @staticmethod
    def from_json(text: str) -> "Plan":
        """Read a plan. Raises PlanError where the text is no plan, or one of another schema version."""
        return _FILES.parse(text, _plan_of)

    @staticmethod
    def load(path: str | Path) -> "Plan":
        """Read a plan file. Raises PlanError, which names the file, where there is none or it is damaged."""
        return _FILES.load(path, Plan.from_json)


def _plan_of(raw: dict[str, Any]) -> Plan:
    plan = spelled(Plan, raw)
    check_numbers("", raw, DIFFERENCES)
    return plan


_FILES = SavedAs(
    kind="plan",
    writer="Plan.save",
    again="make the plan again",
    schema_version=SCHEMA_VERSION,
    error=PlanError,
    others={
        "pipelines": "a cluster's plan, which `autohete plan --cluster` prices with --given, and autohete_fx.cluster.join trains"
    },
)
