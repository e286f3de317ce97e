"""Well-known language models by name, as the entries of a transformers configuration that decide their shapes.

Leaves, for a name such as ``llama-2-7b``, what a JSON file of that configuration says. A model can then be planned for without
a download. The figures are those of the models' published configurations. ``gpt-2b`` to ``gpt-22b`` are the sizes of AutoHete's
evaluation (arXiv 2503.01890), which does not publish their shapes. Here they are layers of width 4096, as many as the size
takes, without dropout.
"""

import importlib.util
import re
from collections.abc import Mapping

from autohete_fx.errors import OptionError, unknown_word

Entries = Mapping[str, object]


def _gpt2(width: int, layers: int, heads: int, **others: object) -> Entries:
    return {"model_type": "gpt2", "n_embd": width, "n_layer": layers, "n_head": heads, **others}


def _decoder(
    model_type: str,
    width: int,
    inner: int,
    layers: int,
    heads: int,
    kv_heads: int,
    vocabulary: int,
    positions: int,
    **others: object,
) -> Entries:
    """A pre-norm decoder with gated feed-forward layers, as most models since Llama are."""
    return {
        "model_type": model_type,
        "hidden_size": width,
        "intermediate_size": inner,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "vocab_size": vocabulary,
        "max_position_embeddings": positions,
        **others,
    }


def _qwen3(width: int, inner: int, layers: int, heads: int, tied: bool) -> Entries:
    return _decoder("qwen3", width, inner, layers, heads, 8, 151936, 40960, head_dim=128, tie_word_embeddings=tied)


_GPT_WIDTH = 4096
_GPT_OTHERS = {"n_positions": 2048, "resid_pdrop": 0.0, "embd_pdrop": 0.0}
_GPT_BILLIONS = (2, 4, 6, 8, 10, 12, 15, 18, 20, 22)

ARCHITECTURES: Mapping[str, Entries] = {
    "gpt2": _gpt2(768, 12, 12),
    "gpt2-medium": _gpt2(1024, 24, 16),
    "gpt2-large": _gpt2(1280, 36, 20),
    "gpt2-xl": _gpt2(1600, 48, 25),
    **{
        f"gpt-{billions}b": _gpt2(_GPT_WIDTH, round(billions * 1e9 / (12 * _GPT_WIDTH**2)), 32, **_GPT_OTHERS)
        for billions in _GPT_BILLIONS
    },
    "llama-2-7b": _decoder("llama", 4096, 11008, 32, 32, 32, 32000, 4096),
    "llama-2-13b": _decoder("llama", 5120, 13824, 40, 40, 40, 32000, 4096),
    "llama-2-70b": _decoder("llama", 8192, 28672, 80, 64, 8, 32000, 4096),
    "llama-3-8b": _decoder("llama", 4096, 14336, 32, 32, 8, 128256, 8192),
    "llama-3-70b": _decoder("llama", 8192, 28672, 80, 64, 8, 128256, 8192),
    "llama-3.2-1b": _decoder("llama", 2048, 8192, 16, 32, 8, 128256, 131072, tie_word_embeddings=True),
    "llama-3.2-3b": _decoder("llama", 3072, 8192, 28, 24, 8, 128256, 131072, tie_word_embeddings=True),
    "mistral-7b": _decoder("mistral", 4096, 14336, 32, 32, 8, 32768, 32768, sliding_window=None),
    "qwen2.5-7b": _decoder("qwen2", 3584, 18944, 28, 28, 4, 152064, 131072),
    "qwen3-0.6b": _qwen3(1024, 3072, 28, 16, True),
    "qwen3-1.7b": _qwen3(2048, 6144, 28, 16, True),
    "qwen3-4b": _qwen3(2560, 9728, 36, 32, True),
    "qwen3-8b": _qwen3(4096, 12288, 36, 32, False),
    "qwen3-14b": _qwen3(5120, 17408, 40, 40, False),
    "qwen3-32b": _qwen3(5120, 25600, 64, 64, False),
    "gemma-2b": _decoder("gemma", 2048, 16384, 18, 8, 1, 256000, 8192, head_dim=256),
    "gemma-7b": _decoder("gemma", 3072, 24576, 28, 16, 16, 256000, 8192, head_dim=256),
    "gemma-3-1b": _decoder("gemma3_text", 1152, 6912, 26, 4, 1, 262144, 32768, head_dim=256, sliding_window=512),
    "gemma-3-4b": _decoder("gemma3_text", 2560, 10240, 34, 8, 4, 262208, 131072, head_dim=256, sliding_window=1024),
}
"""Configuration entries by name."""


def find_architecture(name: str) -> Entries:
    """The entries of a name, in any case. Raises OptionError with the nearest name, which for an id of the Hugging Face hub is
    that of the model there."""
    entries = ARCHITECTURES.get(name.strip().lower())
    if entries is None:
        hub = ""
        if "/" in name:
            hub = (
                ". Ids of the Hugging Face hub are not looked up: get its configuration by `hf download"
                f" {name.strip()} config.json`, and give that file"
            )
        raise OptionError(
            f"{unknown_word('model', name, ARCHITECTURES, meant=_meant(name))}; or a JSON file of a transformers configuration, or"
            f" file.py:factory{hub}"
        )
    return entries


def require_transformers() -> None:
    """Raise OptionError unless transformers is there, which builds models given by name or as a JSON configuration."""
    if importlib.util.find_spec("transformers") is None:
        raise OptionError(
            "a model given by name or as a JSON configuration is built by transformers, which is not installed; install it"
            " with `pip install transformers`, or give file.py:factory"
        )


_SUFFIX = re.compile(r"[-_](hf|instruct|base|chat|it|pt|v\d[\d.]*|\d{4})$")


def _meant(name: str) -> str:
    """The model that an id of the hub names: without its owner, and without the endings of tuned and converted ones."""
    word = name.strip().lower().rpartition("/")[2].removeprefix("meta-")
    while (shorter := _SUFFIX.sub("", word)) != word:
        word = shorter
    return word
