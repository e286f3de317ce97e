"""Files of measured clusters, and which pairs of ranks are timed."""

import math
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist

from autohete_fx import cli
from autohete_fx.cluster.commands import doctor
from autohete_fx.cluster.costs import LayerBytes
from autohete_fx.cluster.deploy import Member
from autohete_fx.cluster.inputs.described import described, save_measured
from autohete_fx.cluster.measuring.costs import GpuCosts, KindTime, _table
from autohete_fx.cluster.measuring.links import links_of, nodes_of, trials_of
from autohete_fx.cluster.model.layers import Shape
from autohete_fx.cluster.spec import Cluster, Gpu, Node
from autohete_fx.errors import ClusterError
from autohete_fx.machine.devices import find_device, machine_of_spec, spec_of_machine
from tests import planner_problems

GPUS = ("x", "y")
MEMBERS = [
    *(Member(node="a", gpu="x") for _ in range(5)),
    *(Member(node="b", gpu="x") for _ in range(2)),
    *(Member(node="c", gpu="y") for _ in range(3)),
    Member(node="d", gpu="y"),
]


def measured() -> Cluster:
    trials = trials_of(MEMBERS)
    timed = links_of(trials, [[(1024.0, 1e6 + index), (1e6, 1e9 + index)] for index in range(len(trials))])
    return Cluster(
        gpus=tuple(Gpu(name=gpu, memory_bytes=2**30 + index) for index, gpu in enumerate(GPUS)),
        nodes=nodes_of(MEMBERS),
        within=timed.within,
        between=timed.between,
    )


def test_pairs_are_of_their_kind_and_no_rank_is_in_two():
    trials = trials_of(MEMBERS)
    for trial in trials:
        ranks = [rank for pair in trial.pairs for rank in pair]
        assert len(ranks) == len(set(ranks))
        for source, target in trial.pairs:
            assert (MEMBERS[source].gpu, MEMBERS[target].gpu) == (trial.source, trial.target)
            assert (MEMBERS[source].node == MEMBERS[target].node) == trial.within
    counts = {(trial.within, trial.source, trial.target): 0 for trial in trials}
    for trial in trials:
        counts[trial.within, trial.source, trial.target] = len(trial.pairs)
    assert counts == {
        (True, "x", "x"): 2,
        (False, "x", "x"): 2,
        (False, "x", "y"): 3,
        (True, "y", "y"): 1,
        (False, "y", "x"): 3,
        (False, "y", "y"): 1,
    }


@pytest.mark.parametrize("count", [1, 2, 3])
def test_few_ranks_have_the_pairs_that_there_are(count: int):
    alike = [Member(node="a", gpu="x")] * count
    assert len(trials_of(alike)) == (count > 1)
    apart = [Member(node=f"n{rank}", gpu="x") for rank in range(count)]
    assert {trial.within for trial in trials_of(apart)} == ({False} if count > 1 else set())
    mixed = trials_of([Member(node=f"n{rank}", gpu=f"g{rank}") for rank in range(count)])
    assert len(mixed) == count * (count - 1)
    timed = links_of(mixed, [[(1.0, 1.0)]] * len(mixed))
    assert len(timed.between) == (count * count if count > 1 else 0), "a plan may ask for a link of any two types"


def test_a_node_has_gpus_of_one_type():
    with pytest.raises(ClusterError, match=r"node 'a' has ranks with x and y\. Expected"):
        nodes_of([Member(node="a", gpu="x"), Member(node="a", gpu="y")])
    assert nodes_of(MEMBERS)[0] == Node(name="a", gpu="x", gpus=5)


def test_a_measured_cluster_is_read_as_it_was_written(tmp_path: Path):
    specs = [spec_of_machine(gpu, planner_problems.MACHINE) for gpu in GPUS]
    save_measured(measured(), specs, tmp_path / "cluster.json")
    found = described(str(tmp_path / "cluster.json"))
    as_written = [replace(found.specs[gpu], net=None) for gpu in GPUS]  # the net is that of the links
    assert found.cluster == measured() and as_written == specs
    assert found.assumed == ()


def test_a_measured_device_gives_its_rates_back():
    machine = machine_of_spec(find_device("a100-40g"))
    again = machine_of_spec(spec_of_machine("mine", machine))
    for name in ("device_bytes_per_s", "h2d_bytes_per_s", "d2h_bytes_per_s", "disk_bytes_per_s", "host_bytes"):
        assert math.isclose(getattr(again, name), getattr(machine, name)), name
    assert math.isclose(again.device_update_params_per_s, machine.device_update_params_per_s)
    assert math.isclose(again.host_update_params_per_s, machine.host_update_params_per_s)
    for dtype in ("float32", "bfloat16", "float16"):
        assert math.isclose(again.flops_per_s(dtype), machine.flops_per_s(dtype))


def test_doctor_of_a_cluster_needs_torchrun(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    monkeypatch.delenv("RANK", raising=False)
    path = tmp_path / "cluster.json"
    assert cli.main(["doctor", "--device", "cpu", "--cluster", str(path)]) == 2
    shown = capsys.readouterr().err
    assert "started by torchrun. Run torchrun --nproc-per-node" in shown and not path.exists()
    assert cli.main(["doctor", "--device", "cpu", "--cluster", str(path), "--save", str(path)]) == 2
    assert "Expected was --cluster alone" in capsys.readouterr().err


def test_a_path_that_no_cluster_can_be_written_to_is_refused_before_anything_is_measured(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(dist, "get_rank", lambda: 0)
    monkeypatch.setattr(dist, "broadcast_object_list", lambda values: None)
    for path, why in (
        (tmp_path, "it is a directory"),
        (tmp_path / "absent" / "c.json", "its directory does not exist"),
    ):
        with pytest.raises(ClusterError, match=f"cannot write .*: {why}. Expected was a file"):
            doctor._measured(path, torch.device("cpu"))


def test_weights_that_the_ends_share_count_in_the_first_layer_alone():
    """The last layer was timed with them; a last stage without the first layer holds them, and one with it holds them once."""
    shapes = {"tied": Shape(sizes=(10, 10), dtype=torch.float32), "own": Shape(sizes=(3,), dtype=torch.float32)}
    layers: Any = SimpleNamespace(num_layers=4, readers={"tied": {0, 3}, "own": {1}}, shapes=shapes)
    kinds = ("first", "layer", "last")
    times = [
        KindTime(kind=kind, tp=tp, micro_batch=1, forward_s=1.0, backward_s=2.0) for kind in kinds for tp in (1, 2)
    ]
    sizes = [
        LayerBytes(
            kind=kind,
            tp=tp,
            params_bytes=num_bytes // tp,
            kept_bytes=5,
            output_bytes=4,
            unsharded_bytes=200 + more if tp == 2 and kind != "layer" else 0,
        )
        for kind, num_bytes, more in zip(kinds, (400, 100, 440), (0, 0, 5), strict=True)
        for tp in (1, 2)
    ]
    timed = GpuCosts(
        times=tuple(times),
        sizes=tuple(sizes),
        update_s_per_byte=1e-9,
        optimizer_bytes_per_byte=2.0,
        gradient_bytes_per_byte=1.0,
    )
    table = _table("m", ("first", "layer", "layer", "last"), layers, {"x": timed}, torch.device("cpu"))
    assert table.tied_bytes == 400 and [table.layer_bytes("last", tp).params_bytes for tp in (1, 2)] == [40, 20]
    assert [table.stage(range(first, 4), "x", 1, 1).params_bytes for first in (0, 1)] == [640, 640]
    assert table.stage(range(1, 4), "x", 2, 1).params_bytes == 320
    assert [table.layer_bytes("last", tp).unsharded_bytes for tp in (1, 2)] == [0, 5]
    assert table.stage(range(1, 4), "x", 2, 2, shards=2).params_bytes == 200 + 5 + (320 - 205 + 1) // 2
