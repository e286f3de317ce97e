"""The order of blocks holds for every graph, however wrong or sparse the paths are."""

import operator

import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from torch import fx

from autohete_fx.capture.assign import BackwardAssignment, Slots, assign_forward, check_order, find_parameters
from autohete_fx.capture.dataflow import split_joint

VALUE = torch.empty(2, 3, device="meta")


@st.composite
def joint_graphs(draw: st.DrawFn) -> tuple[fx.GraphModule, dict[str, int], tuple[int, ...]]:
    """A random joint graph, slots that are known for some of its nodes, and the stack of each layer."""
    graph = fx.Graph()
    nodes = [graph.placeholder(f"primals_{index}") for index in range(3)]
    num_forward, num_backward = draw(st.integers(1, 14)), draw(st.integers(0, 14))
    stacks = tuple(draw(st.lists(st.integers(0, 2), min_size=1, max_size=4)))
    known: dict[str, int] = {}
    for index in range(num_forward + num_backward):
        if index == num_forward:
            nodes.append(graph.placeholder("tangents_1"))
        kind = draw(st.sampled_from(["binary", "view", "constant", "pair"]))
        left, right = draw(st.sampled_from(nodes)), draw(st.sampled_from(nodes))
        if kind == "binary":
            node = graph.call_function(torch.ops.aten.add.Tensor, (left, right))
        elif kind == "view":
            node = graph.call_function(torch.ops.aten.view.default, (left, [6]))
        elif kind == "constant":
            node = graph.call_function(torch.ops.aten.full.default, ([2, 3], 1.0))
        else:
            both = graph.call_function(torch.ops.aten.aminmax.default, (left,))
            node = graph.call_function(operator.getitem, (both, 0))
            both.meta["val"] = (VALUE, VALUE)
        node.meta["val"] = VALUE
        if draw(st.booleans()):
            known[node.name] = Slots.of_layer(draw(st.integers(0, len(stacks) - 1)))
        if draw(st.booleans()):
            node.meta["seq_nr"] = draw(st.integers(0, 5))
        nodes.append(node)
    graph.output(tuple(draw(st.lists(st.sampled_from(nodes), max_size=4))))
    return fx.GraphModule({}, graph), known, stacks


def view_of_a_known_view() -> tuple[fx.GraphModule, dict[str, int], tuple[int, ...]]:
    """A parameter's view that has a slot, a view of it that has none, and a reader in front of that slot."""
    graph = fx.Graph()
    parameter = graph.placeholder("primals_0")
    first = graph.call_function(torch.ops.aten.view.default, (parameter, [6]))
    second = graph.call_function(torch.ops.aten.view.default, (first, [6]))
    reader = graph.call_function(torch.ops.aten.add.Tensor, (second, second))
    for node in (first, second, reader):
        node.meta["val"] = VALUE
    graph.output((reader,))
    return fx.GraphModule({}, graph), {first.name: 1, reader.name: 0}, (0,)


@settings(max_examples=300, deadline=None, derandomize=True)
@example(view_of_a_known_view())
@given(joint_graphs())
def test_any_graph_is_divided_in_order(case: tuple[fx.GraphModule, dict[str, int], tuple[int, ...]]):
    graph, names, stacks = case
    joint = split_joint(graph)
    slots = Slots(stacks)
    known = {node: names[node.name] for node in joint.order if node.name in names}
    parameters = find_parameters(joint, ["primals_0"])
    forward = assign_forward(joint, slots, known, parameters)
    backward = BackwardAssignment(
        joint=joint, slots=slots, parameters=parameters, known=known, forward=forward, gradients={}
    ).run()
    assert set(forward) == set(joint.forward)
    assert set(backward) == set(joint.backward)
    check_order(joint, forward | backward)
    assert all(0 <= slot <= slots.last for slot in (forward | backward).values())
