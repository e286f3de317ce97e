"""Blueprints: models that are built without memory for their weights, to be traced.

Enter what a user names, which is a built-in architecture, a JSON file of a transformers configuration, or ``file.py:factory``.
Leaves a `Blueprint`, which builds the module and one batch out of fake tensors. A configuration can be built with fewer layers
than it has, because layers that are built alike need not all be traced.
"""

import importlib.util
import json
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from torch import Tensor, nn

from autohete_fx.errors import OptionError, unknown_word
from autohete_fx.internals.modes import FakeTensorMode, StayOnMeta
from autohete_fx.internals.modules import not_compiled
from autohete_fx.internals.tensors import is_made_of_tensors
from autohete_fx.ir.files import is_file
from autohete_fx.whatif.architectures import find_architecture, require_transformers

_ATTENTION_DROPOUTS = ("attention_dropout", "attn_pdrop")
_LONGEST_LINE = 160
_OF_EVERY_MODULE = frozenset(vars(nn.Module()))


@dataclass(frozen=True, kw_only=True)
class Sketch:
    """A module of fake tensors, the function of a batch that gives its loss, and one batch."""

    module: nn.Module
    loss: Callable[..., Tensor]
    inputs: tuple[Any, ...]

    @property
    def batch(self) -> tuple[int, int]:
        """Sequences, and tokens of each, by the first input. In inputs other than token ids each example counts as one."""
        first = self.inputs[0]
        if not isinstance(first, Tensor) or not first.dim():
            return 1, 1
        return len(first), 1 if first.is_floating_point() else max(1, first.numel() // max(1, len(first)))


@dataclass(frozen=True, kw_only=True)
class Blueprint:
    """How to build a model.

    Attributes:
        name: as the user gave it.
        num_layers: how many layers it has; None where it is known only as a whole.
        period: every so many layers are of the same types again.
        layer_types: of each layer, as its configuration calls them; empty where it does not.
        draws: whether layers draw random numbers. Kernels that do fuse otherwise in each layer (`depth.deepened_evenly`).
        build: the sketch with that many layers (all of them where None), under a fake mode.
    """

    name: str
    num_layers: int | None
    period: int
    build: Callable[[FakeTensorMode, int | None], Sketch]
    layer_types: tuple[str, ...] = ()
    draws: bool = False


def read_model(text: str, *, batch: int, seq: int, dtype: torch.dtype | None) -> Blueprint:
    """The blueprint that a user means.

    Args:
        text: a name of `architectures`, the path of a JSON file, or ``file.py:factory``.
        batch, seq: of the token ids that it is trained on; a factory that returns inputs has its own.
        dtype: of its parameters; None: bfloat16 for a configuration, a factory's module as it is.

    Raises:
        OptionError: there is no such model, or it cannot be built.
    """
    path, _, factory = text.rpartition(":")
    if path.endswith(".py") or text.endswith(".py"):
        return _from_factory(text, path, factory, batch, seq, dtype)
    if text.endswith(".json"):
        return _from_config(text, _read_entries(Path(text)), batch, seq, dtype)
    return _from_config(text, find_architecture(text), batch, seq, dtype)


def _read_entries(path: Path) -> Mapping[str, object]:
    try:
        entries = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise OptionError(
            f"cannot read the configuration {str(path)!r}: {error.strerror}; expected a transformers config.json. Correct the path"
        ) from error
    except ValueError as error:
        raise OptionError(f"{str(path)!r} is not JSON: {error}; expected a transformers config.json") from error
    if not isinstance(entries, dict) or not isinstance(entries.get("model_type"), str):
        raise OptionError(f"{str(path)!r} has no model_type; expected a transformers config.json")
    return entries


def _from_config(
    name: str, entries: Mapping[str, object], batch: int, seq: int, dtype: torch.dtype | None
) -> Blueprint:
    config = _config_of(name, entries)
    positions = getattr(config, "max_position_embeddings", None)
    if positions is not None and seq > positions:
        raise OptionError(
            f"--seq {seq} is longer than the {positions} positions of {name!r}; give a shorter one, or a JSON"
            " configuration with more positions"
        )
    num_layers = getattr(config, "num_hidden_layers", None)
    if not isinstance(num_layers, int) or num_layers < 1:
        raise OptionError(
            f"{name!r} has num_hidden_layers {num_layers}; expected the configuration of a causal language model. Give its"
            " config.json, or file.py:factory"
        )
    types: list[str] = getattr(config, "layer_types", None) or []

    def build(mode: FakeTensorMode, num_layers: int | None) -> Sketch:
        config = _config_of(name, entries)
        if num_layers is not None:
            config.num_hidden_layers = num_layers
            if getattr(config, "layer_types", None):
                config.layer_types = config.layer_types[:num_layers]
        with mode:
            module = _causal_model(name, config, dtype or torch.bfloat16)
            tokens = torch.zeros(batch, seq, dtype=torch.int64)
        return Sketch(module=module, loss=_loss_of_labels(module), inputs=(tokens,))

    period = _period(types or [""] * num_layers)
    return Blueprint(
        name=name, num_layers=num_layers, period=period, build=build, layer_types=tuple(types), draws=_draws(config)
    )


def _draws(config: Any) -> bool:
    return any("drop" in name and isinstance(rate, float) and rate > 0 for name, rate in config.to_dict().items())


def _loss_of_labels(module: nn.Module) -> Callable[[Tensor], Tensor]:
    def loss(tokens: Tensor) -> Tensor:
        return module(input_ids=tokens, labels=tokens, use_cache=False).loss

    return loss


def _period(types: list[str]) -> int:
    """The shortest distance at which layer types repeat."""
    return next(p for p in range(1, len(types) + 1) if all(a == b for a, b in zip(types, types[p:], strict=False)))


def _transformers() -> Any:
    require_transformers()
    import transformers

    return transformers


def _config_of(name: str, entries: Mapping[str, object]) -> Any:
    """The configuration, as training without a cache and without dropout in attention wants it.

    A CPU, on which models are traced, has no fused attention with dropout; a GPU has, at the same cost as without.
    """
    options = {key: value for key, value in entries.items() if key != "model_type"}
    transformers = _transformers()
    try:
        config = transformers.AutoConfig.for_model(entries["model_type"], **options)
    except Exception as error:  # its checks of values raise errors that have nothing in common
        raise OptionError(
            f"{name!r} is no configuration that transformers knows: {_first_line(error)}; expected one of a model that it has."
            " Upgrade transformers, or give file.py:factory"
        ) from error
    for dropout in _ATTENTION_DROPOUTS:
        if hasattr(config, dropout):
            setattr(config, dropout, 0.0)
    config.use_cache = False
    return config


def _causal_model(name: str, config: Any, dtype: torch.dtype) -> nn.Module:
    transformers = _transformers()
    try:
        module = transformers.AutoModelForCausalLM.from_config(config, dtype=dtype)
    except Exception as error:  # of the class, or of a module that is built with wrong sizes
        raise OptionError(
            f"{name!r} cannot be built as a causal language model: {_first_line(error)}; expected a configuration of one."
            " Correct its entries, or give file.py:factory"
        ) from error
    module.loss_type = "ForCausalLM"  # what it would fall back to, with a warning that breaks the graph
    return module.train()


def _from_factory(text: str, path: str, factory: str, batch: int, seq: int, dtype: torch.dtype | None) -> Blueprint:
    if not path or not factory.isidentifier():
        raise OptionError(f"{text!r} names no function; expected file.py:factory")

    def build(mode: FakeTensorMode, num_layers: int | None) -> Sketch:
        assert num_layers is None, "a factory's layers cannot be counted"
        source, made = _made_by(text, path, factory)
        module, *rest = made if isinstance(made, tuple) and made else (made,)
        if not isinstance(module, nn.Module):
            raise OptionError(
                f"{text} returned {type(module).__name__}; expected a torch.nn.Module, or a tuple of one and its inputs"
            )
        module = not_compiled(module).train()
        if dtype is not None:
            module.to(dtype)
        given = rest[0] if rest else torch.zeros(batch, seq, dtype=torch.int64, device="cpu")
        names = tuple(given) if isinstance(given, Mapping) else ()
        inputs = tuple(given.values()) if names else given if isinstance(given, tuple) else (given,)
        hint = (
            "inputs are a tuple, or a dictionary of named ones" if rest else "let the factory return (module, inputs)"
        )
        # What is compiled inside of the module would compute with tensors that have no data.
        with mode, torch.compiler.set_stance("force_eager"):
            try:
                inputs = _faked(text, module, source, inputs)
            except (RuntimeError, ValueError) as error:
                raise OptionError(
                    f"the tensors of {text} cannot be had without data: {_first_line(error)}. Expected were dense ones of known"
                    " shapes. Let the factory make such a model"
                ) from error
            return Sketch(module=module, loss=_loss_of_outputs(text, module, names, inputs, hint), inputs=inputs)

    return Blueprint(name=text, num_layers=None, period=1, build=build)


def _made_by(text: str, path: str, factory: str) -> tuple[ModuleType, object]:
    """The file as a module, and what its factory returns."""
    if not is_file(path):
        raise OptionError(f"{path!r} is no file that can be found; expected one of Python, as in file.py:factory")
    spec = importlib.util.spec_from_file_location(f"autohete_fx_factory_{Path(path).stem}", path)
    assert spec is not None and spec.loader is not None, "the path ends with .py"
    source = sys.modules[spec.name] = importlib.util.module_from_spec(spec)  # Dynamo looks globals up by module
    try:
        with torch.device("meta"), StayOnMeta():
            spec.loader.exec_module(source)
            make = getattr(source, factory, None)
            made = None if make is None else make()
    except Exception as error:
        raise OptionError(
            f"{text} could not be built: {type(error).__name__}: {_first_line(error)}. Expected was a function that can be"
            ' called without arguments under torch.device("meta"), where tensors have no data. Correct it, or give tensors'
            ' whose values it needs device="cpu"'
        ) from error
    if make is None:
        raise OptionError(f"{path}: {unknown_word('function', factory, _functions_of(source))}")
    return source, made


def _functions_of(source: ModuleType) -> list[str]:
    """Names of the functions and classes that a file makes."""
    return [name for name, value in vars(source).items() if getattr(value, "__module__", None) == source.__name__]


def _faked(text: str, module: nn.Module, source: ModuleType, inputs: tuple[Any, ...]) -> tuple[Any, ...]:
    """The inputs with tensors of the fake mode that is on in the place of theirs, as the module and its file have them then."""
    made: dict[Tensor, Tensor] = {}

    def of(tensor: Tensor) -> Tensor:
        if tensor not in made:
            if is_made_of_tensors(tensor):
                raise OptionError(
                    f"{text} has a tensor of type {type(tensor).__name__}; expected plain ones. Quantize or distribute the model"
                    " where it is trained"
                )
            fake = torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device="cpu")
            is_parameter = isinstance(tensor, nn.Parameter)
            made[tensor] = nn.Parameter(fake, requires_grad=tensor.requires_grad) if is_parameter else fake
        return made[tensor]

    for part in module.modules():
        others = [(name, value) for name, value in vars(part).items() if name not in _OF_EVERY_MODULE]
        for name, value in (*part._parameters.items(), *part._buffers.items(), *others):
            if isinstance(value, Tensor | list | tuple | dict):
                setattr(part, name, _mapped(of, value))
    for name, value in vars(source).items():
        if isinstance(value, Tensor):
            setattr(source, name, of(value))
    return _mapped(of, inputs)


def _mapped(of: Callable[[Tensor], Tensor], value: Any) -> Any:
    """A value with others in the place of its tensors. Lists and dictionaries stay the same ones."""
    if isinstance(value, Tensor):
        return of(value)
    if type(value) is tuple:
        return tuple(_mapped(of, each) for each in value)
    if type(value) is list:
        value[:] = [_mapped(of, each) for each in value]
    if type(value) is dict:
        value.update({key: _mapped(of, each) for key, each in value.items()})
    return value


def _loss_of_outputs(
    text: str, module: nn.Module, names: tuple[str, ...], inputs: tuple[Any, ...], hint: str
) -> Callable[..., Tensor]:
    """How a step makes a loss of what the module returns, found by calling it once without data."""
    try:
        outputs = _called(module, names, inputs)
    except Exception as error:
        raise OptionError(
            f"the module of {text} cannot be called with {', '.join(_shown(i) for i in inputs)}:"
            f" {type(error).__name__}: {_first_line(error)}; {hint}"
        ) from error
    # Each has the module itself in its closure: by the path to it layers are named.
    find_loss, find_logits = (_finder(outputs, name) for name in ("loss", "logits"))
    if find_loss is not None and not find_loss(outputs).dim():
        return lambda *args: find_loss(_called(module, names, args))
    tokens = inputs[0]
    if find_logits is not None and isinstance(tokens, Tensor) and find_logits(outputs).shape[:-1] == tokens.shape:
        return lambda *args: nn.functional.cross_entropy(
            find_logits(_called(module, names, args)).flatten(0, -2).float(), args[0].flatten()
        )
    raise OptionError(
        f"the module of {text} returns {_shown(outputs)}; expected a scalar loss, alone, as a tuple's only scalar or by that"
        " name. Logits will do, too, with one row a token of the first input"
    )


def _finder(outputs: Any, name: str) -> Callable[[Any], Tensor] | None:
    """How a tensor is found in what a module returns: itself, by name, or as a tuple's only scalar; None where there is none."""
    if isinstance(outputs, Tensor):
        return lambda outputs: outputs
    if isinstance(getattr(outputs, name, None), Tensor):
        return lambda outputs: getattr(outputs, name)
    if isinstance(outputs, Mapping) and isinstance(outputs.get(name), Tensor):
        return lambda outputs: outputs[name]
    if isinstance(outputs, tuple):
        scalars = [at for at, each in enumerate(outputs) if isinstance(each, Tensor) and not each.dim()]
        if len(scalars) == 1:
            return lambda outputs: outputs[scalars[0]]
    return None


def _called(module: nn.Module, names: tuple[str, ...], args: tuple[Any, ...]) -> Any:
    return module(**dict(zip(names, args, strict=True))) if names else module(*args)


def _shown(value: object) -> str:
    return f"a tensor of shape {tuple(value.shape)}" if isinstance(value, Tensor) else type(value).__name__


def _first_line(error: Exception) -> str:
    """Of what went wrong at first; some messages list all that would have been right, which is cut off."""
    line = str(error.__cause__ or error).strip().partition("\n")[0]
    return line if len(line) <= _LONGEST_LINE else line[:_LONGEST_LINE] + " …"
