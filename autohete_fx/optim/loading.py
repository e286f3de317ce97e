"""Reading a state dict: everything is checked and built before anything is replaced.

In: a dict shaped as ``torch.optim`` makes it, from it or from ours, and the optimizer's rules and its own groups. Out: new
groups and new states, in the places that the placements ask for. ``torch.optim.Optimizer.load_state_dict`` is not
used because it casts states to the parameter's dtype, which loses the fp32 states of 16-bit parameters.
"""

from collections.abc import Callable, Mapping, Sequence
from copy import deepcopy
from typing import Any

import torch
from torch import Tensor

from autohete_fx.errors import OptimizerStateError
from autohete_fx.optim.rule import Rule
from autohete_fx.optim.state import MASTER, STEP, State, needs_master, state_names, state_placement_of
from autohete_fx.runtime.held import held

Group = dict[str, Any]

RuleOf = Callable[[Mapping[str, Any]], Rule]
"""From a group to its rule."""

_LATE = {"maximize": False}
"""Hyperparameters that dicts of early PyTorch lack, and what they meant."""


def _same(optimizer: str) -> str:
    """What to do about a dict of others, given the optimizer's name."""
    return f"make it with {optimizer}.state_dict(), of the same parameters in the same groups"


def read_groups(optimizer: str, rule_of: RuleOf, state_dict: Mapping[str, Any], groups: Sequence[Group]) -> list[Group]:
    """The loaded hyperparameters over the optimizer's own parameters. Keys that say how the step is computed are not taken over.

    Raises OptimizerStateError where the dict is of another form, or of another optimizer.
    """
    same = _same(optimizer)
    for key in ("state", "param_groups"):
        if key not in state_dict:
            raise OptimizerStateError(
                f"the state dict has keys {list(state_dict)}; expected 'state' and 'param_groups': {same}"
            )
    loaded = deepcopy(state_dict["param_groups"])
    given, expected = [len(g["params"]) for g in loaded], [len(g["params"]) for g in groups]
    if given != expected:
        raise OptimizerStateError(
            f"the state dict has {len(given)} groups of {given} parameters; expected {len(expected)} of {expected}: "
            f"{same}"
        )
    result = []
    for index, (new, own) in enumerate(zip(loaded, groups, strict=True)):
        rule = rule_of({**own, **new})
        lacking = [key for key in rule.names if key not in new and key not in _LATE]
        if lacking:
            raise OptimizerStateError(
                f"group {index} of the state dict lacks {lacking}; it is not {optimizer}'s: {same}"
            )
        if (why := rule.foreign(new)) is not None:
            raise OptimizerStateError(f"group {index} of the state dict {why}")
        kept = {name: own[name] for name in ("param_names", "use_muon") if name in own}
        kept |= {name: value for name, value in _LATE.items() if name in rule.names}
        result.append({**kept, **new, **dict(rule.implementation), "params": own["params"]})
    return result


def read_states(
    optimizer: str,
    rule_of: RuleOf,
    state_dict: Mapping[str, Any],
    groups: Sequence[Group],
    current: Mapping[Tensor, State],
) -> dict[Tensor, State]:
    """New states of every parameter that the dict has any for. Values of the dict are copied, never aliased.

    A tensor of the dict that *is* the current state is kept as it is, so that loading one's own ``state_dict()``
    needs no memory. Otherwise old and new states exist side by side until this returns.

    Raises:
        OptimizerStateError: a state is missing, unknown, or of another shape.
        HostMemoryError: no room for the new states.
    """
    keys = [key for group in state_dict["param_groups"] for key in group["params"]]
    params = [(param, rule_of(group)) for group in groups for param in group["params"]]
    # PyTorch's SGD had None in the place of a momentum up to 2.3.
    states: Mapping[Any, Mapping[str, Any]] = {
        key: {name: value for name, value in entry.items() if value is not None}
        for key, entry in state_dict["state"].items()
    }
    unknown = [key for key in states if key not in set(keys)]
    if unknown:
        raise OptimizerStateError(
            f"the state dict has states for {unknown[:5]}, which are in none of its groups: {_same(optimizer)}"
        )
    given = [(key, param, rule) for key, (param, rule) in zip(keys, params, strict=True) if states.get(key)]
    for key, param, rule in given:
        _check(optimizer, rule, key, held(param), states[key])
    return {param: _build(rule, held(param), states[key], current.get(param, {})) for key, param, rule in given}


def _check(optimizer: str, rule: Rule, key: object, param: Tensor, entry: Mapping[str, Any]) -> None:
    allowed = (STEP, *state_names(rule, param))
    required = ((STEP,) if rule.counts_steps else ()) + (() if rule.may_lack_moments else rule.moments)
    missing = [n for n in required if n not in entry]
    unknown = [n for n in entry if n not in (*allowed, *rule.idle)]
    if MASTER in unknown:
        raise OptimizerStateError(
            f"the state of parameter {key} has a master, but the parameter is {param.dtype}: it was 16-bit when "
            "this was saved. Convert the model as it was, or copy the master into the parameter and take it out of the dict"
        )
    if missing or unknown:
        raise OptimizerStateError(
            f"the state of parameter {key} has {list(entry)}; expected {list(allowed)}"
            f"{' (master may be absent)' if needs_master(param) else ''}: {_same(optimizer)}"
        )
    step = entry.get(STEP, 1.0)
    if not isinstance(step, (int, float)) and not (isinstance(step, Tensor) and step.numel() == 1):
        raise OptimizerStateError(f"the step of parameter {key} is {step!r}; expected a number or a one-element tensor")
    for name in (*allowed[1:], *rule.idle):
        if name not in entry:
            continue
        t = entry[name]
        if not isinstance(t, Tensor) or not t.is_floating_point():
            raise OptimizerStateError(
                f"state {name!r} of parameter {key} is {_described(t)}; expected a floating point tensor"
            )
        if t.shape != param.shape:
            raise OptimizerStateError(
                f"state {name!r} of parameter {key} has shape {tuple(t.shape)}; expected the parameter's "
                f"{tuple(param.shape)}: the parameters are others, or in another order; {_same(optimizer)}"
            )


def _described(value: Any) -> str:
    return f"a {value.dtype} tensor" if isinstance(value, Tensor) else f"a {type(value).__name__}"


def _build(rule: Rule, param: Tensor, entry: Mapping[str, Any], current: Mapping[str, Any]) -> State:
    placement = state_placement_of(param)
    given = entry.get(STEP, 1.0)
    number = given if isinstance(given, Tensor) else torch.tensor(float(given), dtype=torch.float32)
    step = number.detach().reshape(()).clone()
    state: State = {STEP: step.to(dtype=torch.float32, device=placement.step_device(rule, param))}
    for name in (*state_names(rule, param), *rule.idle):
        if name in entry:
            t = entry[name]
            state[name] = t if t is current.get(name) else placement.fill(placement.empty(param), t.detach())
    return state
