"""The model, data and arguments that the scripts of this folder share: nothing is downloaded.

Each script trains the same tiny Llama with random weights on generated tokens::

    python examples/trainers/plain_loop.py                          # within a budget
    python examples/trainers/plain_loop.py --plain                  # without autohete_fx
    python examples/trainers/plain_loop.py --plain inductor         # likewise, compiled by another backend
    autohete run --budget 4MiB examples/trainers/plain_loop.py --plain
"""

import argparse
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from transformers import LlamaConfig, LlamaForCausalLM

STEPS, BATCH, TOKENS, VOCABULARY = 3, 4, 32, 128
LEARNING_RATE = 1e-3


@dataclass(frozen=True, slots=True, kw_only=True)
class Setting:
    """The arguments of a script.

    Attributes:
        is_plain: train without autohete_fx.
        plain_backend: what compiles the model then; None for nothing.
        options: those of our backend.
        save: a file for what was trained; None for none.
        folder: where trainers may write.
    """

    is_plain: bool
    plain_backend: str | None
    options: dict[str, Any]
    save: str | None
    folder: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """What a script trained: its losses, one a step, and its parameters by name."""

    losses: list[float]
    parameters: dict[str, Tensor]


def parse(arguments: Sequence[str] | None, about: str | None, budget: str = "4MiB") -> Setting:
    """Read the command line; ``budget``: unless told otherwise."""
    parser = argparse.ArgumentParser(description=about, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--plain", nargs="?", const="none", metavar="BACKEND", help="train without autohete_fx")
    parser.add_argument("--budget", default=budget, metavar="SIZE", help="device memory (default: %(default)s)")
    parser.add_argument("--inner", default="inductor", help="inductor, or eager to run graphs node by node")
    parser.add_argument("--save", metavar="FILE", help="write losses and parameters there, by torch.save")
    parser.add_argument(
        "--folder", default="runs", metavar="DIR", help="where trainers may write (default: %(default)s)"
    )
    given = parser.parse_args(arguments)
    return Setting(
        is_plain=given.plain is not None,
        plain_backend=None if given.plain in (None, "none") else given.plain,
        options={
            "memory_budget": given.budget,
            "inner_backend": given.inner,
            "profile": "analytic" if given.inner == "eager" else "measured",
        },
        save=given.save,
        folder=given.folder,
    )


def tiny_llama(layers: int = 2) -> LlamaForCausalLM:
    """A few layers, each of more than half a megabyte, on the GPU where there is one."""
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=128,
        intermediate_size=256,
        num_hidden_layers=layers,
        num_attention_heads=4,
        use_cache=False,
    )
    model: nn.Module = LlamaForCausalLM(config).train()
    return model.to("cuda" if torch.cuda.is_available() else "cpu")  # type: ignore[return-value]


def sequences() -> list[dict[str, Tensor]]:
    """Generated sequences of tokens, each its own target, enough for all steps."""
    generator = torch.Generator().manual_seed(1)
    tokens = torch.randint(1, VOCABULARY, (STEPS * BATCH, TOKENS), generator=generator)
    return [{"input_ids": row, "labels": row} for row in tokens]


def finish(model: nn.Module, losses: Sequence[float], setting: Setting) -> Outcome:
    """Print the losses, and save what was trained where that was asked for."""
    print("losses", " ".join(f"{loss:.4f}" for loss in losses))
    parameters = {name: parameter.detach().cpu().clone() for name, parameter in model.named_parameters()}
    outcome = Outcome(losses=list(losses), parameters=parameters)
    if setting.save is not None:
        torch.save({"losses": outcome.losses, "parameters": outcome.parameters}, setting.save)
    return outcome
