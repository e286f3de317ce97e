"""The words in which a data sheet is told: a device, its peaks, its links, the host around it, and the shares that are reached.

`data_sheets` writes the table in them; `devices` makes machines of it and explains every share.
"""

from dataclasses import dataclass

MEMORY_SHARE = 0.85
LINK_SHARE = 0.82
NET_SHARE = 0.8


@dataclass(frozen=True, slots=True, kw_only=True)
class Link:
    """Between host and device: its name and GB/s (10^9 bytes) in one direction, stated and reached up and down."""

    name: str
    gb_per_s: float
    h2d_gb_per_s: float
    d2h_gb_per_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Net:
    """Between the GPUs of a node: its name and GB/s (10^9 bytes) that one sends, stated and reached."""

    name: str
    gb_per_s: float
    reached_gb_per_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Host:
    """The host that a device is assumed to be plugged into.

    Attributes:
        name: platform and memory channels.
        memory_gib: RAM.
        dram_gb_per_s: the channels' stated bandwidth, in 10^9 bytes.
        disk_gb_per_s: the drive's stated bandwidth, in 10^9 bytes.
    """

    name: str
    memory_gib: int
    dram_gb_per_s: float
    disk_gb_per_s: float = 7.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Peaks:
    """Dense peaks of products in TFLOP/s, without sparsity; 16-bit ones with fp32 accumulation.

    Where there are no tensor cores for a type, the fp32 peak.
    """

    fp32: float
    tf32: float
    fp16: float
    bf16: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Sustained:
    """The measured shares of a peak that one kind of products sustains.

    Attributes:
        peak: name of a field of `Peaks`.
        forward: share in forward.
        backward: share in backward, where matrices are read transposed and results are summed over all tokens.
    """

    peak: str
    forward: float
    backward: float


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceSpec:
    """One accelerator as its data sheet states it.

    Attributes:
        name: what the command line takes.
        aliases: other names for it.
        title: its full name.
        memory_gib: capacity in GiB.
        memory_gb_per_s: bandwidth in 10^9 bytes a second.
        peaks: of matrix products.
        matmul_share: of the peak, what products sustain where ``sustained`` does not say.
        sustained: measured shares of some peaks.
        memory_share: of the bandwidth, what kernels reach.
        update_share: of the bandwidth, what the optimizer's step reaches.
        link: to the host.
        host: assumed around it.
        net: to other GPUs of its node; None where that is the link to the host.
        source: the data sheet.
        usd_per_hour: list price of one GPU with its part of a host, on demand; None where no usual cloud rents it.
        spot_usd_per_hour: likewise while nobody pays more; None where no usual cloud rents it so.
    """

    name: str
    aliases: tuple[str, ...] = ()
    title: str
    memory_gib: float
    memory_gb_per_s: float
    peaks: Peaks
    matmul_share: float
    sustained: tuple[Sustained, ...] = ()
    memory_share: float = MEMORY_SHARE
    update_share: float = MEMORY_SHARE
    link: Link
    host: Host
    net: Net | None = None
    source: str
    usd_per_hour: float | None
    spot_usd_per_hour: float | None

    def peak_flops_per_s(self, dtype: str, *, tf32: bool = False) -> float:
        """The stated dense peak for a dtype's name."""
        return getattr(self.peaks, _peak_name(dtype, tf32)) * 1e12

    def share(self, dtype: str, *, tf32: bool = False, backward: bool = False) -> float:
        """The part of that peak that products of forward or backward sustain."""
        name = _peak_name(dtype, tf32)
        if getattr(self.peaks, name) == self.peaks.fp32:
            name = "fp32"  # without tensor cores for it
        found = next((sustained for sustained in self.sustained if sustained.peak == name), None)
        if found is None:
            return self.matmul_share
        return found.backward if backward else found.forward


def _peak_name(dtype: str, tf32: bool) -> str:
    return {"float32": "tf32" if tf32 else "fp32", "float16": "fp16", "bfloat16": "bf16"}[dtype]
