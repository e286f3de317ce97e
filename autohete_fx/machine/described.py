"""A machine's figures as text: capacities and rates, one a line."""

from autohete_fx.ir import Machine
from autohete_fx.ir.machine import BANDWIDTHS
from autohete_fx.ir.sizes import format_bytes, format_count, format_flops, format_seconds
from autohete_fx.machine.link import Link


def machine_text(machine: Machine) -> str:
    """Capacities and rates of a machine, one a line."""
    tiers = (("device memory", machine.device_bytes), ("host memory", machine.host_bytes), ("disk", machine.disk_bytes))
    rates = tuple((name, getattr(machine, figure)) for figure, name in BANDWIDTHS.items())
    mixed = machine.updates_per_s(on_host=True, mixed_share=1.0) if machine.mixed_update_speed else 0.0
    updates = (
        ("on the device", machine.device_update_params_per_s),
        ("on the host", machine.host_update_params_per_s),
        ("on the host, 16 bits", mixed),
    )
    return "\n".join(
        [
            f"{machine.device_name} ({machine.device_type})",
            *(f"  {name:<28}{format_bytes(num_bytes)}" for name, num_bytes in tiers if num_bytes),
            *(f"  {f'matmul, {dtype}':<28}{format_flops(rate)}" for dtype, rate in machine.device_flops_per_s),
            *(
                f"  {f'matmul, {dtype}, backward':<28}{format_flops(rate)}"
                for dtype, rate in machine.backward_flops_per_s
                if rate != machine.flops_per_s(dtype)
            ),
            *([f"  {'matmul, bfloat16, host':<28}{format_flops(host)}"] if (host := machine.host_flops_per_s) else []),
            *(f"  {f'{name}, bandwidth':<28}{format_bytes(rate)}/s" for name, rate in rates if rate),
            *(f"  {f'AdamW {where}':<28}{format_count(rate)} parameters/s" for where, rate in updates if rate),
            f"  {'latency of a transfer':<28}{format_seconds(machine.latency_s)}",
            *(
                [f"  {'latency between ranks':<28}{format_seconds(machine.net_latency_s)}"]
                if machine.net_bytes_per_s
                else []
            ),
            *(f"  {f'{lane} beside {beside}':<28}{kept:.0%} of its rate" for lane, beside, kept in machine.contention),
        ]
    )


def link_text(link: Link | None) -> str:
    """The figures of a link beside single copies, one a line."""
    names = ("both ways at once", "kernel reads host memory", "kernel writes host memory")
    if link is None:
        return "\n".join(f"  {name:<28}not applicable: a CPU device has one memory with its host" for name in names)
    rates = (link.both_ways_bytes_per_s, link.kernel_reads_bytes_per_s, link.kernel_writes_bytes_per_s)
    return "\n".join(f"  {name:<28}{format_bytes(rate)}/s" for name, rate in zip(names, rates, strict=True))
