"""FX passes, one per file. Import them as ``autohete_fx.passes``.

`PIPELINE` is every pass in order; a stage runs those that name it. `only` is a part of it, for another backend::

    passes.run(passes.only(tag_recompute), joint, PassContext(stage=Stage.JOINT, plan=plan, block_of=block_of))
"""

if __name__ != "autohete_fx.passes":
    raise ImportError(f"import autohete_fx.passes, not {__name__}: two copies of one module would not know each other")

from autohete_fx.errors import PassError
from autohete_fx.graph.saved import output_args
from autohete_fx.passes.annotate_blocks import annotate_blocks
from autohete_fx.passes.announce_gradients import announce_gradients
from autohete_fx.passes.assign_lanes import assign_lanes
from autohete_fx.passes.await_updates import await_updates
from autohete_fx.passes.base import (
    Pass,
    PassContext,
    PassFunction,
    Stage,
    run,
    select_offloaded,
    validate,
    verify,
)
from autohete_fx.passes.gather_again import gather_again
from autohete_fx.passes.gather_parameters import gather_parameters
from autohete_fx.passes.lower_lanes import lower_lanes
from autohete_fx.passes.merge_reduces import merge_reduces
from autohete_fx.passes.offload_activations import offload_activations
from autohete_fx.passes.offload_gradients import offload_gradients
from autohete_fx.passes.pin_positions import pin_positions, pinned_after, regions_apart
from autohete_fx.passes.prefetch_parameters import prefetch_parameters, select_kept
from autohete_fx.passes.reduce_gradients import reduce_gradients
from autohete_fx.passes.reload_activations import reload_activations
from autohete_fx.passes.sort_regions import sort_regions
from autohete_fx.passes.start_updates import start_updates
from autohete_fx.passes.tag_recompute import tag_recompute
from autohete_fx.passes.take_norms import take_norms

_FORWARD, _BACKWARD, _INFERENCE = Stage.FORWARD, Stage.BACKWARD, Stage.INFERENCE


def _facts(*names: str) -> frozenset[str]:
    return frozenset(names)


PIPELINE: tuple[Pass, ...] = (
    Pass(function=annotate_blocks, stages=(Stage.JOINT, _INFERENCE), provides=_facts("blocks")),
    Pass(function=merge_reduces, stages=(Stage.JOINT,)),
    Pass(function=tag_recompute, stages=(Stage.JOINT,), requires=_facts("blocks"), provides=_facts("recompute")),
    Pass(function=gather_again, stages=(Stage.JOINT,), requires=_facts("recompute")),
    Pass(
        function=gather_parameters,
        stages=(_FORWARD, _BACKWARD, _INFERENCE),
        requires=_facts("blocks"),
        provides=_facts("gathered"),
        conflicts=_facts("lanes"),
    ),
    Pass(
        function=reduce_gradients,
        stages=(_BACKWARD,),
        requires=_facts("blocks"),
        provides=_facts("reduced"),
        conflicts=_facts("lanes"),
    ),
    Pass(function=offload_activations, stages=(_FORWARD,), requires=_facts("blocks"), conflicts=_facts("lanes")),
    Pass(function=reload_activations, stages=(_BACKWARD,), requires=_facts("blocks"), conflicts=_facts("lanes")),
    Pass(
        function=prefetch_parameters,
        stages=(_FORWARD, _BACKWARD, _INFERENCE),
        requires=_facts("blocks", "gathered"),
        conflicts=_facts("lanes"),
    ),
    Pass(function=await_updates, stages=(_FORWARD, _INFERENCE), requires=_facts("blocks"), conflicts=_facts("lanes")),
    Pass(
        function=offload_gradients,
        stages=(_BACKWARD,),
        requires=_facts("blocks", "reduced"),
        provides=_facts("gradients"),
        conflicts=_facts("lanes"),
    ),
    Pass(
        function=start_updates,
        stages=(_BACKWARD,),
        requires=_facts("blocks", "gradients"),
        conflicts=_facts("lanes"),
    ),
    Pass(function=take_norms, stages=(_BACKWARD,), requires=_facts("blocks", "gradients"), conflicts=_facts("lanes")),
    Pass(
        function=announce_gradients,
        stages=(_BACKWARD,),
        requires=_facts("blocks", "gradients"),
        conflicts=_facts("lanes"),
    ),
    Pass(function=assign_lanes, stages=(_FORWARD, _BACKWARD, _INFERENCE), provides=_facts("lanes")),
    Pass(
        function=lower_lanes,
        stages=(_FORWARD, _BACKWARD, _INFERENCE),
        requires=_facts("lanes"),
        provides=_facts("lowered"),
    ),
    Pass(
        function=sort_regions,
        stages=(_FORWARD, _BACKWARD, _INFERENCE),
        requires=_facts("blocks", "lowered"),
        provides=_facts("sorted"),
    ),
    Pass(function=pin_positions, stages=(Stage.FINAL,), requires=_facts("blocks", "sorted")),
)


def only(*functions: PassFunction) -> tuple[Pass, ...]:
    """These passes of `PIPELINE` with all that they require, in its order. Raises PassError for any other function."""
    names = [item.name for item in PIPELINE]
    if strangers := [f for f in functions if all(f is not item.function for item in PIPELINE)]:
        raise PassError(
            f"{strangers[0]!r} is not in PIPELINE; expected some of {', '.join(names)}; "
            "to add a pass of your own, put a Pass after what this returns"
        )
    required: frozenset[str] = frozenset()
    chosen: list[Pass] = []
    for item in reversed(PIPELINE):
        if item.function in functions or item.provides & required:
            required |= item.requires
            chosen.append(item)
    return tuple(reversed(chosen))


__all__ = [
    "PIPELINE",
    "Pass",
    "PassContext",
    "PassFunction",
    "Stage",
    "annotate_blocks",
    "announce_gradients",
    "assign_lanes",
    "await_updates",
    "gather_again",
    "gather_parameters",
    "lower_lanes",
    "merge_reduces",
    "offload_activations",
    "offload_gradients",
    "only",
    "output_args",
    "pin_positions",
    "pinned_after",
    "prefetch_parameters",
    "reduce_gradients",
    "regions_apart",
    "reload_activations",
    "run",
    "select_kept",
    "select_offloaded",
    "sort_regions",
    "start_updates",
    "tag_recompute",
    "take_norms",
    "validate",
    "verify",
]
