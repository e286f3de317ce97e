"""Plans: every decision, with what it predicts, saved as a versioned JSON file."""

import hashlib
import json
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any

from autohete_fx.errors import PlanError
from autohete_fx.ir.decision import Activations, BlockDecision, Optimizer, Overlap, Params, Schedule
from autohete_fx.ir.lane import Lane

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
        decided = [self.schema_version, self.labels, self.block_digests, [asdict(d) for d in self.decisions]]
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
        try:
            raw = json.loads(text)
        except json.JSONDecodeError as error:
            raise PlanError(f"this is not a plan file: {error}; expected the JSON that Plan.save writes") from error
        if not isinstance(raw, dict) or "schema_version" not in raw:
            raise PlanError(
                "this is not a plan file: it has no schema_version; expected the JSON that Plan.save writes"
            )
        if raw["schema_version"] != SCHEMA_VERSION:
            raise PlanError(
                f"the plan has schema version {raw['schema_version']}, this autohete_fx reads {SCHEMA_VERSION}; make the plan again"
            )
        try:
            return _plan_of(raw)
        except (KeyError, TypeError, ValueError) as error:
            what = f"it lacks {error}" if isinstance(error, KeyError) else error
            raise PlanError(f"the plan file is damaged: {what}; make the plan again") from error

    @staticmethod
    def load(path: str | Path) -> "Plan":
        """Read a plan file. Raises PlanError, which names the file, where there is none or it is damaged."""
        try:
            return Plan.from_json(Path(path).read_text(encoding="utf-8"))
        except OSError as error:
            raise PlanError(
                f"cannot read the plan file {str(path)!r}: {error.strerror}; expected a file that Plan.save wrote"
            ) from error
        except UnicodeDecodeError as error:
            raise PlanError(
                f"{str(path)!r} is not a plan file: it is not text; expected what Plan.save writes"
            ) from error
        except PlanError as error:
            raise PlanError(f"{str(path)!r}: {error}") from error


_NUMBERS = ("step_s", "peak_bytes", "host_bytes", "disk_bytes", "lower_bound_s", "gap", "solve_s")


def _plan_of(raw: dict[str, Any]) -> Plan:
    """The plan that a JSON object spells. Raises KeyError for what it lacks, TypeError or ValueError for what is wrong."""
    _refuse_unknown(raw, Plan)
    schedule = _checked(raw, "schedule", dict)
    _refuse_unknown(schedule, Schedule)
    return Plan(
        labels=tuple(_checked(raw, "labels", list)),
        block_digests=tuple(_checked(raw, "block_digests", list)),
        decisions=tuple(_decision_of(index, d) for index, d in enumerate(_checked(raw, "decisions", list))),
        schedule=Schedule(
            overlap=Overlap(_checked(schedule, "overlap", str)), priority=_checked(schedule, "priority", bool)
        ),
        busy_s=tuple(
            LaneTime(lane=Lane(_checked(t, "lane", str)), busy_s=_checked(t, "busy_s", int, float))
            for t in _checked(raw, "busy_s", list)
        ),
        status=_checked(raw, "status", str),
        problem_digest=_checked(raw, "problem_digest", str),
        **{name: _checked(raw, name, int, float) for name in _NUMBERS},
    )


def _decision_of(index: int, raw: dict[str, Any]) -> BlockDecision:
    try:
        decision = BlockDecision(
            activations=Activations(_checked(raw, "activations", str)),
            params=Params(_checked(raw, "params", str)),
            optimizer=Optimizer(_checked(raw, "optimizer", str)),
            prefetch_distance=_checked(raw, "prefetch_distance", int),
            keeps_fetched=_checked(raw, "keeps_fetched", bool),
            num_moved_states=_checked(raw, "num_moved_states", int, type(None)),
            num_offloaded=_checked(raw, "num_offloaded", int, type(None)),
        )
        _refuse_unknown(raw, BlockDecision)
        return decision
    except (TypeError, ValueError, PlanError) as error:
        raise ValueError(f"in decision {index}, {error}") from error


def _refuse_unknown(raw: dict[str, Any], of: type) -> None:
    unknown = sorted(set(raw) - {field.name for field in fields(of)})
    if unknown:
        raise ValueError(f"it has the unknown entries {unknown}")


def _checked(raw: Any, name: str, *kinds: type) -> Any:
    if not isinstance(raw, dict):
        raise TypeError(f"{raw!r} stands where an object with {name!r} was expected")
    value = raw[name]
    if not isinstance(value, kinds) or (isinstance(value, bool) and bool not in kinds):
        raise TypeError(f"{name} is {value!r}; expected {' or '.join(kind.__name__ for kind in kinds)}")
    return value
