"""Device bytes that compiled code allocates: the wrapper that Inductor wrote, run on fake tensors.

Enter the compiled forward and backward of a step, with example inputs; leaves the peak of both. `liveness` predicts
that before anything is compiled; this reads it off the code that will run, and is the judge of a budget. The wrapper
is a Python function that allocates buffers, calls kernels and deletes buffers. It runs here with its generated kernels left
out and its allocations fake, so that every buffer lives exactly as long as it will. Operators that the wrapper calls
run as fakes too, and what `scratch` says that they take is added. It cannot see memory that kernels take past PyTorch's
allocator.

Tensors without memory have no values. A mask selects all there is, and branches of ``torch.cond`` are run one after the other.
They give tensors of the same sizes, so that what other ones do meanwhile does not matter.
"""

import logging
import re
import types
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from autohete_fx.graph import ops
from autohete_fx.graph.collectives import ISSUING_COLLECTIVES, WAITS, issue_gather_once, result_of
from autohete_fx.graph.sizes import hint
from autohete_fx.internals import versions
from autohete_fx.internals.modes import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    FakeTensor,
    FakeTensorMode,
    TorchDispatchMode,
    disable_current_modes,
)
from autohete_fx.internals.operators import tree_iter
from autohete_fx.profiler.memory.node_kinds import aligned_bytes
from autohete_fx.profiler.memory.scratch import collective_scratch_bytes, scratch_bytes

log = logging.getLogger(__name__)

_CALLED_KERNEL = re.compile(r"(cpp|pallas|cutedsl)_\w+")
_ATEN = torch.ops.aten
_LEFT_OUT = frozenset({"assert_size_stride", "assert_alignment"})


@dataclass(frozen=True, slots=True, kw_only=True)
class CompiledCode:
    """One graph as Inductor compiled it.

    Attributes:
        graph: what Inductor's ``compile_fx_inner`` returned.
        inputs: fake tensors and sizes, in the order of the graph's placeholders.
    """

    graph: Any
    inputs: Sequence[Any]


def dry_run(
    forward: CompiledCode,
    backward: CompiledCode | None,
    num_outputs: int,
    *,
    device_type: str,
    outside_bytes: int = 0,
) -> int | None:
    """Peak device bytes of a forward and the backward that follows it, parameters and inputs not counted.

    Args:
        forward, backward: compiled for one step; no backward in inference.
        num_outputs: leading outputs of ``forward`` that are the caller's; the others are the leading inputs of
            ``backward``.
        device_type: whose memory is meant.
        outside_bytes: what code outside takes between forward and backward.

    Returns None where the code is no Python wrapper (``cpp_wrapper``) or the sizes of its inputs are symbolic. Also where others
    depend on values, with no bound here.
    """
    call, calls_back = _python_call(forward.graph), None if backward is None else _python_call(backward.graph)
    if call is None or (calls_back is None) != (backward is None) or not all(map(_is_sized, forward.inputs)):
        return None
    how = num_outputs, device_type, outside_bytes
    try:
        peak, has_branches = _peak_of(call, calls_back, forward, backward, *how, branch=True)
        if has_branches:
            peak = max(peak, _peak_of(call, calls_back, forward, backward, *how, branch=False)[0])
    except (DataDependentOutputException, DynamicOutputShapeException) as error:
        log.debug("the compiled code cannot be run without memory: %s", error)
        return None
    return peak


def _peak_of(
    call: types.FunctionType,
    calls_back: types.FunctionType | None,
    forward: CompiledCode,
    backward: CompiledCode | None,
    num_outputs: int,
    device_type: str,
    outside_bytes: int,
    *,
    branch: bool,
) -> tuple[int, bool]:
    """The peak where every condition is ``branch``, and whether there was any."""
    with (
        disable_current_modes(),
        FakeTensorMode(allow_non_fake_inputs=True),
        _Allocations(device_type, branch) as memory,
    ):
        outputs = list(_run(call, [memory.fake(value, counted=False) for value in forward.inputs]))
        if backward is None or calls_back is None:
            return memory.peak_bytes, memory.has_branches
        memory.peak_bytes = max(memory.peak_bytes, memory.live_bytes + outside_bytes)
        # What autograd holds between the passes: the caller's outputs stay, the saved tensors go one by one.
        saved, kept = outputs[num_outputs:], outputs[:num_outputs]
        saved.sort(key=lambda value: not isinstance(value, int))  # sizes come first in backward
        del outputs
        # No fake: tracing has made one like it of each, which the compiled code's metadata keeps.
        traced_bytes = sum(value.nbytes for value in saved if _is_generator_state(value) and device_type == "cpu")
        tangents = [memory.fake(value, counted=True) for value in backward.inputs[len(saved) :]]
        # Who calls a loss's backward() holds its gradient until that returns.
        are_held = versions.backward_holds_arguments()
        begins = [each for each in tangents if isinstance(each, torch.Tensor) and (are_held or each.dim() == 0)]
        arguments = [*saved, *tangents]
        del saved, tangents
        gradients = _run(calls_back, arguments)
        del kept, gradients, begins
        return memory.peak_bytes + traced_bytes, memory.has_branches


def _is_generator_state(value: Any) -> bool:
    is_real = isinstance(value, torch.Tensor) and not isinstance(value, FakeTensor)
    return is_real and value.dtype is torch.uint8 and value.dim() == 1


def _is_sized(value: object) -> bool:
    """A number, or a tensor of known sizes."""
    if not isinstance(value, torch.Tensor):
        return not isinstance(value, torch.SymInt)
    return all(isinstance(size, int) for size in (*value.shape, *value.stride()))


def _python_call(graph: Any) -> types.FunctionType | None:
    """The wrapper's function, unbound."""
    call = getattr(getattr(graph, "compiled_fn_runner", None), "call", None)
    function = getattr(call, "__func__", None)
    return function if isinstance(function, types.FunctionType) else None


def _run(call: types.FunctionType, arguments: list[Any]) -> Sequence[Any]:
    own = call.__globals__
    names: dict[str, Any] = dict(own)
    for name, value in own.items():
        if name.startswith("empty_strided"):
            names[name] = _allocator(name.removeprefix("empty_strided_").removesuffix("_pinned"))
        elif name == "reinterpret_tensor":
            names[name] = _reinterpret
        elif name in _LEFT_OUT or _is_kernel(name, value):
            names[name] = _NoKernel()
        elif isinstance(value, types.FunctionType) and value.__globals__ is own:  # of a branch
            names[name] = types.FunctionType(value.__code__, names, name, value.__defaults__)
    runner = types.SimpleNamespace(partitions=[])
    return types.FunctionType(call.__code__, names, call.__name__, call.__defaults__)(runner, arguments)


def _is_kernel(name: str, value: Any) -> bool:
    """Whether it is generated code: a function of C++, or something with ``run``, as Triton's kernels are, the user's own too:
    those have any name, and cannot be called."""
    is_function = _CALLED_KERNEL.fullmatch(name) is not None and callable(value)
    return is_function or (not isinstance(value, types.ModuleType) and callable(getattr(value, "run", None)))


def _allocator(device_type: str) -> Callable[..., torch.Tensor]:
    def allocate(size: Sequence[int], stride: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
        return torch.empty_strided(size, stride, dtype=dtype, device=device_type)

    return allocate


def _reinterpret(tensor: torch.Tensor, size: Sequence[int], stride: Sequence[int], offset: int = 0) -> torch.Tensor:
    return tensor.as_strided(size, stride, tensor.storage_offset() + offset)


def _all_of(mask: torch.Tensor) -> torch.Tensor:
    """What ``nonzero`` gives of a mask that selects all."""
    return mask.new_empty_strided((mask.numel(), mask.dim()), (1, mask.numel()), dtype=torch.int64)


def _selecting_all(indices: Sequence[torch.Tensor | None]) -> list[torch.Tensor | None]:
    """Indices, with the positions of all elements in the place of masks."""
    found: list[torch.Tensor | None] = []
    for index in indices:
        is_mask = index is not None and index.dtype in (torch.bool, torch.uint8)
        found += _all_of(index).unbind(1) if is_mask and index is not None else [index]
    return found


class _NoKernel:
    """A generated kernel that does nothing: called as C++ ones are, or with ``run`` as Triton's are."""

    def __call__(self, *_: object, **__: object) -> None:
        return None

    run = __call__


class _Allocations(TorchDispatchMode):
    """Counts the storages that live, and runs the copy ops as the runtime does: memory is taken where they are issued."""

    supports_higher_order_operators = True

    def __init__(self, device_type: str, branch: bool) -> None:
        super().__init__()
        self.device_type = device_type
        self.branch, self.has_branches = branch, False
        self.live_bytes = self.peak_bytes = 0
        self.known: dict[int, weakref.ref[torch.UntypedStorage]] = {}
        self.arriving: dict[int, torch.Tensor] = {}
        self.gathering: dict[int, tuple[list[torch.Tensor | None], torch.Tensor]] = {}
        self.counting = True

    def fake(self, value: Any, *, counted: bool) -> Any:
        """A fake like ``value``, in memory of its own that counts or that is somebody else's. Numbers are as they are."""
        if not isinstance(value, torch.Tensor):
            return value
        return self._make(value, value.stride(), counted)

    def _make(self, like: torch.Tensor, strides: Sequence[int], counted: bool) -> torch.Tensor:
        self.counting = counted
        try:
            sizes, steps = [hint(size) for size in like.shape], [hint(step) for step in strides]
            made = torch.empty_strided(sizes, steps, dtype=like.dtype, device=like.device)
            self._see(made)
        finally:
            self.counting = True
        return made

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:
        if func in ops.ISSUING_OPS:
            return self._issue(func, args[0])
        if func in ISSUING_COLLECTIVES:
            return self._issue_collective(func, *args[:2])
        if func in WAITS:
            return self._take(*args[:3])
        if func in ops.PASSING_OPS:
            return args[0]
        if func is ops.wait:
            return self.arriving.pop(args[0].untyped_storage()._cdata)
        if func is _ATEN._local_scalar_dense.default and args[0].dtype is torch.bool:
            self.has_branches = True
            return self.branch
        if func is _ATEN.index.Tensor:
            args = (args[0], _selecting_all(args[1]))
        result = _all_of(args[0]) if func is _ATEN.nonzero.default else func(*args, **(kwargs or {}))
        for value in tree_iter(result):
            if isinstance(value, torch.Tensor):
                self._see(value)
        self.peak_bytes = max(self.peak_bytes, self.live_bytes + scratch_bytes(func, args, kwargs or {}))
        return result

    def _issue(self, func: Any, source: torch.Tensor) -> torch.Tensor:
        handle = torch.empty((1,), dtype=torch.int64, device="cpu")
        self._see(handle)
        copy = self._make(source, ops.copied_strides(source), counted=func is not ops.offload)
        self.arriving[handle.untyped_storage()._cdata] = copy
        return handle

    def _issue_collective(self, func: Any, sources: Sequence[torch.Tensor], num_ranks: int) -> torch.Tensor:
        handle = torch.empty((1,), dtype=torch.int64, device="cpu")
        results = [result_of(func, source, num_ranks) for source in sources]
        num_bytes = sum(collective_scratch_bytes(func, (source, num_ranks)) for source in sources)
        taken = torch.empty((num_bytes,), dtype=torch.uint8, device=sources[0].device)
        for each in results:  # of a gather once a step they are the session's, whatever graphs do
            self.counting = func is not issue_gather_once
            self._see(each)
        self.counting = True
        self._see(handle)
        self._see(taken)
        self.gathering[handle.untyped_storage()._cdata] = ([*results], taken)
        return handle

    def _take(self, handle: torch.Tensor, src: torch.Tensor, at: int) -> torch.Tensor:
        """The result of a collective at a position. What it took is free as soon as all results are taken."""
        key = handle.untyped_storage()._cdata
        results, _ = self.gathering[key]
        result, results[at] = results[at], None
        if not any(each is not None for each in results):
            del self.gathering[key]
        assert result is not None
        return result

    def _see(self, tensor: torch.Tensor) -> None:
        """Count a tensor's storage when it appears, until it dies."""
        storage = tensor.untyped_storage()
        key = storage._cdata
        if key in self.known:
            return
        on_device = self.counting and tensor.device.type == self.device_type
        num_bytes = aligned_bytes(storage.nbytes(), self.device_type) if on_device else 0

        def gone(_: object) -> None:
            del self.known[key]
            self.live_bytes -= num_bytes

        self.known[key] = weakref.ref(storage, gone)
        self.live_bytes += num_bytes
        self.peak_bytes = max(self.peak_bytes, self.live_bytes)
