"""Optimizers whose states and step follow the plan, and who updates which parameter."""

from autohete_fx.optim.adam import Adam
from autohete_fx.optim.adamw import AdamW
from autohete_fx.optim.lion import Lion
from autohete_fx.optim.muon import Muon
from autohete_fx.optim.owners import optimizer_of
from autohete_fx.optim.sgd import SGD

__all__ = ["SGD", "Adam", "AdamW", "Lion", "Muon", "optimizer_of"]
