"""Deep models from shallow ones: what a trace of all layers gives, or nothing."""

import dataclasses

import pytest

from autohete_fx.ir import BlockCost, BlockKind, Edge, Problem
from autohete_fx.machine.devices import find_device, machine_of_spec
from autohete_fx.whatif.depth import Small, TracedStep, deepened, deepened_evenly, even_layers, shallow_layers

MACHINE = machine_of_spec(find_device("a100"))


def cost(num: int, seconds: float = 1e-3, tensors: int = 2) -> BlockCost:
    return BlockCost(
        forward_s=seconds,
        backward_s=2 * seconds,
        recompute_s=seconds,
        saved_bytes=1000 + num,
        boundary_bytes=100,
        offloadable=(400, 300)[:tensors],
        forward_workspace_bytes=10 * num,
        backward_workspace_bytes=20,
        param_bytes=500,
        grad_bytes=500,
        optimizer_bytes=3000,
        num_params=250,
    )


def small(fixed_bytes: int, grad_bytes: int, num_params: int) -> Small:
    return Small(fixed_bytes=fixed_bytes, grad_bytes=grad_bytes, num_params=num_params)


def model(num_layers: int, period: int = 1) -> TracedStep:
    """What a trace of that many layers gives: types alternate, workspace falls with position, fixed bytes grow."""
    layers = range(num_layers)
    costs = (cost(num_layers), *(cost(num_layers - i, 1e-3 * (1 + i % period)) for i in layers), cost(7))
    last = num_layers
    edges = [Edge(producer=0, consumer=1, num_bytes=70)]
    edges += [Edge(producer=0, consumer=i + 1, num_bytes=8) for i in layers if i > 0]
    edges += [Edge(producer=i, consumer=i + 1, num_bytes=64) for i in range(1, last + 1)]
    return TracedStep(
        problem=Problem(
            labels=("prologue", *(f"m.h.{i}" for i in layers), "epilogue"),
            costs=costs,
            edges=tuple(sorted(edges, key=lambda edge: (edge.producer, edge.consumer))),
            machine=MACHINE,
            fixed_bytes=900 + 11 * num_layers,
        ),
        kinds=(BlockKind.PROLOGUE, *(BlockKind.LAYER for _ in layers), BlockKind.EPILOGUE),
        flops=(0, *(10 + i % period for i in layers), 3),
        num_params=9 + 250 * num_layers,
        traced_layers=num_layers,
        batch=(8, 1024),
        small=(small(0, 0, 0), *[small(11, 7, 250)] * num_layers, small(0, 0, 0)),
    )


def drawing(num_layers: int, period: int = 1, uneven: float = 0.05) -> TracedStep:
    """The same, but seconds of layers between are ``uneven`` in turns."""
    step = model(num_layers, period)
    costs = list(step.problem.costs)
    for index, of_block in enumerate(costs):  # where backward holds something, it holds gradients of later layers
        held = 1000 + 7 * (num_layers - max(1, index)) if index < 3 else 0
        costs[index] = dataclasses.replace(of_block, backward_workspace_bytes=held)
    for index in range(3, num_layers):
        factor = 1 + uneven * (-1) ** ((index - 3) // period)
        costs[index] = dataclasses.replace(costs[index], forward_s=costs[index].forward_s * factor)
    return dataclasses.replace(step, problem=dataclasses.replace(step.problem, costs=tuple(costs)))


@pytest.mark.parametrize(("period", "num_layers"), [(1, 14), (1, 80), (2, 19), (3, 32)])
def test_two_shallow_traces_give_the_deep_one(period: int, num_layers: int):
    fewest = shallow_layers(num_layers, period)
    assert fewest is not None and 2 * fewest + period < num_layers and (num_layers - fewest) % period == 0
    found = deepened(model(fewest, period), model(fewest + period, period), num_layers=num_layers, period=period)
    assert found is not None
    deep = dataclasses.replace(model(num_layers, period), traced_layers=fewest + period)
    assert found == deep


def test_few_layers_are_traced_whole():
    assert shallow_layers(11, 1) is None and shallow_layers(12, 1) == 5
    assert shallow_layers(26, 6) is None


def changed(step: TracedStep, block: int, new: BlockCost) -> TracedStep:
    costs = list(step.problem.costs)
    costs[block] = new
    return dataclasses.replace(step, problem=dataclasses.replace(step.problem, costs=tuple(costs)))


@pytest.mark.parametrize(
    "irregular",
    [
        changed(model(6), 4, cost(4, 2e-3)),  # a layer between takes longer than its like
        changed(model(6), 4, cost(2, tensors=1)),  # and one saves other tensors
        dataclasses.replace(model(6), flops=(0, 10, 10, 10, 10, 11, 10, 3)),
        dataclasses.replace(model(6), kinds=(BlockKind.PROLOGUE, *[BlockKind.LAYER] * 5, BlockKind.BRIDGE, BlockKind.EPILOGUE)),
        dataclasses.replace(
            model(6),
            problem=dataclasses.replace(
                model(6).problem, edges=(*model(6).problem.edges, Edge(producer=1, consumer=6, num_bytes=64))
            ),
        ),
    ],
)  # fmt: skip
def test_irregular_models_are_not_extrapolated(irregular: TracedStep):
    assert deepened(model(5), model(6), num_layers=20, period=1) is not None
    assert deepened(model(5), irregular, num_layers=20, period=1) is None


@pytest.mark.parametrize(("period", "num_layers"), [(1, 6), (1, 12), (2, 19), (3, 32)])
def test_one_trace_of_layers_that_draw_gives_the_deep_one_but_for_their_mean(period: int, num_layers: int):
    few = even_layers(num_layers, period)
    assert few is not None and few < num_layers and (num_layers - few) % period == 0
    found = deepened_evenly(drawing(few, period), num_layers=num_layers, period=period)
    even = dataclasses.replace(drawing(num_layers, period, uneven=0.0), traced_layers=few)
    assert found is not None
    seconds = [step.problem.costs[index].forward_s for step in (found, even) for index in range(num_layers + 2)]
    assert seconds[: num_layers + 2] == pytest.approx(seconds[num_layers + 2 :], rel=0.02)
    problem = dataclasses.replace(found.problem, costs=even.problem.costs)
    assert dataclasses.replace(found, problem=problem) == even
    for one, other in zip(found.problem.costs, even.problem.costs, strict=True):
        assert dataclasses.replace(one, forward_s=other.forward_s) == other


def test_layers_that_draw_and_are_not_alike_are_traced_whole():
    assert even_layers(5, 1) is None and even_layers(6, 1) == 5
    assert deepened_evenly(drawing(5), num_layers=20, period=1) is not None
    assert deepened_evenly(drawing(5, uneven=0.2), num_layers=20, period=1) is None
    assert deepened_evenly(changed(drawing(5), 4, cost(2, tensors=1)), num_layers=20, period=1) is None
