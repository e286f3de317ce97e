"""What the pages quote of runs on a GPU; see `quotations`."""

import json
from collections.abc import Callable
from typing import Any

from quoting import RESULTS, listed, percent, read, table

_HOW, _DEFAULT = "schedule or recomputation", "next forward, by priority"
_RUN = "gpu_turns_h200"
_MACHINE = RESULTS.parent / "machines" / "h200.json"


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


def before() -> str:
    """Steps of the same schedules on an earlier day."""
    found = _content()["before"]["step s"]
    rows = [row for row in _trained() if "predicted step s" in row]
    return " and ".join(f"{1e3 * found[row[_HOW]]:.0f} ms" for row in rows)


def still() -> str:
    """The longest copies of states, before and now."""
    content = _content()
    longest = max(content["before"]["longest copy of states s"])
    return f"{1e3 * content['longest copy of states s']:.0f} ms at most, {1e3 * longest:.0f} before"


def updates() -> str:
    """Rates of updates on the host in training, by the size of the parameter."""
    found = _content()["updates"]["params a second"]
    return table(
        ("millions of parameters", "milliseconds", "billions a second"),
        [(f"{int(n) / 1e6:.1f}", f"{1e3 * int(n) / rate:.1f}", f"{rate / 1e9:.1f}") for n, rate in found.items()],
    )


def woken() -> str:
    """What waking one thread costs an update, on a machine of two cores."""
    found = _content()["one thread is woken"]
    return f"{1e3 * found['with another team s']:.2f} ms instead of {1e3 * found['without s']:.2f}"


def everything() -> str:
    """Steps where all fits the card, by plain PyTorch and by ours."""
    found = _content()["all on the card"]
    return f"{1e3 * found['torch.compile s']:.0f} ms by `torch.compile`, {1e3 * found['ours s']:.0f} ms by ours"


def everything_in_little() -> str:
    """Steps of ours on that card within the cap of the table."""
    return " and ".join(f"{1e3 * each:.0f}" for each in sorted(_content()["all on the card"]["ours in 12 GB s"]))


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
                f"{_billions(found)} billion parameters a second, "
                f"{_billions(found, found['mixed_update_speed'])} of 16-bit ones",
            ),
        ],
    )


def _trained() -> list[dict[str, Any]]:
    return [row for row in read(_RUN).rows if "step s" in row]


def _content() -> dict[str, Any]:
    return json.loads((RESULTS / f"{_RUN}.json").read_text())


def _billions(found: dict[str, Any], speed: float = 1.0) -> str:
    return f"{speed * found['host_update_params_per_s'] / 1e9:.1f}"


def _gb(rate: float) -> str:
    return f"{rate / 1e9:.0f} GB/s"


FIGURES: dict[str, Callable[[], str]] = {
    "gpu.steps": steps,
    "gpu.short": in_short,
    "gpu.predicted": predicted,
    "gpu.above": above,
    "gpu.losses": losses,
    "gpu.before": before,
    "gpu.still": still,
    "gpu.updates": updates,
    "gpu.woken": woken,
    "gpu.all": everything,
    "gpu.little": everything_in_little,
    "gpu.shared": shared,
    "gpu.machine": machine,
}
"""By the name under which a page quotes it."""
