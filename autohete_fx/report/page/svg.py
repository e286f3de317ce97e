"""SVG and HTML as text: elements with escaped content, axes with round figures, paths that stretch.

A plot is as wide as its place: x positions are shares of the width, y positions pixels. Only paths cannot say so; they stand in an
SVG element of their own whose view is stretched to the plot.
"""

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from html import escape

STRETCH = 1000
"""The width and height of a stretched view, in its own units."""
SIDE = 100
"""Pixels left of a plot for the words of its rows or of its y axis."""


def element(name: str, *inside: str, **attributes: object) -> str:
    """``<name ...>inside</name>``; attributes that are None are left out, ``class_`` and ``data_x`` are spelled as HTML does."""
    given = "".join(
        f' {key.rstrip("_").replace("_", "-")}="{escape(_shown(value))}"'
        for key, value in attributes.items()
        if value is not None
    )
    return f"<{name}{given}>{''.join(inside)}</{name}>"


def text(words: object, **attributes: object) -> str:
    """SVG text."""
    return element("text", escape(str(words)), **attributes)


def hint(words: str) -> str:
    """The title of a shape, which a browser shows over it, and the script as a box."""
    return element("title", escape(words))


def box(start: float, end: float, top: float, height: float, *inside: str, **attributes: object) -> str:
    """A rectangle over a share of the width."""
    shape = {"x": percent(start), "width": percent(max(0.0, end - start)), "y": top, "height": max(0.0, height)}
    return element("rect", *inside, **shape, **attributes)


def percent(share: float) -> str:
    """A share as SVG wants it."""
    return f"{100 * share:.3f}%"


def _shown(value: object) -> str:
    return f"{value:.2f}".rstrip("0").rstrip(".") if isinstance(value, float) else str(value)


@dataclass(frozen=True, slots=True, kw_only=True)
class Axis:
    """A range of figures from ``low`` to ``high`` with round ones to mark in between."""

    low: float
    high: float
    marks: tuple[float, ...]

    def share(self, value: float) -> float:
        """The place of a figure within the range."""
        return (value - self.low) / (self.high - self.low)


def axis(low: float, high: float, *, steps: int = 5, binary: bool = False, extends: bool = True) -> Axis:
    """An axis over a range, extended to round figures unless told otherwise.

    Args:
        steps: about how many marks there are to be.
        binary: whether round figures are powers of 2, as for bytes; else 1, 2 or 5 times a power of 10.
    """
    if high <= low:
        high = low + (abs(low) or 1.0)
    step = _round_step((high - low) / steps, binary=binary)
    if extends:
        low, high = math.floor(low / step + 1e-9) * step, math.ceil(high / step - 1e-9) * step
    first = math.ceil(low / step - 1e-9)
    count = math.floor(high / step + 1e-9) - first
    return Axis(low=low, high=high, marks=tuple((first + i) * step for i in range(count + 1)))


def _round_step(least: float, *, binary: bool) -> float:
    if binary:
        return 2.0 ** math.ceil(math.log2(least))
    power = 10.0 ** math.floor(math.log10(least))
    return next(factor * power for factor in (1, 2, 5, 10) if factor * power >= least * (1 - 1e-9))


def plot(
    name: str,
    described: str,
    height: int,
    x: Axis,
    x_words: Callable[[float], str],
    left: str,
    *inside: str,
    zooms: bool = False,
) -> str:
    """A plot with the words of its x axis below and what stands to its left.

    Args:
        name: its class.
        described: in a sentence, for those who cannot see it.
        height: of the plot without the axis, in pixels.
        left: the contents of the SVG on the left, `SIDE` pixels wide.
        zooms: whether the script may widen it, to be scrolled.
    """
    axis_words = []
    for i, mark in enumerate(x.marks):
        share = x.share(mark)
        anchor = "start" if share < 0.02 else "end" if share > 0.9 else "middle"
        name_of = "mark odd" if i % 2 else "mark"  # the style leaves these out on a phone
        axis_words.append(text(x_words(mark), x=percent(share), y=height + 18, text_anchor=anchor, class_=name_of))
    picture = element(
        "svg",
        *inside,
        *axis_words,
        class_="chart",
        height=height + 26,
        width="100%",
        role="img",
        tabindex="0",
        aria_label=described,
    )
    side = element("svg", left, class_="side", height=height + 26, width=SIDE, aria_hidden="true")
    wide = element("div", element("div", picture, class_="wide"), class_="scroll", data_zooms="yes" if zooms else None)
    return element("div", side, wide, class_=f"plot {name}")


def grid(x: Axis, y: Axis, height: int) -> str:
    """Lines under a plot, at the marks of both axes."""
    down = (percent(x.share(mark)) for mark in x.marks)
    across = (height * (1 - y.share(mark)) for mark in y.marks)
    return element(
        "g",
        *(element("line", x1=at, x2=at, y1=0, y2=height) for at in down),
        *(element("line", x1="0", x2="100%", y1=at, y2=at) for at in across),
        class_="grid",
    )


def y_words(y: Axis, height: int, words: Callable[[float], str]) -> str:
    """The words of a y axis."""
    return "".join(
        text(
            words(mark),
            x=SIDE - 7,
            y=min(max(height * (1 - y.share(mark)) + 4, 11), height),
            class_="mark",
            text_anchor="end",
        )
        for mark in y.marks
    )


def stretched(height: int, *paths: str) -> str:
    """The SVG element in which paths of `line` and `area` stand."""
    return element(
        "svg",
        *paths,
        x=0,
        y=0,
        width="100%",
        height=height,
        viewBox=f"0 0 {STRETCH} {STRETCH}",
        preserveAspectRatio="none",
    )


def line(points: Iterable[tuple[float, float]], **attributes: object) -> str:
    """A path through points, given as shares of width and height, the latter from below."""
    return element("path", d=f"M{'L'.join(_place(*point) for point in points)}", fill="none", **attributes)


def area(upper: Sequence[tuple[float, float]], lower: Sequence[tuple[float, float]], **attributes: object) -> str:
    """The area between two lines."""
    return element("path", d=f"M{'L'.join(_place(*p) for p in (*upper, *reversed(lower)))}Z", **attributes)


def _place(x: float, y: float) -> str:
    return f"{STRETCH * x:.1f} {STRETCH * (1 - y):.1f}"


def stairs(points: Sequence[tuple[float, float]], end: float) -> list[tuple[float, float]]:
    """Points of a line that keeps each value until the next."""
    found: list[tuple[float, float]] = []
    for i, (at, value) in enumerate(points):
        until = points[i + 1][0] if i + 1 < len(points) else end
        found += [(at, value), (until, value)]
    return found


def legend(entries: Iterable[tuple[str, str]]) -> str:
    """Coloured squares with words; entries are a class and its words."""
    items = (element("li", element("i", class_=f"key {name}"), escape(words)) for name, words in entries)
    return element("ul", *items, class_="legend")
