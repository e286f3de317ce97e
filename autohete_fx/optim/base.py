"""The part that all optimizers share: when and where updates run, where states lie, clipping, checkpoints.

In: a rule, parameters, gradients, and the placements that a compiled model records. Out: parameters as the rule's arithmetic
makes them, with the states where the plan wants them. An optimizer never asks for a plan. A parameter without a placement has
its states on its device, and states move at the first ``step()`` after a placement changed. The order of constructing the
optimizer and compiling therefore does not matter.
"""

import contextlib
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from typing import Any, ClassVar, TypeVar, cast

import torch
from torch import Tensor

from autohete_fx.errors import OptimizerStateError
from autohete_fx.internals.modes import DisableTorchFunction
from autohete_fx.internals.tensors import current_graph_task_id
from autohete_fx.ir import Overlap
from autohete_fx.optim import clipping, shards
from autohete_fx.optim.arguments import checked_norm, overlap_named
from autohete_fx.optim.host_copy import HostCopies
from autohete_fx.optim.in_place import Update
from autohete_fx.optim.loading import read_groups, read_states
from autohete_fx.optim.owners import claim, note_change, optimizer_of
from autohete_fx.optim.rule import Group, Rule
from autohete_fx.optim.start import check_group
from autohete_fx.optim.state import (
    MASTER,
    check_grad,
    check_param,
    check_whole,
    complete,
    reconcile,
    settle,
    state_bytes,
    state_placement_of,
    update_share,
    update_workspace_bytes,
    uses_mixed,
)
from autohete_fx.optim.updates import apply
from autohete_fx.runtime.held import held, whole_of
from autohete_fx.runtime.pending.backward import Consumed
from autohete_fx.runtime.pending.calls import is_within_call
from autohete_fx.runtime.pending.fence import watched
from autohete_fx.runtime.pending.unplanned import Watch
from autohete_fx.runtime.pending.updates import Updates
from autohete_fx.runtime.placement import placement_of
from autohete_fx.runtime.shard import parts, tensor_parallel
from autohete_fx.runtime.shard.state import attend

_Method = TypeVar("_Method", bound=Callable[..., Any])


def _untraced(method: _Method) -> _Method:
    """Run as it is even where the caller is compiled."""
    return cast("_Method", torch.compiler.disable(method))


class PlannedOptimizer(torch.optim.Optimizer):
    """An optimizer whose states and update are on the device, on the host or on disk, as the plan says. A subclass names its rule,
    and where groups differ in more than numbers, which one each has (`rule_of_group`).

    Where states and parameters live changes no value, but for the rounding of the processor that does the update. The CPU
    updates for states on the host and on disk, the device for its own and for streamed ones. 16-bit parameters have fp32
    states, an fp32 master weight among them.

    An edit of a parameter between steps (``load_state_dict``, ``param.data.mul_``, ...) is honoured however it is made. fp32
    parameters have no second copy. A 16-bit weight that is no longer the rounding of its master replaces it, element by
    element.

    ``step()`` needs little device memory beyond the states, which the first step creates. It takes 8 bytes for each parameter
    that is updated on the host. Pieces of streamed states take at most 192 MiB, but for those of `Muon`. A parameter or gradient
    of an unusual layout or dtype costs one temporary copy of that tensor at a time.

    With ``overlap="step"`` updates on the host start at ``step()``, in the order in which the next forward needs them. They may
    still run when it returns. Whatever is done to the gradients before ``step()`` counts, as always. Whoever then reads or
    writes a parameter, a gradient or a state, compiled or eager, gets the updated value, and waits if necessary. Call
    ``synchronize()`` only before a read in another thread than the one that calls ``step()``, by TorchScript, or through a
    NumPy array made before. Steps do not overlap with what follows where the backend sees no use in it, as on a CPU device. Nor
    do they in a model whose graph breaks, inside a compiled function, or inside a backward pass.

    With ``overlap="backward"`` they start as soon as gradients come, from the second step on, where a compiled backward gives
    all of a gradient. All others start at ``step()``. That is for loops that do nothing to gradients and parameters between
    ``backward()`` and ``step()``. Reading gradients is allowed there. Anything else is an OptimizerStateError that says so,
    raised at once or by ``step()``. The same holds for a change of a hyperparameter, and a second forward or backward pass:
    collect gradients of several micro-batches within ``accumulate()``. ``max_grad_norm`` clips; its updates need the norm of
    all gradients and start at ``step()``, before which gradients may be edited; backward takes the norms. Hooks of intermediate
    tensors, which run within backward, must not read parameters.

    Attributes:
        grad_norm: the norm of all gradients before the last step clipped them, a tensor without dimensions; None where no
            step has.

    Args:
        params: parameters, named parameters, or groups, as for ``torch.optim``.
        hyperparameters: the defaults of groups, and what else the rule is to check.
        overlap: ``"step"``, ``"backward"``, or None: updates on the host are done when ``step()`` returns.
        max_grad_norm: in ``step()``, clip all gradients by their total norm first, as ``torch.nn.utils.clip_grad_norm_`` does.
            The result is bitwise so where one processor takes all norms, else within the rounding of norms. None: do not.

    Raises:
        OptimizerStateError: a hyperparameter out of range, an option that is not supported, a parameter to train whose dtype is
            none of float32, float64, bfloat16, float16.
    """

    rule: ClassVar[Rule]

    def __init__(
        self, params: Iterable[Any], hyperparameters: Group, *, overlap: str | None, max_grad_norm: float | None
    ) -> None:
        self.overlap = overlap_named(overlap)
        self.max_grad_norm = checked_norm(max_grad_norm)
        self.grad_norm: Tensor | None = None
        self._is_accumulating = False
        self.host_copies = HostCopies()
        self._watch = Watch(self.rule.name)
        self._forget_groups()
        ours = {**hyperparameters, **self.rule.checked(hyperparameters)}
        super().__init__(params, {**{name: ours[name] for name in self.rule.names}, **dict(self.rule.implementation)})

    def rule_of_group(self, group: Group) -> Rule:
        """The arithmetic of a group's parameters, which all hyperparameters of the group are known for."""
        del group
        return self.rule

    def rule_of(self, param: Tensor) -> Rule:
        """The arithmetic of a parameter."""
        group = self.group_of(param)
        return self.rule if group is None else self.rule_of_group(group)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """As in ``torch.optim``; raises OptimizerStateError, before anything is added, for what cannot be trained."""
        rule = self.rule_of_group({**self.defaults, **param_group})
        ours = rule.checked({**self.defaults, **param_group})
        # It stays the caller's dictionary, as with torch's: a value that is changed there is changed here.
        param_group |= {**{n: value for n, value in ours.items() if n in param_group}, **dict(rule.implementation)}
        self._forget_groups()
        before = len(self.param_groups)
        super().add_param_group(param_group)
        try:
            for param in self.param_groups[-1]["params"]:
                if param.requires_grad:  # a frozen one may be quantized
                    check_param(param)
                    check_whole(rule, param)
        except OptimizerStateError:
            del self.param_groups[before:]
            raise
        claim(self.param_groups[-1]["params"], self)
        attend(self)
        tensor_parallel.attend(self)

    def __getstate__(self) -> dict[str, Any]:
        kept = {name: getattr(self, name) for name in ("overlap", "max_grad_norm", "grad_norm")}
        return {**super().__getstate__(), **kept}

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        absent = {"overlap": Overlap.STEP, "max_grad_norm": None, "grad_norm": None, "_is_accumulating": False}
        self.__dict__ |= {name: value for name, value in absent.items() if name not in self.__dict__}
        self.host_copies = HostCopies()
        self._watch = Watch(self.rule.name, is_copy=True)
        self._forget_groups()
        claim((param for group in self.param_groups for param in group["params"]), self)
        tensor_parallel.attend(self)

    @_untraced
    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """One step for every parameter that has a gradient.

        Before any parameter changes, all gradients are checked, missing states are created and states whose placement
        has changed are moved.

        Args:
            closure: reevaluates the model and returns the loss.

        Returns:
            The closure's result.

        Raises:
            OptimizerStateError: a sparse or complex gradient.
            HostMemoryError: no room for host states; no parameter has changed.
            torch.OutOfMemoryError: no room for states on the device, or for pieces of streamed ones; likewise.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        # What ends a node of a backward pass forgets which modes were entered in it, the fence too.
        is_guarded = not is_within_call() and current_graph_task_id() == -1
        pending = self._pending()
        try:
            try:
                with watched(self._gradients, but=pending), DisableTorchFunction():
                    self._step(pending, is_guarded=is_guarded)
            finally:
                _guard(pending)
        except BaseException as error:
            _guard(pending)  # an interrupt may have come before the fence stood
            if isinstance(error, torch.OutOfMemoryError):  # states are made when the plan's peak may be reached
                for each in pending:
                    if each.shortage is not None:
                        error.add_note(each.shortage(error))
            raise
        return loss

    def _gradients(self) -> list[Tensor]:
        """And the parameters that have them."""
        params = [p for group in self.param_groups for p in group["params"]]
        return [t for p in params if p.grad is not None for t in (p, p.grad)]

    def _step(self, pending: Collection[Updates], *, is_guarded: bool) -> None:
        updates = self._updates(started := self._started_in_backward(pending), pending)
        if not self.has_stepped:
            claim((param for group in self.param_groups for param in group["params"]), self)
        scale = self._clipping(updates)
        for each in pending:
            each.early.norms.clear()
        apply(updates, self.host_copies, may_overlap=self.overlap is not Overlap.NONE and is_guarded, scale=scale)
        parts.note_scaled([u.param for u in updates], scale)
        if wholes := [whole for u in updates if (whole := whole_of(u.param)) is not None]:
            torch.autograd.graph.increment_version(wholes)
        self._groups, self.has_stepped = None, True
        self._watch.step([p for group in self.param_groups for p in group["params"]], self.state)
        if started and not is_guarded:
            self.synchronize()

    @contextlib.contextmanager
    def accumulate(self) -> Iterator[None]:
        """Around the forward and backward passes of all micro-batches of a step but the last: gradients are collected.

        With ``overlap="backward"`` no update starts within it. The last micro-batch, outside of it, starts them: each adds its
        gradient to what was collected, as autograd would, and updates. With any other overlap it does nothing.
        """
        before, self._is_accumulating = self._is_accumulating, True
        try:
            yield
        finally:
            self._is_accumulating = before

    @_untraced
    def synchronize(self) -> None:
        """Return when every update is done. Raises OptimizerStateError for one that failed."""
        for updates in self._pending():
            updates.wait_all(on_cpu=True)

    def _pending(self) -> set[Updates]:
        """The updates under way, for each model that has parameters here."""
        placements = (placement_of(held(p)) for group in self.param_groups for p in group["params"])
        return {p.updates for p in placements if p is not None and p.updates is not None}

    @property
    def starts_in_backward(self) -> bool:
        """Whether updates may start in a backward pass now. The first step creates states and compiles kernels."""
        may_start = self.overlap is Overlap.BACKWARD and self.max_grad_norm is None
        return may_start and self.has_stepped and not self._is_accumulating

    def _clipping(self, updates: Iterable[Update]) -> Tensor | None:
        if self.max_grad_norm is None:
            return None
        norms = {
            u.param: None if u.placement.updates is None else u.placement.updates.early.norms.of(u.grad)
            for u in updates
        }
        params = [held(p) for group in self.param_groups for p in group["params"]]
        self.grad_norm = shards.total_norm(params, {u.param: u.grad for u in updates}, norms, clipping.total_norm)
        return clipping.factor(self.grad_norm, self.max_grad_norm)

    def group_of(self, param: Tensor) -> dict[str, Any] | None:
        """The group of a parameter; None where it has none."""
        if self._groups is None:
            self._groups = {id(each): g for g in self.param_groups for p in g["params"] for each in (p, held(p))}
        return self._groups.get(id(param))

    def _forget_groups(self) -> None:
        self._groups: dict[int, dict[str, Any]] | None = None
        self.has_stepped = False

    def _started_in_backward(self, pending: Iterable[Updates]) -> frozenset[int]:
        """Take over what has started. Returns the identities of its parameters.

        Raises:
            OptimizerStateError: a gradient or a hyperparameter is no longer what the update was started with.
        """
        params = [p for group in self.param_groups for p in group["params"]]
        found: list[tuple[Updates, list[Consumed]]] = []
        for updates in pending:
            started = updates.early.of(params)
            for consumed in started:
                consumed.check()
                group = self.group_of(consumed.param)
                assert group is not None
                if optimizer_of(consumed.param) is not self:
                    raise consumed.error("an optimizer stepped that is not the latest one of its parameters")
                check_group(self.rule_of_group(group), consumed, group)
            found.append((updates, started))
        for updates, started in found:
            updates.early.settle(started)
        return frozenset(id(consumed.param) for _, started in found for consumed in started)

    def _updates(self, started: Collection[int], pending: Iterable[Updates]) -> list[Update]:
        all_params = ((p, g) for g in self.param_groups for p in g["params"])
        with_grad = [(p, g) for p, g in all_params if p.grad is not None and id(p) not in started]
        for param, group in with_grad:
            check_param(param)
            check_whole(self.rule_of_group(group), param)
            check_grad(param, param.grad)
        updates, grows = [], False
        for param, group in with_grad:
            for each in pending:
                each.wait_for(param)
                each.wait_for(param.grad)
            mine, grad = held(param), tensor_parallel.local_gradient(param)
            rule, state, placement = self.rule_of_group(group), self.state[param], state_placement_of(mine)
            settle(rule, mine, state, placement)
            grows |= complete(rule, mine, state, placement)
            updates.append(Update(rule, mine, grad, state, group, placement))
        if grows:
            note_change()  # plans count other states
        return updates

    def state_bytes_of(self, param: Tensor) -> int:
        """Bytes of the states that steps hold for ``param``, master included; 0 for a frozen one without states."""
        has_states = param.requires_grad or self.state.get(param if (whole := whole_of(param)) is None else whole)
        return state_bytes(self.rule_of(param), param) if has_states else 0

    def update_share_of(self, param: Tensor) -> float:
        """Bytes that an update of ``param`` reads and writes, over those of an AdamW update."""
        return update_share(self.rule_of(param), param)

    def uses_mixed(self, param: Tensor) -> bool:
        """Whether the kernel for 16-bit parameters updates ``param``."""
        return uses_mixed(self.rule_of(param), param)

    def product_flops_of(self, param: Tensor) -> float:
        """Floating point operations of matrix products in an update of ``param``."""
        group = self.group_of(param)
        return 0.0 if group is None else self.rule_of_group(group).product_flops(param, group)

    def workspace_bytes_of(self, param: Tensor) -> int:
        """Memory that an update of ``param`` needs beside it, its gradient and its states."""
        return update_workspace_bytes(self.rule_of(param), param)

    @_untraced
    @torch.no_grad()
    def state_dict(self) -> dict[str, Any]:
        """A dict shaped as ``torch.optim`` makes it; 16-bit parameters have a ``master`` beside the moments.

        Its tensors are references to the states, as in ``torch.optim``: they follow later steps, and ``deepcopy`` or
        ``torch.save`` makes a snapshot. A state on the host reads as an ordinary tensor. Masters agree with their
        parameters, edits included. Takes no step and creates no state.
        """
        for updates in self._pending():
            updates.early.refuse_unseen("the optimizer's state dict was asked for")
        self.synchronize()
        for param, state in self.state.items():
            if isinstance(param, Tensor) and MASTER in state:
                mine = held(param)
                settle(self.rule_of(param), mine, state, state_placement_of(mine))
                if MASTER in state:
                    reconcile(mine, state[MASTER], state_placement_of(mine))
        return super().state_dict()

    @_untraced
    @torch.no_grad()
    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Load a state dict of this class, or of ``torch.optim``'s of its name, in fp32 and into the places of the plan.

        All or nothing: states and groups change only when every check has passed and every new state exists. Old and new states
        need memory side by side for that moment. Values are copied. A 16-bit parameter whose dict has no master starts from its
        own value.

        Raises:
            OptimizerStateError: says what the dict has, what was expected, and what to do.
            HostMemoryError: no room for host states.
        """
        loaded = dict(state_dict)
        for pre_hook in self._optimizer_load_state_dict_pre_hooks.values():
            loaded = loaded if (replaced := pre_hook(self, loaded)) is None else replaced
        for updates in (pending := self._pending()):
            updates.settle()
        with DisableTorchFunction():
            groups = read_groups(self.rule.name, self.rule_of_group, loaded, self.param_groups)
            states = read_states(self.rule.name, self.rule_of_group, loaded, groups, self.state)
        for updates in pending:
            updates.forget_failures()
        self.state.clear()
        self.state.update(states)
        self.param_groups[:] = groups
        self._forget_groups()
        for post_hook in self._optimizer_load_state_dict_post_hooks.values():
            post_hook(self)


def _guard(pending: Iterable[Updates]) -> None:
    for updates in pending:
        updates.guard()
