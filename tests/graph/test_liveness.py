"""Live bytes of small graphs, worked out by hand."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import fx
from torch.fx.experimental.proxy_tensor import make_fx

import autohete_fx.graph.ops  # registers the ops that passes insert
from autohete_fx.internals import versions
from autohete_fx.profiler import trace_memory, trace_step
from autohete_fx.profiler.memory.liveness import MemoryTrace

ROW = 64 * 1024 * 4  # bytes of one float32 tensor of the size that most tests use


def traced(function: Callable[..., Any], *inputs: torch.Tensor) -> fx.GraphModule:
    gm = make_fx(function, tracing_mode="fake")(*inputs)
    gm.graph.eliminate_dead_code()
    return gm


def trace(function: Callable[..., Any], *inputs: torch.Tensor, inner_backend: str = "inductor") -> MemoryTrace:
    return trace_memory(traced(function, *inputs), device_type="cpu", inner_backend=inner_backend)


@pytest.fixture
def x() -> torch.Tensor:
    return torch.empty(64, 1024)


def square() -> torch.Tensor:
    return torch.empty(1024, 1024)


def test_eager_holds_every_value_until_its_last_use(x: torch.Tensor) -> None:
    found = trace(lambda x: x.exp().sin().cos(), x, inner_backend="eager")
    assert found.live_bytes == (ROW, 2 * ROW, 2 * ROW)
    assert found.after_bytes == (ROW, ROW, ROW)
    assert (found.peak_bytes, found.end_bytes, found.start_bytes) == (2 * ROW, ROW, 0)


def test_fused_pointwise_chains_have_no_intermediates(x: torch.Tensor) -> None:
    found = trace(lambda x: x.exp().sin().cos(), x)
    assert found.live_bytes == (ROW,)


def test_views_are_counted_once(x: torch.Tensor) -> None:
    def function(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        y = x + 1
        return y.t(), y.view(-1)[5:]

    for inner_backend in ("eager", "inductor"):
        assert trace(function, x, inner_backend=inner_backend).end_bytes == ROW


def test_views_of_inputs_take_nothing(x: torch.Tensor) -> None:
    assert trace(lambda x: (x.t(), x.view(-1)), x).peak_bytes == 0


def test_products_need_their_inputs_in_memory(x: torch.Tensor) -> None:
    found = trace(lambda x, w: (x.sin() @ w).cos(), x, square())
    # sin, product, cos: the last is written over the product
    assert found.live_bytes == (ROW, 2 * ROW, ROW)
    assert found.contributors[0].num_bytes == ROW and len(found.contributors) == 2


def test_no_writing_in_place_over_what_two_results_read(x: torch.Tensor) -> None:
    def function(x: torch.Tensor, w: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        y = x @ w
        return y.sin(), y.cos()

    assert trace(function, x, square()).peak_bytes == 3 * ROW


def test_a_reduction_is_a_buffer_and_its_operand_is_not(x: torch.Tensor) -> None:
    found = trace(lambda x: x.exp().sum(-1), x)
    assert found.peak_bytes == 64 * 4


def test_a_dead_buffer_is_released_where_keeping_it_would_raise_the_peak(x: torch.Tensor) -> None:
    wide = torch.empty(1024, 4096)

    def function(x: torch.Tensor, w: torch.Tensor, wide: torch.Tensor) -> torch.Tensor:
        y = x @ w
        z = y @ wide  # four rows
        return (z @ wide.t()) @ w

    found = trace(function, x, square(), wide)
    assert found.peak_bytes == 5 * ROW
    assert found.end_bytes == ROW


@pytest.mark.parametrize("issue", [autohete_fx.graph.ops.prefetch, autohete_fx.graph.ops.reload])
def test_a_copy_to_the_device_is_in_memory_from_its_issue_on(issue: torch._ops.OpOverload, x: torch.Tensor) -> None:
    def early(host: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        handle = issue(host, "s", 1, 0)
        return (x @ x.t()) @ torch.ops.autohete.wait(handle, host, "s")

    def late(host: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        y = x @ x.t()
        return y @ torch.ops.autohete.wait(issue(host, "s", 1, 0), host, "s")

    small = 64 * 64 * 4
    for function, first in ((early, ROW), (late, small)):
        found = trace(function, torch.empty(64, 1024), x)
        assert found.live_bytes[0] == first
        assert found.peak_bytes == 2 * ROW + small


def test_a_copy_to_the_host_takes_nothing_and_holds_its_source_until_the_wait(x: torch.Tensor) -> None:
    def function(x: torch.Tensor, w: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        y = x @ w
        handle = torch.ops.autohete.offload(y, "s", 2, 0)
        z = y @ w
        u = z @ w
        return u, torch.ops.autohete.wait(handle, y, "s")

    found = trace(function, x, square())
    assert found.end_bytes == ROW
    assert found.live_bytes == (ROW, ROW, 2 * ROW, 3 * ROW, 2 * ROW)


def test_saved_tensors_die_in_backward_after_their_last_use(x: torch.Tensor) -> None:
    def first(x: torch.Tensor, w: torch.Tensor) -> tuple[torch.Tensor, ...]:
        y = x @ w
        z = y @ w
        return z.sum(), y, z, w

    def second(y: torch.Tensor, z: torch.Tensor, w: torch.Tensor, tangent: torch.Tensor) -> torch.Tensor:
        return (z @ w) @ (y.t() @ w[:64])

    def loss(y: torch.Tensor) -> torch.Tensor:
        return torch.empty(())

    found = trace_step(
        traced(first, x, square()), traced(second, x, x, square(), loss(x)), 1, device_type="cpu", inner_backend="eager"
    )
    assert found.forward.end_bytes == 2 * ROW + 4
    assert found.backward is not None
    assert found.backward.start_bytes == 2 * ROW + 4  # the gradient of the loss
    assert found.peak_bytes == max(found.forward.peak_bytes, found.backward.peak_bytes)
    # the gradient and z die with the first product, y with the second: the result is left, and what PyTorch 2.11 holds
    assert found.backward.end_bytes == ROW + 4 * versions.backward_holds_arguments()


def test_outputs_that_the_loss_does_not_depend_on_have_gradients_too(x: torch.Tensor) -> None:
    def first(x: torch.Tensor, w: torch.Tensor) -> tuple[torch.Tensor, ...]:
        logits = x @ w
        return logits.sum(), logits, w

    def second(w: torch.Tensor, tangent: torch.Tensor, logits_tangent: torch.Tensor) -> torch.Tensor:
        return (logits_tangent + tangent) @ w

    graphs = traced(first, x, square()), traced(second, square(), torch.empty(()), x)
    for inner_backend in ("eager", "inductor"):
        found = trace_step(*graphs, 2, device_type="cpu", inner_backend=inner_backend)
        assert found.backward is not None
        assert found.backward.start_bytes == ROW + 4


def test_saved_views_hold_their_whole_base_once(x: torch.Tensor) -> None:
    def first(x: torch.Tensor, w: torch.Tensor) -> tuple[torch.Tensor, ...]:
        y = x @ w
        left, right = y.split(512, -1)
        return y.sum(), left, right

    def second(left: torch.Tensor, right: torch.Tensor, tangent: torch.Tensor) -> torch.Tensor:
        return left + right

    half = torch.empty(64, 1024)[:, :512]
    found = trace_step(traced(first, x, square()), traced(second, half, half, torch.empty(())), 1, device_type="cpu")
    assert found.backward is not None
    assert found.backward.start_bytes == ROW + 4


def test_tensors_of_another_device_take_nothing(x: torch.Tensor) -> None:
    gm = traced(lambda x: (x.exp() @ x.t()).sin(), x)
    assert trace_memory(gm, device_type="cuda").peak_bytes == 0


def test_a_dynamic_graph_is_traced_through_hints_without_guards(x: torch.Tensor) -> None:
    gm = make_fx(lambda x: (x.exp() @ x.t()).sin(), tracing_mode="symbolic")(x)
    shape_env = next(n for n in gm.graph.nodes if n.op == "placeholder").meta["val"].shape[0].node.shape_env
    guards = len(shape_env.guards)
    found = trace_memory(gm, device_type="cpu")
    assert found.peak_bytes == ROW + 64 * 64 * 4
    assert len(shape_env.guards) == guards
