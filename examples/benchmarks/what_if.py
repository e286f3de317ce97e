"""What ``autohete plan`` says of the model that the README plans, kept as it was printed.

    python examples/benchmarks/what_if.py --json examples/benchmarks/results/what_if.json

Nothing is measured: a data sheet prices the model, and the solver has its ten seconds. `figures.py` quotes the text.
"""

import argparse
import contextlib
import io
from pathlib import Path

from results import environment, print_figures, save

from autohete_fx.cli import main as autohete

COMMAND = "plan llama-2-13b --batch 8 --seq 1024 --device a100-40g"


def main() -> None:
    """Run the command with its reasons, print what it prints, and write JSON where asked."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    print_figures(environment())
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        status = autohete([*COMMAND.split(), "--explain"])
    assert status == 0, printed.getvalue()
    print(printed.getvalue())
    save(arguments.json, [{"command": f"autohete {COMMAND}", "printed": printed.getvalue().splitlines()}])


if __name__ == "__main__":
    main()
