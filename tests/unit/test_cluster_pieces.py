"""Parts of parameters: cut at all ends, put together again, and planned before anything runs."""

from unittest.mock import patch

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from autohete_fx.cluster.model import unit as unit_module
from autohete_fx.cluster.model.batches import Shape, batch_of
from autohete_fx.cluster.model.layers import map_layers
from autohete_fx.cluster.model.pieces import Cut, Piece, covered, finest
from autohete_fx.cluster.model.tensor_parallel import TensorLayout, layout_of
from autohete_fx.cluster.model.unit import UnitPlace
from autohete_fx.cluster.store.store import joined, taken
from autohete_fx.errors import ClusterError
from tests.tiny_models import GPT

PLAN = {"layers.*.mlp.0": "colwise", "layers.*.mlp.2": "rowwise", "embed": "embedding_rowwise"}


UNITS = st.tuples(st.integers(1, 4), st.integers(1, 4))
"""Degree of tensor parallelism, and shards."""


def all_of(unit: tuple[int, int], dims: dict[str, int], whole: torch.Tensor) -> list[Piece]:
    """The pieces of each GPU of a unit."""
    degree, shards = unit
    shape = Shape(sizes=tuple(whole.shape), dtype=torch.float64)
    places = [
        UnitPlace(degree=degree, part=part, shards=shards, shard=shard)
        for part in range(degree)
        for shard in range(shards)
    ]
    return [place.piece(TensorLayout(dims=dims), "a", shape) for place in places]


@given(
    st.integers(1, 12),
    st.integers(1, 12),
    st.sampled_from([{}, {"a": 0}, {"a": 1}]),
    st.lists(UNITS, min_size=1, max_size=3),
)
def test_pieces_of_several_units_make_every_part(
    rows: int, columns: int, dims: dict[str, int], units: list[tuple[int, int]]
):
    whole = torch.arange(rows * columns).view(rows, columns)
    with patch.object(unit_module, "SMALLEST_COPY_BYTES", 1):
        held = [piece for unit in units for piece in all_of(unit, dims, whole)]
    held = [piece for piece in held if piece.share]  # degrees that have no rows for all GPUs are refused
    made_of = finest([Piece("a"), *held])
    saved = {f"{Piece('a').key}/weight": whole, f"{Piece('a').key}/state/step": torch.ones(())}
    parts = {piece.key: taken(saved, Piece("a"), piece) for piece in made_of[Piece("a")]}
    for piece in held:
        assert Piece.of_key(piece.key) == piece
        made = joined("a", made_of[piece], parts)
        assert torch.equal(made["a/weight"], piece.of(whole, Piece("a"))) and made["a/state/step"] == 1
    assert covered(held) == {"a"} and covered([*made_of[Piece("a")][1:]]) == set()


def test_a_parameter_of_two_lengths_is_an_error():
    cuts = [Cut(dim=0, first=0, stop=2, length=length) for length in (4, 5)]
    with pytest.raises(ClusterError, match="one length"):
        finest(Piece("a", (cut,)) for cut in cuts)


def test_a_layout_cuts_what_the_plan_names():
    layer_map = map_layers(GPT, batch_of(torch.zeros(1, 4, dtype=torch.long)))
    layout = layout_of(GPT, layer_map, {1, 2}, PLAN)
    assert layout.dims["layers.1.mlp.0.bias"] == layout.dims["embed.weight"] == 0
    assert layout.dims["layers.1.mlp.2.weight"] == 1 and "layers.1.mlp.2.bias" not in layout.dims
    assert layout.cut("layers.1.mlp.2.weight", (16, 32), 2, 1) == Cut(dim=1, first=16, stop=32, length=32)
    assert layout_of(GPT, layer_map, {1}).dims == {}


def test_an_embedding_that_is_tied_to_a_whole_head_stays_whole():
    def tied() -> nn.Module:
        return GPT(tied=True)

    layer_map = map_layers(tied, batch_of(torch.zeros(1, 4, dtype=torch.long)))
    assert "embed.weight" not in layout_of(tied, layer_map, {2}, PLAN).dims
    both = layout_of(tied, layer_map, {2}, {**PLAN, "head": "colwise_gather_output"})
    assert both.dims["embed.weight"] == 0


@pytest.mark.parametrize(
    ("plan", "degree", "words"),
    [
        (None, 2, "no tensor-parallel plan.*tp_plan="),
        ({"layers.*.mlp.9": "colwise"}, 2, "no such module"),
        ({"layers.*.norm1": "colwise"}, 2, "a LayerNorm, 'colwise'"),
        ({"layers.*.mlp.0": "packed_colwise"}, 2, "'packed_colwise'"),
        (PLAN, 3, "units of 3 GPUs.*a degree that divides"),
    ],
)
def test_plans_that_cannot_be_run_are_errors(plan: dict[str, str] | None, degree: int, words: str):
    layer_map = map_layers(GPT, batch_of(torch.zeros(1, 4, dtype=torch.long)))
    with pytest.raises(ClusterError, match=words):
        layout_of(GPT, layer_map, {degree}, plan)
