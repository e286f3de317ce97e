"""Every family of the installed transformers, trained by us at 60% of plain's measured peak, against plain ``torch.compile``.

Each family is a process of its own, with empty caches, and a row of the JSON file as soon as it is over: a run that was interrupted
goes on where it ended. Both train the same small random model (`families.py`) with AdamW for a few steps of different batches, in
training mode, dropout included, from the same seeds. Every loss, gradient and parameter is compared. Where a bit differs, plain's
own difference from eager PyTorch is measured too, with random numbers that both draw alike.

    python examples/benchmarks/survey.py --inner eager --jobs 2 --json families_eager.json
    python examples/benchmarks/survey.py --families llama t5 --json families.json
    python examples/benchmarks/survey.py --shared-kernels --jobs 2 --json families.json

With ``--shared-kernels`` C++ kernels that an earlier row compiled are not compiled again. That takes half of the time, and what
compiling takes is then not measured.
"""

import argparse
import importlib.metadata
import json
import multiprocessing
import os
import shutil
import sys
import tempfile
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import survey_child
from families import kinds
from family_sizes import EXCEPTIONS
from results import environment, print_figures, save

_HERE = Path(__file__).resolve().parent
_FORKS = multiprocessing.get_context("forkserver")


def main() -> None:
    """Train all families that the file has no row of, and print each row."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--families", nargs="+", help="default: all")
    parser.add_argument("--kinds", nargs="+", help="of families, such as causal; default: all")
    parser.add_argument("--inner", choices=["inductor", "eager"], default="inductor")
    parser.add_argument("--share", type=float, default=0.6, help="of plain's peak")
    parser.add_argument("--jobs", type=int, default=1)
    parser.add_argument("--limit", type=float, default=600.0, help="seconds of cores for one family")
    parser.add_argument("--shared-kernels", action="store_true", help="compile none twice, and measure no compile time")
    parser.add_argument("--again", action="store_true", help="also families that have a row")
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    print_figures(environment())
    _preload()
    rows = {} if not arguments.json or not arguments.json.exists() else _read(arguments.json)
    wanted = chosen(arguments.families, arguments.kinds)
    missing = [name for name in wanted if arguments.again or name not in rows]
    with tempfile.TemporaryDirectory() as machine, ThreadPoolExecutor(arguments.jobs) as pool:

        def one(name: str) -> dict[str, Any]:
            kernels = Path(machine) / "kernels" if arguments.shared_kernels else None
            return row_of(name, arguments.inner, arguments.share, arguments.limit, Path(machine) / "autohete", kernels)

        for row in pool.map(one, missing):
            rows[row["family"]] = row
            print_figures(row)
            known = {"transformers": importlib.metadata.version("transformers"), "families": len(kinds())}
            save(arguments.json, [rows[name] for name in kinds() if name in rows], **known)


def chosen(families: Sequence[str] | None, of_kinds: Sequence[str] | None) -> list[str]:
    """Names of families, in the order in which they are trained."""
    known = kinds()
    unknown = sorted({*(families or ())} - {*known} | {*(of_kinds or ())} - {*known.values()})
    if unknown:
        sys.exit(
            f"unknown: {', '.join(unknown)}. Families: {', '.join(known)}; kinds: {', '.join(dict.fromkeys(known.values()))}"
        )
    return list(families or (name for name, kind in known.items() if not of_kinds or kind in of_kinds))


def _preload() -> None:
    """Every family begins with PyTorch and transformers imported. The server of forks looks for modules where the environment
    says."""
    os.environ["PYTHONPATH"] = os.pathsep.join([str(_HERE), os.environ.get("PYTHONPATH", "")])
    os.environ["TORCH_WARM_POOL"] = (
        "0"  # Inductor's compiling processes, which C++ does not use: a fork must not inherit threads
    )
    _FORKS.set_forkserver_preload(["survey_child"])


def _read(path: Path) -> dict[str, dict[str, Any]]:
    return {row["family"]: row for row in json.loads(path.read_text())["rows"]}


def row_of(
    name: str, inner: str, share: float, limit_s: float, machine: Path, kernels: Path | None = None
) -> dict[str, Any]:
    """The row of one family, trained in a process of its own. ``machine`` is a directory that keeps the machine's rates.

    ``kernels`` is one of C++ kernels that families share; None if each compiles its own."""
    head = {"family": name, "kind": kinds()[name], "inner": inner, "share": share}
    if name in EXCEPTIONS and EXCEPTIONS[name].why_not:
        return {**head, "result": "left out", "error": EXCEPTIONS[name].why_not}
    with tempfile.TemporaryDirectory() as caches:
        own, words, answer = Path(caches) / "autohete", Path(caches) / "words", Path(caches) / "row.json"
        if machine.exists():
            shutil.copytree(machine, own)
        child = _FORKS.Process(target=survey_child.run, args=(name, inner, share, caches, kernels, words, answer))
        child.start()
        if not _ended(child, limit_s):
            return {**head, "result": "failed", "error": f"took more than {limit_s:.0f} s of cores"}
        if (own / "machine").exists():
            shutil.copytree(own / "machine", machine / "machine", dirs_exist_ok=True)
        if not answer.exists():
            lines = [line for line in words.read_text(errors="replace").splitlines() if line.strip()]
            return {**head, "result": "failed", "error": f"status {child.exitcode}: {(lines or [''])[-1][:300]}"}
        return {**head, **json.loads(answer.read_text())}


def _ended(child: BaseProcess, limit_s: float) -> bool:
    """Whether a process ends before it has used so many seconds of cores, and it waits in vain for no more than ten times as many.
    One that does not is killed. Others on the machine slow a family down, and fail none."""
    begin = time.monotonic()
    while child.is_alive():
        child.join(1.0)
        if _core_s(child.pid) > limit_s or time.monotonic() - begin > 10 * limit_s:
            child.kill()
            child.join()
            return False
    return True


def _core_s(pid: int | None) -> float:
    """Seconds of cores that a process and those that it has waited for have used; 0 where it is over."""
    try:
        used = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[11:15]
    except OSError:
        return 0.0
    return sum(map(int, used)) / os.sysconf("SC_CLK_TCK")


if __name__ == "__main__":
    main()
