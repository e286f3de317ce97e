"""Tables of `gpu_suite.py`, and the roofline that its runs are held against.

The roofline of a step with P parameters, N tokens and g micro-batches, phi and pi the shares of the parameters that the CPU
updates and which are on the host, sigma of those whose states the device updates by streaming them there and back, c the
recomputed share of the forward, A bytes of offloaded activations a micro-batch:

    compute   (6 + 2c) N (P_products + layers x context x width) / F       causal attention counted by half
    update    28 phi P / B_host
    d2h       (2 phi P + 12 sigma P + g A) / B_d2h
    h2d       (2 max(0, phi - pi) P + 12 sigma P + 4 g pi P + g A) / B_h2d     half of 4 for what stays until backward

No step is shorter than the longest of the four; what a step reaches is that over its time. F, B_host, B_d2h and B_h2d are
measured in the same run. Bytes are those of bf16 copies and fp32 states, which is what the numerics need: a system that
copies fp32 has more to do, and reaches less. What block 0 must wait for in turn is not counted, so shares are a little low.
"""

from collections.abc import Iterable, Sequence
from typing import Any

from gpu_child import machine_of
from systems import OURS
from systems.base import SCHEDULES, Case

from autohete_fx.ir import Machine
from autohete_fx.machine.described import link_text, machine_text
from autohete_fx.machine.link import Link
from autohete_fx.report import format_bytes, format_seconds
from autohete_fx.report.tables import aligned

Row = dict[str, Any]

GOAL_OFFLOADED, GOAL_FITTING = 1.9, 1.0
"""Times the best of the others, where the model's states exceed the cap, and where they do not."""
GOAL_SHARE, GOAL_SHARES = 0.85, {"compute": 0.9}
"""Of the roofline, whichever lane binds."""

_BYTES_UPDATED, _BYTES_COPIED, _BYTES_STREAMED = 28, 2, 12


def figures_of_machine(row: Row) -> str:
    """What was measured, in lines, or why nothing was."""
    if "machine" not in row:
        return f"machine: {row['outcome']}: {row['reason']}"
    link = link_text(Link(**row["link"]) if row.get("link") else None)
    host = f"  {'host memory, bandwidth':<28}{row['host_bytes_per_s'] / 1e9:.4g} GB/s"
    return f"{machine_text(machine_of(row))}\n{host}\n{link}"


def roofline(case: Case, trial: Row, machine: Machine, host_bytes_per_s: float) -> dict[str, float]:
    """Seconds that each lane must work in a step."""
    config, shares, g = case.config, trial["shares"], trial["micro batches"]
    params = case.num_params
    products = params - config.vocab_size * config.width
    tokens = case.batch * config.context
    phi, pi, moved = shares["optimizer"], shares["params"], g * shares["activation_bytes"]
    streamed = _BYTES_STREAMED * shares["streamed"] * params  # either way
    attention = config.layers * config.context * config.width
    fetches = (4 - 2 * shares["fetched_once"]) * g * pi
    uploads = _BYTES_COPIED * max(0.0, phi - pi)
    return {
        "compute": (6 + 2 * shares["recompute"]) * tokens * (products + attention) / machine.flops_per_s("bfloat16"),
        "update": _BYTES_UPDATED * phi * params / host_bytes_per_s,
        "d2h": (_BYTES_COPIED * phi * params + streamed + moved) / machine.d2h_bytes_per_s,
        "h2d": ((uploads + fetches) * params + streamed + moved) / machine.h2d_bytes_per_s,
    }


def add_roofline(row: Row, case: Case, machine: Machine, host_bytes_per_s: float) -> None:
    """What binds the best trial of a row, and the share of it that is reached."""
    best = row.get("best")
    if best is None:
        return
    lanes = roofline(case, best, machine, host_bytes_per_s)
    row["binds"] = max(lanes, key=lambda lane: lanes[lane])
    row["roofline s"] = lanes
    row["roofline share"] = lanes[row["binds"]] / best["step s"]
    row["states over cap"] = case.state_bytes / (case.cap_bytes or machine.device_bytes)


def compare_losses(rows: Sequence[Row]) -> None:
    """In each row of the same model, batch and clipping, how far losses are from those of the first row that trained."""
    references: dict[tuple[object, ...], dict[int, float]] = {}
    for row in rows:
        losses = row.get("losses", {})
        if not losses:
            continue
        reference = references.setdefault((row["size"], row["batch"], row["clip"]), losses)
        row["loss difference"] = max(
            (abs(losses[i] - reference[i]) for i in losses.keys() & reference.keys()), default=None
        )


def setting_of(row: Row) -> str:
    """Model, cap, batch and clipping in words."""
    cap = "whole device" if row["cap_gb"] is None else f"{row['cap_gb']:g} GB"
    return f"{row['size']}, {cap}, batch {row['batch']}, clipping {'on' if row['clip'] else 'off'}"


def comparison(rows: Sequence[Row]) -> str:
    """A table a setting, and how ours compares with the best of the others."""
    texts = []
    for setting in dict.fromkeys(map(setting_of, rows)):
        mine = [row for row in rows if setting_of(row) == setting]
        header = [
            "system",
            "tokens/s",
            "step",
            "peak",
            "recompute or schedule",
            "micro",
            "binds",
            "roofline",
            "loss diff.",
            "",
        ]
        table = aligned(header, [_cells(row) for row in mine], right_from=1)
        texts.append("\n".join(filter(None, (setting, table, verdict(mine), goals(mine), behind_ours(mine)))))
    return "\n\n".join(texts)


def _cells(row: Row) -> list[str]:
    best = row.get("best")
    if best is None:
        return [row["name"], *["-"] * 8, _short(f"{row['outcome']}: {row.get('reason', '')}")]
    difference = row.get("loss difference")
    return [
        row["name"],
        f"{best['tokens/s']:,.0f}",
        format_seconds(best["step s"]),
        format_bytes(best["peak bytes"]),
        best["level"],
        str(best["micro batches"]),
        row.get("binds", "-"),
        f"{row['roofline share']:.0%}" if "roofline share" in row else "-",
        "-" if difference is None else f"{difference:.1e}",
        _short(row["cut short"]) if row.get("cut short") else "",
    ]


def verdict(rows: Iterable[Row]) -> str:
    """Our best over the best of the others, in a line."""
    rows = list(rows)
    best, other = (_best(row for row in rows if (row["system"] in OURS) is is_ours) for is_ours in (True, False))
    if best is None or other is None:
        return "nothing to compare" if best is None else "none of the others trained"
    ratio = best["best"]["tokens/s"] / other["best"]["tokens/s"]
    return f"{best['name']} over the best of the others, {other['name']}: {ratio:.2f}x"


def goals(rows: Iterable[Row]) -> str:
    """What is wanted of our fastest, and whether it is reached: times the best of the others, and a share of the roofline."""
    rows = list(rows)
    best, other = (_best(row for row in rows if (row["system"] in OURS) is is_ours) for is_ours in (True, False))
    if best is None or "states over cap" not in best:
        return ""
    times = GOAL_OFFLOADED if best["states over cap"] > 1 else GOAL_FITTING
    share = GOAL_SHARES.get(best["binds"], GOAL_SHARE)
    reached = [(f"{share:.0%} of the roofline", best["roofline share"] >= share)]
    if other is not None:
        reached.insert(0, (f"{times:g}x", best["best"]["tokens/s"] >= times * other["best"]["tokens/s"]))
    return ", ".join(f"{what} {'reached' if holds else 'missed'}" for what, holds in reached)


def behind_ours(rows: Iterable[Row]) -> str:
    """Of our fastest: what was predicted and what was measured, how busy each lane was, and the step under other schedules; empty
    where none trained."""
    best = _best(row for row in rows if row["system"] in OURS)
    trial = next((trial for trial in best["trials"] if "predicted step s" in trial), None) if best else None
    if best is None or trial is None:
        return ""
    step, peak = (f"{text(trial[name])}" for text, name in ((format_seconds, "step s"), (format_bytes, "peak bytes")))
    pinning, waiting = (format_seconds(trial[name]) for name in ("pinning s", "waiting for homes s"))
    told = (
        f"{best['name']}, {trial['level']}: step {step}, predicted {format_seconds(trial['predicted step s'])}; peak {peak},"
        f" predicted {format_bytes(trial['predicted peak bytes'])}; pinning took {pinning}, waiting for homes {waiting}"
    )
    others = (f"{each['level']}: step {format_seconds(each['step s'])}" for each in best["trials"] if each is not trial)
    return "\n".join([told, trial["lanes"], *others])


def summary(rows: Sequence[Row]) -> str:
    """A line a setting: ours, the best of the others, their ratio, what binds ours and how much of the roofline it reaches."""
    cells = []
    for setting in dict.fromkeys(map(setting_of, rows)):
        mine = [row for row in rows if setting_of(row) == setting]
        ours, other = (_best(row for row in mine if (row["system"] in OURS) is is_ours) for is_ours in (True, False))
        ratio = ours["best"]["tokens/s"] / other["best"]["tokens/s"] if ours and other else None
        cells.append(
            [
                setting,
                f"{ours['best']['tokens/s']:,.0f}" if ours else "-",
                f"{other['best']['tokens/s']:,.0f} {other['name']}" if other else "-",
                "-" if ratio is None else f"{ratio:.2f}x",
                ours.get("binds", "-") if ours else "-",
                f"{ours['roofline share']:.0%}" if ours and "roofline share" in ours else "-",
                f"{sum(bool(row.get('best')) for row in mine)} of {len(mine)}",
                goals(mine),
            ]
        )
    header = ["", "ours, tokens/s", "best of the others", "ratio", "binds ours", "roofline", "trained", "goals"]
    return aligned(header, cells, right_from=1)


def _best(rows: Iterable[Row]) -> Row | None:
    """The fastest that trained; None where none did."""
    return max((row for row in rows if row.get("best")), key=lambda row: row["best"]["tokens/s"], default=None)


def place_of(row: Row) -> tuple[bool, int]:
    """Of a row of the ablation: our plan's first, as the schedules are listed."""
    level = row["name"].removeprefix("three-integers, ")
    return level != row["name"], list(SCHEDULES).index(level)


def ablation(rows: Sequence[Row]) -> str:
    """Step times of one plan under its schedules, as ratios to the first."""
    trained = [row for row in rows if row.get("best")]
    if not trained:
        return "\n".join(f"{row['name']}: {row['outcome']}: {_short(row.get('reason', ''))}" for row in rows)
    base = trained[0]["best"]["step s"]
    cells = [
        [row["name"], format_seconds(row["best"]["step s"]), f"{row['best']['step s'] / base:.3f}"]
        if row.get("best")
        else [row["name"], "-", _short(f"{row['outcome']}: {row.get('reason', '')}")]
        for row in rows
    ]
    header = ["", "step", f"over {trained[0]['name']}"]
    return f"{setting_of(rows[0])}\n{aligned(header, cells, right_from=1)}"


def largest(rows: Sequence[Row]) -> str:
    """The largest model that trained, for each system and cap."""
    cells = [
        [
            row["system"],
            "whole device" if row["cap_gb"] is None else f"{row['cap_gb']:g} GB",
            row["largest"] or "none",
            "" if row["states over cap"] is None else f"{row['states over cap']:.1f}x",
            ", ".join(f"{probe['size']} {probe['outcome']}" for probe in row["probes"]),
        ]
        for row in rows
    ]
    return aligned(["system", "cap", "largest", "states over cap", "tried"], cells, right_from=5)


def _short(text: str) -> str:
    line = " ".join(text.split())
    return line if len(line) <= 90 else f"{line[:89]}…"
