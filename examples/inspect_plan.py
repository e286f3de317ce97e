"""See what the backend would do with a model at half its memory, without training it.

python examples/inspect_plan.py
"""

import torch
from gpt import GPT, GPTConfig

import autohete_fx

config = GPTConfig(layers=4)
model = GPT(config)
optimizer = autohete_fx.AdamW(model.parameters())
tokens = torch.randint(config.vocab_size, (4, config.context))

free = autohete_fx.preview(model, tokens, tokens, options={"profile": "analytic"})[0]
half = {"memory_budget": free.predicted_peak_bytes // 2, "profile": "analytic"}
found = autohete_fx.preview(model, tokens, tokens, options=half)[0]
print(found.plan_table(), "\n")
print(found.why(), "\n")
print(found.timeline(), "\n")
print("\n".join(found.transfers_table().splitlines()[:12]), "\n")
inserted = [line for line in found.readable("backward").splitlines() if " lane " in line]
print("\n".join(inserted[:8]))
