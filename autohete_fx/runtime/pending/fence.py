"""The fence: a read or write of memory that is still being updated waits for the update.

``optimizer.step()`` may return while the host still updates parameters. Until those updates are done a function mode stands on
the stack of PyTorch's modes, in the thread that called ``step()``. Every call of PyTorch's Python API passes it, whoever makes
it: an operator, ``state_dict()``, ``torch.save``, ``deepcopy``, ``.numpy()``. A call that is given a tensor over pending memory
waits first: the parameter, an earlier view of it, its gradient or its states. A backward pass waits for everything. Where
updates start in backward the mode stands from forward on: see `autohete_fx.runtime.pending.backward`. Metadata, and setting a
gradient to None, wait for nothing.

The accesses of compiled code are not seen here; see `autohete_fx.runtime.pending.calls`. Nor is what never passes PyTorch's
Python API in
this thread:

* a pointer that was asked for before the step, a NumPy array over a tensor among them;
* TorchScript, whose interpreter calls operators from C++;
* another thread. Tensors given to it must have been read here after the step, as ``model.state_dict()`` does, or it must call
  ``optimizer.synchronize()`` first. A fork waits for all updates that were started before it.

Below the fence stands only the mode of ``torch.set_default_device``, which insists on being the lowest.
"""

import contextlib
import weakref
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from autohete_fx.internals.modes import DeviceContext, function_modes, pop_function_mode, push_function_mode
from autohete_fx.runtime.pending.backward import Early

_PROPERTIES = (
    "_backward_hooks _post_accumulate_grad_hooks _version device dtype grad_fn is_cpu is_cuda is_leaf is_meta"
    " is_nested is_quantized is_sparse itemsize layout name nbytes ndim output_nr retains_grad shape"
)
_METHODS = (
    "dim element_size get_device is_complex is_contiguous is_floating_point ndimension nelement numel register_hook"
    " register_post_accumulate_grad_hook requires_grad_ retain_grad size storage_offset stride"
)


def _metadata() -> frozenset[object]:
    found: set[object] = {torch.numel, torch.is_floating_point, torch.is_complex, torch.get_device}
    for name in (*_PROPERTIES.split(), "grad", "requires_grad"):
        found.add(getattr(Tensor, name).__get__)
    for name in ("grad", "requires_grad", "_backward_hooks", "_post_accumulate_grad_hooks"):
        found |= {getattr(Tensor, name).__set__, getattr(Tensor, name).__delete__}
    return frozenset(found | {getattr(Tensor, name) for name in _METHODS.split()})


_METADATA = _metadata()
"""Functions that read and write no element of the tensors that they are given."""

_BACKWARD = frozenset({Tensor.backward, torch.autograd.backward, torch.autograd.grad})
"""Functions that read and write more than they are given.

They add to gradients, read what forward saved, and run hooks and recomputed forwards of the user's, all below the fence.
"""


class Guarded(Protocol):
    """The owner of memory that something else may be writing, before which a fence stands.

    Attributes:
        early: what started in backward, until a step takes it over.
    """

    early: Early

    @property
    def is_pending(self) -> bool:
        """Whether anything may be under way."""
        ...

    @property
    def needs_fence(self) -> bool:
        """Whether the program must be watched."""
        ...

    def wait_for(self, t: Tensor) -> None:
        """Wait until the memory of ``t`` is up to date."""
        ...

    def wait_all(self) -> None:
        """Wait for all that is under way."""
        ...

    def prune(self) -> None:
        """Let go of what is over."""
        ...


class Fence(TorchFunctionMode):
    """The mode of one model's pending updates. It does not keep them alive."""

    def __init__(self, updates: Guarded) -> None:
        super().__init__()
        self._updates = weakref.ref(updates)

    @property
    def updates(self) -> Guarded | None:
        """Whose memory it guards; None once the model is gone."""
        return self._updates()

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Iterable[type],
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        updates, kwargs = self._updates(), kwargs or {}
        if updates is None or func in _METADATA or not updates.needs_fence:
            return func(*args, **kwargs)
        if func in _BACKWARD:
            updates.wait_all()
            with updates.early.backward(func, args, kwargs):
                return func(*args, **kwargs)
        if not (updates.is_pending or updates.early.is_open):
            return func(*args, **kwargs)
        tensors = list(tensors_in((*args, *kwargs.values())))
        if updates.early.is_open:
            # Version counters tell the rest: of views, of ``out=``. Loss scaling tells none.
            name = getattr(func, "__name__", "")
            written = list(tensors_in(args[:1])) if name.endswith("_") and not name.endswith("__") else []
            with updates.early.watch(tensors, written):
                for t in tensors:
                    updates.wait_for(t)
                return func(*args, **kwargs)
        for t in tensors:
            updates.wait_for(t)
        return func(*args, **kwargs)


def tensors_in(values: Iterable[Any]) -> Iterator[Tensor]:
    """The tensors among values, and in the lists, tuples and dictionaries among them."""
    for value in values:
        if isinstance(value, Tensor):
            yield value
        elif isinstance(value, list | tuple):
            yield from tensors_in(value)
        elif isinstance(value, dict):
            yield from tensors_in(value.values())


@contextlib.contextmanager
def watched(tensors: Callable[[], list[Tensor]], *, but: Collection[Guarded]) -> Iterator[None]:
    """Around a call that gets some tensors: the work of this thread's fences, but for those of the updates in ``but``. For many
    calls below the fences: each look at a property passes them, and an optimizer's step has thousands."""
    others = [updates for fence in standing_fences() if (updates := fence.updates) is not None and updates not in but]
    given = tensors() if others else []
    with contextlib.ExitStack() as stack:
        for updates in others:
            stack.enter_context(updates.early.watch(given, ()))
            for t in given:
                updates.wait_for(t)
        yield


def standing_fences() -> list[Fence]:
    """The fences on this thread's stack."""
    return [mode for mode in _modes() if isinstance(mode, Fence)]


def raise_fences(fences: Iterable[Fence]) -> None:
    """Put fences on this thread's stack, below every mode of the user's."""
    modes = _modes()
    standing = {id(mode) for mode in modes}
    missing = [fence for fence in fences if id(fence) not in standing]
    if missing:
        at = 1 if modes and _is_default_device(modes[0]) else 0
        wanted = [*modes[:at], *missing, *modes[at:]]
        _exchange(wanted, where_interrupted=wanted)


def lower_fences() -> None:
    """Take every fence off this thread's stack."""
    modes = _modes()
    others = [mode for mode in modes if not isinstance(mode, Fence)]
    if len(others) != len(modes):
        _exchange(others, where_interrupted=modes)


def _is_default_device(mode: object) -> bool:
    """Whether the mode is that of ``set_default_device``; that of ``with torch.device`` is pushed as any other is."""
    return isinstance(mode, DeviceContext) and hasattr(mode, "old_device")


def _modes() -> list[Any]:
    """This thread's, lowest first."""
    return function_modes()


def _exchange(wanted: list[Any], *, where_interrupted: list[Any]) -> None:
    """Make the modes of this thread those that are wanted. An interrupt loses none, the user's least of all."""
    try:
        _set_modes(wanted)
    except BaseException:
        _set_modes(where_interrupted)
        raise


def _set_modes(modes: list[Any]) -> None:
    while function_modes():
        pop_function_mode()
    for mode in modes:
        push_function_mode(mode)
