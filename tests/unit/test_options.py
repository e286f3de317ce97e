"""Options: what is understood, and that every mistake is answered with what was meant."""

import pytest

from autohete_fx.errors import OptionError
from autohete_fx.options import Options, Share, parse_size, resolve_bytes


@pytest.mark.parametrize(
    ("text", "size"),
    [("20GiB", 20 * 2**30), ("1.5 gb", 1_500_000_000), ("512MiB", 2**29), ("7b", 7), ("60%", Share(0.6))],
)
def test_sizes(text: str, size: object):
    assert parse_size(text) == size
    assert Options.from_user({"memory_budget": text}).memory_budget == size


def test_shares_are_of_the_total():
    assert resolve_bytes(Share(0.5), 1000) == 500
    assert resolve_bytes(123, 1000) == 123


@pytest.mark.parametrize("text", ["", "GiB", "0%", "101%", "5 parsecs", "-1GiB", "nan"])
def test_bad_sizes_are_refused(text: str):
    with pytest.raises(OptionError):
        Options.from_user({"memory_budget": text})


@pytest.mark.parametrize(
    ("options", "answer"),
    [
        ({"memory_bugdet": 1}, "did you mean 'memory_budget'"),
        ({"memory_budget": 0.5}, 'write "50%"'),
        ({"memory_budget": True}, "bool"),
        ({"memory_budget": 0}, "0 bytes"),
        ({"inner_backend": "inducter"}, "did you mean 'inductor'"),
        ({"allow": ["recompte"]}, "did you mean 'recompute'"),
        ({"allow": "recompute"}, "list of"),
        ({"micro_batches": 0}, "at least 1"),
        ({"passes": {"fowrard": []}}, "did you mean 'forward'"),
        ({"passes": {"forward": [1]}}, "expected a callable"),
        ({"offload_dir": "/does/not/exist"}, "not a directory"),
        ({"plan": 3}, "expected an autohete_fx Plan"),
        ({"verify": 1}, "True or False"),
        ({"solver_time_limit_s": -1}, "positive"),
    ],
)
def test_mistakes_are_named(options: dict[str, object], answer: str):
    with pytest.raises(OptionError, match=answer):
        Options.from_user(options)


def test_modes_are_refused():
    with pytest.raises(OptionError, match="no modes"):
        Options.from_user({}, mode="max-autotune")


def test_digest_fields_tell_passes_apart():
    def one(gm: object, context: object) -> None:
        return None

    def other(gm: object, context: object) -> None:
        print(gm)

    digests = {Options.from_user({"passes": {"forward": p}}).digest_fields() for p in (one, other)}
    assert len(digests) == 2
    assert Options.from_user({"passes": {"forward": one}}).digest_fields() in digests
