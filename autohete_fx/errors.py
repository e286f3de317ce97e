"""The exception tree: what a user can do something about. Broken invariants are ``assert``, never these.

Every message says what was given, what was expected and what to do.
"""

import difflib
from collections.abc import Iterable


class AutoHeteError(Exception):
    """Base of every error that autohete_fx raises on purpose."""


class OptionError(AutoHeteError, ValueError):
    """An option has an unknown name or a value that cannot be honoured."""


class PlanError(AutoHeteError):
    """A plan cannot be read, or does not fit the graph it is replayed on."""


class InfeasiblePlanError(AutoHeteError):
    """No plan fits the budget.

    Attributes:
        smallest_budget_bytes: the smallest device budget for which a plan exists within the host budget, in bytes; None
            where no device budget would do. Before anything is compiled it is a twentieth more than a trace takes, and the message
            calls it one that would do.
        smallest_host_budget_bytes: the smallest host budget for which a plan exists within the device budget, in bytes;
            None where more host memory would not help.
        held_up_by: where the least peak is reached and what it consists of; empty where no device budget would do.
    """

    def __init__(
        self,
        message: str,
        *,
        smallest_budget_bytes: int | None,
        smallest_host_budget_bytes: int | None = None,
        held_up_by: str = "",
    ) -> None:
        super().__init__(message)
        self.smallest_budget_bytes = smallest_budget_bytes
        self.smallest_host_budget_bytes = smallest_host_budget_bytes
        self.held_up_by = held_up_by


class MachineError(AutoHeteError):
    """A machine file cannot be read."""


class ReportError(AutoHeteError):
    """A report cannot be read or written."""


class ClusterError(AutoHeteError):
    """A cluster, its costs or a plan for it cannot be read, or do not fit each other."""


class CaptureError(AutoHeteError):
    """The traced graph has a form that the backend cannot honour exactly."""


class PassError(AutoHeteError):
    """A pass broke its contract, or a pipeline is not well formed."""


class HostMemoryError(AutoHeteError):
    """Host memory or ``offload_dir`` refused an allocation."""


class ShardError(AutoHeteError):
    """Ranks cannot hold a model together as asked, or one of them does what the others do not."""


class CollectiveError(ShardError):
    """A collective failed: another rank has failed or ended, or did not answer in time.

    Attributes:
        reason: what is known of it.
    """

    def __init__(self, message: str, *, reason: str) -> None:
        super().__init__(message)
        self.reason = reason


class OptimizerStateError(AutoHeteError, ValueError):
    """An optimizer state dict or hyperparameter cannot be used."""


class IntegrationError(AutoHeteError, ImportError):
    """A trainer's package is missing, or its inside is not what we know how to extend."""


def unknown_word(what: str, given: object, valid: Iterable[str], *, meant: str = "") -> str:
    """The message for a word that is not one of ``valid``; names the nearest to it, or to ``meant`` where given."""
    words = list(valid)
    lower = {word.lower(): word for word in words}
    nearest = difflib.get_close_matches((meant or str(given)).lower(), lower, n=1, cutoff=0.5)
    suggestion = f"did you mean {lower[nearest[0]]!r}? " if nearest else ""
    return f"unknown {what} {given!r}; {suggestion}expected one of {', '.join(words)}"
