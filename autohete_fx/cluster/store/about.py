"""Each part of a save says of the job that wrote it the model's parameters, the optimizer, and what decides the samples.

Enter a job's facts; leave an entry of a part, and the facts that a part has. A job that goes on with another optimizer would take
states for its own that mean something else. A rank that trains nothing has no optimizer to name. All else is alike in the parts
of a save, and thus the longest entry says all.
"""

import json
from collections.abc import Collection, Mapping
from typing import Any

import torch
from torch import Tensor

from autohete_fx.cluster.store.damage import PartError
from autohete_fx.cluster.store.store import Parts, read_parts
from autohete_fx.errors import ClusterError

ALL_NAMES = "all-names"
"""The entry's key. Its bytes are a JSON object in UTF-8; earlier versions wrote the names alone, a line each."""


def about_entry(names: Collection[str], facts: Mapping[str, object]) -> dict[str, Tensor]:
    """The entry of a part. ``names``: of the model's parameters; ``facts``: others of the job, by name."""
    text = json.dumps({"names": sorted(names), **facts}).encode()
    return {f"{ALL_NAMES}/weight": torch.frombuffer(bytearray(text), dtype=torch.uint8)}


def about_of(parts: Parts) -> dict[str, Any]:
    """The facts that one of the parts says, whose entry is the longest (`add_part`); none where no part has the entry.

    Raises PartError where that cannot be read.
    """
    if ALL_NAMES not in parts:
        return {}
    raw = bytes(read_parts(parts, [ALL_NAMES])[ALL_NAMES][f"{ALL_NAMES}/weight"].tolist())
    try:
        text = raw.decode()
        return json.loads(text) if text.startswith("{") else {"names": text.split("\n")}
    except ValueError as error:
        raise PartError(parts[ALL_NAMES][0], error) from error


def check_optimizer(said: Mapping[str, Any], optimizer: torch.optim.Optimizer | None) -> None:
    """Raise ClusterError where a store's states are of another optimizer than this rank's. One of ours and PyTorch's of the same
    name have the same states."""
    saved = said.get("optimizer")
    if saved and optimizer is not None and saved != type(optimizer).__name__:
        raise ClusterError(
            f"the store was saved with the optimizer {saved}, and the job has {type(optimizer).__name__}. Expected was the same,"
            " whose states go on. Give the job that optimizer. To begin with the weights alone, write them with cluster.export, and"
            " give them as weights= with an empty store"
        )


def differences(said: Mapping[str, Any], facts: Mapping[str, object]) -> str:
    """A sentence on the facts that a store has otherwise, but for the optimizer; "" where there are none."""
    differing = [
        f"{name}={said[name]!r} (now {value!r})"
        for name, value in facts.items()
        if name != "optimizer" and name in said and said[name] != value
    ]
    return (
        f"the store was saved with {' and '.join(differing)}: samples or dropout go on otherwise" if differing else ""
    )
