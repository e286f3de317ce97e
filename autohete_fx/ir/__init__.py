"""The values handed between stages: frozen, torch-free, comparable, printable.

Nothing here holds an ``fx.Node``: graphs are referred to by node *name*, parameters by fully qualified
name. Units are in the names: ``_s`` seconds, ``_bytes``, ``_bytes_per_s``.
"""

from autohete_fx.ir.block import Block, BlockGraph, BlockKind, Edge
from autohete_fx.ir.cost import ActivationCost, BlockCost, Profile
from autohete_fx.ir.decision import (
    PARTIAL,
    Activations,
    BlockDecision,
    Optimizer,
    Overlap,
    Params,
    Schedule,
    staging_bytes,
)
from autohete_fx.ir.lane import Lane, LaneTime
from autohete_fx.ir.machine import Machine
from autohete_fx.ir.plan import SCHEMA_VERSION, Plan
from autohete_fx.ir.problem import Problem
from autohete_fx.ir.reasons import Alternative, BlockReasons, Memory, MemoryUse, Reasons
from autohete_fx.ir.record import LaneRecord, MemoryRecord, PassRecord, StepRecord
from autohete_fx.ir.transfer import Transfer

__all__ = [
    "PARTIAL",
    "SCHEMA_VERSION",
    "ActivationCost",
    "Activations",
    "Alternative",
    "Block",
    "BlockCost",
    "BlockDecision",
    "BlockGraph",
    "BlockKind",
    "BlockReasons",
    "Edge",
    "Lane",
    "LaneRecord",
    "LaneTime",
    "Machine",
    "Memory",
    "MemoryRecord",
    "MemoryUse",
    "Optimizer",
    "Overlap",
    "Params",
    "PassRecord",
    "Plan",
    "Problem",
    "Profile",
    "Reasons",
    "Schedule",
    "StepRecord",
    "Transfer",
    "staging_bytes",
]
