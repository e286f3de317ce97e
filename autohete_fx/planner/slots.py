"""Slots for streamed states of whole parameters: in comes a problem, out come the problems of which it consists.

Slots take memory in plans that stream any states, and in no others. The search adds up what blocks hold, and slots are no block's.
A problem with slots is therefore two: without streaming and without slots, and with both.
"""

from collections.abc import Sequence
from dataclasses import replace

from autohete_fx.ir import BlockDecision, Problem
from autohete_fx.planner.model.choices import place_choices


def ways(problem: Problem) -> list[Problem]:
    """The problem, or what it consists of: plans that need no slots come first."""
    pinned = any(decision is not None and decision.streams for decision in problem.fixed_decisions)
    if not problem.slot_bytes or pinned:
        return [problem]
    may_stream = any(place.streams for b in range(len(problem.costs)) for place in place_choices(problem, b))
    return [without_streaming(problem), problem] if may_stream else [without_streaming(problem)]


def way_of(problem: Problem, decisions: Sequence[BlockDecision]) -> Problem:
    """The one of these to which a plan belongs."""
    streams = not problem.slot_bytes or any(decision.streams for decision in decisions)
    return problem if streams else without_streaming(problem)


def without_streaming(problem: Problem) -> Problem:
    """The same without streamed states and their slots."""
    return replace(problem, allow_streamed_optimizer=False, slot_bytes=0)
