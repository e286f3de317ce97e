"""Run your own FX passes beside ours: count the copies that the backend inserted, on both rewritten graphs.

python examples/compose_passes.py
"""

import torch
from gpt import GPT, GPTConfig
from torch import fx

import autohete_fx
from autohete_fx import ops
from autohete_fx.passes import PassContext


def count_copies(gm: fx.GraphModule, context: PassContext) -> fx.GraphModule:
    """A pass gets the graph and the context (stage, plan), and returns the graph."""
    issued = [node for node in gm.graph.nodes if node.target in ops.ISSUING_OPS]
    print(f"{context.stage.value}: {len(issued)} copies in {len(gm.graph.nodes)} nodes")
    return gm


config = GPTConfig(layers=4)
model = GPT(config)
optimizer = autohete_fx.AdamW(model.parameters())
options = {
    "memory_budget": "70MiB",
    "profile": "analytic",
    "inner_backend": "eager",
    "passes": {"forward": count_copies, "backward": count_copies},
}
model.compile(backend="autohete", options=options)
tokens = torch.randint(config.vocab_size, (4, config.context))
loss = model(tokens, tokens)
loss.backward()
optimizer.step()
print(f"loss {loss.item():.3f}")
