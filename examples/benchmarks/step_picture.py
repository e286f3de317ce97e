"""The README's picture of a step: the lanes of a run that `step_timeline.py` kept, as an SVG for light and for dark pages.

    python examples/benchmarks/step_picture.py            # draw docs/step-light.svg and docs/step-dark.svg again

In: ``results/step_timeline.json``. Out: the same bytes from the same file. A row is a lane, a colour a block, a letter what is
done; bars too narrow for it have none. Copies of a block that follow each other without a pause are one bar. What is none of a
block, such as the sums by which edits are found, is left out.
"""

import argparse
import json
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from xml.sax.saxutils import escape

ROOT = Path(__file__).resolve().parents[2]
DATA = Path(__file__).resolve().parent / "results" / "step_timeline.json"

LANES = {
    "compute": "the device computes",
    "h2d": "copies to the device",
    "d2h": "copies to the host",
    "update": "the host updates",
}
LETTERS = {
    "backward": "b",
    "forward": "f",
    "parameters": "p",
    "activations": "a",
    "gradients": "g",
    "states": "s",
    "updated": "n",
    "update": "u",
}
NAMES = {
    "backward": "backward",
    "forward": "forward",
    "parameters": "parameters",
    "activations": "activations",
    "gradients": "gradients",
    "states": "optimizer states",
    "updated": "new parameters",
    "update": "update",
}
COLOURS = ("#8ab6f9", "#6fd0e3", "#72d9ae", "#a6d96a", "#e6d25a", "#f7b05b", "#f58f78", "#d79ce8")
"""Of blocks, in their order; black is readable on all."""

WIDTH, LEFT, RIGHT, TOP, ROW, BAR = 820, 158, 12, 44, 42, 26
_PAUSE_S = 0.004
_LETTER_WIDTH = 17
_FONT = "-apple-system, 'Segoe UI', Helvetica, Arial, sans-serif"


@dataclass(frozen=True)
class Theme:
    """Colours of all but the blocks."""

    text: str
    faint: str
    row: str
    edge: str


THEMES = {
    "light": Theme(text="#1f2328", faint="#59636e", row="#f1f3f5", edge="#57606a"),
    "dark": Theme(text="#f0f6fc", faint="#9198a1", row="#1c2128", edge="#0d1117"),
}


def main() -> None:
    """Draw both."""
    argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter).parse_args()
    run = json.loads(DATA.read_text())["rows"]
    for name, theme in THEMES.items():
        path_of(name).write_text(draw(run, theme))


def path_of(theme: str) -> Path:
    """Where a picture is."""
    return ROOT / "docs" / f"step-{theme}.svg"


def draw(run: Mapping[str, Any], theme: Theme) -> str:
    """The picture of a run."""
    span_s = run["step s"]
    scale = (WIDTH - LEFT - RIGHT) / span_s
    bars = [
        bar for lane in LANES for bar in merged([b for b in run["bars"] if b["lane"] == lane and b["what"] in NAMES])
    ]
    bottom = TOP + ROW * len(LANES)
    title = f"The lanes of one training step of {span_s:.2f} s on an emulated machine"
    return "\n".join(
        [
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {bottom + 82}" font-family="{_FONT}" role="img">',
            f"<title>{title}</title>",
            *_rows(theme),
            *_phases(bars, run["optimizer.step() s"], theme, scale, bottom),
            *(_bar(bar, theme, scale) for bar in bars),
            *_axis(span_s, theme, scale, bottom),
            *_legend(run["labels"], {bar["what"] for bar in bars}, theme, bottom + 44),
            "</svg>\n",
        ]
    )


def merged(bars: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Of one lane: those of one block that follow each other and are alike, as one."""
    found: list[dict[str, Any]] = []
    for bar in bars:
        last = found[-1] if found else None
        alike = last and all(last[key] == bar[key] for key in ("what", "block"))
        if last and alike and bar["begin s"] - last["end s"] < _PAUSE_S:
            last["end s"] = bar["end s"]
        else:
            found.append(dict(bar))
    return found


def _rows(theme: Theme) -> Iterator[str]:
    for number, (lane, what) in enumerate(LANES.items()):
        top = TOP + ROW * number
        yield f'<rect x="{LEFT}" y="{top}" width="{WIDTH - LEFT - RIGHT}" height="{ROW - 6}" fill="{theme.row}"/>'
        yield _text(LEFT - 10, top + 16, lane, theme.text, size=14, anchor="end", weight="bold")
        yield _text(LEFT - 10, top + 31, what, theme.faint, size=12, anchor="end")


def _phases(
    bars: Sequence[Mapping[str, Any]], stepped_s: float, theme: Theme, scale: float, bottom: float
) -> Iterator[str]:
    """Over the lanes: the backward of a step, the call that ends it, and the forward of the next."""
    forward = LEFT + scale * min(bar["begin s"] for bar in bars if bar["what"] == "forward")
    step = LEFT + scale * stepped_s
    yield _text((LEFT + step) / 2, TOP - 12, "backward of one step", theme.text, size=13, anchor="middle")
    yield _text((forward + WIDTH - RIGHT) / 2, TOP - 12, "forward of the next", theme.text, size=13, anchor="middle")
    yield f'<path d="M{step:.1f} {TOP - 24}V{bottom}" stroke="{theme.faint}" stroke-dasharray="4 3" fill="none"/>'
    yield _text(step, TOP - 30, "optimizer.step()", theme.faint, size=12, anchor="middle", family="monospace")


def _bar(bar: Mapping[str, Any], theme: Theme, scale: float) -> str:
    left, width = LEFT + bar["begin s"] * scale, max(0.8, (bar["end s"] - bar["begin s"]) * scale)
    top = TOP + ROW * list(LANES).index(bar["lane"]) + (ROW - 6 - BAR) / 2
    fill, hint = COLOURS[bar["block"] % len(COLOURS)], f"{NAMES[bar['what']]}, block {bar['block']}"
    line = f'stroke="{theme.edge}" stroke-width="0.6"' if width > 3 else ""
    shape = (
        f'<rect x="{left:.1f}" y="{top:g}" width="{width:.1f}" height="{BAR}" rx="2" fill="{fill}" {line}>'
        f"<title>{hint}</title></rect>"
    )
    if width < _LETTER_WIDTH:
        return shape
    letter = f"{LETTERS[bar['what']]}{bar['block']}"
    return shape + _text(left + width / 2, top + BAR / 2 + 4, letter, "#111", size=12, anchor="middle")


def _axis(span_s: float, theme: Theme, scale: float, bottom: float) -> Iterator[str]:
    tick_s = 0.5 if span_s > 1.2 else 0.2
    for number in range(int(span_s / tick_s) + 1):
        at = LEFT + number * tick_s * scale
        yield f'<path d="M{at:.1f} {bottom - 4}v6" stroke="{theme.faint}" fill="none"/>'
        yield _text(at, bottom + 15, f"{number * tick_s:.1f} s", theme.faint, size=12, anchor="middle")


def _legend(labels: Sequence[str], drawn: Collection[str], theme: Theme, top: float) -> Iterator[str]:
    at = 12.0
    for number, label in enumerate(labels):
        yield f'<rect x="{at:g}" y="{top - 10}" width="12" height="12" rx="2" fill="{COLOURS[number % len(COLOURS)]}"/>'
        words = f"{number} {label}"
        yield _text(at + 17, top, words, theme.text, size=12)
        at += 34 + 6.6 * len(words)
    at = 12.0
    for what in (what for what in LETTERS if what in drawn):
        yield _text(at, top + 24, LETTERS[what], theme.text, size=12, weight="bold")
        yield _text(at + 12, top + 24, NAMES[what], theme.text, size=12)
        at += 36 + 6.3 * len(NAMES[what])


def _text(
    x: float, y: float, words: str, fill: str, *, size: int, anchor: str = "", weight: str = "", family: str = ""
) -> str:
    given = {"text-anchor": anchor, "font-weight": weight, "font-family": family}
    more = "".join(f' {name}="{value}"' for name, value in given.items() if value)
    return f'<text x="{x:.1f}" y="{y:g}" font-size="{size}" fill="{fill}"{more}>{escape(words)}</text>'


if __name__ == "__main__":
    main()
