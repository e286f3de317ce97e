"""Updates that start while backward runs, and what must not happen before ``step()`` takes them over.

With ``overlap="backward"`` a node of the backward graph starts the update of a parameter when its gradient comes. In: the call
of ``backward()``, as the fence sees it, and that node. Out: the update, where it is exact to start it now. A program that does
between ``backward()`` and ``step()`` what such an update comes too early for gets an error.

It is exact to start where the gradient that the graph gives is all of ``.grad``, or all that joins the ``.grad`` of earlier
micro-batches. The graph then has the only edge to the parameter in this backward pass, and is not kept for another pass. No
hook changes the gradient, and nobody else's memory is the parameter's or the gradient's. Everywhere else the update is left to
``step()``. The update lane adds in place, as autograd would, and autograd gets nothing to add.

From then on the parameter is no longer what it was, which autograd learns from its version counter, and others from the fence.
Until ``step()`` it is an error to read or write the parameter or its states, and to write the gradient. Whatever passes by the
fence and might do so is an error, too. Reading the gradient is none.
"""

import contextlib
import inspect
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils.weak import WeakIdKeyDictionary

from autohete_fx.errors import OptimizerStateError
from autohete_fx.internals.tensors import current_autograd_node
from autohete_fx.runtime.lanes.ticket import Ticket
from autohete_fx.runtime.pending.addresses import address_of
from autohete_fx.runtime.pending.norms import Norms

_ADVICE = (
    " With overlap='backward' its update began when the gradient came. Use overlap='step' for loops that touch gradients or"
    " parameters between backward() and step(), and optimizer.accumulate() around all micro-batches but the last. This step"
    " cannot be completed: load the last checkpoint, the optimizer's state dict first, then the model's"
)


@dataclass(slots=True, eq=False)
class Consumed:
    """A gradient that an update was started with.

    Attributes:
        param: whose gradient.
        grad: its home, or what it is added to, as another tensor than autograd gets: a second reference to that one would make
            it copy.
        version: of that memory.
        states: what the update writes beside the parameter.
        hyperparameters: what the update computes with.
        complaint: what somebody did to the gradient; empty where nobody did anything.
    """

    param: Tensor
    grad: Tensor
    version: int
    states: tuple[Tensor, ...]
    hyperparameters: Mapping[str, Any]
    complaint: str = ""

    def check(self) -> None:
        """Raise OptimizerStateError where ``.grad`` is not the gradient that the update was started with."""
        grad = self.param.grad
        if grad is None:
            self.complaint = self.complaint or "was dropped"
        elif address_of(grad) != address_of(self.grad):
            self.complaint = self.complaint or "was replaced or added to"
        elif grad._version != self.version:
            self.complaint = self.complaint or "was written to"
        if self.complaint:
            raise self.error(f"the gradient of a parameter of shape {tuple(self.param.shape)} {self.complaint}")

    def error(self, what: str) -> OptimizerStateError:
        """The error that says what was done and what to do."""
        return OptimizerStateError(f"{what} between backward() and optimizer.step().{_ADVICE}")


Starter = Callable[[Tensor, Tensor, Tensor | None, Sequence[Ticket], int], Consumed | None]
"""Starts the update of a parameter at a priority, once the tickets are complete.

Its gradient is in a home, and is added to what was collected.

It returns None where the update is not to start now.
"""


class Early:
    """The updates of one model that started in backward and that no ``step()`` has taken over.

    Attributes:
        starter: who starts them; None: nobody does.
        is_expected: whether a forward pass has run whose backward may start updates, or take norms.
        norms: of gradients, taken in backward.
    """

    def __init__(self) -> None:
        self.starter: Starter | None = None
        self.is_expected = False
        self.norms = Norms()
        self._armed: frozenset[int] = frozenset()
        self._added: list[Tensor] = []
        self._consumed: dict[int, Consumed] = {}
        # By address of the memory; a parameter and its states are `_owned`.
        self._owned: dict[int, Consumed] = {}
        self._gradients: dict[int, Consumed] = {}

    @property
    def is_open(self) -> bool:
        """Whether an update has started, or a norm was taken, that no step has taken over."""
        return bool(self._consumed or self.norms)

    # -- in backward ----------------------------------------------------------------------------------------------------

    @contextlib.contextmanager
    def backward(self, func: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]) -> Iterator[None]:
        """Around a backward pass. Raises OptimizerStateError where it comes too early, and where a gradient is not kept."""
        if not (self.is_expected or self.is_open):
            yield
            return
        given = inspect.signature(func).bind(*args, **kwargs).arguments
        leaves = _Leaves(_roots(given))
        for param in leaves.variables:
            if (consumed := self._consumed.get(id(param))) is not None:
                shape = tuple(param.shape)
                raise consumed.error(f"a second backward pass reached a parameter of shape {shape}")
        keeps = any(given.get(name) for name in ("retain_graph", "create_graph", "inputs"))
        if self.is_expected and func is not torch.autograd.grad and not keeps:
            self._armed = leaves.exclusive()
        self.norms.clear()
        try:
            yield
        finally:
            armed, self._armed, self._added = self._armed, frozenset(), []
        for key in armed & self._consumed.keys():
            self._consumed[key].check()

    @property
    def is_armed(self) -> bool:
        """Whether a backward pass runs that may start updates, or take norms."""
        return bool(self._armed) and self.starter is not None

    def start(
        self, edge: int, home: Tensor, landed: Ticket, readers: Callable[[Tensor], list[Ticket]], priority: int
    ) -> bool:
        """Start the update of the parameter that an edge leads to of the graph whose backward runs in this thread.

        Args:
            edge: its position.
            home: where the gradient is when ``landed`` is complete.
            readers: gives the copies under way that read a parameter.
            priority: on the update lane.

        Returns:
            Whether it did.
        """
        node: Any = current_autograd_node()
        if node is None or edge >= len(node.next_functions):
            return False
        param = getattr(node.next_functions[edge][0], "variable", None)
        if param is None or id(param) not in self._armed or id(param) in self._consumed:
            return False
        # Otherwise autograd copies what it gets, before it has come.
        collected = param.grad
        if not _is_like(home, param) or (collected is not None and not _is_like(collected, param)):
            return False
        assert self.starter is not None
        consumed = self.starter(param, home.detach(), collected, (landed, *readers(param)), priority)
        if consumed is None:
            return False
        if collected is not None:
            self._added.append(home.detach())
        self._consumed[id(param)] = consumed
        self._owned |= {key: consumed for t in (param, *consumed.states) if (key := address_of(t)) is not None}
        if (key := address_of(consumed.grad)) is not None:
            self._gradients[key] = consumed
        # Whatever has saved the parameter must not go on with it.
        torch.autograd.graph.increment_version(param)
        return True

    def left_to_autograd(self, gradients: Iterable[Any]) -> list[Any]:
        """The gradients that a graph gives autograd, without those that updates add by themselves."""
        added = {address_of(t) for t in self._added}
        return [None if isinstance(t, Tensor) and address_of(t) in added else t for t in gradients]

    # -- until step() ---------------------------------------------------------------------------------------------------

    def refuse(self, tensors: Iterable[Tensor]) -> None:
        """Raise OptimizerStateError where one is a parameter whose update has started, or a state of it."""
        if not self._consumed:
            return
        for t in tensors:
            if not t.numel() or t.is_meta:
                continue
            address = address_of(t)
            consumed = next(iter(self._consumed.values())) if address is None else self._owned.get(address)
            if consumed is not None:
                shape = tuple(consumed.param.shape)
                raise consumed.error(f"a parameter of shape {shape}, or a state of its optimizer, was used")

    def refuse_unseen(self, what: str) -> None:
        """Raise OptimizerStateError because something happens that may use any tensor."""
        self.norms.clear()
        for consumed in self._consumed.values():
            raise consumed.error(what)

    def complain(self, what: str) -> None:
        """Spoil the step: something happened that may have changed the gradients."""
        self.norms.clear()
        for consumed in self._consumed.values():
            consumed.complaint = consumed.complaint or what

    @contextlib.contextmanager
    def watch(self, tensors: Sequence[Tensor], written: Sequence[Tensor]) -> Iterator[None]:
        """Around a call that gets these tensors: it may read gradients. Raises OptimizerStateError for anything else where an
        update has started with them; else norms are dropped.

        Args:
            written: of the tensors, those that the call writes, as far as that is known.
        """
        self.refuse(tensors)
        found = ((t, self._gradients.get(address_of(t) or 0)) for t in tensors)
        read = [(t, t._version, consumed) for t, consumed in found if consumed is not None]
        self.norms.drop(tensors)
        yield
        for t, version, consumed in read:
            if t._version != version or any(t is other for other in written):
                consumed.complaint = "was written to"
                consumed.check()

    def of(self, params: Iterable[Tensor]) -> list[Consumed]:
        """The updates that were started for these parameters."""
        return [self._consumed[id(param)] for param in params if id(param) in self._consumed]

    def settle(self, done: Iterable[Consumed]) -> None:
        """A step has taken these over."""
        for consumed in done:
            self._consumed.pop(id(consumed.param), None)
        left = set(map(id, self._consumed.values()))
        self._owned = {key: c for key, c in self._owned.items() if id(c) in left}
        self._gradients = {key: c for key, c in self._gradients.items() if id(c) in left}
        self.is_expected = False

    def forget(self) -> None:
        """Everything is about to be loaded."""
        self.settle(list(self._consumed.values()))
        self.norms.clear()


class _Leaves:
    """The leaves that a backward pass accumulates gradients into, by a walk of its graph."""

    def __init__(self, roots: Iterable[Tensor]) -> None:
        self.variables: list[Tensor] = []
        self.edges: Counter[int] = Counter()
        seen: set[Any] = set()
        pending: list[Any] = [root.grad_fn for root in roots if root.grad_fn is not None]
        while pending:
            node = pending.pop()
            if node in seen:
                continue
            seen.add(node)
            for following, _ in node.next_functions:
                if following is None:
                    continue
                if (variable := getattr(following, "variable", None)) is not None:
                    self.edges[id(variable)] += 1
                    if self.edges[id(variable)] == 1:
                        self.variables.append(variable)
                else:
                    pending.append(following)

    def exclusive(self) -> frozenset[int]:
        """Identities of those whose gradient comes along one edge and that share memory with no other, nor their gradients.

        None at all where one has a hook, unless that is one `that_reads_nothing`: it runs within backward, below the fence, and may
        read any parameter. Nor those whose gradients are not final when they come.
        """
        if any(map(_has_hook, self.variables)):
            return frozenset()
        memories = Counter(address_of(t) for v in self.variables for t in (v, v.grad) if t is not None)
        return frozenset(
            id(v)
            for v in self.variables
            if self.edges[id(v)] == 1
            and v not in _left_to_step
            and all(memories[address_of(t)] == 1 for t in (v, v.grad) if t is not None)
        )


def sole_leaves(roots: Iterable[Tensor]) -> frozenset[int]:
    """Identities of the leaves whose gradient comes along one edge in a backward pass from some tensors, and that no hook
    changes on its way."""
    leaves = _Leaves(roots)
    return frozenset(id(v) for v in leaves.variables if leaves.edges[id(v)] == 1 and not v._backward_hooks)


_READS_NOTHING = "_autohete_reads_nothing"
_left_to_step = WeakIdKeyDictionary()


def leave_to_step(param: Tensor) -> None:
    """No update of the parameter starts before ``step()``: its gradient is not final when backward gives it."""
    _left_to_step[param] = None


def that_reads_nothing(hook: Callable[[Tensor], None]) -> Callable[[Tensor], None]:
    """A post-accumulate hook of ours, which reads no parameter and changes no gradient."""
    setattr(hook, _READS_NOTHING, True)
    return hook


def _has_hook(variable: Tensor) -> bool:
    after: Any = variable._post_accumulate_grad_hooks or {}
    return bool(variable._backward_hooks) or not all(hasattr(hook, _READS_NOTHING) for hook in after.values())


def _is_like(grad: Tensor, param: Tensor) -> bool:
    """Whether it is a gradient that autograd takes as it is, or adds to in place without recording that."""
    is_alike = (grad.shape, grad.stride(), grad.dtype) == (param.shape, param.stride(), param.dtype)
    return is_alike and type(grad) is Tensor and not grad.requires_grad and not grad.is_inference()


def _roots(given: Mapping[str, Any]) -> list[Tensor]:
    """Of ``Tensor.backward``, ``torch.autograd.backward`` or ``torch.autograd.grad``."""
    found = next(given[name] for name in ("self", "tensors", "outputs") if name in given)
    return [t for t in ([found] if isinstance(found, Tensor) else found) if isinstance(t, Tensor)]
