"""Devices that ship: found by name, complete, and ordered as the data sheets order them."""

from dataclasses import asdict
from pathlib import Path

import pytest

from autohete_fx.errors import OptionError
from autohete_fx.ir import Machine
from autohete_fx.machine.devices import (
    DEVICES,
    UPDATE_BYTES,
    DeviceSpec,
    device_of_driver,
    find_device,
    machine_of_rank,
    machine_of_spec,
    net_of_spec,
)


def machine(name: str) -> Machine:
    return machine_of_spec(find_device(name))


def test_the_devices_that_users_ask_for_are_there():
    asked = "v100 v100-16g v100-32g a100-40g a100-80g h100 h100-80g h200 l40s rtx-3090 rtx-4090-24g 5090 gh200 mi300x"
    asked += " h800 h20 a10g l4 t4 rtx-a6000 2080-ti titan-rtx mi250"
    assert {find_device(name).name for name in asked.split()} <= {spec.name for spec in DEVICES}
    assert find_device(" RTX_4090 ") is find_device("rtx4090") is find_device("4090")
    with pytest.raises(OptionError, match=r"unknown device 'h10'; did you mean 'h100-80g'.*doctor --save"):
        find_device("h10")


@pytest.mark.parametrize(
    ("name", "found"),
    [
        ("NVIDIA A100-SXM4-40GB", "a100-40g"),
        ("NVIDIA A100-PCIE-40GB", "a100-40g"),
        ("NVIDIA A100 80GB PCIe", "a100-80g"),
        ("NVIDIA A100-SXM4-40GB MIG 3g.20gb", None),
        ("NVIDIA H100 80GB HBM3", "h100-80g"),
        ("NVIDIA H100 PCIe", "h100-pcie"),
        ("NVIDIA H100 NVL", None),
        ("NVIDIA H200", "h200-141g"),
        ("NVIDIA GH200 480GB", "gh200-96g"),
        ("NVIDIA H20", "h20-96g"),
        ("Tesla V100-SXM2-16GB", "v100-16g"),
        ("Tesla V100-SXM2-32GB", "v100-32g"),
        ("Tesla T4", "t4-16g"),
        ("NVIDIA L4", "l4-24g"),
        ("NVIDIA L40S", "l40s-48g"),
        ("NVIDIA A10G", "a10g-24g"),
        ("NVIDIA A10", None),
        ("NVIDIA RTX A6000", "rtx-a6000-48g"),
        ("NVIDIA GeForce RTX 3090", "rtx-3090-24g"),
        ("NVIDIA GeForce RTX 3090 Ti", None),
        ("NVIDIA GeForce RTX 4090 Laptop GPU", None),
        ("NVIDIA GeForce RTX 2080 Ti", "rtx-2080-ti-11g"),
        ("NVIDIA TITAN RTX", "titan-rtx-24g"),
        ("AMD Instinct MI300X", "mi300x-192g"),
        ("cpu", None),
    ],
)
def test_what_drivers_call_them(name: str, found: str | None):
    """By the names that CUDA gives; of two with as much memory none is taken for the other."""
    spec = device_of_driver(name)
    assert (spec and spec.name) == found
    if found is not None:
        assert find_device(name).name == found


def test_no_name_means_two_devices():
    names = [name for spec in DEVICES for name in (spec.name, *spec.aliases)]
    assert len(names) == len(set(names))


@pytest.mark.parametrize("spec", DEVICES, ids=lambda spec: spec.name)
def test_a_machine_stays_below_its_data_sheet(spec: DeviceSpec):
    found = machine_of_spec(spec)
    assert found.device_bytes <= spec.memory_gib * 2**30 < found.host_bytes
    for dtype, rate in found.device_flops_per_s:
        assert 0.4 * spec.peak_flops_per_s(dtype) < rate <= spec.peak_flops_per_s(dtype)
        assert 0 < found.flops_per_s(dtype, backward=True) <= rate
    assert 0 < found.launch_s < 1e-4
    assert found.device_bytes_per_s < spec.memory_gb_per_s * 1e9
    assert max(found.h2d_bytes_per_s, found.d2h_bytes_per_s) < spec.link.gb_per_s * 1e9
    assert found.host_update_params_per_s * UPDATE_BYTES < 0.8 * spec.host.dram_gb_per_s * 1e9
    assert found.host_update_params_per_s < found.device_update_params_per_s
    assert spec.source.startswith(("NVIDIA", "AMD"))
    assert Machine.from_json(found.to_json()) == found


@pytest.mark.parametrize("spec", DEVICES, ids=lambda spec: spec.name)
def test_every_figure_of_a_device_is_positive(spec: DeviceSpec):
    found = machine_of_spec(spec, tf32=True)
    rates = {
        name: value
        for name, value in asdict(found).items()
        if name.endswith("_per_s") and not name.endswith("net_bytes_per_s")
    }
    for name in ("device_flops_per_s", "backward_flops_per_s"):
        rates |= dict(rates.pop(name))
    assert min(rates.values()) > 0, rates
    shares = [spec.matmul_share, spec.memory_share, spec.update_share]
    shares += [share for kind in spec.sustained for share in (kind.forward, kind.backward)]
    assert all(0 < share <= 1 for share in shares)
    assert {kind.peak for kind in spec.sustained} <= {"fp32", "tf32", "fp16", "bf16"}
    prices = [price for price in (spec.spot_usd_per_hour, spec.usd_per_hour) if price is not None]
    assert all(price > 0 for price in prices) and prices == sorted(prices)
    assert spec.usd_per_hour is not None or spec.spot_usd_per_hour is None


def test_measured_shares_say_nothing_of_bf16():
    for spec in DEVICES:
        if spec.peaks.bf16 != spec.peaks.fp32:
            assert spec.share("bfloat16") == spec.share("bfloat16", backward=True) == spec.matmul_share


def test_a_measured_card_is_as_fast_as_its_data_sheet_says():
    measured = Machine.load(Path(__file__).parents[2] / "examples" / "benchmarks" / "machines" / "h200.json")
    told = machine("h200")
    assert measured.device_bytes == pytest.approx(told.device_bytes, rel=0.01)
    for rate in ("device_bytes_per_s", "device_update_params_per_s", "h2d_bytes_per_s", "d2h_bytes_per_s"):
        assert getattr(told, rate) == pytest.approx(getattr(measured, rate), rel=0.02), rate
    for dtype in ("bfloat16", "float16"):  # nine tenths of what large square matrices reach
        assert told.flops_per_s(dtype) == pytest.approx(0.9 * measured.flops_per_s(dtype), rel=0.05), dtype


def test_faster_devices_are_faster():
    for slower, faster in (
        ("v100", "a100"),
        ("a100", "h100"),
        ("h100-pcie", "h100"),
        ("3090", "4090"),
        ("4090", "5090"),
    ):
        for rates in ("bfloat16", "float16", "float32") if slower != "3090" else ("bfloat16",):
            assert machine(slower).flops_per_s(rates) < machine(faster).flops_per_s(rates)
    for slower, faster in (("v100", "a100"), ("a100", "h100"), ("h100", "gh200")):
        assert machine(slower).h2d_bytes_per_s < machine(faster).h2d_bytes_per_s


def test_fp32_is_without_tensor_cores_unless_tf32_is_asked_for():
    plain, tf32 = machine("a100-40g"), machine_of_spec(find_device("a100-40g"), tf32=True)
    assert tf32.flops_per_s("float32") == pytest.approx(8 * plain.flops_per_s("float32"), rel=0.02)
    assert tf32.flops_per_s("float32", backward=True) < tf32.flops_per_s("float32")
    assert tf32.flops_per_s("bfloat16") == plain.flops_per_s("bfloat16")


def test_a_v100_has_no_tensor_cores_for_bf16():
    assert machine("v100").flops_per_s("bfloat16") == machine("v100").flops_per_s("float32")


@pytest.mark.parametrize("spec", DEVICES, ids=lambda spec: spec.name)
def test_a_net_stays_below_its_data_sheet(spec: DeviceSpec):
    net = net_of_spec(spec)
    assert 0.7 * net.gb_per_s < net.reached_gb_per_s < 0.9 * net.gb_per_s


def test_ranks_share_a_host_and_keep_their_devices_and_links():
    alone = machine("a100-40g")
    rank = machine_of_rank(alone, ranks_of_node=4, net_bytes_per_s=240e9, net_latency_s=1e-5)
    assert (alone.net_bytes_per_s, rank.net_bytes_per_s, rank.net_latency_s) == (0.0, 240e9, 1e-5)
    assert (4 * rank.host_bytes, 4 * rank.host_update_params_per_s) == (
        alone.host_bytes,
        alone.host_update_params_per_s,
    )
    assert (rank.device_bytes, rank.h2d_bytes_per_s) == (alone.device_bytes, alone.h2d_bytes_per_s)
    assert Machine.from_json(rank.to_json()) == rank
