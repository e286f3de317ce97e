"""Compose FX passes: yours in our backend, yours in Inductor's own hooks beside ours, and one of ours in your backend.

python examples/compose_passes.py
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from functorch.compile import make_boxed_func  # pyright: ignore[reportPrivateImportUsage]
from gpt import GPT, GPTConfig
from torch import fx
from torch._dynamo.backends.common import aot_autograd
from torch._inductor import config as inductor_config
from torch._inductor.custom_graph_pass import CustomGraphPass

import autohete_fx
from autohete_fx import Activations, BlockDecision, Plan, passes
from autohete_fx.capture.grouping import block_index, group_blocks
from autohete_fx.capture.inputs import graph_inputs, parameter_fqns
from autohete_fx.compiler import rewriting
from autohete_fx.graph import ops
from autohete_fx.ir.labels import labels_of
from autohete_fx.passes import PassContext, Stage

CONFIG = GPTConfig(layers=2)


def count_copies(gm: fx.GraphModule, context: PassContext) -> fx.GraphModule:
    """A pass gets the graph and the context (stage, plan), and returns the graph."""
    issued = [node for node in gm.graph.nodes if node.target in ops.ISSUING_OPS]
    print(f"  {context.stage.value}: {len(issued)} copies in {len(gm.graph.nodes)} nodes")
    return gm


class CountOps(CustomGraphPass):
    """A pass for one of Inductor's hooks, which get graphs without annotations."""

    def __call__(self, graph: fx.Graph) -> None:
        print(f"  Inductor's hook: {sum(node.op == 'call_function' for node in graph.nodes)} ops")

    def uuid(self) -> str:
        return "count ops"


def recomputing(gm: fx.GraphModule, example_inputs: Sequence[Any]) -> Callable[..., object]:
    """A backend of your own that takes our blocks and our recomputation tags, and nothing else."""
    inputs = graph_inputs(gm, example_inputs)

    def partition(joint: fx.GraphModule, joint_inputs: Sequence[object], **keywords: Any) -> Any:
        blocks = group_blocks(joint, parameter_fqns(joint, inputs))
        labels = labels_of(blocks.blocks)
        decisions = (BlockDecision(activations=Activations.RECOMPUTE),) * len(labels)
        plan = Plan(labels=labels, decisions=decisions)
        context = PassContext(stage=Stage.JOINT, plan=plan, block_of=block_index(blocks))
        split = rewriting.partition(joint, joint_inputs, context, keywords, pipeline=passes.only(passes.tag_recompute))
        saved = len(passes.output_args(split.forward)) - split.num_outputs
        print(f"  forward saves {saved} tensors for backward, with {len(labels)} blocks recomputed")
        return split.forward, split.backward

    def compile_graph(graph: fx.GraphModule, _: object) -> Any:
        return make_boxed_func(graph.forward)

    backend: Any = aot_autograd(fw_compiler=compile_graph, bw_compiler=compile_graph, partition_fn=partition)
    return backend(gm, example_inputs)


def train_one_step(**how: Any) -> None:
    torch.manual_seed(0)
    model = GPT(CONFIG)
    optimizer = autohete_fx.AdamW(model.parameters())
    model.compile(**how)
    tokens = torch.randint(CONFIG.vocab_size, (4, CONFIG.context))
    loss = model(tokens, tokens)
    loss.backward()
    optimizer.step()
    print(f"  loss {loss.item():.3f}")


print("your passes in our backend")
options = {
    "memory_budget": "40MiB",
    "profile": "analytic",
    "inner_backend": "eager",
    "passes": {"forward": count_copies, "backward": count_copies},
}
train_one_step(backend="autohete", options=options)

print("your pass in Inductor's hook, ours behind it")
with inductor_config.patch(post_grad_custom_post_pass=CountOps()):
    train_one_step(backend="autohete", options={**options, "inner_backend": "inductor"})

print("one of our passes in your backend")
train_one_step(backend=recomputing)
