"""Checksums of the tensors of a part, in a file beside them: a disk may give other bytes than were written, with no error.

Enter a part's tensors by key; leave their CRC-32, which finds any one bit that flipped. PyTorch writes and reads tensors without.
"""

import json
import zlib
from collections.abc import Mapping

import torch
from torch import Tensor

FILE = "crc32.json"
"""Its name. A part that lacks it was written by an earlier version, and is not checked."""


def encoded(tensors: Mapping[str, Tensor]) -> bytes:
    """The file's content: a JSON object with a number for each key."""
    return json.dumps({key: _crc32(tensor) for key, tensor in tensors.items()}, indent=0).encode()


def check(tensors: Mapping[str, Tensor], raw: bytes) -> None:
    """Raise ValueError where a tensor in host memory has not the checksum that the file says, or the file is damaged.

    An empty file says nothing, as a machine may have lost its power between writing and keeping it.
    """
    said = json.loads(raw) if raw else {}
    for key, tensor in tensors.items():
        if key in said and said[key] != (found := _crc32(tensor)):
            raise ValueError(
                f"{key!r} has the checksum {found:08x} where {said[key]:08x} was written: its bytes changed"
            )


def _crc32(tensor: Tensor) -> int:
    return zlib.crc32(tensor.detach().contiguous().reshape(-1).view(torch.uint8).numpy().data)
