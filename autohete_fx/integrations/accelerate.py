"""``dynamo_backend="autohete"`` for Accelerate, and with it ``torch_compile_backend="autohete"`` for the Trainer of transformers.

Accelerate knows the backends of Dynamo by an enum, which is closed. `enable` answers its question for a missing value, which
``enum`` provides for, and leaves its members as they are. In: the options of the backend, which trainers have no argument for. Out:
an Accelerate that hands both to ``torch.compile``. `disable` takes it back.
"""

import functools
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from autohete_fx.errors import IntegrationError
from autohete_fx.options import Options

NAME = "AUTOHETE"


@dataclass(frozen=True, slots=True, kw_only=True)
class _Enabled:
    """An extended Accelerate.

    Attributes:
        names: its enum of backends.
        plugin: the class that gives ``torch.compile`` its arguments.
        prepare: the method of the class that ours stands in front of.
        options: of the backend.
    """

    names: Any
    plugin: Any
    prepare: Callable[[Any], None]
    options: dict[str, object]


_enabled: _Enabled | None = None


def enable(options: Mapping[str, object] | None = None) -> None:
    """Have Accelerate accept the backend's name from now on; a second call changes the options alone.

    Args:
        options: of the backend, for everything that is compiled by that name with no options of its own.

    Raises:
        OptionError: an option is unknown or has a bad value.
        IntegrationError: accelerate is missing, or its backends are not what is expected.
    """
    global _enabled
    Options.from_user(options)
    given = dict(options or {})
    if _enabled is not None:
        _enabled.options.clear()
        _enabled.options.update(given)
        return
    names, plugin = _found()
    _enabled = _Enabled(names=names, plugin=plugin, prepare=plugin.__post_init__, options=given)
    names._missing_ = classmethod(_missing(names))
    plugin.__post_init__ = _prepared(_enabled)
    handed_over = _handed_over(plugin)
    if handed_over != {"backend": NAME.lower(), **({"options": given} if given else {})}:
        disable()
        raise _not_known(f"it hands {handed_over!r} to torch.compile")


def disable() -> None:
    """Have Accelerate refuse the backend's name again. Models that were prepared meanwhile stay compiled."""
    global _enabled
    if _enabled is None:
        return
    del _enabled.names._missing_
    _enabled.plugin.__post_init__ = _enabled.prepare
    _enabled = None


def _found() -> tuple[Any, Any]:
    try:
        from accelerate.utils import DynamoBackend, TorchDynamoPlugin
    except ModuleNotFoundError as error:
        raise IntegrationError(
            f"enable() was called, but {error.name!r} cannot be imported. Expected was Accelerate, through which trainers compile."
            " Run pip install accelerate"
        ) from error
    except ImportError as error:
        raise _not_known(str(error)) from error
    if "_missing_" in vars(DynamoBackend) or getattr(DynamoBackend, "INDUCTOR", None) != "INDUCTOR":
        raise _not_known("its DynamoBackend is another enum")
    if not callable(getattr(TorchDynamoPlugin, "__post_init__", None)):
        raise _not_known("its TorchDynamoPlugin has no __post_init__")
    return DynamoBackend, TorchDynamoPlugin


def _not_known(found: str) -> IntegrationError:
    import accelerate

    return IntegrationError(
        f"accelerate {accelerate.__version__} was found, but {found}. Expected was an enum of backends that can be asked for"
        " 'autohete', and options that reach torch.compile. Compile the model yourself before the trainer gets it:"
        ' model.compile(backend="autohete", options=...)'
    )


def _missing(names: Any) -> Callable[[Any, object], object]:
    member = str.__new__(names, NAME)
    member._name_ = member._value_ = NAME

    def missing(cls: Any, value: object) -> object:
        del cls
        return member if value == NAME else None

    return missing


def _prepared(enabled: _Enabled) -> Callable[[Any], None]:
    @functools.wraps(enabled.prepare)
    def prepare(self: Any) -> None:
        enabled.prepare(self)
        if self.backend == NAME and self.options is None and enabled.options:
            self.options = dict(enabled.options)

    return prepare


def _handed_over(plugin: Any) -> object:
    """The arguments that ``torch.compile`` would get, or the exception in their place."""
    try:
        return plugin(backend=NAME.lower()).to_kwargs()
    except Exception as error:  # whatever another version raises
        return error
