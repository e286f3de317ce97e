"""What ``autohete run`` does to optimizers and models: they become ours only where that is exact. Nothing compiles."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import autohete_fx
from autohete_fx.integrations.replacing import Kept, replace
from autohete_fx.integrations.watching import Trained, Watched
from autohete_fx.optim import optimizer_of


class Layers(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList(nn.Linear(4, 4) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return x


def watched(options: Any = None, **how: Any) -> Watched:
    return Watched(options or {"inner_backend": "eager"}, **{"only_same_kernels": False, **how})


def steps(optimizer: torch.optim.Optimizer, params: list[Tensor]) -> list[Tensor]:
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, step_size=1)
    for step in range(4):
        torch.manual_seed(step)
        for p in params:
            p.grad = torch.randn_like(p)
        optimizer.step()
        schedule.step()
    return [p.detach().clone() for p in params]


MAKERS: list[Callable[[Any], torch.optim.Optimizer]] = [
    lambda params: torch.optim.AdamW(params, lr=1e-2, fused=True),
    lambda params: torch.optim.AdamW(
        [{"params": params[:2], "lr": 1e-1}, {"params": params[2:]}], betas=(0.8, 0.9), fused=True
    ),
    lambda params: torch.optim.Adam(params, weight_decay=0.1, eps=1e-3, fused=True),
    lambda params: torch.optim.SGD(params, lr=1e-2, momentum=0.9, nesterov=True, fused=True),
    lambda params: torch.optim.SGD(params, lr=torch.tensor(1e-2), weight_decay=0.1, maximize=True, fused=True),
]


@pytest.mark.parametrize("make", MAKERS)
def test_a_replaced_optimizer_updates_bit_by_bit(make: Callable[[Any], torch.optim.Optimizer]):
    plain, model = Layers(), Layers()
    expected = steps(make(list(plain.parameters())), list(plain.parameters()))
    with watched() as run_of, torch.no_grad():  # under which no call decides which module is compiled
        optimizer = make(list(model.parameters()))
        assert type(optimizer).__module__.startswith("autohete_fx.")
        model(torch.ones(1, 4))
    given = steps(optimizer, list(model.parameters()))
    assert all(torch.equal(mine, theirs) for mine, theirs in zip(given, expected, strict=True))
    assert "bit by bit" in run_of.trained[0].replaced and "no module that holds all" in run_of.trained[0].uncompiled
    assert type(make(list(Layers().parameters()))).__module__.startswith("torch.optim")
    assert not hasattr(optimizer, "_step_supports_amp_scaling")  # or a gradient scaler would leave gradients scaled


def test_names_of_parameters_and_states_are_those_of_pytorch():
    plain, model = Layers(), Layers()
    expected = torch.optim.AdamW(plain.named_parameters(), fused=True)
    with watched():
        optimizer = torch.optim.AdamW(model.named_parameters(), fused=True)
    steps(expected, list(plain.parameters()))
    steps(optimizer, list(model.parameters()))
    given, wanted = optimizer.state_dict(), expected.state_dict()
    assert given["param_groups"] == wanted["param_groups"] and given["state"].keys() == wanted["state"].keys()
    assert all(
        torch.equal(given["state"][i][name], state[name]) for i, state in wanted["state"].items() for name in state
    )


class Own(torch.optim.AdamW):
    pass


@pytest.mark.parametrize(
    ("make", "reason"),
    [
        (lambda params: torch.optim.AdamW(params, amsgrad=True), "amsgrad=True"),
        (lambda params: torch.optim.AdamW(params, foreach=True), "foreach=True"),
        (lambda params: torch.optim.AdamW(params, capturable=True), "capturable=True"),
        (lambda params: torch.optim.AdamW(params, fused=False), "fused=False"),
        (lambda params: torch.optim.SGD(params, differentiable=True), "differentiable=True"),
        (lambda params: Own(params), "subclass of torch.optim.AdamW"),
        (lambda params: torch.optim.LBFGS(params), "no optimizer of ours"),
        (lambda params: torch.optim.NAdam(params), "no optimizer of ours"),
        (lambda params: autohete_fx.AdamW(params), "ours already"),
    ],
)
def test_any_other_optimizer_stays_and_the_report_says_why(make: Callable[[Any], torch.optim.Optimizer], reason: str):
    model = Layers()
    plain = type(make(list(model.parameters())))
    with watched() as run_of:
        optimizer = make(list(model.parameters()))
    assert type(optimizer) is plain and reason in run_of.trained[0].kept and not run_of.trained[0].replaced


def test_what_pytorch_would_round_otherwise_is_said_and_can_be_refused():
    model = Layers()
    with watched() as run_of:
        torch.optim.AdamW(model.parameters())
    assert "last bits" in run_of.trained[0].replaced
    with watched(only_same_kernels=True) as run_of:
        optimizer = torch.optim.AdamW(model.parameters())
    assert type(optimizer) is torch.optim.AdamW and "fused=True" in run_of.trained[0].kept


def test_16_bit_parameters_stay_also_where_they_become_so_later():
    model = Layers().bfloat16()
    with watched() as run_of:
        torch.optim.AdamW(model.parameters(), fused=True)
        late = Layers()
        optimizer = torch.optim.AdamW(late.parameters(), fused=True)
    assert "fp32 master" in run_of.trained[0].kept
    steps(optimizer, list(late.parameters()))
    optimizer.add_param_group({"params": [nn.Parameter(torch.ones(2, dtype=torch.bfloat16))]})
    with pytest.raises(autohete_fx.OptimizerStateError, match="Cast the model before"):
        optimizer.step()


class Sparse(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.table, self.head = nn.Embedding(5, 4, sparse=True), nn.Linear(4, 1)

    def forward(self, ids: Tensor) -> Tensor:
        return self.head(self.table(ids)).sum()


def test_an_optimizer_of_sparse_gradients_stays():
    model = Sparse()
    with watched() as run_of, torch.no_grad():
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        dense = torch.optim.SGD(model.head.parameters(), lr=0.1)
    assert type(optimizer) is torch.optim.SGD and "sparse=True" in run_of.trained[0].kept
    assert type(dense) is autohete_fx.SGD


@pytest.mark.parametrize("named", [False, True])
def test_an_optimizer_that_ours_refuses_is_as_it_was(named: bool):
    first, second = Layers().layers
    layers, third = (("a", first), ("b", second)), nn.Parameter(torch.ones(2))
    params = [list(layer.named_parameters(name) if named else layer.parameters()) for name, layer in layers]
    rest = [("c", third)] if named else [third]
    groups = [{"params": params[0]}, {"params": params[1], "lr": float("nan")}, {"params": rest}]
    optimizer = torch.optim.AdamW(groups, fused=True)
    before = dict(vars(optimizer))
    with pytest.raises(Kept, match="lr is nan"):
        replace(optimizer, only_same_kernels=False)
    assert type(optimizer) is torch.optim.AdamW and vars(optimizer) == before
    assert not any(map(optimizer_of, (*first.parameters(), *second.parameters()))), "a plan would ask it"


def test_constructors_of_pytorch_raise_what_they_raise():
    with watched() as run_of, pytest.raises(ValueError, match="learning rate"):
        torch.optim.AdamW(Layers().parameters(), lr=-1.0)
    assert run_of.trained == []


def only(run_of: Watched) -> Trained:
    (note,) = run_of.trained
    return note


def test_layers_that_a_loop_calls_one_by_one_are_not_compiled():
    model = Layers()
    with watched() as run_of:
        torch.optim.AdamW(model.parameters(), fused=True)
        x = torch.ones(1, 4)
        for layer in model.layers:
            x = layer(x)
        x.sum().backward()
    assert "no module that holds all" in only(run_of).uncompiled and model._compiled_call_impl is None


def test_parameters_of_two_modules_are_left_alone():
    model, head = Layers(), nn.Linear(4, 1)
    with watched() as run_of:
        optimizer = torch.optim.AdamW([*model.parameters(), *head.parameters()], fused=True)
        head(model(torch.ones(1, 4))).sum().backward()
    assert "no module holds all" in only(run_of).uncompiled and only(run_of).kept == "its model is not compiled"
    assert type(optimizer) is torch.optim.AdamW


@pytest.mark.parametrize("when", ["before", "after"])
@pytest.mark.parametrize("how", ["in place", "wrapped", "a layer"])
def test_a_model_that_the_script_compiles_is_left_alone(how: str, when: str):
    def compile_it(model: Layers) -> Any:
        if how == "wrapped":
            return torch.compile(model, backend="eager")
        (model if how == "in place" else model.layers[0]).compile(backend="eager")
        return model

    model = Layers()
    called = compile_it(model) if when == "before" else model
    with watched() as run_of:
        optimizer = torch.optim.AdamW(model.parameters(), fused=True)
        called = compile_it(model) if when == "after" else called
        called(torch.ones(1, 4)).sum().backward()
        called(torch.ones(1, 4)).sum().backward()
    note = only(run_of)
    assert not note.compiled and "compile" in note.uncompiled, note
    assert when == "after" or type(optimizer) is torch.optim.AdamW
    called(torch.ones(1, 4)).sum().backward()


def test_a_class_that_is_to_be_left_is_left():
    with watched(left=["Layers", "Layer"]) as run_of:
        model = Layers()
        torch.optim.AdamW(model.parameters(), fused=True)
        model(torch.ones(1, 4))
    assert run_of.trained[0].uncompiled == "--leave Layers was given" and model._compiled_call_impl is None
    assert run_of.unmatched == {"Layer"}
    assert run_of.trained[0].kept == "its model is not compiled"


def test_a_run_leaves_nothing_behind():
    model = Layers()
    with watched():
        torch.optim.AdamW(model.parameters(), fused=True)
        assert model._compiled_call_impl is not None
    assert model._compiled_call_impl is None and "Watched" not in str(vars(torch.optim.Optimizer.__init__))
