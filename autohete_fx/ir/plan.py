"""Plans: every decision, with what it predicts, saved as a versioned JSON file."""

import enum
import hashlib
import json
from dataclasses import asdict, dataclass
from pathlib import Path

from autohete_fx.errors import PlanError
from autohete_fx.ir.lane import Lane

SCHEMA_VERSION = 1


class Activations(enum.Enum):
    """What happens to a block's saved activations between its forward and its backward."""

    KEEP = "keep"
    RECOMPUTE = "recompute"
    OFFLOAD = "offload"


class Params(enum.Enum):
    """Where a block's parameters live between their uses."""

    DEVICE = "device"
    HOST = "host"


class Optimizer(enum.Enum):
    """Where a block's optimizer states live and its step runs."""

    DEVICE = "device"
    HOST = "host"


@dataclass(frozen=True, slots=True, kw_only=True)
class BlockDecision:
    """The decisions for one block.

    Attributes:
        activations, params, optimizer: see the enums.
        prefetch_distance: how many blocks ahead of its use a copy to the device is issued, at least 1: parameters in
            forward and backward, offloaded activations in backward. Irrelevant where nothing of the block is on the host.
    """

    activations: Activations = Activations.KEEP
    params: Params = Params.DEVICE
    optimizer: Optimizer = Optimizer.DEVICE
    prefetch_distance: int = 1


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
        step_s: predicted seconds of one optimizer step.
        peak_bytes: predicted peak device memory of a step.
        host_bytes: predicted host memory for homes.
        busy_s: predicted work per lane.
        lower_bound_s: no plan of the formulation is faster.
        gap: ``(step_s - lower_bound_s) / step_s``, proven by the solver.
        status: the solver's word, such as ``optimal``; ``given`` for a plan made by hand.
        problem_digest: of the problem that it solves; empty for a plan made by hand.
        solve_s: seconds that the solver took.
    """

    labels: tuple[str, ...]
    decisions: tuple[BlockDecision, ...]
    block_digests: tuple[str, ...] = ()
    step_s: float = 0.0
    peak_bytes: int = 0
    host_bytes: int = 0
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
        Path(path).write_text(self.to_json())

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
            return Plan(
                **{
                    **raw,
                    "labels": tuple(raw["labels"]),
                    "block_digests": tuple(raw["block_digests"]),
                    "decisions": tuple(
                        BlockDecision(
                            activations=Activations(d["activations"]),
                            params=Params(d["params"]),
                            optimizer=Optimizer(d["optimizer"]),
                            prefetch_distance=int(d["prefetch_distance"]),
                        )
                        for d in raw["decisions"]
                    ),
                    "busy_s": tuple(LaneTime(lane=Lane(t["lane"]), busy_s=t["busy_s"]) for t in raw["busy_s"]),
                }
            )
        except (KeyError, TypeError, ValueError) as error:
            raise PlanError(f"the plan file is damaged: {error!r}; make the plan again") from error

    @staticmethod
    def load(path: str | Path) -> "Plan":
        """Read a plan file. Raises PlanError where there is none or it is damaged."""
        try:
            text = Path(path).read_text()
        except OSError as error:
            raise PlanError(f"cannot read the plan file {str(path)!r}: {error}") from error
        return Plan.from_json(text)
