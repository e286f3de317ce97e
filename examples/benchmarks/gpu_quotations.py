"""What the pages quote of runs on a GPU; see `quotations`."""

import json
from collections.abc import Callable
from typing import Any

from quoting import RESULTS, listed, percent, read, table

_HOW, _DEFAULT = "schedule or recomputation", "next forward, by priority"
_RUN, _STEP, _LATER = "gpu_first_h200", "a step in between", "in between"
_MACHINE = RESULTS.parent / "machines" / "h200.json"


def steps() -> str:
    """Every row: the system, its step and its peak."""
    rows = [row for row in read(_RUN).rows if "step s" in row]
    slowest = max(row["step s"] for row in rows)
    return table(
        ("system", "code", "schedule or recomputation", "step", "of the slowest", "peak"),
        [
            (
                row["system"],
                row["code"] or "-",
                row[_HOW],
                f"{1e3 * row['step s']:.0f} ms",
                percent(row["step s"] / slowest),
                f"{row['peak bytes'] / 1e9:.2f} GB",
            )
            for row in rows
        ],
    )


def in_short() -> str:
    """Ours, as it trains by default, against the fastest rows of the others."""
    rows = [row for row in read(_RUN).rows if "step s" in row]
    (ours,) = (row["step s"] for row in rows if (row["code"], row[_HOW]) == (_LATER, _DEFAULT))
    fsdp, torchao = (min(row["step s"] for row in rows if row["system"] == name) for name in ("FSDP2", "torchao"))
    return f"{fsdp / ours:.1f} times as fast as FSDP2 and {torchao / ours:.1f} times as fast as torchao"


def predicted() -> str:
    """The first step as planned and as it was."""
    (row,) = (row for row in read(_RUN).rows if row.get("predicted step s"))
    step, peak = row["step s"] / row["predicted step s"], row["peak bytes"] / row["predicted peak bytes"] - 1
    return f"{step:.1f} times as long as planned, with a peak {percent(peak)} above the plan's"


def above() -> str:
    """How far the peaks of the later rows are above the plan that they replayed, while updates overlap."""
    rows = [row for row in read(_RUN).rows if "step s" in row]
    (planned,) = (row["predicted peak bytes"] for row in rows if row.get("predicted peak bytes"))
    found = [row["peak bytes"] / planned - 1 for row in rows if row["code"] == _LATER and "inside" not in row[_HOW]]
    return listed(map(percent, sorted(found)))


def losses() -> str:
    """How far the first losses of the others are from ours, as a share."""
    rows = [row for row in read(_RUN).rows if "first losses" in row]
    (ours,) = (row["first losses"] for row in rows if row["system"] == "ours")
    shares = [abs(a / b - 1) for row in rows for a, b in zip(row["first losses"], ours, strict=True)]
    return f"{max(shares):.0e}"


def link() -> str:
    """Rates of the copies of a later step while they last."""
    step = _content()[_STEP]
    up, down = (_gb(step[f"bytes to the {where}"] / step[f"copies to the {where} s"]) for where in ("device", "host"))
    return f"{up} to the device and {down} to the host"


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


def _content() -> dict[str, Any]:
    return json.loads((RESULTS / f"{_RUN}.json").read_text())


def _gb(rate: float) -> str:
    return f"{rate / 1e9:.0f} GB/s"


FIGURES: dict[str, Callable[[], str]] = {
    "gpu.steps": steps,
    "gpu.short": in_short,
    "gpu.predicted": predicted,
    "gpu.above": above,
    "gpu.losses": losses,
    "gpu.link": link,
    "gpu.parts": parts,
    "gpu.machine": machine,
}
"""By the name under which a page quotes it."""
