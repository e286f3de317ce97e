"""Hugging Face's Trainer: a callback for its loggers, and the backend's name among its arguments.

::

    enable(options={"memory_budget": "20GiB"})  # TrainingArguments(torch_compile_backend="autohete") is accepted from here on
    trainer = Trainer(model, args, optimizer_cls_and_kwargs=(autohete_fx.AdamW, {"lr": 3e-4}), ...)
    report_to_loggers(trainer)

Each row that the trainer logs then has the figures of `figures_of` beside the loss.
"""

import logging
from typing import Any

from autohete_fx.compiler.compilation import Compilation, compilations
from autohete_fx.errors import IntegrationError
from autohete_fx.integrations.accelerate import disable, enable
from autohete_fx.integrations.figures import figures_of

try:
    from transformers import TrainerCallback
except ImportError as error:
    raise IntegrationError(
        f"transformers cannot be imported: {error}. Expected was a version that has TrainerCallback. Run `pip install"
        " transformers accelerate`, or import autohete_fx.integrations.accelerate where Accelerate alone is used"
    ) from error

__all__ = ["AutoHeteCallback", "disable", "enable", "report_to_loggers"]

log = logging.getLogger(__name__)


class AutoHeteCallback(TrainerCallback):
    """Adds predicted and measured peak and step time, decisions and lanes to what the trainer logs while it trains.

    The trainer's history gets them, and so do the loggers after this callback. A trainer puts its own loggers first:
    `report_to_loggers` puts the callback before them. The plan's table goes to the log of this module when it is made.
    """

    def __init__(self) -> None:
        self._earlier: tuple[tuple[Compilation, int], ...] = ()
        self._told: Compilation | None = None

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Graphs that run from now on are those of this training, whenever they were compiled."""
        self._earlier = tuple((compilation, _num_passes(compilation)) for compilation in compilations())

    def on_log(self, args: Any, state: Any, control: Any, logs: dict[str, Any] | None = None, **kwargs: Any) -> None:
        """Add the figures to a row that has a loss, in place."""
        compilation = self._latest()
        if compilation is None or logs is None or "loss" not in logs:
            return
        if compilation is not self._told:
            log.info("%s", compilation)
            self._told = compilation
        figures = figures_of(compilation)
        logs.update(figures)
        if state.log_history:  # its last entry is a copy of this row
            state.log_history[-1].update(figures)

    def _latest(self) -> Compilation | None:
        """The training graph that was compiled last, of those that were compiled or have run in this training."""
        earlier = {id(compilation): passes for compilation, passes in self._earlier}
        trained = (c for c in reversed(compilations()) if c.training)
        return next((c for c in trained if id(c) not in earlier or _num_passes(c) > earlier[id(c)]), None)


def _num_passes(compilation: Compilation) -> int:
    return 0 if compilation.clock is None else compilation.clock.num_passes


def report_to_loggers(trainer: Any) -> AutoHeteCallback:
    """Put the callback before all others of the trainer, so that each of its loggers gets the figures.

    Raises:
        IntegrationError: the trainer keeps its callbacks elsewhere.
    """
    handler = getattr(trainer, "callback_handler", None)
    callbacks = getattr(handler, "callbacks", None)
    if not isinstance(callbacks, list):
        raise IntegrationError(
            f"{type(trainer).__name__} was given, whose callback_handler has no list of callbacks. Expected was a Trainer of"
            " transformers 5. Give the trainer AutoHeteCallback() among its callbacks; loggers before it get no figures"
        )
    callback = AutoHeteCallback()
    callbacks.insert(0, callback)
    return callback
