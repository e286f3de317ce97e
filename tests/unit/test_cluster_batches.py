"""Batches as users give them, and what a model gets of them."""

import pytest
import torch
from torch import Tensor, nn

from autohete_fx.cluster.model.batches import batch_of, call
from autohete_fx.errors import ClusterError
from tests.tiny_models import GPT

IDS = torch.zeros(2, 8, dtype=torch.int64)


@pytest.mark.parametrize(
    ("given", "words"),
    [
        (3, "a batch of int"),
        ({"a": torch.zeros(2), "b": torch.zeros(3)}, "Expected was one number"),
        ((torch.zeros(2), "text"), "Tensor, str"),
        ({}, "was given"),
    ],
)
def test_batches_that_are_none_are_told(given: object, words: str):
    with pytest.raises(ClusterError, match=words):
        batch_of(given)


def test_a_model_reads_those_tensors_of_a_batch_that_its_forward_names():
    model = GPT(2)
    named = batch_of({"ids": IDS, "labels": IDS})
    assert torch.equal(call(model.eval(), named), model(IDS))
    assert torch.equal(call(model, batch_of((IDS, IDS))), model(IDS))
    with pytest.raises(ClusterError, match="forward reads ids"):
        call(model, batch_of({"tokens": IDS}))


class Keywords(nn.Module):
    def forward(self, ids: Tensor, **others: Tensor) -> Tensor:
        return ids + others["mask"]


def test_a_forward_with_keywords_gets_all_of_a_batch():
    given = {"ids": torch.ones(2), "mask": torch.ones(2)}
    assert torch.equal(call(Keywords(), batch_of(given)), torch.full((2,), 2.0))
