"""``autohete report LOG.jsonl``: a cluster's job in words, and its page."""

import argparse
import math
from collections.abc import Callable, Sequence
from pathlib import Path

from autohete_fx.cluster.report.history import history_text, read_history
from autohete_fx.cluster.report.history_page import write_history_page
from autohete_fx.errors import ClusterError
from autohete_fx.report.saved import cannot_write


def job_report(parsed: argparse.Namespace) -> tuple[str, Callable[[], Path]]:
    """The text of a job, and what writes its page beside the log: it returns the path, or raises ReportError."""
    log, prices = Path(parsed.directory), _prices(parsed.price)
    history = read_history(log)
    types = history.gpu_hours()
    if strangers := sorted(prices.keys() - types):
        raise ClusterError(
            f"--price {strangers[0]}={prices[strangers[0]]:g} was given. Expected was a type of GPU that the job had, of"
            f" {', '.join(sorted(types))}. Correct it"
        )

    def write() -> Path:
        try:
            return write_history_page(history, prices, log.with_suffix(".html"))
        except OSError as error:
            raise cannot_write(log.parent, error) from error

    return history_text(history, prices), write


def _prices(given: Sequence[str]) -> dict[str, float]:
    found = {}
    for words in given:
        gpu, _, usd = words.rpartition("=")
        try:
            found[gpu] = float(usd)
        except ValueError:
            gpu = ""
        if not gpu or not 0 <= found[gpu] < math.inf:  # NaN too
            raise ClusterError(
                f"--price {words} was given. Expected was a type of GPU and dollars of an hour, as in --price a100-40g=1.17."
                " Correct it"
            )
    return found
