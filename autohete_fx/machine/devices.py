"""Machines that one does not have: accelerators by name, from their data sheets, as `Machine` values.

Enter a name such as ``a100-40g`` or ``4090``; leaves a `Machine` with sustained rates. A data sheet states peaks; what a
training step sustains is a stated share of them, so every figure here is a data sheet's times a share, and both are
given. A machine that can be measured should be: `autohete doctor --save`.

Matrix products
    ``matmul_share`` of the *dense* peak. Nine tenths of the best that torch.matmul reached in bf16 over many shapes where
    that is published (S. Bekman, "Machine Learning Engineering", table of maximum achievable matmul FLOPS: A100 SXM 87%,
    H100 SXM 80%, GH200 84%, MI300X 51%), because a model's shapes are not the best ones. H200 is taken as H100. Where
    nothing is published: 0.8 for V100; 0.6 for the cards whose power limit is far below what their peak takes (L40S,
    H100 PCIe); 0.85 for GeForce cards, whose stated peak is that of a clock which they exceed.
    ``float32`` is the rate without tensor cores, because PyTorch multiplies fp32 without TF32 unless told to
    (``torch.set_float32_matmul_precision("high")``); `machine_of_spec` takes ``tf32=True`` for that. ``float16`` and
    ``bfloat16`` are with fp32 accumulation, which is what PyTorch asks for, half of the headline figure of GeForce cards.
Device memory
    MEMORY_SHARE of the stated bandwidth, as STREAM reached on a GH200 (3.4 of 4 TB/s, arXiv 2407.07850). Capacity is what
    the driver leaves where error correction or spare rows take a part of the stated one (L40S, H200, GH200). An AdamW
    update moves UPDATE_BYTES a parameter.
Host link
    LINK_SHARE of the link's bandwidth in one direction (PCIe 3.0, 4.0, 5.0 x16: 15.75, 31.5, 63.0 GB/s), which is what
    pinned copies reach. NVLink-C2C has 450 GB/s a direction, of which 375 up and 297 down were measured (same paper).
Host
    An assumption: for data-centre cards one socket of a usual server of their time and its memory, for GeForce cards a
    desktop with as much memory as its platform takes. An update on the host moves UPDATE_BYTES a parameter (fp32 master and
    moments read and written, the gradient read and a 16-bit weight written; as many for pure fp32) at HOST_SHARE of the
    stated DRAM bandwidth: STREAM reaches about 0.8 of it, our AdamW about 0.9 of STREAM.
Net
    Between GPUs of a node, bytes a second that one sends in a ring: NVLink of A100 240 of 300 GB/s a direction, of H100 370 of 450
    (``torch/_inductor/comm_analysis.py``), and for other NVLinks and Infinity Fabric NET_SHARE of what they state, an assumption.
    Cards without either send through their host link, two hops of one PCIe tree; where peers cannot copy to each other, as with
    GeForce cards, that is more than is reached. NET_LATENCY_S a hop. Between nodes each GPU has an adapter of its own,
    NODE_GB_PER_S unless told otherwise (InfiniBand HDR, 200 Gb/s), and NCCL's rings cross by all of a node's adapters at once.
Host of several GPUs
    The ranks of a node share its memory, its disk and the rate of its updates evenly: the work of all ranks' updates does not
    shrink with their number. It is the same host as for one GPU. Each keeps a host link of its own.
Disk
    One NVMe drive of 2 TB; DISK_SHARE of 3.5 GB/s behind PCIe 3.0, of 7 GB/s behind later ones.
"""

from dataclasses import dataclass, replace

from autohete_fx.errors import OptionError, unknown_word
from autohete_fx.ir import Machine

MEMORY_SHARE = 0.85
LINK_SHARE = 0.82
HOST_SHARE = 0.72
DISK_SHARE = 0.8
UPDATE_BYTES = 28
NET_SHARE = 0.8
NET_LATENCY_S = 1e-5
"""Of one message from a GPU to the next."""
NODE_GB_PER_S = 25.0
"""Of one GPU's adapter to other nodes in one direction."""
LATENCY_S = 1e-5
"""Of a copy, from its issue on a stream to its first byte."""
RESERVE_SHARE = 0.05
"""Of a card's capacity, what a plan leaves alone unless told otherwise: the CUDA context and libraries take about
0.5 GiB, some of the stated capacity is never available, and the caching allocator's blocks do not fit without gaps."""
_DISK_BYTES = 2 * 10**12


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
class DeviceSpec:
    """One accelerator as its data sheet states it.

    Attributes:
        name: what the command line takes.
        aliases: other names for it.
        title: its full name.
        memory_gib: capacity in GiB.
        memory_gb_per_s: bandwidth in 10^9 bytes a second.
        peaks: of matrix products.
        matmul_share: of the peak, what products sustain.
        link: to the host.
        host: assumed around it.
        net: to other GPUs of its node; None where that is the link to the host.
        source: the data sheet.
    """

    name: str
    aliases: tuple[str, ...] = ()
    title: str
    memory_gib: float
    memory_gb_per_s: float
    peaks: Peaks
    matmul_share: float
    link: Link
    host: Host
    net: Net | None = None
    source: str

    def peak_flops_per_s(self, dtype: str, *, tf32: bool = False) -> float:
        """The stated dense peak for a dtype's name."""
        peaks = self.peaks
        by_dtype = {"float32": peaks.tf32 if tf32 else peaks.fp32, "float16": peaks.fp16, "bfloat16": peaks.bf16}
        return by_dtype[dtype] * 1e12


def _pcie(generation: int, gb_per_s: float) -> Link:
    reached = LINK_SHARE * gb_per_s
    return Link(name=f"PCIe {generation}.0 x16", gb_per_s=gb_per_s, h2d_gb_per_s=reached, d2h_gb_per_s=reached)


_PCIE_3, _PCIE_4, _PCIE_5 = _pcie(3, 15.75), _pcie(4, 31.5), _pcie(5, 63.0)
_C2C = Link(name="NVLink-C2C", gb_per_s=450.0, h2d_gb_per_s=375.0, d2h_gb_per_s=297.0)

_NVLINK_2 = Net(name="NVLink 2", gb_per_s=150.0, reached_gb_per_s=NET_SHARE * 150.0)
_NVLINK_3 = Net(name="NVLink 3", gb_per_s=300.0, reached_gb_per_s=240.0)
_NVLINK_4 = Net(name="NVLink 4", gb_per_s=450.0, reached_gb_per_s=370.0)
_INFINITY = Net(name="Infinity Fabric", gb_per_s=448.0, reached_gb_per_s=NET_SHARE * 448.0)

_SKYLAKE = Host(name="Xeon, 6 x DDR4-2666", memory_gib=512, dram_gb_per_s=128.0, disk_gb_per_s=3.5)
_MILAN = Host(name="EPYC, 8 x DDR4-3200", memory_gib=1024, dram_gb_per_s=204.8)
_SAPPHIRE = Host(name="Xeon, 8 x DDR5-4800", memory_gib=1024, dram_gb_per_s=307.2)
_GENOA = Host(name="EPYC, 12 x DDR5-4800", memory_gib=1536, dram_gb_per_s=460.8)
_GRACE = Host(name="Grace, LPDDR5X", memory_gib=480, dram_gb_per_s=500.0)
_DDR4_DESKTOP = Host(name="desktop, 2 channels DDR4-3200", memory_gib=128, dram_gb_per_s=51.2)
_DDR5_DESKTOP = Host(name="desktop, 2 channels DDR5-5600", memory_gib=192, dram_gb_per_s=89.6)

_V100 = Peaks(fp32=15.7, tf32=15.7, fp16=125.0, bf16=15.7)
_A100 = Peaks(fp32=19.5, tf32=156.0, fp16=312.0, bf16=312.0)
_H100 = Peaks(fp32=66.9, tf32=494.7, fp16=989.4, bf16=989.4)

DEVICES: tuple[DeviceSpec, ...] = (
    DeviceSpec(
        name="v100-16g",
        title="Tesla V100 SXM2 16GB",
        memory_gib=16,
        memory_gb_per_s=900,
        peaks=_V100,
        matmul_share=0.8,
        link=_PCIE_3,
        host=_SKYLAKE,
        net=_NVLINK_2,
        source="NVIDIA V100 data sheet: 125 TFLOPS tensor, 15.7 single, 900 GB/s, PCIe 32 GB/s both ways",
    ),
    DeviceSpec(
        name="v100-32g",
        aliases=("v100",),
        title="Tesla V100 SXM2 32GB",
        memory_gib=32,
        memory_gb_per_s=900,
        peaks=_V100,
        matmul_share=0.8,
        link=_PCIE_3,
        host=_SKYLAKE,
        net=_NVLINK_2,
        source="NVIDIA V100 data sheet: 125 TFLOPS tensor, 15.7 single, 900 GB/s, PCIe 32 GB/s both ways",
    ),
    DeviceSpec(
        name="a100-40g",
        title="A100 SXM4 40GB",
        memory_gib=40,
        memory_gb_per_s=1555,
        peaks=_A100,
        matmul_share=0.78,
        link=_PCIE_4,
        host=_MILAN,
        net=_NVLINK_3,
        source="NVIDIA A100 data sheet: 312 TFLOPS bf16, 156 TF32, 19.5 fp32, 1555 GB/s, PCIe Gen4 64 GB/s both ways",
    ),
    DeviceSpec(
        name="a100-80g",
        aliases=("a100",),
        title="A100 SXM4 80GB",
        memory_gib=80,
        memory_gb_per_s=2039,
        peaks=_A100,
        matmul_share=0.78,
        link=_PCIE_4,
        host=_MILAN,
        net=_NVLINK_3,
        source="NVIDIA A100 data sheet: 312 TFLOPS bf16, 156 TF32, 19.5 fp32, 2039 GB/s, PCIe Gen4 64 GB/s both ways",
    ),
    DeviceSpec(
        name="h100-80g",
        aliases=("h100", "h100-sxm"),
        title="H100 SXM5 80GB",
        memory_gib=80,
        memory_gb_per_s=3350,
        peaks=_H100,
        matmul_share=0.72,
        link=_PCIE_5,
        host=_SAPPHIRE,
        net=_NVLINK_4,
        source="NVIDIA H100 data sheet: 989.4 TFLOPS bf16 dense, 494.7 TF32, 67 fp32, 3.35 TB/s, PCIe Gen5 128 GB/s both ways",
    ),
    DeviceSpec(
        name="h100-pcie",
        title="H100 PCIe 80GB",
        memory_gib=80,
        memory_gb_per_s=2000,
        peaks=Peaks(fp32=51.2, tf32=378.0, fp16=756.0, bf16=756.0),
        matmul_share=0.6,
        link=_PCIE_5,
        host=_SAPPHIRE,
        source="NVIDIA H100 data sheet: 756 TFLOPS bf16 dense, 378 TF32, 51 fp32, 2 TB/s, PCIe Gen5 128 GB/s both ways",
    ),
    DeviceSpec(
        name="h200-141g",
        aliases=("h200",),
        title="H200 SXM5 141GB",
        memory_gib=140.4,
        memory_gb_per_s=4800,
        peaks=_H100,
        matmul_share=0.72,
        link=_PCIE_5,
        host=_SAPPHIRE,
        net=_NVLINK_4,
        source="NVIDIA H200 data sheet: 141 GB, 4.8 TB/s, products as H100 SXM, PCIe Gen5 128 GB/s both ways",
    ),
    DeviceSpec(
        name="gh200-96g",
        aliases=("gh200",),
        title="GH200 Grace Hopper 96GB",
        memory_gib=95.6,
        memory_gb_per_s=4000,
        peaks=_H100,
        matmul_share=0.75,
        link=_C2C,
        host=_GRACE,
        net=_NVLINK_4,
        source="NVIDIA GH200 data sheet: 96 GB HBM3, 4 TB/s, 480 GB LPDDR5X at 500 GB/s, NVLink-C2C 900 GB/s both ways",
    ),
    DeviceSpec(
        name="l40s-48g",
        aliases=("l40s",),
        title="L40S 48GB",
        memory_gib=45,
        memory_gb_per_s=864,
        peaks=Peaks(fp32=91.6, tf32=183.0, fp16=362.05, bf16=362.05),
        matmul_share=0.6,
        link=_PCIE_4,
        host=_SAPPHIRE,
        source="NVIDIA L40S data sheet: 362.05 TFLOPS bf16 dense, 183 TF32, 91.6 fp32, 864 GB/s, PCIe Gen4 64 GB/s both ways",
    ),
    DeviceSpec(
        name="rtx-3090-24g",
        aliases=("rtx-3090", "3090"),
        title="GeForce RTX 3090 24GB",
        memory_gib=24,
        memory_gb_per_s=936,
        peaks=Peaks(fp32=35.6, tf32=35.6, fp16=71.0, bf16=71.0),
        matmul_share=0.85,
        link=_PCIE_4,
        host=_DDR4_DESKTOP,
        source="NVIDIA GA102 white paper: 71 TFLOPS bf16 dense with fp32 accumulate, 35.6 TF32 and fp32, 936 GB/s",
    ),
    DeviceSpec(
        name="rtx-4090-24g",
        aliases=("rtx-4090", "4090"),
        title="GeForce RTX 4090 24GB",
        memory_gib=24,
        memory_gb_per_s=1008,
        peaks=Peaks(fp32=82.6, tf32=82.6, fp16=165.2, bf16=165.2),
        matmul_share=0.85,
        link=_PCIE_4,
        host=_DDR5_DESKTOP,
        source="NVIDIA Ada white paper: 165.2 TFLOPS bf16 dense with fp32 accumulate, 82.6 TF32 and fp32, 1008 GB/s",
    ),
    DeviceSpec(
        name="rtx-5090-32g",
        aliases=("rtx-5090", "5090"),
        title="GeForce RTX 5090 32GB",
        memory_gib=32,
        memory_gb_per_s=1792,
        peaks=Peaks(fp32=104.8, tf32=104.8, fp16=209.5, bf16=209.5),
        matmul_share=0.85,
        link=_PCIE_5,
        host=_DDR5_DESKTOP,
        source="NVIDIA RTX Blackwell white paper: 209.5 TFLOPS bf16 dense with fp32 accumulate, 104.8 TF32 and fp32, 1792 GB/s",
    ),
    DeviceSpec(
        name="mi300x-192g",
        aliases=("mi300x",),
        title="Instinct MI300X 192GB",
        memory_gib=192,
        memory_gb_per_s=5300,
        peaks=Peaks(fp32=163.4, tf32=653.7, fp16=1307.4, bf16=1307.4),
        matmul_share=0.46,
        link=_PCIE_5,
        host=_GENOA,
        net=_INFINITY,
        source="AMD MI300X data sheet: 1307.4 TFLOPS bf16 dense, 653.7 TF32, 163.4 fp32, 5.3 TB/s, PCIe Gen5 128 GB/s both ways",
    ),
)


def find_device(name: str) -> DeviceSpec:
    """The device of that name or alias, in any case. Raises OptionError with the nearest name."""
    wanted = name.strip().lower().replace("_", "-")
    for spec in DEVICES:
        if wanted in (spec.name, *spec.aliases):
            return spec
    raise OptionError(
        f"{unknown_word('device', name, [spec.name for spec in DEVICES])}; or give a machine file that"
        " `autohete doctor --save` wrote"
    )


def machine_of_spec(spec: DeviceSpec, *, tf32: bool = False) -> Machine:
    """The machine that the planner assumes for a device. ``tf32``: fp32 products run on tensor cores in TF32."""
    return Machine(
        device_name=spec.title,
        device_type="cuda",  # ROCm's PyTorch calls its devices so too
        device_bytes=int(spec.memory_gib * 2**30),
        host_bytes=spec.host.memory_gib * 2**30,
        disk_bytes=_DISK_BYTES,
        device_flops_per_s=tuple(
            (dtype, spec.matmul_share * spec.peak_flops_per_s(dtype, tf32=tf32))
            for dtype in ("float32", "bfloat16", "float16")
        ),
        device_bytes_per_s=MEMORY_SHARE * spec.memory_gb_per_s * 1e9,
        h2d_bytes_per_s=spec.link.h2d_gb_per_s * 1e9,
        d2h_bytes_per_s=spec.link.d2h_gb_per_s * 1e9,
        disk_bytes_per_s=DISK_SHARE * spec.host.disk_gb_per_s * 1e9,
        device_update_params_per_s=MEMORY_SHARE * spec.memory_gb_per_s * 1e9 / UPDATE_BYTES,
        host_update_params_per_s=HOST_SHARE * spec.host.dram_gb_per_s * 1e9 / UPDATE_BYTES,
        latency_s=LATENCY_S,
    )


def net_of_spec(spec: DeviceSpec) -> Net:
    """How a device reaches the others of its node."""
    link = spec.link
    return spec.net or Net(
        name=link.name, gb_per_s=link.gb_per_s, reached_gb_per_s=min(link.h2d_gb_per_s, link.d2h_gb_per_s)
    )


def machine_of_rank(machine: Machine, *, ranks_of_node: int, net_bytes_per_s: float, net_latency_s: float) -> Machine:
    """One rank's part of a machine: its own device and link, an even part of the host, and a link to the others."""
    return replace(
        machine,
        host_bytes=machine.host_bytes // ranks_of_node,
        disk_bytes=machine.disk_bytes // ranks_of_node,
        disk_bytes_per_s=machine.disk_bytes_per_s / ranks_of_node,
        host_update_params_per_s=machine.host_update_params_per_s / ranks_of_node,
        net_bytes_per_s=net_bytes_per_s,
        net_latency_s=net_latency_s,
    )
