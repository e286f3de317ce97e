"""Tensor parallelism inside a unit: which layers its GPUs share, and a stage's modules after `parallelize_module`.

Enter a model and a plan of it: names of modules, with a star for each index, and the styles that transformers' configurations
name. ``colwise`` layers keep a part of their outputs. ``rowwise`` ones keep a part of their inputs, and sum their results.
Embeddings and heads keep a part of the vocabulary. All other parameters stay whole on each GPU. Leaves a `TensorLayout`, the
same on all ranks.

The modules of a stage have DTensors as parameters. Everything else (sums of gradients, the optimizer, saves) works with a rank's
own part of them (`autohete_fx.runtime.held`). It has the DTensor's memory, wherever a plan moves that.
"""

import re
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Placement, Replicate
from torch.distributed.tensor.parallel import ColwiseParallel, ParallelStyle, RowwiseParallel, parallelize_module

from autohete_fx.cluster.model.batches import Shape
from autohete_fx.cluster.model.building import BuildModel, build_noting_order
from autohete_fx.cluster.model.layers import LayerMap
from autohete_fx.cluster.model.pieces import Cut, part_of
from autohete_fx.cluster.model.split import AtMarks
from autohete_fx.errors import ClusterError
from autohete_fx.runtime.held import held
from autohete_fx.runtime.shard.layout import Layout

TpPlan = Mapping[str, str]
"""By name of a module, with a star for each index, its style."""
_SUMMED = "replicated_with_grad_allreduce"
_UNLIKE, _NOISE = 1e-2, 1e-6
"""Shares of a norm, and of the largest norm, by which gradients that should be equal may differ."""


def _gathered() -> ParallelStyle:
    return ColwiseParallel(output_layouts=Replicate())


def _vocabulary() -> ParallelStyle:
    return RowwiseParallel(input_layouts=Replicate())


@dataclass(frozen=True, slots=True)
class _Style:
    """How a module is cut: by which class of PyTorch, and along which dimension of each parameter.

    ``uneven``: parts may differ in size, because no other layer reads them in parts.
    """

    kind: type[nn.Module]
    dims: Mapping[str, int]
    make: Callable[[], ParallelStyle]
    uneven: bool = False


_HEAD = _Style(nn.Linear, {"weight": 0, "bias": 0}, _gathered, uneven=True)
_EMBEDDING = _Style(nn.Embedding, {"weight": 0}, _vocabulary, uneven=True)
_STYLES: Mapping[str, _Style] = {
    "colwise": _Style(nn.Linear, {"weight": 0, "bias": 0}, ColwiseParallel),
    "rowwise": _Style(nn.Linear, {"weight": 1}, RowwiseParallel),
    "colwise_gather_output": _HEAD,
    "colwise_rep": _HEAD,
    "embedding_rowwise": _EMBEDDING,
}


@dataclass(frozen=True, slots=True, kw_only=True)
class TensorLayout:
    """How the GPUs of a unit share the layers of a model.

    Attributes:
        styles: by name of a module that is cut, its style.
        dims: by name of a parameter that is cut, the dimension; tied ones by the first name.
        summed: parameters that each GPU has whole and applies to its part of the activations, so that gradients are summed.
    """

    styles: Mapping[str, str] = field(default_factory=dict)
    dims: Mapping[str, int] = field(default_factory=dict)
    summed: frozenset[str] = frozenset()

    def cut(self, name: str, sizes: Collection[int], degree: int, part: int) -> Cut | None:
        """The range of a parameter that one of so many GPUs has; None: all of it."""
        dim = self.dims.get(name)
        return None if dim is None or degree == 1 else part_of(dim, tuple(sizes)[dim], degree, part)


# -- which layers are shared -----------------------------------------------------------------------------------------


def layout_of(
    build_model: BuildModel, layer_map: LayerMap, degrees: Collection[int], tp_plan: TpPlan | None = None
) -> TensorLayout:
    """How units of these degrees share the layers of a model.

    Args:
        build_model: makes the model.
        layer_map: of the model.
        degrees: GPUs of the plan's units.
        tp_plan: of the model; None: that of its transformers configuration.

    Raises:
        ClusterError: the model has no plan, or a degree does not divide a layer. Also where the plan has styles that are
            unknown or modules that cannot be cut so.
    """
    if max(degrees) == 1:
        return TensorLayout()
    model, _ = build_noting_order(build_model)
    if isinstance(layer_map.way, AtMarks):
        raise ClusterError(
            f"the plan has stages of several GPUs, and {type(model).__name__} is divided at marks. Expected was one GPU a stage."
            " Plan with --max-tp 1, or take the marks out"
        )
    plan, config = _plan_of(model, tp_plan)
    patterns = {pattern: re.compile(re.escape(pattern).replace(r"\*", r"\d+")) for pattern in plan}
    styles: dict[str, str] = {}
    summed: set[str] = set()
    matched: set[str] = set()
    for name, module in model.named_modules():
        pattern = next((pattern for pattern in plan if patterns[pattern].fullmatch(name)), None)
        if pattern is None:
            continue
        style = plan[pattern]
        matched.add(pattern)
        if style == _SUMMED:
            summed.update(layer_map.tied.get(own, own) for own, _ in module.named_parameters(name))
        elif style not in _STYLES or not isinstance(module, _STYLES[style].kind):
            raise ClusterError(
                f"the tensor-parallel plan calls {name!r}, a {type(module).__name__}, {style!r}. Expected were Linear layers that"
                f" are colwise, rowwise or colwise_gather_output, and Embeddings that are embedding_rowwise. Give"
                " another tp_plan= to cluster.join, or plan with --max-tp 1"
            )
        elif not isinstance(module, nn.Embedding) or _is_plain(module):
            styles[name] = style
    unmatched = sorted(set(plan) - matched) if tp_plan is not None or not styles else []
    if unmatched:
        raise ClusterError(
            f"the tensor-parallel plan names {unmatched[0]!r}, and {type(model).__name__} has no such module. Expected were names"
            f" as {layer_map.layers[0]!r}, with a star in place of an index. Correct tp_plan="
        )
    _keep_ties_whole(model, layer_map, styles)
    dims = _dims(model, layer_map, styles)
    _check_degrees(layer_map, styles, dims, config, degrees)
    return TensorLayout(styles=styles, dims=dims, summed=frozenset(summed))


def _plan_of(model: nn.Module, given: TpPlan | None) -> tuple[TpPlan, Any]:
    """The plan with names as the model has them, and the configuration that knows of heads."""
    if given is not None:
        return given, getattr(model, "config", None)
    for name, module in model.named_modules():
        inner: Any = module
        if getattr(inner, "config", None) is not None and getattr(inner, "tp_plan", None):
            prefix = f"{name}." if name else ""
            return {f"{prefix}{pattern}": style for pattern, style in inner.tp_plan.items()}, inner.config
    raise ClusterError(
        f"the plan has stages of several GPUs, and {type(model).__name__} has no tensor-parallel plan. Expected was one, such as"
        ' {"layers.*.up": "colwise", "layers.*.down": "rowwise"}. Give it to cluster.join as tp_plan=, or plan with --max-tp 1'
    )


def _is_plain(module: nn.Embedding) -> bool:
    """Whether rows of an embedding do not depend on each other. Others stay whole."""
    return type(module) is nn.Embedding and module.padding_idx is None and module.max_norm is None


def _keep_ties_whole(model: nn.Module, layer_map: LayerMap, styles: dict[str, str]) -> None:
    """Take out ends of the model whose tied weights not all of their modules would cut alike."""
    ways: dict[str, set[tuple[str, int | None]]] = {}
    for full, _ in model.named_parameters(remove_duplicate=False):
        module, _, own = full.rpartition(".")
        style = styles.get(module)
        dim = _STYLES[style].dims.get(own) if style else None
        ways.setdefault(layer_map.tied.get(full, full), set()).add((module, dim))
    for name, places in ways.items():
        if len({dim for _, dim in places}) > 1:
            for module in {module for module, _ in places} & set(styles):
                if not _STYLES[styles[module]].uneven:
                    raise ClusterError(
                        f"the tensor-parallel plan cuts {module!r}, and {name!r} is tied to a module that it does not cut so."
                        " Expected was one way for both. Correct tp_plan="
                    )
                del styles[module]


def _dims(model: nn.Module, layer_map: LayerMap, styles: Mapping[str, str]) -> dict[str, int]:
    dims: dict[str, int] = {}
    for module, style in styles.items():
        for own, _ in model.get_submodule(module).named_parameters(recurse=False):
            dim = _STYLES[style].dims.get(own)
            if dim is not None:
                full = f"{module}.{own}"
                dims[layer_map.tied.get(full, full)] = dim
    return dims


def _check_degrees(
    layer_map: LayerMap, styles: Mapping[str, str], dims: Mapping[str, int], config: Any, degrees: Collection[int]
) -> None:
    sizes = {name: layer_map.shapes[name].sizes[dim] for name, dim in dims.items()}
    uneven = {module for module, style in styles.items() if _STYLES[style].uneven}
    for heads in ("num_attention_heads", "num_key_value_heads"):
        count = getattr(config, heads, None)
        if isinstance(count, int):
            sizes[heads] = count
    for degree in sorted(degrees):
        for name, size in sizes.items():
            loose = name.rpartition(".")[0] in uneven
            if part_of(0, size, degree, degree - 1).first >= size if loose else size % degree:
                raise ClusterError(
                    f"the plan has units of {degree} GPUs, and {name!r} has {size} rows to share. Expected was a degree that"
                    " divides them. Plan with a smaller --max-tp"
                )


# -- a stage's modules -----------------------------------------------------------------------------------------------


def divide(
    model: nn.Module,
    names: Mapping[int, str],
    parts: dict[str, nn.Parameter],
    shapes: Mapping[str, Shape],
    layout: TensorLayout,
    mesh: DeviceMesh,
    *,
    has_shards: bool = False,
) -> dict[str, Layout]:
    """Give the modules of a stage DTensors as parameters, and the collectives around them.

    Args:
        model: whose modules have this rank's parts as parameters.
        names: by address of such a part, its parameter's name.
        parts: by name of a parameter; those of DTensors become what these hold.
        shapes: of whole parameters.
        layout: of the model.
        mesh: of the ranks that share layers.
        has_shards: parts may be shards of local tensors. They stay the modules' parameters, which are to read DTensors.

    Returns:
        By name, how the DTensors lie.
    """
    styles: dict[str, ParallelStyle] = {}
    before: dict[tuple[str, str], str] = {}
    for name, style in layout.styles.items():
        module = _module(model, name)
        own = dict(module.named_parameters(recurse=False)) if isinstance(module, _STYLES[style].kind) else {}
        if module is None or not own or not all(id(param) in names for param in own.values()):
            continue  # another stage's
        styles[name] = _STYLES[style].make()
        for key, param in own.items():
            before[name, key] = names[id(param)]
            whole = shapes[names[id(param)]].empty("meta")
            module._parameters[key] = nn.Parameter(whole, requires_grad=param.requires_grad)
    if styles:
        parallelize_module(model, mesh, styles, src_data_rank=None)
    shared: dict[str, nn.Parameter] = {}
    layouts: dict[str, Layout] = {}
    for (module_name, key), name in before.items():
        module = model.get_submodule(module_name)
        planned = module._parameters[key]
        assert isinstance(planned, DTensor), "parallelize_module distributes all parameters of the modules it is given"
        layouts[name] = Layout.of(planned)
        if name not in shared:
            shared[name] = parts[name] if has_shards else _distributed(parts[name], planned, mesh)
            parts[name] = held(shared[name])
        module._parameters[key] = shared[name]
    return layouts


def _module(model: nn.Module, name: str) -> nn.Module | None:
    """A module of the model; None where another stage's has a stand-in above it."""
    try:
        return model.get_submodule(name)
    except AttributeError:
        return None


def _distributed(part: nn.Parameter, planned: DTensor, mesh: DeviceMesh) -> nn.Parameter:
    """A DTensor of a rank's part, placed as planned."""
    placements: tuple[Placement, ...] = planned.placements
    made = DTensor.from_local(
        part.detach(), mesh, placements, run_check=False, shape=planned.shape, stride=planned.stride()
    )
    assert made.to_local().shape == part.shape, "parts are cut as DTensors are"
    return nn.Parameter(made, part.requires_grad)


def take_gradient(param: nn.Parameter, part: nn.Parameter) -> None:
    """Move the gradient of a DTensor to a rank's part of it. All ranks of the unit call it where they have to give each other some.

    Args:
        param: of a module.
        part: that this rank holds of it; ``param`` itself where that is no DTensor.
    """
    if isinstance(param, DTensor) and param.grad is not None:
        part.grad, param.grad = local_gradient(param.grad, param), None


def local_gradient(grad: Tensor, param: Tensor) -> Tensor:
    """This rank's part of a parameter's gradient; the gradient itself where it is no DTensor. Ranks of a unit call it likewise."""
    if not isinstance(grad, DTensor) or not isinstance(param, DTensor):
        return grad
    if tuple(grad.placements) != tuple(param.placements):
        grad = grad.redistribute(placements=param.placements)
    return grad.to_local()


def check_whole(parts: Mapping[str, nn.Parameter], layout: TensorLayout, mesh: DeviceMesh) -> None:
    """Compare the gradients of parameters that each GPU of a mesh has whole, and applies to whole activations.

    All ranks of the mesh call it. Raises ClusterError, on all of them, where gradients differ. One of the parameters is then
    applied to a part of the activations, and the plan does not say so.
    """
    names = [name for name in parts if name not in layout.dims and name not in layout.summed]
    norms = torch.zeros(len(names), dtype=torch.float64, device=mesh.device_type)
    for index, name in enumerate(names):
        grad = parts[name].grad
        if grad is not None:
            norms[index] = torch.linalg.vector_norm(grad)
    ends = torch.stack([norms, -norms])
    dist.all_reduce(ends, dist.ReduceOp.MAX, group=mesh.get_group())
    largest, least = ends[0].cpu(), -ends[1].cpu()
    apart = largest - least
    wrong = (apart > _UNLIKE * largest) & (apart > _NOISE * largest.max()) if names else apart.bool()
    if wrong.any():
        name = names[int(wrong.nonzero()[0])]
        raise ClusterError(
            f"GPUs of a unit have different gradients of {name!r}, which each has whole. Expected were equal ones. Call its module"
            f" {_SUMMED!r} in tp_plan= if it is applied to a part of the heads or columns"
        )
