"""What the pages quote of runs on a GPU; see `quotations`."""

import json
import statistics
from collections.abc import Callable
from typing import Any

from quoting import RESULTS, listed, percent, read, table

_HOW, _DEFAULT = "schedule or recomputation", "next forward, by priority"
_RUN = "gpu_turns_h200"
_MACHINE = RESULTS.parent / "machines" / "h200.json"
_BESIDE = ("alone", "h2d", "d2h", "h2d+d2h")


def steps() -> str:
    """Every row that trained: the system, its step and its peak."""
    rows = _trained()
    slowest = max(row["step s"] for row in rows)
    return table(
        ("system", _HOW, "step", "of the slowest", "peak"),
        [
            (
                row["system"],
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
    rows = _trained()
    (ours,) = (row["step s"] for row in rows if row[_HOW] == _DEFAULT)
    fsdp, torchao = (min(row["step s"] for row in rows if row["system"] == name) for name in ("FSDP2", "torchao"))
    return f"{fsdp / ours:.1f} times as fast as FSDP2 and {torchao / ours:.1f} times as fast as torchao"


def predicted() -> str:
    """How much longer steps are than planned, by schedule."""
    rows = [row for row in _trained() if "predicted step s" in row]
    found = [f"{row['step s'] / row['predicted step s']:.2f} ({row[_HOW]})" for row in rows]
    return f"{listed(found)} times as long as planned"


def replayed() -> str:
    """The same with the rate of the kernel that updated 16-bit weights, which plans did not know."""
    steps = _content()["replayed"]["step s"]
    rows = [row for row in _trained() if row[_HOW] in steps and "predicted step s" in row]
    return " and ".join(f"{row['step s'] / steps[row[_HOW]]['with']:.2f}" for row in rows)


def above() -> str:
    """How far the peaks are above the plans."""
    rows = [row for row in _trained() if "predicted peak bytes" in row]
    return f"{max(100 * (row['peak bytes'] / row['predicted peak bytes'] - 1) for row in rows):.2f}%"


def losses() -> str:
    """How far the first losses of the others are from ours, as a share."""
    rows = [row for row in _trained() if not row["first step"]]
    ours = rows[0]["first losses"]
    shares = [abs(a / b - 1) for row in rows for a, b in zip(row["first losses"], ours, strict=True)]
    return f"{max(shares):.0e}"


def host() -> str:
    """Rates of the two kernels that update on the host, before the mend, alone and beside copies."""
    found = _content()["host update"]
    kernels = [name for name in found if isinstance(found[name], dict)]
    return table(
        ("billion parameters a second", "alone", "beside copies up", "down", "both ways"),
        [(name, *(f"{found[name][beside] / 1e9:.1f}" for beside in _BESIDE)) for name in kernels],
    )


def later() -> str:
    """Steps of ours with the mended kernel, by their trace."""
    seconds = _content()["later"]["steps s"]
    return f"{1e3 * min(seconds):.0f} to {1e3 * max(seconds):.0f} ms, the median {1e3 * statistics.median(seconds):.0f}"


def rates() -> str:
    """Of updates on the host in training, before and since."""
    found = _content()["later"]["params a second, matrices of 16 Mi"]
    return f"{found['before'] / 1e9:.1f} and {found['since'] / 1e9:.1f} billion parameters a second"


def still() -> str:
    """How long copies stood still in the steps of that run."""
    longest = _content()["later"]["longest copy of states of each step s"]
    return f"{1e3 * min(longest):.0f} to {1e3 * max(longest):.0f} ms"


def shared() -> str:
    """The sharded example on two ranks of one card."""
    found = _content()["two ranks on one card"]
    peak, budget = (f"{found[name] / 2**20:.0f} MiB" for name in ("peak bytes", "budget bytes"))
    step, planned = (f"{1e3 * found[name]:.0f} ms" for name in ("step s", "predicted step s"))
    return f"{peak} of {budget}, by steps of {step} for {planned} as planned"


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
                "AdamW on 14 of 16 cores of the host",
                f"{found['host_update_params_per_s'] / 1e9:.1f} billion parameters a second",
            ),
        ],
    )


def _trained() -> list[dict[str, Any]]:
    return [row for row in read(_RUN).rows if "step s" in row]


def _content() -> dict[str, Any]:
    return json.loads((RESULTS / f"{_RUN}.json").read_text())


def _gb(rate: float) -> str:
    return f"{rate / 1e9:.0f} GB/s"


FIGURES: dict[str, Callable[[], str]] = {
    "gpu.steps": steps,
    "gpu.short": in_short,
    "gpu.predicted": predicted,
    "gpu.replayed": replayed,
    "gpu.above": above,
    "gpu.losses": losses,
    "gpu.host": host,
    "gpu.later": later,
    "gpu.rates": rates,
    "gpu.still": still,
    "gpu.shared": shared,
    "gpu.machine": machine,
}
"""By the name under which a page quotes it."""
