"""Code outside of a compiled model that runs between its forward and its backward, such as a loss of logits that it returns.

In: the passes of a training graph within a budget. Out: bytes that this code takes where the plan has no room for them. The next
call is planned for them: they count as a part of the last block's forward, because they are there when that has ended. Where the
code is between two graphs of a call, what it leaves for its own backward counts as activations of that block.
"""

import dataclasses
import logging
import weakref
from collections.abc import Iterable, Sequence
from typing import Any

from torch import Tensor

from autohete_fx.compiler.compilation import Compilation
from autohete_fx.compiler.model import Model
from autohete_fx.compiler.shares import Origin
from autohete_fx.internals import versions
from autohete_fx.internals.tensors import current_graph_task_id
from autohete_fx.ir import BlockCost, Problem
from autohete_fx.ir.sizes import format_bytes
from autohete_fx.planner.model.footprint import traced_peak_bytes
from autohete_fx.runtime.between import Taken
from autohete_fx.runtime.pending import calls

log = logging.getLogger(__name__)

WATCHED = range(1, 3)
"""The passes of a graph that are watched. In the first one, other code compiles."""


class Outside:
    """Watches a graph's passes.

    Args:
        reference: to the model, whose latest forward tells where several graphs run before a backward.
        graph: that runs.
        compilation: its own.
        is_watched: whether it is trained within a budget, by this process alone. Ranks would not plan again together.
    """

    def __init__(
        self, reference: "weakref.ref[Model]", graph: Origin, compilation: Compilation, *, is_watched: bool
    ) -> None:
        self._reference, self._graph, self._compilation = reference, graph, compilation
        self._watched = WATCHED if is_watched else range(0)
        self._passes = 0
        model = reference()
        self._counted = Taken() if model is None else model.taken_outside(graph)

    def begin_forward(self) -> None:
        """Code before it is none between a forward and its backward, if this is one for training. It may be between graphs of one
        call."""
        model = self._reference()
        if not self._compilation.training or model is None:
            return
        if self._passes:
            model.between.go_on(calls.outermost(), self._compilation.plan.peak_bytes)
        else:  # it was compiled since
            model.between.forget()

    def end_forward(self, outputs: Iterable[Tensor]) -> None:
        """The graph's outputs are there."""
        model = self._reference()
        if self._passes >= self._watched.stop or model is None or current_graph_task_id() != -1:
            return
        if self._passes in self._watched:
            call = calls.outermost()
            model.between.begin(model.session.device, outputs, self._note, graph=self._graph, call=call)
        self._passes += 1

    def begin_backward(self, node: Any, arguments: Sequence[Any]) -> None:
        """A backward begins, of an autograd node, with saved tensors and gradients of outputs."""
        model = self._reference()
        if model is not None and model.between.is_watched(self._graph):
            storages = [each.untyped_storage() for each in versions.gradients_given(node, arguments)]
            model.between.end(sum({each.data_ptr(): each.nbytes() for each in storages}.values()))

    def end_backward(self) -> None:
        """The backward is over."""
        model = self._reference()
        if model is not None:
            model.between.go_back(model.session.device)

    def _note(self, taken: Taken, later_bytes: int) -> None:
        model, problem, budget = self._reference(), self._compilation.problem, self._compilation.device_budget_bytes
        assert model is not None and problem is not None and budget is not None
        known = model.taken_outside(self._graph)
        between_bytes = self._compilation.between_bytes + taken.peak_bytes
        needed = max(traced_peak_bytes(problem, self._compilation.plan, between_bytes), later_bytes - known.held_bytes)
        more = Taken(max(taken.peak_bytes, known.peak_bytes), max(taken.held_bytes, known.held_bytes))
        if needed <= budget or more == known:
            return
        model.outside[self._graph] = more
        if known != self._counted:  # the user was told before
            return
        log.warning(
            "code outside of the compiled model takes %s between its forward and its backward, as a loss of large outputs does, or"
            " another model. Eager code at a graph break does so, too. With it a step takes %s, and memory_budget is %s: the model"
            " is planned again for that. Compile a function that runs both to need less",
            format_bytes(taken.peak_bytes),
            format_bytes(needed),
            format_bytes(budget),
        )


def with_outside(costs: Sequence[BlockCost], outside: Taken) -> tuple[BlockCost, ...]:
    """The costs of all blocks, with what code outside takes as a part of the last one's forward, and what it holds as its own."""
    if not outside.peak_bytes or not costs:
        return tuple(costs)
    *others, last = costs
    held = outside.held_bytes
    with_held = dataclasses.replace(
        last,
        saved_bytes=last.saved_bytes + held,
        boundary_bytes=last.boundary_bytes + held,
        partial=tuple(
            (kind, dataclasses.replace(cost, held_bytes=cost.held_bytes + held)) for kind, cost in last.partial
        ),
        forward_workspace_bytes=max(last.forward_workspace_bytes, outside.peak_bytes - held),
        # It is gone when the block's backward begins.
        backward_workspace_bytes=max(0, last.backward_workspace_bytes - held),
    )
    return (*others, with_held)


def saying_outside(problem: Problem, outside_bytes: int, kept_bytes: int) -> Problem:
    """The problem whose refusal says what code outside takes, and outputs that it keeps."""
    found = []
    if outside_bytes:
        found.append(
            f"Code outside of the compiled model takes {format_bytes(outside_bytes)} of that between its forward and its backward:"
            " compile a function that runs both, such as the model and its loss"
        )
    if kept_bytes:
        found.append(
            f"Outputs of the model that live on after its backward take {format_bytes(kept_bytes)} of that: delete them before"
        )
    return dataclasses.replace(problem, obstacles=(*problem.obstacles, *(("outside", why) for why in found)))
