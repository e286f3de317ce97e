"""Sharded models in other use than plain training: 16 bit, evaluation between steps, graph breaks, text generation."""

import contextlib
import copy
import functools
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

import autohete_fx
from autohete_fx import Activations, BlockDecision, Optimizer, Params, Plan
from autohete_fx.ir import Overlap, Schedule
from tests.dist import ranks
from tests.dist.sharded import (
    FAST,
    VOCABULARY,
    WIDTH,
    Net,
    alone,
    differences,
    make,
    mesh,
    refusal,
    together,
    tokens,
    whole,
)
from tests.dist.test_shard_plans import BLOCKS, backend, furthest, ours, sgd

HOST = [
    BlockDecision(optimizer=Optimizer.HOST),
    BlockDecision(optimizer=Optimizer.HOST, params=Params.HOST, activations=Activations.RECOMPUTE),
]


pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def of_two(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[Any]]:
    functions = [
        in_16_bits,
        evaluated,
        broken,
        lengths,
        two_models,
        going_apart,
        on_a_device_with_memory_of_its_own,
        begun_before,
        buffers_that_are_views,
        kept_by_one,
    ]
    return ranks.run_each(functions, tmp_path_factory.mktemp("ranks"))


@pytest.fixture(scope="module")
def of_two_more(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[Any]]:
    """Of what is thorough."""
    return ranks.run_each([generated], tmp_path_factory.mktemp("ranks"))


def in_16_bits() -> dict[str, float]:
    """How far parameters in bf16, which have masters in fp32, are from those of one process, by name."""
    how: dict[str, Any] = {"layers": 2, "steps": 2, "dtype": torch.bfloat16}
    expected = alone(ours, backend="aot_eager", **how)  # the factor of eager dropout has 16 bits, too
    return differences(together(ours, compiled=backend("mixed"), **how), expected)


def test_parameters_in_16_bits_are_those_of_one_process(of_two: dict[str, list[Any]]):
    assert of_two["in_16_bits"] == [{}, {}]


def evaluated() -> list[float]:
    """Losses without gradients before, between and after steps of training, of one process and of a sharded model; the last by the
    first rank alone, while the others wait within ``gathered``."""
    found = []
    for is_sharded in (False, True):
        torch._dynamo.reset()
        model = make(dropout=0.0)
        if is_sharded:
            model = autohete_fx.shard(model, mesh())
        optimizer = ours(model.parameters())
        if is_sharded:
            model.compile(**backend("mixed"))
        losses = []
        for step in range(3):
            model.eval()
            with torch.no_grad() if step % 2 else torch.inference_mode():
                losses.append(model(tokens(step, dist.get_rank())).item())
            model.train()
            for rank in [dist.get_rank()] if is_sharded else range(dist.get_world_size()):
                (model(tokens(step, rank)) / (1 if is_sharded else dist.get_world_size())).backward()
            optimizer.step()
            optimizer.zero_grad()
        with autohete_fx.gathered(model) if is_sharded else contextlib.nullcontext(), torch.no_grad():
            losses.append(model.eval()(tokens(9, 0)).item() if dist.get_rank() == 0 else 0.0)
        found.append(losses)
    return [abs(one - other) for one, other in zip(*found, strict=True)]


def test_evaluation_between_steps_sees_the_weights_of_the_step(of_two: dict[str, list[Any]]):
    for found in of_two["evaluated"]:
        assert max(found) < 1e-12, found


def on_a_device_with_memory_of_its_own() -> dict[str, Any]:
    """How far ranks are from one process where updates run beside the next forward, or start in backward; and how many started."""
    from autohete_fx.runtime.pending.backward import Early
    from examples.benchmarks.emulated import Emulation, Speeds

    fast = Speeds(**FAST)
    started, start, found = [], Early.start, {}

    def noting(early: Early, *args: Any) -> bool:
        started.append(start(early, *args))
        return started[-1]

    for overlap in ("step", "backward"):
        # Clipping keeps updates from starting in backward, micro-batches do not: there each has a run of its own.
        for how in ({}, {"micro": 2}, {"clip": 0.3}) if overlap == "backward" else ({"micro": 2, "clip": 0.3},):
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
                given = together(
                    optimizer, compiled={"backend": "autohete", "options": options}, layers=2, steps=3, **micro
                )
            name = " ".join([overlap, *how])
            found[name] = [furthest(given, expected), sum(started)]
    return found


def test_updates_overlap_on_ranks_as_on_one(of_two: dict[str, list[Any]]):
    for found in of_two["on_a_device_with_memory_of_its_own"]:
        assert found["backward"][0] == 0.0, found
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


def test_a_model_in_two_graphs_is_within_rounding(of_two: dict[str, list[Any]]):
    # The gradient of tied embeddings is averaged in each graph by itself, and then added.
    assert max(of_two["broken"]) < 1e-13


def generated() -> list[list[int]]:
    """Tokens that a model of transformers writes, whole and sharded."""
    from transformers import LlamaConfig, LlamaForCausalLM

    sizes = {"hidden_size": 128, "intermediate_size": 256, "num_attention_heads": 4, "num_key_value_heads": 2}
    torch.manual_seed(0)
    model = LlamaForCausalLM(LlamaConfig(vocab_size=VOCABULARY, num_hidden_layers=1, **sizes)).eval()
    prompt, how = tokens(0, 0, batch=1, length=8), {"max_new_tokens": 4, "do_sample": False, "pad_token_id": 0}
    found = [model.generate(prompt, **how)[0].tolist()]
    model = autohete_fx.shard(model, mesh())
    model.compile(**backend())
    found.append(model.generate(prompt, **how)[0].tolist())
    return found


@pytest.mark.thorough
def test_a_sharded_model_writes_the_same_text(of_two_more: dict[str, list[Any]]):
    first, second = of_two_more["generated"]
    assert first == second and first[0] == first[1]


def lengths() -> list[float]:
    """How far ranks whose sequences are of other lengths in each step are from one process that has all of them."""
    how: dict[str, Any] = {
        "layers": 1,
        "steps": 3,
        "dropout": 0.0,
        "length_of": lambda step, rank: 16 + 8 * step + 3 * rank,
    }
    compiled = {**backend(), "dynamic": True}
    return [furthest(together(sgd, compiled=compiled, **how), alone(sgd, **how))]


def test_ranks_may_have_sequences_of_other_lengths(of_two: dict[str, list[Any]]):
    assert max(found for [found] in of_two["lengths"]) < 1e-13


def two_models() -> bool:
    """Whether two models of one process, trained in turns and each through the other's backward, are as two that are not
    sharded."""
    trained = []
    for is_sharded in (False, True):
        torch._dynamo.reset()
        models = [make(dropout=0.0, layers=1, seed=seed) for seed in (1, 2)]
        if is_sharded:
            models = [autohete_fx.shard(model, mesh()) for model in models]
        optimizers = [ours(model.parameters()) for model in models]
        for model in models if is_sharded else ():
            model.compile(**backend(""))
        for step in range(2):
            first, second = (model(tokens(step, 0)) for model in models)  # the same on all ranks
            second.backward()
            optimizers[1].step()
            first.backward()
            optimizers[0].step()
            for optimizer in optimizers:
                optimizer.zero_grad()
        trained.append([whole(p, p) if is_sharded else p.detach() for model in models for p in model.parameters()])
    return all(map(torch.equal, *trained))


def test_two_sharded_models_of_one_process_do_not_meet(of_two: dict[str, list[Any]]):
    assert of_two["two_models"] == [True, True]


def going_apart() -> list[str]:
    """What each rank is told where one evaluates while the other trains, where they have batches of different sizes, and where they
    run one each of two models that are made alike. They have compiled all of it, and train alike in between."""
    rank, found = dist.get_rank(), []
    twins = [autohete_fx.shard(make(layers=1), mesh()) for _ in range(2)]
    for model in twins:
        model.compile(**backend(), dynamic=False)

    def forward(twin: int = 0, *, trains: bool = True, batch: int = 4) -> None:
        with torch.set_grad_enabled(trains):
            loss = twins[twin](tokens(0, rank, batch=batch))
        if trains:
            loss.backward()

    for how in ({}, {"trains": False}, {"batch": 6}, {"twin": 1}):
        forward(**how)
    for how in ({"trains": rank == 1}, {"batch": 4 + 2 * rank}, {"twin": rank}):
        found.append(refusal(functools.partial(forward, **how)))
        forward()
    return found


def test_ranks_that_run_different_graphs_at_a_time_are_told(of_two: dict[str, Any]):
    told = "ShardError: ranks that hold a model ran different graphs of it at a time: here"
    for (apart, uneven, twins), (kind, batch) in zip(
        of_two["going_apart"], (("evaluation", 4), ("training", 6)), strict=True
    ):
        assert apart.startswith(f"{told} {kind} of inputs of sizes [(4, ")
        assert uneven.startswith(f"{told} training of inputs of sizes [({batch}, ")
        assert twins.startswith(f"{told} training of inputs of sizes [(4, ")


class Pair(nn.Module):
    """Two matrices that become shards."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList(nn.Linear(128, 128).double() for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = torch.tanh(layer(x))
        return x.square().mean()


def begun_before() -> dict[str, float]:
    """How far training is from that of one process, which has begun it: its states are loaded into an optimizer before the model is
    sharded, or after, by ours and by PyTorch's."""
    x, found = torch.randn(4, 128, dtype=torch.float64, generator=torch.Generator().manual_seed(1)), {}
    for kind in (autohete_fx.AdamW, torch.optim.AdamW):
        plain = Pair()
        theirs = torch.optim.AdamW(plain.parameters(), lr=1e-2, fused=True)
        plain(x).backward()
        theirs.step()
        theirs.zero_grad()
        saved = copy.deepcopy((plain.state_dict(), theirs.state_dict()))
        plain(x).backward()
        theirs.step()
        for is_before in (True, False):
            torch._dynamo.reset()
            model = Pair()
            if not is_before:
                autohete_fx.shard(model, mesh())
            model.load_state_dict(saved[0])
            optimizer = kind(model.parameters(), lr=1e-2)
            optimizer.load_state_dict(copy.deepcopy(saved[1]))
            if is_before:
                autohete_fx.shard(model, mesh())
            model.compile(backend="autohete", options={"inner_backend": "eager", "profile": "analytic"})
            model(x).backward()
            optimizer.step()
            held: dict[str, Any] = model.state_dict()
            weights = {
                name: value.full_tensor() if isinstance(value, DTensor) else value for name, value in held.items()
            }
            apart = max(float((weights[name] - p).abs().max()) for name, p in plain.named_parameters())
            found[f"{kind.__module__} {is_before}"] = apart
    return found


def test_states_of_whole_parameters_become_those_of_shards_whenever_they_came(of_two: dict[str, list[Any]]):
    for found in of_two["begun_before"]:
        assert len(found) == 4 and max(found.values()) < 1e-12, found


def buffers_that_are_views() -> list[list[float]]:
    """Buffers of this rank and the memory around them, after it got those of the first one."""
    base = torch.arange(24.0).view(4, 6) + 100 * dist.get_rank()
    model = Pair()
    model.register_buffer("columns", base[:, ::2])
    model.register_buffer("expanded", (torch.zeros(1, 64) + dist.get_rank()).expand(512, 64))
    autohete_fx.shard(model, mesh())
    return [base.flatten().tolist(), model.get_buffer("expanded").unique().tolist()]


def test_a_buffer_that_is_a_view_gets_its_elements_and_no_others(of_two: dict[str, list[Any]]):
    first, second = of_two["buffers_that_are_views"]
    assert first == [[float(at) for at in range(24)], [0.0]]
    assert second == [[at if at % 2 == 0 else at + 100.0 for at in range(24)], [0.0]]


def kept_by_one() -> dict[str, Any]:
    """The first rank keeps losses of forwards without a backward, within a budget. Plans, and how far all is from one process."""
    rank, before, kept = dist.get_rank(), len(autohete_fx.compilations()), list[Tensor]()
    expected, model = make(dropout=0.0), autohete_fx.shard(make(dropout=0.0), mesh())
    model.compile(**backend("", memory_budget="20MiB"))
    optimizer, plain = ours(model.parameters()), torch.optim.AdamW(expected.parameters(), lr=1e-2, fused=True)
    for step in range(4):
        seen = model(tokens(100 + step, rank))
        kept += [seen] if rank == 0 else []
        del seen
        model(tokens(step, rank)).backward()
        (sum(expected(tokens(step, each)) for each in range(2)) / 2).backward()
        for each in (optimizer, plain):
            each.step()
            each.zero_grad()
    apart = [
        (whole(p, p) - q).abs().max().item() for p, q in zip(model.parameters(), expected.parameters(), strict=True)
    ]
    return {"plans": len(autohete_fx.compilations()) - before, "apart": max(apart)}


def test_ranks_plan_again_together_for_what_one_of_them_has_seen(of_two: dict[str, list[Any]]):
    first, second = of_two["kept_by_one"]
    assert first["plans"] == second["plans"] > 1
    assert max(first["apart"], second["apart"]) < 1e-12
