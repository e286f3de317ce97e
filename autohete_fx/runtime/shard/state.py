"""Checkpoints of shards: state dicts have DTensors, which say what part of which whole a rank holds.

In: state dicts of modules and optimizers with shards in them, padding included. Out: the same keys with DTensors over the memory of
the shards, as `torch.distributed.checkpoint` and `torch.distributed.checkpoint.state_dict` take them. Loading takes DTensors of any
mesh, and whole tensors, of which each rank takes its rows.
"""

import weakref
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.optim.optimizer import Optimizer

from autohete_fx.errors import ShardError
from autohete_fx.graph.ops import contiguous_stride
from autohete_fx.runtime.lanes.failures import named_failures
from autohete_fx.runtime.shard.parts import Part, dtensor_part_of
from autohete_fx.runtime.wholes import note_change

_attended: "weakref.WeakSet[Optimizer]" = weakref.WeakSet()


def to_dtensor(shard: Tensor, part: Part) -> DTensor:
    """The whole that a shard, or a state of it, is a part of. It refers to the shard's memory."""
    stride, size = contiguous_stride(part.full_size), torch.Size(part.full_size)
    own, mesh = part.unpadded(shard), part.ranks.mesh
    return DTensor.from_local(own, mesh, part.placements, run_check=False, shape=size, stride=stride)


def to_shard(value: Tensor, part: Part) -> Tensor:
    """This rank's shard of a whole tensor, padding included. All ranks call it where the value is a DTensor."""
    if isinstance(value, DTensor):
        if value.device_mesh == part.ranks.mesh and tuple(value.placements) == part.placements:
            return part.padded(value.to_local())
        with named_failures(part.ranks.control):
            value = value.full_tensor()
    return part.padded(part.own(value if part.layout is None else part.layout.to_local(value)))


# -- modules ------------------------------------------------------------------------------------------------------


def hook(module: nn.Module) -> None:
    """Let the state dicts of a module have DTensors for its shards."""
    module.register_state_dict_post_hook(_give_dtensors)
    module.register_load_state_dict_pre_hook(_take_shards)


def _give_dtensors(module: Any, state_dict: dict[str, Any], prefix: str, _: object) -> None:
    if module._autohete_whole:
        return
    for name, param in module._parameters.items():
        part = None if param is None else dtensor_part_of(param)
        key = prefix + name
        if part is not None and key in state_dict:
            state_dict[key] = to_dtensor(state_dict[key].detach(), part)


def _take_shards(
    module: Any,
    state_dict: dict[str, Any],
    prefix: str,
    metadata: Mapping[str, Any],
    strict: bool,
    missing: list[str],
    unexpected: list[str],
    errors: list[str],
) -> None:
    note_change()
    if module._autohete_whole:
        return
    for name, param in module._parameters.items():
        part, key = None if param is None else dtensor_part_of(param), prefix + name
        if param is None or part is None or not isinstance(state_dict.get(key), Tensor):
            continue
        if metadata.get("assign_to_params_buffers"):
            raise ShardError(
                f"load_state_dict(assign=True) would replace the shard of {key}, which optimizers and plans know. Expected was a"
                " load in place. Call load_state_dict without assign"
            )
        value = state_dict[key]
        if tuple(value.shape) != part.full_size:
            errors.append(
                f"size mismatch for {key}: the state dict has {tuple(value.shape)}, the whole parameter is {part.full_size}; give"
                " the whole tensor or a DTensor"
            )
            state_dict[key] = param.detach()
        else:
            with torch.no_grad():
                state_dict[key] = to_shard(value.detach(), part)


# -- optimizers ---------------------------------------------------------------------------------------------------


def attend(optimizer: Optimizer) -> None:
    """Let the state dicts of an optimizer have DTensors for the states of shards."""
    if optimizer not in _attended:
        _attended.add(optimizer)
        optimizer.register_state_dict_post_hook(_give_states)
        optimizer.register_load_state_dict_pre_hook(_take_states)


def localise(optimizer: Optimizer) -> None:
    """Make shards of states that were loaded before anybody attended to the optimizer, or are older than the shards."""
    for param, states in optimizer.state.items():
        part = dtensor_part_of(param) if isinstance(param, Tensor) else None
        if part is not None:
            wholes = {
                name: value
                for name, value in states.items()
                if isinstance(value, DTensor) or (isinstance(value, Tensor) and tuple(value.shape) != part.shape)
            }
            states |= {name: _taken(value, part) for name, value in wholes.items()}


def _params_of(optimizer: Optimizer, state_dict: Mapping[str, Any]) -> dict[Any, Tensor]:
    keys = [key for group in state_dict["param_groups"] for key in group["params"]]
    params = [param for group in optimizer.param_groups for param in group["params"]]
    return dict(zip(keys, params, strict=False))


def _give_states(optimizer: Optimizer, state_dict: dict[str, Any]) -> dict[str, Any]:
    params, states = _params_of(optimizer, state_dict), {}
    for key, entry in state_dict["state"].items():
        param = params.get(key)
        part = None if param is None else dtensor_part_of(param)
        states[key] = entry if part is None else {name: _given(name, value, part) for name, value in entry.items()}
    return {**state_dict, "state": states}


def _given(name: str, value: Any, part: Part) -> Any:
    if not isinstance(value, Tensor) or value.dim() == 0 or isinstance(value, DTensor):
        return value
    if tuple(value.shape) != part.shape:
        raise ShardError(
            f"the optimizer's state {name!r} of a parameter of size {part.full_size} has size {tuple(value.shape)} on this"
            f" rank; expected the shard's {part.shape}, of which a whole can be made. Take an optimizer whose states are as"
            " its parameters are"
        )
    return to_dtensor(value, part)


def _take_states(optimizer: Optimizer, state_dict: dict[str, Any]) -> dict[str, Any]:
    if not {"state", "param_groups"} <= state_dict.keys():
        return state_dict  # the optimizer refuses it
    params, states = _params_of(optimizer, state_dict), {}
    for key, entry in state_dict["state"].items():
        param = params.get(key)
        part = None if param is None else dtensor_part_of(param)
        states[key] = entry if part is None else {name: _taken(value, part) for name, value in entry.items()}
    return {**state_dict, "state": states}


def _taken(value: Any, part: Part) -> Any:
    is_whole = isinstance(value, Tensor) and value.dim() > 0 and tuple(value.shape) == part.full_size
    return to_shard(value.detach(), part) if is_whole else value
