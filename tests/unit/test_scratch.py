"""What is counted as the scratch of a kernel is what PyTorch's allocator hands out for it, or more where nothing may run."""

import functools
import gc
from collections.abc import Iterator
from types import MethodType, SimpleNamespace
from typing import Any

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx

from autohete_fx.profiler import CompiledCode, dry_run, trace_memory
from autohete_fx.profiler.memory.probe import Probe, probing
from autohete_fx.profiler.memory.scratch import scratch_bytes, workspace_bytes
from autohete_fx.runtime.meter import device_live_bytes, peak_of

ATEN = torch.ops.aten
DTYPES = (torch.float32, torch.float64, torch.bfloat16)
# sizes of input and weight, stride, padding, dilation, whether transposed, groups
CONVOLUTIONS: dict[str, tuple[Any, ...]] = {
    "3x3": ((2, 64, 16, 16), (64, 64, 3, 3), 1, 1, 1, False, 1),
    "1x1": ((2, 64, 16, 16), (128, 64, 1, 1), 1, 0, 1, False, 1),
    "patches": ((2, 3, 64, 64), (64, 3, 16, 16), 16, 0, 1, False, 1),
    "depthwise": ((2, 16, 16, 16), (16, 1, 5, 5), 1, 2, 1, False, 16),
    "grouped": ((2, 64, 16, 16), (64, 16, 3, 3), 1, 1, 1, False, 4),
    "dilated": ((2, 64, 16, 16), (64, 64, 3, 3), 1, 2, 2, False, 1),
    "transposed": ((2, 64, 8, 8), (64, 32, 2, 2), 2, 0, 1, True, 1),
    "sound": ((2, 1, 4000), (64, 1, 10), 5, 0, 1, False, 1),
    "positions": ((4, 64, 100), (64, 4, 32), 1, 16, 1, False, 16),
    "volume": ((2, 16, 4, 8, 8), (16, 16, 3, 3, 3), 1, 1, 1, False, 1),
}


@pytest.fixture(autouse=True)
def _settled() -> Iterator[None]:
    """No garbage that could be freed in the middle of a measurement, and afterwards as many threads as before."""
    device_live_bytes("cpu")
    gc.collect()
    threads = torch.get_num_threads()
    yield
    torch.set_num_threads(threads)


def measuring(max_bytes: int | None = None) -> Any:
    return probing(Probe("cpu", functools.partial(peak_of, "cpu"), max_bytes))


def taken(target: Any, *args: Any) -> int:
    """The bytes allocated at once that are not among the results."""
    peak, results = peak_of("cpu", lambda: target(*args))
    results = results if isinstance(results, tuple) else (results,)
    return peak - sum(result.untyped_storage().nbytes() for result in results if result is not None)


def fakes(args: tuple[Any, ...]) -> tuple[Any, ...]:
    with FakeTensorMode() as mode:
        return tuple(mode.from_tensor(arg) if isinstance(arg, torch.Tensor) else arg for arg in args)


def convolution(
    name: str, dtype: torch.dtype, memory_format: torch.memory_format = torch.contiguous_format
) -> tuple[tuple[Any, ...], tuple[Any, ...]]:
    """Arguments of a convolution and of its backward."""
    sizes, weight_sizes, stride, padding, dilation, transposed, groups = CONVOLUTIONS[name]
    rank = len(sizes) - 2
    how = ([stride] * rank, [padding] * rank, [dilation] * rank, transposed, [0] * rank, groups)
    source = torch.randn(sizes).to(dtype).contiguous(memory_format=memory_format)
    weight = torch.randn(weight_sizes).to(dtype)
    result = ATEN.convolution(source, weight, None, *how)
    return (source, weight, None, *how), (torch.randn_like(result), source, weight, None, *how, [True, True, False])


def in_turns() -> Iterator[Any]:
    """Every convolution with every type and with one thread and two, and every type with either."""
    for at, name in enumerate(CONVOLUTIONS):
        for also, dtype in enumerate(DTYPES):
            threads = 1 + (at + also) % 2
            marks = [pytest.mark.slow] if dtype is torch.float64 else []
            yield pytest.param(name, dtype, threads, id=f"{name}-{dtype}-{threads}", marks=marks)


@pytest.mark.parametrize(("name", "dtype", "threads"), list(in_turns()))
def test_of_convolutions_it_is_measured_and_never_above_the_bound(name: str, dtype: torch.dtype, threads: int):
    torch.set_num_threads(threads)
    formats = [torch.contiguous_format, *([torch.channels_last] if len(CONVOLUTIONS[name][0]) == 4 else [])]
    for memory_format in formats:
        forward, backward = convolution(name, dtype, memory_format)
        for target, args in ((ATEN.convolution.default, forward), (ATEN.convolution_backward.default, backward)):
            found = taken(target, *args)
            with measuring():
                assert scratch_bytes(target, fakes(args), {}) == found
            bound = scratch_bytes(target, fakes(args), {})
            assert found <= bound, (memory_format, target)
            with measuring(max_bytes=2**12):
                assert scratch_bytes(target, fakes(args), {}) == bound, "the limit forbids to measure"


@pytest.mark.parametrize("threads", [1, 2])
@pytest.mark.parametrize("dtype", [*DTYPES, torch.float16], ids=str)
def test_of_products_it_is_measured_where_no_library_takes_them_as_they_are(dtype: torch.dtype, threads: int):
    torch.set_num_threads(threads)
    wide = torch.randn(256, 512).to(dtype)
    products: list[tuple[Any, tuple[Any, ...]]] = [
        (ATEN.mm.default, (wide, wide.t())),
        (ATEN.mm.default, (wide[:, ::2], wide[:, ::2].t())),
        (ATEN.addmm.default, (wide[0, :256], wide, wide.t())),
        (ATEN.bmm.default, (wide.view(8, 32, 512), wide.view(8, 32, 512).transpose(1, 2))),
        (ATEN.bmm.default, (wide.view(32, 8, 512)[..., ::2], wide.view(32, 8, 512)[..., ::2].transpose(1, 2))),
    ]
    for target, args in products:
        with measuring():
            assert scratch_bytes(target, fakes(args), {}) == taken(target, *args)


def test_nothing_is_measured_that_has_no_right_to_run():
    values = torch.randn(64, 64)
    counts = torch.ones(64, dtype=torch.int64)
    with measuring():
        assert scratch_bytes(ATEN.nonzero.default, fakes((values,)), {}) == 0, "its values say how much it takes"
        assert scratch_bytes(ATEN.t.default, fakes((values,)), {}) == 0, "a view"
        assert scratch_bytes(ATEN.view.default, (*fakes((values,)), [63, 65]), {}) == 0
        assert scratch_bytes(ATEN.native_dropout.default, (*fakes((values,)), 0.5, True), {}) > 0
        drawn = torch.get_rng_state()
        scratch_bytes(ATEN.native_dropout.default, (*fakes((values,)), 0.25, True), {})
        assert torch.equal(torch.get_rng_state(), drawn)
        assert scratch_bytes(ATEN.index.Tensor, (values, [counts + 100]), {}) == 0, "its own indexes are zero"


WRAPPERS = """
def run_forward(self, args):
    x, w = args
    args.clear()
    return torch.convolution(x, w, *how), x, w

def run_backward(self, args):
    x, w, tangent = args
    args.clear()
    return torch.ops.aten.convolution_backward.default(tangent, x, w, *how, [True, True, False])
"""


def compiled(call: Any, *inputs: torch.Tensor) -> CompiledCode:
    """As Inductor leaves it: a function among the names that it uses."""
    runner = SimpleNamespace(call=MethodType(call, object()))
    return CompiledCode(graph=SimpleNamespace(compiled_fn_runner=runner), inputs=fakes(inputs))


def test_a_graph_and_a_dry_run_count_it():
    forward_args, backward_args = convolution("3x3", torch.float64)
    source, weight, *how = forward_args
    grad = backward_args[0]

    def convolved(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        return ATEN.convolution(x, w, *how)

    with measuring():
        graph = make_fx(convolved, tracing_mode="fake")(source, weight)
        [node] = [n for n in graph.graph.nodes if "convolution" in str(n.target)]
        scratch = taken(ATEN.convolution.default, *forward_args)
        in_backward = taken(ATEN.convolution_backward.default, *backward_args)
        assert workspace_bytes(node) == scratch > 4 * source.nbytes
        for inner_backend in ("inductor", "eager"):
            trace = trace_memory(graph, device_type="cpu", inner_backend=inner_backend)
            assert trace.peak_bytes == grad.nbytes + scratch

        names: dict[str, Any] = {"torch": torch, "how": how}
        exec(WRAPPERS, names)
        peak = dry_run(
            compiled(names["run_forward"], source, weight),
            compiled(names["run_backward"], source, weight, grad),
            1,
            device_type="cpu",
        )
    # In backward: the output that the caller keeps, its gradient, and those of the input and the weight.
    assert peak == 2 * grad.nbytes + source.nbytes + weight.nbytes + in_backward


@pytest.mark.parametrize(
    ("runs", "counts"),
    [
        ((64, 64), 64),
        ((0, 64, 64), 64),  # something else was freed the first time
        ((96, 64, 64), 64),  # taken, be it by the library, which keeps it
        ((64, 96, 64, 96, 32), 96),  # threads of the operator that need not meet
        ((1, 2, 3, 4, 5), 5),
    ],
)
def test_the_most_that_two_runs_take_counts(runs: tuple[int, ...], counts: int):
    source = torch.randn(8, 8)
    results = source.nbytes
    remaining = list(runs)

    def told(run: Any) -> tuple[int, Any]:
        return results + remaining.pop(0), run()

    with probing(Probe("cpu", told, None)):
        assert scratch_bytes(ATEN.cumsum.default, fakes((source, 0)), {}) == counts
    assert not remaining
