"""Plans of unlike pipelines train as one process does: losses, norms of gradients, weights and optimizer states, in fp64."""

import random
from pathlib import Path
from typing import Any

import pytest

from tests.dist.ranks import run

DEPTH = 3
"""Layers of the model; plans count two more, before and after."""
EXACT = 1e-11
"""Rounding of sums, which AdamW's first steps divide by numbers as small."""


def plans() -> list[Any]:
    """(micro-batch, micro-batches, last layers of stages) of each pipeline."""
    return [
        [(2, 3, [4])],
        [(2, 3, [1, 4])],
        [(1, 4, [0, 3, 4])],  # the embedding alone, and the head alone
        [(1, 2, [0, 4])],
        [(1, 2, [3, 4])],
        [(1, 6, [0, 1, 2, 3, 4])],
        [(2, 1, [4]), (2, 1, [4])],
        [(2, 2, [2, 4]), (2, 1, [4])],  # unequal depth and micro-batches
        [(1, 4, [1, 3, 4]), (3, 2, [2, 4])],
        [(2, 3, [0, 2, 4]), (1, 2, [2, 4])],
        [(1, 2, [1, 4]), (1, 3, [2, 4]), (2, 2, [3, 4])],
        [(1, 1, [4]), (2, 2, [4]), (3, 1, [4]), (1, 2, [1, 4])],
    ]


def drawn(count: int, ranks: int) -> list[Any]:
    """Plans of up to so many ranks, at random."""
    chance, found = random.Random(7), []
    for _ in range(count):
        free, rows = ranks, []
        while free and (not rows or chance.random() < 0.7):
            depth = chance.randint(1, min(free, 4))
            lasts = sorted(chance.sample(range(DEPTH + 1), depth - 1))
            rows.append((chance.randint(1, 3), depth + chance.randint(0, 2), [*lasts, DEPTH + 1]))
            free -= depth
        found.append(rows)
    return found


def check(found: list[list[dict[str, float]]], cases: list[Any]) -> None:
    for index, case in enumerate(cases):
        rows = [rank[index] for rank in found]
        assert sum(row["held"] for row in rows) > 0
        for key in ("loss", "norm", "weights", "states"):
            assert max(row[key] for row in rows) < EXACT, (key, case)


@pytest.mark.slow
def test_a_job_of_any_plan_equals_one_process(tmp_path: Path):
    cases = [
        (DEPTH, index % 2 == 0, rows, None, "gpipe" if index % 5 == 4 else "1f1b", "torch")
        for index, rows in enumerate([*plans(), *drawn(6, 6)])
    ]
    check(run("tests.dist.cluster_jobs.differences", tmp_path, cases, num_ranks=6), cases)


@pytest.mark.slow
def test_compiled_stages_equal_one_process(tmp_path: Path):
    rows = [(1, 3, [2, 4]), (2, 1, [4])]
    cases = [
        (DEPTH, True, rows, backend, "1f1b", optimizer)
        for backend, optimizer in (("inductor", "torch"), ("autohete", "autohete"))
    ]
    check(run("tests.dist.cluster_jobs.differences", tmp_path, cases, num_ranks=3), cases)
