"""Code that Dynamo has compiled is dropped, also while it compiles that code once more."""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, fx
from torch._dynamo.eval_frame import _debug_get_cache_entry_list

from autohete_fx.internals import dynamo
from autohete_fx.internals.compiled_code import forget_compiled
from autohete_fx.runtime.pending import watching


def test_memory_of_code_that_is_being_compiled_stays_and_what_is_in_it_serves_no_more() -> None:
    watching.watch()
    found: list[int] = []

    def doubled(x: Tensor) -> Tensor:
        return x * 2

    def backend(gm: fx.GraphModule, inputs: Sequence[Any]) -> Callable[..., Any]:
        code = dynamo.code_being_compiled()
        assert code is doubled.__code__
        found.append(len(_debug_get_cache_entry_list(code)))
        forget_compiled(code)
        assert len(_debug_get_cache_entry_list(code)) == found[-1], "Dynamo goes on with their memory"
        return gm.forward

    compiled = torch.compile(doubled, backend=backend, dynamic=False)
    for size in (3, 4, 3, 4, 4):
        assert torch.equal(compiled(torch.ones(size)), torch.full((size,), 2.0))
    assert found == [0, 1, 2, 3], "each compilation forgot those before it, and the last call found the last one"
    forget_compiled(doubled.__code__)
    assert _debug_get_cache_entry_list(doubled.__code__) == []
    assert torch.equal(compiled(torch.ones(4)), torch.full((4,), 2.0))
    assert found[-1] == 0, "outside of a compilation nothing is left"
