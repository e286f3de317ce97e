"""LoRA by PEFT: the frozen base lives in host memory and is streamed to the device, layer by layer, in every pass."""

from collections.abc import Sequence

import torch
from peft import LoraConfig, get_peft_model
from setting import BATCH, LEARNING_RATE, Outcome, finish, parse, sequences, tiny_llama
from torch.utils.data import DataLoader

import autohete_fx


def main(arguments: Sequence[str] | None = None) -> Outcome:
    setting = parse(arguments, __doc__, budget="2900KiB")
    config = LoraConfig(r=4, target_modules=["q_proj", "v_proj"], task_type="CAUSAL_LM")
    model = get_peft_model(tiny_llama(layers=3), config)
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
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return finish(model, losses, setting)


if __name__ == "__main__":
    main()
