"""The kernels of ``torch.ops.autohete.*`` on every device. Importing this module registers them."""

from collections.abc import Sequence
from typing import Any

import torch

from autohete_fx.graph import ops
from autohete_fx.internals.tensors import current_autograd_node
from autohete_fx.ir import Lane
from autohete_fx.runtime.announced import tell
from autohete_fx.runtime.session import session_by_digest


def _offload(
    src: torch.Tensor, session: str, lane: int, priority: int, after: torch.Tensor | None = None
) -> torch.Tensor:
    owner = session_by_digest(session)
    return owner.issue(Lane.from_index(lane), priority, owner.tier.empty_like(src), src, "offload")


def _reload(
    src: torch.Tensor, session: str, lane: int, priority: int, after: torch.Tensor | None = None
) -> torch.Tensor:
    owner = session_by_digest(session)
    return owner.issue(Lane.from_index(lane), priority, ops.empty_copy_of(src), src, "reload")


def _prefetch(
    src: torch.Tensor, session: str, lane: int, priority: int, after: torch.Tensor | None = None
) -> torch.Tensor:
    owner = session_by_digest(session)
    return owner.issue(Lane.from_index(lane), priority, ops.empty_copy_of(src), src, "prefetch")


def _wait(handle: torch.Tensor, src: torch.Tensor, session: str, after: torch.Tensor | None = None) -> torch.Tensor:
    return session_by_digest(session).wait(handle, src)


def _wait_update(param: torch.Tensor, session: str, after: torch.Tensor | None = None) -> torch.Tensor:
    session_by_digest(session).updates.wait_for(param)
    return torch.ops.aten.alias(param)


def _start_update(
    handle: torch.Tensor,
    params: Sequence[torch.Tensor],
    session: str,
    edge: int,
    priority: int,
    after: torch.Tensor | None = None,
) -> torch.Tensor:
    return session_by_digest(session).start_update(handle, edge, priority)


def _take_norm(
    handle: torch.Tensor, grad: torch.Tensor, session: str, after: torch.Tensor | None = None
) -> torch.Tensor:
    return session_by_digest(session).take_norm(handle, grad)


def _announce(
    grad: torch.Tensor, others: Sequence[torch.Tensor], edges: Sequence[int], after: torch.Tensor | None = None
) -> torch.Tensor:
    node: Any = current_autograd_node()
    following = () if node is None else node.next_functions
    for tensor, edge in zip((grad, *others), edges, strict=True):
        leaf = following[edge][0] if edge < len(following) else None
        if (param := getattr(leaf, "variable", None)) is not None:
            tell(param, tensor)
    return torch.ops.aten.alias(grad)


_DISPATCH_KEY = "CompositeExplicitAutograd"  # one kernel for all devices: the session knows the device

ops.library.impl("offload", _offload, _DISPATCH_KEY)
ops.library.impl("reload", _reload, _DISPATCH_KEY)
ops.library.impl("prefetch", _prefetch, _DISPATCH_KEY)
ops.library.impl("wait", _wait, _DISPATCH_KEY)
ops.library.impl("wait_update", _wait_update, _DISPATCH_KEY)
ops.library.impl("start_update", _start_update, _DISPATCH_KEY)
ops.library.impl("take_norm", _take_norm, _DISPATCH_KEY)
ops.library.impl("announce", _announce, _DISPATCH_KEY)
