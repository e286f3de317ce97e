"""A job that is told to leave by SIGTERM: what is saved where nobody stays, and whose signal it is before and after."""

import json
import os
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from autohete_fx import cluster
from autohete_fx.cluster.deploy import Member
from autohete_fx.cluster.job.leaving import Notice
from autohete_fx.cluster.plan import ClusterPlan, Pipeline, Stage
from autohete_fx.cluster.store.store import Place
from autohete_fx.errors import OptimizerStateError


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(4, 4) for _ in range(2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x)
        return x


@pytest.fixture
def heard() -> Iterator[list[int]]:
    """What a user's handler of SIGTERM has heard."""
    found: list[int] = []
    before = signal.signal(signal.SIGTERM, lambda number, _: found.append(number))
    yield found
    signal.signal(signal.SIGTERM, before)


@pytest.fixture(autouse=True)
def _group() -> Iterator[None]:
    yield
    if dist.is_initialized():
        dist.destroy_process_group()


def joined(store: cluster.Store | None = None, **options: Any) -> cluster.Job:
    stage = Stage(node="n", gpu="cpu", tp=1, first=0, last=3)
    return cluster.join(
        Net,
        lambda out, batch: out.square().mean(),
        example=load(range(1)),
        global_batch=2,
        optimizer=lambda params: torch.optim.SGD(params, lr=0.1),
        plan=ClusterPlan(model="m", pipelines=(Pipeline(stages=(stage,), micro_batch=1, micro_batches=2),)),
        member=Member(node="n", gpu="cpu"),
        device="cpu",
        backend=None,
        store=store,
        **options,
    )


def load(samples: range) -> torch.Tensor:
    return torch.stack([torch.full((4,), float(sample)) for sample in samples])


def told() -> None:
    os.kill(os.getpid(), signal.SIGTERM)


@pytest.mark.parametrize("cloud", [True, False])
def test_where_every_node_leaves_the_state_is_saved_in_the_cloud(
    tmp_path: Path, cloud: bool, heard: list[int], capsys: pytest.CaptureFixture[str]
):
    store = cluster.Store(
        local=tmp_path / "disk", cloud=f"{tmp_path}/cloud" if cloud else None, every=50, cloud_every=50
    )
    job = joined(store, log=str(tmp_path / "log.jsonl"))
    told()
    with pytest.raises(SystemExit) as left:
        job.train_step(load)
    assert left.value.code == 0 and job.step == 1
    assert heard == [signal.SIGTERM], "once nobody waits for this rank any more"
    for place in ("disk", "cloud")[: 1 + cloud]:
        assert [save.step for save in Place(f"{tmp_path}/{place}").saves()] == [1]
    said = capsys.readouterr().err
    assert f"no node stays: step 1 is saved on their disks{' and in the cloud' * cloud}\n" in said
    assert "went to other nodes" not in said
    events = {row["event"]: row for row in map(json.loads, (tmp_path / "log.jsonl").read_text().splitlines())}
    assert events["leave"]["peer_bytes"] == 0 and events["finish"]["cloud"] == (1 if cloud else -1)


def test_sigterm_is_the_users_again_after_a_job(heard: list[int]):
    users = signal.getsignal(signal.SIGTERM)
    with pytest.raises(OptimizerStateError):
        joined(max_grad_norm=-1.0)
    assert signal.getsignal(signal.SIGTERM) == users
    unfinished, job = joined(), joined()
    assert unfinished.notice is not job.notice and signal.getsignal(signal.SIGTERM) != users
    job.train_step(load)
    assert not heard
    told()
    job.finish()
    assert heard == [signal.SIGTERM], "it came before the end"
    assert signal.getsignal(signal.SIGTERM) == users
    told()
    assert len(heard) == 2


@pytest.mark.parametrize(("before", "ends"), [(signal.SIG_DFL, True), (signal.SIG_IGN, False)])
def test_sigterm_without_a_handler_ends_a_process_that_has_handed_over(
    heard: list[int], before: signal.Handlers, ends: bool
):
    signal.signal(signal.SIGTERM, before)
    notice = Notice()
    notice.listen()
    told()
    assert notice.given
    if ends:
        with pytest.raises(SystemExit):
            notice.end()
    else:
        notice.end()
    assert signal.getsignal(signal.SIGTERM) == before and not heard


def test_a_handler_that_was_set_after_the_join_stays():
    notice = Notice()
    notice.listen()
    before = signal.signal(signal.SIGTERM, signal.SIG_IGN)
    notice.end()
    assert signal.getsignal(signal.SIGTERM) == signal.SIG_IGN
    signal.signal(signal.SIGTERM, before)
    notice.end()


@pytest.mark.parametrize("norm", [-1.0, 0.0, float("nan"), "much"])
def test_a_norm_that_gradients_cannot_be_clipped_to_is_told(norm: Any):
    with pytest.raises(OptimizerStateError, match=r"max_grad_norm is .*; expected a number above 0, or None"):
        joined(max_grad_norm=norm)
