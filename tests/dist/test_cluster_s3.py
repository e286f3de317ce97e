"""A cloud that speaks S3: every byte that is read there was nowhere nearer; where it is slow or gone, training goes on."""

from pathlib import Path
from typing import Any

import pytest

from tests.dist.ranks import run
from tests.s3_server import environment, s3_server

EXACT = 1e-11


def said(legs: list[dict[str, Any]]) -> str:
    return "\n".join(line for leg in legs for line in (*leg["spoken"], *leg["logged"]))


@pytest.mark.slow
def test_a_cloud_is_read_for_what_is_nowhere_nearer_and_never_waited_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    pytest.importorskip("moto"), pytest.importorskip("s3fs"), pytest.importorskip("flask")
    (tmp_path / "root").mkdir()
    with s3_server("bucket") as server:
        for name, value in environment(server.url).items():
            monkeypatch.setenv(name, value)
        arguments = str(tmp_path / "root"), "s3://bucket/run", server.url
        ranks = run("tests.dist.s3_jobs.every_way", tmp_path, *arguments)
    ways = {way: [rank[way] for rank in ranks] for way in ranks[0]}
    for way, first in {
        "begin": 0,
        "lost": 4,
        "quick cloud": 4,
        "broken cloud": 6,
        "slow writes": 6,
        "slow reads": 12,
        "gone": 12,
    }.items():
        for leg in ways[way]:
            assert leg.get("first") == first, (way, leg)
            assert max(leg[key] for key in ("loss", "weights", "states")) < EXACT, (way, leg)
    assert ways["commits"] == [[-1, -1, 3]] * 2, (
        "a save counts if all ranks have written it, not if each has written a later one"
    )
    assert [leg["saved"] for leg in ways["begin"]] == [[4, 4]] * 2

    # the server was asked for the tensors that no disk had, each once, and for no byte beside them
    asked: dict[str, list[int]] = {}
    for request in server.requests:
        if request.mark == "lost" and request.method == "GET" and request.path.endswith(".distcp"):
            asked.setdefault(request.path, []).extend(request.bytes_read)
    missing = {
        path: [byte for first, stop in found for byte in range(first, stop)]
        for path, found in ranks[0]["missing"].items()
    }
    assert missing and {path: sorted(found) for path, found in asked.items()} == {
        path: sorted(found) for path, found in missing.items()
    }

    assert "local 0.0 MiB, peer 0.0 MiB, cloud 0.2 MiB" in said(ways["quick cloud"]), said(ways["quick cloud"])
    assert "Rank 1 could not read 's3://bucket/run': reset by peer. Disks have all that is needed" in said(
        ways["broken cloud"]
    )
    assert "local 0.0 MiB, peer 0.2 MiB" in said(ways["broken cloud"]), said(ways["broken cloud"])

    # a cloud that takes no bytes: disks have saves meanwhile, and at the end the cloud has one
    assert ranks[0]["while slow"] == [8, -1] and server.held
    assert ways["slow writes"][0]["saved"] == [12, 12]
    assert "is slow: step 8 is still being written there" in said(ways["slow writes"])
    assert "and step 10 is left out. Training goes on" in said(ways["slow writes"])
    assert "did not answer within 0.5 s. Disks have all that is needed" in said(ways["slow reads"])

    # no cloud at all
    assert ways["gone"][0]["saved"] == [14, -1]
    assert "could not be read" in said(ways["gone"])
    assert "could not save step 14 to 's3://bucket/run'" in said(ways["gone"])
