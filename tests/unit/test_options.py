"""Options: what is understood, and that every mistake is answered with what was meant."""

import functools
import sys
from pathlib import Path

import pytest

from autohete_fx.compiler.keys import option_fields
from autohete_fx.compiler.training import is_worth_timing
from autohete_fx.errors import OptionError
from autohete_fx.ir import Profile
from autohete_fx.options import Options, Share, parse_size, resolve_bytes
from tests.planner_problems import cost


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


def test_a_size_may_mean_that_there_is_no_limit():
    assert resolve_bytes(10**30, 1000) == resolve_bytes(sys.maxsize, 1000) == 2**60
    assert parse_size("9" * 400 + "GiB") == 2**60


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
        ({"memory_budget": -5}, '-5 bytes; expected a size such as "20GiB"'),
        ({"memory_budget": "20"}, "'20' is not a size; expected a size such as .*Write 20GiB, or 20B for bytes"),
        ({"host_budget": "150%"}, "'host_budget': '150%'.*at most 100%"),
        ({"memory_budget": "3 gigs"}, "unknown unit of size 'gigs'; .*GiB"),
        ({"inner_backend": "inducter"}, "did you mean 'inductor'"),
        ({"allow": ["recompte"]}, "did you mean 'recompute'"),
        ({"allow": "recompute"}, "list of"),
        ({"micro_batches": 0}, "at least 1"),
        ({"in_flight": 0}, "backward pass of the first"),
        ({"passes": {"fowrard": []}}, "did you mean 'forward'"),
        ({"passes": {"forward": [1]}}, "expected a callable"),
        ({"allow": {"recompute": False}}, "list of"),
        ({"offload_dir": "/does/not/exist"}, "not a directory"),
        ({"offload_dir": ""}, "expected the path of a directory"),
        ({"offload_dir": "/proc"}, "no file can be made: .*; choose another directory"),
        ({"plan": 3}, "expected an autohete_fx Plan"),
        ({"plan": ""}, "expected an autohete_fx Plan"),
        ({"passes": {"joint": lambda gm: gm}}, "at 'joint' cannot be called with a graph and a context: too many"),
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


def test_option_fields_tell_passes_apart():
    def one(gm: object, context: object) -> None:
        return None

    def other(gm: object, context: object) -> None:
        print(gm)

    digests = {option_fields(Options.from_user({"passes": {"forward": p}})) for p in (one, other)}
    assert len(digests) == 2
    assert option_fields(Options.from_user({"passes": {"forward": one}})) in digests


def test_a_directory_is_tried_and_left_as_it_was(tmp_path: Path):
    assert Options.from_user({"offload_dir": tmp_path}).offload_dir == str(tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_passes_of_any_kind_that_can_be_called_are_taken():
    class Pass:
        def __call__(self, gm: object, context: object, depth: int = 1) -> object:
            return gm

    given = {"joint": Pass(), "final": [functools.partial(Pass(), depth=2), print]}
    assert Options.from_user({"passes": given}).passes.joint == (given["joint"],)


def test_blocks_of_short_steps_are_not_timed():
    def costs(seconds: float) -> Profile:
        timed = cost(forward_s=seconds / 3, backward_s=2 * seconds / 3)
        return Profile(costs=(timed,), source="analytic", profile_s=0.0)

    short, long = costs(0.01), costs(1.0)
    assert [is_worth_timing(Options(), each, "cpu") for each in (short, long)] == [False, True]
    assert is_worth_timing(Options(micro_batches=20), short, "cpu"), "a step has all of its micro-batches"
    assert is_worth_timing(Options(), short, "cuda"), "which runs such steps by the hundred thousand"
    assert is_worth_timing(Options(profile="measured"), short, "cpu")
    assert not is_worth_timing(Options(profile="analytic"), long, "cuda")


def test_a_step_has_at_least_the_passes_that_are_in_flight():
    """For training and for `autohete_fx.preview` alike."""
    assert [Options.from_user({"in_flight": 3, **more}).micro_batches for more in ({}, {"micro_batches": 8})] == [3, 8]
