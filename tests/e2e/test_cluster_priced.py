"""Tables of costs from traces: as a whole step is priced, divided as tensor parallelism divides, for GPUs that are not here."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from autohete_fx.cluster.costs import CostTable
from autohete_fx.cluster.inputs.narrow import division_of, is_tied, part_of_model
from autohete_fx.cluster.inputs.priced import by_kind, priced_costs
from autohete_fx.errors import ClusterError
from autohete_fx.internals.modes import FakeTensorMode
from autohete_fx.machine.devices import NET_LATENCY_S, find_device, machine_of_spec, net_of_spec
from autohete_fx.options import Options
from autohete_fx.whatif.blueprint import Blueprint, read_model
from autohete_fx.whatif.trace import trace_model

WIDTH, INNER, LAYERS, SEQ, VOCABULARY = 2048, 5632, 5, 1024, 4096
LLAMA = {
    "model_type": "llama",
    "hidden_size": WIDTH,
    "intermediate_size": INNER,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": 16,
    "num_key_value_heads": 4,
    "vocab_size": VOCABULARY,
    "max_position_embeddings": SEQ,
}
GPT2 = {"model_type": "gpt2", "n_embd": 512, "n_layer": 2, "n_head": 4, "n_positions": 128, "vocab_size": 1001}
MIXTURE = LLAMA | {"model_type": "qwen3_moe", "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 512}
A100, H100 = find_device("a100-80g"), find_device("h100-80g")


def saved(folder: Path, entries: dict[str, Any]) -> str:
    (folder / "config.json").write_text(json.dumps(entries))
    return str(folder / "config.json")


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> str:
    return saved(tmp_path_factory.mktemp("llama"), LLAMA)


@pytest.fixture(scope="module")
def table(llama: str) -> CostTable:
    return priced_costs(llama, [A100, H100], seq=SEQ, micro_batches=[4, 1, 2], degrees=[3, 2, 1, 16])


def all_reduce_s(num_bytes: int, degree: int) -> float:
    return 2 * (degree - 1) * (num_bytes / degree / (net_of_spec(A100).reached_gb_per_s * 1e9) + NET_LATENCY_S)


@pytest.mark.slow
def test_all_layers_together_cost_a_whole_step(table: CostTable, llama: str):
    """On one GPU, by another trace: of all layers."""
    step = trace_model(read_model(llama, batch=1, seq=SEQ, dtype=None), machine_of_spec(H100), Options())
    assert step.traced_layers == LAYERS and table.kinds == ("first", *["layer"] * LAYERS, "last")
    forward, backward = zip(*(table.layer_s(kind, H100.name, 1, 1) for kind in table.kinds), strict=True)
    assert sum(forward) == pytest.approx(sum(cost.forward_s for cost in step.problem.costs), rel=1e-9)
    assert sum(backward) == pytest.approx(sum(cost.backward_s for cost in step.problem.costs), rel=1e-9)
    kept = sum(table.layer_bytes(kind, 1).kept_bytes for kind in table.kinds)
    assert kept == sum(cost.saved_bytes for cost in step.problem.costs)
    assert sum(table.layer_bytes(kind, 1).params_bytes for kind in table.kinds) == 2 * step.num_params
    assert (table.gradient_bytes_per_byte, table.optimizer_bytes_per_byte) == (1.0, 6.0)  # fp32 master and two moments
    assert table.accumulate_share == pytest.approx(6 / 28)  # gradients of 2 bytes


@pytest.mark.slow
def test_two_gpus_share_products_and_sum_hidden_states(table: CostTable):
    assert table.degrees(A100.name) == table.degrees(H100.name) == (1, 2), (
        "three do not divide 16 heads, 16 not a node of 8"
    )
    hidden_bytes = 2 * SEQ * WIDTH
    sums_s = 2 * all_reduce_s(hidden_bytes, 2)
    for place, passes in ((0, 1), (1, 2)):
        whole_s, half_s = (table.layer_s("layer", A100.name, degree, 1)[place] for degree in (1, 2))
        products = 2 * SEQ * (2 * WIDTH * WIDTH + 2 * WIDTH * WIDTH // 4 + 3 * WIDTH * INNER)
        products_s = passes * products / machine_of_spec(A100).flops_per_s("bfloat16")
        assert products_s < whole_s
        assert products_s / 2 < half_s - sums_s < whole_s - products_s / 2, (
            "the rest is norms, which stay, and attention"
        )
    rows = [table.layer_bytes("layer", degree) for degree in (1, 2)]
    assert [row.output_bytes for row in rows] == [hidden_bytes] * 2
    assert rows[0].kept_bytes / 2 < rows[1].kept_bytes < rows[0].kept_bytes
    norms = {"first": 0, "layer": 2 * WIDTH, "last": WIDTH}
    for kind, count in norms.items():
        whole, half = (table.layer_bytes(kind, degree).params_bytes for degree in (1, 2))
        assert 2 * half == whole + 2 * count, "weights add up, norms are there twice"


@pytest.mark.slow
def test_larger_micro_batches_at_higher_degrees_are_told_from_one_gpu(table: CostTable, llama: str):
    traced = priced_costs(llama, [A100], seq=SEQ, micro_batches=[4], degrees=[2])
    assert table.micro_batches(A100.name, 2) == (1, 4) and traced.micro_batches(A100.name, 2) == (4,)
    for kind in ("first", "layer", "last"):
        told, found = (t.layer_s(kind, A100.name, 2, 4) for t in (table, traced))
        for told_s, found_s in zip(told, found, strict=True):
            assert 0.96 * found_s < told_s < (1.04 if kind == "layer" else 1.2) * found_s


@pytest.mark.slow
def test_gpt2_is_divided_without_a_plan_of_its_own(tmp_path: Path):
    model = saved(tmp_path, GPT2)
    found = priced_costs(model, [A100], seq=128, micro_batches=[2], degrees=[1, 2], dtype=torch.float32, gpus_of_node=2)
    assert found.degrees(A100.name) == (1, 2) and found.tied_bytes > 0 and found.optimizer_bytes_per_byte == 2.0
    width, bytes_of = 512, {kind: [found.layer_bytes(kind, t).params_bytes for t in (1, 2)] for kind in found.kinds}
    assert 2 * bytes_of["layer"][1] == bytes_of["layer"][0] + 4 * 6 * width, "two norms, and biases of what is summed"
    assert bytes_of["first"][1] == 4 * (501 * width + 128 * width), (
        "half of the vocabulary, rounded up, and all positions"
    )
    assert bytes_of["last"] == [4 * 2 * width] * 2, "the head's weights are the first layer's"
    unsharded = [[found.layer_bytes(kind, t).unsharded_bytes for kind in found.kinds] for t in (1, 2)]
    assert unsharded[0] == [0, *[4 * 13 * width] * 2, 4 * 2 * width], "norms and biases are small"
    assert unsharded[1][0] == 4 * 501 * width, "one GPU has 501 rows, and the other one 500"
    update = found.updates[0]
    machine = machine_of_spec(A100)
    assert update.s_per_byte == pytest.approx(1 / 4 / machine.device_update_params_per_s)
    assert update.host_s_per_byte == pytest.approx(2 / 4 / machine.host_update_params_per_s)


def blueprint_of(folder: Path, entries: dict[str, Any]) -> Blueprint:
    return read_model(saved(folder, entries), batch=1, seq=64, dtype=None)


@pytest.mark.parametrize(
    ("entries", "degrees"),
    [
        (LLAMA, [1, 2, 4]),
        (LLAMA | {"intermediate_size": 5634}, [1, 2]),
        (GPT2, [1, 2, 4]),
        (MIXTURE, [1]),
    ],
    ids=["heads", "width", "gpt2", "experts"],
)
def test_degrees_that_do_not_divide_are_left_out(entries: dict[str, Any], degrees: list[int], tmp_path: Path):
    module = blueprint_of(tmp_path, entries).build(FakeTensorMode(), 2).module
    assert [degree for degree in range(1, 9) if division_of(module, degree) is not None] == degrees


def test_the_parts_of_a_tied_model_stay_tied(tmp_path: Path):
    part = part_of_model(blueprint_of(tmp_path, LLAMA | {"tie_word_embeddings": True}), 4)
    module: Any = part.build(FakeTensorMode(), 2).module
    assert is_tied(module) and module.lm_head.out_features == module.config.vocab_size == VOCABULARY // 4


def test_no_degree_left_is_an_error(llama: str):
    with pytest.raises(ClusterError, match="Expected was one that divides its heads and widths, and is at most 8"):
        priced_costs(llama, [A100], seq=64, micro_batches=[1], degrees=[3, 16])


def test_differences_of_outer_layers_are_the_ends():
    kinds = ("first", "layer", "layer", "layer", "layer", "last")
    assert by_kind([1, 7, 6, 5, 4, 2], kinds) == {"first": 1 + 2 + 1, "layer": 5, "last": 2 - 1}
    assert by_kind([1, 7, 5, 2], ("first", "layer", "layer", "last")) == {"first": 1, "layer": 6, "last": 2}
