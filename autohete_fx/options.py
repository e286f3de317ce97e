"""The user's options: a mapping comes in, a frozen and validated value goes out.

``torch.compile(model, backend="autohete", options={...})`` hands the mapping over unchecked. Everything is checked here, once,
before anything is traced, so that no later stage meets an option it cannot honour. An unknown name or a bad value is an
``OptionError`` that says what was given, what was expected and what to do.

Sizes stay symbolic where they are a share of a device (``"60%"``): ``resolve_bytes`` turns them into bytes once the
total is known.
"""

import dataclasses
import inspect
import math
import os
import re
import tempfile
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from typing import Any

from autohete_fx.errors import OptionError, unknown_word
from autohete_fx.ir import Plan
from autohete_fx.ir.files import expanded

__all__ = ["ALLOWED_DECISIONS", "Options", "Share", "Size", "UserPass", "UserPasses", "parse_size", "resolve_bytes"]

UserPass = Callable[..., object]
"""``(GraphModule, PassContext) -> GraphModule``; the type is loose here because this module does not import torch."""

ALLOWED_DECISIONS = ("recompute", "offload_activations", "host_params", "host_optimizer", "disk_optimizer")
"""The words that ``allow`` may contain: the decisions that take memory off the device, and states off the host."""

_BYTES_OF_UNIT = {
    "b": 1,
    **{f"{prefix}b": 1000**power for power, prefix in enumerate("kmgtp", start=1)},
    **{f"{prefix}ib": 1024**power for power, prefix in enumerate("kmgtp", start=1)},
}
_MOST_BYTES = 2**60
_SIZE = re.compile(r"\s*(?P<number>\d+(?:\.\d*)?|\.\d+)\s*(?P<unit>[a-z]+|%)\s*", re.IGNORECASE)
_SIZE_EXPECTED = 'expected a size such as "20GiB" or "512MB", or a share of the memory such as "60%"'
_OPTION_EXPECTED = f"{_SIZE_EXPECTED}, or bytes as an int"


@dataclass(frozen=True, slots=True)
class Share:
    """A share of a memory's total size, more than 0 and at most 1."""

    fraction: float


Size = int | Share
"""Bytes, or a share of a total that is not known yet."""


@dataclass(frozen=True, slots=True, kw_only=True)
class UserPasses:
    """The user's own FX passes, by the point where they run; each point runs its passes in the order given.

    Attributes:
        joint: on the joint graph, before grouping; the context's plan is still empty.
        forward: on the forward graph, after our passes.
        backward: on the backward graph, after our passes.
        final: on both graphs and on inference graphs, after Inductor's own passes; changes the graph in place.
    """

    joint: tuple[UserPass, ...] = ()
    forward: tuple[UserPass, ...] = ()
    backward: tuple[UserPass, ...] = ()
    final: tuple[UserPass, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """Everything that a user may set. Build it with ``Options.from_user``, which validates.

    Attributes:
        memory_budget: peak device memory allowed; None: what is free on CUDA, no limit on a CPU device.
        host_budget: host memory allowed for homes. None is 7/8 of RAM on CUDA, else what is free; ranks of one host that share
            the model have even parts of that. Optimizer states on disk are not among them.
        report_dir: directory that a report of the run is written to (`autohete_fx.compiler.reporting`); None for no report.
        offload_dir: directory of optimizer states on disk, and of the memory-mapped homes on a CPU device; None for the
            system's temporary directory.
        plan: replay this plan instead of solving for one.
        passes: the user's own FX passes.
        inner_backend: what compiles the rewritten graphs: ``inductor`` or ``eager``.
        profile: where block costs come from: ``measured`` on the device, ``analytic``, or ``auto``. ``auto`` measures where a
            step is long enough for that to pay off (`autohete_fx.compiler.training`).
        allow: what the planner may decide, a subset of ``ALLOWED_DECISIONS``.
        micro_batches: forward and backward passes per optimizer step, at least 1.
        in_flight: the most forward passes that run before a backward of one of them ends, as in a pipeline; at least 1.
        solver_time_limit_s: seconds that the solver may take.
        verify: check graphs between passes.
    """

    memory_budget: Size | None = None
    host_budget: Size | None = None
    report_dir: str | None = None
    offload_dir: str | None = None
    plan: Plan | None = None
    passes: UserPasses = field(default_factory=UserPasses)
    inner_backend: str = "inductor"
    profile: str = "auto"
    allow: frozenset[str] = frozenset(ALLOWED_DECISIONS)
    micro_batches: int = 1
    in_flight: int = 1
    solver_time_limit_s: float = 10.0
    verify: bool = True

    @staticmethod
    def from_user(options: Mapping[str, object] | None = None, mode: str | None = None) -> "Options":
        """Validate what ``torch.compile`` was given.

        Raises:
            OptionError: an unknown name, a bad value, or a ``mode``.
            PlanError: ``plan`` is a path that cannot be read as a plan.
        """
        if mode not in (None, "default"):
            raise OptionError(
                f"mode={mode!r} was given, but the autohete backend has no modes; leave mode out, set options={{...}}"
                " for this backend and torch._inductor.config for Inductor's own settings"
            )
        given = {} if options is None else options
        if not isinstance(given, Mapping):
            raise OptionError(f"options is {_shown(given)}; expected a mapping such as {{'memory_budget': '20GiB'}}")
        for name in given:
            if name not in _PARSERS:
                raise OptionError(unknown_word("option", name, _PARSERS))
        parsed = Options(**{name: _PARSERS[name](name, value) for name, value in given.items()})
        # As many as are in flight belong to one step, at least.
        return dataclasses.replace(parsed, micro_batches=max(parsed.micro_batches, parsed.in_flight))


def resolve_bytes(size: Size, total_bytes: int) -> int:
    """A size in bytes, given the total that a share refers to; rounded down, and no more than solvers count with."""
    return int(size.fraction * total_bytes) if isinstance(size, Share) else min(size, _MOST_BYTES)


def parse_size(text: str) -> Size:
    """Read ``"20GiB"``, ``"1.5 GB"`` or ``"60%"``, in any case. Raises OptionError where the text is no such size."""
    match = _SIZE.fullmatch(text)
    if match is None:
        unit = f". Write {text}GiB, or {text}B for bytes" if text.isdecimal() and int(text) else ""
        raise OptionError(f"{text!r} is not a size; {_SIZE_EXPECTED}{unit}")
    number, unit = float(match["number"]), match["unit"].lower()
    if unit == "%":
        if not 0 < number <= 100:
            raise OptionError(f"{text!r} is not a share of a memory; expected more than 0% and at most 100%")
        return Share(number / 100)
    if unit not in _BYTES_OF_UNIT:
        raise OptionError(
            unknown_word("unit of size", match["unit"], ("B", "KB", "MB", "GB", "TB", "KiB", "MiB", "GiB", "TiB"))
        )
    num_bytes = int(min(number * _BYTES_OF_UNIT[unit], _MOST_BYTES))
    if num_bytes < 1:
        raise OptionError(f"{text!r} is less than one byte; {_SIZE_EXPECTED}")
    return num_bytes


def _parse_size_option(name: str, value: object) -> Size | None:
    if value is None:
        return None
    if isinstance(value, str):
        try:
            return parse_size(value)
        except OptionError as error:
            raise OptionError(f"option {name!r}: {error}") from None
    if isinstance(value, int) and not isinstance(value, bool):
        if value < 1:
            raise OptionError(f"option {name!r} is {value} bytes; {_OPTION_EXPECTED}")
        return value
    if isinstance(value, float):
        instead = f'write "{value * 100:g}%" for a share' if 0 < value <= 1 else "write int(...) for bytes"
        raise OptionError(f"option {name!r} is the float {value!r}; {_OPTION_EXPECTED}: {instead}")
    raise OptionError(f"option {name!r} is {_shown(value)}; {_OPTION_EXPECTED}")


def _parse_offload_dir(name: str, value: object) -> str | None:
    if value is None:
        return None
    if not isinstance(value, str | os.PathLike) or not str(value):
        raise OptionError(f"option {name!r} is {_shown(value)}; expected the path of a directory")
    path = expanded(value)
    try:
        if not path.is_dir():
            raise OptionError(
                f"option {name!r} is {str(path)!r}, which is not a directory; create it first or leave the option out"
            )
        # Permissions do not tell of read-only mounts and the like, and root passes all of them.
        with tempfile.TemporaryFile(dir=path):
            pass
    except OSError as error:
        raise OptionError(
            f"option {name!r} is {str(path)!r}, where no file can be made: {error.strerror}; choose another directory"
        ) from error
    return str(path.resolve())


def _parse_report_dir(name: str, value: object) -> str | None:
    if value is None:
        return None
    if not isinstance(value, str | os.PathLike) or not str(value):
        raise OptionError(
            f"option {name!r} is {_shown(value)}; expected the path of a directory, made where it is missing"
        )
    path = expanded(value)
    try:
        path.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=path):  # as for offload_dir
            pass
    except OSError as error:
        raise OptionError(
            f"option {name!r} is {str(path)!r}, where no file can be made: {error.strerror}; choose another directory"
        ) from error
    return str(path.resolve())


def _parse_plan(name: str, value: object) -> Plan | None:
    if value is None or isinstance(value, Plan):
        return value
    if isinstance(value, str | os.PathLike) and str(value):
        return Plan.load(expanded(value))
    raise OptionError(
        f"option {name!r} is {_shown(value)}; expected an autohete_fx Plan or the path of a file that Plan.save wrote"
    )


def _parse_passes(name: str, value: object) -> UserPasses:
    points = [f.name for f in fields(UserPasses)]
    if not isinstance(value, Mapping):
        raise OptionError(
            f"option {name!r} is {_shown(value)}; expected a mapping of points ({', '.join(points)})"
            " to a pass or a sequence of passes"
        )
    chosen: dict[str, tuple[UserPass, ...]] = {}
    for point, passes in value.items():
        if point not in points:
            raise OptionError(unknown_word(f"point in option {name!r}:", point, points))
        sequence = passes if isinstance(passes, Sequence) and not isinstance(passes, str) else (passes,)
        chosen[point] = tuple(_checked_pass(name, point, user_pass) for user_pass in sequence)
    return UserPasses(**chosen)


def _checked_pass(name: str, point: str, user_pass: object) -> UserPass:
    if not callable(user_pass):
        raise OptionError(
            f"option {name!r}: at {point!r} stands {_shown(user_pass)}; expected a callable"
            " (GraphModule, PassContext) -> GraphModule"
        )
    try:
        inspect.signature(user_pass).bind(None, None)
    except TypeError as error:
        raise OptionError(
            f"option {name!r}: the pass {_shown(user_pass)} at {point!r} cannot be called with a graph and a context:"
            f" {error}; expected (GraphModule, PassContext) -> GraphModule"
        ) from error
    except ValueError:
        pass  # a builtin without a signature: the call will tell
    return user_pass


def _parse_allow(name: str, value: object) -> frozenset[str]:
    if isinstance(value, str | Mapping) or not isinstance(value, Iterable):
        raise OptionError(
            f"option {name!r} is {_shown(value)}; expected a list of {', '.join(map(repr, ALLOWED_DECISIONS))}"
        )
    decisions = list(value)
    for decision in decisions:
        if decision not in ALLOWED_DECISIONS:
            raise OptionError(unknown_word(f"decision in option {name!r}:", decision, ALLOWED_DECISIONS))
    return frozenset(decisions)


def _parse_choice(*choices: str) -> Callable[[str, object], str]:
    def parse(name: str, value: object) -> str:
        if not isinstance(value, str) or value not in choices:
            raise OptionError(unknown_word(f"value of option {name!r}:", value, choices))
        return value

    return parse


def _parse_micro_batches(name: str, value: object) -> int:
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise OptionError(
            f"option {name!r} is {_shown(value)}; expected an int of at least 1: how many times forward and backward"
            " run before each optimizer.step()"
        )
    return value


def _parse_in_flight(name: str, value: object) -> int:
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise OptionError(
            f"option {name!r} is {_shown(value)}; expected an int of at least 1: how many forward passes run before the"
            " backward pass of the first of them"
        )
    return value


def _parse_seconds(name: str, value: object) -> float:
    if not isinstance(value, int | float) or isinstance(value, bool) or not (value > 0 and math.isfinite(value)):
        raise OptionError(f"option {name!r} is {_shown(value)}; expected a positive number of seconds")
    return float(value)


def _parse_bool(name: str, value: object) -> bool:
    if not isinstance(value, bool):
        raise OptionError(f"option {name!r} is {_shown(value)}; expected True or False")
    return value


_PARSERS: dict[str, Callable[[str, object], Any]] = {  # Any: each parser returns its own field's type
    "memory_budget": _parse_size_option,
    "host_budget": _parse_size_option,
    "report_dir": _parse_report_dir,
    "offload_dir": _parse_offload_dir,
    "plan": _parse_plan,
    "passes": _parse_passes,
    "inner_backend": _parse_choice("inductor", "eager"),
    "profile": _parse_choice("auto", "measured", "analytic"),
    "allow": _parse_allow,
    "micro_batches": _parse_micro_batches,
    "in_flight": _parse_in_flight,
    "solver_time_limit_s": _parse_seconds,
    "verify": _parse_bool,
}


def _shown(value: object) -> str:
    text = repr(value)
    return f"{text if len(text) <= 80 else text[:77] + '...'} ({type(value).__name__})"
