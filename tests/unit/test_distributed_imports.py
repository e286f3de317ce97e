"""``torch.distributed`` is known to the few places that talk to other ranks; all others get values."""

import ast
from pathlib import Path

ROOT = Path(__file__).parents[2]
ALLOWED = (
    "autohete_fx/cluster/",
    "autohete_fx/compiler/agreement.py",
    "autohete_fx/internals/",
    "autohete_fx/machine/net.py",
    "autohete_fx/optim/shards.py",
    "autohete_fx/runtime/lanes/net.py",
    "autohete_fx/runtime/shard/",
)


def importers() -> list[str]:
    found = []
    for path in sorted([*(ROOT / "autohete_fx").rglob("*.py"), *(ROOT / "passes").rglob("*.py")]):
        for node in ast.walk(ast.parse(path.read_text())):
            names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            if isinstance(node, ast.ImportFrom) and node.module:
                names = [f"{node.module}.{alias.name}" for alias in node.names]
            if any(name == "torch.distributed" or name.startswith("torch.distributed.") for name in names):
                found.append(str(path.relative_to(ROOT)))
    return sorted(set(found))


def test_few_places_import_torch_distributed():
    found = importers()
    assert "autohete_fx/runtime/shard/ranks.py" in found
    assert [path for path in found if not path.startswith(ALLOWED)] == []
