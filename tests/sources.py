"""What the files of this package import."""

import ast
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[1]


def imported() -> Iterator[tuple[str, str]]:
    """Each file of the package and of its passes, with the full name of each thing that it imports, wherever in the file."""
    for path in sorted([*(ROOT / "autohete_fx").rglob("*.py"), *(ROOT / "passes").rglob("*.py")]):
        for node in ast.walk(ast.parse(path.read_text())):
            names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            if isinstance(node, ast.ImportFrom) and node.module:
                names = [f"{node.module}.{alias.name}" for alias in node.names]
            for name in names:
                yield str(path.relative_to(ROOT)), name
