"""The Trainer of transformers: the backend by its name, the optimizer by its class, figures for the loggers."""

from collections.abc import Sequence

from setting import BATCH, LEARNING_RATE, STEPS, Outcome, finish, parse, sequences, tiny_llama
from transformers import Trainer, TrainingArguments

import autohete_fx
from autohete_fx.integrations.transformers import enable, report_to_loggers


def main(arguments: Sequence[str] | None = None) -> Outcome:
    setting = parse(arguments, __doc__)
    model = tiny_llama()
    how = {
        "output_dir": setting.folder,
        "per_device_train_batch_size": BATCH,
        "max_steps": STEPS,
        "learning_rate": LEARNING_RATE,
        "logging_steps": 1,
        "save_strategy": "no",
        "report_to": [],
        "disable_tqdm": True,
    }
    if setting.is_plain:
        args = TrainingArguments(**how, torch_compile_backend=setting.plain_backend)
        trainer = Trainer(model, args, train_dataset=sequences())  # type: ignore[arg-type]
    else:
        enable(options=setting.options)
        args = TrainingArguments(**how, torch_compile_backend="autohete")
        trainer = Trainer(
            model,
            args,
            train_dataset=sequences(),  # type: ignore[arg-type]
            optimizer_cls_and_kwargs=(autohete_fx.AdamW, {"lr": LEARNING_RATE}),
        )
        report_to_loggers(trainer)
    trainer.train()
    losses = [row["loss"] for row in trainer.state.log_history if "loss" in row]
    return finish(model, losses, setting)


if __name__ == "__main__":
    main()
