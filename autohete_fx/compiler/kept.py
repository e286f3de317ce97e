"""Outputs of a compiled model that live on after its backward, as where a loop has a name for logits.

In: the passes of a training graph within a budget. Out: bytes by which a step with such outputs is above its plan, where that is
above the budget. Plans count an output until its last use in the graph. The next call is planned for what was measured: the next
forward runs beside the old outputs, and a backward beside the new ones.

Cost: two readings of the device's memory, in the few passes that are watched. Like a `MemoryMeter`, each starts the peak over.
"""

import logging
import weakref
from collections.abc import Iterable

import torch
from torch import Tensor

from autohete_fx.compiler.compilation import Compilation
from autohete_fx.compiler.model import Model
from autohete_fx.compiler.outside import WATCHED
from autohete_fx.compiler.parameters import GraphParameters
from autohete_fx.compiler.shares import Origin
from autohete_fx.internals import versions
from autohete_fx.internals.modes import DisableTorchFunction
from autohete_fx.internals.tensors import after_backward, current_graph_task_id
from autohete_fx.ir.sizes import format_bytes
from autohete_fx.optim.others import absent_state_bytes
from autohete_fx.runtime.meter import MemoryMeter, is_counted
from autohete_fx.runtime.pending.addresses import address_of

log = logging.getLogger(__name__)

_FEW = 1 / 1024
"""Of a budget: outputs that take less, such as losses, are not counted."""
_UNSURE = 1 / 64
"""Of a budget: steps begin with a little less than plans count, such as small gradients."""


class KeptOutputs:
    """Watches a graph's passes.

    Args:
        reference: to the model.
        graph: that runs.
        compilation: its own.
        parameters: of the graph.
        is_watched: whether it is trained within a budget, by this process alone. Ranks would not plan again together.
    """

    def __init__(
        self,
        reference: "weakref.ref[Model]",
        graph: Origin,
        compilation: Compilation,
        parameters: GraphParameters,
        *,
        is_watched: bool,
    ) -> None:
        self._reference, self._graph, self._compilation = reference, graph, compilation
        self._parameters = weakref.ref(parameters)  # backwards that are kept must not keep the model
        self._num_passes, self._most_passes = 0, WATCHED.stop if is_watched else 0
        self._outputs: list[tuple[weakref.ref[torch.UntypedStorage], int]] = []
        self._given, self._old_bytes = set[int](), 0
        self._meter: MemoryMeter | None = None
        model = reference()
        self._counted_bytes = 0 if model is None else model.kept_bytes.get(graph, 0)
        self._outside_bytes = 0 if model is None else model.taken_outside(graph).peak_bytes

    def begin_forward(self, inputs: Iterable[Tensor]) -> None:
        """The graph is about to run with these inputs."""
        self._forget()
        model = self._reference()
        if self._num_passes >= self._most_passes or model is None or current_graph_task_id() != -1:
            return
        self._given = {address for each in inputs if (address := address_of(each)) is not None}
        self._old_bytes = _alive_bytes(self._outputs)
        device = model.session.device
        # Beside other graphs, and beside gradients of earlier passes, there is more at its start than its plan says.
        problem = self._compilation.problem
        is_alone = len(model.shares.footprints) == 1 and problem is not None and not problem.accumulates
        if self._num_passes in WATCHED and is_counted(device) and is_alone and self._compilation.levels:
            self._meter = MemoryMeter(device)
            self._meter.__enter__()

    def end_forward(self, outputs: Iterable[Tensor]) -> None:
        """The graph's outputs are there, of which some may be inputs."""
        if self._num_passes < self._most_passes and current_graph_task_id() == -1:
            with DisableTorchFunction():
                found = {address: each for each in outputs if (address := address_of(each)) is not None}
                made = [each.untyped_storage() for address, each in found.items() if address not in self._given]
            self._outputs = [(weakref.ref(each), each.nbytes()) for each in made]
            self._num_passes += 1

    def begin_backward(self) -> None:
        """The graph's backward begins."""
        if self._meter is not None and versions.is_graph_kept():
            self._forget()  # it keeps outputs, whoever has a name for them
        if self._meter is not None:
            after_backward(torch.compiler.disable(self._note))  # Dynamo may convert what runs within a compiled step

    def _note(self) -> None:
        """The backward has ended, and saves nothing any more."""
        model, meter, budget = self._reference(), self._meter, self._compilation.device_budget_bytes
        parameters = self._parameters()
        if model is None or parameters is None or meter is None or budget is None:
            return
        peak_bytes, kept_bytes = meter.peak_bytes, _alive_bytes(self._outputs)
        self._forget()
        if model.taken_outside(self._graph).peak_bytes > self._outside_bytes:
            return  # `outside` has found code that takes more: the next plan counts it, and is watched, too
        # At the start there is what the plan says, and old outputs. The program's own tensors do not count.
        start_bytes = sum(each.num_bytes for each in self._compilation.levels[0].held) - self._counted_bytes
        start_bytes -= absent_state_bytes(parameters.latest.values())
        needed = min(start_bytes + self._old_bytes + peak_bytes - meter.start_bytes, peak_bytes)
        excess = min(needed - self._compilation.plan.peak_bytes, kept_bytes + self._old_bytes)
        if kept_bytes <= budget * _FEW or needed <= budget * (1 + _UNSURE) or excess <= 0:
            return
        log.warning(
            "outputs of a compiled model take %s after its backward, as where a loop has a name for logits. With them a step takes"
            " %s, and memory_budget is %s: the model is planned again for that. Delete them before backward, or return the loss"
            " alone, to need less",
            format_bytes(kept_bytes),
            format_bytes(needed),
            format_bytes(budget),
        )
        model.kept_bytes[self._graph] = self._counted_bytes + excess

    def _forget(self) -> None:
        if self._meter is not None:
            self._meter.__exit__(None, None, None)
            self._meter = None

    def __del__(self) -> None:
        self._forget()


def _alive_bytes(storages: Iterable[tuple["weakref.ref[torch.UntypedStorage]", int]]) -> int:
    return sum(num_bytes for storage, num_bytes in storages if storage() is not None)
