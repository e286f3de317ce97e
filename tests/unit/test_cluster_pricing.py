"""Data sheets price the layers and updates that were measured: the rows of the benchmark, within bounds."""

from pathlib import Path
from typing import Any

import pytest

LAYERS_WITHIN, UPDATES_WITHIN = 0.15, 0.1


@pytest.fixture(scope="module")
def pricing(benchmarks: Path) -> Any:
    """The benchmark."""
    import cluster_pricing  # pyright: ignore[reportMissingImports]

    return cluster_pricing


@pytest.fixture(scope="module")
def layers(pricing: Any, benchmarks: Path) -> Any:
    """The measurements."""
    return pricing.read(benchmarks / "measured" / "layers.json")


@pytest.mark.slow
def test_layers_cost_as_much_as_was_measured(pricing: Any, layers: Any):
    rows = list(pricing.layer_rows(layers))
    for row in rows:
        assert row.launch_bound or abs(row.ratio - 1) < LAYERS_WITHIN, row
    assert {row.gpu for row in rows} == {"A100-40", "V100-16", "GH-96", "Titan-RTX", "RTX-2080"}
    assert len(rows) > 60 and sum(row.launch_bound for row in rows) <= 2


def test_updates_cost_as_much_as_was_measured(pricing: Any, layers: Any):
    rows = list(pricing.update_rows(layers))
    for row in rows:
        assert abs(row.ratio - 1) < UPDATES_WITHIN, row
    assert {row.gpu for row in rows} == set(pricing.DEVICE_OF)


def test_the_graph_that_is_priced_has_the_kernels_that_ran(pricing: Any):
    config = {"hidden": 256, "ffn": 1024, "heads": 2, "act": "relu", "seq": 192}
    layer = pricing.priceable(config, 1)
    scores_bytes = 4 * 2 * 192 * 192
    made = [
        (layer.nodes[next(iter(kernel.nodes))].target, not layer.backward.isdisjoint(kernel.nodes))
        for kernel in layer.graph.kernels
        if any(layer.graph.storages[index].num_bytes == scores_bytes for index in kernel.writes)
    ]
    aten = pricing.aten
    clone, fill = aten.clone.default, aten.masked_fill.Scalar
    assert [target for target, backward in made if not backward] == [aten.bmm.default, fill, aten._softmax.default]
    after_softmax = [target for target, backward in made if backward]
    assert after_softmax == [aten.bmm.default, aten._softmax_backward_data.default, clone, clone, clone, fill, clone]


def test_the_table_says_what_it_holds(pricing: Any):
    row = pricing.Row(
        model="m", gpu="g", tp=1, micro_batch=2, kind="forward", measured_s=0.002, priced_s=0.001, launch_bound=True
    )
    text = pricing.table([row])
    assert "m            g           1           2 forward" in text and "0.50  launch-bound" in text
