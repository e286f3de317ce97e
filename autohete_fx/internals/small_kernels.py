"""Small kernels from Inductor, without Dynamo: no guard, no recompilation, no interference with the user's ``torch._dynamo`` state.

In: a function of flat tensors of one length, which writes its results into its arguments. Out: compiled code that takes a list of
such tensors of any length (from 2 to `LONGEST`).

Where a kernel for a CPU has values of 16 bits, whole vectors of them are taken. Inductor would take as many values as a vector of
fp32 has, and load and store half a vector of 16-bit ones under a mask. A load close after such a store waits for it: an update in
place then takes up to twice the time.
"""

import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from contextvars import ContextVar
from typing import Any

import torch
from torch import Tensor

LONGEST = 1 << 30
"""Most elements of one call: 32-bit indices suffice."""

Kernel = Callable[[list[Tensor]], Any]

_USUAL_LENGTH = 1 << 18


def compile_kernel(
    function: Callable[..., tuple[()]],
    dtypes: Sequence[torch.dtype],
    device: torch.device,
    *,
    fixed: Sequence[tuple[int, torch.dtype]] = (),
    row: int | None = None,
    settings: Mapping[str, Any] | None = None,
) -> Kernel:
    """Compile for one device.

    Args:
        function: takes the flat tensors, then the fixed ones.
        dtypes: of the flat tensors.
        fixed: lengths and dtypes of further arguments, whose length is always the same.
        row: lengths are always a multiple of this, which the compiler then knows.
        settings: of Inductor's configuration.
    """
    # Inductor is a slow import that not every training needs.
    from torch._dynamo.source import ConstantSource
    from torch._guards import TracingContext, tracing
    from torch._inductor import config
    from torch._inductor.compile_fx import compile_fx_inner
    from torch._inductor.decomposition import select_decomp_table
    from torch._inductor.virtualized import V
    from torch._subclasses.fake_tensor import FakeTensorMode
    from torch.fx.experimental.proxy_tensor import make_fx
    from torch.fx.experimental.symbolic_shapes import DimDynamic, ShapeEnv, StatelessSymbolicContext

    fake_mode = FakeTensorMode(shape_env=ShapeEnv())
    # Training may be at its peak when a kernel is first needed: nothing here takes memory of the device.
    example = fake_mode.from_tensor(
        torch.empty(_USUAL_LENGTH, device="meta"),
        symbolic_context=StatelessSymbolicContext(dynamic_sizes=[DimDynamic.DYNAMIC]),
        source=ConstantSource("first"),
    )
    with fake_mode:
        any_length = example.shape[0]
        shape = (any_length,) if row is None else (any_length, row)
        inputs = [torch.empty(shape, dtype=dtype, device=device) for dtype in dtypes]
        inputs += [torch.empty(length, dtype=dtype, device=device) for length, dtype in fixed]
        graph = make_fx(function, decomposition_table=select_decomp_table())(*inputs)
    # The user's own Inductor passes are meant for the user's graphs.
    patches = {"post_grad_custom_pre_pass": None, "post_grad_custom_post_pass": None, **(settings or {})}
    narrow = next((dtype for dtype in dtypes if device.type == "cpu" and dtype.itemsize == 2), None)
    wide = nullcontext() if narrow is None else _whole_vectors_of(narrow)
    with fake_mode, V.set_fake_mode(fake_mode), tracing(TracingContext(fake_mode)), config.patch(patches), wide:
        compiled: Any = compile_fx_inner(graph, inputs, cpp_wrapper=config.cpp_wrapper)
    if row is None:
        return compiled
    return lambda tensors: compiled([*(t.view(-1, row) for t in tensors[: len(dtypes)]), *tensors[len(dtypes) :]])


_narrow: ContextVar[torch.dtype | None] = ContextVar("_narrow", default=None)
"""Of the kernel that this thread compiles."""


@contextmanager
def _whole_vectors_of(dtype: torch.dtype) -> Iterator[None]:
    """Loops of the kernels that this thread compiles meanwhile take as many elements at once as a vector of this dtype has.

    Inductor's cache keeps these kernels apart from others.
    """
    from torch.compiler import config

    _let_tiling_be_chosen()
    before = _narrow.set(dtype)
    try:
        with config.patch(  # pyright: ignore[reportAttributeAccessIssue]
            cache_key_tag=f"{config.cache_key_tag} whole vectors of {dtype}"
        ):
            yield
    finally:
        _narrow.reset(before)


@functools.cache
def _let_tiling_be_chosen() -> None:
    """Once and for good: other threads compile meanwhile, for which nothing changes."""
    from torch._inductor.codegen.cpp import TilingSelect
    from torch._inductor.cpu_vec_isa import pick_vec_isa

    select = TilingSelect.select_tiling

    @functools.wraps(select)
    def selected(self: Any, *args: Any, **how: Any) -> Any:
        factors, *others = select(self, *args, **how)
        narrow = _narrow.get()
        if narrow is not None:
            factors = [pick_vec_isa().nelements(dtype=narrow) for _ in factors]
        return factors, *others

    TilingSelect.select_tiling = selected
