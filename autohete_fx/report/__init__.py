"""Output for people: plans and transfers as tables, lanes as a timeline, training as a progress bar, a run as a page.

In: the values of ``ir`` and plain numbers, and for `graph_text` graphs. Out: text and files. Nothing here measures or decides.
"""

from autohete_fx.ir.sizes import format_bytes, format_count, format_seconds
from autohete_fx.report.progress import TrainingProgress
from autohete_fx.report.tables import ComparisonRow, comparison_table, plan_table, transfers_table
from autohete_fx.report.timeline import LaneEvent, render_timeline
from autohete_fx.report.trace import Trace

__all__ = [
    "ComparisonRow",
    "LaneEvent",
    "Trace",
    "TrainingProgress",
    "comparison_table",
    "format_bytes",
    "format_count",
    "format_seconds",
    "plan_table",
    "render_timeline",
    "transfers_table",
]
