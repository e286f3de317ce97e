"""The reasons of a plan in words: first what binds, then block by block what was chosen and what else could have been.

In comes a plan, out comes text::

    the update lane binds: compute waits 84.6 ms of the 779 ms step (11%); meanwhile update works 83.6 ms, h2d works 59.2 ms
    device memory binds: 17.0 GiB in the backward of layers.9, 29.8 MiB below what the plan may use; with 1.00 GiB more the step
    would take at most 770 ms (1.2% less)
    host memory does not bind: 33.1 GiB, 991 GiB below what the plan may use

    layers.0: keep, optimizer host
        next best: optimizer device, as fast but with 12.0 ms more of copies
    layers.1-2 (2): offload, parameters host, optimizer host
        next best: recompute, 8.61 ms to 14.0 ms slower (1.1% to 1.8%)
        better but for memory: keep, 24.3 ms faster (3.1%), needs 2.23 GiB more device memory than there is in the backward of loss

Consecutive blocks about which the same is to be said are taken together, figures as ranges.
"""

from collections.abc import Callable, Iterator, Sequence
from itertools import groupby
from typing import NamedTuple

from autohete_fx.ir.decision import BlockDecision, Optimizer
from autohete_fx.ir.labels import label_pattern, run_label
from autohete_fx.ir.lane import Lane, LaneTime
from autohete_fx.ir.plan import Plan
from autohete_fx.ir.reasons import NO_TIME, Alternative, Memory, MemoryUse, Reasons
from autohete_fx.ir.sizes import format_bytes, format_seconds

_WAITING = 0.1
"""Compute that waits for a smaller share of the step is what binds."""


class _Amount(NamedTuple):
    """A figure in a sentence, which blocks that are taken together may differ in."""

    value: float
    said: Callable[[float], str]


_Sentence = tuple[str | _Amount, ...]


def why(plan: Plan) -> str:
    """Why a plan decides so, in words.

    The text says what binds. For every block it says what was chosen, what the next best choice would have cost, and which
    better one memory forbids. For a plan that was not solved it says that no reasons are known.
    """
    if plan.reasons is None:
        return (
            f"no reasons are recorded with this plan (status {plan.status!r}): the solver, which records them, did not make it for"
            " the problem that it is used for. Leave the option 'plan' out, or make a plan with `autohete plan`."
        )
    lines = [_lanes(plan, plan.reasons), *(_memory(plan, plan.reasons, use) for use in plan.reasons.memory), ""]
    said = [tuple(_sentences(plan, block)) for block in range(len(plan.decisions))]

    def alike(block: int) -> tuple[object, ...]:
        sentences = tuple(tuple(p.said if isinstance(p, _Amount) else p for p in s) for s in said[block])
        return label_pattern(plan.labels[block]), sentences

    for _, run in groupby(range(len(plan.decisions)), alike):
        blocks = list(run)
        chosen, *others = (_together(of_blocks) for of_blocks in zip(*(said[b] for b in blocks), strict=True))
        lines += [f"{run_label([plan.labels[b] for b in blocks])}: {chosen}", *(f"    {other}" for other in others)]
    return "\n".join(lines)


# -- what binds ------------------------------------------------------------------------------------------------------


def binding_lane(plan: Plan) -> Lane | None:
    """The lane that a step waits for most. None where no reasons are known."""
    if plan.reasons is None:
        return None
    longest_first = _longest_first(plan.reasons)
    is_waiting = bool(longest_first) and plan.reasons.waits_s > _WAITING * plan.step_s
    return longest_first[0].lane if is_waiting else Lane.COMPUTE


def _longest_first(reasons: Reasons) -> list[LaneTime]:
    return sorted(reasons.meanwhile, key=lambda time: -time.busy_s)


def _lanes(plan: Plan, reasons: Reasons) -> str:
    step, working = format_seconds(plan.step_s), {time.lane: time.busy_s for time in plan.busy_s}
    longest_first = _longest_first(reasons)
    meanwhile = ", ".join(f"{time.lane.value} works {format_seconds(time.busy_s)}" for time in longest_first)
    if binding_lane(plan) is not Lane.COMPUTE:
        return (
            f"the {longest_first[0].lane.value} lane binds: compute waits {format_seconds(reasons.waits_s)} of the {step} step"
            f" ({reasons.waits_s / plan.step_s:.0%}); meanwhile {meanwhile}"
        )
    works = f"the compute lane binds: it works {format_seconds(working.get(Lane.COMPUTE, 0.0))} of the {step} step"
    waits = f"; while it waits {meanwhile}" if meanwhile and reasons.waits_s > NO_TIME * plan.step_s else ""
    return f"{works}{waits}"


def _memory(plan: Plan, reasons: Reasons, use: MemoryUse) -> str:
    used = f"{format_bytes(use.used_bytes)}{_at(plan, use)}"
    if use.limit_bytes is None:
        return f"{use.memory.value} has no limit: {used}"
    binds = reasons.binds(use.memory)
    left = f"{used}, {format_bytes(use.limit_bytes - use.used_bytes)} below what the plan may use"
    more = ""
    if binds and use.memory is Memory.DEVICE and reasons.more_bytes:
        saved = 1 - reasons.more_step_s / plan.step_s
        with_more = f"; with {format_bytes(reasons.more_bytes)} more the step would take"
        more = f"{with_more} at most {format_seconds(reasons.more_step_s)} ({saved:.1%} less)"
        if saved <= NO_TIME:
            more = f"{with_more} as long, if one block after the other is changed"
    return f"{use.memory.value} {'binds' if binds else 'does not bind'}: {left}{more}"


def _at(plan: Plan, use: MemoryUse) -> str:
    return "" if use.block is None else f" in the {use.phase} of {plan.labels[use.block]}"


# -- block by block --------------------------------------------------------------------------------------------------


def _sentences(plan: Plan, block: int) -> Iterator[_Sentence]:
    assert plan.reasons is not None
    reasons, decision = plan.reasons.blocks[block], plan.decisions[block]
    yield (decision_words(decision),)
    if reasons.next_best is not None:
        yield "next best: ", *_alternative(plan, decision, reasons.next_best)
    elif reasons.num_others > 1:
        yield (f"none of its {reasons.num_others} other choices fits",)
    else:
        yield ("its only other choice does not fit" if reasons.num_others else "it has no other choice",)
    if reasons.barred is not None:
        lacking = _lacking(plan, reasons.barred.exceeded)
        yield "better but for memory: ", *_alternative(plan, decision, reasons.barred), *lacking


def _alternative(plan: Plan, chosen: BlockDecision, other: Alternative) -> _Sentence:
    what = ", ".join(_differing(other.decision, chosen))
    more_s, copies_s, least_s = other.step_s - plan.step_s, other.more_copies_s, NO_TIME * plan.step_s
    copies: _Sentence = ()
    if abs(copies_s) > least_s and (abs(more_s) <= least_s or more_s < 0 < copies_s):
        moved = "copies and collectives" if any(t.lane is Lane.NET and t.busy_s for t in plan.busy_s) else "copies"
        more_or_less = f" more of {moved}" if copies_s > 0 else f" less of {moved}"
        copies = " but with " if copies_s > 0 else " with ", _Amount(abs(copies_s), format_seconds), more_or_less
    if abs(more_s) <= least_s:
        return f"{what}, as fast", *copies
    share, direction = _Amount(abs(more_s) / plan.step_s, _percent), "slower" if more_s > 0 else "faster"
    return f"{what}, ", _Amount(abs(more_s), format_seconds), f" {direction} (", share, ")", *copies


def _lacking(plan: Plan, uses: Sequence[MemoryUse]) -> Iterator[str | _Amount]:
    for i, use in enumerate(uses):
        yield " and " if i else ", needs "
        yield _Amount(use.lacking_bytes, format_bytes)
        yield f" more {use.memory.value} than there is{_at(plan, use)}"


def decision_words(decision: BlockDecision) -> str:
    """The decisions about a block, but for what stays on the device and for prefetch distances."""
    own, *elsewhere = _words(decision)
    return ", ".join([own, *(each for each in elsewhere if not each.endswith(" device"))])


def _words(decision: BlockDecision) -> tuple[str, str, str]:
    """What is decided of activations, of parameters and of the optimizer; not of prefetch distances."""
    largest = "" if decision.num_offloaded is None else f" {decision.num_offloaded} largest"
    kept = " and kept for backward" if decision.keeps_fetched else ""
    kept = " and replicated" if decision.replicates else kept
    smallest = "" if decision.num_moved_states is None else f" for the {decision.num_moved_states} smallest"
    others = "" if decision.other_states is Optimizer.DEVICE else f", {decision.other_states.value} for the others"
    return (
        f"{decision.activations.value}{largest}",
        f"parameters {decision.params.value}{kept}",
        f"optimizer {decision.optimizer.value}{smallest}{others}",
    )


def _differing(decision: BlockDecision, other: BlockDecision) -> list[str]:
    """The words for what is decided otherwise than in another decision."""
    return [one for one, two in zip(_words(decision), _words(other), strict=True) if one != two]


def _together(sentences: Sequence[_Sentence]) -> str:
    """One sentence of several that differ in their amounts at most."""
    return "".join(_range(parts) for parts in zip(*sentences, strict=True))


def _range(parts: Sequence[str | _Amount]) -> str:
    amounts = [part for part in parts if isinstance(part, _Amount)]
    if not amounts:
        return str(parts[0])
    least, most = (amounts[0].said(pick(amount.value for amount in amounts)) for pick in (min, max))
    return least if least == most else f"{least} to {most}"


def _percent(share: float) -> str:
    return f"{share:.1%}"
