"""One graph as Dynamo hands it over, with everything that decides how it is compiled.

In: the graph, its real inputs, the options and the `Model` that it belongs to. Out: the budget, the measured machine, the
key under which its code and plan are kept, and the planner's `Problem` once its blocks are known.
"""

import dataclasses
import hashlib
from collections.abc import Sequence

import torch
from torch import fx
from torch._functorch import config as functorch_config
from torch._inductor import config as inductor_config

from autohete_fx import planning, versions
from autohete_fx.capture.inputs import GraphInput
from autohete_fx.ir import BlockGraph, Problem, Profile
from autohete_fx.model import Model, graph_digest, origin_of, sources_digest
from autohete_fx.optim.owners import optimizer_of
from autohete_fx.options import Options
from autohete_fx.pass_identity import pass_identity
from autohete_fx.profiler import ParamInfo
from autohete_fx.resources import device_budget_bytes, host_budget_bytes, machine_of, tuning_bytes
from autohete_fx.runtime.placement import placement_of
from autohete_fx.runtime.tiers import is_home


class CapturedGraph:
    """A graph and its surroundings.

    Attributes:
        params: the parameters among the inputs, by name.
        origin: what tells it from the model's other graphs.
        budget_bytes: peak device memory allowed; None for no limit.
        machine: capacities and rates.
    """

    def __init__(self, *, gm: fx.GraphModule, inputs: Sequence[GraphInput], options: Options, model: Model) -> None:
        self.gm = gm
        self.inputs = inputs
        self.options = options
        self.model = model
        self.params: dict[str, torch.nn.Parameter] = {
            i.name: i.tensor for i in inputs if i.is_parameter and isinstance(i.tensor, torch.nn.Parameter)
        }
        self.origin = origin_of(inputs)
        self.device = model.session.device
        self.budget_bytes = device_budget_bytes(self.device, options)
        self.machine = machine_of(self.device, model.session, options)

    def key(self) -> str:
        """Of everything that decides the plan and the code, the same in every process."""
        options = self.options
        parts = (
            graph_digest(self.gm, self.inputs, options),
            self.model.session.digest,
            sources_digest(),
            dataclasses.replace(self.machine, host_bytes=0).digest,  # what is free changes by the minute
            self.budget_bytes,
            (
                options.host_budget,
                options.profile,
                sorted(options.allow),
                options.plan.digest if options.plan else None,
            ),
            tuple(self._placement_text(name) for name in sorted(self.params)),
            self.model.taken_by_others(self.origin),
            _surroundings(self.device),
        )
        return hashlib.sha256(repr(parts).encode()).hexdigest()[:24]

    def _placement_text(self, name: str) -> tuple[object, ...]:
        param, placement = self.params[name], placement_of(self.params[name])
        where = ("", "") if placement is None else (placement.params.value, placement.optimizer.value)
        owner = optimizer_of(param)
        clips = owner is not None and owner.max_grad_norm is not None
        updated = ("", -1) if owner is None else (owner.overlap.value, clips, planning.state_bytes(param))
        return (name, *where, *updated)

    def param_infos(self, gm: fx.GraphModule) -> dict[str, ParamInfo]:
        """What the profiler must know of the parameters that can move, by placeholder of ``gm``."""
        return planning.param_infos(gm, self.inputs, self.params)

    def problem(self, blocks: BlockGraph, profile: Profile, *, training: bool) -> Problem:
        """What the planner solves."""
        limits = planning.Limits(
            device_budget_bytes=self.budget_bytes,
            host_budget_bytes=host_budget_bytes(self.device, self.options),
            fixed_bytes=planning.input_bytes(self.inputs)
            + self.small_bytes(training)
            + self.model.taken_by_others(self.origin)
            + tuning_bytes(self.device, self.options),
        )
        return planning.make_problem(
            blocks,
            profile.costs,
            self.machine,
            self.options,
            limits,
            self.params,
            training=training,
            keep_placement=self.model.is_placed,
        )

    def small_bytes(self, training: bool) -> int:
        """Parameters that stay on the device whatever is decided, with their optimizer states and accumulated gradients."""
        return planning.small_bytes(self.params.values(), training=training, micro_batches=self.options.micro_batches)

    def free_bytes(self) -> int | None:
        """What the budget leaves beside the inputs and the parameters that are on the device now."""
        if self.budget_bytes is None:
            return None
        taken = sum(param.nbytes for param in self.params.values() if not is_home(param))
        taken += planning.input_bytes(self.inputs) + self.model.taken_by_others(self.origin)
        return max(0, self.budget_bytes - taken - tuning_bytes(self.device, self.options))


_INDUCTOR_PASSES = (
    "pre_grad_custom_pass",
    "joint_custom_pre_pass",
    "joint_custom_post_pass",
    "post_grad_custom_pre_pass",
    "post_grad_custom_post_pass",
)


def _surroundings(device: torch.device) -> tuple[object, ...]:
    """State of the process that shapes the joint graph or its code: a plan made under another does not fit.

    PyTorch's own cache keys hold the same. Inductor's options for custom passes are not in its portable configuration.
    """
    user_passes = [versions.custom_passes(getattr(inductor_config, name)) for name in _INDUCTOR_PASSES]
    configs = (inductor_config, functorch_config)
    return (
        [sorted(config.save_config_portable(ignore_private_configs=False).items()) for config in configs],
        [[pass_identity(p) for p in passes] for passes in user_passes],
        [(torch.is_autocast_enabled(kind), torch.get_autocast_dtype(kind)) for kind in sorted({"cpu", device.type})],
        torch.are_deterministic_algorithms_enabled(),
        torch.get_float32_matmul_precision(),
    )
