"""The survey of families: configurations are made small by the names of their sizes."""

from pathlib import Path
from typing import Any

import pytest
import torch

FAMILIES = ("llama", "t5", "vit", "mixtral", "musicgen", "parakeet_ctc")


@pytest.fixture(scope="module")
def survey(benchmarks: Path) -> Any:
    import survey  # pyright: ignore[reportMissingImports]

    return survey


@pytest.mark.parametrize("name", FAMILIES)
@pytest.mark.filterwarnings("ignore")  # transformers' own
def test_a_family_is_made_small(name: str, survey: Any):
    families = survey.survey_child
    model = families.small_model(name)
    assert sum(param.numel() for param in model.parameters()) < 3_000_000
    loss = families.loss_of(model(**families.batch_of(model, name, 0)))
    loss.backward()
    assert loss.isfinite() and any(param.grad is not None for param in model.parameters())


@pytest.mark.parametrize("name", ["llama", "parakeet_ctc"])
def test_a_batch_depends_on_its_step_alone(name: str, survey: Any):
    families = survey.survey_child
    model = families.small_model(name)
    torch.manual_seed(1)
    first, again, next_one = (families.batch_of(model, name, step) for step in (0, 0, 1))
    main = model.main_input_name
    assert all(torch.equal(first[each], again[each]) for each in first)
    assert first[main].shape == next_one[main].shape and not torch.equal(first[main], next_one[main])


def test_every_family_has_a_kind_and_names_that_are_none_are_told(survey: Any):
    known = survey.kinds()
    assert {
        "llama": "causal",
        "bert": "masked",
        "t5": "encoder-decoder",
        "vit": "vision",
        "wav2vec2": "speech",
    }.items() <= known.items()
    assert survey.chosen(None, ["speech"]) == [name for name, kind in known.items() if kind == "speech"]
    with pytest.raises(SystemExit, match="unknown: lama"):
        survey.chosen(["lama"], None)


def test_a_family_that_is_left_out_says_why(survey: Any, tmp_path: Path):
    row = survey.row_of("dinat", "eager", 0.6, 1.0, tmp_path)
    assert row["result"] == "left out" and "natten" in row["error"]
