"""A training loop of one's own: two lines change."""

from collections.abc import Sequence

import torch
from setting import BATCH, LEARNING_RATE, Outcome, finish, parse, sequences, tiny_llama
from torch.utils.data import DataLoader

import autohete_fx


def main(arguments: Sequence[str] | None = None) -> Outcome:
    setting = parse(arguments, __doc__)
    model = tiny_llama()
    if setting.is_plain:
        optimizer = torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE, fused=True)
        if setting.plain_backend:
            model.compile(backend=setting.plain_backend)
    else:
        optimizer = autohete_fx.AdamW(model.parameters(), lr=LEARNING_RATE)
        model.compile(backend="autohete", options=setting.options)
    losses = []
    for batch in DataLoader(sequences(), batch_size=BATCH):  # type: ignore[arg-type]
        loss = model(**{name: tensor.to(model.device) for name, tensor in batch.items()}).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return finish(model, losses, setting)


if __name__ == "__main__":
    main()
