"""place_param: exact, idempotent, and invisible to everything but speed."""

import copy
import gc
import pickle
import weakref
from pathlib import Path

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn import Parameter

from autohete_fx.errors import HostMemoryError
from autohete_fx.ir import Optimizer, Params
from autohete_fx.runtime.placement import Placement, place_param, placement_of
from autohete_fx.runtime.tiers.host import HostTier, is_home, open_tier


@pytest.fixture
def tier(tmp_path: Path) -> HostTier:
    return open_tier("cpu", str(tmp_path))


def host(tier: HostTier, params: Params = Params.HOST) -> Placement:
    return Placement(params=params, optimizer=Optimizer.DEVICE, tier=tier, block=0)


def test_there_and_back(tier: HostTier) -> None:
    p = Parameter(torch.randn(8, 6).t())
    value, stride, version = p.detach().clone(), p.stride(), p._version
    place_param(p, host(tier))
    assert tier.owns(p) and torch.equal(p, value) and p.stride() == stride and isinstance(p, Parameter)
    assert placement_of(p) == host(tier) and p._version == version
    address = p.data_ptr()
    place_param(p, host(tier))
    assert p.data_ptr() == address, "already there"
    place_param(p, host(tier, Params.DEVICE))
    assert not is_home(p) and torch.equal(p, value) and p.stride() == stride
    assert tier.in_use_bytes == 0
    address = p.data_ptr()
    place_param(p, host(tier, Params.DEVICE))
    assert p.data_ptr() == address


def test_from_one_tier_to_another(tier: HostTier, tmp_path: Path) -> None:
    p = Parameter(torch.randn(8))
    value = p.detach().clone()
    place_param(p, host(tier))
    other = open_tier("cpu", str(tmp_path))
    place_param(p, host(other))
    assert other.owns(p) and not tier.owns(p) and torch.equal(p, value)
    other.close()
    place_param(p, host(tier, Params.DEVICE))
    assert not is_home(p) and torch.equal(p, value)


def test_nothing_is_stored_on_the_parameter(tier: HostTier) -> None:
    p = Parameter(torch.randn(3))
    before = dict(p.__dict__)
    place_param(p, host(tier))
    assert p.__dict__ == before
    for twin in (copy.deepcopy(p), pickle.loads(pickle.dumps(p))):
        assert placement_of(twin) is None and not is_home(twin) and torch.equal(twin, p)


def test_the_record_keeps_neither_parameter_nor_tier(tmp_path: Path) -> None:
    tier = open_tier("cpu", str(tmp_path))
    p = Parameter(torch.randn(3))
    place_param(p, host(tier))
    gone = weakref.ref(p), weakref.ref(tier)
    del p, tier
    gc.collect()
    assert gone[0]() is None and gone[1]() is None


def test_gradients_flow_before_and_after(tier: HostTier) -> None:
    p = Parameter(torch.randn(4))
    (p * 2).sum().backward()
    grad = p.grad
    place_param(p, host(tier))
    assert p.grad is grad, "the gradient stays"
    (p * 3).sum().backward()
    assert p.grad is not None and torch.equal(p.grad, torch.full((4,), 5.0))


def test_no_room_leaves_everything_as_it_was(tmp_path: Path) -> None:
    tier = open_tier("cpu", str(tmp_path), 1 << 20)
    p = Parameter(torch.randn(1 << 19))
    value = p.detach().clone()
    with pytest.raises(HostMemoryError):
        place_param(p, host(tier))
    assert placement_of(p) is None and not is_home(p) and torch.equal(p, value)


def test_in_the_middle_of_tracing_and_of_inference(tier: HostTier) -> None:
    for mode in (FakeTensorMode(), torch.inference_mode()):
        for where in Params:
            p = Parameter(torch.randn(4))
            if where is Params.DEVICE:
                place_param(p, host(tier))
            value = p.detach().clone()
            with mode:
                place_param(p, host(tier, where))
            assert torch.equal(p, value) and not p.is_inference()
            (p * p).sum().backward()
            assert p.grad is not None
