"""Put a model that is larger than the device where the device can reach it.

In: a model on the CPU. Out: the same model, whose parameters and buffers are on the compute device as far as any code can tell.
The parameters' bytes are in host memory. Their optimizer states belong there, too: a checkpoint may be loaded before anything
is compiled. Compiling it brings to the device what the plan wants there.
"""

from typing import TypeVar

import torch

from autohete_fx.errors import OptionError
from autohete_fx.internals import versions
from autohete_fx.ir import Optimizer, Params
from autohete_fx.runtime.placement import Placement, is_movable, place_param
from autohete_fx.runtime.tiers.host import open_tier

ModuleT = TypeVar("ModuleT", bound=torch.nn.Module)


def place(model: ModuleT, device: torch.device | str, *, offload_dir: str | None = None) -> ModuleT:
    """Move a model to a device and leave all but its small parameters in host memory, readable from the device. An
    `autohete_fx.AdamW` keeps their states there too, until the model is compiled.

    Args:
        model: changed in place; tied parameters stay tied.
        device: ``"cuda"`` or ``"cpu"``; on a CPU device the parameters go to memory-mapped files.
        offload_dir: directory of those files; None for the system's temporary directory.

    Returns:
        The model.

    Raises:
        HostMemoryError: the parameters do not fit in host memory, or there is no such device.
        OptionError: a parameter is a DTensor.
    """
    for name, parameter in model.named_parameters():
        if versions.is_dtensor(parameter):
            raise OptionError(
                f"the parameter {name} is a DTensor, which several ranks hold together, as fully_shard makes them; expected were"
                " parameters that one process holds whole. Give FSDP's offload_policy=CPUOffloadPolicy() to fully_shard instead"
            )
    tier = open_tier(device, offload_dir)
    for parameter in dict.fromkeys(model.parameters()):
        where = (Params.HOST, Optimizer.HOST) if is_movable(parameter) else (Params.DEVICE, Optimizer.DEVICE)
        place_param(parameter, Placement(*where, tier, block=0))
    for module in model.modules():
        for name, buffer in module._buffers.items():
            if buffer is not None:
                module._buffers[name] = buffer.to(tier.device)
    return model
