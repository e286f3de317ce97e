"""The user's passes and the user's Inductor configuration in our backend: they take effect, or an error says why not."""

import gc
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, fx, nn
from torch._inductor import config as inductor_config
from torch._inductor.custom_graph_pass import CustomGraphPass, CustomPartitionerFn

import autohete_fx
from autohete_fx.passes import PassContext, Stage
from tests.main_job import slow
from tests.thorough import thorough

aten = torch.ops.aten
EAGER: dict[str, Any] = {"inner_backend": "eager", "profile": "analytic"}
INDUCTOR: dict[str, Any] = {"inner_backend": "inductor", "profile": "analytic"}


@pytest.fixture(autouse=True)
def collected() -> Iterator[None]:
    yield
    torch._dynamo.reset()
    gc.collect()


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(16, 16) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x).sin()
        return x.square().mean()


def make() -> Model:
    torch.manual_seed(0)
    return Model()


def data() -> Tensor:
    return torch.randn(8, 16, generator=torch.Generator().manual_seed(1))


def losses(options: dict[str, Any] | str, steps: int = 2) -> list[float]:
    """Losses of training with our backend and these options, or with another backend."""
    model = make()
    if isinstance(options, str):
        model.compile(backend=options)
    else:
        model.compile(backend="autohete", options=options)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    seen = []
    for _ in range(steps):
        loss = model(data())
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        seen.append(loss.item())
    del model, optimizer, loss
    torch._dynamo.reset()
    gc.collect()
    return seen


def tanh_loss() -> float:
    model, x = make(), data()
    for layer in model.layers:
        x = layer(x).tanh()
    return x.square().mean().item()


def replace(graph: fx.Graph, old: Any, new: Any) -> None:
    for node in graph.nodes:
        if node.target is old:
            node.target = new


def sin_to_tanh(gm: fx.GraphModule, context: PassContext) -> fx.GraphModule:
    replace(gm.graph, aten.sin.default, aten.tanh.default)
    return gm


def cos_to_exp(gm: fx.GraphModule, context: PassContext) -> fx.GraphModule:
    """The derivative of sin, which stands in the backward graph."""
    replace(gm.graph, aten.cos.default, aten.exp.default)
    return gm


def at_every_point(make_pass: Callable[[str], Any]) -> dict[str, Any]:
    return {point: make_pass(point) for point in ("joint", "forward", "backward", "final")}


INNER = [pytest.param(EAGER, id="eager"), pytest.param(INDUCTOR, id="inductor", marks=pytest.mark.slow)]


@pytest.mark.parametrize("options", INNER)
def test_passes_run_at_every_point_and_know_their_graph(options: dict[str, Any]):
    ran: list[tuple[str, Stage]] = []

    def noting(point: str) -> Callable[[fx.GraphModule, PassContext], None]:
        return lambda gm, context: ran.append((point, context.stage))

    losses({**options, "passes": at_every_point(noting)}, steps=1)
    assert ran == [
        ("joint", Stage.JOINT),
        ("forward", Stage.FORWARD),
        ("backward", Stage.BACKWARD),
        ("final", Stage.FORWARD),
        ("final", Stage.BACKWARD),
    ]


@pytest.mark.parametrize("options", INNER)
def test_final_passes_see_inference_graphs(options: dict[str, Any]):
    expected = tanh_loss()
    model = make()
    model.compile(backend="autohete", options={**options, "passes": {"final": sin_to_tanh}})
    with torch.no_grad():
        assert model(data()).item() == pytest.approx(expected)


@pytest.mark.parametrize(
    ("point", "options"),
    [("joint", EAGER), ("forward", EAGER), ("final", EAGER), slow("final", INDUCTOR)],
)
def test_what_a_pass_changes_is_what_runs(point: str, options: dict[str, Any]):
    seen = losses({**options, "passes": {point: [sin_to_tanh]}}, steps=1)
    assert seen == pytest.approx([tanh_loss()])


@pytest.mark.parametrize(
    ("point", "options"),
    [("backward", EAGER), ("final", EAGER), thorough("backward", INDUCTOR)],
)
def test_what_a_pass_changes_in_backward_is_what_runs(point: str, options: dict[str, Any]):
    first, second = losses({**options, "passes": {point: cos_to_exp}})
    plain_first, plain_second = losses("eager")
    assert first == pytest.approx(plain_first)
    assert second != pytest.approx(plain_second)


@pytest.mark.slow
def test_two_passes_do_not_share_cached_code():
    def run(user_pass: Any) -> tuple[float, bool]:
        seen = losses({**INDUCTOR, "passes": {"forward": user_pass}}, steps=1)
        return seen[0], autohete_fx.compilations()[-1].cached

    def untouched(gm: fx.GraphModule, context: PassContext) -> None:
        pass

    first, again, other = run(sin_to_tanh), run(sin_to_tanh), run(untouched)
    assert first == (pytest.approx(tanh_loss()), False)
    assert again == (first[0], True)
    assert other == (pytest.approx(losses("eager", steps=1)[0]), False)


# -- mistakes ---------------------------------------------------------------------------------------------------------


def broken_pass(gm: fx.GraphModule, context: PassContext) -> fx.GraphModule:
    raise KeyError("no such node")


class OnlyIn:
    """A pass that does something wrong in one kind of graph."""

    def __init__(self, stage: Stage, wrong: Callable[[fx.GraphModule, PassContext], Any]) -> None:
        self.stage, self.wrong = stage, wrong

    def __call__(self, gm: fx.GraphModule, context: PassContext) -> Any:
        return self.wrong(gm, context) if context.stage is self.stage else gm


@pytest.mark.parametrize(
    ("point", "stage", "options"),
    [
        ("joint", Stage.JOINT, EAGER),
        ("forward", Stage.FORWARD, EAGER),
        ("backward", Stage.BACKWARD, EAGER),
        ("final", Stage.BACKWARD, EAGER),
        ("joint", Stage.JOINT, INDUCTOR),
        ("final", Stage.FORWARD, INDUCTOR),
        pytest.param("final", Stage.BACKWARD, INDUCTOR, marks=pytest.mark.slow),
    ],
)
def test_a_pass_that_raises_is_named_before_the_first_step(point: str, stage: Stage, options: dict[str, Any]):
    model = make()
    model.compile(backend="autohete", options={**options, "passes": {point: OnlyIn(stage, broken_pass)}})
    with pytest.raises(autohete_fx.PassError, match=f"OnlyIn raised KeyError.* on the {stage.value} graph") as caught:
        model(data())
    assert "in broken_pass" in str(caught.value)  # where it was raised


def returns_garbage(gm: fx.GraphModule, context: PassContext) -> Any:
    return gm.graph


def uses_before_it_defines(gm: fx.GraphModule, context: PassContext) -> None:
    calls = [node for node in gm.graph.nodes if node.op == "call_function"]
    calls[-1].append(calls[0])


def returns_another(gm: fx.GraphModule, context: PassContext) -> fx.GraphModule:
    return fx.GraphModule(gm, gm.graph)


NO_GRAPH = "pass returns_garbage returned Graph; expected a GraphModule"


@pytest.mark.parametrize(
    ("point", "user_pass", "message", "options"),
    [
        ("forward", returns_garbage, NO_GRAPH, EAGER),
        ("final", returns_garbage, NO_GRAPH, EAGER),
        slow("final", returns_garbage, NO_GRAPH, INDUCTOR),
        ("backward", uses_before_it_defines, "pass uses_before_it_defines left a broken graph", EAGER),
        ("final", returns_another, "at 'final' returned another GraphModule", EAGER),
        slow("final", returns_another, "at 'final' returned another GraphModule", INDUCTOR),
    ],
)
def test_what_a_pass_returns_is_checked(point: str, user_pass: Any, message: str, options: dict[str, Any]):
    model = make()
    model.compile(backend="autohete", options={**options, "passes": {point: user_pass}})
    with pytest.raises(autohete_fx.PassError, match=message):
        model(data())


# -- the user's Inductor configuration --------------------------------------------------------------------------------


class SinToTanh(CustomGraphPass):
    """The same change as Inductor's own options take it."""

    def __call__(self, graph: fx.Graph) -> None:
        replace(graph, aten.sin.default, aten.tanh.default)

    def uuid(self) -> str:
        return "sin to tanh"


@pytest.mark.parametrize(
    "name",
    ["joint_custom_pre_pass", "joint_custom_post_pass", "post_grad_custom_pre_pass", "post_grad_custom_post_pass"],
)
@pytest.mark.slow
def test_passes_of_the_inductor_configuration_take_effect(name: str):
    with inductor_config.patch(name, SinToTanh()):
        changed = losses(INDUCTOR, steps=1)
    unchanged = losses(INDUCTOR, steps=1)  # and are part of the cache key
    assert changed == pytest.approx([tanh_loss()])
    assert unchanged == pytest.approx(losses("eager", steps=1))


@pytest.mark.slow
def test_random_numbers_of_the_inductor_configuration_take_effect():
    def loss(backend: str, **how: Any) -> float:
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(16, 16), nn.Dropout(0.5))
        model.forward = torch.compile(model.forward, backend=backend, **how)
        torch.manual_seed(1)
        result = model(data()).square().mean().item()
        torch._dynamo.reset()
        return result

    with inductor_config.patch(fallback_random=True):  # draws as eager does
        assert loss("autohete", options=INDUCTOR) == pytest.approx(loss("eager"))
    assert loss("autohete", options=INDUCTOR) != pytest.approx(loss("eager"))


def test_a_partitioner_in_the_inductor_configuration_is_refused():
    class Theirs(CustomPartitionerFn):
        def __call__(self, gm: fx.GraphModule, joint_inputs: Any, **keywords: Any) -> Any:
            raise AssertionError

        def uuid(self) -> str:
            return "theirs"

    with inductor_config.patch(custom_partitioner_fn=Theirs()):
        with pytest.raises(autohete_fx.OptionError, match=r"custom_partitioner_fn .* partitions the graph itself"):
            losses(INDUCTOR)
        assert losses(EAGER) == losses("eager")  # no Inductor, no matter


@pytest.mark.slow
def test_autocast_around_the_model_is_another_compilation():
    with torch.autocast("cpu", torch.bfloat16):
        rounded, plain_rounded = losses(INDUCTOR, steps=1), losses("inductor", steps=1)
    assert rounded == pytest.approx(plain_rounded, rel=1e-3)
    assert losses(INDUCTOR, steps=1) == pytest.approx(losses("eager", steps=1))
