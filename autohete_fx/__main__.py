"""``python -m autohete_fx`` and ``torchrun -m autohete_fx`` are the ``autohete`` command."""

import sys

from autohete_fx.cli import command

sys.exit(command())
