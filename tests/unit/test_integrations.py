"""Names that trainers accept, and figures for their loggers: nothing is compiled here."""

import logging
import sys
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from accelerate.utils import DynamoBackend, TorchDynamoPlugin
from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments

import autohete_fx
from autohete_fx.compiler.compilation import Compilation, compilations, record
from autohete_fx.integrations import accelerate as names
from autohete_fx.integrations.transformers import AutoHeteCallback, report_to_loggers
from autohete_fx.ir import BlockDecision, Params, Plan
from autohete_fx.runtime.steps import StepClock

pytestmark = pytest.mark.filterwarnings("ignore")  # the trainers' own


@pytest.fixture(autouse=True)
def _disabled() -> Any:
    yield
    names.disable()


def handed_over(**how: Any) -> dict[str, Any]:
    return TorchDynamoPlugin(backend="autohete", **how).to_kwargs()  # type: ignore[arg-type]


def test_nothing_is_accepted_before_it_is_enabled_nor_after_it_is_disabled():
    members, prepare = list(DynamoBackend), TorchDynamoPlugin.__post_init__
    for _ in range(2):
        with pytest.raises(ValueError, match="AUTOHETE"):
            handed_over()
        names.enable()
        names.enable()
        assert handed_over() == {"backend": "autohete"}
        assert TorchDynamoPlugin(backend="inductor").to_kwargs() == {"backend": "inductor"}  # type: ignore[arg-type]
        with pytest.raises(ValueError, match="NONSENSE"):
            TorchDynamoPlugin(backend="nonsense")  # type: ignore[arg-type]
        names.disable()
        names.disable()
    assert list(DynamoBackend) == members and TorchDynamoPlugin.__post_init__ is prepare
    assert "_missing_" not in vars(DynamoBackend)


def test_options_reach_the_compiler_and_ones_own_stay():
    names.enable(options={"memory_budget": "12GiB"})
    assert handed_over() == {"backend": "autohete", "options": {"memory_budget": "12GiB"}}
    assert handed_over(options={"verify": False})["options"] == {"verify": False}
    names.enable(options={"memory_budget": "1GiB"})
    assert handed_over()["options"] == {"memory_budget": "1GiB"}
    with pytest.raises(autohete_fx.OptionError, match="memory_budget"):
        names.enable(options={"memory_bugdet": "1GiB"})
    number: Any = 3
    with pytest.raises(autohete_fx.OptionError, match="expected a mapping"):
        names.enable(options=number)
    assert handed_over()["options"] == {"memory_budget": "1GiB"}


def test_arguments_of_the_trainer_are_accepted(tmp_path: Any):
    names.enable()
    args = TrainingArguments(output_dir=str(tmp_path), torch_compile_backend="autohete", report_to=[])
    assert args.torch_compile and args.to_dict()["torch_compile_backend"] == "autohete"


def test_a_missing_or_another_accelerate_is_said(monkeypatch: pytest.MonkeyPatch):
    with monkeypatch.context() as patch:
        patch.setitem(sys.modules, "accelerate.utils", None)
        with pytest.raises(autohete_fx.IntegrationError, match="pip install accelerate"):
            names.enable()
    with monkeypatch.context() as patch:
        patch.setattr("accelerate.utils.DynamoBackend", str)
        with pytest.raises(autohete_fx.IntegrationError, match="another enum"):
            names.enable()
    with monkeypatch.context() as patch:
        patch.setattr(TorchDynamoPlugin, "to_kwargs", lambda self: {"backend": "inductor"})
        with pytest.raises(autohete_fx.IntegrationError, match=r"'inductor'.*model\.compile"):
            names.enable()
    with pytest.raises(ValueError, match="AUTOHETE"):
        handed_over()


def compilation(step_s: float) -> Compilation:
    plan = Plan(
        labels=("a", "b"), decisions=(BlockDecision(), BlockDecision(params=Params.HOST)), step_s=step_s, peak_bytes=7
    )
    clock = StepClock(torch.device("cpu"), micro_batches=1)
    return Compilation(plan=plan, training=True, device_budget_bytes=9, owners={}, clock=clock)


def test_the_figures_of_the_latest_plan_are_in_each_row_with_a_loss(caplog: pytest.LogCaptureFixture):
    seen: list[dict[str, Any]] = []

    class Logger(TrainerCallback):
        def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **kwargs: Any) -> None:
            seen.append(dict(logs))

    trainer = SimpleNamespace(callback_handler=SimpleNamespace(callbacks=[Logger()]))
    record(compilation(1.0))  # of an earlier training
    report_to_loggers(trainer)
    callbacks, state, rows = trainer.callback_handler.callbacks, TrainerState(), []
    assert isinstance(callbacks[0], AutoHeteCallback)

    def log(row: dict[str, Any]) -> None:
        state.log_history.append(dict(row))
        for callback in callbacks:
            callback.on_log(None, state, TrainerControl(), logs=row)
        rows.append(row)

    callbacks[0].on_train_begin(None, state, TrainerControl())
    with caplog.at_level(logging.INFO, logger="autohete_fx"):
        log({"loss": 3.0})
        record(compilation(2.0))
        log({"eval_loss": 3.0})
        log({"loss": 2.0})
        log({"loss": 1.0})
    assert rows[0] == {"loss": 3.0} and rows[1] == {"eval_loss": 3.0} and seen == rows == state.log_history
    rows[2].pop("autohete/peak_bytes", None)  # of the process, where an earlier test counts it
    assert rows[2] == {
        "loss": 2.0,
        "autohete/budget_bytes": 9,
        "autohete/predicted_peak_bytes": 7,
        "autohete/predicted_step_s": 2.0,
        "autohete/blocks": 2,
        "autohete/blocks_activations_keep": 2,
        "autohete/blocks_params_device": 1,
        "autohete/blocks_params_host": 1,
        "autohete/blocks_optimizer_device": 2,
    }
    assert caplog.text.count("autohete training graph") == 1
    callbacks[0].on_train_begin(None, state, TrainerControl())  # a second training, by the same code
    log({"loss": 0.9})
    assert rows[-1] == {"loss": 0.9}, "it has not run yet"
    clock = compilations()[-1].clock
    assert clock is not None
    clock.begin_pass()
    log({"loss": 0.8})
    assert rows[-1]["autohete/predicted_step_s"] == 2.0


def test_a_trainer_without_a_list_of_callbacks_is_refused():
    with pytest.raises(autohete_fx.IntegrationError, match="callback_handler"):
        report_to_loggers(object())
