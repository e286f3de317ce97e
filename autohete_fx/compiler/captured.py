"""One graph as Dynamo hands it over, with everything that decides how it is compiled.

In: the graph, its real inputs, the options and the `Model` that it belongs to. Out: the budget, the measured machine, the
key under which its code and plan are kept, and the planner's `Problem` once its blocks are known.
"""

import dataclasses
import functools
import hashlib
import logging
from collections.abc import Iterable, Mapping, Sequence

import torch
from torch import fx

from autohete_fx.cache import sources_digest
from autohete_fx.capture.inputs import GraphInput, limit_sizes, parameters_of, sizes_that_may_change
from autohete_fx.compiler.agreement import Agreement
from autohete_fx.compiler.compilation import Share
from autohete_fx.compiler.fixed_bytes import (
    averaging_bytes,
    input_bytes,
    kept_bytes,
    small_bytes,
    trained_bytes,
    unmoved_bytes,
    unread,
    unread_bytes,
)
from autohete_fx.compiler.keys import described_code, described_options, graph_digest, surroundings
from autohete_fx.compiler.model import Model, origin_of, siblings_of
from autohete_fx.compiler.outside import saying_outside, with_outside
from autohete_fx.compiler.problem import (
    NOTE_ON_SHARDS,
    Limits,
    leaving_parameters,
    make_problem,
    note_on_reduction,
    notes_on_optimizer,
    notes_on_replicas,
    param_infos,
    product_flops,
    reducing_after_backward,
    refuse_moving,
    state_bytes,
)
from autohete_fx.compiler.shares import Origin, Unsettled
from autohete_fx.graph.sizes import unbounded
from autohete_fx.internals import dynamo, versions
from autohete_fx.ir import BlockGraph, Problem, Profile
from autohete_fx.machine.budgets import device_budget_bytes, host_budget_bytes, machine_of, tuning_bytes
from autohete_fx.optim.owners import optimizer_of
from autohete_fx.options import Options
from autohete_fx.profiler import ParamInfo
from autohete_fx.runtime.announced import listener_of
from autohete_fx.runtime.between import Taken
from autohete_fx.runtime.pending import calls, unplanned
from autohete_fx.runtime.placement import is_movable, keep_in_place, placement_of
from autohete_fx.runtime.tiers.host import is_home

log = logging.getLogger(__name__)


class CapturedGraph:
    """A graph and its surroundings.

    Attributes:
        params: the parameters among the inputs, by name.
        sharded: names of those that FSDP gathers for each call, which no plan may move.
        awaited: names of those whose gradients somebody waits for while backward runs (`autohete_fx.runtime.announced`).
        origin: what tells it from the model's other graphs.
        budget_bytes: peak device memory allowed; None for no limit.
        others_bytes: device bytes that other training graphs of the model hold while this one runs.
        unread: parameters and buffers that no graph reads which is known yet.
        unread_so_far_bytes: of these, on the device, with gradients and states of those that eager code trains.
        outside: what code outside of the graph takes between its forward and its backward, where that was seen not to fit.
        kept_bytes: likewise, outputs of the graph that live on after its backward.
        listening_bytes: device bytes that those take who wait for gradients.
        trained_bytes: of optimizer states and gradients on the device, where the model is being trained or has them.
        frozen_bytes: of those that parameters without gradients have from when they were trained.
        digest: of the graph, its sizes included.
        note_on_sizes: that some depend on values and have no bound; empty where none does.
        graph_break: why the graph ends before its function, and where; empty where it does not.
        bucket_bytes: of gradient buckets of a DistributedDataParallel around it; None without one.
        machine: capacities and rates.
        host_bytes: host memory allowed for offloaded tensors; None for no limit.
        agreement: with other ranks that hold the parameters.
    """

    def __init__(
        self,
        *,
        gm: fx.GraphModule,
        inputs: Sequence[GraphInput],
        options: Options,
        model: Model,
        agreement: Agreement,
    ) -> None:
        self.gm = gm
        self.inputs = inputs
        self.options = options
        self.model = model
        self.params = parameters_of(inputs)
        self.sharded = frozenset(i.name for i in inputs if i.is_sharded)
        for name in self.sharded & self.params.keys():
            keep_in_place(self.params[name])
        self.device = model.session.device
        _keep_elsewhere(self.params, self.device)
        if torch.is_grad_enabled():
            _keep_unowned(self.params.values())
        self.awaited = frozenset(
            name for name, param in self.params.items() if param.requires_grad and listener_of(param) is not None
        )
        self.agreement = agreement
        self.origin = origin_of(inputs)
        self.budget_bytes = device_budget_bytes(self.device, options)
        self.note_on_sizes = _note_on_sizes(unbounded(gm.graph))
        if self.budget_bytes is not None:
            for note in self.note_on_sizes:
                log.warning("memory_budget may not be kept: %s", note)
        if self.budget_bytes is not None and not agreement.is_shared:
            self._limit_sizes()
        self.digest = graph_digest(gm, inputs, options)
        self.graph_break = dynamo.graph_break_behind(gm) or ""
        if torch.is_grad_enabled():
            model.shares.note_graph(self.origin, self.digest, self.graph_break, calls.outermost())
        self.others_bytes = model.shares.taken_by_others(self.origin, options.micro_batches)
        elsewhere = model.shares.read_by_others(self.origin)
        self.unread = tuple(tensor for _, tensor in unread(calls.modules_called(), inputs, elsewhere))
        if model.shares.repeats:  # layers that the graph runs for, too, count with it
            self.unread = tuple(tensor for tensor in self.unread if placement_of(tensor) is None)
        self.unread_so_far_bytes = unread_bytes(self.unread, self.device.type) + model.shares.eager_bytes
        self.kept_bytes = model.kept_bytes.get(self.origin, 0) if torch.is_grad_enabled() else 0
        self.listening_bytes = _listening_bytes(self.params.values())
        self.outside = model.taken_outside(self.origin) if torch.is_grad_enabled() else Taken()
        self._may_be_followed = self._may_follow()
        self.trained_bytes = (trained_bytes if model.is_placed else kept_bytes)(self.params.values())
        self.frozen_bytes = kept_bytes(param for param in self.params.values() if not param.requires_grad)
        measured = functools.partial(machine_of, self.device, model.session, options, agreement.num_on_host)
        self.machine = agreement.by_turns("machine", measured)
        self.bucket_bytes = versions.ddp_bucket_bytes()
        self.host_bytes = host_budget_bytes(self.device, options)

    def _limit_sizes(self) -> None:
        """A few times: PyTorch gives up a function that is compiled too often. Ranks that share a model have sizes of their own."""
        sizes = sizes_that_may_change(self.gm, self.inputs)
        if not sizes:
            return
        kind = self.origin, torch.is_grad_enabled()
        self.model.num_limited[kind] += 1
        count = self.model.num_limited[kind]
        if count <= _MOST_LIMITED:
            limit_sizes(sizes)
        elif count == _MOST_LIMITED + 1:
            log.warning(
                "a graph %s was compiled %d times for inputs whose sizes change, each time for none larger. From now on it serves"
                " all sizes: larger ones may take more than memory_budget. Begin with the largest, or pad inputs to a few sizes",
                "for training" if torch.is_grad_enabled() else "without gradients",
                count - 1,
            )

    def agree(self) -> None:
        """With the other ranks that hold the parameters, on what decides the plan. Raises ShardError where they cannot."""
        agreed = self.agreement
        if not agreed.is_shared:
            return
        placeholders = self.gm.graph.find_nodes(op="placeholder")
        traced = [node.meta.get("example_value") for node in placeholders]  # sizes that may change are symbols there
        shapes = [
            list(value.shape)
            for item, value in zip(self.inputs, traced, strict=True)
            if isinstance(value, torch.Tensor) and not item.is_parameter
        ]
        code = hashlib.sha256(repr(described_code(self.gm)).encode()).hexdigest()[:12]
        agreed.same("graph", {"parameters": sorted(self.params), "inputs": repr(shapes), "code": code})
        agreed.same("version", {"torch": torch.__version__, "autohete_fx": sources_digest()})
        agreed.same("options", described_options(self.options))
        self.budget_bytes = agreed.least("memory budget", self.budget_bytes)
        if self.options.host_budget is None:
            self.host_bytes = agreed.share_of_host(self.host_bytes)
        self.host_bytes = agreed.least("host budget", self.host_bytes)
        self.machine = agreed.machine(self.machine, self.device)
        self._may_be_followed = bool(agreed.most("graphs to follow", self._may_be_followed))
        # Eager code trains those experts that a rank's own rows choose.
        self.unread_so_far_bytes = agreed.most("unread bytes", self.unread_so_far_bytes)
        # The last rank's shards are padded, so that its buckets have other sizes.
        self.listening_bytes = agreed.most("bytes of listeners", self.listening_bytes)

    def key(self) -> str:
        """A digest of everything that decides the plan and the code, the same in every process."""
        options = self.options
        parts = (
            self.digest,
            self.model.session.digest,
            sources_digest(),
            dataclasses.replace(self.machine, host_bytes=0).digest,  # what is free changes by the minute
            self.budget_bytes,
            (
                options.host_budget,
                options.profile,
                sorted(options.allow),
                options.in_flight,
                options.solver_time_limit_s,
                options.plan.digest if options.plan else None,
            ),
            tuple(self._placement_text(name) for name in sorted(self.params)),
            self.others_bytes,
            self.unread_so_far_bytes,
            (*dataclasses.astuple(self.outside), self.kept_bytes),
            self.frozen_bytes if torch.is_grad_enabled() else self.trained_bytes,
            (
                self.crowding_bytes,
                self.is_unsettled,
                self.decided,
                *(u.problem.digest for u in self.unsettled.values()),
            ),
            (self.model.shares.is_call_over and bool(self.unsettled), self.model.shares.repeats),
            self.bucket_bytes,
            sorted(self.sharded),
            (sorted(self.awaited), self.listening_bytes),
            self.agreement.rank_of_code,
            surroundings(self.device),
        )
        return hashlib.sha256(repr(parts).encode()).hexdigest()[:24]

    @property
    def unread_bytes(self) -> int:
        """Device bytes of the model that no graph reads; 0 while graphs may follow that read them."""
        return 0 if self._may_be_followed else self.unread_so_far_bytes

    @property
    def crowding_bytes(self) -> int:
        """Device bytes that graphs of which nothing is known may hold while this one runs, at least; 0 where none may follow."""
        return self.unread_so_far_bytes + unmoved_bytes(self.unread) if self.is_unsettled else 0

    @property
    def is_unsettled(self) -> bool:
        """Whether graphs of the same call may follow of which nothing is known, so that the plan is to take least."""
        return self.budget_bytes is not None and self.options.plan is None and self._may_be_followed

    def _may_follow(self) -> bool:
        """Whether graphs of the first call may follow of which nothing is known."""
        shares = self.model.shares
        if shares.is_call_over:
            return False
        if self.graph_break or not calls.is_compiling_root():
            return True
        if not torch.is_grad_enabled():  # other functions without gradients are planned each by itself
            return False
        return shares.awaits_others(self.origin) or unplanned.awaited(siblings_of(self.params.values())) is not None

    @property
    def decided(self) -> Share | None:
        """The decisions made together with other graphs of the call; None where there are none."""
        share = self.model.shares.decided.get(self.origin)
        return share if share is not None and share.digest == self.digest else None

    @property
    def unsettled(self) -> dict[Origin, Unsettled]:
        """Other graphs of the call, in the order of their forwards, that are to be planned together with this one."""
        if self.budget_bytes is None or self.options.plan is not None or self.is_unsettled or self.decided is not None:
            return {}
        noted = self.model.shares.unsettled
        return {other: found for other, found in noted.items() if self.model.shares.runs_beside(self.origin, other)}

    def _placement_text(self, name: str) -> tuple[object, ...]:
        param, placement = self.params[name], placement_of(self.params[name])
        where = ("", "") if placement is None else (placement.params.value, placement.optimizer.value)
        owner = optimizer_of(param)
        clips = owner is not None and owner.max_grad_norm is not None
        updated = (
            ("", state_bytes(param))
            if owner is None
            else (owner.overlap.value, clips, owner.rule_of(param).name, state_bytes(param), product_flops(param))
        )
        return (name, *where, *updated)

    def param_infos(self, gm: fx.GraphModule) -> dict[str, ParamInfo]:
        """The facts that the profiler needs of the parameters that can move, by placeholder of ``gm``."""
        return param_infos(gm, self.inputs, self.params)

    def problem(self, blocks: BlockGraph, profile: Profile, *, training: bool) -> Problem:
        """The problem that the planner solves. Raises PlanError where the given plan moves what must stay."""
        if training and self.sharded and self.options.plan is not None:
            refuse_moving(self.options.plan, blocks, self.sharded)
        limits = Limits(
            device_budget_bytes=self.budget_bytes,
            host_budget_bytes=self.host_bytes,
            fixed_bytes=(self.options.in_flight if training else 1) * input_bytes(self.inputs)
            + self.small_bytes(training)
            + (self.frozen_bytes if training else self.trained_bytes)
            + self.others_bytes
            + self.unread_bytes
            + tuning_bytes(self.device, self.options)
            + (self.bucket_bytes or 0)
            + ((averaging_bytes(self.params.values()) + self.listening_bytes + self.kept_bytes) if training else 0),
        )
        problem = make_problem(
            blocks,
            with_outside(profile.costs, self.outside if training else Taken()),
            self.machine,
            self.options,
            limits,
            self.params,
            training=training,
            copies_gradients=bool(self.awaited),
            placed=[
                name
                for name, param in self.params.items()
                if self.decided is None and (param in self.model.placed or not training)
            ],
        )
        if training:
            problem = saying_outside(problem, self.outside.peak_bytes, self.kept_bytes)
        if self.sharded:
            problem = leaving_parameters(problem)
        return problem if self.bucket_bytes is None else reducing_after_backward(problem)

    def notes(self) -> tuple[str, ...]:
        """Remarks for the user about how a training step was planned."""
        params = [param for name, param in self.params.items() if name not in self.sharded]
        shards = (NOTE_ON_SHARDS,) if self.sharded else ()
        reduction = () if self.bucket_bytes is None else (note_on_reduction(params, self.bucket_bytes),)
        ends = (f"the graph ends before its function, at {self.graph_break}",) if self.graph_break else ()
        least = (_NOTE_ON_LEAST,) if self.is_unsettled else ()
        replicas = notes_on_replicas(params)
        return (*notes_on_optimizer(params), *shards, *reduction, *replicas, *least, *ends, *self.note_on_sizes)

    def small_bytes(self, training: bool) -> int:
        """Parameters that stay on the device whatever is decided, with their optimizer states and accumulated gradients."""
        accumulates = self.options.micro_batches > 1 or bool(self.awaited)
        return small_bytes(self.params.values(), training=training, accumulates=accumulates)

    def free_bytes(self) -> int | None:
        """Bytes that the budget leaves beside the inputs and what is on the device now of parameters, states and gradients."""
        if self.budget_bytes is None:
            return None
        taken = sum(param.nbytes for param in self.params.values() if not is_home(param))
        taken += (
            kept_bytes(self.params.values())
            + input_bytes(self.inputs)
            + self.others_bytes
            + self.unread_bytes
            + (self.bucket_bytes or 0)
        )
        return max(0, self.budget_bytes - taken - tuning_bytes(self.device, self.options))


def _listening_bytes(params: Iterable[torch.Tensor]) -> int:
    listeners = {id(found): found for param in params if (found := listener_of(param)) is not None}
    return sum(listener.device_bytes for listener in listeners.values())


_MOST_LIMITED = 4
_NOTE_ON_LEAST = (
    "this plan takes least, because other graphs of the call may follow: before the second call all of them are planned"
    " together"
)


def _note_on_sizes(names: Sequence[str]) -> tuple[str, ...]:
    """A remark on nodes whose size nobody knows, where there are any."""
    if not names:
        return ()
    others = f", as of {len(names) - 1} others," if len(names) > 1 else ""
    return (
        f"the size of {names[0]!r}{others} depends on values, and nothing says how large it can be. It counts as 1; tell a bound in"
        " the model with torch._check(size <= LARGEST)",
    )


def _keep_elsewhere(params: Mapping[str, torch.nn.Parameter], device: torch.device) -> None:
    """Parameters on another device than the one that computes stay there: the code is compiled for it."""
    names = [name for name, p in params.items() if p.device != device and is_movable(p)]
    if names:
        log.warning(
            "parameter %s is on %s, and the graph computes on %s. It stays there with its optimizer states, as do %d others. No"
            " plan moves them; put the whole model on one device to have it planned",
            names[0],
            params[names[0]].device,
            device,
            len(names) - 1,
        )
    for name in names:
        keep_in_place(params[name])


def _keep_unowned(params: Iterable[torch.nn.Parameter]) -> None:
    """Where an optimizer of ours has most of what is trained, the rest stays where it is, with its states. It stops no others."""
    movable = [param for param in params if param.requires_grad and is_movable(param) and not is_home(param)]
    without = [param for param in movable if optimizer_of(param) is None]
    if without and 2 * sum(param.nbytes for param in without) < sum(param.nbytes for param in movable):
        for param in without:
            keep_in_place(param)
