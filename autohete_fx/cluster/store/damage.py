"""The error of a part of a save that cannot be read: cut off by a crash, or on a disk that fails."""

from autohete_fx.errors import ClusterError

_CUT_SHORT = "unexpected pos"
"""PyTorch's writer of files says it, once the file system has refused bytes."""


class PartError(ClusterError):
    """A part of a save could not be read.

    Args:
        path: of the part.
        cause: the error.
    """

    def __init__(self, path: str, cause: BaseException) -> None:
        super().__init__(
            f"the part {path!r} could not be read: {words_of(cause)}. Expected was a whole one. Remove it, or give a place that has"
            " another"
        )
        self.path, self.cause = path, words_of(cause)


def words_of(error: BaseException) -> str:
    """An error's last line, which says most, or its type; without the full stop."""
    if isinstance(error, PartError):
        return error.cause
    words = next(iter(str(error).strip().splitlines()[::-1]), type(error).__name__).rstrip(".")
    return f"{words}: the file could not be written whole, as on a full disk" if _CUT_SHORT in words else words
