"""What the pages quote of runs on a GPU; see `quotations`."""

import json
from collections.abc import Callable
from typing import Any

from quoting import RESULTS, percent, read, table

Row = dict[str, Any]
_RUN, _STEP = "gpu_first_h200", "a step of 69699df without 5b7efed"
_MACHINE = RESULTS.parent / "machines" / "h200.json"


def steps() -> str:
    """Every row: the system, its step and its peak."""
    rows = read(_RUN).rows
    slowest = max(row["step s"] for row in rows)
    return table(
        ("system", "code", "schedule or recomputation", "step", "of the slowest", "peak"),
        [
            (
                row["system"],
                row["code"] or "-",
                row["schedule or recomputation"],
                f"{1e3 * row['step s']:.0f} ms",
                percent(row["step s"] / slowest),
                f"{row['peak bytes'] / 1e9:.2f} GB",
            )
            for row in rows
        ],
    )


def in_short() -> str:
    """Ours against the others, each by its fastest row."""
    rows = read(_RUN).rows
    ours, fsdp, torchao = (_fastest(rows, system) for system in ("ours", "FSDP2", "torchao"))
    return f"{fsdp / ours:.1f} times as fast as FSDP2 and {torchao / ours:.1f} times as fast as torchao"


def predicted() -> str:
    """The first step as planned and as it was."""
    (row,) = (row for row in read(_RUN).rows if row.get("predicted step s"))
    step, peak = row["step s"] / row["predicted step s"], row["peak bytes"] / row["predicted peak bytes"] - 1
    return f"{step:.1f} times as long as planned, with a peak {percent(peak)} above the plan's"


def parts() -> str:
    """Where the time of a later step went."""
    step = _content()[_STEP]
    kernels, updates, up, down = (
        f"{1e3 * step[f'{name} s']:.0f} ms"
        for name in ("kernels on the computing stream", "host updates", "copies to the device", "copies to the host")
    )
    return (
        f"kernels take {kernels} of it, updates on the host {updates}, copies to the device {up} and to the host {down}"
    )


def machine() -> str:
    """What `autohete doctor` found."""
    found = json.loads(_MACHINE.read_text())
    products, contention = dict(found["device_flops_per_s"]), found["contention"]
    beside = ", ".join(f"{lane} beside {other} keeps {percent(kept)}" for lane, other, kept in contention)
    return table(
        ("what", "measured"),
        [
            ("products in bf16", f"{products['bfloat16'] / 1e12:.0f} TFLOP/s"),
            (
                "copies to the device and to the host",
                f"{_gb(found['h2d_bytes_per_s'])} and {_gb(found['d2h_bytes_per_s'])}",
            ),
            ("of their rates", beside),
            ("copies within the device", _gb(found["device_bytes_per_s"])),
            ("AdamW on the device", f"{found['device_update_params_per_s'] / 1e9:.0f} billion parameters a second"),
            (
                "AdamW on 16 cores of the host",
                f"{found['host_update_params_per_s'] / 1e9:.1f} billion parameters a second",
            ),
        ],
    )


def _fastest(rows: list[Row], system: str) -> float:
    return min(row["step s"] for row in rows if row["system"] == system)


def _content() -> dict[str, Any]:
    return json.loads((RESULTS / f"{_RUN}.json").read_text())


def _gb(rate: float) -> str:
    return f"{rate / 1e9:.0f} GB/s"


FIGURES: dict[str, Callable[[], str]] = {
    "gpu.steps": steps,
    "gpu.short": in_short,
    "gpu.predicted": predicted,
    "gpu.parts": parts,
    "gpu.machine": machine,
}
"""By the name under which a page quotes it."""
