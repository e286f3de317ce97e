"""Models that are divided at marks of `torch.distributed.pipelining`: their stages, and what cannot be divided."""

import copy
import itertools
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
import transformers as hf
from torch import Tensor, nn
from torch.distributed.pipelining import SplitPoint, pipe_split

from autohete_fx.cluster import deploy
from autohete_fx.cluster.measuring.costs import kinds_of
from autohete_fx.cluster.model.batches import Batch, batch_of, call
from autohete_fx.cluster.model.layers import LayerMap, map_layers
from autohete_fx.cluster.model.marks import with_marks
from autohete_fx.cluster.model.tensor_parallel import layout_of
from autohete_fx.cluster.stages.stage import build_stage
from autohete_fx.errors import ClusterError
from autohete_fx.internals.modes import CopiedFakeTensorMode
from tests.branched import UNet, split_spec
from tests.dist.cluster_jobs import plan_of

SEED, WIDTH = 11, 8


def t5() -> nn.Module:
    sizes: dict[str, Any] = {
        "d_model": 16,
        "d_kv": 4,
        "d_ff": 24,
        "num_layers": 1,
        "num_decoder_layers": 2,
        "num_heads": 2,
    }
    config = hf.T5Config(vocab_size=32, dropout_rate=0.0, **sizes)
    config.decoder_start_token_id = 0
    return hf.T5ForConditionalGeneration(config)


def loss_of(out: Any, batch: Any) -> Tensor:
    if isinstance(batch, dict):
        return F.cross_entropy(out.logits.flatten(0, 1), batch["labels"].flatten())
    return (out["out"] * torch.linspace(0.5, 1.5, WIDTH)).square().mean()


def stages_of(build: Callable[[], nn.Module], layer_map: LayerMap, cuts: list[int]) -> list[Any]:
    ends = [0, *cuts, layer_map.num_layers]
    made = (range(*both) for both in itertools.pairwise(ends))
    return [
        build_stage(
            build, layer_map, layers, loss=loss_of, share=1.0, device=torch.device("cpu"), seed=SEED, recomputed=at % 2
        )
        for at, layers in enumerate(made)
    ]


def check(build: Callable[[], nn.Module], batch: Batch, cuts: list[int]) -> LayerMap:
    """Stages after one another have the loss and the gradients of the whole model."""
    layer_map = map_layers(build, batch)
    torch.manual_seed(SEED)
    whole = build().train()
    expected = loss_of(call(whole, batch), batch.original())
    expected.backward()
    stages = stages_of(build, layer_map, cuts)
    received: tuple[Tensor, ...] = ()
    passed = []
    for stage, stop in zip(stages, [*cuts, None], strict=True):
        stage.reads(batch)
        out = stage.passing_on(stage)(*received, **{f"batch_{name}": tensor for name, tensor in batch.tensors.items()})
        passed.append((out, received))
        if stop is not None:
            pairs = list(zip(out, layer_map.crossing[stop], strict=True))
            assert [tuple(tensor.shape) for tensor, _ in pairs] == [shape.sizes for _, shape in pairs]
            received = tuple(tensor.detach().requires_grad_(shape.requires_grad) for tensor, shape in pairs)
    assert torch.equal(passed[-1][0], expected)
    grads: tuple[Tensor | None, ...] = (None,)
    for out, read in reversed(passed):
        outs = out if isinstance(out, tuple) else (out,)
        some = [(tensor, grad) for tensor, grad in zip(outs, grads, strict=True) if tensor.requires_grad]
        torch.autograd.backward([tensor for tensor, _ in some], [grad for _, grad in some])
        grads = tuple(tensor.grad for tensor in read)
    for name, param in whole.named_parameters():
        parts = [
            held.grad for stage in stages if (held := stage.named().get(name)) is not None and held.grad is not None
        ]
        assert bool(parts) == (param.grad is not None), name
        assert param.grad is None or torch.allclose(torch.stack(parts).sum(0), param.grad, 0, 1e-14), name
    return layer_map


@pytest.fixture(autouse=True)
def fp64():
    torch.set_default_dtype(torch.float64)
    yield
    torch.set_default_dtype(torch.float32)


@pytest.mark.parametrize("cuts", [[2, 4], pytest.param([1, 2, 3, 4], marks=pytest.mark.slow)])
def test_stages_of_a_u_net_have_its_loss_and_its_gradients(cuts: list[int]):
    batch = batch_of((torch.randn(3, WIDTH), torch.tensor([[1], [0], [1]])))
    layer_map = check(with_marks(UNet, split_spec()), batch, cuts)
    integers = [sum(shape.dtype is torch.int64 for shape in shapes) for shapes in layer_map.crossing]
    assert [len(shapes) for shapes in layer_map.crossing] == [0, 2, 3, 3, 2] and integers == [0, 1, 1, 1, 1]
    assert layer_map.readers["middle.weight"] == {2, 4} and layer_map.readers["unread"] == set()


@pytest.mark.slow
def test_stages_of_an_encoder_and_decoder_have_its_loss_and_its_gradients():
    """Each layer of the decoder reads the encoder's last hidden state."""
    ids = torch.randint(1, 32, (2, 5))
    batch = batch_of({"input_ids": ids, "attention_mask": (ids > 3).long(), "labels": ids[:, :4].clone()})
    blocks = ["decoder.block.0", "decoder.block.1"]
    layer_map = check(with_marks(t5, dict.fromkeys(blocks, SplitPoint.BEGINNING)), batch, [2])
    assert layer_map.sample_tokens == 5


class Marked(nn.Module):
    """Marks stand between operators, and two sections are alike. A weight is read on both sides of all marks."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(WIDTH, WIDTH))
        self.first, self.second = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        pipe_split()
        x = torch.relu(x @ self.weight)
        pipe_split()
        x = self.first(x)
        pipe_split()
        pipe_split()
        x = self.second(x)
        pipe_split()
        x = (x @ self.weight.T, x)[0]
        pipe_split()
        return {"out": x}


def test_marks_in_the_forward_pass_divide_what_stands_between_them():
    layer_map = check(Marked, batch_of(torch.randn(2, WIDTH)), [1, 3])
    assert kinds_of(Marked, layer_map) == ("first", "layer", "layer", "last")
    assert layer_map.readers["weight"] == {0, 3}


class InPlace(Marked):
    """A view of what the first section made is changed in the last one."""

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        pipe_split()
        x[:, :2].mul_(2.0)
        return x


class InBatch(Marked):
    def forward(self, x: Tensor) -> Tensor:
        x.add_(self.weight[0])
        pipe_split()
        return self.first(x)


class Apart(Marked):
    """Nothing of the first section is read in the second one."""

    def forward(self, x: Tensor) -> Tensor:
        self.first(x)
        pipe_split()
        return self.second(x)


class Hidden(Marked):
    """The output is an object that says nothing of its tensors."""

    def forward(self, x: Tensor) -> object:
        x = self.first(x)
        pipe_split()
        return SimpleNamespace(out=self.second(x))


@pytest.mark.parametrize(
    ("build", "words"),
    [
        (InPlace, "in place, a tensor of another side of a mark"),
        (InBatch, "in place, a tensor the batch's"),
        (Apart, "divide nothing that its output reads"),
        (Hidden, "register the output's class"),
        (with_marks(Marked, {"middle": SplitPoint.END}), "has no such module"),
        (with_marks(nn.ReLU, {"": SplitPoint.BEGINNING}), "divide nothing"),
    ],
)
def test_marks_that_divide_nothing_are_told(build: Callable[[], nn.Module], words: str):
    with pytest.raises(ClusterError, match=words):
        map_layers(build, batch_of(torch.zeros(2, WIDTH)))


@pytest.mark.slow
def test_stages_between_marks_have_one_gpu_and_points_are_of_pytorch(monkeypatch: pytest.MonkeyPatch):
    with pytest.raises(ClusterError, match=r"Give SplitPoint.BEGINNING"):
        with_marks(Marked, {"first": "beginning"})  # pyright: ignore[reportArgumentType]
    layer_map = map_layers(with_marks(UNet, split_spec()), batch_of((torch.zeros(2, WIDTH), torch.zeros(2, 1))))
    with pytest.raises(ClusterError, match="Expected was one GPU a stage"):
        layout_of(UNet, layer_map, {1, 2}, {"middle": "colwise"})
    monkeypatch.setattr(deploy, "CROSS_WITHOUT_GRADIENT", False)
    with pytest.raises(ClusterError, match=r"hands on a tensor of torch.int64"):
        deploy.check_runs(plan_of([(1, 2, [2, 4])]), layer_map, "UNet", samples=2, is_compiled=True)


def test_fake_tensors_that_pytorch_copies_keep_their_mode():
    """Two modes would free the weak references of one twice. A parameter that two sections read is copied."""
    with CopiedFakeTensorMode() as mode:
        fake = nn.Parameter(torch.empty(2))
        assert copy.deepcopy(fake).fake_mode is mode  # pyright: ignore[reportAttributeAccessIssue]
