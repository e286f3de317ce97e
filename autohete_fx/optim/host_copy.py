"""The host's copies of parameters that live on the device and are updated on the host.

In: parameters. Out: for each a home that holds its bytes, as the last update left them. The CPU updates there and the result is
uploaded, so that a parameter need not come down first. That saves half of what a step would bring down. An edit of the
parameter between two steps counts, however it is made (``param.data.mul_``, ``load_state_dict``, ...). After each upload the
device takes the parameter's `fingerprint`, and before each update another. A parameter whose fingerprint has changed comes down
first.
"""

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.utils.weak import WeakIdKeyDictionary

from autohete_fx.ir import Lane
from autohete_fx.optim.fingerprint import fingerprint, fingerprint_into
from autohete_fx.optim.state import StatePlacement, layout_of
from autohete_fx.runtime.lanes.lanes import Lanes
from autohete_fx.runtime.lanes.ticket import Ticket
from autohete_fx.runtime.tiers.host import HostTier, host_view


class HostCopy:
    """One parameter's bytes on the host, laid out as its states are.

    Attributes:
        home: the bytes.
        is_current: whether the device holds what ``home`` holds, apart from edits. No other thread sets it but while an
            update of the parameter is under way.
    """

    def __init__(self, param: Tensor, placement: StatePlacement) -> None:
        assert placement.tier is not None
        self.home = placement.tier.empty_strided(param.shape, layout_of(param), param.dtype)
        self.is_current = False
        # On an oddly laid out parameter no kernel can walk; it comes down every time. That is rare.
        self._sent = fingerprint(param) if param.stride() == layout_of(param) else None

    def fits(self, param: Tensor, tier: HostTier) -> bool:
        """Whether it can be a copy of the parameter as it is now."""
        home = self.home
        is_alike = (home.shape, home.dtype, home.stride()) == (param.shape, param.dtype, layout_of(param))
        return is_alike and tier.owns(home) and (self._sent is not None) == (param.stride() == layout_of(param))

    def note_sent(self, param: Tensor) -> None:
        """The device has these values once the upload is done, on its stream."""
        if self._sent is not None:
            fingerprint_into(param, self._sent)
            self.is_current = True

    def compare(self, param: Tensor) -> Tensor | None:
        """Nonzero on the device where the parameter was edited; None where there is nothing to compare it with."""
        if not self.is_current or self._sent is None:
            return None
        return fingerprint(param) - self._sent


class HostCopies:
    """The copies of one optimizer's parameters. It holds no parameter."""

    def __init__(self) -> None:
        self._copies = WeakIdKeyDictionary()

    def of(self, param: Tensor, placement: StatePlacement) -> HostCopy:
        """The copy of a parameter, made if there is none that fits. Raises HostMemoryError."""
        found: HostCopy | None = self._copies.get(param)
        assert placement.tier is not None
        if found is None or not found.fits(param, placement.tier):
            found = self._copies[param] = HostCopy(param, placement)
        return found

    def discard(self, param: Tensor) -> None:
        """Give back the memory of a copy that is no longer of use."""
        self._copies.pop(param, None)


class Edits:
    """Which parameters were edited since their last update: found on the device, told on the host.

    Args:
        copies: the parameters and their copies.
        tier: for what is told.
    """

    def __init__(self, copies: Sequence[tuple[Tensor, HostCopy]], lanes: Lanes, tier: HostTier) -> None:
        differences = {copy: found for param, copy in copies if (found := copy.compare(param)) is not None}
        self._places = {copy: n for n, copy in enumerate(differences)}
        self._arrival: Ticket | None = None
        if differences:
            self._told = tier.empty_strided((len(differences),), (1,), torch.int64)
            differing = torch.cat(list(differences.values()))
            self._arrival = lanes.submit(Lane.D2H, 0, self._told, differing, label="edits", for_update=True)

    def has(self, copy: HostCopy) -> bool:
        """Whether the copy does not hold what its parameter holds. Waits until that is known."""
        if copy not in self._places or self._arrival is None:
            return True
        self._arrival.synchronize()
        return bool(host_view(self._told)[self._places[copy]])
