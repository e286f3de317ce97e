"""``autohete run script.py``: a script that knows nothing of us, within a budget.

In: a script or a module, its arguments, and options of the backend. Out: the script's own effects, as ``python script.py`` has
them: ``sys.argv``, ``__main__``, ``sys.path``, tracebacks, exit status. When it ends, however it does, a report on standard error
says what was done to its optimizers and models, what was not, and why.
"""

import atexit
import builtins
import contextlib
import importlib.machinery
import importlib.util
import os
import sys
import types
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import CodeType, TracebackType

from autohete_fx.compiler.compilation import Compilation, compilations
from autohete_fx.errors import OptionError
from autohete_fx.integrations.watching import Trained, Watched
from autohete_fx.options import Options

_LISTS = frozenset({"allow"})
"""Options that are lists, also of one value: commas part the values."""

_PATHS = ("offload_dir", "report_dir", "plan")
_TEXTS = frozenset({*_PATHS, "memory_budget", "host_budget"})
"""Options whose values may look like numbers, and are none."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Program:
    """Code to run as ``__main__``.

    Attributes:
        code: compiled.
        main: its module, still empty.
    """

    code: CodeType
    main: types.ModuleType


def run(
    target: str,
    arguments: Sequence[str],
    options: Mapping[str, object],
    *,
    is_module: bool = False,
    only_same_kernels: bool = False,
    left: Sequence[str] = (),
    owns_process: bool = False,
) -> int:
    """Run a script, or a module by its name, and print the report. Returns the exit status of a program that ended by itself or by
    an exception; ``SystemExit`` goes through, and ``KeyboardInterrupt`` when it is printed.

    Args:
        target: path of the script, or name of the module.
        arguments: those of the program.
        options: of the backend.
        is_module: ``target`` is a module, as after ``python -m``.
        only_same_kernels: replace only optimizers that were made with ``fused=True``.
        left: classes of modules that are not compiled.
        owns_process: the process ends afterwards. The program's state of it stays, and the report comes at its exit.

    Raises:
        OptionError: an option is bad, or there is no such program.
    """
    read = Options.from_user(options)  # the program may change its directory
    absolute = {**options, **{name: getattr(read, name) for name in _PATHS if name in options}}
    with _as_main(target, arguments, is_module=is_module, stays=owns_process) as program:
        watched, ending = Watched(absolute, only_same_kernels=only_same_kernels, left=left), contextlib.ExitStack()
        ending.callback(_tell, watched, options, tuple(compilations()), os.getpid())
        ending.enter_context(watched)
        if owns_process:  # then threads may train until the interpreter has waited for them
            atexit.register(ending.close)
            try:
                return _status(program)
            except KeyboardInterrupt:  # of which Python dies by the signal, as shells expect; it is printed already
                sys.excepthook = lambda *_: None
                raise
        with ending:
            return _status(program)


def _tell(watched: Watched, options: Mapping[str, object], earlier: Sequence[Compilation], process: int) -> None:
    """Print the report. A process that the program forked may end so too, and ranks of a job decide alike."""
    if os.getpid() == process and os.environ.get("RANK", "0") == "0":
        with contextlib.suppress(Exception):  # the program may have closed it
            sys.stdout.flush()
        text = report(watched.trained, options, _since(earlier), watched.unmatched)
        print(text, file=sys.stderr, flush=True)


def _status(program: Program) -> int:
    try:
        exec(program.code, vars(program.main))
        return 0
    except SystemExit:
        raise
    except BaseException as error:
        error.__traceback__ = _from(program.code, error.__traceback__)
        sys.excepthook(type(error), error, error.__traceback__)
        if isinstance(error, KeyboardInterrupt):
            raise
        return 1


def report(
    trained: Sequence[Trained],
    options: Mapping[str, object],
    compiled: Sequence[Compilation],
    unmatched: Collection[str] = (),
) -> str:
    """The words about a run: a line a decision, and the training graphs as predicted and as measured. ``unmatched``: names that
    were to be left, and of which there was nothing."""
    given = ", ".join(f"{name}={value}" for name, value in options.items()) or "no options"
    lines = [f"autohete run: {given}"]
    if not trained:
        lines.append("  no optimizer was made in this process: nothing was compiled or replaced")
    for note in trained:
        held = "parameter" if note.num_params == 1 else "parameters"
        lines.append(f"  {note.name} of {note.num_params} {held}")
        lines.append(
            f"    optimizer: replaced by {note.replaced}" if note.replaced else f"    optimizer: kept, {note.kept}"
        )
        lines.append(
            f"    model: compiled {note.compiled}" if note.compiled else f"    model: not compiled, {note.uncompiled}"
        )
    for name in sorted(unmatched):
        lines.append(f"  --leave {name} was given, but no module of that class holds all parameters of an optimizer")
    for compilation in compiled:
        lines += ["", *(f"  note: {note}" for note in compilation.notes), compilation.comparison_table()]
    return "\n".join(lines)


def parsed_options(pairs: Sequence[str]) -> dict[str, object]:
    """Options of the backend from ``NAME=VALUE``: whole and decimal numbers, ``true`` and ``false``, lists with commas, else text.
    Sizes and paths are text.

    Raises:
        OptionError: a pair without ``=``.
    """
    found: dict[str, object] = {}
    for pair in pairs:
        name, equals, text = pair.partition("=")
        if not (name and equals):
            raise OptionError(
                f"--option {pair!r} was given. Expected was NAME=VALUE, such as micro_batches=4. README lists the options"
            )
        found[name] = text if name in _TEXTS else text.split(",") if name in _LISTS else _value(text)
    return found


def _value(text: str) -> object:
    for read in (int, float):
        with contextlib.suppress(ValueError):
            return read(text)
    return {"true": True, "false": False}.get(text.lower(), text)


def _since(earlier: Sequence[Compilation]) -> list[Compilation]:
    known = set(map(id, earlier))
    return [each for each in compilations() if each.training and id(each) not in known]


@contextlib.contextmanager
def _as_main(target: str, arguments: Sequence[str], *, is_module: bool, stays: bool) -> Iterator[Program]:
    """The program, ready to run, in the process's state as ``python`` makes it. Unless it stays, what was before stands again
    afterwards."""
    main, argv, path = sys.modules["__main__"], sys.argv, list(sys.path)
    if not sys.flags.safe_path:
        sys.path[:1] = [os.getcwd() if is_module else str(Path(target).resolve().parent)]
    try:
        sys.argv = ["-m" if is_module else target, *arguments]  # also while the packages of a module are imported
        program = _module(target) if is_module else _script(target)
        if is_module:
            sys.argv[0] = str(vars(program.main)["__file__"])
        sys.modules["__main__"] = program.main
        yield program
    finally:
        if not stays:
            sys.modules["__main__"], sys.argv, sys.path[:] = main, argv, path


def _script(target: str) -> Program:
    try:
        source = Path(target).read_bytes()
    except OSError as error:
        raise OptionError(
            f"cannot open {target!r}: {error.strerror}. Expected was the file of a Python program. Give its path, or -m and the"
            " name of a module"
        ) from error
    file = os.path.abspath(target)
    loader = importlib.machinery.SourceFileLoader("__main__", file)
    main = types.ModuleType("__main__")
    vars(main).update(__file__=file, __builtins__=builtins, __loader__=loader, __package__=None, __spec__=None)
    return Program(code=_compiled(source, file), main=main)


def _compiled(source: bytes, file: str) -> CodeType:
    try:
        return compile(source, file, "exec", dont_inherit=True)
    except SyntaxError as error:
        sys.excepthook(SyntaxError, error.with_traceback(None), None)  # the frame would be ours
        raise SystemExit(1) from None


def _module(target: str) -> Program:
    spec = _spec_of(target)
    if spec is not None and spec.submodule_search_locations is not None:
        spec = _spec_of(f"{target}.__main__")
    code = None
    if spec is not None and isinstance(spec.loader, importlib.machinery.SourceFileLoader):
        code = spec.loader.get_code(spec.name)
    if spec is None or code is None or spec.origin is None:
        raise OptionError(
            f"-m {target} was given, but there is no such module, or none that is a program. Expected was a module with source, or"
            " a package with __main__.py. Mend the name, or run it where `python -m` finds it"
        )
    main = types.ModuleType("__main__")
    vars(main).update(
        __file__=spec.origin, __builtins__=builtins, __loader__=spec.loader, __package__=spec.parent, __spec__=spec
    )
    return Program(code=code, main=main)


def _spec_of(name: str) -> importlib.machinery.ModuleSpec | None:
    if not name or name.startswith("."):
        return None
    try:
        return importlib.util.find_spec(name)
    except (ImportError, ValueError) as error:
        missing = isinstance(error, ModuleNotFoundError) and error.name and f"{name}.".startswith(f"{error.name}.")
        if missing or (isinstance(error, ValueError) and "__spec__" in str(error)):
            return None  # a parent is missing, or is no package
        sys.excepthook(type(error), error, error.__traceback__)  # raised by the code of a package
        raise SystemExit(1) from None


def _from(code: CodeType, traceback: TracebackType | None) -> TracebackType | None:
    """The part of a traceback that begins with the program's own frame; all of it where that is not in it."""
    found = traceback
    while found is not None and found.tb_frame.f_code is not code:
        found = found.tb_next
    return found or traceback
