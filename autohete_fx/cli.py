"""The ``autohete`` command: what a plan decides, what this machine can do, and what another one could.

Thin: it parses, calls and prints. A command imports what it needs when it runs, so that the first word comes at once.
"""

import argparse
import gc
import importlib.metadata
import os
import sys
import webbrowser
from collections.abc import Sequence
from typing import TypeAlias

from autohete_fx import __version__
from autohete_fx.arguments import EXPLAIN, add_plan
from autohete_fx.errors import AutoHeteError, OptionError, ReportError
from autohete_fx.integrations.command import add_run, run_program
from autohete_fx.report.coloured import show_text

__all__ = ["command", "main"]

_Commands: TypeAlias = "argparse._SubParsersAction[argparse.ArgumentParser]"
_NAMES = ("save", "plot", "machine", "cluster", "given", "costs", "offload_dir", "leave")
"""Options of the subcommands that name something."""


class _Version(argparse.Action):
    """Print the versions of this package, PyTorch and Python, without importing PyTorch."""

    def __init__(self, option_strings: Sequence[str], dest: str) -> None:
        super().__init__(option_strings, dest, nargs=0, help="print versions and exit")

    def __call__(self, parser: argparse.ArgumentParser, *_: object) -> None:
        torch = importlib.metadata.version("torch")
        python = ".".join(map(str, sys.version_info[:3]))
        print(f"autohete {__version__} (torch {torch}, Python {python})")
        parser.exit()


def main(arguments: Sequence[str] | None = None, *, owns_process: bool = False) -> int:
    """Run one subcommand; returns the exit status. Errors that the user can mend go to standard error, status 2.

    Args:
        arguments: default those of the process.
        owns_process: it ends after this. A program that ``run`` ran stays its ``__main__``, for what runs when an interpreter ends.
    """
    parser = argparse.ArgumentParser(
        prog="autohete", description="Plan the training of transformers within a device-memory budget."
    )
    parser.add_argument("--version", action=_Version)
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    for add in (_add_show, _add_report, _add_compare, _add_doctor):
        add(commands)
    add_plan(commands).set_defaults(run=_plan)
    add_run(commands).set_defaults(run=run_program)
    parsed = parser.parse_args(arguments)
    parsed.owns_process = owns_process
    try:
        _refuse_empty(parsed)
        text = parsed.run(parsed)
    except AutoHeteError as error:
        print(f"autohete: {error}", file=sys.stderr)
        return 2
    return _show_answer(text) if text else 0


def _show_answer(text: str) -> int:
    """The exit status. Standard output may take no more: its reader has gone, as of `autohete show | head`, or its disk is full."""
    try:
        show_text(text)
        return 0
    except OSError as error:
        if not isinstance(error, BrokenPipeError):
            print(
                f"autohete: cannot write the answer: {error.strerror}; give standard output a place for it",
                file=sys.stderr,
            )
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # for what the interpreter still writes
        return 1


def _refuse_empty(parsed: argparse.Namespace) -> None:
    """Raise OptionError for a name without a letter, as of a variable that a shell does not know."""
    for name in _NAMES:
        value = getattr(parsed, name, None)
        if "" in (value if isinstance(value, list) else [value]):
            option = f"--{name.replace('_', '-')}"
            raise OptionError(f"{option} '' was given. Expected was a name or a path. Give one, or leave {option} out")


def command() -> int:
    """`main` of a process of its own. A plan's garbage goes with the process: to look for it takes a fifth of the answer's time."""
    for name in ("stdout", "stderr"):  # None where they are closed, which `print` takes for standard output
        if getattr(sys, name) is None:
            setattr(sys, name, os.fdopen(os.open(os.devnull, os.O_WRONLY), "w", encoding="utf-8"))
    if is_plan := sys.argv[1:2] == ["plan"]:
        gc.disable()
    status = main(owns_process=True)
    if is_plan:
        os._exit(status)
    return status


def _add_show(commands: _Commands) -> None:
    show = commands.add_parser("show", help="print a saved plan as a table")
    show.add_argument("plan", metavar="PLAN.json", help="a file that Plan.save wrote")
    show.add_argument("--explain", action="store_true", help=EXPLAIN)
    show.set_defaults(run=_show)


def _show(parsed: argparse.Namespace) -> str:
    from autohete_fx.ir import Plan
    from autohete_fx.report.tables import plan_table
    from autohete_fx.report.why import why

    plan = Plan.load(parsed.plan)
    return f"{plan_table(plan)}\n\n{why(plan)}" if parsed.explain else plan_table(plan)


def _add_report(commands: _Commands) -> None:
    report = commands.add_parser(
        "report",
        help="draw the page of a run, from the directory that the option report_dir wrote or from the log of a cluster's job,"
        " and sum it up",
    )
    report.add_argument(
        "directory",
        metavar="DIR|LOG.jsonl",
        help="such as runs/x, of options={'report_dir': 'runs/x'}, or a file of cluster.join(log=...), whose page stands beside it",
    )
    report.add_argument(
        "--price",
        metavar="TYPE=USD",
        action="append",
        default=[],
        help="of a job: dollars of an hour of one GPU of a type, as the log calls it (may be given again)",
    )
    report.add_argument("--open", action="store_true", help="also open the page in a browser")
    report.set_defaults(run=_report)


def _report(parsed: argparse.Namespace) -> str:
    if parsed.directory.endswith(".jsonl"):
        from autohete_fx.commands.history import job_report

        summary, write = job_report(parsed)
    else:
        from autohete_fx.report.saved import Report

        report = Report.load(parsed.directory)
        summary, write = report.summary, lambda: report.rewrite_page(parsed.directory)
    try:
        page = write().resolve()
    except ReportError:  # what was read is worth an answer all the same
        _show_answer(summary)
        raise
    if parsed.open and not webbrowser.open(page.as_uri()):
        raise ReportError(
            f"--open was given, but no browser could be started. Expected was one. Open {str(page)!r} yourself"
        )
    return f"{summary}\n\n{page}"


def _add_compare(commands: _Commands) -> None:
    compare = commands.add_parser("compare", help="say what two plans or runs decide otherwise, and what that costs")
    for side in ("A", "B"):
        compare.add_argument(side.lower(), metavar=side, help="a plan file, or a directory that report_dir wrote")
    compare.set_defaults(run=_compare)


def _compare(parsed: argparse.Namespace) -> str:
    from autohete_fx.report.compare import comparison, read_side

    return comparison(read_side(parsed.a), read_side(parsed.b))


def _add_doctor(commands: _Commands) -> None:
    doctor = commands.add_parser(
        "doctor",
        help="measure this machine and print what the planner will assume of it; under torchrun, the link between ranks too",
    )
    doctor.add_argument("--device", choices=("cpu", "cuda"), default=None, help="default: cuda where there is one")
    doctor.add_argument(
        "--save", metavar="FILE", help="also write a machine file, which `autohete plan --machine` reads"
    )
    doctor.add_argument(
        "--offload-dir",
        metavar="DIR",
        help="measure the disk there, as training does with the option of that name (default: the temporary directory)",
    )
    doctor.add_argument(
        "--cluster",
        metavar="FILE",
        help="under torchrun, a process a GPU: measure all nodes and links, and write a file that `autohete plan --cluster` reads",
    )
    doctor.set_defaults(run=_doctor)


def _doctor(parsed: argparse.Namespace) -> str:
    from autohete_fx.commands.doctor import doctor

    return doctor(parsed)


def _plan(parsed: argparse.Namespace) -> str:
    from autohete_fx.commands.plan import plan

    return plan(parsed)


if __name__ == "__main__":
    sys.exit(command())
