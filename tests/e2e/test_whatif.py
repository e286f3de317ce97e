"""`autohete plan`: the same costs as in training, without a GPU and without weights, from the command to the answer."""

import dataclasses
import itertools
import json
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

import autohete_fx
from autohete_fx.ir import BlockGraph, Machine, Plan, Problem
from autohete_fx.machine.devices import find_device, machine_of_spec
from autohete_fx.options import Options
from autohete_fx.planner import given
from autohete_fx.planner.baselines import BASELINES
from autohete_fx.report.why import why
from autohete_fx.runtime.meter import MemoryMeter
from autohete_fx.whatif.blueprint import read_model
from autohete_fx.whatif.depth import shallow_layers
from autohete_fx.whatif.trace import _are_alike, trace_model
from tests.planned import plan

TINY = {
    "model_type": "llama",
    "hidden_size": 256,
    "intermediate_size": 512,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "vocab_size": 512,
    "max_position_embeddings": 128,
}
A100 = machine_of_spec(find_device("a100-40g"))


def config(folder: Path, **changes: object) -> str:
    (folder / "config.json").write_text(json.dumps(TINY | changes))
    return str(folder / "config.json")


FACTORY = """
import torch
from torch import nn
from tests.tiny_models import GPT, loss_of

class Step(nn.Module):
    def __init__(self):
        super().__init__()
        self.model = GPT(depth=2)
        self.register_buffer("seen", torch.ones(32))
        self.tower = nn.Linear(300, 300)  # of images, say: no graph reads it
        self.tower.register_buffer("patches", torch.zeros(1000))
    def forward(self, ids):
        logits = self.model(ids) * self.seen.sigmoid()  # backward needs it as it was
        with torch.no_grad():
            self.seen.mul_(0.5)
        return nn.functional.cross_entropy(logits.flatten(0, 1), ids.flatten())

def make():
    return Step(), torch.zeros(2, 6, dtype=torch.int64)
"""


@pytest.mark.slow
def test_costs_are_those_of_training(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """The problem that the backend solves on this machine, for the same model with real weights."""
    solved: list[Problem] = []
    solve = given.solved_plan

    def keep(problem: Problem, graph: BlockGraph, **how: Any) -> Plan:
        solved.append(problem)
        return solve(problem, graph, **how)

    monkeypatch.setattr(given, "solved_plan", keep)
    (tmp_path / "models.py").write_text(FACTORY)
    namespace: dict[str, Any] = {}
    exec(FACTORY, namespace)
    model, ids = namespace["make"]()
    optimizer = autohete_fx.AdamW(model.parameters())
    autohete_fx.preview(model, ids, options={"profile": "analytic"})
    del optimizer
    trained = solved[0]
    blueprint = read_model(f"{tmp_path / 'models.py'}:make", batch=1, seq=1, dtype=None)
    step = trace_model(blueprint, trained.machine, Options())
    assert step.batch == tuple(ids.shape), "the factory's own, not what was asked"
    asked = step.problem
    assert step.num_params == sum(param.numel() for param in model.parameters())
    assert asked == dataclasses.replace(trained, device_budget_bytes=None, host_budget_bytes=None)


@pytest.mark.slow
def test_a_few_layers_tell_the_cost_of_all(tmp_path: Path):
    model = read_model(config(tmp_path, num_hidden_layers=12), batch=2, seq=64, dtype=None)
    assert shallow_layers(12, 1) is not None
    few = trace_model(model, A100, Options())
    whole = trace_model(dataclasses.replace(model, num_layers=None), A100, Options())
    assert (few.traced_layers, whole.traced_layers) == (6, 12)
    assert few.problem.labels == whole.problem.labels and few.problem.edges == whole.problem.edges
    assert few.flops == whole.flops and few.problem.fixed_bytes == whole.problem.fixed_bytes
    for one, other in zip(few.problem.costs, whole.problem.costs, strict=True):
        figures, expected = dataclasses.asdict(one), dataclasses.asdict(other)
        again, expected_again = dict(figures.pop("partial")), dict(expected.pop("partial"))
        assert again.keys() == expected_again.keys()
        for kind, part in expected_again.items():
            assert again[kind] == pytest.approx(part, rel=1e-9)
        for name in ("offloadable", "trained", "trained_states", "product_flops"):
            assert figures.pop(name) == expected.pop(name)
        assert figures == pytest.approx(expected, rel=1e-9)


@pytest.mark.thorough
def test_a_few_layers_with_dropout_tell_the_cost_of_all_but_for_half_a_percent(tmp_path: Path):
    """Kernels that draw are fused over layers: seconds of single layers differ, their sums do not."""
    gpt = {"model_type": "gpt2", "n_embd": 256, "n_head": 4, "n_layer": 9, "vocab_size": 512}
    (tmp_path / "config.json").write_text(json.dumps(gpt))
    model = read_model(str(tmp_path / "config.json"), batch=2, seq=64, dtype=None)
    assert model.draws
    few = trace_model(model, A100, Options())
    whole = trace_model(dataclasses.replace(model, num_layers=None), A100, Options())
    assert (few.traced_layers, whole.traced_layers) == (5, 9)
    assert few.problem.labels == whole.problem.labels and few.small == whole.small
    assert few.flops == whole.flops and few.problem.fixed_bytes == whole.problem.fixed_bytes
    for name in ("forward_s", "backward_s", "recompute_s"):
        one, other = (sum(getattr(cost, name) for cost in step.problem.costs) for step in (few, whole))
        assert one == pytest.approx(other, rel=5e-3), name
    for one, other in zip(few.problem.costs, whole.problem.costs, strict=True):
        for name in ("saved_bytes", "backward_workspace_bytes", "param_bytes", "num_params", "offloadable"):
            assert getattr(one, name) == getattr(other, name), name


@pytest.mark.slow
def test_layers_of_another_kind_beyond_those_traced_are_found(tmp_path: Path):
    """A configuration that names them by their number, and has no list of types: then all are traced."""
    sizes = {
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_attention_heads": 4,
        "num_key_value_heads": 4,
        "head_dim": 16,
    }
    experts = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 128}
    config = {"model_type": "qwen3_moe", "num_hidden_layers": 24, "vocab_size": 100, "max_position_embeddings": 64}
    path = tmp_path / "config.json"
    for dense in ([], list(range(8, 24)), [23]):
        path.write_text(json.dumps({**config, **sizes, **experts, "mlp_only_layers": dense}))
        blueprint = read_model(str(path), batch=1, seq=16, dtype=None)
        few = shallow_layers(24, blueprint.period)
        assert few is not None and few < 8 and _are_alike(blueprint, few, 24) is not bool(dense)


@pytest.mark.slow
def test_a_plan_is_printed_and_saved_without_memory_for_weights(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    """Two layers of a 65B model, 3.4 GB in bf16: this process allocates next to nothing."""
    wide = config(tmp_path, hidden_size=8192, intermediate_size=22016, num_attention_heads=64)
    file = tmp_path / "plan.json"
    with MemoryMeter(torch.device("cpu")) as meter:
        assert plan(wide, "--device", "rtx-4090", "--budget", "8GiB", "--save", str(file), "--explain") == 0
    assert meter.peak_bytes - meter.start_bytes < 2**20
    out = capsys.readouterr().out
    assert "on GeForce RTX 4090 24GB, from its data sheet (PCIe 4.0 x16" in out
    for expected in ("predicted step", "tokens/s", "(MFU)", "budget 8.00 GiB on the device", "what more would buy"):
        assert expected in out
    for lane in ("compute", "h2d", "d2h", "update"):
        assert f"\n{lane} " in out
    saved = Plan.load(file)
    assert saved.labels == ("prologue", "model.layers.0", "model.layers.1", "epilogue")
    assert out.endswith(f"\nwhy\n{why(saved)}\n") and "next best: " in why(saved)
    assert 0 < saved.peak_bytes <= 8 * 2**30 and saved.host_bytes > 2**30


@pytest.mark.slow
def test_json_says_what_the_text_says_and_more_never_costs(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    A100.save(tmp_path / "machine.json")
    model = config(tmp_path)
    assert plan(model, "--machine", str(tmp_path / "machine.json"), "--budget", "20MiB", "--json") == 0
    answer = json.loads(capsys.readouterr().out)
    step_s = answer["step_s"]
    assert (
        answer["num_params"] == 2 * 512 * 256 + 2 * (4 * 256**2 + 3 * 256 * 512) + 5 * 256
    )  # norms are small, and counted
    assert answer["tokens_per_s"] == pytest.approx(2 * 64 / step_s)
    assert answer["utilization"] == pytest.approx(answer["flops"] / step_s / A100.flops_per_s("bfloat16"))
    assert answer["peak_bytes"] <= answer["device_budget_bytes"] == 20 * 2**20
    names = [more["name"] for more in answer["more"]]
    assert names == ["+25% device memory", "2x host link", "2x CPU update rate", 'overlap="backward"']
    assert all(more["step_s"] <= step_s for more in answer["more"])
    for lane in answer["lanes"]:
        assert lane["share"] == pytest.approx(lane["busy_s"] / step_s)
        assert sum(lane["work_s"].values()) == pytest.approx(lane["busy_s"])
    assert Plan.from_json(json.dumps(answer["plan"])).step_s == step_s


@pytest.mark.slow
def test_a_sweep_is_a_falling_curve_with_the_baselines_on_it(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    model, png = config(tmp_path), tmp_path / "curve.png"
    arguments = ["--device", "a100-40g", "--sweep", "budget", "--points", "4"]
    assert plan(model, *arguments, "--json", "--plot", str(png)) == 0
    answer = json.loads(capsys.readouterr().out)
    points = answer["points"]
    assert len(points) == 4 and png.read_bytes().startswith(b"\x89PNG")
    for before, after in itertools.pairwise(points):
        assert before["device_budget_bytes"] < after["device_budget_bytes"] and before["step_s"] >= after["step_s"]
    assert all(point["peak_bytes"] <= point["device_budget_bytes"] for point in points)
    by_name = {baseline["name"]: baseline for baseline in answer["baselines"]}
    assert set(by_name) <= set(BASELINES) and "keep-all" in by_name
    assert points[-1]["device_budget_bytes"] == by_name["keep-all"]["peak_bytes"]
    assert points[-1]["step_s"] <= by_name["keep-all"]["step_s"] * (1 + 1e-12)  # added up in another order


@pytest.mark.slow
def test_what_cannot_be_planned_is_one_line_with_status_2(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
):
    model = config(tmp_path)
    Machine.save(A100, tmp_path / "machine.json")
    (tmp_path / "models.py").write_text(
        "import torch\n"
        "class Breaks(torch.nn.Linear):\n"
        "    def forward(self, x):\n"
        "        torch._dynamo.graph_break()\n"
        "        return super().forward(x).sum()\n"
        "def breaks(): return Breaks(4, 4), torch.zeros(2, 4)\n"
        "def sums(): return Sum(4, 4), torch.zeros(2, 4)\n"
        "def frozen(): return Sum(4, 4).requires_grad_(False), torch.zeros(2, 4)\n"
        "class Sum(torch.nn.Linear):\n"
        "    def forward(self, x): return super().forward(x).sum()\n"
    )
    a100 = ["--device", "a100-40g"]
    for arguments, reason in (
        ([model, *a100, "--budget", "1MiB"], "no plan fits memory_budget 1.00 MiB"),
        ([model, "--device", "b17"], "unknown device 'b17'"),
        ([model, "--machine", str(tmp_path / "absent.json")], "cannot read the machine file"),
        ([model, *a100, "--budget", "lots"], "'lots' is not a size"),
        ([model, *a100, "--plot", "x.png"], "give --sweep budget too"),
        ([model, *a100, "--points", "3"], "give --sweep budget too"),
        ([model, *a100, "--budget", ""], "'' is not a size"),
        ([model, *a100, "--sweep", "budget", "--plot", "absent/x.png"], "cannot write 'absent/x.png': its"),
        ([model, *a100, "--sweep", "budget", "--save", "x.json"], "leave one of the two out"),
        ([model, *a100, "--sweep", "budget", "--explain"], "--explain explains one plan"),
        ([model, *a100, "--save", str(tmp_path)], "cannot write"),
        ([f"{tmp_path}/models.py:breaks", *a100], "does not compile to one graph"),
        ([f"{tmp_path}/models.py:frozen", *a100], "nothing to train"),
        ([f"{tmp_path}/models.py:sums", *a100, "--batch", "4"], "sums returns inputs of its own, 2 x 1 tokens"),
        ([f"{tmp_path}/models.py:sums", *a100, "--batch", "2", "--seq", "512"], "--seq 512 was given, and"),
    ):
        assert plan(*arguments) == 2
        shown = capsys.readouterr()
        assert shown.out == "" and reason in shown.err and shown.err.count("\n") == 1, shown.err
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    assert plan(model, *a100, "--sweep", "budget", "--points", "1", "--plot", str(tmp_path / "x.png")) == 2
    assert "pip install matplotlib" in capsys.readouterr().err
