"""Identities of users' passes: theirs where they say one, equal in any process, else one a living object."""

import functools
import gc
from collections.abc import Callable
from typing import Any

import pytest

from autohete_fx.compiler.pass_identity import pass_identity
from tests.processes import run_python


class WithWord:
    def __init__(self, word: str | None) -> None:
        self.word = word

    def __call__(self, gm: object, context: object) -> object:
        return gm

    def uuid(self) -> str | None:
        return self.word


class OtherWithWord(WithWord):
    pass


def function(gm: object, context: object) -> object:
    return gm


def test_what_a_pass_says_of_itself_is_its_identity():
    assert pass_identity(WithWord("a")) == pass_identity(WithWord("a"))
    words = (WithWord("a"), WithWord("b"), OtherWithWord("a"))
    assert len(set(map(pass_identity, words))) == len(words)


@pytest.mark.slow
def test_it_is_the_same_in_every_process(caplog: pytest.LogCaptureFixture):
    program = (
        "from tests.unit.test_pass_identity import *; print(pass_identity(WithWord('a')), pass_identity(function))"
    )
    said, not_said = run_python(["-W", "ignore", "-c", program]).stdout.split()
    assert said == pass_identity(WithWord("a"))
    assert not_said != pass_identity(function)


@pytest.mark.parametrize(
    "make",
    [lambda: lambda gm, context: gm, lambda: functools.partial(function, None), lambda: WithWord(None)],
    ids=["function", "partial", "uuid() is None"],
)
def test_any_other_has_one_as_long_as_it_lives_and_a_warning_says_so_once(
    make: Callable[[], Any], caplog: pytest.LogCaptureFixture
):
    one, other = make(), make()
    before = pass_identity(one)
    assert pass_identity(one) == before != pass_identity(other)
    told = [record.getMessage() for record in caplog.records]
    assert len(told) == 2 and all("has no uuid()" in message for message in told)
    del one
    gc.collect()
    again = {pass_identity(make()) for _ in range(50)}  # some where the first one was
    assert before not in again
