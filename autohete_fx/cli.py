"""The ``autohete`` command: what a plan decides, and what this machine can do. Thin: it parses, calls and prints."""

import argparse
import sys
from collections.abc import Sequence

import torch

from autohete_fx.errors import AutoHeteError, OptionError
from autohete_fx.ir import Machine, Plan
from autohete_fx.profiler.machine import measure_machine
from autohete_fx.report import format_bytes, format_count, format_seconds, plan_table

__all__ = ["main"]


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one subcommand; returns the exit status. Errors that the user can mend go to standard error, status 2."""
    parser = argparse.ArgumentParser(prog="autohete", description="Train within a device-memory budget.")
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    show = commands.add_parser("show", help="print a saved plan as a table")
    show.add_argument("plan", metavar="PLAN.json", help="a file that Plan.save wrote")
    show.set_defaults(run=_show)
    doctor = commands.add_parser("doctor", help="measure this machine and print what the planner will assume of it")
    doctor.add_argument("--device", choices=("cpu", "cuda"), default=None, help="default: cuda where there is one")
    doctor.add_argument(
        "--save", metavar="FILE", help="also write a machine file, which `autohete plan --machine` reads"
    )
    doctor.set_defaults(run=_doctor)
    parsed = parser.parse_args(arguments)
    try:
        print(parsed.run(parsed))
    except AutoHeteError as error:
        print(f"autohete: {error}", file=sys.stderr)
        return 2
    return 0


def machine_text(machine: Machine) -> str:
    """Capacities and rates of a machine, one a line."""
    tiers = (("device memory", machine.device_bytes), ("host memory", machine.host_bytes), ("disk", machine.disk_bytes))
    rates = (
        ("copy to device", machine.h2d_bytes_per_s),
        ("copy to host", machine.d2h_bytes_per_s),
        ("device memory", machine.device_bytes_per_s),
        ("disk", machine.disk_bytes_per_s),
    )
    updates = (("on the device", machine.device_update_params_per_s), ("on the host", machine.host_update_params_per_s))
    return "\n".join(
        [
            f"{machine.device_name} ({machine.device_type})",
            *(f"  {name:<28}{format_bytes(num_bytes)}" for name, num_bytes in tiers if num_bytes),
            *(f"  {f'matmul, {dtype}':<28}{rate / 1e12:.3g} TFLOP/s" for dtype, rate in machine.device_flops_per_s),
            *(f"  {f'{name}, bandwidth':<28}{format_bytes(rate)}/s" for name, rate in rates if rate),
            *(f"  {f'AdamW {where}':<28}{format_count(rate)} parameters/s" for where, rate in updates if rate),
            f"  {'latency of a transfer':<28}{format_seconds(machine.latency_s)}",
        ]
    )


def _show(parsed: argparse.Namespace) -> str:
    return plan_table(Plan.load(parsed.plan))


def _doctor(parsed: argparse.Namespace) -> str:
    has_cuda = torch.cuda.is_available()
    if parsed.device == "cuda" and not has_cuda:
        raise OptionError("--device cuda was given, but PyTorch finds no CUDA device; leave it out to measure the CPU")
    device = parsed.device or ("cuda" if has_cuda else "cpu")
    machine = measure_machine(torch.device(device))
    if parsed.save:
        _save(machine, parsed.save)
    return f"torch {torch.__version__}\n{machine_text(machine)}"


def _save(value: Machine | Plan, path: str) -> None:
    try:
        value.save(path)
    except OSError as error:
        raise OptionError(f"cannot write {path!r}: {error.strerror}; give --save a file that can be written") from error


if __name__ == "__main__":
    sys.exit(main())
