"""Plans: every decision, with what it predicts, saved as a versioned JSON file."""

import hashlib
import json
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from autohete_fx.errors import PlanError
from autohete_fx.ir.decision import Activations, BlockDecision, Optimizer, Overlap, Params, Schedule
from autohete_fx.ir.lane import Lane
from autohete_fx.ir.saved import SavedAs, checked, refuse_unknown

SCHEMA_VERSION = 2


@dataclass(frozen=True, slots=True, kw_only=True)
class LaneTime:
    """Seconds per step that a lane is predicted to work."""

    lane: Lane
    busy_s: float


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
    schema_version: int = SCHEMA_VERSION

    def __post_init__(self) -> None:
        if len(self.labels) != len(self.decisions):
            raise PlanError(
                f"a plan needs one decision a block: {len(self.labels)} labels, {len(self.decisions)} decisions"
            )

    @property
    def digest(self) -> str:
        """Of what it decides, not of what it predicts; stable across processes."""
        decisions, schedule = [asdict(d) for d in self.decisions], asdict(self.schedule)
        decided = [self.schema_version, self.labels, self.block_digests, decisions, schedule]
        return hashlib.sha256(json.dumps(decided, sort_keys=True, default=lambda e: e.value).encode()).hexdigest()[:16]

    def to_json(self) -> str:
        """The plan as JSON text; ``from_json`` gives back an equal plan."""
        return json.dumps(asdict(self), indent=1, default=lambda e: e.value) + "\n"

    def save(self, path: str | Path) -> None:
        """Write ``to_json()`` to a file."""
        Path(path).write_text(self.to_json(), encoding="utf-8")

    @staticmethod
    def from_json(text: str) -> "Plan":
        """Read a plan. Raises PlanError where the text is no plan, or one of another schema version."""
        return _FILES.parse(text, _plan_of)

    @staticmethod
    def load(path: str | Path) -> "Plan":
        """Read a plan file. Raises PlanError, which names the file, where there is none or it is damaged."""
        return _FILES.load(path, Plan.from_json)


_FILES = SavedAs(
    kind="plan", writer="Plan.save", again="make the plan again", schema_version=SCHEMA_VERSION, error=PlanError
)
_NUMBERS = ("step_s", "peak_bytes", "host_bytes", "disk_bytes", "lower_bound_s", "gap", "solve_s")


def _plan_of(raw: dict[str, Any]) -> Plan:
    """The plan that a JSON object spells. Raises KeyError for what it lacks, TypeError or ValueError for what is wrong."""
    refuse_unknown(raw, Plan)
    schedule = checked(raw, "schedule", dict)
    refuse_unknown(schedule, Schedule)
    return Plan(
        labels=tuple(checked(raw, "labels", list)),
        block_digests=tuple(checked(raw, "block_digests", list)),
        decisions=tuple(_decision_of(index, d) for index, d in enumerate(checked(raw, "decisions", list))),
        schedule=Schedule(
            overlap=Overlap(checked(schedule, "overlap", str)), priority=checked(schedule, "priority", bool)
        ),
        busy_s=tuple(
            LaneTime(lane=Lane(checked(t, "lane", str)), busy_s=checked(t, "busy_s", int, float))
            for t in checked(raw, "busy_s", list)
        ),
        status=checked(raw, "status", str),
        problem_digest=checked(raw, "problem_digest", str),
        **{name: checked(raw, name, int, float) for name in _NUMBERS},
    )


def _decision_of(index: int, raw: dict[str, Any]) -> BlockDecision:
    try:
        decision = BlockDecision(
            activations=Activations(checked(raw, "activations", str)),
            params=Params(checked(raw, "params", str)),
            optimizer=Optimizer(checked(raw, "optimizer", str)),
            prefetch_distance=checked(raw, "prefetch_distance", int),
            keeps_fetched=checked(raw, "keeps_fetched", bool),
            num_moved_states=checked(raw, "num_moved_states", int, type(None)),
            num_offloaded=checked(raw, "num_offloaded", int, type(None)),
        )
        refuse_unknown(raw, BlockDecision)
        return decision
    except (TypeError, ValueError, PlanError) as error:
        raise ValueError(f"in decision {index}, {error}") from error
