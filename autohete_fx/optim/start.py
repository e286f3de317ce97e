"""Start one update while backward runs.

In: a parameter, the home that its gradient is on the way to, and what earlier micro-batches have collected in ``.grad``.
Tickets say what must be complete before any of them may be touched. Out: the update under way, or None where it is left to
``step()``. The optimizer may start its updates there, or still collect gradients. It may not have stepped yet since it was made
or loaded, so that states are to be created and kernels to be compiled first. Or ``.grad`` is in memory that the CPU does not
update from, or host memory is short.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from autohete_fx.errors import HostMemoryError
from autohete_fx.ir import Overlap
from autohete_fx.optim.in_place import Update
from autohete_fx.optim.owners import optimizer_of
from autohete_fx.optim.rule import Rule
from autohete_fx.optim.state import is_settled, state_placement_of
from autohete_fx.optim.updates import frozen, is_read_in_place, prepared, start
from autohete_fx.runtime.lanes.ticket import Ticket
from autohete_fx.runtime.pending.backward import Consumed


def start_update(
    param: Tensor, home: Tensor, collected: Tensor | None, after: Sequence[Ticket], priority: int
) -> Consumed | None:
    """Start the update of ``param`` with the gradient in ``home``, added to what was collected, after the tickets. See
    `runtime.early.Starter`."""
    optimizer, placement = optimizer_of(param), state_placement_of(param)
    pending, tier = placement.updates, placement.tier
    if (
        optimizer is None
        or not optimizer.starts_in_backward
        or pending is None
        or tier is None
        or placement.is_streamed
    ):
        return None
    group, state = optimizer.group_of(param), optimizer.state.get(param, {})
    overlaps = pending.schedule.overlap is Overlap.BACKWARD and pending.lanes.in_background and tier.owns(home)
    if group is None or not overlaps:
        return None
    rule = optimizer.rule_of(param)
    if not is_settled(rule, param, state, placement):
        return None
    grad, addend = (home, None) if collected is None else (collected, home)
    # What is written behind the program's back counts once, now.
    update = Update(rule, param, grad.data, state, frozen(group), placement, addend=addend)
    if collected is not None and not is_read_in_place(update, pending.lanes):
        return None
    try:
        ready = prepared([update], pending.lanes, optimizer.host_copies)
    except HostMemoryError:
        return None
    if collected is not None:
        torch.autograd.graph.increment_version(collected)
    version = grad._version
    start(ready, pending, after=after, priority=priority)
    states = tuple(t for t in state.values() if isinstance(t, Tensor))
    return Consumed(param, grad.detach(), version, states, update.group)


def check_group(rule: Rule, consumed: Consumed, group: dict[str, object]) -> None:
    """Raise OptimizerStateError where a hyperparameter is no longer what the update computed with."""
    now = frozen(group)
    for name in rule.names:
        if consumed.hyperparameters[name] != now[name]:
            raise consumed.error(f"{name} was changed from {consumed.hyperparameters[name]} to {now[name]}")
