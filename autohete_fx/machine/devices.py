"""Machines that one does not have: accelerators by name, from their data sheets, as `Machine` values.

Enter a name such as ``a100-40g`` or ``4090``; leaves a `Machine` with sustained rates. A data sheet states peaks, and a
training step sustains a stated share of them. Every figure here is therefore a data sheet's times a share, and both are given.
A machine that can be measured should be: `autohete doctor --save`.

Matrix products
    ``matmul_share`` of the *dense* peak. Where a best rate is published, nine tenths of it, because a model's shapes are not the
    best ones. It is the most that torch.matmul reached in bf16 over many shapes (S. Bekman, "Machine Learning Engineering", table
    of maximum achievable matmul FLOPS): A100 SXM 87%, H100 SXM 80%, GH200 84%, MI300X 51%. H200 is taken as H100;
    one was measured at 80%, too.
    Where nothing is published: 0.8 for V100, and 0.6 for the cards whose power limit is far below what their peak takes (L40S,
    H100 PCIe). GeForce cards have 0.85, for their stated peak is that of a clock which they exceed.
    Where a device's layers have been measured, ``sustained`` has the shares of that kind of products in forward and in backward.
    ``examples/benchmarks/cluster_pricing.py`` fits them: TF32 of A100-40 and GH200, fp32 of V100, Titan RTX and 2080 Ti. A100-80 is
    taken as A100-40; TF32 of H100, H200 and H800 as that of GH200, which has the same chip. A type without tensor cores has the
    share of fp32, such as bf16 on V100. No bf16 products on tensor cores have been measured so. The shares of H20,
    A10G, L4, T4, RTX A6000 and MI250 are assumptions, lower the less power a card has for its peak.
    ``float32`` is the rate without tensor cores, because PyTorch multiplies fp32 without TF32 unless told to
    (``torch.set_float32_matmul_precision("high")``); `machine_of_spec` takes ``tf32=True`` for that. ``float16`` and
    ``bfloat16`` are with fp32 accumulation, which is what PyTorch asks for, half of the headline figure of GeForce cards.
Device memory
    MEMORY_SHARE of the stated bandwidth, as STREAM reached on a GH200 (3.4 of 4 TB/s, arXiv 2407.07850). Where layers have been
    measured, ``memory_share`` is what PyTorch's own kernels reached there: 0.80 on A100, 0.83 on V100, 0.72 on GH200. An
    H200 copied at 0.74 and 0.75.
    Capacity is what the driver leaves where error correction or spare rows take a part of the stated one (L40S, H200, GH200,
    A10G, L4, T4).
Update
    An AdamW update moves UPDATE_BYTES a parameter at ``update_share`` of the stated bandwidth, measured for fused AdamW on the same
    GPUs. A step takes UPDATE_FIXED_S besides, whatever its size: one figure for a step, which no plan changes and no plan counts.
Launch
    No kernel takes less than LAUNCH_S, about the time in which PyTorch's CPU side issues the next one. Layers so small that the CPU
    is slower than the GPU take longer than this says, by the CPU, which no data sheet knows.
Host link
    LINK_SHARE of the link's bandwidth in one direction (PCIe 3.0, 4.0, 5.0 x16: 15.75, 31.5, 63.0 GB/s), which is what
    pinned copies reach. An H200's reached 54 GB/s up and 55 down. NVLink-C2C has 450 GB/s a direction, of which 375 up and 297
    down were measured (same paper).
Host
    Assumed: for data-centre cards one socket of a usual server of their time and its memory. A GeForce card has a desktop with
    as much memory as its platform takes. An update on the host moves UPDATE_BYTES a parameter at HOST_SHARE of the stated DRAM
    bandwidth. The bytes are the fp32 master and moments, read and written, the gradient read and a 16-bit weight written; pure
    fp32 has as many. Both are taken to be as fast. STREAM reaches about 0.8 of the bandwidth, our AdamW about 0.9 of STREAM. Matrix
    products there, which Muon's updates take, are assumed to do `ASSUMED_HOST_FLOPS_PER_S`.
Net
    Between GPUs of a node, bytes a second that one sends in a ring. NVLink of A100 has 240 of 300 GB/s a direction, of H100 370 of
    450 (``torch/_inductor/comm_analysis.py``). Other NVLinks and Infinity Fabric have NET_SHARE of what they state, an assumption.
    Cards without either send through their host link, two hops of one PCIe tree. Where peers cannot copy to each other, as with
    GeForce cards, that is more than is reached. A hop takes NET_LATENCY_S. Between nodes each GPU has an adapter of its own,
    NODE_GB_PER_S unless told otherwise (InfiniBand HDR, 200 Gb/s). NCCL's rings cross by all of a node's adapters at once.
Host of several GPUs
    The ranks of a node share its memory, its disk and the rate of its updates evenly. The work of all ranks' updates does not
    shrink with their number. It is the same host as for one GPU. Each keeps a host link of its own.
Disk
    One NVMe drive of 2 TB; DISK_SHARE of 3.5 GB/s on PCIe 3.0, of 7 GB/s on later ones.
"""

import re
from dataclasses import replace

from autohete_fx.errors import OptionError, unknown_word
from autohete_fx.ir import Machine
from autohete_fx.ir.machine import ASSUMED_HOST_FLOPS_PER_S
from autohete_fx.machine.data_sheets import DEVICES
from autohete_fx.machine.device_spec import DeviceSpec, Host, Net, Peaks
from autohete_fx.machine.device_spec import Link as HostLink

HOST_SHARE = 0.72
DISK_SHARE = 0.8
UPDATE_BYTES = 28
UPDATE_FIXED_S = 1.5e-4
"""Seconds of one step of the optimizer on a GPU, beside those of its parameters."""
LAUNCH_S = 5e-6
"""The least that a kernel takes."""
NET_LATENCY_S = 1e-5
"""Seconds of one message from a GPU to the next."""
_OTHERS = frozenset({"ti", "super", "laptop", "d", "nvl", "max", "mig"})
"""Words by which drivers tell another device from the one whose name they are added to."""
NODE_GB_PER_S = 25.0
"""The rate of one GPU's adapter to other nodes in one direction."""
LATENCY_S = 1e-5
"""Seconds of a copy, from its issue on a stream to its first byte."""
RESERVE_SHARE = 0.05
"""The part of a card's capacity that a plan leaves alone unless told otherwise.

The CUDA context and libraries take about 0.5 GiB, and some of the stated capacity is never available. The caching allocator's
blocks do not fit without gaps.
"""
_DISK_BYTES = 2 * 10**12


def _plain(name: str) -> str:
    return "".join(filter(str.isalnum, name.lower()))


def find_device(name: str) -> DeviceSpec:
    """The device of that name or alias, in any case, with or without hyphens, or as its driver calls it. Raises OptionError with
    the nearest name."""
    for spec in DEVICES:
        if _plain(name) in map(_plain, (spec.name, *spec.aliases)):
            return spec
    if (found := device_of_driver(name)) is not None:
        return found
    raise OptionError(
        f"{unknown_word('device', name, [spec.name for spec in DEVICES])}; or give a machine file that"
        " `autohete doctor --save` wrote"
    )


def device_of_driver(name: str) -> DeviceSpec | None:
    """The device that a driver calls so, such as ``NVIDIA A100-SXM4-40GB``; None where it is none of the table for sure."""
    words = set(re.findall("[a-z0-9]+", name.lower()))
    found: dict[int, list[tuple[DeviceSpec, str]]] = {}
    for spec in DEVICES:
        *model, last = spec.name.split("-")
        model, memory = (model, last) if re.fullmatch(r"\d+g", last) else ([*model, last], "")
        if words.issuperset(model) and not (words & _OTHERS) - set(model):
            found.setdefault(len(model), []).append((spec, memory))
    alike = found[max(found)] if found else []
    if len(alike) > 1:
        alike = [(spec, memory) for spec, memory in alike if f"{memory}b" in words]
    return alike[0][0] if len(alike) == 1 else None


def machine_of_spec(spec: DeviceSpec, *, tf32: bool = False) -> Machine:
    """The machine that the planner assumes for a device. ``tf32``: fp32 products run on tensor cores in TF32."""
    return Machine(
        device_name=spec.title,
        device_type="cuda",  # ROCm's PyTorch calls its devices so too
        device_bytes=int(spec.memory_gib * 2**30),
        host_bytes=spec.host.memory_gib * 2**30,
        disk_bytes=_DISK_BYTES,
        device_flops_per_s=_flops_per_s(spec, tf32=tf32, backward=False),
        backward_flops_per_s=_flops_per_s(spec, tf32=tf32, backward=True),
        device_bytes_per_s=spec.memory_share * spec.memory_gb_per_s * 1e9,
        h2d_bytes_per_s=spec.link.h2d_gb_per_s * 1e9,
        d2h_bytes_per_s=spec.link.d2h_gb_per_s * 1e9,
        disk_bytes_per_s=DISK_SHARE * spec.host.disk_gb_per_s * 1e9,
        device_update_params_per_s=spec.update_share * spec.memory_gb_per_s * 1e9 / UPDATE_BYTES,
        host_update_params_per_s=HOST_SHARE * spec.host.dram_gb_per_s * 1e9 / UPDATE_BYTES,
        host_flops_per_s=ASSUMED_HOST_FLOPS_PER_S,
        latency_s=LATENCY_S,
        launch_s=LAUNCH_S,
    )


def spec_of_machine(name: str, machine: Machine) -> DeviceSpec:
    """A device that is in no table, told as one of the table: `machine_of_spec` gives the measured rates back.

    ``name``: what files and plans call it. Products in TF32 are taken to be as fast as those in fp32, which alone were measured.
    """
    fp32, fp16, bf16 = (machine.flops_per_s(dtype) / 1e12 for dtype in ("float32", "float16", "bfloat16"))
    h2d, d2h = machine.h2d_bytes_per_s / 1e9, machine.d2h_bytes_per_s / 1e9
    return DeviceSpec(
        name=name,
        title=machine.device_name,
        memory_gib=machine.device_bytes / 2**30,
        memory_gb_per_s=machine.device_bytes_per_s / 1e9,
        peaks=Peaks(fp32=fp32, tf32=fp32, fp16=fp16, bf16=bf16),
        matmul_share=1.0,
        memory_share=1.0,
        update_share=machine.device_update_params_per_s * UPDATE_BYTES / machine.device_bytes_per_s,
        link=HostLink(name="link to the host", gb_per_s=max(h2d, d2h), h2d_gb_per_s=h2d, d2h_gb_per_s=d2h),
        host=Host(
            name="measured host",
            memory_gib=machine.host_bytes // 2**30,
            dram_gb_per_s=machine.host_update_params_per_s * UPDATE_BYTES / HOST_SHARE / 1e9,
            disk_gb_per_s=machine.disk_bytes_per_s / DISK_SHARE / 1e9,
        ),
        source="measured",
        usd_per_hour=None,
        spot_usd_per_hour=None,
    )


def _flops_per_s(spec: DeviceSpec, *, tf32: bool, backward: bool) -> tuple[tuple[str, float], ...]:
    return tuple(
        (dtype, spec.share(dtype, tf32=tf32, backward=backward) * spec.peak_flops_per_s(dtype, tf32=tf32))
        for dtype in ("float32", "bfloat16", "float16")
    )


def net_of_spec(spec: DeviceSpec) -> Net:
    """How a device reaches the others of its node."""
    link = spec.link
    return spec.net or Net(
        name=link.name, gb_per_s=link.gb_per_s, reached_gb_per_s=min(link.h2d_gb_per_s, link.d2h_gb_per_s)
    )


def machine_of_rank(
    machine: Machine,
    *,
    ranks_of_node: int,
    ranks_of_cores: int | None = None,
    net_bytes_per_s: float = 0.0,
    net_latency_s: float = 0.0,
) -> Machine:
    """One rank's part of a machine: its own device and link, an even part of the host, and a link to the others.

    Args:
        machine: as one rank has it to itself.
        ranks_of_node: how many share the host.
        ranks_of_cores: how many share the cores that the machine was measured with; without it, as many.
        net_bytes_per_s, net_latency_s: of the link; 0 where it is not known yet.
    """
    ranks_of_cores = ranks_of_cores or ranks_of_node
    return replace(
        machine,
        host_bytes=machine.host_bytes // ranks_of_node,
        disk_bytes=machine.disk_bytes // ranks_of_node,
        disk_bytes_per_s=machine.disk_bytes_per_s / ranks_of_node,
        host_update_params_per_s=machine.host_update_params_per_s / ranks_of_cores,
        host_flops_per_s=machine.host_products_per_s / ranks_of_cores,
        net_bytes_per_s=net_bytes_per_s,
        net_latency_s=net_latency_s,
    )
