"""The machine, as the planner sees it."""

import hashlib
import json
from dataclasses import asdict, dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Machine:
    """Capacities and rates of one machine.

    Attributes:
        device_name: such as ``NVIDIA H100 80GB HBM3`` or the CPU's model name.
        device_type: ``cuda`` or ``cpu``.
        device_bytes, host_bytes, disk_bytes: capacities of the tiers; 0 where a tier does not exist.
        device_flops_per_s: sustained matmul rate by dtype name, such as ``(("float32", 4e11),)``.
        device_bytes_per_s: bandwidth of device memory (read plus write).
        h2d_bytes_per_s, d2h_bytes_per_s: large copies up and down.
        disk_bytes_per_s: sequential disk transfers; 0 where unused.
        device_update_params_per_s, host_update_params_per_s: AdamW updates, in parameters.
        latency_s: fixed cost of one transfer.
        copy_share: of a second of copying, the seconds by which it lengthens computation meanwhile. 0 where copies have an
            engine of their own; 1 where the processors that compute do the copying.
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

    def flops_per_s(self, dtype: str) -> float:
        """Matmul rate for a dtype; the slowest known one where it was not measured."""
        rates = dict(self.device_flops_per_s)
        return rates.get(dtype, min(rates.values()))

    @property
    def digest(self) -> str:
        """Stable across processes."""
        return hashlib.sha256(json.dumps(asdict(self), sort_keys=True).encode()).hexdigest()[:16]
