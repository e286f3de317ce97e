"""Private modules and names of PyTorch are known to one folder, so that a new version of it changes that folder alone."""

import re

from tests.sources import imported

PUBLIC = ("__version__", "__future__")


def test_one_folder_imports_private_names_of_pytorch():
    private = re.compile(r"torch\.(.*\.)?_")
    found = [(path, name) for path, name in imported() if private.match(name) and not name.endswith(PUBLIC)]
    assert any(name.startswith("torch._inductor") for _, name in found)
    assert [each for each in found if not each[0].startswith("autohete_fx/internals/")] == []
