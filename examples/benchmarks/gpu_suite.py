"""On your own card: how autohete_fx compares with the systems that one would otherwise choose.

    python examples/benchmarks/gpu_suite.py --json gpu.json --caches .caches     # what matters most, in 9 minutes
    python examples/benchmarks/gpu_suite.py --json gpu.json --caches .caches --resume      # more of it; nothing is run twice
    python examples/benchmarks/gpu_suite.py --json gpu.json --resume --again ours          # but for rows of ours
    python examples/benchmarks/gpu_suite.py --parts compare --sizes 3b --caps 12 24 --systems ours fsdp2 --minutes 30
    python examples/benchmarks/gpu_suite.py --dry                                # tiny models on the CPU

Parts, each of which may be asked for alone with ``--parts``:

* ``machine``: what `autohete doctor` measures, the host's memory bandwidth, and copies both ways at once.
* ``compare``: tokens a second for each model, cap, batch, with and without clipping. A baseline gets its best of full,
  selective and no recomputation, and more micro-batches where a level does not fit. Losses are compared step by step.
* ``ablation``: one plan of ours under each schedule: updates inside ``step()``, overlapped with the next forward, from the
  backward on; by priority or as gradients arrive; and the plan of AutoHete's three integers. A row of ours in ``compare`` has
  the schedules that need no other code; here the first setting has the others before any more systems are compared.
* ``largest``: the largest model that each system trains within each cap, by bisection.

Each case runs in a process of its own, whose device memory ``torch.cuda.set_per_process_memory_fraction`` limits and whose
time is limited: a failure is a row with a reason, and not fitting is a result. Rows come in the order of their importance and
stop when ``--minutes`` are over; what was left out is listed. Each part may take a share of what is left of them, and what it did
not get to comes at the end if there is time. The file is up to date after each row, and ``--caches`` has a trace of each row of
ours (``ours*_trace.json``, for Perfetto). Models are GPTs with random weights on the Python standard library's sources.

torch, numpy, pandas, ortools, rich must be there; torchao and deepspeed are compared where they are. How to carry them to a
machine without a network is in ``tests/cuda/FIRST_TEN_MINUTES.md``. DeepSpeed builds its CPU Adam on first use, which needs a
compiler and ninja on the PATH.
"""

import argparse
import json
import signal
import sys
import tempfile
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
import gpu_report as report
from gpu_child import DOES_NOT_FIT, FAILED, FITS, into, machine_of, run_case, run_machine
from gpu_process import ENDED_WELL, Problem, Processes
from gpu_selection import (
    HEADLINES,
    PARTS,
    REPLAYS,
    SHARES,
    Clock,
    Setting,
    described,
    known_ahead,
    parsed,
    settings,
    systems,
    until_a_baseline,
)
from results import environment, print_figures, save, versions
from systems import Case, system_class
from systems.base import SCHEDULES, SIZES, file_of

_PACKAGES = ("torch", "triton", "ortools", "torchao", "deepspeed", "transformers")
Row = dict[str, Any]


def main() -> None:
    """Run the parts in order, print their tables, and keep the JSON up to date."""
    arguments = parsed(__doc__)
    if arguments.child:
        emit = into(arguments.result)
        if arguments.child == "machine":
            run_machine(torch.device("cpu" if arguments.dry else "cuda"), emit)
        else:
            run_case(Case(**json.loads(arguments.child)), emit)
        return
    signal.signal(signal.SIGTERM, lambda *_: sys.exit("terminated"))  # and so end the process that runs
    if not arguments.dry and not torch.cuda.is_available():
        sys.exit("PyTorch finds no CUDA device; --dry runs tiny models on the CPU")
    print_figures(environment() | versions(_PACKAGES))
    with tempfile.TemporaryDirectory() as folder:
        caches = (arguments.caches or Path(folder) / "caches").resolve()
        caches.mkdir(parents=True, exist_ok=True)
        suite = Suite(arguments, Processes(Path(folder), caches, arguments))
        try:
            suite.run()
        finally:
            suite.finish()
    if suite.broken:
        sys.exit(f"parts that failed, with all else safe: {', '.join(each['part'] for each in suite.broken)}")


@dataclass
class Suite:
    """The rows so far and what makes more of them."""

    arguments: argparse.Namespace
    processes: Processes
    rows: dict[str, list[Row]] = field(default_factory=lambda: {part: [] for part in PARTS})
    earlier: list[Row] = field(default_factory=list)
    left_out: list[str] = field(default_factory=list)
    broken: list[dict[str, str]] = field(default_factory=list)
    num_kept: int = 0

    def __post_init__(self) -> None:
        self.clock = Clock(self.arguments.minutes, self.arguments.case_minutes)
        if self.arguments.resume and self.arguments.json.exists():
            kept = json.loads(self.arguments.json.read_text())["rows"]
            rows = [{**row, "part": part} for part in PARTS for row in kept.get(part, [])]
            self.earlier = [row for row in rows if row.get("system") not in self.arguments.again]

    def run(self) -> None:
        """Every part that is asked for, each within its share of the time; then, with what is left, all that is missing."""
        chosen, (first, *more) = self.arguments.parts, settings(self.arguments)
        headlines, rest = more[: len(HEADLINES) - 1], more[len(HEADLINES) - 1 :]
        names = systems(self.arguments, first[1])
        works: list[tuple[str, str, Callable[[], None]]] = [
            ("machine", "machine", self.machine),
            ("first", "compare", lambda: self.compare([first], until_a_baseline(names))),
            ("ablation", "ablation", lambda: self.ablation([first])),
            ("others", "compare", lambda: self.compare([first])),
            ("headlines", "compare", lambda: self.compare(headlines)),
            ("largest", "largest", self.largest),
        ]
        needed = [*chosen, "machine"] if "compare" in chosen else chosen
        works = [work for work in works if work[1] in needed]
        for place, (stage, part, work) in enumerate(works):
            has_others_behind = any(later != part for _, later, _ in works[place:])
            self.clock.let(SHARES[stage] if has_others_behind else 1.0)
            self._guarded(part, work)
        self.clock.let(1.0)
        was_left, self.left_out = bool(self.left_out), []
        for _, part, work in works if was_left else ():
            self._guarded(part, work)
        if "compare" in chosen:
            self._guarded("compare", lambda: self.compare(rest))
        if "ablation" in chosen:
            self._guarded("ablation", lambda: self.ablation(more))

    def _guarded(self, part: str, work: Callable[[], None]) -> None:
        """An error of ours in one part costs that part alone."""
        try:
            work()
        except Exception:
            text = traceback.format_exc()
            self.broken.append({"part": part, "error": text})
            print(f"{part} failed:\n{text}", file=sys.stderr, flush=True)

    def case(self, system: str, setting: Setting, **more: Any) -> Case:
        asked = self.arguments
        return Case(
            system=system,
            **described(setting),
            steps=asked.steps,
            dry=asked.dry,
            inductor=not asked.no_inductor,
            folder=str(self.processes.caches),
            **more,
        )

    # -- the parts ------------------------------------------------------------------------------------------------

    def machine(self) -> None:
        if self.rows["machine"]:
            return
        row = self._known("machine", "") or self._measured_machine()
        if row is None:
            return
        self._keep("machine", row)
        print(f"{report.figures_of_machine(row)}\n", flush=True)

    def _measured_machine(self) -> Row | None:
        if self._is_late("machine"):
            return None
        found, problem = self.processes.run("machine", self.clock.limit_s)
        return {"name": "", **(found[0] if found else {"outcome": problem[0], "reason": problem[1]})}

    def compare(self, chosen: Sequence[Setting], names: Sequence[str] = ()) -> None:
        for setting in chosen:
            before = self.num_kept
            rows = [
                row
                for name in names or systems(self.arguments, setting[1])
                if (row := self._trained("compare", name, self.case(name, setting)))
            ]
            if self.num_kept > before:
                report.compare_losses(self.rows["compare"])
                print(f"{report.comparison(rows)}\n", flush=True)

    def ablation(self, chosen: Sequence[Setting]) -> None:
        for setting in chosen:
            before, rows = self.num_kept, self._schedules_of_ours(setting)
            for kind, levels in REPLAYS if rows else ():
                names = {level if kind == "planned" else f"{kind}, {level}": level for level in levels}
                known = [row for name in names if (row := self._known("ablation", name, **described(setting)))]
                rows += known if len(known) == len(names) else self._replayed(setting, kind, names)
            found = [self._keep("ablation", row) for row in sorted(rows, key=report.place_of)]
            if self.num_kept > before:
                print(f"ablation: {report.ablation(found)}\n", flush=True)

    def _schedules_of_ours(self, setting: Setting) -> list[Row]:
        """Rows of the schedules that ours was compared under, which also leaves the plan; it trains now where it was not."""
        fields, case = described(setting), self.case("ours", setting)
        row, what = self._known("compare", "ours", **fields), f"ablation, {report.setting_of(fields)}"
        if row is None or (row["outcome"] == FITS and self._plan_of(setting, "planned") is None):
            if self._is_late(what):  # a row that was resumed may have left its plan elsewhere
                return []
            row = self._best_of(case)
        if not row["trials"]:
            self.left_out.append(f"{what}: ours left no plan, {row['outcome']}: {row.get('reason', '')}")
        common = {"system": "ours", **fields, "outcome": FITS}
        rows = [{**common, "name": trial["level"], "best": trial, "trials": [trial]} for trial in row["trials"]]
        return [self._rated(each, case) for each in rows]

    def _replayed(self, setting: Setting, kind: str, names: dict[str, str]) -> list[Row]:
        """A row for each schedule of a plan; from one process."""
        fields, plan = described(setting), self._plan_of(setting, kind)
        whats = [f"ablation, {report.setting_of(fields)}, {name}" for name in names]
        if plan is None:
            self.left_out += [
                f"{what}: ours left no such plan, which is so where none keeps the budget" for what in whats
            ]
            return []
        if self.clock.is_over:
            self.left_out += whats
            return []
        print(f"… {report.setting_of(fields)}: ablation, {'; '.join(names)}", file=sys.stderr, flush=True)
        count, limit_s = int(plan.name.split("_")[4]), self.clock.limit_s
        levels = tuple(names.values())
        system = "ours-backward" if SCHEDULES[levels[0]][0] == "backward" else "ours"
        case = self.case(system, setting, plan=str(plan), levels=levels, micro_batches=count)
        found, problem = ([], ahead) if (ahead := known_ahead(case)) else self._ran(case, limit_s)
        is_cut = self.clock.has_cut(problem[0], limit_s)
        trials = {trial["level"]: trial for trial in found if trial["outcome"] == FITS}
        problem = next(((t["outcome"], t.get("reason", "")) for t in found if t["outcome"] != FITS), problem)
        rows = []
        for what, (name, level) in zip(whats, names.items(), strict=True):
            row = {"system": "ours", "name": name, **fields}
            if (trial := trials.get(level)) is not None:
                rows.append(self._rated({**row, "outcome": FITS, "best": trial, "trials": [trial]}, case))
            elif is_cut:
                self.left_out.append(what)
            else:
                rows.append({**row, "outcome": problem[0], "reason": problem[1]})
        return rows

    def _plan_of(self, setting: Setting, kind: str) -> Path | None:
        pattern = file_of(self.case("ours", setting), kind, micro_batches="*")
        return next(iter(sorted(pattern.parent.glob(pattern.name))), None)

    def largest(self) -> None:
        before = self.num_kept
        for cap in self.arguments.caps or [12.0, 24.0, 40.0, None]:
            for name in (name for name in systems(self.arguments, cap) if name != "ours-backward"):
                row = self._known("largest", name, cap_gb=cap) or self._bisected(name, cap)
                if row is not None:
                    self._keep("largest", row)
        if self.num_kept > before:
            print(f"{report.largest(self.rows['largest'])}\n", flush=True)

    def _bisected(self, name: str, cap: float | None) -> Row | None:
        """The largest size that trains two steps of one sequence; None where there was no time to find it."""
        sizes = [size for size in SIZES if self.arguments.sizes is None or size in self.arguments.sizes]
        low, high, probes, what = 0, len(sizes), [], f"largest, {name}, {cap} GB"
        while low < high:
            if self._is_late(what):
                return None
            middle = (low + high) // 2
            level = system_class(name).levels[0]
            case = self.case(name, (sizes[middle], cap, 1, False), levels=(level,), warm_up=1)
            limit_s = self.clock.limit_s
            outcome, reason = self._probed(replace(case, steps=1, folder=""), limit_s)
            if self.clock.has_cut(outcome, limit_s):
                self.left_out.append(what)
                return None
            probes.append({"size": sizes[middle], "outcome": outcome, "reason": reason})
            low, high = (middle + 1, high) if outcome == FITS else (low, middle)
            if outcome not in (FITS, DOES_NOT_FIT):
                break
        best = max((p["size"] for p in probes if p["outcome"] == FITS), key=sizes.index, default=None)
        over = None
        if best is not None and cap is not None:
            tried = self.case(name, (best, cap, 1, False))
            over = tried.state_bytes / (tried.cap_bytes or 1)
        return {"system": name, "name": name, "cap_gb": cap, "largest": best, "states over cap": over, "probes": probes}

    def _probed(self, case: Case, limit_s: float) -> Problem:
        """How a single level came out."""
        if (problem := known_ahead(case)) is not None:
            return problem
        found, problem = self._ran(case, limit_s)
        return (found[0]["outcome"], found[0].get("reason", "")) if found else problem

    # -- rows -----------------------------------------------------------------------------------------------------

    def _trained(self, part: str, name: str, case: Case) -> Row | None:
        """The row of a case, from an earlier run or trained now; None where time is over."""
        fields = described((case.size, case.cap_gb, case.batch, case.clip))
        row = self._known(part, name, **fields)
        if row is None:
            what = f"{part}, {report.setting_of(fields)}, {name}"
            if self._is_late(what):
                return None
            print(f"… {report.setting_of(fields)}: {name}", file=sys.stderr, flush=True)
            row = {"system": case.system, "name": name, **fields, **self._best_of(case)}
            if row.get("is unfinished"):
                self.left_out.append(what)
                if "best" not in row:
                    return None
        return self._keep(part, self._rated(row, case))

    def _rated(self, row: Row, case: Case) -> Row:
        """With what binds it and the share of the roofline that it reaches, if the machine's figures are known."""
        machine = next((each for each in self.rows["machine"] if "machine" in each), None)
        if machine is not None:
            report.add_roofline(row, case, machine_of(machine), machine["host_bytes_per_s"])
        return row

    def _best_of(self, case: Case) -> Row:
        """Levels by rising memory; those that do not fit again with twice the micro-batches, as long as there are."""
        left = list(case.levels or system_class(case.system).levels)
        trials: list[Row] = []
        if (problem := known_ahead(case)) is not None:
            return {"outcome": problem[0], "reason": problem[1], "trials": []}
        problem, count, is_cut = (FAILED, "nothing was reported"), case.micro_batches, False
        while left and count <= case.batch and not is_cut:
            limit_s = self.clock.limit_s
            found, problem = self._ran(replace(case, micro_batches=count, levels=tuple(left)), limit_s)
            is_cut = self.clock.has_cut(problem[0], limit_s)
            for trial in found:
                if trial["outcome"] == FITS:
                    trials.append(trial)
                    left.remove(trial["level"])
                else:
                    problem = (trial["outcome"], trial.get("reason", ""))
            if problem[0] != DOES_NOT_FIT or case.plan:
                break
            count *= 2
            is_cut = is_cut or (bool(left) and count <= case.batch and self.clock.is_over)
        unfinished = {"is unfinished": True} if is_cut else {}
        if not trials:
            return {"outcome": problem[0], "reason": problem[1], "trials": [], **unfinished}
        best = max(trials, key=lambda trial: trial["tokens/s"])
        first = [trial for trial in trials if trial["micro batches"] == trials[0]["micro batches"]]
        losses = {t["first step"] + i: loss for t in first for i, loss in enumerate(t["losses"])}
        cut = f"{', '.join(left)} left: {problem[0]}: {problem[1]}" if left else ""
        return {"outcome": FITS, "best": best, "losses": losses, "trials": trials, "cut short": cut, **unfinished}

    def _ran(self, case: Case, limit_s: float) -> tuple[list[Row], Problem]:
        began_s = self.clock.passed_s
        found, problem = self.processes.run(case, limit_s)
        if found and problem == ENDED_WELL and all(row["outcome"] == FITS for row in found):
            self.clock.note(self.clock.passed_s - began_s)
        return found, problem

    def _known(self, part: str, name: str, **fields: object) -> Row | None:
        """A finished row of this run or of the file that is resumed."""
        wanted = {"name": name, **fields}
        for row in (*self.rows[part], *(row for row in self.earlier if row["part"] == part)):
            if not row.get("is unfinished") and all(row.get(key) == value for key, value in wanted.items()):
                return {**row, "losses": {int(i): loss for i, loss in row.get("losses", {}).items()}}
        return None

    def _keep(self, part: str, row: Row) -> Row:
        """Note a row, in the place of one of the same that was cut short."""
        names = ("name", "size", "cap_gb", "batch", "clip")
        rows = self.rows[part]
        if row not in rows:
            rows[:] = [old for old in rows if any(old.get(key) != row.get(key) for key in names)] + [row]
            self.num_kept += 1
            self._save()
        return row

    def _save(self) -> None:
        kept = {part: rows for part, rows in self.rows.items() if rows}
        beside = {"left out": list(dict.fromkeys(self.left_out)), "broken": self.broken}
        save(self.arguments.json, {"versions": versions(_PACKAGES), **kept, **beside})

    def _is_late(self, what: str) -> bool:
        """Whether time is over; what then is left out is noted."""
        if not self.clock.is_over:
            return False
        self.left_out.append(what)
        return True

    def finish(self) -> None:
        """The last words: all comparisons in a table, what was left out, and how long it took."""
        self._save()
        if self.rows["compare"]:
            print(f"{report.summary(self.rows['compare'])}\n")
        for what in dict.fromkeys(self.left_out):
            print(f"left out: {what}")
        print(f"{self.clock.passed_s / 60:.1f} minutes")


if __name__ == "__main__":
    main()
