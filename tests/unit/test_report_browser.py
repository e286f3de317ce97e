"""The page in a browser: headless Chromium draws it on a desk and on a phone, in the light and in the dark, and tries its script.

Skipped where there is no Chromium; the environment variable CHROMIUM names one that is not on the path.
"""

import json
import os
import re
import shutil
import subprocess
from html import escape, unescape
from pathlib import Path
from typing import Any

import pytest

from autohete_fx.report.saved import Report
from tests.report_data import report_data

NAMES = ("chromium", "chromium-browser", "google-chrome", "chrome-headless-shell", "chromium-headless-shell")
CHROMIUM = os.environ.get("CHROMIUM") or next(filter(None, map(shutil.which, NAMES)), None)
pytestmark = pytest.mark.skipif(CHROMIUM is None, reason="there is no Chromium; set CHROMIUM to its path")

PARTS = ("memory", "lanes", "decisions", "budget", "reasons", "errors", "compilation")
LOOK = """<script>
const found = { parts: {}, hints: [], wide: document.documentElement.scrollWidth, window: window.innerWidth };
for (const part of document.querySelectorAll("section")) {
  const box = part.getBoundingClientRect(), chart = part.querySelector(".chart");
  found.parts[part.id] = { width: box.width, height: box.height, chart: chart ? chart.getBoundingClientRect().width : 0 };
}
for (const chart of document.querySelectorAll(".chart")) {
  chart.focus();
  chart.dispatchEvent(new KeyboardEvent("keydown", { key: "ArrowRight", bubbles: true }));
  const hint = document.getElementById("hint");
  const box = hint.getBoundingClientRect();
  found.hints.push({ hidden: hint.hidden, words: hint.textContent, left: box.left, right: box.right });
}
document.dispatchEvent(new KeyboardEvent("keydown", { key: "Escape" }));
found.hiddenAfter = document.getElementById("hint").hidden;
const range = document.querySelector(".zoom input");
const before = document.querySelector("#lanes .chart").getBoundingClientRect().width;
range.value = 2;
range.dispatchEvent(new Event("input"));
found.zoomed = document.querySelector("#lanes .chart").getBoundingClientRect().width / before;
range.value = 0;
range.dispatchEvent(new Event("input"));
found.ground = getComputedStyle(document.body).backgroundColor;
found.ink = getComputedStyle(document.body).color;
window.parent.document.getElementById("found").textContent = JSON.stringify(found);
</script></body>"""
FRAME = """<!doctype html><body style="margin: 0"><pre id="found" hidden></pre>
<iframe style="border: 0; width: {width}px; height: {height}px" srcdoc="{page}"></iframe></body>"""
"""Chromium has no windows narrower than 500 pixels; a frame in one is as narrow as a phone."""


def look(folder: Path, html: str, width: int, height: int, *, dark: bool) -> Any:
    """What the page says of itself in a window of that size; a screenshot is beside it."""
    page = folder / "looked.html"
    inner = escape(html.replace("</body>", LOOK))
    page.write_text(FRAME.format(width=width, height=height, page=inner), encoding="utf-8")
    assert CHROMIUM is not None
    finished = subprocess.run(
        [
            CHROMIUM,
            *("--headless", "--no-sandbox", "--disable-gpu", "--hide-scrollbars"),
            f"--user-data-dir={folder / 'profile'}",
            f"--blink-settings=preferredColorScheme={0 if dark else 1}",
            f"--window-size={max(width, 500)},{height}",
            f"--screenshot={folder / 'page.png'}",
            "--dump-dom",
            page.as_uri(),
        ],
        capture_output=True,
        text=True,
        timeout=120,
    )
    found = re.search(r'<pre id="found"[^>]*>(.*?)</pre>', finished.stdout, flags=re.S)
    assert found and found[1], f"the script of the page ended early: {finished.stderr}"
    return json.loads(unescape(found[1]))


@pytest.mark.parametrize(("width", "dark"), [(1160, False), (390, True)], ids=["desk-light", "phone-dark"])
def test_every_part_is_drawn_and_answers(tmp_path: Path, width: int, dark: bool):
    found = look(tmp_path, Report(data=report_data(12)).html, width, 2600, dark=dark)
    assert found["window"] == width and found["wide"] <= width, "nothing sticks out of the window"
    assert set(found["parts"]) == set(PARTS)
    assert all(part["height"] > 60 and part["width"] > 0.85 * width - 60 for part in found["parts"].values())
    assert all(
        found["parts"][name]["chart"] > 0.5 * width for name in ("memory", "lanes", "decisions", "budget", "errors")
    )
    assert len(found["hints"]) == 5
    for hint in found["hints"]:
        assert not hint["hidden"] and len(hint["words"]) > 10 and hint["left"] >= 0 and hint["right"] <= width
    assert found["hiddenAfter"] and found["zoomed"] == pytest.approx(4, rel=0.05)
    ground, ink = (sum(map(int, re.findall(r"\d+", found[name])[:3])) for name in ("ground", "ink"))
    assert (ground < ink) is dark
    assert (tmp_path / "page.png").read_bytes()[:4] == b"\x89PNG" and (tmp_path / "page.png").stat().st_size > 20_000


def test_a_plan_of_a_hundred_blocks_is_drawn(tmp_path: Path):
    found = look(
        tmp_path, Report(data=report_data(100, is_measured=False, with_reasons=False)).html, 1160, 2600, dark=False
    )
    assert set(found["parts"]) == set(PARTS) and found["wide"] <= 1160
    assert "planned" in found["hints"][1]["words"] or "waits" in found["hints"][1]["words"]
