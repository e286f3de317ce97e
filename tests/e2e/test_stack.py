"""Calls of what compiles, which Python's stack has room for."""

import resource
from collections.abc import Sequence

import torch
from torch import Tensor, fx

CALLS = 1000


def most_faults(depths: int) -> int:
    """Of loops of calls that begin at each of some depths, the most page faults that one has."""

    def called() -> None: ...

    called.__code__ = called.__code__.replace(co_stacksize=64)  # does not fit where a frame of the other one does not

    def deeper(depth: int) -> int:
        before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
        for _ in range(CALLS):
            called()
        own = resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before
        return max(own, deeper(depth - 1)) if depth else own

    return deeper(depths)


def test_no_call_of_a_compilation_maps_memory_for_its_frame():
    found = []

    def backend(gm: fx.GraphModule, inputs: Sequence[Tensor]) -> fx.GraphModule:
        found.append(most_faults(300))
        return gm

    torch.compile(torch.sin, backend="autohete", options={"inner_backend": "eager"})(torch.ones(2))  # hooks into Dynamo
    torch.compile(torch.cos, backend=backend)(torch.ones(2))
    assert found[0] < CALLS / 2, "Python maps a chunk of its stack at each call"
