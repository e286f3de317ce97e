"""Building a part of a model: its own parameters as ``build_model`` initialises them, the others without memory.

Modules register their parameters in the same order every time a model is built, so the first time, without memory, tells which
is which. When a stage is built, parameters of other stages all share one scratch memory. They are initialised there one over
the other, which costs time and no memory. The random draws of this stage's parameters stay those of ``torch.manual_seed(seed);
build_model()``.

A model may copy values from one parameter to another while it is built, as ``copy.deepcopy`` of a layer does. Where these are in
scratch memory, the model is built once more with memory for all parameters, which the others lose at the end.
"""

from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from functools import partial

import torch
from torch import Tensor, nn

from autohete_fx.cluster.model.copied import CopiesOutOf
from autohete_fx.errors import ClusterError
from autohete_fx.internals.modules import before_apply

BuildModel = Callable[[], nn.Module]
_Registered = list[tuple[nn.Module, str]]
_Foreign = dict[int, tuple[nn.Parameter, nn.Parameter]]
"""By address, parameters in shared memory, and what stands for them on the meta device."""


@contextmanager
def _watched(change: Callable[[nn.Module, str, nn.Parameter], nn.Parameter]) -> Iterator[None]:
    """Parameters that modules register inside are those that ``change`` makes of them."""
    register = nn.Module.register_parameter

    def registered(self: nn.Module, name: str, param: nn.Parameter | None) -> None:
        register(self, name, param)
        if param is not None:
            self._parameters[name] = change(self, name, param)

    nn.Module.register_parameter = registered
    try:
        yield
    finally:
        nn.Module.register_parameter = register


def build_noting_order(build_model: BuildModel) -> tuple[nn.Module, list[str]]:
    """A model with parameters on the meta device, and their names in the order of registration; "" for one that the model lost.

    Raises:
        ClusterError: ``build_model`` returns no module, or one that was there before.
    """
    order: _Registered = []

    def note(module: nn.Module, name: str, param: nn.Parameter) -> nn.Parameter:
        order.append((module, name))
        return param if param.is_meta else _without_memory(param)

    with _watched(note):
        model = build_model()
    if not isinstance(model, nn.Module):
        raise ClusterError(
            f"build_model returned {type(model).__name__}. Expected was a torch.nn.Module. Return the model from build_model"
        )
    modules = {id(module): name for name, module in model.named_modules()}
    first, names = _first_names(model), []
    params = dict(model.named_parameters(remove_duplicate=False))
    earlier = [name for name, param in params.items() if not param.is_meta]
    if earlier:
        raise ClusterError(
            f"build_model returned a model whose parameter {earlier[0]!r} was made before the call. Expected was a new model each"
            " time, of which a rank keeps its part. Build it inside build_model; weights=... takes values that are there"
        )
    for module, name in order:
        prefix = modules.get(id(module))
        full = None if prefix is None else f"{prefix}.{name}" if prefix else name
        names.append(first[id(params[full])] if full in params else "")
    return model, names


def build_part(
    build_model: BuildModel, order: Sequence[str], wanted: Collection[str], seed: int, *, is_loaded: bool = False
) -> nn.Module:
    """A model whose parameters are on the meta device, but for those that are wanted.

    Args:
        build_model: makes the model.
        order: of `build_noting_order`.
        wanted: names; those of tied parameters by the first.
        seed: of the initial values.
        is_loaded: whether other values are loaded into those that are wanted. They have no memory then, unless the model draws
            random numbers for something else, such as a buffer. Its values follow from what parameters draw before it.

    Raises:
        ClusterError: ``build_model`` registers other parameters than the first time.
    """
    if is_loaded:
        model, draws = _built(build_model, order, (), seed, CopiesOutOf())
        if not draws:
            return model
    copies = CopiesOutOf()
    model, _ = _built(build_model, order, wanted, seed, copies)
    if copies.were_made:
        model, _ = _built(build_model, order, wanted, seed, None)
    first, others = _first_names(model), dict[int, nn.Parameter]()
    for module in model.modules():
        for name, param in module._parameters.items():
            if param is not None and not param.is_meta and first[id(param)] not in wanted:
                module._parameters[name] = others.setdefault(id(param), _without_memory(param))
    return model


def _built(
    build_model: BuildModel, order: Sequence[str], wanted: Collection[str], seed: int, copies: CopiesOutOf | None
) -> tuple[nn.Module, bool]:
    """The model, in which other parameters share memory, out of which ``copies`` are noted; None: each has its own. And whether
    random numbers were drawn for anything that has memory."""
    scratch: dict[torch.dtype, Tensor] = {}
    foreign: _Foreign = {}
    known: dict[int, nn.Parameter] = {}
    place = 0

    def shared(param: nn.Parameter) -> nn.Parameter:
        assert copies is not None
        memory = scratch.get(param.dtype)
        if memory is None or memory.numel() < param.numel():
            memory = scratch[param.dtype] = torch.empty(param.numel(), dtype=param.dtype)
            copies.note(memory)
        moved = nn.Parameter(memory[: param.numel()].view(param.shape), param.requires_grad)
        vars(moved).update(vars(param))
        foreign[id(moved)] = moved, _without_memory(moved)
        return moved

    def keep(_: nn.Module, __: str, param: nn.Parameter) -> nn.Parameter:
        nonlocal place
        place += 1
        if place > len(order):
            return param
        if id(param) in known:
            return param
        name = order[place - 1]
        if name in wanted and copies is not None:
            copies.keep_out_of(param)
        if not wanted:
            own = _without_memory(param)
        elif name in wanted or not name or copies is None:  # copies of one that the model loses may be what it keeps
            own = param
        else:
            own = shared(param)
        known[id(own)] = own
        return own

    # A cast inside, as of ``model.to(dtype)``, is to make no copies of what shares memory.
    casts = before_apply(partial(_without_shared_memory, foreign))
    with torch.random.fork_rng(devices=[]), _watched(keep), casts, copies or nullcontext():
        torch.manual_seed(seed)
        before = torch.get_rng_state()
        model = build_model()
        draws = not torch.equal(torch.get_rng_state(), before)
    if place != len(order):
        raise ClusterError(
            f"build_model registered {place} parameters, and {len(order)} the first time. Expected was the same model every time."
            " Make it deterministic"
        )
    if copies is not None:
        for name, param in model.named_parameters():
            if name in wanted:
                copies.look_at(param)
    return model, draws


def _first_names(model: nn.Module) -> dict[int, str]:
    """By identity of each parameter, the first of its names."""
    first: dict[int, str] = {}
    for name, param in model.named_parameters(remove_duplicate=False):
        first.setdefault(id(param), name)
    return first


def _without_memory(param: nn.Parameter) -> nn.Parameter:
    moved = nn.Parameter(torch.empty_like(param, device="meta"), param.requires_grad)
    vars(moved).update(vars(param))
    return moved


def _without_shared_memory(foreign: _Foreign, module: nn.Module) -> None:
    """In place of parameters that share memory put what stands for them."""
    for name, param in module._parameters.items():
        if param is not None and id(param) in foreign:
            module._parameters[name] = foreign[id(param)][1]
