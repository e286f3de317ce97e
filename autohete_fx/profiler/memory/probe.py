"""Scratch memory of single ATen operators, measured: each runs by itself, a few times, on real tensors like the fake ones given.

Enter an operator and its arguments; leave the bytes that it takes from PyTorch's allocator beside its results. Which algorithm
a library chooses, and what that takes, no shape tells. An Intel CPU divides a product in 16 bits otherwise than an AMD one, and
cuDNN asks its heuristics. Whoever compiles within a budget says with `probing` how allocations are counted and how much a
measurement may take. Elsewhere nothing runs, and `scratch` goes by formulas.
"""

import contextlib
from collections.abc import Callable, Iterator
from contextvars import ContextVar
from typing import Any

import torch

from autohete_fx.graph.sizes import hint, num_bytes
from autohete_fx.internals.operators import OpOverload, tree_leaves, tree_map
from autohete_fx.profiler.memory.node_kinds import extent_bytes
from autohete_fx.profiler.timed_graph import outside_tracing, real_input

PeakOf = Callable[[Callable[[], Any]], tuple[int, Any]]
"""Runs something; the most bytes that were taken meanwhile, above those at its start, and its result."""

_active: ContextVar["Probe | None"] = ContextVar("autohete_probe", default=None)
_MOST_RUNS = 5
"""Of an operator, until two runs in turn take the same; the most that two of them take counts.

Other threads may take or free memory meanwhile, and so may finalizers. The first time, libraries try algorithms and take what
they keep.
"""
_SIZES_BY_VALUE = (torch.Tag.dynamic_output_shape, torch.Tag.data_dependent_output)


class Probe:
    """Measurements of one compilation. An operator with the same sizes, strides and arguments is measured once.

    Attributes:
        was_held_back: whether the limit has forbidden any.

    Args:
        device_type: whose operators are measured.
        peak_of: counts allocations.
        max_bytes: what a measurement may take, its inputs included, as far as that can be told before; None for no limit.
    """

    def __init__(self, device_type: str, peak_of: PeakOf, max_bytes: int | None) -> None:
        self._device_type = device_type
        self._peak_of = peak_of
        self._max_bytes = max_bytes
        self._known: dict[object, int | None] = {}
        self.was_held_back = False

    def scratch_bytes(self, target: object, args: Any, kwargs: Any, expected_bytes: int | None) -> int | None:
        """Bytes that the operator takes beside its results.

        Args:
            target: the operator, and what it is called with; of tensors only sizes, strides and types count.
            expected_bytes: what it may well take, where that is more than its inputs do.

        Returns None where it cannot be measured. Its values decide how much it takes, the limit forbids it, or it refuses
        inputs of random floats and integers that are zero.
        """
        if not isinstance(target, OpOverload) or target.namespace != "aten":
            return None
        tensors = _tensors((args, kwargs))
        if not self._can_run(target, tensors):
            return None
        key = (str(target), repr(tree_map(_described, (args, kwargs))))
        if key not in self._known:
            inputs = sum(extent_bytes(t, self._device_type) for t in tensors)
            needed = 2 * inputs if expected_bytes is None else inputs + max(map(num_bytes, tensors)) + expected_bytes
            fits = self._max_bytes is None or needed <= self._max_bytes
            self.was_held_back |= not fits
            self._known[key] = self._measured(target, args, kwargs) if fits else None
        return self._known[key]

    def _can_run(self, target: OpOverload, tensors: list[torch.Tensor]) -> bool:
        infos = [each.alias_info for each in target._schema.returns]
        is_view = any(info is not None and not info.is_write for info in infos)
        if not tensors or is_view or any(tag in target.tags for tag in _SIZES_BY_VALUE):
            return False
        if any(t.device.type != self._device_type or t.layout is not torch.strided for t in tensors):
            return False
        # An index that is out of bounds is an error on a CPU, and the end of the process on CUDA.
        return self._device_type == "cpu" or all(t.is_floating_point() for t in tensors)

    def _measured(self, target: OpOverload, args: Any, kwargs: Any) -> int | None:
        found: list[int] = []
        with outside_tracing():
            try:
                real_args, real_kwargs = tree_map(_real, (args, kwargs))
                own = {_address(t) for t in _tensors((real_args, real_kwargs))}
                while len(found) < 2 or (found[-1] != found[-2] and len(found) < _MOST_RUNS):
                    peak_bytes, result = self._peak_of(lambda: target(*real_args, **real_kwargs))
                    made = {_address(t): t.untyped_storage().nbytes() for t in _tensors(result)}
                    found.append(max(0, peak_bytes - sum(made[address] for address in made.keys() - own)))
                    del result
            except (RuntimeError, IndexError, ValueError):  # what it wants of its inputs, or more memory than there is
                return None
        return max((each for each in found if found.count(each) > 1), default=max(found))


@contextlib.contextmanager
def probing(probe: Probe | None) -> Iterator[None]:
    """Within it, `current` is ``probe``."""
    token = _active.set(probe)
    try:
        yield
    finally:
        _active.reset(token)


def current() -> Probe | None:
    """The probe that measures, or None where nothing may run."""
    return _active.get()


def _tensors(values: Any) -> list[torch.Tensor]:
    return [value for value in tree_leaves(values) if isinstance(value, torch.Tensor)]


def _address(tensor: torch.Tensor) -> int:
    return tensor.untyped_storage().data_ptr()


def _described(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return (str(value.dtype), [hint(s) for s in value.shape], [hint(s) for s in value.stride()])
    return hint(value) if isinstance(value, torch.SymInt) else value


def _real(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return real_input(value, value.device)
    return hint(value) if isinstance(value, torch.SymInt) else value
