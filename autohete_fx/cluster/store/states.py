"""Weights and optimizer states of a stage, as the tensors of a part by name, and back.

Enter a stage's parameters, its optimizer and the pieces that they are; leave copies in host memory by the keys of `store`.
"""

import functools
import logging
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from autohete_fx.cluster.model.pieces import Held, Piece
from autohete_fx.errors import ClusterError
from autohete_fx.internals.tensors import local_of
from autohete_fx.optim.kernels import HALF, reconcile_master
from autohete_fx.optim.state import MASTER

log = logging.getLogger(__name__)

States = Mapping[Piece, Mapping[str, Tensor]]
"""By piece of a parameter, its tensors by the keys of a part."""


def states_of(params: Mapping[str, torch.nn.Parameter], optimizer: torch.optim.Optimizer | None, held: Held) -> States:
    """Copies in host memory of weights and optimizer states.

    Args:
        params: of this rank.
        optimizer: of those that are trained.
        held: the pieces that they are.

    Raises:
        ClusterError: the optimizer keeps for a piece a tensor that is neither one number nor shaped as the piece.
    """
    found = {
        piece: {f"{piece.key}/weight": _copied(piece.of(param, piece))}
        for piece, param in ((held[name], param) for name, param in params.items())
    }
    if optimizer is not None:
        whole = optimizer.state_dict()
        for name, number in _numbers(params, optimizer, whole).items():
            piece, weight = held[name], found[held[name]][f"{held[name].key}/weight"]
            for key, value in whole["state"].get(number, {}).items():
                if value is None:
                    continue
                tensor = torch.as_tensor(local_of(value) if isinstance(value, DTensor) else value)
                if tensor.shape == params[name].shape:
                    tensor = piece.of(tensor, piece)
                if piece.cuts and tensor.shape != weight.shape and tensor.numel() > 1:
                    raise ClusterError(
                        f"{type(optimizer).__name__} keeps {key!r} of shape {tuple(tensor.shape)} for a part of {name!r} of shape"
                        f" {tuple(weight.shape)}. Expected were states shaped as the part. Plan with --max-tp 1 and --max-shards 1,"
                        " or use an optimizer that works element by element"
                    )
                found[piece][f"{piece.key}/state/{key}"] = _copied(tensor)
    return found


def restore_states(
    params: Mapping[str, torch.nn.Parameter],
    optimizer: torch.optim.Optimizer | None,
    found: Mapping[str, Mapping[str, Tensor]],
    held: Held,
) -> None:
    """Put what `states_of` gave back; padding of shards gets zeros. A weight that is no longer 16-bit is its master from then on.

    Raises ClusterError where a weight has another shape.
    """
    for name, param in params.items():
        weight, own = found[name][f"{name}/weight"], held[name].of(param.detach(), held[name])
        if weight.shape != own.shape:
            raise ClusterError(
                f"the store has {name!r} with shape {tuple(weight.shape)}, and the model has {tuple(own.shape)}. Expected was a"
                " save of this model. Give the job another store"
            )
        if weight.dtype != own.dtype:
            _tell_of_dtype(weight.dtype, own.dtype)
        own.copy_(weight if param.dtype in HALF else _exact(weight, found[name].get(f"{name}/state/{MASTER}")))
    if optimizer is None:
        return
    whole: dict[str, Any] = optimizer.state_dict()
    state: dict[int, dict[str, Tensor]] = {}
    for name, number in _numbers(params, optimizer, whole).items():
        prefix = f"{name}/state/"
        mine = {key.removeprefix(prefix): value for key, value in found[name].items() if key.startswith(prefix)}
        if params[name].dtype not in HALF:
            mine.pop(MASTER, None)
        if mine:
            weight = found[name][f"{name}/weight"]
            state[number] = {
                key: _padded(value, params[name].shape) if value.shape == weight.shape else value
                for key, value in mine.items()
            }
    if state:
        optimizer.load_state_dict({**whole, "state": state})


def _exact(weight: Tensor, master: Tensor | None) -> Tensor:
    """The value of a weight: its master's, but for elements that have changed since that one was updated."""
    if master is None or weight.dtype not in HALF:
        return weight
    exact = master.clone(memory_format=torch.contiguous_format)
    reconcile_master(weight.flatten(), exact.view(-1))
    return exact


@functools.cache
def _tell_of_dtype(saved: torch.dtype, now: torch.dtype) -> None:
    log.warning("the store has weights in %s, and the model has them in %s: they are converted", saved, now)


def _numbers(
    params: Mapping[str, torch.nn.Parameter], optimizer: torch.optim.Optimizer, state_dict: Mapping[str, Any]
) -> dict[str, int]:
    """The numbers of an optimizer's parameters in its state dict, by name: it counts through its groups, whatever is in them."""
    numbers = (number for group in state_dict["param_groups"] for number in group["params"])
    counted = (param for group in optimizer.param_groups for param in group["params"])
    found = dict(zip(map(id, counted), numbers, strict=True))
    return {name: found[id(param)] for name, param in params.items() if id(param) in found}


def _padded(own: Tensor, shape: torch.Size) -> Tensor:
    """The tensor with rows of zeros after its own."""
    if own.shape == shape:
        return own
    padded = own.new_zeros(shape)
    padded[: own.shape[0]].copy_(own)
    return padded


def _copied(tensor: Tensor) -> Tensor:
    return tensor.detach().to("cpu", copy=True)
