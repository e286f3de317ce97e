"""Identities of users' passes: equal where the work is the same, in any process, and different where it is not."""

import functools
import re
import subprocess
import sys
import threading
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch

import autohete_fx
from autohete_fx.compiler.pass_identity import pass_identity

LIMIT = 3


def closing_over(value: object) -> Callable[[object, object], object]:
    return lambda gm, context: value


def reads_a_constant(gm: object, context: object) -> object:
    return LIMIT


def inner(gm: object) -> object:
    return gm


def calls_another(gm: object, context: object) -> object:
    return inner(gm)


def three_parts(gm: object, context: object, depth: int = 0, *, name: str = "") -> object:
    return gm, depth, name


@dataclass(frozen=True)
class Configured:
    depth: int

    def __call__(self, gm: object, context: object) -> object:
        return gm, self.depth


class WithAttributes:
    def __init__(self, depth: int) -> None:
        self.depth = depth

    def __call__(self, gm: object, context: object) -> object:
        return gm

    def method(self, gm: object, context: object) -> object:
        return self.depth


class WithWord(WithAttributes):
    def __init__(self, word: str | None, held: object = None) -> None:
        super().__init__(0)
        self.word, self.held = word, held

    def uuid(self) -> str | None:
        return self.word


def with_default(default: object) -> Callable[..., object]:
    def user_pass(gm: object, context: object, depth: object = default) -> object:
        return gm

    return user_pass


ONE, TWO = [1], [2]

DIFFERENT: dict[str, tuple[Callable[..., object], Callable[..., object]]] = {
    "lambdas on one line": (lambda gm, c: gm + 1, lambda gm, c: gm + 2),
    "closed over numbers": (closing_over(1), closing_over(2)),
    "closed over containers": (closing_over([1, {"a": (2, None)}]), closing_over([1, {"a": (2, 0)}])),
    "which of two comes twice": (closing_over((ONE, TWO, ONE)), closing_over((ONE, TWO, TWO))),
    "a list and a tuple": (closing_over([1]), closing_over((1,))),
    "closed over operators": (closing_over(torch.ops.aten.mm.default), closing_over(torch.ops.aten.bmm.default)),
    "closed over functions": (closing_over(inner), closing_over(reads_a_constant)),
    "defaults": (with_default(1), with_default(2)),
    "keyword of a partial": (functools.partial(three_parts, name="a"), functools.partial(three_parts, name="b")),
    "argument of a partial": (functools.partial(three_parts, 1), functools.partial(three_parts, 2)),
    "fields of a dataclass": (Configured(1), Configured(2)),
    "attributes of an object": (WithAttributes(1), WithAttributes(2)),
    "objects of methods": (WithAttributes(1).method, WithAttributes(2).method),
    "words of uuid()": (WithWord("a"), WithWord("b")),
    "classes": (WithAttributes(0), WithWord("a")),
}


@pytest.mark.parametrize("case", DIFFERENT)
def test_different_work_has_different_identities(case: str):
    one, other = DIFFERENT[case]
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # and content that can be digested
        assert pass_identity(one) == pass_identity(one) != pass_identity(other)


@pytest.mark.parametrize(
    ("one", "other"),
    [
        (closing_over([1, {"a": {3, 4}}]), closing_over([1, {"a": {4, 3}}])),
        (functools.partial(three_parts, name="a"), functools.partial(three_parts, name="a")),
        (Configured(1), Configured(1)),
        (WithAttributes(1).method, WithAttributes(1).method),
        (WithWord("a", held=1), WithWord("a", held=threading.Lock())),
    ],
    ids=["closures", "partials", "dataclasses", "methods", "uuid() alone counts"],
)
def test_equal_work_has_one_identity(one: Callable[..., object], other: Callable[..., object]):
    assert pass_identity(one) == pass_identity(other)


def test_constants_and_functions_of_the_module_count(monkeypatch: pytest.MonkeyPatch):
    before = pass_identity(reads_a_constant), pass_identity(calls_another)
    monkeypatch.setitem(globals(), "LIMIT", 4)
    monkeypatch.setitem(globals(), "inner", three_parts)
    assert pass_identity(reads_a_constant) != before[0] and pass_identity(calls_another) != before[1]


def test_a_recursive_pass_has_an_identity():
    def walk(gm: Any, context: object) -> object:
        return walk(gm, context) if gm else None

    assert pass_identity(walk) == pass_identity(walk)


@pytest.mark.parametrize("held", [threading.Lock(), WithWord(None)], ids=["no content", "uuid() is None"])
def test_what_cannot_be_digested_is_never_shared_and_says_what_to_do(held: object):
    user_pass = closing_over(held)
    with pytest.warns(UserWarning, match=r"closing_over.*cannot be digested.*Give the pass a uuid\(\) method"):
        first = pass_identity(user_pass)
    with pytest.warns(UserWarning, match="cannot be digested"):
        assert pass_identity(user_pass) != first


PROGRAM = """
import functools
import sys
from autohete_fx.compiler.pass_identity import pass_identity

class Word:
    def __init__(self, word):
        self.word = word
    def __call__(self, gm, context):
        return gm
    def uuid(self):
        return self.word

def closing(value):
    def user_pass(gm, context, depth=value):
        return [gm for _ in range(value)]
    return user_pass

number = int(sys.argv[1])
passes = [closing(number), lambda gm, c: {"set", "of", "words", number}, Word(str(number)), functools.partial(closing(1), number)]
print(*map(pass_identity, passes))
"""


def identities_in_a_process(file: Path, number: int, hash_seed: str) -> list[str]:
    file.write_text(PROGRAM)
    path = str(Path(autohete_fx.__file__).parents[1])
    done = subprocess.run(
        [sys.executable, str(file), str(number)],
        capture_output=True,
        text=True,
        env={"PYTHONPATH": path, "PYTHONHASHSEED": hash_seed, "PATH": "/usr/bin:/bin"},
        check=False,
    )
    assert done.returncode == 0, done.stderr
    found = done.stdout.split()
    assert all(re.fullmatch("[0-9a-f]{16}", identity) for identity in found)
    return found


@pytest.mark.slow
def test_identities_are_the_same_in_every_process(tmp_path: Path):
    first = identities_in_a_process(tmp_path / "passes.py", 1, "1")
    assert identities_in_a_process(tmp_path / "passes.py", 1, "2") == first
    other = identities_in_a_process(tmp_path / "passes.py", 2, "1")
    assert len({*first, *other}) == len(first) + len(other), "another value, another identity"
