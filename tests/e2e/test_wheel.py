"""The wheel that `pip wheel` builds holds all of the package, and works where nothing else of this folder is."""

import tomllib
import zipfile
from pathlib import Path

import pytest

from tests import wheel_smoke


@pytest.mark.slow
def test_a_wheel_works_without_this_folder(tmp_path: Path):
    wheel = wheel_smoke.built(tmp_path)
    root = wheel_smoke.ROOT
    kept = {
        str(path.relative_to(root))
        for suffix in ("py", "cpp", "html", "css", "js", "typed")
        for path in [
            *(root / "autohete_fx").rglob(f"*.{suffix}"),
            *(root / "autohete_fx" / "passes").glob(f"*.{suffix}"),
        ]
    }
    with zipfile.ZipFile(wheel) as file:
        assert {name for name in file.namelist() if ".dist-info/" not in name} == kept
    version = tomllib.loads((root / "pyproject.toml").read_text())["project"]["version"]
    assert wheel_smoke.smoke(wheel, tmp_path).startswith(f"autohete {version} ")
