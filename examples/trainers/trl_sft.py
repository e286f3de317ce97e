"""Supervised fine-tuning by TRL: the model is compiled before the trainer gets it."""

from collections.abc import Sequence

from datasets import Dataset
from setting import BATCH, LEARNING_RATE, STEPS, VOCABULARY, Outcome, finish, parse, sequences, tiny_llama
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from transformers import PreTrainedTokenizerFast
from trl.trainer.sft_config import SFTConfig
from trl.trainer.sft_trainer import SFTTrainer

import autohete_fx
from autohete_fx.integrations.transformers import report_to_loggers


def tokenizer() -> PreTrainedTokenizerFast:
    """A word a token: nothing is downloaded."""
    words = {str(number): number for number in range(VOCABULARY)}
    made = Tokenizer(WordLevel(words, unk_token="1"))
    return PreTrainedTokenizerFast(tokenizer_object=made, pad_token="0", eos_token="0")


def main(arguments: Sequence[str] | None = None) -> Outcome:
    setting = parse(arguments, __doc__, budget="20MiB")  # 16 of them for the loss, which TRL computes in eager code
    model = tiny_llama()
    config = SFTConfig(
        output_dir=setting.folder,
        per_device_train_batch_size=BATCH,
        max_steps=STEPS,
        learning_rate=LEARNING_RATE,
        logging_steps=1,
        save_strategy="no",
        report_to=[],
        disable_tqdm=True,
        bf16=False,
        gradient_checkpointing=False,
    )
    optimizer = None
    if not setting.is_plain:
        model.compile(backend="autohete", options=setting.options)
        optimizer = (autohete_fx.AdamW, {"lr": LEARNING_RATE})
    elif setting.plain_backend:
        model.compile(backend=setting.plain_backend)
    trainer = SFTTrainer(
        model,
        config,
        train_dataset=Dataset.from_list([{"input_ids": row["input_ids"].tolist()} for row in sequences()]),
        processing_class=tokenizer(),
        optimizer_cls_and_kwargs=optimizer,
    )
    if not setting.is_plain:
        report_to_loggers(trainer)
    trainer.train()
    losses = [row["loss"] for row in trainer.state.log_history if "loss" in row]
    return finish(model, losses, setting)


if __name__ == "__main__":
    main()
