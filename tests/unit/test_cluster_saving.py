"""Saves of one rank, of a group whose others are not there."""

from pathlib import Path

import torch

from autohete_fx.cluster.pieces import Piece
from autohete_fx.cluster.saving import Saved, Saver
from autohete_fx.cluster.store import Store
from autohete_fx.internals.fake_group import fake_default_group


def test_a_part_that_is_whole_is_not_written_again_when_the_cloud_gets_its_step(tmp_path: Path):
    piece = Piece("w")
    states = {piece: {"w/weight": torch.arange(4.0)}}
    with fake_default_group(1):
        store = Store(local=f"{tmp_path}/disk", cloud=f"{tmp_path}/cloud", every=1, cloud_every=1)
        saver = Saver(store, "g", None, owned=[piece], held={"w": piece}, all_names=["w"], cleans=True)
        saver.save(1, states, cloud=False)
        assert saver.drain() == Saved(local=1, cloud=-1)
        before = {path: path.stat().st_mtime_ns for path in tmp_path.glob("disk/*/*/*")}
        saver.save(1, states, cloud=True)
        assert saver.drain() == Saved(local=1, cloud=1)
        assert before and before == {path: path.stat().st_mtime_ns for path in tmp_path.glob("disk/*/*/*")}
        assert len(list(tmp_path.glob("cloud/*/*/*"))) == len(before)
