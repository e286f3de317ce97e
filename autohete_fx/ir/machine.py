"""The machine, as the planner sees it: measured, or told by a data sheet; saved as a versioned JSON file."""

import hashlib
import json
import math
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from autohete_fx.errors import MachineError
from autohete_fx.ir.files import SavedAs, checked, refuse_unknown, write_text
from autohete_fx.ir.lane import Lane

MACHINE_SCHEMA_VERSION = 1
ASSUMED_HOST_FLOPS_PER_S = 1e12
"""The rate of bf16 products on the host beside a GPU, where nobody has timed them: a socket of a server without matrix units."""

CONTENDING = (Lane.COMPUTE, Lane.H2D, Lane.D2H, Lane.UPDATE, Lane.NET)
"""The lanes that share a device, its memory and its links, or the host's memory."""

BANDWIDTHS = {
    "h2d_bytes_per_s": "copy to device",
    "d2h_bytes_per_s": "copy to host",
    "device_bytes_per_s": "device memory",
    "disk_bytes_per_s": "disk",
    "net_bytes_per_s": "link to other ranks",
}
"""Names of a `Machine`'s bandwidths for people, in the order of a listing."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Machine:
    """Capacities and rates of one machine.

    Attributes:
        device_name: such as ``NVIDIA H100 80GB HBM3`` or the CPU's model name.
        device_type: ``cuda`` or ``cpu``.
        device_bytes, host_bytes, disk_bytes: capacities of the tiers; 0 where a tier does not exist.
        device_flops_per_s: sustained matmul rate by dtype name, such as ``(("float32", 4e11),)``.
        backward_flops_per_s: likewise of backward's products; empty where they are as fast as forward's.
        device_bytes_per_s: bandwidth of device memory (read plus write).
        h2d_bytes_per_s, d2h_bytes_per_s: large copies up and down.
        disk_bytes_per_s: large transfers, as much read as written; 0 where nothing can be written.
        device_update_params_per_s, host_update_params_per_s: AdamW updates, in parameters of fp32.
        mixed_update_speed: rate of the host's updates of 16-bit parameters with fp32 masters, over that of fp32 ones; 0 where
            nobody knows: as fast (`updates_per_s`).
        latency_s: fixed cost of one transfer, which moves one tensor.
        copy_share: of a second of copying, the seconds by which it lengthens computation meanwhile. 0 where copies have an
            engine of their own; 1 where the processors that compute do the copying.
        net_bytes_per_s: of one rank's link to the others, in one direction; 0 where there are no others.
        net_latency_s: fixed cost of a message between two ranks.
        replica_net_bytes_per_s: of a rank's link to those that hold the same shards; 0 where there are none.
        host_flops_per_s: products of bf16 matrices on the host; 0 where nobody knows (`host_products_per_s`).
        launch_s: the least that a kernel takes; 0 where nobody knows.
        contention: two lanes of `CONTENDING` each, and the share of its rate that the first keeps while the second works, too. A
            pair that is not there leaves each other alone. On a device whose processors copy, ``copy_share`` says it.
    """

    device_name: str
    device_type: str
    device_bytes: int
    host_bytes: int
    disk_bytes: int
    device_flops_per_s: tuple[tuple[str, float], ...]
    device_bytes_per_s: float
    h2d_bytes_per_s: float
    d2h_bytes_per_s: float
    disk_bytes_per_s: float
    device_update_params_per_s: float
    host_update_params_per_s: float
    latency_s: float
    copy_share: float = 0.0
    net_bytes_per_s: float = 0.0
    net_latency_s: float = 0.0
    replica_net_bytes_per_s: float = 0.0
    backward_flops_per_s: tuple[tuple[str, float], ...] = ()
    launch_s: float = 0.0
    host_flops_per_s: float = 0.0
    mixed_update_speed: float = 0.0
    contention: tuple[tuple[str, str, float], ...] = ()

    def kept(self, lane: Lane, beside: Lane) -> float:
        """The share of its rate that a lane keeps while another works."""
        pair = lane.value, beside.value
        return next((rate for *lanes, rate in self.contention if tuple(lanes) == pair), 1.0)

    def updates_per_s(self, *, on_host: bool, mixed_share: float) -> float:
        """AdamW updates a second, in parameters, where a share of the updates is of 16-bit ones. On a device that is the host both
        are by the same kernels."""
        rate = self.host_update_params_per_s if on_host else self.device_update_params_per_s
        if not (mixed_share and self.mixed_update_speed and (on_host or self.device_type == "cpu")):
            return rate
        return rate / (1 - mixed_share + mixed_share / self.mixed_update_speed)

    @property
    def host_products_per_s(self) -> float:
        """Floating point operations of bf16 products on the host: as known, as those of a device that is the host, or assumed."""
        if self.host_flops_per_s:
            return self.host_flops_per_s
        return self.flops_per_s("bfloat16") if self.device_type == "cpu" else ASSUMED_HOST_FLOPS_PER_S

    def copy_bytes_per_s(self, lane: Lane) -> float:
        """The rate of large copies on a lane that copies."""
        return getattr(self, f"{lane.value}_bytes_per_s")

    def flops_per_s(self, dtype: str, *, backward: bool = False) -> float:
        """Matmul rate for a dtype, of forward or of backward; the slowest known one where it was not measured."""
        rates = dict((backward and self.backward_flops_per_s) or self.device_flops_per_s)
        return rates.get(dtype, min(rates.values()))

    @property
    def digest(self) -> str:
        """Stable across processes."""
        return hashlib.sha256(json.dumps(asdict(self), sort_keys=True).encode()).hexdigest()[:16]

    def to_json(self) -> str:
        """The machine as JSON text; ``from_json`` gives back an equal one."""
        return json.dumps({"schema_version": MACHINE_SCHEMA_VERSION, **asdict(self)}, indent=1) + "\n"

    def save(self, path: str | Path) -> None:
        """Write ``to_json()`` to a file, all at once. Raises OSError where it cannot be written."""
        write_text(path, self.to_json())

    @staticmethod
    def from_json(text: str) -> "Machine":
        """Read a machine. Raises MachineError where the text is none, or one of another schema version."""
        return _FILES.parse(text, _machine_of)

    @staticmethod
    def load(path: str | Path) -> "Machine":
        """Read a machine file. Raises MachineError, which names the file, where there is none or it is damaged."""
        return _FILES.load(path, Machine.from_json)


_FILES = SavedAs(
    kind="machine",
    writer="`autohete doctor --save`",
    again="measure the machine again with `autohete doctor --save`",
    schema_version=MACHINE_SCHEMA_VERSION,
    error=MachineError,
)
_SIZES = ("device_bytes", "host_bytes", "disk_bytes")
_RATES = (
    "device_bytes_per_s",
    "h2d_bytes_per_s",
    "d2h_bytes_per_s",
    "device_update_params_per_s",
    "host_update_params_per_s",
)
_MAY_BE_ZERO = ("disk_bytes_per_s", "latency_s", "copy_share")
_MAY_LACK = (
    "net_bytes_per_s",
    "net_latency_s",
    "replica_net_bytes_per_s",
    "launch_s",
    "host_flops_per_s",
    "mixed_update_speed",
)
"""0 where a file does not say: those of machines that were measured, and alone, do not."""
_LONGEST = ("latency_s", "copy_share", "net_latency_s", "launch_s")
_LEAST = (*_SIZES, *_RATES, "disk_bytes_per_s", "net_bytes_per_s", "replica_net_bytes_per_s")


def slowest_machine(machines: Sequence[Machine]) -> Machine:
    """A machine that no other is slower or smaller than in anything: a plan for it holds on all of them.

    Args:
        machines: of ranks that run one plan, at least one. Names are the first one's.
    """

    def flops(*, backward: bool) -> tuple[tuple[str, float], ...]:
        known = [each.backward_flops_per_s if backward else each.device_flops_per_s for each in machines]
        dtypes = dict.fromkeys(dtype for rates in known for dtype, _ in rates)
        return tuple((dtype, min(each.flops_per_s(dtype, backward=backward) for each in machines)) for dtype in dtypes)

    def least_known(name: str, assumed: Iterable[float]) -> float:
        return min(assumed) if any(getattr(each, name) for each in machines) else 0.0

    pairs = dict.fromkeys((lane, beside) for each in machines for lane, beside, _ in each.contention)
    return replace(
        machines[0],
        device_flops_per_s=flops(backward=False),
        backward_flops_per_s=flops(backward=True),
        host_flops_per_s=least_known("host_flops_per_s", (each.host_products_per_s for each in machines)),
        mixed_update_speed=least_known("mixed_update_speed", (each.mixed_update_speed or 1.0 for each in machines)),
        contention=tuple(
            (lane, beside, min(each.kept(Lane(lane), Lane(beside)) for each in machines)) for lane, beside in pairs
        ),
        **{name: min(getattr(each, name) for each in machines) for name in _LEAST},
        **{name: max(getattr(each, name) for each in machines) for name in _LONGEST},
    )


def _machine_of(raw: dict[str, Any]) -> Machine:
    """The machine that a JSON object spells. Raises KeyError for what it lacks, TypeError or ValueError for what is wrong."""
    refuse_unknown(raw, Machine, "schema_version")
    device_type = checked(raw, "device_type", str)
    if device_type not in ("cuda", "cpu"):
        raise ValueError(f"device_type is {device_type!r}; expected 'cuda' or 'cpu'")
    rates = _rates(raw, "device_flops_per_s")
    if not rates:
        raise ValueError("device_flops_per_s is []; expected pairs of a dtype and its rate")
    return Machine(
        device_name=checked(raw, "device_name", str),
        device_type=device_type,
        device_flops_per_s=rates,
        backward_flops_per_s=_rates(raw, "backward_flops_per_s") if "backward_flops_per_s" in raw else (),
        contention=_contention(raw) if "contention" in raw else (),
        **{name: _at_least_0(raw, name, int) for name in _SIZES},
        **{name: _rate(raw, name) for name in _RATES},
        **{name: _at_least_0(raw, name, int, float) for name in _MAY_BE_ZERO},
        **{name: _at_least_0(raw, name, int, float) for name in _MAY_LACK if name in raw},
    )


def _rates(raw: dict[str, Any], name: str) -> tuple[tuple[str, float], ...]:
    pairs = checked(raw, name, list)
    if not all(isinstance(pair, list) and len(pair) == 2 for pair in pairs):
        raise ValueError(f"{name} is {pairs!r}; expected pairs of a dtype and its rate")
    return tuple((str(dtype), _rate({str(dtype): rate}, str(dtype))) for dtype, rate in pairs)


def _contention(raw: dict[str, Any]) -> tuple[tuple[str, str, float], ...]:
    found, names = [], [lane.value for lane in CONTENDING]
    for entry in checked(raw, "contention", list):
        if not isinstance(entry, list) or len(entry) != 3 or not {*entry[:2]} <= {*names} or entry[0] == entry[1]:
            raise ValueError(f"contention has {entry!r}; expected two of {names} and a rate")
        lane, beside, rate = entry[0], entry[1], _rate({"contention": entry[2]}, "contention")
        if rate > 1:
            raise ValueError(f"contention has {entry!r}; expected a rate of at most 1")
        found.append((lane, beside, rate))
    return tuple(found)


def _rate(raw: dict[str, Any], name: str) -> float:
    value = checked(raw, name, int, float)
    if not 0 < value < math.inf:
        raise ValueError(f"{name} is {value!r}; expected more than 0")
    return value


def _at_least_0(raw: dict[str, Any], name: str, *kinds: type) -> Any:
    value = checked(raw, name, *kinds)
    if not 0 <= value < math.inf:
        raise ValueError(f"{name} is {value!r}; expected at least 0")
    return value
