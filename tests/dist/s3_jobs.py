"""A job of two ranks whose cloud is an S3 server: counted, slow, and gone."""

import logging
import shutil
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch.distributed.checkpoint.metadata import Metadata

from autohete_fx import cluster
from autohete_fx.cluster.job.job import JobLog
from autohete_fx.cluster.store import restore as restoring
from autohete_fx.cluster.store.saving import Saver
from autohete_fx.cluster.store.store import Place, Save
from autohete_fx.errors import AutoHeteError
from autohete_fx.internals.checkpoints import FsspecReader
from tests.dist.cluster_jobs import (
    CLIP,
    Model,
    compare_states,
    load,
    loss_of,
    made_optimizer,
    plan_of,
    rate,
    trained_alone,
)
from tests.s3_server import tell

ROWS = [(2, 4, [2, 4])]
"""One pipeline, so that a node that is lost takes its layers along."""


class Lines(logging.Handler):
    """Keeps what is logged."""

    def __init__(self) -> None:
        super().__init__()
        self.lines: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.lines.append(record.getMessage())


def leg(root: str, cloud: str, nodes: Sequence[str], steps: int, during: Any = None, **store: Any) -> dict[str, Any]:
    """Go on until so many steps are done; ``during`` is called with the job before the first step and after each.

    Returns the step it began with, differences from one process, and what was said and saved.
    """
    rank, plan = dist.get_rank(), plan_of(ROWS)
    stages = tuple(replace(stage, node=nodes[place]) for place, stage in enumerate(plan.pipelines[0].stages))
    plan = replace(plan, pipelines=(replace(plan.pipelines[0], stages=stages),))
    seen, start, params, states = trained_alone(3, True, plan.global_batch, "torch", steps)
    said, spoken = Lines(), list[str]()
    logging.getLogger("autohete_fx").addHandler(said)
    say, JobLog.say = JobLog.say, lambda _, line: spoken.append(line)
    try:
        job = cluster.join(
            lambda: Model(3, True),
            loss_of,
            example=load(range(1)),
            global_batch=plan.global_batch,
            plan=plan,
            optimizer=made_optimizer("torch"),
            store=cluster.Store(
                **{"local": f"{root}/{nodes[rank]}", "cloud": cloud, "every": 2, "cloud_every": 2, **store}
            ),
            learning_rate=rate,
            max_grad_norm=CLIP,
            weights=lambda name: start[name],
            backend=None,
            member=cluster.Member(node=nodes[rank], gpu="cpu"),
        )
        found: dict[str, Any] = {"first": job.step, "loss": 0.0, "weights": 0.0, "states": 0.0, "spoken": spoken}
        if during is not None:
            during(job)
        while job.step < steps:
            step = job.train_step(load)
            found["loss"] = max(found["loss"], abs(step.loss - seen[step.step][0]))
            if during is not None:
                during(job)
        saved = job.finish()
        compare_states(job, params, states, found)
    except AutoHeteError as error:
        return {"error": str(error)}
    finally:
        JobLog.say = say
        logging.getLogger("autohete_fx").removeHandler(said)
    dist.barrier()
    return {**found, "saved": [saved.local, saved.cloud], "logged": said.lines}


def ranges(place: Place, params: set[str]) -> dict[str, list[list[int]]]:
    """By file, where the newest save in the cloud has tensors of parameters."""
    save = place.saves()[-1]
    found: dict[str, list[list[int]]] = {}
    for path in {path for path, _ in place.parts(save).values()}:
        metadata: Metadata = FsspecReader(path).read_metadata()
        for index, info in metadata.storage_data.items():
            if index.fqn.partition("/")[0] in params:
                file = f"{path}/{info.relative_path}".removeprefix("s3:/")
                found.setdefault(file, []).append([info.offset, info.offset + info.length])
    return found


def committed(root: str) -> list[int]:
    """Steps that count as saved where rank 0 fails to save the first of three, and rank 1 the second."""
    rank, found = dist.get_rank(), []
    store = cluster.Store(local=f"{root}/commits-{rank}", every=1, cloud_every=1)
    saver = Saver(store, "g", None, owned=[], held={}, all_names=["x"], cleans=True)
    write = Place.write

    def fails(place: Place, save: Save, part: int, tensors: Any) -> str:
        if (rank, save.step) in ((0, 1), (1, 2)):
            raise OSError("full")
        return write(place, save, part, tensors)

    with mock.patch.object(Place, "write", fails):
        for step in (1, 2, 3):
            saver.save(step, {}, cloud=False)
            found.append(saver.drain().local)
    return found


def broken(read: Any, found: Any, source: str, *rest: Any, **more: Any) -> int:
    if source == "cloud" and dist.get_rank() == 1:
        raise OSError("reset by peer")
    return read(found, source, *rest, **more)


def every_way(root: str, cloud: str, url: str) -> dict[str, Any]:
    """All that happens to a cloud, one after another in the same processes."""
    torch.set_default_dtype(torch.float64)
    rank = dist.get_rank()
    found: dict[str, Any] = {"commits": committed(root)}

    def told(**said: str) -> None:
        dist.barrier()
        if rank == 0:
            tell(url, **said)
        dist.barrier()

    found["begin"] = leg(root, cloud, ["a", "b"], 4)
    near = set(Place(f"{root}/a").parts(Place(f"{root}/a").saves()[-1]))
    found["missing"] = ranges(Place(cloud), set(dict(Model(3, True).named_parameters())) - near)
    told(mark="lost")
    if rank == 0:
        shutil.rmtree(Path(root) / "b")
    found["lost"] = leg(root, cloud, ["a", "c"], 4)
    told(mark="after")

    # nodes that changed their places read the cloud where peers are slow, and what peers have where it cannot be read
    swapped: Any = {"bandwidths": cluster.Bandwidths(peer=1.0, cloud=1e9, cloud_first_s=0.0)}
    found["quick cloud"] = leg(root, cloud, ["c", "a"], 6, **swapped)
    read = restoring._read
    with mock.patch.object(restoring, "_read", partial(broken, read)):
        found["broken cloud"] = leg(root, cloud, ["a", "c"], 6, **swapped)

    # writes wait for ever: training goes on, saves on disks too, and the next save to the cloud is left out
    told(hold="PUT")

    def release(job: cluster.Job) -> None:
        if job.step == 11:
            found.setdefault("while slow", [job.saved.local, job.saved.cloud])
            told(release="1")

    found["slow writes"] = leg(root, cloud, ["a", "c"], 12, release)
    told(hold="GET")  # a listing, too
    found["slow reads"] = leg(root, cloud, ["a", "c"], 12, lambda _: told(release="1"), cloud_timeout_s=0.5)
    told(close="1")
    found["gone"] = leg(root, cloud, ["a", "c"], 14)
    return found
