"""Accelerate: the backend as ``dynamo_backend``."""

from collections.abc import Sequence

import torch
from accelerate import Accelerator
from setting import BATCH, LEARNING_RATE, Outcome, finish, parse, sequences, tiny_llama
from torch.utils.data import DataLoader

import autohete_fx
from autohete_fx.integrations.accelerate import enable


def main(arguments: Sequence[str] | None = None) -> Outcome:
    setting = parse(arguments, __doc__)
    model = tiny_llama()
    if setting.is_plain:
        accelerator = Accelerator(dynamo_backend=setting.plain_backend)
        optimizer = torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE, fused=True)
    else:
        enable(options=setting.options)
        accelerator = Accelerator(dynamo_backend="autohete")
        optimizer = autohete_fx.AdamW(model.parameters(), lr=LEARNING_RATE)
    loader = DataLoader(sequences(), batch_size=BATCH)  # type: ignore[arg-type]
    prepared, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    losses = []
    for batch in loader:
        loss = prepared(**batch).loss
        accelerator.backward(loss)
        accelerator.clip_grad_norm_(prepared.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return finish(model, losses, setting)


if __name__ == "__main__":
    main()
