"""Lightning: the module inside the LightningModule is compiled, because Lightning calls ``training_step`` and no forward."""

from collections.abc import Sequence
from typing import Any

import lightning
import torch
from setting import BATCH, LEARNING_RATE, Outcome, Setting, finish, parse, sequences, tiny_llama
from torch import Tensor
from torch.utils.data import DataLoader

import autohete_fx


class Training(lightning.LightningModule):
    """Trains a language model and remembers its losses."""

    def __init__(self, setting: Setting) -> None:
        super().__init__()
        self.model, self.is_plain = tiny_llama(), setting.is_plain
        self.losses: list[float] = []
        if not setting.is_plain:
            self.model.compile(backend="autohete", options=setting.options)
        elif setting.plain_backend:
            self.model.compile(backend=setting.plain_backend)

    def training_step(self, batch: dict[str, Tensor]) -> Tensor:
        loss = self.model(**batch).loss
        self.losses.append(loss.item())
        return loss

    def on_train_batch_end(self, *args: Any) -> None:
        # Lightning clears gradients after the next forward, which would have to find room beside them.
        self.optimizers().zero_grad()  # type: ignore[union-attr]

    def configure_optimizers(self) -> Any:
        if self.is_plain:
            return torch.optim.AdamW(self.parameters(), lr=LEARNING_RATE, fused=True)
        return autohete_fx.AdamW(self.parameters(), lr=LEARNING_RATE)


def main(arguments: Sequence[str] | None = None) -> Outcome:
    setting = parse(arguments, __doc__)
    module = Training(setting)
    trainer = lightning.Trainer(
        default_root_dir=setting.folder,
        max_epochs=1,
        devices=1,
        gradient_clip_val=1.0,
        logger=False,
        enable_checkpointing=False,
        enable_model_summary=False,
        enable_progress_bar=False,
    )
    trainer.fit(module, DataLoader(sequences(), batch_size=BATCH))  # type: ignore[arg-type]
    return finish(module.model, module.losses, setting)


if __name__ == "__main__":
    main()
