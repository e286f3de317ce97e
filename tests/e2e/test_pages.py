"""The Python of README and of the pages about one device runs as it stands there, for a small model."""

import re
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import autohete_fx

ROOT = Path(__file__).parents[2]


class Model(nn.Module):
    """Two layers; PyTorch up to 2.13 compiles no model whose own class is PyTorch's."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(*[nn.Sequential(nn.Linear(32, 32), nn.GELU(), nn.Linear(32, 32)) for _ in range(2)])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layers(x)


@pytest.mark.parametrize("page", ["README.md", "docs/updates.md", "docs/report.md"])
def test_snippets_run(page: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]):
    """One after another, with a step after each that compiles or makes an optimizer."""
    monkeypatch.chdir(tmp_path)
    torch._dynamo.reset()
    names: dict[str, Any] = {"autohete_fx": autohete_fx, "model": Model()}
    earlier, compilations = autohete_fx.compilations(), autohete_fx.compilations
    monkeypatch.setattr(autohete_fx, "compilations", lambda: tuple(c for c in compilations() if c not in earlier))
    blocks = re.findall(r"^```python\n(.*?)^```$", (ROOT / page).read_text(), flags=re.MULTILINE | re.DOTALL)
    assert blocks
    for block in blocks:
        exec(block, names)
        if not re.search(r"compile\(|optimizer =", block):
            continue
        loss = names["model"](torch.randn(8, 32)).square().mean()
        loss.backward()
        if (optimizer := names.get("optimizer")) is not None:
            optimizer.step()
            optimizer.zero_grad()
    if page == "README.md":
        assert (tmp_path / "plan.json").exists() and "layers.0" in capsys.readouterr().out
    if page == "docs/report.md":
        assert all((tmp_path / "runs" / name / "report.html").exists() for name in "xy")
