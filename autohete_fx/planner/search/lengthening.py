"""How much longer work takes beside other work: the search's measure of contention.

In: decisions of all blocks, of one plan or several. Out: a factor for each kind of work, over all blocks, as the simulator has it
for them. Under decisions near them work meets about the same other work. The search's replays are thus within a few thousandths of
the simulator's there, for the price of a multiplication. Further off they are wrong, so the search begins again from what it found.
"""

from collections import defaultdict
from collections.abc import Collection, Mapping, Sequence
from itertools import chain

from autohete_fx.ir import BlockDecision, Lane, Problem
from autohete_fx.planner.model.simulate import seconds_beside
from autohete_fx.planner.model.work import Work

Lengthening = Mapping[Work, float]
"""By how many times work takes longer; what is not in it takes as long as alone."""


def lengthening(problem: Problem, plans: Collection[Sequence[BlockDecision]]) -> Lengthening:
    """That of a step under each of these plans, all together.

    Work that none of them does has the factor of its lane. Empty without contention.
    """
    alone_s, beside_s = defaultdict[tuple[Lane, str], float](float), defaultdict[tuple[Lane, str], float](float)
    for piece, alone, beside in chain.from_iterable(seconds_beside(problem, decisions) for decisions in plans):
        for label in (piece.label, ""):
            alone_s[piece.lane, label] += alone
            beside_s[piece.lane, label] += beside
    found = dict[Work, float]()
    for work in Work:
        own = [(work.lane, label) for label in work.label.split(", ")]
        kinds = own if any(alone_s[kind] for kind in own) else [(work.lane, "")]
        if seconds := sum(alone_s[kind] for kind in kinds):
            found[work] = sum(beside_s[kind] for kind in kinds) / seconds
    return found
