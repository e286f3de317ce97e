"""Sharded models in other use than plain training: 16 bit, evaluation between steps, graph breaks, text generation, ranks that end."""

import datetime
import os
import signal
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

import autohete_fx
from autohete_fx import Activations, BlockDecision, Optimizer, Params, Plan
from autohete_fx.ir import Overlap, Schedule
from tests.dist import ranks
from tests.dist.sharded import VOCABULARY, WIDTH, Net, alone, differences, make, mesh, refusal, together, tokens
from tests.dist.test_shard_plans import BLOCKS, backend, furthest, ours

HOST = [
    BlockDecision(optimizer=Optimizer.HOST),
    BlockDecision(optimizer=Optimizer.HOST, params=Params.HOST, activations=Activations.RECOMPUTE),
]


def in_16_bits() -> dict[str, float]:
    """How far parameters in bf16, which have masters in fp32, are from those of one process, by name."""
    how: dict[str, Any] = {"layers": 2, "steps": 2, "dtype": torch.bfloat16}
    return differences(together(ours, compiled=backend("mixed"), **how), alone(ours, **how))


def test_parameters_in_16_bits_are_those_of_one_process(tmp_path: Path):
    assert ranks.run("tests.dist.test_shard_uses.in_16_bits", tmp_path) == [{}, {}]


def evaluated() -> list[float]:
    """Losses without gradients before, between and after steps of training, of one process and of a sharded model."""
    found = []
    for is_sharded in (False, True):
        torch._dynamo.reset()
        model = make(dropout=0.0)
        if is_sharded:
            model = autohete_fx.shard(model, mesh())
        optimizer = ours(model.parameters())
        model.compile(**backend("mixed") if is_sharded else {"backend": "aot_eager"})
        losses = []
        for step in range(3):
            model.eval()
            with torch.no_grad():
                losses.append(model(tokens(step, dist.get_rank())).item())
            model.train()
            for rank in [dist.get_rank()] if is_sharded else range(dist.get_world_size()):
                (model(tokens(step, rank)) / (1 if is_sharded else dist.get_world_size())).backward()
            optimizer.step()
            optimizer.zero_grad()
        found.append(losses)
    return [abs(one - other) for one, other in zip(*found, strict=True)]


def test_evaluation_between_steps_sees_the_weights_of_the_step(tmp_path: Path):
    for found in ranks.run("tests.dist.test_shard_uses.evaluated", tmp_path):
        assert max(found) < 1e-12, found


def on_a_device_with_memory_of_its_own() -> dict[str, Any]:
    """How far ranks are from one process where updates run beside the next forward, or start in backward; and how many started."""
    from autohete_fx.runtime.pending.backward import Early
    from examples.benchmarks.emulated import Emulation, Speeds

    fast = Speeds(
        forward_s=1e-3, h2d_bytes_per_s=1e9, d2h_bytes_per_s=1e9, update_params_per_s=1e9, net_bytes_per_s=1e9, num_ranks=2
    )
    started, start, found = [], Early.start, {}

    def noting(early: Early, *args: Any) -> bool:
        started.append(start(early, *args))
        return started[-1]

    for overlap in ("step", "backward"):
        for how in ({}, {"micro": 2}, {"clip": 0.3}):
            clip = how.get("clip")

            def optimizer(params: Any, overlap: str = overlap, clip: Any = clip) -> torch.optim.Optimizer:
                return autohete_fx.AdamW(params, lr=1e-2, overlap=overlap, max_grad_norm=clip)

            expected = alone(ours, layers=2, steps=3, **how)
            started.clear()
            with Emulation(fast).running() as emulation, mock.patch.object(Early, "start", noting):
                schedule = Schedule(overlap=Overlap(overlap))
                plan = Plan(labels=BLOCKS, decisions=tuple(HOST[at % 2] for at in range(4)), schedule=schedule)
                micro = {"micro": how.get("micro", 1)}
                options = {**emulation.options, "plan": plan, "micro_batches": micro["micro"]}
                given = together(optimizer, compiled={"backend": "autohete", "options": options}, layers=2, steps=3, **micro)
            name = " ".join([overlap, *how])
            found[name] = [furthest(given, expected), sum(started)]
    return found


def test_updates_overlap_on_ranks_as_on_one(tmp_path: Path):
    for found in ranks.run("tests.dist.test_shard_uses.on_a_device_with_memory_of_its_own", tmp_path):
        assert found["step"][0] == found["backward"][0] == 0.0, found
        assert max(apart for apart, _ in found.values()) < 1e-12, found
        assert [name for name, (_, count) in found.items() if count] == ["backward", "backward micro"], found


class Broken(Net):
    """Its layers are compiled in two graphs."""

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.layers[0](self.embedding(tokens))
        torch._dynamo.graph_break()
        x = self.layers[1](x)
        x = self.frozen(x) * self.scale + x @ self.row.view(WIDTH, WIDTH)
        return F.cross_entropy(self.head(x).flatten(0, 1), tokens.roll(1, 1).flatten())


def broken() -> float:
    def in_two(model: nn.Module) -> None:
        model.__class__ = type("Broken", (type(model),), {"forward": Broken.forward})

    expected = alone(ours, layers=2, steps=2)
    return furthest(together(ours, compiled=backend(), prepare=in_two, layers=2, steps=2), expected)


def test_a_model_in_two_graphs_is_within_rounding(tmp_path: Path):
    # The gradient of tied embeddings is averaged in each graph by itself, and then added.
    assert max(ranks.run("tests.dist.test_shard_uses.broken", tmp_path)) < 1e-13


def generated() -> list[list[int]]:
    """Tokens that a model of transformers writes, whole and sharded."""
    from transformers import LlamaConfig, LlamaForCausalLM

    sizes = {"hidden_size": 128, "intermediate_size": 256, "num_attention_heads": 4, "num_key_value_heads": 2}
    torch.manual_seed(0)
    model = LlamaForCausalLM(LlamaConfig(vocab_size=VOCABULARY, num_hidden_layers=2, **sizes)).eval()
    prompt, how = tokens(0, 0, batch=1, length=8), {"max_new_tokens": 6, "do_sample": False, "pad_token_id": 0}
    found = [model.generate(prompt, **how)[0].tolist()]
    model = autohete_fx.shard(model, mesh())
    model.compile(**backend())
    found.append(model.generate(prompt, **how)[0].tolist())
    return found


def test_a_sharded_model_writes_the_same_text(tmp_path: Path):
    first, second = ranks.run("tests.dist.test_shard_uses.generated", tmp_path)
    assert first == second and first[0] == first[1]


def killed() -> str:
    """What a rank is told when the other one has been killed in the middle of training."""
    model = autohete_fx.shard(make(), mesh())
    optimizer = ours(model.parameters())
    model.compile(**backend("keep"))
    for step in range(2):
        model(tokens(step, dist.get_rank())).backward()
        optimizer.step()
        optimizer.zero_grad()
    if dist.get_rank() == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    told = refusal(lambda: model(tokens(2, 0)).backward())
    print(f'"{told.splitlines()[0]}"', flush=True)
    os._exit(0)  # the group cannot be taken down in order


def test_a_rank_learns_that_another_one_was_killed(tmp_path: Path):
    told = ranks.run("tests.dist.test_shard_uses.killed", tmp_path, survivors=[0])
    assert told[0].startswith("ShardError: a collective over the ranks that hold the model failed"), told


def recompiling_alone() -> str:
    """What ranks are told of which one compiles, for another batch, what the others have compiled."""
    group = dist.new_group(timeout=datetime.timedelta(seconds=15))
    model = autohete_fx.shard(make(), DeviceMesh.from_group(group, "cpu"))
    model.compile(**backend("keep"), dynamic=False)
    model(tokens(0, dist.get_rank())).backward()
    batch = 4 + dist.get_rank()
    told = refusal(lambda: model(tokens(1, dist.get_rank(), batch=batch)).backward())
    print(f'"{told.splitlines()[0]}"', flush=True)
    os._exit(0)


def test_ranks_of_which_one_compiles_again_do_not_wait_for_ever(tmp_path: Path):
    others, alone_ = ranks.run("tests.dist.test_shard_uses.recompiling_alone", tmp_path)
    assert others.startswith("ShardError: a collective over the ranks that hold the model failed"), others
    assert alone_.startswith("ShardError: a rank that compiles got no answer from the others about the"), alone_
