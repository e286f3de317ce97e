"""Parameters that are DTensors, as ``parallelize_module`` makes them: their ranks, and the way between wholes and parts.

In: held parameters (`autohete_fx.runtime.held`), and gradients and optimizer states, which are laid out as their DTensors are.
Out: DTensors of them for state dicts, local tensors of DTensors and of whole tensors, and the process groups that have other parts.
"""

import weakref
from collections.abc import Iterable, Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.optim.optimizer import Optimizer

from autohete_fx.errors import OptimizerStateError, ShardError
from autohete_fx.internals.tensors import local_of
from autohete_fx.runtime.held import held, whole_of
from autohete_fx.runtime.lanes.failures import named_failures
from autohete_fx.runtime.shard.layout import Layout
from autohete_fx.runtime.shard.parts import part_of
from autohete_fx.runtime.shard.ranks import Ranks, ranks_of

_attended: "weakref.WeakSet[Optimizer]" = weakref.WeakSet()


def dtensor_of(param: Tensor) -> DTensor | None:
    """The DTensor that a parameter is, or is this rank's part of; None for any other."""
    whole = param if isinstance(param, DTensor) else whole_of(param)
    return whole if isinstance(whole, DTensor) else None


def ranks_of_graph(params: Iterable[Tensor]) -> Ranks | None:
    """The ranks that a graph has collectives with, told by its parameters; None where it has none.

    Raises:
        ShardError: the parameters are on several meshes, or on one of several dimensions.
    """
    params = list(params)
    parts = [part for p in params if (part := part_of(p)) is not None]
    shards = {part.group: part.ranks for part in parts if part.is_shard or part.ranks.tensor_parallel is not None}
    meshes = {whole.device_mesh for p in params if (whole := dtensor_of(p)) is not None}
    if len(meshes) + len(shards) > 1 or any(mesh.ndim != 1 for mesh in meshes):
        found = "; ".join([*map(str, meshes), *(f"shards over {digest}" for digest in shards)])
        raise ShardError(
            f"one graph has parameters on {found}. Expected was one mesh of one dimension, or of it and of shards. Call"
            " parallelize_module with one dimension of a mesh, mesh[name], and then autohete_fx.shard on the model as a whole with"
            " another; a DistributedDataParallel may be around a model without shards"
        )
    if meshes:
        return ranks_of(meshes.pop())
    return next(iter(shards.values()), None)


def groups_of_parts(param: Tensor) -> tuple[dist.ProcessGroup, ...]:
    """The process groups over which ranks have other parts of a parameter: all that replicates it is left out."""
    part, whole = part_of(param), dtensor_of(param)
    if part is not None:
        return part.groups
    return () if whole is None else Layout.of(whole).groups


def is_part(param: Tensor) -> bool:
    """Whether other ranks have other parts of it."""
    return bool(groups_of_parts(param))


def local_gradient(param: Tensor) -> Tensor:
    """The gradient of this rank's part of a parameter, which has one.

    A DTensor's gradient that is laid out otherwise first gets the parameter's layout, by a collective of all ranks. One of
    which each rank has an addend is an example.
    """
    grad = param.grad
    assert grad is not None
    if not isinstance(param, DTensor):
        return grad
    if not isinstance(grad, DTensor):
        raise OptimizerStateError(
            f"a parameter of shape {tuple(param.shape)} is a DTensor, and its gradient is a {type(grad).__name__}. Expected was a"
            " DTensor, as autograd makes it. Give param.grad a DTensor of the parameter's mesh and placements"
        )
    if grad.placements != param.placements:
        with named_failures(None):
            param.grad = grad = grad.redistribute(placements=param.placements)
    return local_of(grad)


# -- optimizers ---------------------------------------------------------------------------------------------------


def attend(optimizer: Optimizer) -> None:
    """Let the state dicts of an optimizer have DTensors for the states of DTensors."""
    if optimizer not in _attended and any(isinstance(p, DTensor) for g in optimizer.param_groups for p in g["params"]):
        _attended.add(optimizer)
        optimizer.register_state_dict_post_hook(_give_states)
        optimizer.register_load_state_dict_pre_hook(_take_states)


def _entries(optimizer: Optimizer, state_dict: Mapping[str, Any]) -> dict[Any, tuple[Tensor | None, dict[str, Any]]]:
    """Parameter and states by key."""
    keys = [key for group in state_dict["param_groups"] for key in group["params"]]
    params = [param for group in optimizer.param_groups for param in group["params"]]
    by_key = dict(zip(keys, params, strict=False))
    return {key: (by_key.get(key), entry) for key, entry in state_dict["state"].items()}


def _give_states(optimizer: Optimizer, state_dict: dict[str, Any]) -> dict[str, Any]:
    given: dict[Any, Any] = {}
    for key, (param, entry) in _entries(optimizer, state_dict).items():
        given[key] = entry
        if isinstance(param, DTensor):
            given[key] = {
                name: Layout.of(param).to_dtensor(t) if _is_like(t, held(param)) else t for name, t in entry.items()
            }
    return {**state_dict, "state": given}


def _take_states(optimizer: Optimizer, state_dict: dict[str, Any]) -> dict[str, Any]:
    if not {"state", "param_groups"} <= state_dict.keys():
        return state_dict  # the optimizer refuses it
    taken: dict[Any, Any] = {}
    for key, (param, entry) in _entries(optimizer, state_dict).items():
        taken[key] = entry
        if isinstance(param, DTensor):
            with torch.no_grad():
                taken[key] = {
                    name: Layout.of(param).to_local(t) if _is_like(t, param) else t for name, t in entry.items()
                }
    return {**state_dict, "state": taken}


def _is_like(value: Any, param: Tensor) -> bool:
    """Whether it is a state as large as a parameter."""
    return isinstance(value, Tensor) and value.dim() > 0 and value.shape == param.shape
