"""Trace a model that nobody has: from a `Blueprint` and a `Machine` to a step's graphs and what they cost there.

The model is traced as the backend traces it, from fake tensors on a CPU. That takes Dynamo, AOTAutograd's joint graph,
Inductor's joint passes, grouping, and the default partition. The graphs are then read as graphs of the machine's device, and
the analytic profiler prices them with its rates.
"""

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import fx

from autohete_fx import passes
from autohete_fx.capture.grouping import block_index, group_blocks
from autohete_fx.capture.inputs import GraphInput, graph_inputs, parameter_fqns
from autohete_fx.compiler import rewriting
from autohete_fx.compiler.fixed_bytes import input_bytes, small_bytes, unread, unread_bytes
from autohete_fx.compiler.problem import Limits, make_problem, num_ranks, param_infos
from autohete_fx.errors import AutoHeteError, CaptureError
from autohete_fx.internals import dynamo, garbage
from autohete_fx.internals.dynamo import Unsupported
from autohete_fx.internals.inductor import Partitioner, run_without_code
from autohete_fx.internals.modes import FakeTensorMode
from autohete_fx.ir import BlockGraph, Machine, Plan
from autohete_fx.ir.labels import labels_of
from autohete_fx.optim import AdamW
from autohete_fx.options import Options
from autohete_fx.passes import PassContext, Stage
from autohete_fx.profiler import Partition, profile_analytic
from autohete_fx.profiler.flops import block_flops
from autohete_fx.profiler.retarget import retarget
from autohete_fx.runtime.placement import is_movable
from autohete_fx.runtime.shard import shard
from autohete_fx.runtime.shard.imagined import DeviceMesh, imagined_mesh
from autohete_fx.runtime.shard.parts import part_of
from autohete_fx.whatif.blueprint import Blueprint, Sketch
from autohete_fx.whatif.depth import Small, TracedStep, deepened, deepened_evenly, even_layers, shallow_layers

_TRACED_ON = "cpu"
"""The type of device that the traced module's tensors are on, whatever device the step is planned for."""


@dataclass(frozen=True, kw_only=True)
class Captured:
    """A training step's graphs, which no machine has priced yet.

    Attributes:
        partition: the default one, on the type of device that was asked for.
        params: of the traced module, by name.
        optimizer: that the parameters belong to; it says how large their states are.
        inputs: of Dynamo's graph, parameters and buffers among them.
        unread: parameters and buffers of the module, by name, that the graph does not read.
        batch: sequences of a micro-batch, and tokens of each.
    """

    partition: Partition
    params: Mapping[str, torch.nn.Parameter]
    optimizer: AdamW
    inputs: tuple[GraphInput, ...]
    unread: Mapping[str, torch.Tensor]
    batch: tuple[int, int]


def trace_model(
    blueprint: Blueprint, machine: Machine, options: Options, num_ranks: int = 1, num_replicas: int = 1
) -> TracedStep:
    """The costs of one training step of the model on the machine, all of its layers included.

    Args:
        num_ranks: how many ranks train the model together. The machine is that of one of them, and costs are the first one's.
        num_replicas: how many of them hold the same shards.

    Raises:
        CaptureError: the model does not compile to one graph.
        ShardError: the model cannot be sharded.
    """
    if num_ranks == 1:
        return _traced_model(blueprint, machine, options, None)
    with imagined_mesh(num_ranks, num_replicas=num_replicas) as mesh:
        return _traced_model(blueprint, machine, options, mesh)


def capture_step(blueprint: Blueprint, num_layers: int | None, device_type: str) -> Captured:
    """The graphs of one training step with so many layers (all of them where None), for any machine of a type of device.

    Raises:
        CaptureError: the model does not compile to one graph.
    """
    return _captured(blueprint, num_layers, device_type, None)


def _traced_model(blueprint: Blueprint, machine: Machine, options: Options, mesh: DeviceMesh | None) -> TracedStep:
    whole = None if blueprint.num_layers is None else _from_few(blueprint, blueprint.num_layers, machine, options, mesh)
    return whole or _trace(blueprint, None, machine, options, mesh)


def _from_few(
    blueprint: Blueprint, num_layers: int, machine: Machine, options: Options, mesh: DeviceMesh | None
) -> TracedStep | None:
    """The step, told from a trace of some of its layers; None where that cannot be."""
    period = blueprint.period
    few = (even_layers if blueprint.draws else shallow_layers)(num_layers, period)
    if few is None or not _are_alike(blueprint, few, num_layers):
        return None
    step = _trace(blueprint, few, machine, options, mesh)
    if blueprint.draws:
        return deepened_evenly(step, num_layers=num_layers, period=period)
    deeper = _trace(blueprint, few + period, machine, options, mesh)
    return deepened(step, deeper, num_layers=num_layers, period=period)


def _are_alike(blueprint: Blueprint, few: int, num_layers: int) -> bool:
    """Whether each period of layers after the first few has as many parameters. A configuration may make some of another kind."""

    def count(layers: int | None) -> int:
        return sum(param.numel() for param in blueprint.build(FakeTensorMode(), layers).module.parameters())

    of_few, of_more = count(few), count(few + blueprint.period)
    return count(None) == of_few + (num_layers - few) // blueprint.period * (of_more - of_few)


def _trace(
    blueprint: Blueprint, num_layers: int | None, machine: Machine, options: Options, mesh: DeviceMesh | None
) -> TracedStep:
    return _priced(_captured(blueprint, num_layers, machine.device_type, mesh), machine, options)


def _captured(blueprint: Blueprint, num_layers: int | None, device_type: str, mesh: DeviceMesh | None) -> Captured:
    mode = FakeTensorMode()
    sketch = blueprint.build(mode, num_layers)
    with mode:
        if mesh is not None:
            shard(sketch.module, mesh)
        return _captured_step(blueprint.name, sketch, device_type)


def _captured_step(name: str, sketch: Sketch, device_type: str) -> Captured:
    """Compile one step as the backend would, up to where code would be generated."""
    optimizer = AdamW(sketch.module.parameters())  # says what its states take, and that they can live on the host
    found: list[Captured] = []

    def look(gm: fx.GraphModule, example_inputs: Sequence[object]) -> Callable[..., object]:
        inputs = graph_inputs(gm, example_inputs)
        others = dict(unread([sketch.module], inputs))  # here: tensors of one fake mode are nothing to another

        def partition(
            joint: fx.GraphModule, joint_inputs: Sequence[object], **keywords: object
        ) -> tuple[fx.GraphModule, fx.GraphModule]:
            try:
                blocks, split = _partitioned(joint, joint_inputs, keywords, inputs)
                params = {item.name: item.tensor for item in inputs if isinstance(item.tensor, torch.nn.Parameter)}
                found.append(
                    Captured(
                        partition=_on_device(blocks, split, inputs, params, device_type),
                        params=params,
                        optimizer=optimizer,
                        inputs=inputs,
                        unread=others,
                        batch=sketch.batch,
                    )
                )
            except AutoHeteError as error:
                raise dynamo.surfacing(error) from error.__cause__
            return split.forward, split.backward

        return run_without_code(gm, example_inputs, Partitioner(partition, "what-if"))

    torch.compiler.reset()
    try:
        with garbage.without_collection():
            torch.compile(sketch.loss, backend=look, fullgraph=True, dynamic=False)(*sketch.inputs)
    except Unsupported as error:
        reason = str(error).strip().partition("\n")[0]
        raise CaptureError(
            f"{name} does not compile to one graph: {reason}; expected a model without graph breaks. Plan it where it runs,"
            " with autohete_fx.preview"
        ) from error
    finally:
        torch.compiler.reset()
    if len(found) != 1:
        raise CaptureError(
            f"{name} has nothing to train: no parameter requires a gradient. Expected was at least one that does. Give a model"
            " whose parameters are not all frozen"
        )
    return found[0]


def _partitioned(
    joint: fx.GraphModule, joint_inputs: Sequence[object], keywords: dict[str, object], inputs: Sequence[GraphInput]
) -> tuple[BlockGraph, rewriting.Partitioned]:
    """Group and partition a joint graph, as for training."""
    rewriting.separate_written_inputs(joint)
    blocks = group_blocks(joint, parameter_fqns(joint, inputs))
    neutral = rewriting.keep_everything(labels_of(blocks.blocks))
    context = PassContext(stage=Stage.JOINT, plan=neutral, block_of=block_index(blocks))
    return blocks, rewriting.partition(joint, joint_inputs, context, keywords)


def _on_device(
    blocks: BlockGraph,
    split: rewriting.Partitioned,
    inputs: Sequence[GraphInput],
    params: Mapping[str, torch.nn.Parameter],
    device_type: str,
) -> Partition:
    """The partition, read as one of graphs of a device."""
    graphs = [rewriting.copy_graph(graph) for graph in (split.forward, split.backward)]
    if device_type != "cpu":
        for graph in graphs:
            retarget(graph, torch.device(device_type, 0))
    return Partition(
        forward=graphs[0],
        backward=graphs[1],
        num_outputs=split.num_outputs,
        blocks=blocks,
        block_of=block_index(blocks),
        params=param_infos(graphs[0], inputs, params),
        after=_order_of_regions(split, params, rewriting.keep_everything(labels_of(blocks.blocks))),
    )


def _priced(captured: Captured, machine: Machine, options: Options) -> TracedStep:
    """The step with the analytic profile of a machine."""
    partition, params = captured.partition, captured.params
    limits = Limits(
        device_budget_bytes=None,
        host_budget_bytes=None,
        fixed_bytes=input_bytes(captured.inputs)
        + small_bytes(params.values(), training=True, accumulates=options.micro_batches > 1)
        + unread_bytes(captured.unread.values(), _TRACED_ON),
    )
    problem = make_problem(
        partition.blocks,
        profile_analytic(partition, machine).costs,
        machine,
        options,
        limits,
        params,
        training=True,
    )
    kinds = tuple(block.kind for block in partition.blocks.blocks)
    layers = sum(kind is kind.LAYER for kind in kinds)
    small = tuple(
        _small_of(captured, block.label, micro_batches=options.micro_batches) for block in partition.blocks.blocks
    )
    return TracedStep(
        problem=problem,
        kinds=kinds,
        flops=block_flops(partition),
        num_params=sum(map(_num_elements, (*params.values(), *_parameters(captured.unread.values())))),
        traced_layers=layers,
        batch=captured.batch,
        small=small,
    )


def _small_of(captured: Captured, layer: str, *, micro_batches: int) -> Small:
    """The part of the inputs below a layer's path in what no decision changes."""
    below = [item for item in captured.inputs if item.name.startswith(f"{layer}.")]
    unread_below = [tensor for name, tensor in captured.unread.items() if name.startswith(f"{layer}.")]
    params = [captured.params[item.name] for item in below if item.is_parameter]
    fixed_bytes = input_bytes(below) + small_bytes(params, training=True, accumulates=micro_batches > 1)
    return Small(
        fixed_bytes=fixed_bytes + unread_bytes(unread_below, _TRACED_ON),
        grad_bytes=sum(param.nbytes for param in params if param.requires_grad and not is_movable(param)),
        num_params=sum(map(_num_elements, (*params, *_parameters(unread_below)))),
    )


def _order_of_regions(
    split: rewriting.Partitioned, params: Mapping[str, torch.nn.Parameter], neutral: Plan
) -> Mapping[str, Sequence[str]]:
    """The order in which backward runs, which collectives keep whatever the plan."""
    if num_ranks(params.values()) == 1:
        return {}
    return passes.regions_apart(split.backward, PassContext(stage=Stage.BACKWARD, plan=neutral))


def _parameters(tensors: Iterable[torch.Tensor]) -> list[torch.nn.Parameter]:
    return [tensor for tensor in tensors if isinstance(tensor, torch.nn.Parameter)]


def _num_elements(param: torch.nn.Parameter) -> int:
    """Those of all ranks' parts."""
    part = part_of(param)
    return param.numel() if part is None else math.prod(part.full_size)
