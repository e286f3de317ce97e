"""A wheel in a clean environment: it trains, plans and logs without this folder.

    python tests/wheel_smoke.py [WHEEL]

Without a wheel one is built of this folder. It is installed without its dependencies into a folder of its own, which stands alone
beside the site-packages of this interpreter, whose ``.pth`` files, such as that of an editable installation, are not read.
"""

import os
import shutil
import subprocess
import sys
import sysconfig
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
BUILT_OF = ("autohete_fx", "passes", "pyproject.toml", "README.md", "LICENSE")
TRAINING = """
import sys, torch
from torch import nn

class Layer(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(16), nn.Linear(16, 32), nn.Linear(32, 16)
    def forward(self, x):
        return x + self.down(nn.functional.gelu(self.up(self.norm(x))))

class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(Layer() for _ in range(2))
    def forward(self, x):
        for layer in self.layers:
            x = layer(x)
        return x.square().mean()

def trained(model, optimizer):
    generator = torch.Generator().manual_seed(0)
    losses = []
    for _ in range(3):
        loss = model(torch.randn(4, 16, generator=generator))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.detach())
    return torch.stack(losses)

torch.manual_seed(0)
model, twin = Model(), Model()
twin.load_state_dict(model.state_dict())
expected = trained(twin, torch.optim.SGD(twin.parameters(), lr=0.01, momentum=0.9))
assert not any(name.startswith("autohete_fx.compiler") for name in sys.modules)
model.compile(backend="autohete")  # by its name alone
import autohete_fx
assert autohete_fx.__file__.startswith(sys.argv[1]), autohete_fx.__file__
found = trained(model, autohete_fx.SGD(model.parameters(), lr=0.01, momentum=0.9))
torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)
for param, other in zip(model.parameters(), twin.parameters(), strict=True):
    torch.testing.assert_close(param, other, rtol=1e-4, atol=1e-5)
(compilation,) = autohete_fx.compilations()
assert "layers.1" in compilation.plan.labels
import autohete_fx.cluster, autohete_fx.passes
compilation.report().save(sys.argv[2])
print("trained with torch", torch.__version__)
"""


def built(folder: Path) -> Path:
    """A wheel of this folder."""
    source = folder / "source"
    source.mkdir()
    for name in BUILT_OF:
        if (ROOT / name).is_dir():
            ignored = shutil.ignore_patterns("__pycache__")
            shutil.copytree(ROOT / name, source / name, symlinks=True, ignore=ignored)
        else:
            shutil.copy(ROOT / name, source)
    pip = [sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "--no-index", "--no-build-isolation"]
    subprocess.run([*pip, "--wheel-dir", str(folder), str(source)], check=True)
    (wheel,) = folder.glob("*.whl")
    return wheel


def smoke(wheel: Path, folder: Path) -> str:
    """Install and use it; returns what was printed. Raises where anything fails."""
    clean, run = folder / "clean", folder / "run"
    pip = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--no-index", "--target", str(clean)]
    subprocess.run([*pip, str(wheel)], check=True)
    run.mkdir()
    variables = {
        **os.environ,
        "PYTHONPATH": f"{clean}{os.pathsep}{sysconfig.get_path('purelib')}",
        "AUTOHETE_CACHE_DIR": str(folder / "cache"),
    }

    def python(*arguments: str, **more: str) -> str:
        command = [sys.executable, "-S", *arguments]
        done = subprocess.run(command, cwd=run, env=variables | more, capture_output=True, text=True, check=False)
        assert done.returncode == 0, f"{arguments}\n{done.stderr}"
        return done.stdout + done.stderr

    autohete = str(clean / "bin" / "autohete")
    said = python(autohete, "--version")
    assert "autohete plan" in python(autohete, "plan", "--help")
    # PyTorch 2.11 knows no names of ours yet when it reads TORCH_LOGS.
    logs = {} if "torch 2.11" in said or "torch 2.12" in said else {"TORCH_LOGS": "autohete_plan"}
    trained = python("-c", TRAINING, str(clean), str(run / "report"), **logs)
    assert not logs or "[__autohete_plan]" in trained, trained
    assert "trained with torch" in trained
    assert (run / "report" / "report.html").stat().st_size > 10_000
    assert python(autohete, "report", str(run / "report"))
    return said


def main() -> None:
    with tempfile.TemporaryDirectory() as folder:
        wheel = Path(sys.argv[1]).resolve() if sys.argv[1:] else built(Path(folder))
        print(smoke(wheel, Path(folder)), end="")


if __name__ == "__main__":
    main()
