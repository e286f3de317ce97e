"""Libraries of Inductor whose linker was ended: torchrun ends a rank with all of its children, a compiler among them.

PyTorch writes a library in its place, and removes the folder of its build last. It takes any library that is there. All later
processes of the machine would therefore fail with "file too short".
"""

import os
import struct
import time
from pathlib import Path

from torch._inductor.runtime.runtime_utils import cache_dir  # pyright: ignore[reportPrivateImportUsage]

_BUILD = "_CxxBuild"
_WRITTEN_S = 10.0
"""A file that has not changed for so long is not being written."""
_HEADER_BYTES = 64


def remove_cut_off_libraries() -> list[Path]:
    """Remove those whose build did not end and whose file is too short; returns their paths."""
    found = []
    for build in Path(cache_dir()).glob(f"*/*{_BUILD}"):
        library = build.with_name(build.name.removesuffix(_BUILD) + ".so")
        try:
            if time.time() - library.stat().st_mtime > _WRITTEN_S and _is_cut_off(library):
                library.unlink()
                found.append(library)
        except OSError:  # it is not there, or another rank was faster
            continue
    return found


def _is_cut_off(library: Path) -> bool:
    """The file ends before the table of sections that its ELF header names, or has no header."""
    with library.open("rb") as file:
        header, size = file.read(_HEADER_BYTES), os.fstat(file.fileno()).st_size
    if size < _HEADER_BYTES:
        return True
    sections, each, count = (*struct.unpack_from("=Q", header, 40), *struct.unpack_from("=HH", header, 58))
    return header[:4] == b"\x7fELF" and header[4] == 2 and size < sections + each * count
