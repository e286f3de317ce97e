"""Small random models of every family of the installed transformers, written from its mappings.

A family is a model type, such as ``llama``; its kind is the first of `KINDS` that has a class for it. Its configuration is the
default one with every size made small (`family_sizes`).
"""

import fnmatch
import inspect
from collections.abc import Sequence
from typing import Any

import torch
import transformers
from family_sizes import (
    BATCH,
    EXCEPTIONS,
    HEADS,
    IMAGE,
    KEPT,
    KEYS,
    LAYERS,
    LISTS,
    SIZES,
    SOUND,
    TIME,
    UNSET,
    VOCABULARY,
    WORDS,
    Except,
)
from torch import Tensor, nn
from transformers.models.auto import modeling_auto
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

KINDS = {
    "causal": "MODEL_FOR_CAUSAL_LM_MAPPING_NAMES",
    "masked": "MODEL_FOR_MASKED_LM_MAPPING_NAMES",
    "encoder-decoder": "MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING_NAMES",
    "vision": "MODEL_FOR_IMAGE_CLASSIFICATION_MAPPING_NAMES",
    "speech to text": "MODEL_FOR_SPEECH_SEQ_2_SEQ_MAPPING_NAMES",
    "speech": "MODEL_FOR_CTC_MAPPING_NAMES",
    "audio": "MODEL_FOR_AUDIO_CLASSIFICATION_MAPPING_NAMES",
}
"""The task of a family, and transformers' mapping from model types to classes for it. Encoder-decoders come before decoders: many
have a class for their decoder alone."""
_FIRST = ("encoder-decoder", "speech to text", "masked")


def kinds() -> dict[str, str]:
    """Every family with its kind."""
    found: dict[str, str] = {}
    for kind in (*_FIRST, *(kind for kind in KINDS if kind not in _FIRST)):
        for family in getattr(modeling_auto, KINDS[kind]):
            found.setdefault(family, kind)
    order = list(KINDS)
    return dict(sorted(found.items(), key=lambda item: (order.index(item[1]), item[0])))


def small_config(family: str) -> Any:
    """The family's configuration, made small."""
    given = EXCEPTIONS.get(family, Except()).config or {}
    return _small(CONFIG_MAPPING[family], given)


def _small(kind: type[Any], given: dict[str, Any]) -> Any:
    default = kind()
    values = {name: value for name, value in vars(default).items() if not name.startswith("_")}
    changes: dict[str, Any] = {}
    special = iter(range(WORDS[1], VOCABULARY))
    for name, value in values.items():
        if isinstance(value, transformers.PreTrainedConfig):
            part = given.get(name, {})
            changes[name] = _small(type(value), part if isinstance(part, dict) else {})
        elif name.endswith(("_token_id", "_token_index", "_index", "_idx")) and isinstance(value, int):
            if value >= WORDS[0] and "ignore" not in name:
                changes[name] = next(special)
        elif isinstance(value, (list, tuple)) and len(value) == _depth(values) and _depth(values) > LAYERS:
            changes[name] = type(value)(_spread(value))
        elif isinstance(value, (list, tuple)):
            most = next((most for names, most in LISTS if _is_one(name, names)), None)
            changes |= {} if most is None else {name: type(value)(_small_stages(value, most))}
        elif isinstance(value, int) and not isinstance(value, bool):
            changes[name] = _small_size(name, value, values)
        elif value is None and name in UNSET:
            changes[name] = UNSET[name]
    changes |= {
        name: value for name, value in given.items() if not isinstance(changes.get(name), transformers.PreTrainedConfig)
    }
    if "use_cache" in values:
        changes["use_cache"] = False
    return kind(**changes)


def _depth(values: dict[str, Any]) -> int:
    """Layers of a default configuration; 0 where it has no such number."""
    names = ("num_hidden_layers", "n_layer", "num_layers", "n_layers")
    return next((values[name] for name in names if isinstance(values.get(name), int)), 0)


def _spread(per_layer: Any) -> list[Any]:
    """Per-layer entries of a small model: every kind that there is, in order of appearance, as far as layers go."""
    picked = []
    for entry in per_layer:
        if entry not in picked:
            picked.append(entry)
    return (picked + list(per_layer))[:LAYERS] if len(picked) <= LAYERS else list(per_layer)[:LAYERS]


def _small_stages(entries: Sequence[int], most: int) -> list[int]:
    divisor = max(1, entries[0] // most)
    return [max(1, entry // divisor) for entry in entries]


def _is_one(name: str, patterns: str) -> bool:
    return any(fnmatch.fnmatchcase(name, pattern) for pattern in patterns.split())


def _small_size(name: str, value: int, values: dict[str, Any]) -> int:
    most = next((most for names, most in SIZES if _is_one(name, names)), KEPT)
    if most == KEYS:
        heads = next((values[n] for n in ("num_attention_heads", "n_head", "num_heads") if n in values), value)
        return HEADS if value == heads else HEADS // 2
    return value if most == KEPT else min(value, most)


def small_model(family: str) -> nn.Module:
    """A model of the family with random weights, in training mode."""
    config = small_config(family)
    for name in ("decoder_start_token_id", "pad_token_id"):
        if getattr(config, name, None) is None:
            setattr(config, name, 0)
    name = getattr(modeling_auto, KINDS[kinds()[family]])[family]
    name = name[0] if isinstance(name, (list, tuple)) else name
    kind = getattr(transformers, name)
    if not isinstance(config, kind.config_class):
        config = config.get_text_config(decoder=True)
    with torch.device("meta"):
        count = sum(param.numel() for param in kind(config).parameters())
    assert count < 20_000_000, f"{family} is not small: {count} parameters"
    return kind(config).train()


def batch_of(model: Any, family: str, step: int) -> dict[str, Tensor]:
    """Inputs of a step, from the signature of the model's forward."""
    generator = torch.Generator().manual_seed(step)
    config, names = model.config, inspect.signature(model.forward).parameters
    kind = kinds()[family]

    def words(*sizes: int) -> Tensor:
        return torch.randint(*WORDS, sizes or (BATCH, TIME), generator=generator)

    main = model.main_input_name
    found: dict[str, Tensor] = {}
    if kind == "vision":
        size = (
            getattr(config, "image_size", None)
            or getattr(getattr(config, "vision_config", None), "image_size", None)
            or IMAGE
        )
        height, width = (size, size) if isinstance(size, int) else size
        channels = getattr(config, "num_channels", 3)
        found["pixel_values"] = torch.randn(BATCH, channels, height, width, generator=generator)
        labels = torch.randint(2, (BATCH,), generator=generator)
    elif main == "input_values":
        found["input_values"] = torch.randn(BATCH, SOUND, generator=generator)
        labels = torch.randint(WORDS[0], 30, (BATCH, 4), generator=generator)
    elif main == "input_features":
        bins = getattr(config, "num_mel_bins", None) or getattr(config, "input_feat_per_channel", None) or 16
        found["input_features"] = torch.randn(BATCH, bins, 2 * TIME, generator=generator)
        labels = words(BATCH, 4) if kind == "speech" else words()
    else:
        found[main] = words()
        labels = found[main]
    if "labels" in names:
        found["labels"] = labels
    for name, make in (EXCEPTIONS.get(family, Except()).batch or {}).items():
        found[name] = make(found)
    return found


def loss_of(outputs: Any) -> Tensor:
    """The loss of a model's outputs; the mean square of the first where it has none."""
    loss = getattr(outputs, "loss", None)
    if loss is not None:
        return loss.mean()
    first = outputs[0]
    return first.float().square().mean()
