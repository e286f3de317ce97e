"""Process groups that members make alone, in ranks that are in unlike numbers of groups."""

import datetime
from pathlib import Path

import torch
import torch.distributed as dist

from autohete_fx.internals.groups import new_group_of
from tests.dist import ranks


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
