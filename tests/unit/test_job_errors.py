"""Errors of a cluster job's step: what went wrong is told with its cause."""

import pytest
import torch

from autohete_fx.cluster.job.job import Job
from autohete_fx.errors import ClusterError


def failing(cause: Exception) -> object:
    """A step as PyTorch's schedule fails: it wraps what the model raised."""

    def fails(self: Job, load: object) -> torch.Tensor:
        try:
            raise cause
        except Exception as error:
            raise RuntimeError("[Stage 0] failed to run forward") from error

    return fails


def test_an_error_of_the_model_keeps_its_cause(monkeypatch: pytest.MonkeyPatch):
    cause = ValueError("a mask of the wrong shape")
    monkeypatch.setattr(Job, "_train", failing(cause))
    with pytest.raises(RuntimeError, match="failed to run forward") as caught:
        object.__new__(Job).train_step(lambda samples: torch.zeros(len(samples)))
    assert caught.value.__cause__ is cause


def test_an_error_of_ours_is_raised_itself(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(Job, "_train", failing(ClusterError("a batch of str was given")))
    with pytest.raises(ClusterError, match="a batch of str was given"):
        object.__new__(Job).train_step(lambda samples: torch.zeros(len(samples)))
