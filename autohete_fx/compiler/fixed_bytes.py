"""Device bytes that no decision changes, of which `Problem.fixed_bytes` is made up.

In: a graph's inputs and parameters, and the modules whose call is compiled. Out: bytes.
"""

from collections.abc import Collection, Iterable, Sequence

import torch

from autohete_fx.capture.inputs import GraphInput
from autohete_fx.compiler.problem import num_replicas, state_bytes
from autohete_fx.graph.sizes import num_bytes
from autohete_fx.internals import versions
from autohete_fx.internals.modes import FakeTensor
from autohete_fx.internals.tensors import local_of
from autohete_fx.ir import Optimizer
from autohete_fx.optim.owners import optimizer_of
from autohete_fx.runtime.held import whole_of
from autohete_fx.runtime.placement import is_movable, placement_of
from autohete_fx.runtime.shard.step import PIECE_BYTES
from autohete_fx.runtime.tiers.host import is_home

_COUNTER_BYTES = 4


def input_bytes(inputs: Sequence[GraphInput]) -> int:
    """Inputs and buffers: on the device, whatever is decided."""
    return sum(num_bytes(item.tensor) for item in inputs if item.tensor is not None and not item.is_parameter)


def small_bytes(params: Iterable[torch.nn.Parameter], *, training: bool, accumulates: bool) -> int:
    """Parameters that stay on the device whatever is decided, with their optimizer states and accumulated gradients. Counters of
    optimizer steps, one a parameter, are on the CPU."""
    params = list(params)
    small = [param for param in params if not is_movable(param)]
    total = sum(param.nbytes for param in small)
    if training:
        total += sum(_COUNTER_BYTES for param in params if param.requires_grad and param.device.type == "cpu")
        total += sum(state_bytes(param) for param in small)
        if accumulates:
            total += sum(param.nbytes for param in small if param.requires_grad)
    return total


def kept_bytes(params: Iterable[torch.nn.Parameter]) -> int:
    """Bytes of the optimizer states and gradients that are on the device now, whoever has put them there."""
    total = 0
    for param in params:
        owner, whole = optimizer_of(param), whole_of(param)
        key = param if whole is None else whole
        state = {} if owner is None else owner.state.get(key, {})
        total += _device_bytes((*state.values(), key.grad), param.device)
    return total


def _device_bytes(values: Iterable[object], device: torch.device) -> int:
    """Of the tensors among values: those of them, and parts of DTensors, that are on the device. Counters are not."""
    found = [t for t in values if isinstance(t, torch.Tensor) and t.layout is torch.strided and t.dim()]
    own = [local_of(t) if versions.is_dtensor(t) else t for t in found]
    return sum(t.nbytes for t in own if t.device == device and not is_home(t))


def trained_bytes(params: Iterable[torch.nn.Parameter]) -> int:
    """Bytes that training has on the device beside parameters.

    Gradients that are there now count, and optimizer states where a plan has them there or none moves them.
    """
    params = list(params)
    total = kept_bytes(param for param in params if not param.requires_grad)
    for param in params:
        if not param.requires_grad:
            continue
        placement = placement_of(param)
        stays = placement is None or placement.optimizer is Optimizer.DEVICE or optimizer_of(param) is None
        total += state_bytes(param) if stays else 0
        whole = whole_of(param)
        total += _device_bytes(((param if whole is None else whole).grad,), param.device)
    return total


def averaging_bytes(params: Iterable[torch.nn.Parameter]) -> int:
    """Memory in which gradients at home on the host are averaged over replicas."""
    params = [param for param in params if param.requires_grad]
    return min(PIECE_BYTES, sum(param.nbytes for param in params)) if num_replicas(params) > 1 else 0


def unread(
    modules: Iterable[torch.nn.Module], inputs: Sequence[GraphInput], elsewhere: Collection[str] = ()
) -> tuple[tuple[str, torch.Tensor], ...]:
    """Parameters and buffers that neither this graph nor a known one beside it reads, such as a vision tower's of text alone.

    Args:
        modules: whose call is compiled.
        inputs: of the graph.
        elsewhere: names of parameters that other graphs of a step read, which count there.

    Returns:
        Names and tensors. Tensors that share memory with one that is read are left out, and so are all but the first that share
        it with each other.
    """
    modules = list(modules)
    if versions.has_fsdp(modules):  # whose parameters are other tensors in a call
        return ()
    read = {_storage(item.tensor) for item in inputs if item.tensor is not None and _is_plain(item.tensor)}
    read_names = {item.name for item in inputs}.union(elsewhere)
    found: dict[int, tuple[str, torch.Tensor]] = {}
    for module in modules:
        for name, tensor in (*module.named_parameters(), *module.named_buffers()):
            if name not in read_names and _is_plain(tensor) and _storage(tensor) not in read:
                found.setdefault(_storage(tensor), (name, tensor))
    return tuple(found.values())


def unread_bytes(tensors: Iterable[torch.Tensor], device_type: str) -> int:
    """Bytes of memory of those that no graph reads and that are on the device. ``device_type``: of the model's device."""
    on_device = (tensor for tensor in tensors if tensor.device.type == device_type and not is_home(tensor))
    return sum(tensor.untyped_storage().nbytes() for tensor in on_device)


def unmoved_bytes(tensors: Iterable[torch.Tensor]) -> int:
    """Bytes of gradients and optimizer states that these will have on the device, whatever is decided.

    No optimizer of ours updates their parameters.
    """
    params = (tensor for tensor in tensors if isinstance(tensor, torch.nn.Parameter))
    return sum(
        param.nbytes + state_bytes(param) for param in params if param.requires_grad and optimizer_of(param) is None
    )


def _is_plain(tensor: torch.Tensor) -> bool:
    """Whether it has a storage of its own: no DTensor, nor another tensor of tensors. One without memory for its values has."""
    kinds = (torch.Tensor, FakeTensor)
    return type(tensor.data) in kinds and not tensor.is_meta and tensor.layout is torch.strided


def _storage(tensor: torch.Tensor) -> int:
    return tensor.untyped_storage()._cdata
