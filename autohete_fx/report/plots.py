"""Plots: step time over a memory budget, as a PNG file. Drawn by matplotlib, which is an optional dependency."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from autohete_fx.errors import OptionError

__all__ = ["PlotPoint", "draw_budget_curve", "require_matplotlib"]


@dataclass(frozen=True, slots=True, kw_only=True)
class PlotPoint:
    """A step: device bytes, seconds, and a name where it stands alone."""

    num_bytes: int
    step_s: float
    name: str = ""


def require_matplotlib() -> None:
    """Raise OptionError where matplotlib is not installed: before the work whose result would be drawn."""
    try:
        import matplotlib.figure  # noqa: F401
    except ImportError as error:
        raise OptionError(
            "a plot is drawn by matplotlib, which is not installed; install it with `pip install matplotlib`, or leave"
            " --plot out"
        ) from error


def draw_budget_curve(
    path: str | Path, title: str, curve: Sequence[PlotPoint], points: Sequence[PlotPoint], capacity_bytes: int
) -> None:
    """Write the curve (by budget) with the named points (by the memory that they take) and the device's capacity to ``path``.

    Raises:
        OptionError: matplotlib is not installed, or the file cannot be written.
    """
    require_matplotlib()
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(7, 4.5), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.add_subplot()
    axes.plot(
        [p.num_bytes / 2**30 for p in curve], [p.step_s for p in curve], marker="o", markersize=4, label="autohete"
    )
    for point, marker in zip(points, "s^Dv*PXp<>hd" * len(points), strict=False):
        axes.plot(point.num_bytes / 2**30, point.step_s, marker, linestyle="none", label=point.name)
    axes.axvline(capacity_bytes / 2**30, color="grey", linestyle=":", label="capacity")
    axes.set(xlabel="device memory (GiB)", ylabel="step time (s)", title=title)
    axes.set_xlim(left=0)
    axes.set_ylim(bottom=0)
    axes.grid(alpha=0.3)
    axes.legend(fontsize="small")
    try:
        figure.savefig(path, format="png", dpi=150)
    except OSError as error:
        raise OptionError(
            f"cannot write {str(path)!r}: {error.strerror}; give --plot a file that can be written"
        ) from error
