"""Blocks and parameters have the names that the user's model has, wherever Dynamo found them."""

import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import autohete_fx
from tests.layers import EAGER


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(128, 256), nn.Linear(256, 128)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(self.up(x).relu())


class Inner(nn.Module):
    def __init__(self, is_broken: bool = False) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Layer() for _ in range(4))
        self.norm = nn.Linear(128, 128)
        self.is_broken = is_broken

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers[:2]:
            x = layer(x)
        if self.is_broken:
            torch._dynamo.graph_break()
        for layer in self.layers[2:]:
            x = layer(x)
        return self.norm(x)


class Outer(nn.Module):
    def __init__(self, is_broken: bool = False) -> None:
        super().__init__()
        self.model = Inner(is_broken)
        self.head = nn.Linear(128, 128)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.model(x)).square().mean()


class Delegating(nn.Module):
    """As PEFT's models are: what it has not, the module that it wraps has."""

    def __init__(self, name: str, wrapped: nn.Module) -> None:
        super().__init__()
        self.wrapped_name = name
        setattr(self, name, wrapped)

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            if name == "wrapped_name" or name == self.wrapped_name:
                raise
            return getattr(getattr(self, self.wrapped_name), name)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return getattr(self, self.wrapped_name)(*args, **kwargs)


def decorated(forward: Callable[..., Any]) -> Callable[..., Any]:
    """As models of transformers decorate theirs."""

    @functools.wraps(forward)
    def wrapper(*args: Any, **kwargs: Any) -> Any:
        return forward(*args, **kwargs)

    return wrapper


class Decorated(Outer):
    forward = decorated(Outer.forward)


LAYERS = [f"model.layers.{i}" for i in range(4)]


def test_a_decorated_forward_changes_no_name():
    model = Decorated()
    (found,) = autohete_fx.preview(model, torch.randn(64, 128), options=EAGER)
    assert found.plan.labels == (*LAYERS, "epilogue")
    assert set(found.owners) <= set(model.state_dict()) and found.owners


def test_a_module_with_a_getattr_of_its_own_has_the_names_of_its_state_dict():
    model = Delegating("base_model", Delegating("model", Outer()))
    (found,) = autohete_fx.preview(model, torch.randn(64, 128), options=EAGER)
    assert found.plan.labels == (*(f"base_model.model.{layer}" for layer in LAYERS), "epilogue")
    assert set(found.owners) <= set(model.state_dict()) and found.owners


@pytest.mark.parametrize("how", ["module", "closure"])
def test_names_behind_a_graph_break_are_the_models(how: str):
    """What follows the break starts, to Dynamo, at the module that broke; the last graph repeats nothing."""
    model = Outer(is_broken=True)
    first, second, last = autohete_fx.preview(
        model if how == "module" else lambda x: model(x), torch.randn(64, 128), options=EAGER
    )
    assert first.plan.labels == ("model.layers.0", "model.layers.1")
    assert second.plan.labels == ("model.layers.2", "model.layers.3", "epilogue")
    assert last.plan.labels == ("head",)
    assert {name for c in (first, second, last) for name in c.owners} <= set(model.state_dict())


def test_names_are_the_models_too_in_training():
    model = Outer(is_broken=True)
    model.compile(backend="autohete", options=EAGER)
    optimizer = autohete_fx.AdamW(model.parameters())
    model(torch.randn(64, 128)).backward()
    optimizer.step()
    labels = [label for c in autohete_fx.compilations()[-3:] for label in c.plan.labels]
    assert labels == [*LAYERS, "epilogue", "head"]


def test_a_graph_that_repeats_nothing_is_called_a_graph():
    model = nn.ModuleDict({"up": nn.Linear(128, 256), "down": nn.Linear(256, 4)})

    def loss(x: Tensor) -> Tensor:
        return model["down"](model["up"](x).relu()).sum()

    (found,) = autohete_fx.preview(loss, torch.randn(64, 128), options=EAGER)
    assert found.plan.labels == ("graph",)
