"""What is logged where a budget does not hold, and what is not."""

import copy
import gc
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import autohete_fx
from autohete_fx.compiler.captured import _keep_elsewhere
from autohete_fx.runtime.placement import SMALLEST_COPY_BYTES, is_movable
from tests.layers import EAGER, Layers, make


def messages(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [record.getMessage() for record in caplog.records]


class Looping(Layers):
    """Dynamo compiles nothing of it where its loop breaks; it raises where it is told to."""

    breaks = raises = True

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            if self.breaks:
                torch._dynamo.graph_break()
            x = layer(x)
        if self.raises:
            raise ValueError("no such batch")
        return x.sum()


def refused(model: nn.Module) -> None:
    with pytest.raises(autohete_fx.InfeasiblePlanError):
        model(torch.randn(256, 128))


@pytest.mark.parametrize("is_handling", [False, True])
def test_a_refusal_is_not_told_beside_its_error_that_nothing_was_compiled(
    is_handling: bool, caplog: pytest.LogCaptureFixture
):
    """Also where the caller handles another exception meanwhile, as a loop that tries again does."""
    model = make()
    model.compile(backend="autohete", options={**EAGER, "memory_budget": 1000})
    for _ in range(2):
        try:
            if is_handling:
                raise KeyError
            refused(model)
        except KeyError:
            refused(model)
    assert messages(caplog) == []


def test_what_dynamo_gave_up_before_its_reset_is_refused_in_the_forward_again():
    model = Looping()
    model.raises = False
    model.compile(backend="autohete", options={**EAGER, "memory_budget": 1000})
    model(torch.randn(256, 128))  # of its layers, too, Dynamo compiles nothing
    torch._dynamo.reset()
    model.breaks = False
    refused(model)


@pytest.mark.parametrize("has_ours", [False, True])
def test_a_refusal_without_our_optimizer_says_that_it_would_let_states_move(has_ours: bool):
    model = make()
    model.compile(backend="autohete", options={**EAGER, "memory_budget": 1000})
    optimizer = (autohete_fx.AdamW if has_ours else torch.optim.AdamW)(model.parameters())
    with pytest.raises(autohete_fx.InfeasiblePlanError) as caught:
        model(torch.randn(256, 128)).backward()
    message = str(caught.value)
    advice = "where 512 KiB are counted for these: construct one, such as autohete_fx.AdamW, before"
    assert optimizer and (advice in message) == (not has_ours) and "allow host_optimizer" not in message


def test_an_error_of_the_users_is_told_nothing_either_and_the_next_call_is(caplog: pytest.LogCaptureFixture):
    model = Looping()
    model.compile(backend="autohete", options=EAGER)
    with pytest.raises(ValueError, match="no such batch"):
        model(torch.randn(8, 128))
    assert messages(caplog) == []
    model.raises = False
    try:
        raise KeyError
    except KeyError:  # handled while the call returns
        model(torch.randn(8, 128))
    (message,) = messages(caplog)
    assert message.startswith("Dynamo compiled nothing")
    assert "could not compile the module's forward in an earlier call" in message, message


class Task(nn.Module):
    """As Lightning's modules are trained: by a method that is not forward."""

    def __init__(self) -> None:
        super().__init__()
        self.net = make()

    def forward(self, x: Tensor) -> Tensor:
        return self.net(x)

    def training_step(self, x: Tensor) -> Tensor:
        return self.net(x)


def take_steps(step: Callable[[Tensor], Tensor], model: nn.Module, num_steps: int = 4) -> None:
    optimizer = autohete_fx.AdamW(model.parameters())
    for _ in range(num_steps):
        step(torch.randn(64, 128)).backward()
        optimizer.step()
        optimizer.zero_grad()


def test_a_compiled_model_whose_other_method_is_called_is_told_once(caplog: pytest.LogCaptureFixture):
    options = {**EAGER, "memory_budget": 10}
    task = Task()
    task.compile(backend="autohete", options=options)
    take_steps(task.training_step, task, num_steps=1)
    assert messages(caplog) == []
    take_steps(task.training_step, task)
    (message,) = messages(caplog)
    assert message.startswith(
        "the module Task was compiled with the backend autohete, but 2 steps of autohete_fx.AdamW"
    )
    task.training_step = torch.compile(task.training_step, backend="autohete", options=options)  # as it says
    with pytest.raises(autohete_fx.InfeasiblePlanError):
        take_steps(task.training_step, task)


@pytest.mark.parametrize("what", ["module", "function"])
def test_what_compile_returned_and_nobody_calls_is_named(what: str, caplog: pytest.LogCaptureFixture):
    task = Task()

    def loss_of(x: Tensor) -> Tensor:
        return task(x)

    compiled = torch.compile(task if what == "module" else loss_of, backend="autohete", options=EAGER)
    take_steps(task, task)
    (message,) = messages(caplog)
    assert f"the {what} " in message and ("loss_of was" in message) == (what == "function") and compiled is not None


def test_a_copy_of_a_model_that_was_compiled_in_place_is_told_that_it_is_not(caplog: pytest.LogCaptureFixture):
    model = make()
    model.compile(backend="autohete", options=EAGER)
    optimizer = autohete_fx.AdamW(model.parameters())

    def take(model: nn.Module, optimizer: torch.optim.Optimizer, num_steps: int = 3) -> None:
        for _ in range(num_steps):
            model(torch.randn(64, 128)).backward()
            optimizer.step()
            optimizer.zero_grad()

    take(model, optimizer, num_steps=1)
    copied, its_optimizer = copy.deepcopy((model, optimizer))
    again, other_optimizer = copy.deepcopy((model, optimizer))
    again.compile(backend="autohete", options=EAGER)
    take(again, other_optimizer)
    assert not any("a copy of" in message for message in messages(caplog))
    take(copied, its_optimizer)
    (told,) = [message for message in messages(caplog) if "a copy of" in message]
    assert told.startswith("a copy of autohete_fx.AdamW has taken 2 steps, and no compiled graph reads its parameters")


def test_who_compiles_nothing_or_calls_what_is_compiled_is_told_nothing(caplog: pytest.LogCaptureFixture):
    take_steps(model := make(), model)  # our optimizer alone
    other, task = Task(), Task()
    other.compile(backend="autohete", options=EAGER)  # of other parameters
    task.net.compile(backend="autohete", options=EAGER)
    take_steps(task.training_step, task)
    traced = Task()
    traced.compile(backend="autohete", options=EAGER)  # but called within what is compiled
    take_steps(torch.compile(lambda x: traced(x), backend="autohete", options=EAGER), traced)
    dropped = torch.compile(lambda x: x, backend="autohete", options=EAGER)
    del dropped
    gc.collect()
    small = nn.Linear(128, 4)  # of which nothing is placed
    take_steps(torch.compile(lambda x: small(x).sum(), backend="autohete", options=EAGER), small)
    assert messages(caplog) == []


def test_a_cell_that_runs_again_is_told_that_the_first_model_is_still_there(caplog: pytest.LogCaptureFixture):
    kept = []
    for _ in range(2):
        model = make()
        model.compile(backend="autohete", options={**EAGER, "memory_budget": "8MiB"})
        take_steps(model, model, num_steps=1)
        kept.append(model)  # as a traceback does
    (message,) = messages(caplog)
    assert "the first one is still alive. A variable or the traceback of an exception keeps it" in message
    assert "Delete the first one and its optimizer, and call torch.compiler.reset()" in message


@pytest.mark.parametrize("resets", [False, True])
def test_a_model_that_was_deleted_counts_no_more(resets: bool, caplog: pytest.LogCaptureFixture):
    """It is in a cycle with itself, which nobody has collected yet."""
    peaks = []
    with autohete_fx.MemoryMeter("cpu") as meter:
        foreign = meter.start_bytes
    for _ in range(2):
        model = make()
        model.compile(backend="autohete", options={**EAGER, "memory_budget": "8MiB"})
        with autohete_fx.MemoryMeter("cpu") as meter:
            take_steps(model, model, num_steps=2)
        peaks.append(meter.peak_bytes - foreign)
        del model
        if resets:
            torch.compiler.reset()
    assert peaks[1] <= peaks[0] and messages(caplog) == []


class ComputedTwice(torch.autograd.Function):
    """As reversible layers do: forward keeps no activations, and backward computes the layer once more, in eager code."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, layer: nn.Module, *_: Tensor) -> Tensor:
        ctx.layer = layer
        ctx.save_for_backward(x)
        return layer(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        x = ctx.saved_tensors[0].detach().requires_grad_()
        with torch.enable_grad():
            ctx.layer(x).backward(grad)
        return x.grad, None, *(None for _ in ctx.layer.parameters())


class Reversible(Layers):
    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = ComputedTwice.apply(x, layer, *layer.parameters())
        return x.sum()


@pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning")
def test_gradients_that_come_from_eager_code_are_told_with_their_bytes(caplog: pytest.LogCaptureFixture):
    torch.manual_seed(0)
    model = Reversible()
    model.compile(backend="autohete", options={**EAGER, "memory_budget": 2**25})
    take_steps(model, model)
    (told,) = [message for message in messages(caplog) if "come from eager code" in message]
    assert "gradients of 4 parameters, such as layers.0.0.weight" in told and "768 KiB" in told


def test_a_function_that_waits_is_not_told_of_small_parameters_that_another_one_trains(
    caplog: pytest.LogCaptureFixture,
):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8))

    @torch.compile(backend="autohete", options=EAGER)
    def loss_of(x: Tensor) -> Tensor:
        return model(x).square().mean()

    @torch.compile(backend="autohete", options=EAGER)
    def not_called_yet(x: Tensor) -> Tensor:
        return model(x)

    optimizer = autohete_fx.AdamW(model.parameters())
    for _ in range(4):
        loss_of(torch.randn(4, 8)).backward()
        optimizer.step()
        optimizer.zero_grad()
    assert not_called_yet is not None and messages(caplog) == []


def test_parameters_on_another_device_than_the_one_that_computes_are_not_moved(caplog: pytest.LogCaptureFixture):
    """Such as an embedding that is looked up on the CPU; here the other device is meta."""
    here = nn.Parameter(torch.zeros(SMALLEST_COPY_BYTES))
    there, small = (nn.Parameter(torch.zeros(n, device="meta")) for n in (SMALLEST_COPY_BYTES, 2))
    _keep_elsewhere({"here": here, "there": there, "small": small}, here.device)
    assert is_movable(here) and not is_movable(there) and len(messages(caplog)) == 1
    assert messages(caplog)[0].startswith("parameter there is on meta, and the graph computes on cpu")


class Translating(nn.Module):
    """PyTorch's own encoder and decoder, which look whether a mask is causal, unless they are told: that breaks the graph."""

    def __init__(self, is_causal: bool | None) -> None:
        super().__init__()
        self.is_causal = is_causal
        self.embedding = nn.Embedding(32, 128)
        self.layers = nn.Transformer(128, 2, 1, 1, 256, batch_first=True)

    def forward(self, tokens: Tensor) -> Tensor:
        x, mask = self.embedding(tokens), nn.Transformer.generate_square_subsequent_mask(tokens.shape[1])
        return self.layers(x, x, tgt_mask=mask, tgt_is_causal=self.is_causal).square().mean()


@pytest.mark.parametrize("is_causal", [None, pytest.param(True, marks=pytest.mark.slow)])
def test_training_of_parameters_that_no_graph_reads_is_told(is_causal: bool | None, caplog: pytest.LogCaptureFixture):
    model = Translating(is_causal)
    optimizer = autohete_fx.AdamW(model.parameters())
    model.compile(backend="autohete", options={**EAGER, "memory_budget": "64MiB"})
    for _ in range(4):
        model(torch.randint(32, (4, 16))).backward()
        optimizer.step()
        optimizer.zero_grad()
    told = [message for message in messages(caplog) if message.startswith("no compiled graph reads ")]
    assert len(told) == (is_causal is None), messages(caplog)
    assert all(
        "such as one of size [384, 128]" in message and "memory_budget does not count" in message for message in told
    )


def test_a_tensor_that_is_trained_and_no_parameter_is_not_told_of(caplog: pytest.LogCaptureFixture):
    """As the prompt of prompt tuning may be: the graph reads it."""
    model, prompt = make(), torch.zeros(256, 128, requires_grad=True)
    optimizer = autohete_fx.AdamW([*model.parameters(), prompt])
    model.compile(backend="autohete", options={**EAGER, "memory_budget": "64MiB"})
    for _ in range(3):
        model(prompt).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    assert messages(caplog) == []
