"""Process groups that members make alone, in ranks that are in unlike numbers of groups; two of equal meshes at one time."""

import datetime
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

import autohete_fx
from autohete_fx.internals.groups import new_group_of
from autohete_fx.runtime.shard import shard
from autohete_fx.runtime.shard.parts import part_of
from tests.dist import ranks
from tests.layers import EAGER, Layers


def sums_of_pairs() -> list[float]:
    """The first rank is in one more group than the second, as one of a job with stages of unlike sizes is."""
    rank, timeout = dist.get_rank(), datetime.timedelta(seconds=60)
    dist.new_group([0, 2])
    found = []
    for members in ([0, 1], [0, 1], [1, 2]):
        if rank in members:
            group = new_group_of(members, timeout=timeout)
            value = torch.tensor(float(rank + 1))
            dist.all_reduce(value, group=group)
            found.append(value.item())
    return found


def test_members_meet_however_many_groups_each_is_in(tmp_path: Path):
    found = ranks.run("tests.dist.test_groups.sums_of_pairs", tmp_path, num_ranks=3)
    assert found == [[3.0, 3.0], [3.0, 3.0, 5.0], [5.0]]


def equal_meshes() -> list[Any]:
    """Whether two meshes are equal, models' groups are those of the later one, and models that train in turn end as alone. A
    step without that group is an error."""
    groups = [dist.new_group([0, 1]) for _ in range(2)]
    meshes = [DeviceMesh.from_group(group, "cpu") for group in groups]
    alone = _Trained(meshes[0])
    for _ in range(2):
        alone.step()
    expected, models = alone.values(), [_Trained(mesh) for mesh in meshes]
    for at in (0, 1, 1, 0):
        models[at].step()
    found = [meshes[0] == meshes[1], [each.group is groups[1] for each in models]]
    found.append([all(map(torch.equal, each.values(), expected)) for each in models])
    dist.destroy_process_group(groups[1])
    torch._dynamo.reset()
    with pytest.raises(Exception, match=r"Process group .* not initialized"):
        models[0].step()
    return found


class _Trained:
    """A model on a mesh, whose steps have batches that differ by rank."""

    def __init__(self, mesh: DeviceMesh) -> None:
        torch._dynamo.reset()
        torch.manual_seed(0)
        self._model, self._at = shard(Layers(), mesh), 0
        self._optimizer = autohete_fx.AdamW(self._model.parameters(), lr=1e-2, max_grad_norm=0.3)
        self._model.compile(backend="autohete", options={**EAGER, "solver_time_limit_s": 1})

    @property
    def group(self) -> dist.ProcessGroup:
        part = part_of(next(self._model.parameters()))
        assert part is not None
        return part.ranks.group

    def step(self) -> None:
        torch.manual_seed(10 * self._at + dist.get_rank())
        self._at += 1
        self._model(torch.randn(64, 128)).backward()
        self._optimizer.step()
        self._optimizer.zero_grad()

    def values(self) -> list[Tensor]:
        with autohete_fx.gathered(self._model):
            return [param.detach().clone() for param in self._model.parameters()]


@pytest.mark.slow
def test_models_on_equal_meshes_of_other_groups_train_beside_each_other(tmp_path: Path):
    assert ranks.run("tests.dist.test_groups.equal_meshes", tmp_path) == [[True, [True, True], [True, True]]] * 2
