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


CHOOSING = """
def larger(args):
    x, = args
    buf = empty_strided_cuda((1024, 512), (512, 1), torch.float32)
    triton_poi_fused_0.run(x, buf, 262144, stream=None)
    return (x,)

def smaller(args):
    return (args[0],)

def call(self, args):
    x, mask = args
    args.clear()
    if mask.any().item():
        buf0 = larger([x])
    else:
        buf0 = smaller([x])
    buf1 = torch.ops.aten.nonzero.default(mask)
    u0 = buf1.size(0)
    if not (u0 <= 512):
        raise RuntimeError('u0 <= 512')
    del buf1
    buf2 = torch.ops.aten.index.Tensor(buf0[0], [mask])
    return (buf2,)
"""


def test_a_mask_selects_all_and_both_branches_are_run():
    with FakeTensorMode():
        x, mask = torch.empty(512, 512, device="cuda"), torch.empty(512, dtype=torch.bool, device="cuda")
    largest = dry_run(compiled(CHOOSING, x, mask), None, 1, device_type="cuda")
    assert largest is not None and 2 * MIB <= largest < 2 * MIB + 8192, "the branch takes more than the selected rows"
    smallest = CHOOSING.replace("1024", "256")
    selected = dry_run(compiled(smallest, x, mask), None, 1, device_type="cuda")
    assert selected is not None and MIB <= selected < MIB + 16384
    number = CHOOSING.replace("mask.any().item()", "mask.sum().item()")
    assert dry_run(compiled(number, x, mask), None, 1, device_type="cuda") is None
