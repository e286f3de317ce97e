"""The rows of updates: when lanes are done with them, and when what they copy up is there.

In come when the last backward and its gradients have landed, out come variables for which a pass waits. Letters are those of
`formulation`.

Time of the updates (`UpdateRows._add_updates`), from the end of the last backward on. V is when the device has done its own, which
is one sum. R[b] is when the update lane has done blocks 0..b, with h[b] its work, and P[b] the sum of h[0..b]. It may begin at
g[b]. Where updates start in backward, that is when the gradients are there, D of backward. Else it is when backward ends (on a
CPU device V).

    V >= end of backward + sum over b of device update[b]
    R[b] >= R[b-1],   R[b] >= g[b] + P[b]                         the most urgent block first

The second is the last of 0..b to come and to find the lane busy with them from then on: later ones go first. Without
priority blocks are updated as gradients come: R[b] >= R[b+1] + h[b], R[b] >= g[b] + h[b].

K[b] is when the lane has done those of 0..b after whose updates parameters go up. A forward fetches all that are at home, so K is R
there. A synchronous schedule uploads those on the device, and nothing but the end of all updates waits for others. The sum of
y[b,l] over places that upload is p[b], and k[b] is the work of their updates. H[b] is the most work of other places of 0..b,
beside whatever slows them down. Then
there are (`UpdateRows._add_uploaded`), with g for K[-1] and R[-1],

    K[b] >= K[b-1] + k[b],   K[b] >= R[b-1] + k[b] - H[b-1] (1 - p[b])

With whole numbers K[b] is R of the last of 0..b that uploads, which the second row says there. Without streamed states the pass
has nothing but uploads after their updates, so R stands for K. Whatever waits for an update that uploads nothing is then either an
upload, which comes after it anyway, or the end.

Kernels of the device's updates read and write parameters at home over the link, for l[b] of their seconds. Copies stand still
meanwhile. L is the sum of l, and copies of updates go on when backward has ended for so long.

Where a forward waits for updates, streamed states go home from then on, z[i] each, before anything else goes down.
Z[i] is when those of 0..i are there (`UpdateRows._add_way_home`):

    Z[-1] >= end of backward + L,   Z[i] >= Z[i-1] + z[i]

Copies up of updates may go in what time the up lane has left (`figures.sends_at_once`), and no pass issues them. Blocks that
were updated on the host go when their update ends, streamed states from the end of backward on. Copies up of what was updated on
the host are v[i], those of states s[i], and those that the forward issues u[i]. S[i] is the end of all copies up of blocks 0..i,
after backward's and L. Q[i] is when those of 0..i are there that i waits for (`UpdateRows._add_copies_at_once`):

    Q[i] >= R[i] by priority,   Q[i] >= S[i]
    Q[i] >= Q[i-1],   Q[i] >= g[i] + v[0] + .. + v[i],   Q[i] >= g[i] + h[i] + v[i]
    Q[i] >= end of backward + L + u[0] + s[0] + .. + u[i] + s[i]

They bound the simulator. A block i starts no sooner than 0..i are updated and copied. The gradients of i land first among theirs,
so none of v[0..i] begins before g[i]; v[i] follows the update of i. No states go up before the end of backward, and what the
forward issues goes not before it begins, which is later. One lane thus copies all of these from then on. The up lane has done all
of S[i] since backward began, or ended, if updates do not begin before. Where its copies were done before L, S[i] ends before V,
for which i waits anyway. U counts only what the forward issues, for which the argument of `formulation` holds whatever the lane
does in between.

Where updates start in backward by priority and no block gathers, `last_update` has more rows: after R[n-1] the last update has to
go up.
"""

from collections.abc import Sequence
from math import ceil

import numpy as np
from ortools.sat.python import cp_model

from autohete_fx.ir import Lane, Overlap
from autohete_fx.planner.bound.last_update import LastUpdateRows
from autohete_fx.planner.bound.variables import Linear
from autohete_fx.planner.model.work import BACKWARD_PASS, BY_DEVICE, FORWARD_PASS, UPDATES_LANE, Work


class UpdateRows(LastUpdateRows):
    """Rows of updates, beside the choices of a problem."""

    def _add_updates(
        self, backward_end: Linear, landed: Sequence[Linear]
    ) -> tuple[cp_model.IntVar, list[cp_model.IntVar], list[cp_model.IntVar]]:
        """Rows of the updates; returns V, then R and K by block, which without priority are of no block before the last."""
        add, everything = self.model.add, range(self.num_blocks)
        device_end = self._time("V")
        add(device_end >= backward_end + self._sum(everything, BY_DEVICE))
        start = device_end if self.problem.machine.device_type == "cpu" else backward_end
        updated = [self._time(f"R[{block}]") for block in everything]
        total: Linear = 0
        for block in everything if self.problem.schedule.priority else reversed(everything):
            begin = start if self.updates_begin_together else landed[block]
            host = self._sum([block], (Work.HOST_UPDATE,))
            if self.problem.schedule.priority:
                total_before, total = total, self._time(f"P[{block}]")
                add(total >= total_before + host)
                add(updated[block] >= begin + total)
                if block:
                    add(updated[block] >= updated[block - 1])
            else:
                add(updated[block] >= begin + host)
                if block + 1 < self.num_blocks:
                    add(updated[block] >= updated[block + 1] + host)
        if self.overlap is Overlap.NONE and self.streams and self.problem.schedule.priority:
            return device_end, updated, self._add_uploaded(start, updated)
        return device_end, updated, updated

    def _add_uploaded(self, start: Linear, updated: Sequence[Linear]) -> list[cp_model.IntVar]:
        """Rows of updates after which parameters go up, where others stay at home; returns K."""
        found, add, most_others = [], self.model.add, 0
        last, last_updated = start, start
        for block in range(self.num_blocks):
            uploads, work = self.waiting[block], self._ticks(block, (Work.HOST_UPDATE,))
            own, is_one = (self._weighted([each], [block]) for each in (work * uploads, uploads.astype(np.int64)))
            found.append(self._time(f"K[{block}]"))
            add(found[-1] >= last + own)
            add(found[-1] >= last_updated + own - most_others + most_others * is_one)
            most_others += ((work * ~uploads).max() + 1) * self._slowed(Lane.UPDATE)
            most_others = ceil(min(self.horizon, most_others))
            last, last_updated = found[-1], updated[block]
        return found

    def _add_way_home(self, backward_end: Linear) -> list[cp_model.IntVar] | None:
        """Rows of streamed states on their way home beside a forward; returns Z. None where there is no such forward, or nothing
        may be streamed."""
        if self.overlap is Overlap.NONE or not self.streams:
            return None
        last: Linear = backward_end + self._sum(range(self.num_blocks), (Work.OVER_LINK,))
        found = []
        for block in range(self.num_blocks):
            found.append(self._time(f"Z[{block}]"))
            self.model.add(found[-1] >= last + self._sum([block], (Work.STATES_BACK,)))
            last = found[-1]
        return found

    def _add_copies_at_once(
        self, backward_end: Linear, landed: Sequence[Linear], updated: Sequence[Linear]
    ) -> list[cp_model.IntVar]:
        """Rows of what updates copy up where no pass issues it; returns Q."""
        everything, found, add = range(self.num_blocks), [], self.model.add
        issued, fetched = (kind.of(UPDATES_LANE.before) for kind in (BACKWARD_PASS, FORWARD_PASS))
        of_host: Linear = 0
        copied, of_lane, of_states = (self._time(f"{name}[-1]") for name in "QSW")
        over_link = self._sum(everything, (Work.OVER_LINK,))
        add(of_lane >= (backward_end if self.updates_begin_together else self._sum(everything, issued)) + over_link)
        add(of_states >= backward_end + over_link)
        for block in everything:
            copies = self._sum([block], (*fetched, Work.UPLOAD), waiting=True)
            host = self._sum([block], (Work.HOST_UPDATE,))
            last_copied, copied = copied, self._time(f"Q[{block}]")
            of_lane_before, of_lane = of_lane, self._time(f"S[{block}]")
            of_states_before, of_states = of_states, self._time(f"W[{block}]")
            of_host_before, of_host = of_host, self._time(f"v[{block}]")
            add(of_lane >= of_lane_before + self._sum([block], (Work.UPLOAD, *fetched, Work.STATES)))
            add(of_states >= of_states_before + self._sum([block], (*fetched, Work.STATES)))
            add(of_host >= of_host_before + copies)
            for least in (last_copied, of_lane, of_states, landed[block] + of_host, landed[block] + host + copies):
                add(copied >= least)
            if self.problem.schedule.priority:
                add(copied >= updated[block])
            found.append(copied)
        if self.knows_last_update:
            add(copied >= updated[-1] + self._add_last_update(landed))
        return found
