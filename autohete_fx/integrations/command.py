"""The subcommand ``autohete run``: its options, read before PyTorch is needed."""

import argparse


def add_run(commands: "argparse._SubParsersAction[argparse.ArgumentParser]") -> argparse.ArgumentParser:
    """Add the subcommand; returns its parser."""
    parser = commands.add_parser(
        "run",
        allow_abbrev=False,  # else Python 3.11 takes the program's own --b for an option that is cut short
        help="run an unmodified training script: its model is compiled, its AdamW replaced where that trains the same",
        description="Run a Python program as `python PROGRAM` does. The module that it trains is compiled with the backend"
        " autohete, and torch.optim.AdamW, Adam and SGD become ours where that trains the same but for the rounding"
        " of updates. A report on standard error says what was done, what was not, and why.",
    )
    parser.add_argument("--budget", metavar="SIZE", help="the option memory_budget: 12GiB, 60%%, ...")
    parser.add_argument(
        "--option",
        metavar="NAME=VALUE",
        action="append",
        default=[],
        help="a further option of the backend; may be repeated",
    )
    parser.add_argument(
        "--bitwise",
        action="store_true",
        help="replace only optimizers made with fused=True, whose kernels are those of ours",
    )
    parser.add_argument(
        "--leave",
        metavar="CLASS",
        action="append",
        default=[],
        help="a class of modules that stay as they are, such as one that takes gradients of gradients; may be repeated",
    )
    parser.add_argument("-m", dest="is_module", action="store_true", help="PROGRAM is the name of a module")
    parser.add_argument(
        "program",
        metavar="PROGRAM",
        nargs=argparse.PARSER,  # all that follows it as it is, also a lone --, which REMAINDER would lose
        help="the path of a script, or after -m the name of a module; what follows are arguments of the program",
    )
    return parser


def run_program(parsed: argparse.Namespace) -> str:
    """Run what the command line names; ends by SystemExit with the status of the program."""
    from autohete_fx.integrations.run import parsed_options, run

    options = parsed_options(parsed.option)
    if parsed.budget is not None:
        options["memory_budget"] = parsed.budget
    program, *arguments = parsed.program
    status = run(
        program,
        arguments,
        options,
        is_module=parsed.is_module,
        only_same_kernels=parsed.bitwise,
        left=parsed.leave,
        owns_process=parsed.owns_process,
    )
    raise SystemExit(status)
