"""A two-block graph, written out node by node, that the tests of single passes rewrite, print and run.

Block 0 is ``gelu(x @ w0)``, block 1 the product with ``w1.t()``. Forward, backward and joint graph hold the same nodes.
"""

from typing import Any

import torch
from torch import Tensor, fx, nn
from torch._inductor import inductor_prims  # noqa: F401  (registers prims.inductor_seeds)
from torch._subclasses.fake_tensor import FakeTensorMode

from autohete_fx import BlockDecision, Plan
from autohete_fx.graph import annotations
from autohete_fx.graph.saved import output_args
from autohete_fx.ir import Schedule
from autohete_fx.passes import PassContext, Stage
from autohete_fx.passes.base import output_node
from autohete_fx.runtime import kernels  # noqa: F401  (registers the ops' kernels)
from autohete_fx.runtime.session import Session

SIDE = 128  # matrices of 64 KiB, the smallest that is worth a copy
SESSION = "two blocks"
aten = torch.ops.aten


class _Builder:
    """A graph whose nodes have fake values and blocks."""

    def __init__(self) -> None:
        self.graph = fx.Graph()
        self.mode = FakeTensorMode()

    def inputs(self, *names: str) -> list[fx.Node]:
        nodes = [self.graph.placeholder(name) for name in names]
        with self.mode:
            for node in nodes:
                node.meta["val"] = torch.empty(SIDE, SIDE)
        return nodes

    def call(self, name: str, block: int, target: Any, *args: Any) -> fx.Node:
        node = self.graph.create_node("call_function", target, args, name=name)
        with self.mode:
            node.meta["val"] = target(*fx.map_arg(args, lambda a: a.meta["val"]))
        annotations.set_block(node, block)
        return node

    def module(self, *outputs: fx.Node | None) -> fx.GraphModule:
        self.graph.output(outputs)
        return fx.GraphModule(nn.Module(), self.graph)


def _forward_nodes(b: _Builder, x: fx.Node, w0: fx.Node, w1: fx.Node) -> tuple[fx.Node, fx.Node, fx.Node]:
    first = b.call("first", 0, aten.mm.default, x, w0)
    gelu = b.call("gelu", 0, aten.gelu.default, first)
    second = b.call("second", 1, aten.mm.default, gelu, b.call("w1_t", 1, aten.permute.default, w1, [1, 0]))
    return first, gelu, second


def _backward_nodes(
    b: _Builder, x: fx.Node, w1: fx.Node, first: fx.Node, gelu: fx.Node, tangent: fx.Node
) -> tuple[fx.Node, fx.Node]:
    grad_t = b.call("grad_t", 1, aten.permute.default, tangent, [1, 0])
    grad_w1 = b.call("grad_w1", 1, aten.mm.default, grad_t, gelu)
    grad_gelu = b.call("grad_gelu", 1, aten.mm.default, tangent, w1)
    grad_first = b.call("grad_first", 0, aten.gelu_backward.default, grad_gelu, first)
    grad_w0 = b.call("grad_w0", 0, aten.mm.default, b.call("x_t", 0, aten.permute.default, x, [1, 0]), grad_first)
    return grad_w0, grad_w1


def forward() -> fx.GraphModule:
    """``(x, w0, w1) -> (second | first, gelu)``: one output of the user's, two saved for backward."""
    b = _Builder()
    first, gelu, second = _forward_nodes(b, *b.inputs("x", "w0", "w1"))
    return b.module(second, first, gelu)


def forward_that_saves_a_weight(name: str = "w1") -> fx.GraphModule:
    """Likewise, with the weight of block 1, or its transpose ``w1_t``, saved as well."""
    gm = forward()
    output = output_node(gm)
    second, *saved = output_args(gm)
    output.args = ((second, next(node for node in gm.graph.nodes if node.name == name), *saved),)
    gm.recompile()
    return gm


def backward() -> fx.GraphModule:
    """``(x, w1, first, gelu, tangent) -> (no gradient of x, grad_w0, grad_w1)``."""
    b = _Builder()
    x, w1, first, gelu, tangent = b.inputs("x", "w1", "first", "gelu", "tangent")
    annotations.set_block(first, 0)
    annotations.set_block(gelu, 0)
    return b.module(None, *_backward_nodes(b, x, w1, first, gelu, tangent))


def joint() -> fx.GraphModule:
    """Both in one graph, with the seeds of a dropout that has no layer of its own here."""
    b = _Builder()
    x, w0, w1 = b.inputs("x", "w0", "w1")
    (tangent,) = b.inputs("tangents_1")
    b.call("seeds", 0, torch.ops.prims.inductor_seeds.default, 1, torch.device("cpu"))
    first, gelu, second = _forward_nodes(b, x, w0, w1)
    return b.module(second, *_backward_nodes(b, x, w1, first, gelu, tangent))


def context(stage: Stage, *decisions: BlockDecision, schedule: Schedule | None = None, **changes: Any) -> PassContext:
    """The context that the compiler would make for these graphs; one decision is for both blocks."""
    both = decisions * 2 if len(decisions) == 1 else decisions
    known: dict[str, Any] = {
        "offloaded": {"first": 0, "gelu": 0},
        "owners": {"w0": 0, "w1": 1},
        "gradients": (None, 0, 1) if stage is Stage.BACKWARD else (),
        "gradient_strides": (None, (SIDE, 1), (SIDE, 1)) if stage is Stage.BACKWARD else (),
        "gradient_edges": (None, 1, 2) if stage is Stage.BACKWARD else (),
        "edges": {"w0": 1, "w1": 2} if stage is Stage.BACKWARD else {},
        "num_outputs": 1 if stage is Stage.FORWARD else 0,
    }
    plan = Plan(labels=("a", "b"), decisions=both, schedule=schedule or Schedule())
    return PassContext(stage=stage, plan=plan, session=SESSION, **{**known, **changes})


def code(gm: fx.GraphModule) -> str:
    """The body of the graph's function, without the releases of dead values behind each line."""
    gm.recompile()
    lines = [line.split(";  ")[0].rstrip() for line in gm.code.strip().splitlines()]
    return "\n".join(line.strip().replace("torch.ops.", "") for line in lines if line.strip())


def real_inputs(gm: fx.GraphModule) -> list[Tensor]:
    """The same random matrices for every graph, by placeholder name."""
    values = {}
    for index, name in enumerate(("x", "w0", "w1", "first", "gelu", "tangent")):
        values[name] = torch.randn(SIDE, SIDE, generator=torch.Generator().manual_seed(index))
    return [values[node.name] for node in gm.graph.nodes if node.op == "placeholder"]


class Eager(fx.Interpreter):
    """Runs a graph node by node; control dependencies order nodes and compute nothing."""

    def call_function(self, target: Any, args: Any, kwargs: Any) -> Any:
        if str(target) == "control_deps":
            return fx.Interpreter(args[1]).run(*args[2:])
        return super().call_function(target, args, kwargs)


def assert_same_results(given: fx.GraphModule, expected: fx.GraphModule) -> None:
    """Both graphs, run on real tensors with a runtime of their own, return the same bits."""
    session = Session(SESSION, torch.device("cpu"))
    try:
        pairs = zip(Eager(given).run(*real_inputs(given)), Eager(expected).run(*real_inputs(expected)), strict=True)
        assert all(a is b if a is None or b is None else torch.equal(a, b) for a, b in pairs)
        session.abandon()
    finally:
        session.close()
