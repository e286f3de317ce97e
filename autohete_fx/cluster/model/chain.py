"""Which modules of a model are its layers: a chain that the forward pass calls one after another.

Enter a module and a micro-batch; leave the names of the layers.
"""

import itertools
from functools import partial

from torch import nn

from autohete_fx.cluster.model.batches import Batch, call
from autohete_fx.errors import ClusterError


def find_chain(model: nn.Module, batch: Batch) -> tuple[str, ...]:
    """Names of the children, called once each and in order, of the container with the most parameters.

    Layers that are attributes of their own are found where no container is, or only within one of them.
    """
    order: list[str] = []
    handles = [
        module.register_forward_pre_hook(partial(note_call, order, name)) for name, module in model.named_modules()
    ]
    call(model, batch)
    for handle in handles:
        handle.remove()
    best: tuple[int, tuple[str, ...]] = (0, ())
    alike: tuple[int, tuple[str, ...]] = (0, ())
    for name, parent in model.named_modules():
        children = {f"{name}.{child}" if name else child: module for child, module in parent.named_children()}
        called = [child for child in order if child in children]
        listed = isinstance(parent, nn.ModuleList | nn.Sequential | nn.ModuleDict) and len(parent) > 1
        if listed and called == list(children):
            best = max(best, (_size(parent), tuple(children)))
        once = (child for child in called if called.count(child) == 1)
        for _, same in itertools.groupby(once, key=lambda child: type(children[child])):
            run = tuple(same)
            if len(run) > 1 and not listed:
                alike = max(alike, (sum(_size(children[child]) for child in run), run))
    chain, siblings = best[1], alike[1]
    within = any(chain[0].startswith(f"{name}.") for name in siblings) if chain else True
    if siblings and within and len(siblings) >= len(chain):
        chain = siblings
    if not chain:
        raise ClusterError(
            f"{type(model).__name__} has no list of layers that its forward pass calls one after another. Expected was a"
            " ModuleList, ModuleDict or Sequential of at least two, or such attributes of one class. Put the layers into one,"
            " or say where to cut with split_spec= of cluster.join"
        )
    return chain


def _size(module: nn.Module) -> int:
    return sum(param.numel() for param in module.parameters())


def note_call(names: list[str], name: str, *_: object) -> None:
    """Add a name: for hooks that note which modules are called."""
    names.append(name)
