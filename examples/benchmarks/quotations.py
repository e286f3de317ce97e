"""What the pages quote of the result files: for each figure's name a function that makes its text.

In: ``results/*.json``, as the benchmarks saved them. Out: a phrase, a table or a listing in Markdown, which `figures.py` writes
into the pages. A text says nothing that would not follow from other files too: it has as many rows, models and budgets as they.
"""

import statistics
from collections.abc import Callable, Sequence
from typing import Any

from quoting import Result, Row, listed, named, percent, read, table


def step_time(result: Result) -> Row:
    ratios = {row["budget"]: row["step time, ours / plain (median of pairs)"] for row in result.rows}
    places = {"100%": "in the memory that plain needs", "50%": "in half of it"}
    times = (f"{ratio:.2f} times {places.get(budget, f'in {budget} of it')}" for budget, ratio in ratios.items())
    what = f"step time of a GPT of {result.argument('--layers', '8')} layers against plain `torch.compile`"
    return Row(what, ", ".join(times), result)


def half_of_memory() -> str:
    (row,) = (row for row in read("step_time_cpu").rows if row["budget"] == "50%")
    ratio = row["step time, ours / plain (median of pairs)"]
    return f"{ratio:.2f} times the step of plain `torch.compile` in half of its memory"


def compile_time(result: Result) -> Row:
    ratios = [f"{row['(ours - solver) / plain']:.2f}" for row in result.rows]
    what = f"compile time of {result.argument('--layers', '24')} layers against plain's, solver apart"
    return Row(what, f"{listed(ratios)} times, in {len(ratios)} pairs of runs", result)


def recompute_only(result: Result) -> Row:
    (model,) = result.rows
    peaks = {
        name: curve["peak bytes"] / model["curves"]["plain"]["peak bytes"] for name, curve in model["curves"].items()
    }
    ours = {point["ours"]: point["at our peak"] for point in model["points"]}
    met = [name for name, best in ours.items() if best is not None]
    alone = [name for name in ours if name not in met]
    times, shares = listed(f"{ours[name]['median']:.2f}" for name in met), listed(f"{peaks[name]:.0%}" for name in met)
    text = f"{times} times at {shares} of plain's peak" if met else "none at the same peak"
    if alone:
        least = min(share for name, share in peaks.items() if name.startswith("setting"))
        lowest = min(peaks[name] for name in alone)
        text += f". At {len(alone)} lower peaks, down to {lowest:.0%}, PyTorch has no setting: its least is {least:.0%}"
    best = "the best setting of PyTorch's `activation_memory_budget` at the same peak"
    return Row(f"{model['model']}: step time by recomputation alone against {best}", text, result)


def prediction_truth(result: Result) -> Row:
    steps, above, below = _errors(result)
    models, budgets = (listed(dict.fromkeys(row[key] for row in result.rows)) for key in ("model", "budget"))
    runs = len(result.rows[0]["step ratios"])
    return Row(
        f"predicted step times and peaks of {models} at {budgets} of plain's memory, {runs} run{'s'[: runs > 1]} each",
        f"steps {percent(statistics.median(steps))} off in the median, {percent(max(steps))} at most; peaks at most"
        f" {percent(above)} above the measured ones and {percent(below) if below else 'never'} below",
        result,
    )


def predictions() -> Row:
    """In short, of all files."""
    quiet, others = read("prediction_truth_cpu"), named("prediction_truth_cpu_")
    steps = _errors(quiet)[0]
    busy = [f", in a busier hour {percent(max(_errors(other)[0]))}" for other in others]
    above = max(_errors(result)[1] for result in (quiet, *others))
    return Row(
        f"predicted step times and peaks of {len({row['model'] for row in quiet.rows})} models at"
        f" {len({row['budget'] for row in quiet.rows})} budgets",
        f"steps {percent(statistics.median(steps))} off in the median, {percent(max(steps))} at most{''.join(busy)}; peaks at"
        f" most {percent(above)} above the measured ones",
        quiet,
    )


def _errors(result: Result) -> tuple[list[float], float, float]:
    """Of the runs of the median step ratio, and how far the peaks of all are above and below at most."""
    steps = [abs(row["predicted step s"] / row["step s"] - 1) for row in result.rows]
    peaks = [ratio - 1 for row in result.rows for ratio in row["peak ratios"]]
    return steps, max(0.0, *peaks), max(0.0, *(-peak for peak in peaks))


def planner_gap(result: Result) -> Row:
    limit = result.argument("--time-limit", "10")
    machine = result.argument("--machine", "")
    beside = (
        f" on {machine.rpartition('/')[2].removesuffix('.json').upper()} as measured, contention included"
        if machine
        else ""
    )
    what = f"proven gap of plans{beside} within {limit} s of solving, by layers and share of plain's memory"
    texts = []
    for is_tight in (True, False):
        found: dict[tuple[str, int], list[dict[str, Any]]] = {}
        for row in result.rows:
            if (row["share"] <= 0.5) is is_tight:
                found.setdefault((row["overlap"], row["layers"]), []).append(row)
        if found:
            several = len({overlap for overlap, _ in found}) > 1
            parts = (
                f"{layers} layers {f'({overlap}) ' * several}{_gaps(of)}" for (overlap, layers), of in found.items()
            )
            shares = sorted({row["share"] for of in found.values() for row in of})
            texts.append(f"at {listed(f'{share:.0%}' for share in shares)}: {', '.join(parts)}")
    return Row(what, "; ".join(texts), result)


def gaps_in_short() -> Row:
    result = read("planner_gap")
    tight = [row for row in result.rows if row["share"] <= 0.5]
    layers, shares = ([row[key] for row in tight] for key in ("layers", "share"))
    return Row(
        f"proven gap of plans for {min(layers)} to {max(layers)} layers, at {min(shares):.0%} to {max(shares):.0%} of plain's"
        " memory",
        _gaps(tight),
        result,
    )


def worst_gap() -> str:
    rows = [row for row in read("planner_gap").rows if _share(row) is not None]
    worst = max(rows, key=lambda row: _share(row) or 0.0)
    return f"{worst['gap']}, for {worst['layers']} layers in {worst['share']:.0%} of plain's memory"


def contended_gaps() -> str:
    rows = read("planner_gap_h200").rows
    shares = sorted({row["share"] for row in rows})
    return f"{_gaps(rows)} on an H200 for stacks in {shares[0]:.0%} to {shares[-1]:.0%}"


def _gaps(rows: Sequence[dict[str, Any]]) -> str:
    """``0.2 to 1.5%``, and how often there is no plan."""
    found = [gap for row in rows if (gap := _share(row)) is not None]
    without = f", no plan for {len(rows) - len(found)} of {len(rows)}" if len(found) < len(rows) else ""
    if not found:
        return without.removeprefix(", ")
    low, high = (f"{100 * gap:.2f}" for gap in (min(found), max(found)))
    return f"{low} to {high}%{without}" if low != high else f"{high}%{without}"


def _share(row: dict[str, Any]) -> float | None:
    return float(row["gap"].rstrip("%")) / 100 if row["gap"].endswith("%") else None


def disk_states(result: Result) -> Row:
    (row,) = result.rows
    share = row["share of the disk's bandwidth"]
    differences = [value for key, value in row.items() if key.startswith("largest difference")]
    return Row(
        f"a bf16 model with {row['states, MB']:.0f} MB of states in a host budget of {row['host budget, MB']:.0f} MB",
        f"{row['states on disk, MB']:.0f} MB of them on disk, at most {row['states in RAM at most, MB']:.0f} MB of those in RAM;"
        f" states at most {max(differences):.1g} of themselves off PyTorch's; a step uses"
        f" {percent(share)} of the disk's bandwidth",
        result,
    )


def emulated_machine(result: Result) -> Row:
    steps, gains = result.rows["steps"], result.rows["gains"]
    step = max(abs(row["step s"] / row["simulated s"] - 1) for row in steps)
    gain = max(abs(row["measured"] / row["simulated"] - 1) for row in gains)
    return Row(
        f"{len(steps)} step times on an emulated machine, and {len(gains)} gains of priority and overlap, against the simulator's",
        f"within {percent(step)} and {percent(gain)}",
        result,
    )


def emulated_ranks(result: Result) -> Row:
    steps = result.rows["steps"]
    off = [row["step s"] / row["simulated s"] - 1 for row in steps]
    machines = list(dict.fromkeys(row["machine"] for row in steps))
    gains = []
    for machine in machines:
        mine = [row for row in steps if row["machine"] == machine]
        for solved in (row for row in mine if row["plan"].startswith("solved")):
            others = [row for row in mine if not row["plan"].startswith("solved")]
            fitting = [row["step s"] for row in others if row["peak bytes"] <= solved["budget bytes"]]
            gains.append(f"{machine}{solved['plan'].removeprefix('solved')} {solved['step s'] / min(fitting):.2f}")
    slower = result.rows.get("times as slow", 1.0)
    return Row(
        f"{result.rows['ranks']} ranks that share a model, on emulated machines with a net"
        f"{f', all lanes {slower:g} times as slow' if slower != 1 else ''}: {len(steps)} step times against the"
        " simulator's; the solved plan's against the best that fits of plans that decide alike for every block, in the memory of"
        " gathering again, and in less: that of gathering again with states on the host",
        f"{percent(min(off))} to {percent(max(off))} above; {', '.join(gains)} times",
        result,
    )


def recording_cost(result: Result) -> Row:
    (row,) = result.rows
    share, records = row["recording, counted / step"], row["records a step"]
    return Row(
        "what it costs to record what the lanes did", f"{percent(share)} of a step with {records} records", result
    )


def host_update(result: Result) -> Row:
    """By all threads, against the stream that does not read the old weight."""
    rows = [
        row for row in result.rows if row["threads"] == result.environment["threads"] and "shares of streams" in row
    ]
    groups: dict[str, list[float]] = {}
    for row in rows:
        name = row["what"].partition(",")[0].removeprefix("autohete_fx.")
        if name == "the same":
            name = next(reversed(groups))
        groups.setdefault(name, []).append(row["shares of streams"][0])
    found = [
        f"{percent(min(shares))} to {percent(max(shares))} by {name}"
        for name, shares in groups.items()
        if len(shares) > 1
    ]
    copying = groups["grad.float()"][0]
    return Row(
        f"the CPU's update of {result.environment['params'] / 1e6:.0f} million parameters in fp32 and bf16, states in either place,"
        " or through the update lane, against a stream of the same bytes",
        f"{', '.join(found)}; {percent(copying)} by torch's fused one on fp32 copies of bf16 tensors",
        result,
    )


def first_times(result: Result) -> Row:
    row = result.rows
    return Row(
        "what a newcomer waits for: the import; the first line and the answer of `autohete plan gpt2`, and the answer again; a"
        " first plan on a new machine",
        f"{1e3 * row['import s']:.0f} ms; {row['plan: first line s']:.1f} s, {row['plan: answer s']:.0f} s and"
        f" {row['plan: answer again s']:.1f} s; {row['first plan s']:.1f} s",
        result,
    )


def measured() -> str:
    """All of them."""
    rows = [
        step_time(read("step_time_cpu")),
        compile_time(read("compile_time_cpu")),
        *map(recompute_only, named("recompute_only")),
        *map(prediction_truth, named("prediction_truth_cpu")),
        *map(planner_gap, named("planner_gap")),
        emulated_machine(read("emulated_machine_cpu")),
        *map(emulated_ranks, named("emulated_ranks")),
        disk_states(read("disk_states_cpu")),
        recording_cost(read("recording_cost_cpu")),
        host_update(read("host_update_cpu")),
        first_times(read("first_times_cpu")),
    ]
    header = ("what", "result", "machine", "commit", "script")
    return table(
        header,
        ((r.what, r.result, r.source.machine, r.source.environment["commit"], f"`{r.source.script}`") for r in rows),
    )


def measured_in_short() -> str:
    """Three."""
    rows = (step_time(read("step_time_cpu")), predictions(), gaps_in_short())
    return table(
        ("what", "result", "machine", "script"),
        ((r.what, r.result, r.source.machine, f"`{r.source.script.split()[0]}`") for r in rows),
    )


# -- the other tables -----------------------------------------------------------------------------------------------


def best_on_emulated_machines() -> str:
    """Of each machine and place of states, the schedule whose step is shortest."""
    best: dict[tuple[str, str], dict[str, Any]] = {}
    for row in read("emulated_machine_cpu").rows["steps"]:
        key = row["machine"], row["homes"]
        best[key] = min(best.get(key, row), row, key=lambda each: each["step s"])
    rows = (
        (*key, row["schedule"], *(f"{row[f'{bound} s'] / row['step s']:.1%}" for bound in ("roofline", "floor")))
        for key, row in best.items()
    )
    return table(("machine", "on the host", "best schedule", "of the roofline", "of the floor"), rows)


STRATEGIES = {
    "zero-offload": "ZeRO-Offload",
    "chunks-on-demand": "PatrickStar",
    "working-window": "StrongHold",
    "three-integers-on-arrival": "AutoHete's three integers, no priority",
    "offload-everything": "parameters, gradients and states on the host, as FSDP2 offloads",
    "always-regather": "ZeRO-3, all on the devices",
    "always-keep": "ZeRO-2's traffic, all on the devices",
}


def strategies() -> str:
    """How many times our step those of others take, and how near to the best our plans are after shorter and longer solves."""
    result = read("strategies")
    said = " ".join([_ever_faster(result), *map(_proven, named("strategies"))])
    return f"`{result.script}` at {result.environment['commit']}:\n\n{_strategies(result)}\n\n{said}"


def _strategies(result: Result) -> str:
    parts = list(dict.fromkeys(row["part"] for row in result.rows))
    rows = []
    for strategy, name in STRATEGIES.items():
        cells = [name]
        for part in parts:
            mine = [row for row in result.rows if (row["part"], row["strategy"]) == (part, strategy)]
            ratios = [row["time / ours"] for row in mine if row["fits"]]
            figures = f"{statistics.mean(ratios):.2f}, {max(ratios):.2f}" if ratios else "-"
            cells.append(f"{figures} ({len(ratios)} of {len(mine)})" if mine else "-")
            if _is_of_the_paper(part):
                cells.append(
                    "{:.2f}, {:.2f}".format(*mine[0]["the paper's"]) if mine and "the paper's" in mine[0] else "-"
                )
        rows.append(cells)
    header = ["strategy"]
    for part in parts:
        mine = [row for row in result.rows if row["part"] == part]
        devices, models, budgets = (
            list(dict.fromkeys(r[k] for r in mine)) for k in ("device", "model", "budget_bytes")
        )
        memory = f"{listed(f'{budget / 1e9:.0f}' for budget in budgets)} GB"
        ranks = max(row.get("ranks") or 1 for row in mine)
        header.append(f"{f'{ranks} x ' if ranks > 1 else ''}{listed(devices)}, {memory}: {listed(models)}")
        header += ["the paper, measured"] if _is_of_the_paper(part) else []
    return table(header, rows)


def _is_of_the_paper(part: str) -> bool:
    return part.startswith("paper")


def _ever_faster(result: Result) -> str:
    others = [row for row in result.rows if row["strategy"] != "ours" and row["fits"]]
    faster = sum(row["time / ours"] < 1 for row in others)
    count = "None" if not faster else str(faster)
    return f"{count} of {len(others)} that fit {'is' if faster <= 1 else 'are'} faster than ours."


def _proven(result: Result) -> str:
    """How near to the best our plans are at least, and how long they were solved for."""
    ours = [row for row in result.rows if row.get("gap") is not None]
    (seconds,) = {row["time_limit_s"] for row in ours}
    gaps = {ranks: max(row["gap"] for row in ours if row["ranks"] == ranks) for ranks in (1, 4)}
    most = listed(f"{percent(gap)} on {ranks} {'rank' if ranks == 1 else 'ranks'}" for ranks, gap in gaps.items())
    return f"Solved for {seconds:.0f} s, ours have proven gaps of at most {most} (at {result.environment['commit']})."


def plain_trace() -> str:
    """What plans by a trace that knows nothing of Inductor leave unused, and how much slower they are predicted to be."""
    rows = read("trace_savings").rows
    of = {
        trace: [row for row in rows if row["trace"] == trace and not row["refused"]]
        for trace in ("as Inductor", "plain")
    }
    pairs = list(zip(*of.values(), strict=True))
    assert all((ours["model"], ours["budget"]) == (plain["model"], plain["budget"]) for ours, plain in pairs)
    slower = [plain["predicted step s"] / ours["predicted step s"] - 1 for ours, plain in pairs]
    unused = 1 - min(plain["share of budget"] for _, plain in pairs)
    times = [sum(row["compilations"] for row in rows if row["trace"] == trace) for trace in of]
    return (
        f"left up to {percent(unused)} of the budget unused, and their predicted steps were {percent(statistics.median(slower))}"
        f" longer in the median, {percent(max(slower))} at most; they were compiled {times[1]} times instead of {times[0]}"
    )


def step_caption() -> str:
    """Of the picture that `step_picture.py` draws."""
    result = read("step_timeline")
    run = result.rows
    return (
        f"A step of {run['step s']:.2f} s ({run['predicted step s']:.2f} s predicted) of a GPT of {run['layers']} layers in"
        f" {percent(run['budget bytes'] / run['whole bytes'])} of its memory, as the lanes ran it on a machine that is emulated on"
        f" {result.machine}."
    )


FIGURES: dict[str, Callable[[], str]] = {
    "step_time.half": half_of_memory,
    "planner_gap.worst": worst_gap,
    "planner_gap.contended": contended_gaps,
    "measured.short": measured_in_short,
    "measured": measured,
    "emulated_machine.best": best_on_emulated_machines,
    "strategies": strategies,
    "step.caption": step_caption,
    "plain_trace": plain_trace,
}
"""By the name under which a page quotes it."""
