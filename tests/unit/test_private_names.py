"""Private modules and names of PyTorch are known to one folder, so that a new version of it changes that folder alone."""

import ast
import re
from pathlib import Path

ROOT = Path(__file__).parents[2]
PUBLIC = ("__version__", "__future__")


def private_imports() -> list[str]:
    """Each as the file and what it imports."""
    found = []
    for path in sorted([*(ROOT / "autohete_fx").rglob("*.py"), *(ROOT / "passes").rglob("*.py")]):
        for node in ast.walk(ast.parse(path.read_text())):
            names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            if isinstance(node, ast.ImportFrom) and node.module:
                names = [f"{node.module}.{alias.name}" for alias in node.names]
            for name in names:
                if re.match(r"torch\.(.*\.)?_", name) and not name.endswith(PUBLIC):
                    found.append(f"{path.relative_to(ROOT)}: {name}")
    return found


def test_one_folder_imports_private_names_of_pytorch():
    found = private_imports()
    assert any(": torch._inductor" in each for each in found)
    assert [each for each in found if not each.startswith("autohete_fx/internals/")] == []
