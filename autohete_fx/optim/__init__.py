"""Optimizers whose states and step follow the plan, and who updates which parameter."""

from autohete_fx.optim.adamw import AdamW
from autohete_fx.optim.lion import Lion
from autohete_fx.optim.owners import optimizer_of

__all__ = ["AdamW", "Lion", "optimizer_of"]
