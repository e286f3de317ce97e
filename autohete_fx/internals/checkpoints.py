"""Readers and writers of distributed checkpoints on any file system that fsspec knows."""

from torch.distributed.checkpoint._fsspec_filesystem import FsspecReader, FsspecWriter

__all__ = ["FsspecReader", "FsspecWriter"]
