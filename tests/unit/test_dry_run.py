"""The wrapper that Inductor writes for a GPU, run without one: its kernels are Triton's, its tensors fake."""

from types import MethodType, SimpleNamespace
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from autohete_fx.profiler import CompiledCode, dry_run

MIB = 2**20


class TritonKernel:
    """As Inductor's: it has ``run``, and cannot be called."""

    def run(self, *args: object, stream: int) -> None:
        raise AssertionError(f"a kernel was launched with {args}")


def compiled(source: str, *inputs: torch.Tensor) -> CompiledCode:
    """As Inductor leaves it: a function among the names that it uses."""
    names: dict[str, Any] = {"torch": torch, "triton_poi_fused_0": TritonKernel(), "users_own_kernel_0": TritonKernel()}
    names |= {"empty_strided_cuda": None, "extern_kernels": torch, "get_raw_stream": lambda device: 0}
    exec(source, names)
    runner = SimpleNamespace(call=MethodType(names["call"], object()))
    return CompiledCode(graph=SimpleNamespace(compiled_fn_runner=runner), inputs=inputs)


FORWARD = """
def call(self, args):
    x, weight = args
    args.clear()
    stream0 = get_raw_stream(0)
    buf0 = empty_strided_cuda((512, 512), (512, 1), torch.float32)
    triton_poi_fused_0.run(x, buf0, 262144, stream=stream0)
    buf1 = empty_strided_cuda((512, 512), (512, 1), torch.float32)
    extern_kernels.mm(buf0, weight, out=buf1)
    del buf0
    users_own_kernel_0.run(buf1, 262144, stream=stream0)
    return (buf1, x)
"""

BACKWARD = """
def call(self, args):
    x, tangent = args
    args.clear()
    buf0 = empty_strided_cuda((512, 512), (512, 1), torch.float32)
    triton_poi_fused_0.run(tangent, x, buf0, 262144, stream=get_raw_stream(0))
    del tangent
    return (buf0, None)
"""


def test_triton_kernels_are_left_out_whatever_their_names():
    with FakeTensorMode():
        x, weight, tangent = (torch.empty(512, 512, device="cuda") for _ in range(3))
    forward, backward = compiled(FORWARD, x, weight), compiled(BACKWARD, x, tangent)
    # In backward: the output that the caller keeps, the tangent, and the gradient.
    assert dry_run(forward, backward, 1, device_type="cuda") == 3 * MIB
