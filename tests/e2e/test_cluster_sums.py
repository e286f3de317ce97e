"""Sums of gradients that start within the last backward pass of a compiled stage, over ranks that are not there."""

import copy
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

import autohete_fx
from autohete_fx.cluster.job import sums
from autohete_fx.cluster.job.sums import GradientSums, sum_groups
from autohete_fx.cluster.model.batches import batch_of
from autohete_fx.cluster.model.layers import map_layers
from autohete_fx.cluster.model.pieces import Piece
from autohete_fx.compiler.agreement import Agreement
from autohete_fx.internals.fake_group import fake_default_group
from autohete_fx.runtime.announced import listen
from autohete_fx.runtime.meter import device_live_bytes
from tests.layers import EAGER
from tests.tiny_models import GPT, VOCAB, Wrapped

DEPTH = 3


def build() -> GPT:
    return GPT(DEPTH, tied=True)


class Broken(nn.Module):
    """The model with a graph break, on both sides of which one bias of the first layer is read."""

    def __init__(self, inner: GPT) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, ids: Tensor) -> Tensor:
        x = self.inner.embed(ids) + self.inner.get_parameter("layers.0.norm1.bias")
        torch._dynamo.graph_break()
        for layer in self.inner.layers:
            x = layer(x)
        return self.inner.head(self.inner.norm(x))


class Products(TorchDispatchMode):
    """Notes matrix products; several in a row are one."""

    def __init__(self, seen: list[str]) -> None:
        super().__init__()
        self._seen = seen

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if "mm" in func.name() and self._seen[-1:] != ["products"]:
            self._seen.append("products")
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize(
    ("wrap", "micro_batches", "blocks"),
    # The sums of each block: norm, layers, and with the first of these the embedding, which is the head, too. Where a bias of the
    # first layer is read elsewhere, four gradients come before that one in the order of sums.
    [pytest.param(None, 1, [2, 12, 12, 12 + 1], marks=pytest.mark.slow), (Broken, 2, [2, 12, 12, 4])],
    ids=["alone", "broken"],
)
def test_sums_of_a_compiled_stage_start_within_its_last_backward(
    wrap: Callable[[GPT], nn.Module] | None,
    micro_batches: int,
    blocks: list[int],
    monkeypatch: pytest.MonkeyPatch,
):
    monkeypatch.setattr(sums, "BUCKET_BYTES", 1)  # each parameter alone
    torch.manual_seed(0)
    model = build()
    for module in model.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.0
    layer_map, params = map_layers(build, batch_of(torch.zeros(1, 4, dtype=torch.long))), dict(model.named_parameters())
    seen: list[str] = []
    with fake_default_group(2):
        pieces = {name: Piece(name) for name in params}
        owners = dict.fromkeys(pieces.values(), (0, 1))
        found = GradientSums(owners, sum_groups(owners), layer_map, params, pieces)
        found.overlap(params)
        summed = sums.dist.all_reduce
        monkeypatch.setattr(sums.dist, "all_reduce", lambda *a, **k: (seen.append("sum"), summed(*a, **k))[1])
        options = {"inner_backend": "eager", "micro_batches": micro_batches, "profile": "analytic"}
        compiled = torch.compile(wrap(model) if wrap else model, backend="autohete", options=options)
        results: list[dict[str, Tensor]] = []
        for is_early in (False, True, False, True):
            torch.manual_seed(len(results) // 2)
            for micro_batch in range(micro_batches):
                seen.clear()
                loss = compiled(torch.randint(VOCAB, (2, 6))).float().square().mean()
                node = loss.grad_fn
                while "Compiled" not in node.name():
                    node = node.next_functions[0][0]
                node.register_hook(lambda *_: seen.append("end"))
                if is_early and micro_batch + 1 == micro_batches:
                    found.begin_last([loss])
                with Products(seen):
                    loss.backward()
            expected = (
                [each for count in blocks for each in ("products", *["sum"] * count)] if is_early else ["products"]
            )
            assert seen[: seen.index("end")] == expected
            found.reduce()
            assert seen.count("sum") == len(params)
            results.append({name: param.grad.clone() for name, param in params.items() if param.grad is not None})
            model.zero_grad()
    for late, soon in (results[:2], results[2:]):
        assert late.keys() == params.keys() == soon.keys()
        for name, grad in late.items():
            torch.testing.assert_close(soon[name], grad, rtol=0, atol=0, msg=name)


class Added(nn.Module):
    """Two weights with one gradient, which is that of the input, too."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = (nn.Parameter(torch.randn(8, 8) / 8) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        x = x + (self.first + self.second)
        return x @ x.t()


@pytest.mark.parametrize("inner", ["eager", pytest.param("inductor", marks=pytest.mark.slow)])
def test_gradients_that_are_one_tensor_are_summed_each(inner: str):
    torch.manual_seed(0)
    model = Added()
    expected, params = copy.deepcopy(model), dict(model.named_parameters())
    layer_map: Any = SimpleNamespace(readers={name: frozenset({0}) for name in params})
    with fake_default_group(2):
        pieces = {name: Piece(name) for name in params}
        owners = dict.fromkeys(pieces.values(), (0, 1))
        found = GradientSums(owners, sum_groups(owners), layer_map, params, pieces)
        found.overlap(params)
        options = {"inner_backend": inner, "micro_batches": 3, "profile": "analytic"}
        compiled = torch.compile(model, backend="autohete", options=options)
        for _ in range(2):
            xs = [torch.randn(8, 8, requires_grad=True) for _ in range(3)]
            for micro_batch, x in enumerate(xs):
                loss = compiled(x).square().mean()
                if micro_batch == 2:
                    found.begin_last([loss])
                loss.backward()
            found.reduce()
            copied = [x.detach().clone().requires_grad_() for x in xs]
            for x in copied:
                expected(x).square().mean().backward()
            for x, other in zip(xs, copied, strict=True):
                torch.testing.assert_close(x.grad, other.grad, rtol=1e-4, atol=1e-5)
            for name, param in expected.named_parameters():
                torch.testing.assert_close(params[name].grad, param.grad, rtol=1e-4, atol=1e-5, msg=name)
            model.zero_grad()
            expected.zero_grad()


@pytest.mark.parametrize("micro_batches", [pytest.param(1, marks=pytest.mark.slow), 2])
def test_buckets_and_copies_of_gradients_are_counted(micro_batches: int, monkeypatch: pytest.MonkeyPatch):
    """The measured peak is within the predicted one, and near it."""
    monkeypatch.setattr(sums, "BUCKET_BYTES", 20_000)
    foreign_bytes, model = device_live_bytes("cpu"), build()
    layer_map, params = map_layers(build, batch_of(torch.zeros(1, 4, dtype=torch.long))), dict(model.named_parameters())
    optimizer = autohete_fx.AdamW(list(params.values()), lr=0.1)
    with fake_default_group(2), autohete_fx.MemoryMeter("cpu") as meter:
        pieces = {name: Piece(name) for name in params}
        owners = dict.fromkeys(pieces.values(), (0, 1))
        found = GradientSums(owners, sum_groups(owners), layer_map, params, pieces)
        found.overlap(params)
        options = {**EAGER, "micro_batches": micro_batches, "memory_budget": "1GiB", "allow": []}
        compiled = torch.compile(Wrapped(model), backend="autohete", options=options)
        for _ in range(2):
            for micro_batch in range(micro_batches):
                loss = compiled(torch.randint(VOCAB, (2, 6)))
                if micro_batch + 1 == micro_batches:
                    found.begin_last([loss])
                loss.backward()
                del loss
            found.reduce()
            optimizer.step()
            optimizer.zero_grad()
    predicted, measured = autohete_fx.compilations()[-1].predicted_peak_bytes, meter.peak_bytes - foreign_bytes
    gradient_bytes = sum(param.nbytes for param in params.values())
    assert predicted - gradient_bytes / 2 < measured <= predicted


class Waiting:
    """Waits for gradients, and does nothing with them."""

    device_bytes = 1000

    def told(self, param: Tensor, grad: Tensor) -> None:
        pass


def test_ranks_that_share_weights_count_the_largest_of_their_buckets(monkeypatch: pytest.MonkeyPatch):
    model, waiting, peaks = nn.Linear(8, 8), Waiting(), []
    listen(model.parameters(), waiting)
    monkeypatch.setattr(Agreement, "is_shared", True)
    for more in (0, 5000):
        monkeypatch.setattr(
            Agreement, "most", lambda _, what, mine, more=more: mine + more * (what == "bytes of listeners")
        )
        torch._dynamo.reset()
        options = {**EAGER, "memory_budget": "1GiB"}
        torch.compile(model, backend="autohete", options=options)(torch.randn(2, 8)).sum().backward()
        peaks.append(autohete_fx.compilations()[-1].predicted_peak_bytes)
    assert peaks[1] - peaks[0] == 5000
