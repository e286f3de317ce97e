"""From a plan to rewritten graphs: the partition, and our passes on both sides of it.

In: the captured joint graph (or an inference graph), its blocks and a plan. Out: the graphs that the inner compiler
gets, with every copy an explicit node. The user's own passes run at the points that they were given for.
"""

import copy
import dataclasses
import traceback
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from autohete_fx import passes
from autohete_fx.capture.inputs import GraphInput, parameter_fqns, placeholder_inputs
from autohete_fx.errors import AutoHeteError, PassError
from autohete_fx.graph import annotations
from autohete_fx.graph.draws import DRAWN_AGAIN
from autohete_fx.graph.saved import is_copy, output_args, storage_root, written_inputs
from autohete_fx.internals import versions
from autohete_fx.internals.configs import functorch_config
from autohete_fx.internals.partitioning import is_opaque, make_graph_module, min_cut_rematerialization_partition
from autohete_fx.ir import BlockDecision, Optimizer, Plan
from autohete_fx.options import UserPass
from autohete_fx.passes import PIPELINE, Pass, PassContext, Stage


@dataclass(slots=True, kw_only=True)
class Partitioned:
    """A forward and a backward graph; ``num_outputs`` of forward's outputs are the user's, the others saved."""

    forward: fx.GraphModule
    backward: fx.GraphModule
    num_outputs: int


def keep_everything(labels: Sequence[str]) -> Plan:
    """The plan that changes nothing."""
    return Plan(labels=tuple(labels), decisions=tuple(BlockDecision() for _ in labels))


def copy_graph(gm: fx.GraphModule) -> fx.GraphModule:
    """A copy whose nodes can be rewritten; modules and fake values are shared. Its code is generated when somebody runs or reads
    it, where Dynamo has asked for that."""
    graph = fx.Graph()
    copied: Any = graph.graph_copy(gm.graph, {}, return_output_node=True)  # the outputs, and the old output node
    graph.output(copied[0]).meta = copy.copy(copied[1].meta)
    return make_graph_module(gm, graph)


def separate_written_inputs(joint: fx.GraphModule) -> None:
    """Give the graph a copy of each input that forward writes to and the graph also reads.

    A running mean and the vectors of a spectral norm are such. The memory of the input itself has the new value when backward
    runs. Backward's part of the copy is saved; where it needs nothing, Inductor fuses the copy with what reads it.
    ``torch.compile`` alone makes none, and can be wrong.
    """
    for written in written_inputs(joint):
        readers = [user for user in written.users if user.op != "output" and not is_copy(user)]
        if not readers:
            continue
        first = next(node for node in joint.graph.nodes if node in readers)
        with joint.graph.inserting_before(first):
            separate = joint.graph.call_function(torch.ops.aten.clone.default, (written,))
        separate.meta["val"] = torch.ops.aten.clone.default(written.meta["val"])
        if "nn_module_stack" in first.meta:
            separate.meta["nn_module_stack"] = first.meta["nn_module_stack"]
        for reader in readers:
            reader.replace_input_with(written, separate)


def partition(
    joint: fx.GraphModule,
    joint_inputs: Sequence[object],
    context: PassContext,
    keywords: Mapping[str, object],
    verify: bool = True,
    pipeline: Iterable[Pass] = PIPELINE,
) -> Partitioned:
    """Tag what the plan recomputes and split with PyTorch's min-cut partitioner. ``joint`` is consumed.

    ``joint_inputs`` and ``keywords`` are what AOTAutograd hands to a partitioner.
    """
    joint = passes.run(pipeline, joint, context, verify_graph=verify)
    # On CUDA, PyTorch would draw recomputed random numbers from generators of their own, seeded once: other dropout
    # masks than without recomputation, and deaf to torch.manual_seed. Saving the default generator's state is exact.
    with functorch_config.patch(graphsafe_rng_functionalization=False):
        forward, backward = min_cut_rematerialization_partition(joint, joint_inputs, **keywords)  # type: ignore[arg-type]
    num_outputs = int(keywords["num_fwd_outputs"])  # type: ignore[call-overload]
    _put_tensors_first(forward, backward, num_outputs)
    for gm in (forward, backward):
        _annotate_drawn_again(gm)
    return Partitioned(forward=forward, backward=backward, num_outputs=num_outputs)


def _put_tensors_first(forward: fx.GraphModule, backward: fx.GraphModule, num_outputs: int) -> None:
    """Among what is saved, tensors come before the meshes of DTensors, as AOTAutograd has it. Its partitioner puts states of random
    generators, which recomputation saves, after meshes."""
    output = next(node for node in reversed(forward.graph.nodes) if node.op == "output")
    results = output_args(forward)
    saved = results[num_outputs:]
    meshes = [node for node in saved if isinstance(node, fx.Node) and is_opaque(node.meta.get("val"))]
    states = saved[saved.index(meshes[0]) :] if meshes else []
    states = [node for node in states if isinstance(node, fx.Node) and isinstance(node.meta.get("val"), torch.Tensor)]
    if not states:
        return
    others = [node for node in saved if node not in states]
    at = others.index(meshes[0])
    output.args = (tuple([*results[:num_outputs], *others[:at], *states, *others[at:]]),)
    placeholders = [node for node in backward.graph.nodes if node.op == "placeholder"]
    first = next(node for node in placeholders if is_opaque(node.meta.get("val")))
    for node in placeholders[placeholders.index(first) :]:
        if isinstance(node.meta.get("val"), torch.Tensor) and not str(node.target).startswith("tangents"):
            first.prepend(node)
    forward.recompile()
    backward.recompile()


def _annotate_drawn_again(gm: fx.GraphModule) -> None:
    """Nodes that the partitioner made for random operations have no block: give them that of their result."""
    for node in gm.graph.nodes:
        if node.target in DRAWN_AGAIN:
            block = next((b for user in node.users if (b := annotations.block_of(user)) is not None), None)
            if block is not None:
                annotations.set_block(node, block)


def rewrite_training(
    split: Partitioned,
    plan: Plan,
    session: str,
    inputs: Sequence[GraphInput],
    owners: Mapping[str, int],
    moved: Mapping[str, Optimizer],
    verify: bool = True,
    pipeline: Sequence[Pass] = PIPELINE,
    offloadable: Sequence[str] | None = None,
    awaited: Collection[str] = (),
) -> tuple[PassContext, PassContext]:
    """Insert copies in both graphs. Returns the contexts of forward and backward, which the last pass needs again.

    Args:
        split: rewritten in place.
        session: digest of the runtime session that the copies will run in.
        owners: block by parameter name.
        moved: where optimizer states are that leave the device, by parameter name.
        pipeline: the passes; those of other stages are left out.
        offloadable: what the profiler counted as such, largest first (`saved.offloadable`); None: what ``split`` saves.
        awaited: names of parameters whose gradients somebody waits for.
    """
    forward_owners = owners_by_placeholder(split.forward, inputs, owners)
    sent = {name: owners[name] for name, place in moved.items() if place.updates_on_host}
    gradients = _parameters_of_gradients(split.backward, inputs, sent)
    forward = PassContext(
        stage=Stage.FORWARD,
        plan=plan,
        session=session,
        owners=forward_owners,
        staying=staying_states(split.forward, inputs, moved),
        num_outputs=split.num_outputs,
    )
    backward = PassContext(
        stage=Stage.BACKWARD,
        plan=plan,
        session=session,
        owners={**owners_by_placeholder(split.backward, inputs, owners), **_saved_views(split, forward_owners)},
        gradients=tuple(None if item is None else owners[item.name] for item in gradients),
        gradient_strides=tuple(None if item is None else _strides_of(item) for item in gradients),
        gradient_edges=tuple(None if item is None else item.edge for item in gradients),
        awaited_edges=_awaited_edges(split.backward, inputs, awaited) if awaited else (),
        edges={
            **_parameter_edges(split.backward, inputs),
            **_saved_views(split, _parameter_edges(split.forward, inputs)),
        },
    )
    offloaded = passes.select_offloaded(split.forward, forward, offloadable)
    kept = passes.select_kept(split.backward, backward)
    forward = dataclasses.replace(forward, offloaded=offloaded, kept=kept)
    backward = dataclasses.replace(backward, offloaded=offloaded, kept=kept)
    passes.run(pipeline, split.forward, forward, given=("blocks",), verify_graph=verify)
    passes.run(pipeline, split.backward, backward, given=("blocks",), verify_graph=verify)
    return forward, backward


def owners_by_placeholder(
    gm: fx.GraphModule, inputs: Sequence[GraphInput], owners: Mapping[str, int]
) -> dict[str, int]:
    """Owning block by name of each parameter's placeholder."""
    return {name: owners[fqn] for name, fqn in parameter_fqns(gm, inputs).items() if fqn in owners}


def staying_states(gm: fx.GraphModule, inputs: Sequence[GraphInput], moved: Collection[str]) -> frozenset[str]:
    """Placeholders of the parameters whose optimizer states stay on the device."""
    return frozenset(name for name, fqn in parameter_fqns(gm, inputs).items() if fqn not in moved)


def _parameter_edges(gm: fx.GraphModule, inputs: Sequence[GraphInput]) -> dict[str, int]:
    """Edge in autograd's graph by name of each parameter's placeholder."""
    found = placeholder_inputs(gm, inputs).items()
    return {name: item.edge for name, item in found if item.is_parameter and item.edge is not None}


def _awaited_edges(
    backward: fx.GraphModule, inputs: Sequence[GraphInput], awaited: Collection[str]
) -> tuple[int | None, ...]:
    """For each output of backward: the edge of the parameter that it is the gradient of, where somebody waits for that."""
    gradients = _parameters_of_gradients(backward, inputs, awaited)
    return tuple(None if item is None else item.edge for item in gradients)


def _strides_of(item: GraphInput) -> tuple[int, ...]:
    assert item.tensor is not None
    return tuple(item.tensor.stride())


def _saved_views(split: Partitioned, known: Mapping[str, int]) -> dict[str, int]:
    """Saved tensors that are views of parameters: in backward they are placeholders over the parameter's memory. Of each,
    what is known of the parameter's placeholder in forward."""
    found = {}
    for node in output_args(split.forward)[split.num_outputs :]:
        if isinstance(node, fx.Node) and node.op != "placeholder":
            root = storage_root(node)
            if root.op == "placeholder" and root.name in known:
                found[node.name] = known[root.name]
    return found


def _parameters_of_gradients(
    backward: fx.GraphModule, inputs: Sequence[GraphInput], names: Collection[str]
) -> list[GraphInput | None]:
    """For each output of backward: the parameter that it is the gradient of, where that is one of these names."""
    descriptions = next(n for n in reversed(backward.graph.nodes) if n.op == "output").meta["desc"]
    found: list[GraphInput | None] = []
    for description in descriptions:
        index = versions.gradient_index(description)
        item = inputs[index] if index is not None and index < len(inputs) else None
        is_named = item is not None and item.is_parameter and item.tensor is not None and item.name in names
        found.append(item if is_named else None)
    return found


def partition_key(plan: Plan, *, gathers: bool) -> tuple[object, ...]:
    """Equal for plans under which `partition` splits a graph alike. They recompute the same, and where the graph ``gathers``, they
    keep the same."""
    return tuple((d.activations if d.recomputes else None, gathers and d.keeps_fetched) for d in plan.decisions)


def copied(split: Partitioned) -> Partitioned:
    """Both graphs as copies whose nodes can be rewritten (`copy_graph`)."""
    return dataclasses.replace(split, forward=copy_graph(split.forward), backward=copy_graph(split.backward))


def run_user_passes(user_passes: Sequence[UserPass], gm: fx.GraphModule, context: PassContext) -> fx.GraphModule:
    """The user's passes in order, linted after each. Raises PassError where one raises or leaves no valid graph."""
    for user_pass in user_passes:
        name = getattr(user_pass, "__qualname__", type(user_pass).__name__)
        try:
            result = user_pass(gm, context)
        except AutoHeteError:
            raise
        except Exception as error:
            # Dynamo drops the cause of what a backend raises, so the message says where.
            where = "".join(traceback.format_tb(error.__traceback__)[1:])
            raise PassError(
                f"the pass {name} raised {error!r} on the {context.stage.value} graph; correct it or take it out of"
                f" options['passes']. It was raised here:\n{where}"
            ) from error
        if result is not None and not isinstance(result, fx.GraphModule):
            raise PassError(
                f"the pass {name} returned {type(result).__name__}; expected a GraphModule, or None for in-place changes"
            )
        gm = gm if result is None else result
        try:
            gm.graph.lint()
        except RuntimeError as error:
            raise PassError(
                f"the pass {name} left a broken graph: {error}; expected one that graph.lint() accepts. Correct the pass, or take"
                " it out of options['passes']"
            ) from error
        gm.recompile()
    return gm
