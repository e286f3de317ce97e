"""Our passes in someone else's backend: each alone, on the graphs of AOTAutograd and a plan, trains equal to eager.

The backends here are written as a user would write them: they partition and compile for themselves, and take from us
the groups, a plan made by hand and the passes that they ask for. What is compared is bitwise, dropout included.
"""

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from functorch.compile import make_boxed_func
from torch import Tensor, fx, nn
from torch._dynamo.backends.common import aot_autograd
from torch._functorch.partitioners import min_cut_rematerialization_partition
from torch._inductor import config as inductor_config
from torch._inductor.compile_fx import compile_fx
from torch._inductor.custom_graph_pass import CustomPartitionerFn

from autohete_fx import Activations, BlockDecision, Optimizer, Params, PassError, Plan, passes
from autohete_fx.capture.grouping import block_index, group_blocks
from autohete_fx.capture.inputs import GraphInput, graph_inputs, parameter_fqns
from autohete_fx.compiler import rewriting
from autohete_fx.compiler.problem import moved_states, owners_of
from autohete_fx.graph import ops
from autohete_fx.ir import BlockGraph
from autohete_fx.ir.labels import labels_of
from autohete_fx.passes import PassContext, Stage
from autohete_fx.runtime import kernels  # noqa: F401  (registers the ops' kernels)
from autohete_fx.runtime.placement import Placement, place_param
from autohete_fx.runtime.session import Session
from tests.main_job import slow

WIDTH, TOKENS, STEPS = 64, 256, 3


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.dropout = nn.LayerNorm(WIDTH), nn.Dropout(0.1)
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.dropout(self.down(nn.functional.gelu(self.up(self.norm(x)))))


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Layer() for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return x.square().mean()


def make() -> Model:
    torch.manual_seed(0)
    return Model()


def train(model: nn.Module) -> list[Tensor]:
    """Losses and gradients of three steps on fresh data, and the parameters at the end."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    seen = []
    for step in range(STEPS):
        torch.manual_seed(step)
        loss = model(torch.randn(TOKENS, WIDTH))
        loss.backward()
        seen += [loss.detach().clone(), *(p.grad.clone() for p in model.parameters() if p.grad is not None)]
        optimizer.step()
        optimizer.zero_grad()
    return [*seen, *(p.detach().clone() for p in model.parameters())]


@functools.cache
def eager() -> list[Tensor]:
    """What plain PyTorch computes, nothing compiled."""
    return train(make())


def uniform_plan(blocks: BlockGraph, decision: BlockDecision) -> Plan:
    labels = labels_of(blocks.blocks)
    return Plan(labels=labels, decisions=(decision,) * len(labels))


@dataclass
class SomeonesBackend:
    """AOTAutograd, its graphs run as they are; ``chosen`` of our passes run on them.

    Attributes:
        inserted: how many copies of each op stand in the rewritten graphs.
        num_saved: how many tensors forward saves for backward.
    """

    decision: BlockDecision
    chosen: Sequence[passes.PassFunction]
    inserted: dict[str, int] = field(default_factory=dict)
    num_saved: int = 0
    session: Session = field(default_factory=lambda: Session("someone's", torch.device("cpu")))

    def __call__(self, gm: fx.GraphModule, example_inputs: list[Any]) -> Callable[..., Any]:
        inputs = graph_inputs(gm, example_inputs)

        def compile_graph(graph: fx.GraphModule, _: Any) -> Any:
            return make_boxed_func(graph.forward)

        partition_fn = functools.partial(self.partition, inputs)
        backend: Any = aot_autograd(fw_compiler=compile_graph, bw_compiler=compile_graph, partition_fn=partition_fn)
        return backend(gm, example_inputs)

    def partition(
        self, inputs: Sequence[GraphInput], joint: fx.GraphModule, joint_inputs: Sequence[object], **keywords: Any
    ) -> tuple[fx.GraphModule, fx.GraphModule]:
        pipeline = passes.only(*self.chosen)
        blocks = group_blocks(joint, parameter_fqns(joint, inputs))
        params: dict[str, Any] = {item.name: item.tensor for item in inputs if item.is_parameter}
        plan, owners = uniform_plan(blocks, self.decision), owners_of(blocks, params)
        context = PassContext(stage=Stage.JOINT, plan=plan, block_of=block_index(blocks))
        split = rewriting.partition(joint, joint_inputs, context, keywords, pipeline=pipeline)
        moved = moved_states(plan.decisions, owners, params)
        rewriting.rewrite_training(split, plan, self.session.digest, inputs, owners, moved, pipeline=pipeline)
        tier = self.session.tier
        for name, block in owners.items():
            where = Placement(params=self.decision.params, optimizer=self.decision.optimizer, tier=tier, block=block)
            place_param(params[name], where)
        for node in (*split.forward.graph.nodes, *split.backward.graph.nodes):
            if node.target in ops.ISSUING_OPS:
                name = node.target._schema.name
                self.inserted[name] = self.inserted.get(name, 0) + 1
        self.num_saved = len(passes.output_args(split.forward)) - split.num_outputs
        return split.forward, split.backward


OFFLOAD = BlockDecision(activations=Activations.OFFLOAD)
HOST_PARAMS = BlockDecision(params=Params.HOST)
HOST_OPTIMIZER = BlockDecision(optimizer=Optimizer.HOST)


@pytest.mark.parametrize(
    ("decision", "chosen", "inserted"),
    [
        slow(OFFLOAD, (passes.offload_activations,), {"autohete::offload"}),
        slow(OFFLOAD, (passes.reload_activations,), {"autohete::reload"}),
        (OFFLOAD, (passes.offload_activations, passes.reload_activations), {"autohete::offload", "autohete::reload"}),
        slow(HOST_PARAMS, (passes.prefetch_parameters,), {"autohete::prefetch"}),
        (HOST_PARAMS, (passes.prefetch_parameters, passes.lower_lanes), {"autohete::prefetch"}),
        slow(HOST_PARAMS, (passes.prefetch_parameters, passes.sort_regions), {"autohete::prefetch"}),
        (HOST_OPTIMIZER, (passes.offload_gradients,), {"autohete::offload"}),
        slow(HOST_OPTIMIZER, (passes.annotate_blocks,), set()),
    ],
    ids=lambda value: "+".join(f.__name__ for f in value) if isinstance(value, tuple) else "",
)
def test_copies_in_someone_elses_backend(
    decision: BlockDecision, chosen: Sequence[passes.PassFunction], inserted: set[str]
):
    backend = SomeonesBackend(decision, chosen)
    model = make()
    model.compile(backend=backend)
    assert all(torch.equal(a, b) for a, b in zip(train(model), eager(), strict=True))
    assert set(backend.inserted) == inserted


def test_recomputation_in_someone_elses_backend():
    saved = {}
    for activations in (Activations.KEEP, Activations.RECOMPUTE):
        backend = SomeonesBackend(BlockDecision(activations=activations), (passes.tag_recompute,))
        model = make()
        model.compile(backend=backend)
        assert all(torch.equal(a, b) for a, b in zip(train(model), eager(), strict=True))
        saved[activations] = backend.num_saved
    assert saved[Activations.RECOMPUTE] < saved[Activations.KEEP]


class TagAndSplit(CustomPartitionerFn):
    """Someone's Inductor partitioner that uses nothing of ours but the groups and one pass."""

    def __init__(self, inputs: Sequence[GraphInput]) -> None:
        self.inputs = inputs
        self.num_tagged = 0

    def __call__(self, gm: fx.GraphModule, joint_inputs: Any, **keywords: Any) -> tuple[fx.GraphModule, fx.GraphModule]:
        blocks = group_blocks(gm, parameter_fqns(gm, self.inputs))
        plan = uniform_plan(blocks, BlockDecision(activations=Activations.RECOMPUTE))
        context = PassContext(stage=Stage.JOINT, plan=plan, block_of=block_index(blocks))
        gm = passes.run(passes.only(passes.tag_recompute), gm, context)
        self.num_tagged = sum("recompute" in node.meta for node in gm.graph.nodes)
        return min_cut_rematerialization_partition(gm, joint_inputs, **keywords)

    def uuid(self) -> str:
        return "tag and split"


@pytest.mark.slow
def test_recomputation_under_someone_elses_inductor_partitioner():
    found: list[TagAndSplit] = []

    def backend(gm: fx.GraphModule, example_inputs: list[Any]) -> Any:
        found.append(TagAndSplit(graph_inputs(gm, example_inputs)))
        return compile_fx(gm, example_inputs, config_patches={"custom_partitioner_fn": found[-1]})

    model = make()
    model.compile(backend=backend)
    with inductor_config.patch(fallback_random=True):  # dropout draws as eager does
        torch.testing.assert_close(train(model), eager(), atol=1e-5, rtol=1e-4)
    assert found[0].num_tagged > 0


def test_only_takes_what_is_required_along():
    assert [p.name for p in passes.only(passes.tag_recompute)] == ["annotate_blocks", "tag_recompute"]
    assert passes.only(*(p.function for p in passes.PIPELINE)) == passes.PIPELINE
    names = [p.name for p in passes.only(passes.pin_positions)]
    assert names == ["annotate_blocks", "assign_lanes", "lower_lanes", "sort_regions", "pin_positions"]


def test_only_names_what_there_is():
    with pytest.raises(
        PassError, match=r"is not in PIPELINE; expected some of annotate_blocks, merge_reduces, tag_recompute"
    ):
        passes.only(lambda gm, context: gm)
