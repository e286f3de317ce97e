"""What ``autohete plan`` says of the model that the README plans, kept as it was printed.

    python examples/benchmarks/what_if.py --json examples/benchmarks/results/what_if.json
    python examples/benchmarks/what_if.py --ranks --json examples/benchmarks/results/what_if_ranks.json

``--ranks`` asks for the same model on 1, 2, 4 and 8 of the device.
Nothing is measured: a data sheet prices the model, and the solver has its ten seconds. `figures.py` quotes the text.
"""

import argparse
import contextlib
import io
from pathlib import Path

from results import environment, print_figures, save

from autohete_fx.cli import main as autohete

COMMAND = "plan llama-2-13b --batch 8 --seq 1024 --device a100-40g"
SWEEP = f"{COMMAND} --sweep ranks"


def main() -> None:
    """Run the command with its reasons, or the sweep, print what it prints, and write JSON where asked."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--ranks", action="store_true")
    arguments = parser.parse_args()
    command = SWEEP if arguments.ranks else COMMAND
    print_figures(environment())
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        status = autohete([*command.split(), *([] if arguments.ranks else ["--explain"])])
    assert status == 0, printed.getvalue()
    print(printed.getvalue())
    save(arguments.json, [{"command": f"autohete {command}", "printed": printed.getvalue().splitlines()}])


if __name__ == "__main__":
    main()
