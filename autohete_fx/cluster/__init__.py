"""Plans over many devices that are not alike, and runs of them.

``cluster.join`` takes part in a training job; ``cluster.Store`` says where it saves, ``cluster.export`` makes a plain model of a
store, and ``cluster.ClusterPlan`` reads a plan. They are imported when they are first used.
"""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from autohete_fx.cluster.deploy import Member as Member
    from autohete_fx.cluster.job.job import Job as Job
    from autohete_fx.cluster.job.job import TrainStep as TrainStep
    from autohete_fx.cluster.job.joining import join as join
    from autohete_fx.cluster.plan import ClusterPlan as ClusterPlan
    from autohete_fx.cluster.store.exported import export as export
    from autohete_fx.cluster.store.sources import Bandwidths as Bandwidths
    from autohete_fx.cluster.store.store import Store as Store

_PLACES = {
    "Bandwidths": "store.sources",
    "ClusterPlan": "plan",
    "Job": "job.job",
    "Member": "deploy",
    "Store": "store.store",
    "TrainStep": "job.job",
    "export": "store.exported",
    "join": "job.joining",
}

__all__ = ["Bandwidths", "ClusterPlan", "Job", "Member", "Store", "TrainStep", "export", "join"]


def __getattr__(name: str) -> Any:
    if name not in _PLACES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.{_PLACES[name]}"), name)
