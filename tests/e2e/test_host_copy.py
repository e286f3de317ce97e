"""On a device with memory of its own, parameters updated on the host come down only where they were edited."""

import copy
from collections.abc import Callable, Sequence

import pytest
import torch
from torch import Tensor, nn

import autohete_fx
from autohete_fx import Plan
from autohete_fx.errors import OptimizerStateError
from autohete_fx.ir import Lane
from autohete_fx.optim import in_place
from autohete_fx.runtime.placement import placement_of
from tests.held_updates import OPTIMIZER_ON_HOST, STEP, Stack, labels, updated_at_once, use_lanes, weight_of
from tests.main_job import slow

NUM_WEIGHTS, WIDTH = 4, 192


@pytest.fixture(autouse=True)
def two_memories(monkeypatch: pytest.MonkeyPatch) -> None:
    use_lanes(monkeypatch, is_host=False)


class Pair:
    """A model whose updates are on the host, and its twin that no plan has placed."""

    def __init__(self, dtype: torch.dtype, device: str = "cpu") -> None:
        self.models = [Stack(width=WIDTH).to(device, dtype) for _ in range(2)]
        self.optimizers = [autohete_fx.AdamW(model.parameters(), lr=1e-2) for model in self.models]
        if device != "cpu":
            updated_at_once(
                self.models[1], lr=1e-2
            )  # places: the kernels of an accelerator round otherwise than the CPU's
        plan = Plan(labels=labels(), decisions=(OPTIMIZER_ON_HOST,) * len(labels()), schedule=STEP)
        self.models[0].compile(
            backend="autohete", options={"inner_backend": "eager", "profile": "analytic", "plan": plan}
        )
        self.batch = torch.ones(8, WIDTH, dtype=dtype, device=device)

    def step(self) -> None:
        for model, optimizer in zip(self.models, self.optimizers, strict=True):
            model(self.batch).backward()
            optimizer.step()
            optimizer.zero_grad()

    def downloads(self) -> int:
        self.optimizers[0].synchronize()
        placement = placement_of(weight_of(self.models[0]))
        assert placement is not None and placement.updates is not None
        return sum(r.lane is Lane.D2H and r.label == "download" for r in placement.updates.lanes.records())

    def assert_equal(self) -> None:
        ours, twin = self.models
        assert all(map(torch.equal, ours.parameters(), twin.parameters()))
        states = [optimizer.state_dict()["state"] for optimizer in self.optimizers]
        torch.testing.assert_close(*states, rtol=0, atol=0)


def replaced(model: nn.Module) -> None:
    weight = weight_of(model)
    weight.data = weight.detach() * 0.5


def loaded(model: nn.Module) -> None:
    state = model.state_dict()
    state["layers.2.0.weight"] = torch.full((WIDTH, WIDTH), 0.01)
    model.load_state_dict(state)


def with_no_grad(edit: Callable[[Tensor], object]) -> Callable[[nn.Module], None]:
    def apply(model: nn.Module) -> None:
        with torch.no_grad():
            edit(weight_of(model))

    return apply


EDITS: dict[str, Callable[[nn.Module], object]] = {
    "data": lambda model: weight_of(model).data.mul_(2),
    "one element": with_no_grad(lambda weight: weight[3, 5].neg_()),
    "two rows": with_no_grad(lambda weight: weight[:2].copy_(weight[:2].flip(0))),
    "another tensor": replaced,
    "a state dict": loaded,
}


def assert_comes_down_and_counts(edit: Callable[[nn.Module], object], pair: Pair) -> None:
    for _ in range(3):
        pair.step()
    assert pair.downloads() == NUM_WEIGHTS, "before their first updates"
    for model in pair.models:
        edit(model)
    for _ in range(2):
        pair.step()
    assert pair.downloads() == NUM_WEIGHTS + 1
    pair.assert_equal()


@pytest.mark.parametrize("dtype", [torch.float32, slow(torch.bfloat16)], ids=["fp32", "bf16"])
@pytest.mark.parametrize("name", [n if n in ("data", "a state dict") else slow(n) for n in EDITS])
def test_an_edit_comes_down_and_counts(name: str, dtype: torch.dtype):
    assert_comes_down_and_counts(EDITS[name], Pair(dtype))


def test_a_failed_update_leaves_no_copy_that_is_trusted(monkeypatch: pytest.MonkeyPatch):
    pair = Pair(torch.float32)
    pair.step()
    checkpoint = copy.deepcopy([pair.models[0].state_dict(), pair.optimizers[0].state_dict()])
    before = pair.downloads()

    apply = in_place._apply_fused

    def fail(batch: Sequence[in_place.Update]) -> None:
        if batch[0].placement.tier is not None:
            raise OSError("the host is out of luck")
        apply(batch)

    with monkeypatch.context() as patch:
        patch.setattr(in_place, "_apply_fused", fail)
        pair.models[0](pair.batch).backward()
        with pytest.raises(OptimizerStateError, match="out of luck"):
            pair.optimizers[0].step()
            pair.optimizers[0].synchronize()
    pair.optimizers[0].zero_grad()
    pair.optimizers[0].load_state_dict(checkpoint[1])
    pair.models[0].load_state_dict(checkpoint[0])
    pair.step()
    assert pair.downloads() == before + NUM_WEIGHTS
    pair.assert_equal()


def test_a_copy_lives_as_long_as_it_is_of_use():
    pair = Pair(torch.float32)
    pair.step()
    placement = placement_of(weight_of(pair.models[0]))
    assert placement is not None
    pair.optimizers[0].synchronize()
    with_copies = placement.tier.in_use_bytes
    param_bytes = NUM_WEIGHTS * 4 * WIDTH**2
    assert with_copies >= 3 * param_bytes  # the moments and the copies
    pair.optimizers[0] = copy.deepcopy(pair.optimizers[0])  # whose parameters are other tensors
    assert placement.tier.in_use_bytes <= with_copies - 3 * param_bytes
