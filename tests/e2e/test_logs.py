"""What a compilation says in a process of its own: a line a stage, the texts of ``TORCH_LOGS``, and artifacts for tlparse."""

import json
import os
import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).parents[2]
ARTIFACTS = ("plan", "graph", "schedule", "memory")
IS_REGISTERED_EARLY = torch.torch_version.TorchVersion(torch.__version__) >= "2.13"  # else by set_logs alone
SCRIPT = """
import logging, sys, torch
if sys.argv[1:]:
    from autohete_fx.internals import logs
    logs.register()
    torch._logging.set_logs(modules={"autohete": logging.DEBUG})
assert not any(name.startswith("autohete_fx.compiler") for name in sys.modules)
from tests.tiny_models import GPT
model, ids = GPT(depth=2), torch.zeros(2, 6, dtype=torch.int64)
model.compile(backend="autohete", options={"inner_backend": "eager", "profile": "analytic"})
model(ids).sum().backward()
"""


@pytest.fixture
def installed(tmp_path: Path) -> Path:
    """A folder with the entry points of pyproject.toml, whatever is installed."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    metadata = tmp_path / f"autohete_fx-{project['version']}.dist-info"
    metadata.mkdir()
    (metadata / "METADATA").write_text(f"Metadata-Version: 2.1\nName: autohete_fx\nVersion: {project['version']}\n")
    groups = [
        f"[{group}]\n" + "".join(f"{name} = {target}\n" for name, target in points.items())
        for group, points in project["entry-points"].items()
    ]
    (metadata / "entry_points.txt").write_text("\n".join(groups))
    return tmp_path


@pytest.mark.slow
def test_a_fresh_process_logs_and_traces_all_of_it(installed: Path, tmp_path: Path):
    variables = {**os.environ, "PYTHONPATH": f"{installed}{os.pathsep}{ROOT}", "TORCH_TRACE": str(tmp_path / "trace")}
    if IS_REGISTERED_EARLY:
        variables["TORCH_LOGS"] = "+autohete"
    command = [sys.executable, "-c", SCRIPT, *([] if IS_REGISTERED_EARLY else ["set_logs"])]
    done = subprocess.run(command, capture_output=True, text=True, env=variables, check=False)
    assert done.returncode == 0, done.stderr
    for name in ARTIFACTS:
        assert f"[__autohete_{name}]" in done.stderr
    for told in (
        r"^V.*passes/base.py:\d+\] .*nodes$",
        r"^I.*report/stages.py:\d+\] .*tracing .* 2 layers of 1 kind$",
        r"^I.*report/stages.py:\d+\] .*planning .* predicts steps of ",
        r"\[__autohete_plan\] predicted step ",
        r"\[__autohete_memory\] peak ",
    ):
        assert re.search(told, done.stderr, flags=re.MULTILINE), told
    found = artifacts_in(tmp_path / "trace")
    graphs = {f"{graph}_graph{when}" for graph in ("forward", "backward") for when in ("", "_before")}
    assert found.keys() == {"plan", "schedule", "memory"} | graphs
    assert len(json.loads(found["plan"])["labels"]) == 4
    assert "aten." in found["forward_graph"]


def artifacts_in(folder: Path) -> dict[str, str]:
    """Ours in the one structured trace of a folder, by the ends of their names."""
    (log,) = folder.iterdir()
    found = {}
    for record in re.split(r"^(?=V\d{4} )", log.read_text(), flags=re.MULTILINE)[1:]:
        head, _, payload = record.partition("\n")
        name = json.loads(head[head.index("{") :]).get("artifact", {}).get("name", "")
        if name.startswith("autohete_"):
            found[name.removeprefix("autohete_")] = re.sub(r"^\t", "", payload, flags=re.MULTILINE)
    return found
