"""The ops that passes insert: schemas and fake implementations of ``torch.ops.autohete.*``.

Every copy is two nodes. The first issues it and returns a *handle*, one int64 on the CPU; the second waits for
it and returns the copied tensor::

    handle = autohete.offload(src, session, lane, priority)     # device -> host
    handle = autohete.reload(src, session, lane, priority)      # host -> device, activations
    handle = autohete.prefetch(src, session, lane, priority)    # host -> device, parameters
    result = autohete.wait(handle, src, session)

A parameter on the device whose update ran on the host is waited for by a node of its own, a view of it::

    updated = autohete.wait_update(param, session)

An update that starts in backward stands between a gradient's offload and its wait::

    handle = autohete.offload(grad, session, lane, priority)
    handle = autohete.start_update(handle, [param], session, edge, priority)
    home = autohete.wait(handle, grad, session)

Before a gradient leaves, its norm may be taken, for the step that clips::

    handle = autohete.offload(grad, session, lane, priority)
    handle = autohete.take_norm(handle, grad, session)

Somebody may be told of gradients that stay on the device while backward still runs, those of a block by one node::

    grad = autohete.announce(grad, [other_grad], [edge, other_edge])    # a view of the first

* ``result`` has the size, dtype and device of ``src``; its strides too where ``src`` is dense, else it is
  contiguous (`copied_strides`). Host tensors present themselves on the compute device.
* Nothing aliases. The compiler does not know the buffer of a copy until ``wait`` returns it. It therefore cannot hand it out as
  scratch while the copy runs.
* ``src`` is an argument of ``wait`` because the copy reads it until then: the compiler would otherwise reuse its
  buffer right after the issuing node.
* ``session`` is the digest under which the runtime is registered, the same in every process. Cached code therefore finds the
  runtime of the process that it runs in. ``lane`` is `ir.Lane.index`; a smaller ``priority`` is sooner.
* ``start_update`` writes the placeholders over the parameter's memory, if there are any in the graph, so that the compiler
  keeps whatever reads them before it. ``edge`` is the parameter's position among the tensors that Dynamo's graph gets, and so
  its edge in autograd's graph. One graph may serve several models.
* ``after`` is never read. The last pass names there what must be computed before the node runs, so that the compiler
  keeps the node where it stands.

The kernels are in `autohete_fx.runtime.kernels`.
"""

from collections.abc import Sequence

import torch
from torch import fx

from autohete_fx.graph.sizes import hint

_NAMESPACE = "autohete"
_TAGS = (torch.Tag.needs_exact_strides, torch.Tag.cudagraph_unsafe)

library = torch.library.Library(_NAMESPACE, "DEF")

for _name in ("offload", "reload", "prefetch"):
    library.define(
        f"{_name}(Tensor src, str session, int lane, int priority, Tensor? after=None) -> Tensor", tags=_TAGS
    )
library.define("wait(Tensor handle, Tensor src, str session, Tensor? after=None) -> Tensor", tags=_TAGS)
library.define("wait_update(Tensor(a) param, str session, Tensor? after=None) -> Tensor(a)", tags=_TAGS)
library.define("take_norm(Tensor handle, Tensor grad, str session, Tensor? after=None) -> Tensor", tags=_TAGS)
library.define("announce(Tensor(a) grad, Tensor[] others, int[] edges, Tensor? after=None) -> Tensor(a)", tags=_TAGS)
library.define(
    "start_update(Tensor handle, Tensor(a!)[] params, str session, int edge, int priority, Tensor? after=None) -> Tensor",
    tags=_TAGS,
)

offload = torch.ops.autohete.offload.default
reload = torch.ops.autohete.reload.default
prefetch = torch.ops.autohete.prefetch.default
wait = torch.ops.autohete.wait.default
wait_update = torch.ops.autohete.wait_update.default
start_update = torch.ops.autohete.start_update.default
take_norm = torch.ops.autohete.take_norm.default
announce = torch.ops.autohete.announce.default

ISSUING_OPS = (offload, reload, prefetch)
"""The ops that issue a copy."""

PASSING_OPS = (start_update, take_norm)
"""Operations that may stand between an issued copy and its wait: they pass its handle on."""

SMALLEST_COPY_BYTES = 1 << 16
"""Smaller tensors stay on the device, whatever is decided for their block.

A copy of their own would cost more in latency, and in nodes to compile, than it frees. A layer's biases and norms are most of
its tensors and next to none of its bytes.
"""


def wait_of(issuing: fx.Node) -> fx.Node:
    """The node that waits for an issued copy."""
    user = next(iter(issuing.users))
    return wait_of(user) if user.target in PASSING_OPS else user


def is_dense(size: Sequence[int], stride: Sequence[int]) -> bool:
    """Whether a layout fills its span without gaps or overlaps, in any order of dimensions. Symbolic sizes count as their hints."""
    expected = 1
    sizes, steps = ([hint(number) for number in numbers] for numbers in (size, stride))
    for step, n in sorted((step, n) for n, step in zip(sizes, steps, strict=True) if n != 1):
        if step != expected:
            return False
        expected *= n
    return True


def contiguous_stride(size: Sequence[int]) -> tuple[int, ...]:
    """Strides of the row-major layout."""
    strides = [1] * len(size)
    for dim in range(len(size) - 2, -1, -1):
        strides[dim] = strides[dim + 1] * max(size[dim + 1], 1)
    return tuple(strides)


def copied_strides(src: torch.Tensor) -> tuple[int, ...]:
    """Strides of a copy of ``src``: its own where it is dense, else its order of dimensions without the gaps.

    The same holds for ``torch.empty_like``, and backward was traced on ``src``. Attention's backward makes gradients like the
    queries that it is given, and a view of one may need the order.
    """
    return tuple(src.stride()) if is_dense(src.shape, src.stride()) else torch.empty_like(src, device="meta").stride()


def empty_copy_of(src: torch.Tensor) -> torch.Tensor:
    """Uninitialised device memory for a copy of ``src``."""
    return torch.empty_strided(src.shape, copied_strides(src), dtype=src.dtype, device=src.device)


def _fake_issue(
    src: torch.Tensor, session: str, lane: int, priority: int, after: torch.Tensor | None = None
) -> torch.Tensor:
    return torch.empty((1,), dtype=torch.int64, device="cpu")


for _name in ("offload", "reload", "prefetch"):
    torch.library.register_fake(f"{_NAMESPACE}::{_name}", _fake_issue, lib=library)


@torch.library.register_fake(f"{_NAMESPACE}::wait", lib=library)
def _fake_wait(
    handle: torch.Tensor, src: torch.Tensor, session: str, after: torch.Tensor | None = None
) -> torch.Tensor:
    return empty_copy_of(src)


@torch.library.register_fake(f"{_NAMESPACE}::wait_update", lib=library)
def _fake_wait_update(param: torch.Tensor, session: str, after: torch.Tensor | None = None) -> torch.Tensor:
    return torch.ops.aten.alias(param)


@torch.library.register_fake(f"{_NAMESPACE}::start_update", lib=library)
def _fake_start_update(
    handle: torch.Tensor,
    params: Sequence[torch.Tensor],
    session: str,
    edge: int,
    priority: int,
    after: torch.Tensor | None = None,
) -> torch.Tensor:
    return torch.empty((1,), dtype=torch.int64, device="cpu")


@torch.library.register_fake(f"{_NAMESPACE}::take_norm", lib=library)
def _fake_take_norm(
    handle: torch.Tensor, grad: torch.Tensor, session: str, after: torch.Tensor | None = None
) -> torch.Tensor:
    return torch.empty((1,), dtype=torch.int64, device="cpu")


@torch.library.register_fake(f"{_NAMESPACE}::announce", lib=library)
def _fake_announce(
    grad: torch.Tensor, others: Sequence[torch.Tensor], edges: Sequence[int], after: torch.Tensor | None = None
) -> torch.Tensor:
    return torch.ops.aten.alias(grad)
