"""Fit a graph into its budget: plan and rewrite it, until a trace of what was rewritten keeps the budget.

In: a `Problem`, its `Budget`, ways to a plan, and what rewrites the graph. Out: a `Rewritten`. Graphs for training and for
inference go the same way. The compiled code is the last judge (`autohete_fx.compiler.graph`): bytes that it takes
above the budget are withheld from the plans that follow.
"""

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from torch import fx

from autohete_fx.compiler.compilation import Compilation
from autohete_fx.errors import InfeasiblePlanError
from autohete_fx.ir import Optimizer, Plan, Problem
from autohete_fx.ir.sizes import format_bytes
from autohete_fx.passes import PassContext
from autohete_fx.planner.given import recomputing
from autohete_fx.planner.infeasible import advice_of, too_small, without_frames
from autohete_fx.profiler.memory import probe

_MAX_CORRECTIONS = 8
_RESERVE = 1 / 64
"""A traced peak may be wrong by this share of the budget. Plans leave it free, so that their code rarely has to be compiled
again. Where a graph that nothing was moved in is above the budget by no more, the trace sets no limit: its code will tell."""
_WORST_TRACE = 1 / 8
"""No trace has been further above what the compiled code takes than by this share: only where it is further above the budget is
that refused before anything is compiled."""
_UNTRIED = 1 / 24
"""The part of a budget that is left free, beside the reserve, where a refusal before anything is compiled names it. Code has taken
2% more than was named without."""
_UNMEASURED = 1 / 16
"""As much more where the budget had no room to measure what kernels take beside their results. Formulas have missed 3% of a budget,
in 16 bits, that way."""
_UNSEEN_BYTES = 1024
"""Bytes that a budget which an error names leaves for scalars that no compiled code allocates, such as constants of the graph."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Budget:
    """Device memory of one graph: the bytes that plans may use, and the limit of their code.

    Attributes:
        device_bytes: what the peak of a step may be.
        withheld_bytes: how much less plans may use, since the code of earlier ones took more than their traces.
    """

    device_bytes: int
    withheld_bytes: int = 0

    @property
    def usable_bytes(self) -> int:
        """The most that a traced peak may be."""
        return int((self.device_bytes - self.withheld_bytes) * (1 - _RESERVE))

    def may_suit(self, traced_bytes: int) -> bool:
        """Whether code whose trace takes so much may keep the budget; nothing may once anything is withheld."""
        return not self.withheld_bytes and traced_bytes <= self.device_bytes * (1 + _RESERVE)

    def is_hopeless(self, traced_bytes: int) -> bool:
        """Whether no code whose trace takes so much can keep the budget."""
        return traced_bytes * (1 - _WORST_TRACE) > self.device_bytes

    def enough_for(self, traced_bytes: int) -> int:
        """The budget that would do for a trace that takes so much."""
        return int(traced_bytes / (1 - _RESERVE)) + 1 + self.withheld_bytes

    def withheld_after(self, peak_bytes: int, traced_bytes: int) -> int:
        """Bytes to withhold from the next plan, where code above the budget took ``peak_bytes``: its excess, and what its plan
        left unused.
        """
        unused = max(0, self.device_bytes - self.withheld_bytes - traced_bytes)
        return self.withheld_bytes + peak_bytes - self.device_bytes + unused

    def refusal_of_code(self, peak_bytes: int, why: str = "", *, advice: str = "") -> InfeasiblePlanError:
        """The error for compiled code that takes ``peak_bytes``, which is too much."""
        what = f"The compiled code needs {format_bytes(peak_bytes)}{why and f'. {why}'}"
        return too_small(self.device_bytes, peak_bytes + _UNSEEN_BYTES, what, advice=advice)


@dataclass(frozen=True, slots=True, kw_only=True)
class Rewritten:
    """A plan, whose peak is the traced one, and the graphs that it was written into.

    Attributes:
        problem: what the plan solves.
        moved: where the optimizer states are that leave the device, by parameter name.
        graphs, contexts: forward and backward, or one for inference; the last pass needs the contexts again.
        refusal: set where no plan's trace keeps the budget and this is the plan of least peak. It is the error to raise if the
            compiled code does not keep the budget either, or cannot be measured.
        between_bytes: of intermediates, when forward has returned.
    """

    plan: Plan
    problem: Problem
    moved: Mapping[str, Optimizer]
    graphs: tuple[fx.GraphModule, ...]
    contexts: tuple[PassContext, ...]
    refusal: InfeasiblePlanError | None = None
    between_bytes: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Planned:
    """A graph that is ready to be compiled, and what the user can look at."""

    rewritten: Rewritten
    compilation: Compilation


def fitted(
    problem: Problem,
    budget: Budget | None,
    usable_bytes: int | None,
    ways: Sequence[Callable[[Problem], Plan]],
    rewrite: Callable[[Plan], Rewritten],
    *,
    is_given: bool = False,
) -> Rewritten:
    """A plan whose traced peak is at most ``usable_bytes``.

    Where there is none, the one of least traced peak that was found, with its refusal.

    Args:
        usable_bytes: None for no limit.
        ways: to a plan, tried in their order. The last one is asked again for less, where its plan's trace takes too much.
        is_given: whether the last way has one plan only.

    Raises:
        InfeasiblePlanError: no plan keeps the budget, and no code of any could.
    """
    *others, last = ways
    for way in others:
        made = rewrite(way(dataclasses.replace(problem, device_budget_bytes=usable_bytes)))
        if usable_bytes is None or made.plan.peak_bytes <= usable_bytes:
            return made
    allowed, refused = usable_bytes, None
    for _ in range(1 if is_given else _MAX_CORRECTIONS):
        try:
            plan = last(dataclasses.replace(problem, device_budget_bytes=allowed))
        except InfeasiblePlanError as error:
            if refused is not None or error.smallest_budget_bytes is None:
                raise
            # Corrections may have gone below what is possible: see what the plan of least peak really needs.
            refused, allowed = without_frames(error), error.smallest_budget_bytes
            continue
        made = rewrite(plan)
        if usable_bytes is None or allowed is None or made.plan.peak_bytes <= usable_bytes:
            return made
        if refused is not None:
            break
        allowed = min(allowed, plan.peak_bytes) - (made.plan.peak_bytes - usable_bytes) - allowed // 1000
    if problem.training and problem.allow_recompute and not is_given:
        # The planner adds up blocks; recomputing all of them may need less than what it takes for the least.
        made = min(made, rewrite(recomputing(made.plan, problem)), key=lambda each: each.plan.peak_bytes)
    assert budget is not None and usable_bytes is not None
    if made.plan.peak_bytes <= usable_bytes:
        return made
    is_untried = is_given or budget.is_hopeless(made.plan.peak_bytes)
    enough, measuring = budget.enough_for(made.plan.peak_bytes), probe.current()
    untried = _UNTRIED + _UNMEASURED * (measuring is not None and measuring.was_held_back)
    refusal = too_small(
        budget.device_bytes,
        int(enough / (1 - untried)) if is_untried else enough,
        refused.held_up_by if refused else f"The plan needs {format_bytes(made.plan.peak_bytes)}",
        smallest_host_bytes=refused.smallest_host_budget_bytes if refused else None,
        advice=advice_of(problem),
        is_least=not is_untried,
    )
    if is_untried:
        raise refusal
    return dataclasses.replace(made, refusal=refusal)
