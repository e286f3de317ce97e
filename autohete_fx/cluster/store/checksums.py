"""Checksums of the tensors of a part, in a file beside them: a disk may give other bytes than were written, with no error.

Enter a part's tensors by key; leave their CRC-32, which finds any one bit that flipped. PyTorch writes and reads tensors without.
"""

import functools
import json
import logging
import zlib
from collections.abc import Mapping

import torch
from torch import Tensor

log = logging.getLogger(__name__)

FILE = "crc32.json"
"""Its name."""
MARK = "all-names/crc32"
"""The key of an empty tensor that a part with checksums has. A part without it may be of an earlier version, and lack the file.

That version takes the tensor for one more of the entry ``all-names``.
"""


def encoded(tensors: Mapping[str, Tensor]) -> bytes:
    """The file's content: a JSON object with a number for each key."""
    return json.dumps({key: _crc32(tensor) for key, tensor in tensors.items()}, indent=0).encode()


def check(tensors: Mapping[str, Tensor], raw: bytes, path: str, *, is_marked: bool) -> None:
    """Raise ValueError where a tensor in host memory has not the checksum that the file says, or the file is damaged.

    Args:
        tensors: of a part, by key.
        raw: the file's content; empty where there is no file.
        path: of the part.
        is_marked: the part has `MARK`. One without it is read without a file, which the log says once.
    """
    if not raw and not is_marked:
        _warn_unchecked(path)
        return
    said = json.loads(raw) if raw else {}
    for key, tensor in tensors.items():
        if key not in said:
            raise ValueError(f"{key!r} has no checksum in {FILE}, where each tensor had one")
        if said[key] != (found := _crc32(tensor)):
            raise ValueError(
                f"{key!r} has the checksum {found:08x} where {said[key]:08x} was written: its bytes changed"
            )


@functools.cache
def _warn_unchecked(path: str) -> None:
    """Once a part."""
    log.warning("the part %s has no checksums and was read unchecked", path)


def _crc32(tensor: Tensor) -> int:
    return zlib.crc32(tensor.detach().contiguous().reshape(-1).view(torch.uint8).numpy().data)
