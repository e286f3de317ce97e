"""The planner's input."""

import hashlib
import json
from dataclasses import asdict, dataclass, field

from autohete_fx.ir.block import Edge
from autohete_fx.ir.cost import BlockCost
from autohete_fx.ir.decision import BlockDecision, Schedule
from autohete_fx.ir.machine import Machine


@dataclass(frozen=True, slots=True, kw_only=True)
class Problem:
    """Costs, machine and limits: everything that decides a plan.

    Attributes:
        labels: one name a block, for messages.
        costs: in forward execution order.
        edges: activations between blocks.
        machine: capacities and rates.
        device_budget_bytes: peak device memory allowed; None for no limit.
        host_budget_bytes: host memory allowed for homes; None for no limit.
        fixed_bytes: device bytes that live through the whole step and that no decision changes. They are inputs, buffers, what
            other graphs hold, and on a GPU room to time kernels in.
        allow_recompute, allow_offload_activations, allow_host_params, allow_host_optimizer: what may be decided.
        allow_keeping_fetched: likewise, beside ``allow_host_params``, or where ranks gather parameters.
        allow_replicating: likewise, where ranks gather parameters: whether `BlockDecision.replicates` may be decided.
        allow_moving_some_states: likewise, beside ``allow_host_optimizer``: whether ``num_moved_states`` may be decided.
        allow_streamed_optimizer, allow_disk_optimizer: likewise, beside ``allow_host_optimizer``.
        schedule: when updates on the host run. On a CPU device they always run inside ``optimizer.step()``.
        update_workspace_bytes: memory that updates of whole parameters, one after the other, need where they run.
        slot_bytes: device memory that updates of streamed whole parameters need, slots for their states and a workspace. Plans that
            stream none have no need of it.
        clips_gradients: whether the norm of all gradients must be known before the first update.
        micro_batches: forward and backward passes per optimizer step.
        in_flight: of these, the most whose forward has run and whose backward has not.
        num_ranks: how many ranks hold shards of the parameters.
        num_replicas: how many ranks hold the same shards, and average gradients before they update.
        copies_gradients: whether copies of gradients that stay on the device are made while the last backward runs. They take the
            place of those of earlier micro-batches, or add to the gradients of the only one.
        training: False for an inference graph: no backward, gradients or optimizer.
        fixed_decisions: per block, decisions about params and optimizer that an earlier graph of the same model has made
            already, or None. Empty for no such decisions. The ``activations`` of such a decision are free.
        obstacles: pairs of a decision, by its word in the option ``allow``, and a sentence on what would let it be made. The
            decision cannot be made here although the user allows it. For messages: no part of the digest.
    """

    labels: tuple[str, ...]
    costs: tuple[BlockCost, ...]
    edges: tuple[Edge, ...]
    machine: Machine
    device_budget_bytes: int | None = None
    host_budget_bytes: int | None = None
    fixed_bytes: int = 0
    allow_recompute: bool = True
    allow_offload_activations: bool = True
    allow_host_params: bool = True
    allow_host_optimizer: bool = True
    allow_keeping_fetched: bool = True
    allow_replicating: bool = False
    allow_moving_some_states: bool = False
    allow_streamed_optimizer: bool = False
    allow_disk_optimizer: bool = False
    schedule: Schedule = field(default_factory=Schedule)
    update_workspace_bytes: int = 0
    slot_bytes: int = 0
    clips_gradients: bool = False
    micro_batches: int = 1
    in_flight: int = 1
    num_ranks: int = 1
    num_replicas: int = 1
    copies_gradients: bool = False
    training: bool = True
    fixed_decisions: tuple[BlockDecision | None, ...] = ()
    obstacles: tuple[tuple[str, str], ...] = ()

    def __post_init__(self) -> None:
        assert len(self.labels) == len(self.costs), "one label a block"
        assert 1 <= self.in_flight <= self.micro_batches, "micro-batches in flight are some of a step's"
        assert not self.fixed_decisions or len(self.fixed_decisions) == len(self.costs)

    @property
    def accumulates(self) -> bool:
        """Whether the gradients of a backward come on top of others."""
        return self.micro_batches > 1 or self.copies_gradients

    @property
    def digest(self) -> str:
        """Stable across processes; equal for equal problems."""
        decides = {name: value for name, value in asdict(self).items() if name != "obstacles"}
        text = json.dumps(decides, sort_keys=True, default=lambda e: e.value)
        return hashlib.sha256(text.encode()).hexdigest()[:16]
