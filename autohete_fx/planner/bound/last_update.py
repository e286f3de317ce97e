"""The rows of the block that is updated last on the host, where updates start in backward and the most urgent goes first.

No block gathers or reduces there. A gather waits for its block's update while the block before works, which makes tails shorter.

Let j be the last block. The rows of `updates` have R[j], when all of 0..j are updated, and j starts no sooner. After that what
was updated last has to go up, and the blocks from it on work before j. A block's tail says how long that takes at least,

    t[b,l] = the copy up of b's place l + w[b] + .. + w[j-1],

with the least w of each block. Let L[b,l] be 1 if b is the last, and updated on the host as l says. There is one for each of the
LAST_BLOCKS before and with j. N is 1 if another is the last, or none. Its tail t is the least of the others' tails and of all w.
No tail is taken for longer than that sum: blocks all work after backward, whatever was updated.

    N + sum over b and l of L[b,l] = 1,  L[b,l] <= y[b,l],   Q[j] >= R[j] + t N + sum of t[b,l] L[b,l]

A block after b is less urgent than b, and its gradients land before those of b. If b is the last, then each block c > b that is
updated on the host was done before b's gradients landed. Else b would have gone first, and c would be later. With h[c] the work of
c's update, and H[c] the most that it may be,

    g[b] >= g[c] + h[c] - H[c] (1 - sum of L[e,l] over e = b..c-1 and l).

A large last block, such as a head, thus is the last itself, or the gradients before it are late. Those of j-1 cannot be. Its copies
up, u, are issued where backward begins, right after j's own. Nothing else is under way then, and nothing is waited for at j's
end. With w and d for backward's work and copies of gradients, the gradients of j-1 land after those of j by at most

    max(0, w[j-1] - d[j] + max(0, u[j-1] - w[j])) + d[j-1],

where those of j-1 are what they may be beside all other lanes.

Where the update of j takes longer under place l, whatever else j and j-1 choose, j-1 is not the last:

    sum of L[j-1,m] over m <= 1 - y[j,l]     summed over all such l
"""

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray
from ortools.sat.python import cp_model

from autohete_fx.planner.bound.gathering import GatheringRows
from autohete_fx.planner.bound.variables import Linear
from autohete_fx.planner.model.work import (
    BACKWARD_PASS,
    GRADIENTS_LANE,
    UPDATES_LANE,
    Work,
    updating_pass,
)

LAST_BLOCKS = 4
_ROUNDED = 8
"""Ticks that sums of a few rounded figures may be off."""


class LastUpdateRows(GatheringRows):
    """Rows about the tail of a step, beside the choices of a problem."""

    @property
    def knows_last_update(self) -> bool:
        """Whether the rows hold."""
        gathers = any(map(self._gathers, (updating_pass(self.problem), BACKWARD_PASS)))
        return self.problem.schedule.priority and not self.updates_begin_together and not gathers

    def _add_last_update(self, landed: Sequence[Linear]) -> Linear:
        """Rows of the last update; returns the ticks from R[j] until j starts, at least."""
        tails, other = self._tails()
        none, add = self.model.new_bool_var("N"), self.model.add
        last: dict[int, list[cp_model.IntVar]] = {}
        terms, weights = [none], [other]
        for block, tail in tails.items():
            options = np.flatnonzero(self.waiting[block])
            last[block] = [self.model.new_bool_var(f"L[{block},{option}]") for option in options]
            for option, variable in zip(options, last[block], strict=True):
                add(variable <= self.chosen[block][option])
                terms.append(variable)
                weights.append(int(tail[option]))
        add(sum(terms) == 1)
        for block in tails:
            for later in range(block + 1, self.num_blocks):
                update = self._sum([later], (Work.HOST_UPDATE,))
                most = int(self._ticks(later, (Work.HOST_UPDATE,)).max())
                before = sum(variable for b in range(block, later) for variable in last[b])
                add(landed[block] >= landed[later] + update - most + most * before)
        end = self.num_blocks - 1
        if long := [self.chosen[end][option] for option in self._longer_than_before()]:
            add(sum(last[end - 1]) + sum(long) <= 1)
        return cp_model.LinearExpr.weighted_sum(terms, weights)

    def _longer_than_before(self) -> list[int]:
        """The places of the last block whose updates are not over when the gradients of the block before it land."""
        if self.num_blocks == 1:
            return []
        end, up, down = (
            self.num_blocks - 1,
            BACKWARD_PASS.of(UPDATES_LANE.before),
            BACKWARD_PASS.of(GRADIENTS_LANE.after),
        )
        work_before, up_before, down_before = (
            self._most(end - 1, works) for works in (BACKWARD_PASS.computes, up, down)
        )
        late = work_before + max(0, up_before - self._least(end, BACKWARD_PASS.computes))
        gradients, updates = self._ticks(end, down), self._ticks(end, (Work.HOST_UPDATE,))
        longer = updates > np.maximum(0, late - gradients) + down_before + _ROUNDED
        return [int(option) for option in np.flatnonzero(self.waiting[end] & longer)]

    def _tails(self) -> tuple[dict[int, NDArray[np.int64]], int]:
        """By block, of the last ones, the tail of each option; and of all others the least."""
        kind, work, other = updating_pass(self.problem), 0, self.horizon
        tails: dict[int, NDArray[np.int64]] = {}
        end = self.num_blocks - 1
        for block in range(end, -1, -1):
            if block < end:
                work += self._least(block, kind.computes)
            tail = work + self._ticks(block, (*kind.of(UPDATES_LANE.before), Work.UPLOAD))
            if end - block < LAST_BLOCKS:
                tails[block] = tail
            else:
                other = min(other, int(tail[self.waiting[block]].min(initial=other)))
        return {block: np.minimum(tail, work) for block, tail in tails.items()}, min(other, work)
