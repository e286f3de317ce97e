"""Jobs of several ranks: what each rank has of a machine, and what cannot be planned."""

from pathlib import Path

import pytest

from autohete_fx import cli
from autohete_fx.errors import OptionError
from autohete_fx.machine.devices import DEVICES, DeviceSpec, find_device, machine_of_spec, net_of_spec
from autohete_fx.whatif.job import Job

A100 = find_device("a100-40g")


def test_one_rank_has_the_machine_to_itself():
    alone = machine_of_spec(A100)
    assert Job().machine_of(alone, A100) is alone


@pytest.mark.parametrize("spec", DEVICES, ids=lambda spec: spec.name)
def test_nodes_are_no_faster_than_what_their_adapters_let_through(spec: DeviceSpec):
    inside = net_of_spec(spec).reached_gb_per_s * 1e9
    for ranks_of_node in (1, 2, 8):
        job = Job(num_ranks=2 * ranks_of_node, num_nodes=2, node_bytes_per_s=25e9)
        assert job.machine_of(machine_of_spec(spec), spec).net_bytes_per_s == min(inside, ranks_of_node * 25e9)
    assert Job(num_ranks=4).machine_of(machine_of_spec(spec), spec).net_bytes_per_s == inside


def test_replicas_on_nodes_of_their_own_gather_at_the_rate_within_a_node():
    inside = net_of_spec(A100).reached_gb_per_s * 1e9
    whole_nodes = Job(num_ranks=8, num_nodes=2, num_replicas=2, node_bytes_per_s=25e9)
    found = whole_nodes.machine_of(machine_of_spec(A100), A100)
    assert (found.net_bytes_per_s, found.replica_net_bytes_per_s) == (inside, 25e9)
    # Two replicas a node: two rings of four cross its four adapters.
    halves = Job(num_ranks=8, num_nodes=2, num_replicas=4, node_bytes_per_s=25e9)
    assert halves.machine_of(machine_of_spec(A100), A100).replica_net_bytes_per_s == 50e9
    # A replica over both nodes gathers through all adapters.
    across = Job(num_ranks=8, num_nodes=2, num_replicas=1, node_bytes_per_s=25e9)
    assert across.machine_of(machine_of_spec(A100), A100).net_bytes_per_s == 4 * 25e9
    one_node = Job(num_ranks=4, num_replicas=2).machine_of(machine_of_spec(A100), A100)
    assert (one_node.net_bytes_per_s, one_node.replica_net_bytes_per_s) == (inside, inside)


def test_ranks_share_the_host_of_their_node():
    alone = machine_of_spec(A100)
    for num_nodes in (1, 2):
        rank = Job(num_ranks=8, num_nodes=num_nodes).machine_of(alone, A100)
        assert rank.host_bytes * 8 // num_nodes == alone.host_bytes
        assert rank.host_update_params_per_s * 8 / num_nodes == pytest.approx(alone.host_update_params_per_s)


def test_a_measured_machine_has_the_link_that_its_ranks_measured(tmp_path: Path):
    measured = Job(num_ranks=2).machine_of(machine_of_spec(A100), A100)
    again = Job(num_ranks=4).machine_of(measured, None)
    assert again.net_bytes_per_s == measured.net_bytes_per_s and again.net_latency_s == measured.net_latency_s
    with pytest.raises(OptionError, match=r"no rate of the link between ranks.*torchrun"):
        Job(num_ranks=4).machine_of(machine_of_spec(A100), None)


def refused(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    assert cli.main(["plan", "gpt2", *arguments]) == 2
    shown = capsys.readouterr()
    assert shown.out == "" and shown.err.count("\n") == 1
    return shown.err


def test_jobs_that_cannot_be_are_refused_before_anything_is_traced(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    device = ["--device", "a100-40g"]
    assert "Give --ranks 8, or fewer nodes" in refused(capsys, *device, "--ranks", "6", "--nodes", "4")
    assert "--ranks 1 on --nodes 2" in refused(capsys, *device, "--nodes", "2")
    assert "one node" in refused(capsys, *device, "--sweep", "ranks", "--nodes", "2")
    assert "Give --ranks 6, or fewer replicas" in refused(capsys, *device, "--ranks", "4", "--replicas", "3")
    assert "one copy of the model" in refused(capsys, *device, "--sweep", "ranks", "--replicas", "2")
    assert "--sweep budget too" in refused(capsys, *device, "--sweep", "ranks", "--points", "3")
    machine_of_spec(A100).save(tmp_path / "alone.json")
    alone = ["--machine", str(tmp_path / "alone.json")]
    for asked in (["--ranks", "2"], ["--sweep", "ranks"]):
        assert "no rate of the link between ranks" in refused(capsys, *alone, *asked)
    assert "give --nodes too" in refused(capsys, *device, "--node-rate", "50")
    assert "measured host memory is" in refused(capsys, *alone, "--host-budget", "90TiB")
    assert "Give less, such as --budget 90%" in refused(capsys, *alone, "--budget", "90TiB")


@pytest.mark.parametrize("option", ["--ranks", "--nodes", "--replicas", "--node-rate"])
@pytest.mark.parametrize("value", ["0", "-1", "many"])
def test_no_ranks_are_wrong_usage(option: str, value: str, capsys: pytest.CaptureFixture[str]):
    with pytest.raises(SystemExit) as caught:
        cli.main(["plan", "gpt2", "--device", "h100", option, value])
    assert caught.value.code == 2 and "usage: autohete" in capsys.readouterr().err


def test_help_says_whose_batch_it_is(capsys: pytest.CaptureFixture[str]):
    with pytest.raises(SystemExit):
        cli.main(["plan", "--help"])
    words = " ".join(capsys.readouterr().out.split())
    assert "sequences per micro-batch of each rank" in words and "peak device memory of each rank" in words
