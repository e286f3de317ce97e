"""Digests of nodes that no model here has."""

import pytest
import torch
import torch.distributed._functional_collectives  # the operators
from torch import fx

from autohete_fx.capture import digest
from autohete_fx.capture.digest import group_digest


def digest_of(group: str, *, kind: str = "sum", by_name: bool = False) -> str:
    """Of a sum over a process group of that name."""
    graph = fx.Graph()
    x = graph.placeholder("x")
    x.meta["val"] = torch.empty(3, 4, device="meta")
    reduce = torch.ops._c10d_functional.all_reduce.default
    node = (
        graph.call_function(reduce, (x, kind), {"group_name": group})
        if by_name
        else graph.call_function(reduce, (x, kind, group))
    )
    node.meta["val"] = x.meta["val"]
    return group_digest([node], (), ())


@pytest.mark.parametrize("by_name", [False, True])
def test_process_groups_count_by_their_sizes(by_name: bool, monkeypatch: pytest.MonkeyPatch):
    """Their names are numbers in the order of making. A stored plan would only fit a job that has made as many groups before."""
    monkeypatch.setattr(digest, "size_of_group", {"3": 2, "12": 2, "4": 4}.__getitem__)
    assert digest_of("3", by_name=by_name) != digest_of("4", by_name=by_name)
    assert digest_of("3", by_name=by_name) == digest_of("12", by_name=by_name)
    assert digest_of("3", by_name=by_name) != digest_of("3", kind="max", by_name=by_name)
