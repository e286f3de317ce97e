"""Whether values of a memory get into other tensors while a model is built.

In: memory, and tensors that nothing of it is to reach. Out: whether something did, by any operations in between. A number
that a program reads out and writes elsewhere is not seen.
"""

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef

from autohete_fx.internals.modes import TorchDispatchMode

_READS_NOTHING = frozenset(
    "empty_like zeros_like ones_like full_like rand_like randn_like randint_like new_empty new_empty_strided new_zeros new_ones"
    " new_full".split()
)
"""Operators that take a shape, a dtype and a device of a tensor, and none of its values."""


class CopiesOutOf(TorchDispatchMode):
    """Looks at all operations while it is entered.

    Attributes:
        were_made: values got from the memory into a tensor that they are to be kept out of.
    """

    def __init__(self) -> None:
        super().__init__()
        self.were_made = False
        # Weak references, by which memory that is freed and used again is other memory.
        self._read: set[StorageWeakRef] = set()
        self._kept: set[StorageWeakRef] = set()

    def note(self, memory: Tensor) -> None:
        """From now on look at what is read of this memory."""
        self._read.add(_storage(memory))

    def keep_out_of(self, t: Tensor) -> None:
        """From now on nothing of it is to get into a tensor."""
        self.look_at(t)
        self._kept.add(_storage(t))

    def look_at(self, t: Tensor) -> None:
        """Whether a tensor has any of it already."""
        self.were_made = self.were_made or _storage(t) in self._read

    def __torch_dispatch__(
        self, func: Any, types: Sequence[type], args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        result = func(*args, **kwargs)
        if func._schema.name.partition("::")[2] in _READS_NOTHING:
            return result
        given = [*zip(func._schema.arguments, args, strict=False)]
        given += [(each, kwargs[each.name]) for each in func._schema.arguments if each.name in kwargs]
        written = [t for each, value in given if _is_written(each) for t in _tensors(value)]
        if any(_storage(t) in self._read for each, value in given if not _is_written(each) for t in _tensors(value)):
            for t in (*written, *_tensors(result)):
                self.were_made = self.were_made or _storage(t) in self._kept
                self._read.add(_storage(t))
        return result


def _is_written(argument: Any) -> bool:
    return argument.alias_info is not None and argument.alias_info.is_write


def _storage(t: Tensor) -> StorageWeakRef:
    return StorageWeakRef(t.untyped_storage())


def _tensors(value: Any) -> Iterator[Tensor]:
    if isinstance(value, Tensor):
        if value.layout is torch.strided:
            yield value
    elif isinstance(value, list | tuple):
        for each in value:
            yield from _tensors(each)
