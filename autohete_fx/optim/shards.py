"""The norm of gradients that ranks hold together, for a step that clips.

In: the gradients of a step, of which some are this rank's shards, and their parameters. Out: the norm of all of them as one
process would take it. Squares of shards are added up over ranks, and gradients that every rank has count once. One all-reduce
for each set of ranks, whether or not this rank has a gradient, so that no rank waits for another one's.
"""

from collections.abc import Callable, Sequence

import torch.distributed as dist
from torch import Tensor

from autohete_fx.runtime.lanes.net import all_reduce
from autohete_fx.runtime.shard.parts import part_of
from autohete_fx.runtime.shard.tensor_parallel import groups_of_parts

NormOf = Callable[[Sequence[Tensor], Sequence[Tensor | None]], Tensor]
"""From gradients, and the known norms of single ones, to the norm of all."""


def _names(groups: Sequence[dist.ProcessGroup]) -> tuple[str, ...]:
    return tuple(group.group_name for group in groups)


def total_norm(
    params: Sequence[Tensor],
    grads: dict[Tensor, Tensor],
    known: dict[Tensor, Tensor | None],
    norm_of: NormOf,
) -> Tensor:
    """The norm of all gradients.

    Args:
        params: of the optimizer, in its order, also those without a gradient.
        grads: those that there are, by parameter.
        known: their norms, as far as they are known, by parameter.
        norm_of: takes the norm of gradients on this rank.
    """
    groups = {names: found for p in params if (found := groups_of_parts(p)) and (names := _names(found))}

    def local(of: Sequence[Tensor]) -> Tensor:
        return norm_of([grads[p] for p in of], [known[p] for p in of])

    present = [p for p in params if p in grads]
    if not groups:
        return local(present)
    alone = local([p for p in present if not groups_of_parts(p)])
    total, dtype = alone.double().square(), alone.dtype
    part = next((part for p in params if (part := part_of(p)) is not None), None)
    for names, over in groups.items():
        mine = [p for p in present if _names(groups_of_parts(p)) == names]
        norm = local(mine)
        squares = norm.double().square().to(mine[0].device if mine else params[0].device)
        for group in over:
            all_reduce(squares, group, among=None if part is None else part.ranks.control)
        total, dtype = squares + total.to(squares.device), norm.dtype if mine else dtype
    return total.sqrt().to(dtype)
