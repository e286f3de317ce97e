"""Parameters and buffers of a model that no graph of it reads, such as a vision tower's where a step has text alone.

They are on the device all the same, so the budget has to count them.
"""

from collections.abc import Collection, Iterable, Sequence

import torch

from autohete_fx.capture.inputs import GraphInput
from autohete_fx.internals import versions
from autohete_fx.runtime.tiers.host import is_home


def unread_bytes(
    modules: Iterable[torch.nn.Module], inputs: Sequence[GraphInput], elsewhere: Collection[str], device_type: str
) -> int:
    """Device bytes of parameters and buffers that neither this graph nor a known one beside it reads.

    Args:
        modules: whose call is compiled.
        inputs: of the graph.
        elsewhere: names of parameters that other graphs of a step read, which count there.
        device_type: of the model's device.
    """
    modules = list(modules)
    if versions.has_fsdp(modules):  # whose parameters are other tensors in a call
        return 0
    read = {_storage(item.tensor) for item in inputs if item.tensor is not None and _is_plain(item.tensor)}
    read_names = {item.name for item in inputs}.union(elsewhere)
    found: dict[int, int] = {}
    for module in modules:
        for name, tensor in (*module.named_parameters(), *module.named_buffers()):
            if name in read_names or not _is_plain(tensor) or tensor.device.type != device_type or is_home(tensor):
                continue
            found[_storage(tensor)] = tensor.untyped_storage().nbytes()
    return sum(num_bytes for storage, num_bytes in found.items() if storage not in read)


def _is_plain(tensor: torch.Tensor) -> bool:
    """Whether it has a storage of its own: no DTensor, nor another tensor of tensors."""
    return type(tensor.data) is torch.Tensor and not tensor.is_meta and tensor.layout is torch.strided


def _storage(tensor: torch.Tensor) -> int:
    return tensor.untyped_storage()._cdata
