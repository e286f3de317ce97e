"""The contract of a pass, and the runner.

A pass is a plain function ``(GraphModule, PassContext) -> GraphModule``. It rewrites the graph that it is given and
returns it; it reads the plan and never a cost. A `Pass` beside it declares its needs and its results.
`run` lints, recompiles, verifies and logs; passes do none of that.
"""

import contextlib
import enum
import logging
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import fx

from autohete_fx.errors import PassError
from autohete_fx.graph import annotations, collectives, ops, sizes
from autohete_fx.graph.saved import offloadable, saved_views
from autohete_fx.internals.modes import detect_fake_mode
from autohete_fx.internals.operators import OpOverload
from autohete_fx.ir import Activations, BlockDecision, Lane, Plan

log = logging.getLogger(__name__)


class Stage(enum.Enum):
    """The kinds of graph that passes see."""

    JOINT = "joint"
    FORWARD = "forward"
    BACKWARD = "backward"
    INFERENCE = "inference"
    FINAL = "final"
    """Any of the last three, after the compiler's own post-grad passes."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PassContext:
    """All that a pass may know besides the graph.

    Attributes:
        stage: the kind of graph.
        plan: the decisions.
        session: digest under which the runtime is registered; becomes an argument of inserted ops.
        block_of: block index by node name; read by `annotate_blocks` only.
        owners: block index that owns the parameter of a placeholder, by placeholder name. In a backward graph
            placeholders that are saved *views* of parameters stand here too.
        offloaded: saved activations that leave in forward and return in backward, by name, and the block whose decision
            sends each (`select_offloaded`).
        kept: names of saved parameters, and of saved views of them, whose fetched copies are saved instead (`select_kept`).
        staying: placeholders of parameters whose optimizer states stay on the device, although their block's decision moves
            those of others.
        gradients: in a backward graph, the owning block of the parameter whose gradient each output is. It is None for outputs
            that are no parameter's gradient, or that of one that the device updates; empty elsewhere.
        gradient_strides: strides of those parameters, likewise.
        gradient_edges: their positions among the tensors that the captured graph gets, which are edges in autograd's graph,
            likewise.
        awaited_edges: the same of outputs whose gradients somebody waits for (`autohete_fx.runtime.announced`); None for others,
            and empty where nobody waits.
        edges: in a backward graph, that edge by name of each placeholder that is such a parameter, or a saved view of it.
        num_outputs: in a forward graph, how many outputs are the user's; the others are saved for backward.
    """

    stage: Stage
    plan: Plan
    session: str = ""
    block_of: Mapping[str, int] = field(default_factory=dict)
    owners: Mapping[str, int] = field(default_factory=dict)
    offloaded: Mapping[str, int] = field(default_factory=dict)
    kept: frozenset[str] = frozenset()
    staying: frozenset[str] = frozenset()
    gradients: tuple[int | None, ...] = ()
    gradient_strides: tuple[tuple[int, ...] | None, ...] = ()
    gradient_edges: tuple[int | None, ...] = ()
    awaited_edges: tuple[int | None, ...] = ()
    edges: Mapping[str, int] = field(default_factory=dict)
    num_outputs: int = 0

    @property
    def num_blocks(self) -> int:
        """How many blocks the plan has."""
        return len(self.plan.decisions)

    @property
    def recomputes(self) -> bool:
        """Whether this graph runs anything of the forward again."""
        return self.stage is Stage.BACKWARD and any(decision.recomputes for decision in self.plan.decisions)

    def decision(self, block: int) -> BlockDecision:
        """The decision for a block."""
        return self.plan.decisions[block]

    def region(self, block: int) -> int:
        """Where a block stands in this graph's order: backward graphs run from the last block to the first."""
        return self.num_blocks - 1 - block if self.stage is Stage.BACKWARD else block


PassFunction = Callable[[fx.GraphModule, PassContext], fx.GraphModule]


@dataclass(frozen=True, slots=True, kw_only=True)
class Pass:
    """A pass and its contract.

    Attributes:
        function: the pass.
        stages: the graphs that it runs on.
        requires: facts that must hold of the graph before, each provided by an earlier pass.
        provides: facts that hold after.
        conflicts: facts that must not hold before.
    """

    function: PassFunction
    stages: tuple[Stage, ...]
    requires: frozenset[str] = frozenset()
    provides: frozenset[str] = frozenset()
    conflicts: frozenset[str] = frozenset()

    @property
    def name(self) -> str:
        """The function's name."""
        return self.function.__name__


def validate(pipeline: Iterable[Pass], stage: Stage, given: Iterable[str] = ()) -> tuple[Pass, ...]:
    """The passes of one stage, in order. Raises PassError if a contract cannot hold."""
    facts = set(given)
    chosen = []
    for item in pipeline:
        if stage not in item.stages:
            continue
        if missing := item.requires - facts:
            raise PassError(
                f"pass {item.name} on the {stage.value} graph requires {sorted(missing)}, which no earlier pass provides; "
                f"earlier passes provide {sorted(facts)}; move it after the pass that does"
            )
        if clash := item.conflicts & facts:
            raise PassError(
                f"pass {item.name} on the {stage.value} graph conflicts with {sorted(clash)}, provided by an earlier pass; expected"
                " no pass that provides it. Leave one of the two out, or change their order"
            )
        facts |= item.provides
        chosen.append(item)
    return tuple(chosen)


def run(
    pipeline: Iterable[Pass],
    gm: fx.GraphModule,
    context: PassContext,
    *,
    stage: Stage | None = None,
    given: Iterable[str] = (),
    verify_graph: bool = True,
) -> fx.GraphModule:
    """Run the passes of ``stage`` (default: the context's) in order. Raises PassError where one leaves a broken graph."""
    for item in validate(pipeline, stage or context.stage, given):
        before = len(gm.graph.nodes)
        gm = item.function(gm, context)
        if verify_graph:
            try:
                gm.graph.lint()
                if stage is not Stage.FINAL:  # control dependencies wrap nodes, and use handles
                    verify(gm)
            except (AssertionError, RuntimeError) as error:
                raise PassError(f"pass {item.name} left a broken {context.stage.value} graph: {error}") from error
        log.debug("%s: %s: %d -> %d nodes", context.stage.value, item.name, before, len(gm.graph.nodes))
    gm.recompile()  # once: passes read nodes, not code
    return gm


def verify(gm: fx.GraphModule) -> None:
    """Assert that inserted nodes are well formed: every issued copy is annotated, and waited for exactly once, on its source.

    Only what passes its handle on may stand between. A collective is waited for once for each of its sources.
    """
    for node in gm.graph.nodes:
        if node.op == "call_function" and node.target in collectives.ISSUING_COLLECTIVES:
            assert annotations.inserted(node) is not None, f"{node.name} carries no annotation"
            waited = {user.args[2]: user.args[1] for user in node.users if user.target in collectives.WAITS}
            assert waited == dict(enumerate(node.args[0])), (
                f"{node.name} must be waited for on each of {node.args[0]}, is on {waited}"
            )
        if node.op != "call_function" or node.target not in ops.ISSUING_OPS:
            continue
        assert annotations.inserted(node) is not None, f"{node.name} carries no annotation"
        waits = list(node.users)
        while len(waits) == 1 and waits[0].target in ops.PASSING_OPS:
            assert annotations.inserted(waits[0]) is not None, f"{waits[0].name} carries no annotation"
            waits = list(waits[0].users)
        assert len(waits) == 1 and waits[0].target is ops.wait, (
            f"{node.name} must be used by one wait, is used by {waits}"
        )
        assert waits[0].args[1] is node.args[0], (
            f"{waits[0].name} must keep {node.args[0]} alive, keeps {waits[0].args[1]}"
        )
        assert annotations.inserted(waits[0]) is not None, f"{waits[0].name} carries no annotation"


def output_node(gm: fx.GraphModule) -> fx.Node:
    """The one output node."""
    return next(node for node in reversed(gm.graph.nodes) if node.op == "output")


def num_bytes(node: fx.Node) -> int:
    """Bytes of the node's result."""
    return sizes.num_bytes(node.meta["val"])


def values_like(value: torch.Tensor) -> contextlib.AbstractContextManager[object]:
    """A context in which values of new nodes are made: they are fake where ``value`` is."""
    return detect_fake_mode(value) or torch.no_grad()


def insert_copy(
    gm: fx.GraphModule,
    target: OpOverload,
    src: fx.Node,
    context: PassContext,
    *,
    what: str,
    block: int,
    issue_slot: int,
    wait_slot: int,
) -> fx.Node:
    """Add an issuing node and its wait after ``src`` and return the wait.

    The graph runs as it stands, each copy on the lane of its direction in the order of issue. `sort_regions` moves copies to
    their slots, and `lower_lanes` gives them their priorities.
    """
    op = target._schema.name.split("::")[1]
    loads = target is not ops.offload
    lane = Lane.H2D if loads else Lane.D2H
    size = num_bytes(src)
    arguments = (src, context.session, lane.index, 0)
    handle = gm.graph.create_node("call_function", target, arguments, name=f"{op}_{src.name}")
    wait = gm.graph.create_node("call_function", ops.wait, (handle, src, context.session), name=f"wait_{src.name}")
    src.append(handle)
    handle.append(wait)
    with values_like(src.meta["val"]):
        handle.meta["val"] = torch.empty((1,), dtype=torch.int64, device="cpu")
        wait.meta["val"] = ops.empty_copy_of(src.meta["val"])
    note = annotations.Inserted(op=op, what=what, block=block, slot=issue_slot, before_slot=True, num_bytes=size)
    annotations.set_inserted(handle, note)
    annotations.set_inserted(
        wait,
        annotations.Inserted(op="wait", what=what, block=block, slot=wait_slot, before_slot=not loads, num_bytes=size),
    )
    return wait


def select_offloaded(
    forward: fx.GraphModule, context: PassContext, candidates: Sequence[str] | None = None
) -> dict[str, int]:
    """The saved activations that offloading blocks send to the host, by name, and the block that sends each.

    Args:
        candidates: names of the nodes whose storages may leave, the largest first: `saved.offloadable` of the graph that
            was profiled. None: of ``forward``. That graph may save other tensors than this one, where a neighbouring block
            recomputes; what the profiler did not count stays.
    """
    views = {root.name: saved for root, saved in saved_views(forward, context.num_outputs).items()}
    blocks = {node.name: annotations.block_of(node) for node in forward.graph.nodes}
    if candidates is None:
        candidates = [root.name for root in offloadable(forward, context.num_outputs)]
    by_block: dict[int, list[str]] = {}
    for name in candidates:
        if (block := blocks.get(name)) is not None and context.decision(block).activations is Activations.OFFLOAD:
            by_block.setdefault(block, []).append(name)
    return {
        view.name: block
        for block, names in by_block.items()
        for name in names[: context.decision(block).num_offloaded]
        for view in views.get(name, ())
    }
