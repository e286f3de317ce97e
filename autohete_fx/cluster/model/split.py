"""The layers of a model whose forward has marks of `torch.distributed.pipelining`: the sections between marks.

Enter a model of fake tensors and a micro-batch; leaves a `Split`. PyTorch's `pipeline` traces the forward pass with
`torch.export` and divides the graph at its marks, which `marks` has tidied. Each section has its operators, and its parameters by
their names in the model. It has names of the values that it reads and makes. Any number of tensors may cross a cut. Sections hand
on those that skip them.
"""

import hashlib
import operator
import warnings
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.distributed.pipelining import pipeline
from torch.fx.graph import CodeGen

from autohete_fx.cluster.model.batches import Batch, Shape, call, shape_of
from autohete_fx.cluster.model.marks import tidied
from autohete_fx.errors import ClusterError
from autohete_fx.internals.modes import FakeTensorMode, TorchDispatchMode
from autohete_fx.internals.operators import TreeSpec, tree_flatten, tree_leaves, tree_unflatten
from autohete_fx.internals.pipelines import PIPE_SPLIT

PREFIX = "model."
"""Before the names of parameters and buffers in the modules of sections."""
_TENSOR = object()
"""Stands for a tensor among the leaves of an output."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AtMarks:
    """How stages are cut at marks: by another trace, on their own device.

    Attributes:
        inputs: the traced micro-batch, by name.
        given: how the user gave it, as `Batch` has it.
        alike: by layer, a digest of its operators; equal ones take equally long.
    """

    inputs: Mapping[str, Shape]
    given: str
    alike: tuple[str, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Section:
    """The operators from one mark to the next.

    Attributes:
        reads: names of the values that it is called with.
        makes: names of those that it returns; "" of one that nobody reads.
    """

    reads: tuple[str, ...]
    makes: tuple[str, ...]

    def run(self, module: Callable[..., Any], values: dict[str, Tensor]) -> None:
        """Add what its operators, a module, make of the values."""
        made = module(*[values[name] for name in self.reads])
        values.update(zip(self.makes, (made,) if isinstance(made, Tensor) else made or (), strict=True))


@dataclass(frozen=True, slots=True, kw_only=True)
class Output:
    """The output of a model.

    Attributes:
        names: of the values that are its tensors.
        leaves: all that it has, with `_TENSOR` for each tensor.
        spec: how they nest.
    """

    names: tuple[str, ...]
    leaves: tuple[object, ...]
    spec: TreeSpec

    def filled(self, values: Mapping[str, Tensor]) -> Any:
        """The output with its tensors."""
        found = iter([values[name] for name in self.names])
        return tree_unflatten([next(found) if leaf is _TENSOR else leaf for leaf in self.leaves], self.spec)


@dataclass(frozen=True, slots=True, kw_only=True)
class Split:
    """A model in sections.

    Attributes:
        sections: in order.
        modules: their operators.
        inputs: names of the batch's tensors as values.
        carried: by section, names of the values that it and later ones get from those before.
        output: of the model.
    """

    sections: tuple[Section, ...]
    modules: tuple[fx.GraphModule, ...]
    inputs: tuple[str, ...]
    carried: tuple[tuple[str, ...], ...]
    output: Output

    def survey(
        self, model: nn.Module, mode: FakeTensorMode, batch: Batch, tied: Mapping[str, str]
    ) -> tuple[dict[str, frozenset[int]], tuple[tuple[Shape, ...], ...], AtMarks]:
        """Readers of parameters, shapes of what crosses, and how to cut: all that a `LayerMap` says of the sections."""
        readers: dict[str, set[int]] = {name: set() for name, _ in model.named_parameters()}
        values = dict(zip(self.inputs, batch.tensors.values(), strict=True))
        alike = []
        with mode:
            for index, (section, module) in enumerate(zip(self.sections, self.modules, strict=True)):
                for name, _ in module.named_parameters(remove_duplicate=False):
                    own = name.removeprefix(PREFIX)
                    readers[tied.get(own, own)].add(index)
                with _Operators() as seen:
                    section.run(module, values)
                alike.append(hashlib.sha256("\n".join(seen.lines).encode()).hexdigest())
        crossing = tuple(
            tuple(shape_of(values[name], values[name].requires_grad) for name in names) for names in self.carried
        )
        inputs = {name: shape_of(tensor) for name, tensor in batch.tensors.items()}
        return (
            {name: frozenset(found) for name, found in readers.items()},
            crossing,
            AtMarks(inputs=inputs, given=batch.given, alike=tuple(alike)),
        )


class _Operators(TorchDispatchMode):
    """Writes down operators with the shapes that they read."""

    def __init__(self) -> None:
        super().__init__()
        self.lines: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        read = [shape_of(leaf) if isinstance(leaf, Tensor) else leaf for leaf in tree_leaves((args, kwargs or {}))]
        self.lines.append(f"{func} {read}")
        return func(*args, **(kwargs or {}))


# -- marks -----------------------------------------------------------------------------------------------------------


def has_marks(model: nn.Module, batch: Batch) -> bool:
    """Whether the forward pass meets a mark."""
    with _Operators() as seen:
        call(model, batch)
    return any(line.startswith(str(PIPE_SPLIT)) for line in seen.lines)


def fake_state(model: nn.Module, device: torch.device | str) -> None:
    """Fake parameters on a device in place of those on the meta device; fake buffers where they are elsewhere. Called in a fake
    mode."""
    fake: dict[int, nn.Parameter] = {}
    for module in model.modules():
        for name, param in module._parameters.items():
            if param is not None:
                empty = torch.empty_like(param, device=device)
                module._parameters[name] = fake.setdefault(id(param), nn.Parameter(empty, param.requires_grad))
        for name, buffer in module._buffers.items():
            if buffer is not None and buffer.device.type != torch.device(device).type:
                module._buffers[name] = torch.empty_like(buffer, device=device)


# -- the trace -------------------------------------------------------------------------------------------------------


class _Positional(nn.Module):
    """The model as a function of the batch's tensors, which returns the tensors of its output."""

    def __init__(self, model: nn.Module, batch: Batch, note: Callable[[list[object], TreeSpec], None]) -> None:
        super().__init__()
        self.model, self._batch, self._note = model, batch, note

    def forward(self, *tensors: Tensor) -> list[Tensor]:
        named = dict(zip(self._batch.tensors, tensors, strict=True))
        leaves, spec = tree_flatten(call(self.model, Batch(tensors=named, given=self._batch.given)))
        if not any(isinstance(leaf, Tensor) for leaf in leaves):
            raise ClusterError(
                f"the output of {type(self.model).__name__} has no tensor that torch.utils._pytree finds. Expected was a tensor,"
                " or a tuple or dict of them. Return one, or register the output's class as a pytree node"
            )
        self._note([_TENSOR if isinstance(leaf, Tensor) else leaf for leaf in leaves], spec)
        return [leaf for leaf in leaves if isinstance(leaf, Tensor)]


def split_model(model: nn.Module, batch: Batch) -> Split:
    """Divide a model at its marks.

    Args:
        model: of fake tensors.
        batch: a micro-batch of fake tensors.

    Raises:
        ClusterError: the forward pass cannot be traced, changes a tensor in place on another side of a mark, or its marks divide
            nothing.
    """
    name, returned = type(model).__name__, list[tuple[list[object], TreeSpec]]()
    positional = _Positional(model, batch, lambda leaves, spec: returned.append((leaves, spec)))
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message=".*(LeafSpec|data pointer of FakeTensor)")  # PyTorch's own copies
            pipe = pipeline(positional, tuple(batch.tensors.values()), split_policy=tidied)
    except ClusterError:
        raise
    except Exception as error:
        cause = error.__cause__ or error
        if isinstance(cause, ClusterError):
            raise cause from error
        line = next(iter(str(cause).strip().splitlines()), type(cause).__name__)
        raise ClusterError(
            f"torch.distributed.pipelining could not divide {name} at its marks: {line}. Expected was a forward that"
            " torch.export captures whole. Take such code out of forward, or take the marks out, and train with"
            " autohete_fx.shard"
        ) from error
    nodes = list(pipe.split_gm.graph.nodes)
    calls = sorted(
        (node for node in nodes if node.op == "call_module"), key=lambda node: int(node.target.rpartition("_")[2])
    )
    if len(calls) < 2:
        raise ClusterError(
            f"the marks of {name} divide nothing that its output reads. Expected was a mark with operators before and after it."
            " Give split_spec= the names of modules that others run before"
        )
    modules = tuple(_operators(pipe.split_gm.get_submodule(str(node.target))) for node in calls)
    sections = tuple(map(_section, calls, modules))
    inputs = tuple(node.name for node in nodes if node.op == "placeholder")
    leaves, spec = returned[-1]
    output = Output(names=_names(nodes[-1].args), leaves=tuple(leaves), spec=spec)
    return Split(
        sections=sections,
        modules=modules,
        inputs=inputs,
        carried=_carried(sections, output.names, inputs),
        output=output,
    )


def _operators(module: nn.Module) -> fx.GraphModule:
    """A section's module, called with its arguments one by one; PyTorch's first one may take them as the model does."""
    assert isinstance(module, fx.GraphModule), "pipeline makes graphs"
    module.graph.set_codegen(CodeGen())
    module.recompile()
    return module


def _section(node: fx.Node, module: fx.GraphModule) -> Section:
    count = len(tree_leaves(next(iter(reversed(module.graph.nodes))).args))
    taken = {user.args[1]: user.name for user in node.users if user.target is operator.getitem}
    single = bool(node.users) and not taken
    return Section(
        reads=_names(node.args),
        makes=(node.name,) if single else tuple(taken.get(place, "") for place in range(count)),
    )


def _names(args: object) -> tuple[str, ...]:
    nodes = tree_leaves(args)
    assert all(isinstance(node, fx.Node) for node in nodes), "values have names"
    return tuple(node.name for node in nodes)


def _carried(
    sections: tuple[Section, ...], results: tuple[str, ...], inputs: Collection[str]
) -> tuple[tuple[str, ...], ...]:
    """By section, the values that were made before, and that it, a later one or the output reads."""
    last_read = {name: index for index, section in enumerate(sections) for name in section.reads}
    last_read.update(dict.fromkeys(results, len(sections) - 1))
    found: list[tuple[str, ...]] = []
    made: list[str] = []
    for index, section in enumerate(sections):
        found.append(tuple(name for name in made if last_read.get(name, -1) >= index))
        assert found[-1] or not index, "pipeline drops sections that nothing reads"
        made += [name for name in section.makes if name and name not in inputs]
    return tuple(found)
