"""Our pricing by data sheets against measured layers: seconds of a transformer layer's forward and backward, and of updates.

    python examples/benchmarks/cluster_pricing.py
    python examples/benchmarks/cluster_pricing.py --json rows.json

The layers are other people's measurements (``examples/benchmarks/measured``): fp32, TF32 where the GPU has it, every operator by a
kernel of its own. The same layer is traced here, operator by operator as autograd runs it, and priced as `autohete plan` prices
one. The shares of devices' peaks were chosen by these rows, two or three numbers for a GPU; the rows hold them to one statement
for two models, all micro-batches and both passes. Of two layers alike that were measured, the faster counts, because waiting only
adds; the first of them often waits for the CPU.

``launch-bound`` marks rows where a sample takes more than 1.3 times as long as in a larger micro-batch: the GPU waits for the CPU,
and no data sheet knows that. Data sheets do not know either: units of several GPUs, whose seconds contain their collectives; the
embedding, which waits for its input. Updates of all degrees are priced, because they have no collectives.
"""

import argparse
import statistics
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from results import environment, print_figures, save
from torch import Tensor, fx, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx

from autohete_fx.cluster.inputs.measurements import read
from autohete_fx.ir import Machine
from autohete_fx.machine.devices import UPDATE_FIXED_S, find_device, machine_of_spec
from autohete_fx.profiler.flops import seconds_of
from autohete_fx.profiler.memory.kernels import KernelGraph
from autohete_fx.profiler.memory.lowering import lower
from autohete_fx.profiler.retarget import retarget

_MEASURED = Path(__file__).parent / "measured" / "layers.json"
_LAUNCH_BOUND = 1.3
DEVICE_OF = {
    "A100-40": "a100-40g",
    "V100-16": "v100-16g",
    "GH-96": "gh200-96g",
    "Titan-RTX": "titan-rtx-24g",
    "RTX-2080": "rtx-2080-ti-11g",
    "RTX-3090": "rtx-3090-24g",
}
"""Names of the measurements, and ours."""
PASSES = ("forward", "backward")
aten = torch.ops.aten


def main() -> None:
    """Run."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layers", metavar="FILE", default=_MEASURED, help="default: %(default)s")
    parser.add_argument("--json", metavar="FILE", type=Path, help="write the rows there")
    parsed = parser.parse_args()
    print_figures(environment())
    layers = read(parsed.layers)
    rows = [*layer_rows(layers), *update_rows(layers)]
    print(table(rows))
    save(parsed.json, [asdict(row) | {"ratio": row.ratio} for row in rows])


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One measurement and our price of it.

    Attributes:
        model, gpu: of the measurement.
        tp: GPUs that share the layer.
        micro_batch: samples.
        kind: ``forward``, ``backward`` or ``update``.
        measured_s, priced_s: seconds.
        launch_bound: the GPU waited for the CPU.
    """

    model: str
    gpu: str
    tp: int
    micro_batch: int
    kind: str
    measured_s: float
    priced_s: float
    launch_bound: bool

    @property
    def ratio(self) -> float:
        """The price by the measurement."""
        return self.priced_s / self.measured_s


class Layer(nn.Module):
    """A pre-norm GPT layer with the operators that were measured, whose time runs along the first dimension.

    Only the product of queries, keys and values has a bias. Attention masks its scores in place and has no dropout; the layer of
    GPT-Neo drops a tenth of what it adds to its input, that of OPT nothing.
    """

    def __init__(self, hidden: int, ffn: int, heads: int, act: Callable[[Tensor], Tensor], drops: bool) -> None:
        super().__init__()
        self.heads, self.act, self.drops = heads, act, drops
        self.norm1, self.norm2 = nn.LayerNorm(hidden), nn.LayerNorm(hidden)
        self.qkv = nn.Linear(hidden, 3 * hidden, bias=False)
        self.qkv_bias = nn.Parameter(torch.empty(3 * hidden))
        self.dense = nn.Linear(hidden, hidden, bias=False)
        self.up = nn.Linear(hidden, ffn, bias=False)
        self.down = nn.Linear(ffn, hidden, bias=False)

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        """``x``: [positions, samples, width]."""
        x = x + self.dropped(self.attention(self.norm1(x), mask))
        return x + self.dropped(self.down(self.act(self.up(self.norm2(x)))))

    def attention(self, x: Tensor, mask: Tensor) -> Tensor:
        """Every product, mask and softmax by a kernel of its own."""
        seq, batch, hidden = x.shape
        both, width = batch * self.heads, hidden // self.heads
        mixed = (self.qkv(x) + self.qkv_bias).view(seq, batch, self.heads, 3 * width)
        query, key, value = (part.view(seq, both, width).transpose(0, 1) for part in mixed.split(width, -1))
        scores = torch.bmm(query, key.transpose(1, 2)).view(batch, self.heads, seq, seq)
        scores.masked_fill_(mask, -10000.0)
        weights = scores.softmax(-1).view(both, seq, seq)
        context = torch.bmm(weights, value).view(batch, self.heads, seq, width).permute(2, 0, 1, 3)
        return self.dense(context.contiguous().view(seq, batch, hidden))

    def dropped(self, x: Tensor) -> Tensor:
        """By the kernel that a GPU has for it."""
        return torch.native_dropout(x, 0.1, True)[0] if self.drops else x


def traced(config: Any, micro_batch: int) -> tuple[fx.GraphModule, set[str]]:
    """A layer's forward and backward as one graph of the operators that autograd runs on a GPU, and the names of backward's."""
    act = {"gelu": F.gelu, "relu": F.relu}[config["act"]]
    seq, hidden = config["seq"], config["hidden"]
    with FakeTensorMode():
        layer = Layer(hidden, config["ffn"], config["heads"], act, drops=config["act"] == "gelu")
        names, params = zip(*layer.named_parameters(), strict=True)
        x, grad = (torch.empty(seq, micro_batch, hidden, requires_grad=needs) for needs in (True, False))
        mask = torch.empty(1, 1, seq, seq, dtype=torch.bool)

        def step(x: Tensor, grad: Tensor, *params: Tensor) -> tuple[Tensor, ...]:
            output = torch.func.functional_call(layer, dict(zip(names, params, strict=True)), (x, mask))
            return output, *torch.autograd.grad(output, (x, *params), grad)

        graph_module = make_fx(step)(x, grad, *params)
    output: Any = next(node for node in graph_module.graph.nodes if node.op == "output").args[0]
    nodes = list(graph_module.graph.nodes)
    backward = set(nodes[nodes.index(output[0]) + 1 :])
    for node in reversed(nodes):
        spell_out(graph_module.graph, node, backward)
    retarget(graph_module, torch.device("cuda", 0))
    return graph_module, {node.name for node in backward}


def spell_out(graph: fx.Graph, node: fx.Node, backward: set[fx.Node]) -> None:
    """Write an operator as the kernels that PyTorch's own code ran for it, each writing all that it makes.

    In place or not, a kernel moves as many bytes. A backward of masking in place through a view copies five times; that is in the
    graph. A softmax of rows that are longer than 1024 read its inputs twice in backward.
    """
    made: list[tuple[Any, tuple[Any, ...], Any]] = []
    if node.target is aten.copy_.default:
        made = [(aten.clone.default, (node.args[1],), node.meta["val"])]
    elif node.target is aten.masked_fill_.Scalar:
        made = [(aten.masked_fill.Scalar, node.args, node.meta["val"])]
    elif node.target is aten.masked_fill.Scalar:
        copied: Any = node.args[0]
        made = [(aten.clone.default, (copied,), copied.meta["val"]), (node.target, node.args, node.meta["val"])]
    elif node.target is aten._softmax_backward_data.default:
        sums = node.meta["val"].new_empty(node.meta["val"].shape[:-1])
        made = [(aten.linalg_vecdot.default, node.args[:2], sums), (node.target, node.args, node.meta["val"])]
    with graph.inserting_before(node):
        for target, args, value in made:
            new = graph.call_function(target, args)
            new.meta["val"] = value
            if node in backward:
                backward.add(new)
            if new.target is not aten.linalg_vecdot.default and value is node.meta["val"]:
                node.replace_all_uses_with(new)
    if made or node.target is aten.new_empty_strided.default:
        graph.erase_node(node)
        backward.discard(node)


@dataclass(frozen=True, kw_only=True)
class Priceable:
    """Kernels of a layer's forward and backward."""

    graph: KernelGraph
    nodes: dict[str, fx.Node]
    backward: set[str]

    def seconds(self, machine: Machine) -> tuple[float, float]:
        """Forward and backward on a machine."""
        totals = [0.0, 0.0]
        for kernel in self.graph.kernels:
            backward = not self.backward.isdisjoint(kernel.nodes)
            totals[backward] += seconds_of(kernel, self.graph, self.nodes, machine, backward=backward)
        return totals[0], totals[1]


def priceable(config: Any, micro_batch: int) -> Priceable:
    """The kernels of one layer for so many samples, no two operators fused."""
    graph_module, backward = traced(config, micro_batch)
    graph = lower(graph_module, device_type="cuda", inner_backend="eager")
    return Priceable(graph=graph, nodes={node.name: node for node in graph_module.graph.nodes}, backward=backward)


def machine_of(gpu: str, found: Any) -> Machine:
    """Ours of the same name, with TF32 where it was on."""
    return machine_of_spec(find_device(DEVICE_OF[gpu]), tf32=found["tf32"] == "yes")


def layer_rows(layers: Any) -> Iterator[Row]:
    """Forward and backward of one layer on one GPU, for all models, GPUs and micro-batches that were measured."""
    for model, entry in layers["models"].items():
        kernels: dict[int, Priceable] = {}
        for gpu, found in entry["gpus"].items():
            if gpu not in DEVICE_OF or "1" not in found["runs"]:
                continue
            machine = machine_of(gpu, found)
            measured = {
                int(size): tuple(
                    map(min, zip(*(row[name] for name in ("layer", "layer1") if name in row), strict=True))
                )
                for size, row in found["runs"]["1"].items()
            }
            for size, seconds in measured.items():
                kernels[size] = kernels.get(size) or priceable(entry["config"], size)
                priced = kernels[size].seconds(machine)
                for at, name in enumerate(PASSES):
                    least = min(other[at] / others for others, other in measured.items() if others >= size)
                    yield Row(
                        model=model,
                        gpu=gpu,
                        tp=1,
                        micro_batch=size,
                        kind=name,
                        measured_s=seconds[at],
                        priced_s=priced[at],
                        launch_bound=seconds[at] / size > _LAUNCH_BOUND * least,
                    )


def update_rows(layers: Any) -> Iterator[Row]:
    """The optimizer's step of every degree, by the median over micro-batches, on which it does not depend."""
    for model, entry in layers["models"].items():
        for gpu, found in entry["gpus"].items():
            if gpu not in DEVICE_OF:
                continue
            machine = machine_of(gpu, found)
            for tp, sizes in found["runs"].items():
                seconds = statistics.median(row["update_s"] for row in sizes.values() if "update_s" in row)
                priced = UPDATE_FIXED_S + found["update_params"][tp] / machine.device_update_params_per_s
                yield Row(
                    model=model,
                    gpu=gpu,
                    tp=int(tp),
                    micro_batch=0,
                    kind="update",
                    measured_s=seconds,
                    priced_s=priced,
                    launch_bound=False,
                )


def table(rows: list[Row]) -> str:
    """The rows as text, and how far off they are."""
    lines = [
        f"{'model':12} {'GPU':10} {'tp':>2} {'micro-batch':>11} {'':8} {'measured':>11} {'priced':>11} {'ratio':>6}"
    ]
    for row in rows:
        lines.append(
            f"{row.model:12} {row.gpu:10} {row.tp:2} {row.micro_batch or '':>11} {row.kind:8} {1e3 * row.measured_s:8.3f} ms"
            f" {1e3 * row.priced_s:8.3f} ms {row.ratio:6.2f}{'  launch-bound' if row.launch_bound else ''}"
        )
    for kind in (*PASSES, "update"):
        ratios = [row.ratio for row in rows if row.kind == kind and not row.launch_bound]
        if ratios:
            bounds = f"{min(ratios):.2f} to {max(ratios):.2f}, median {statistics.median(ratios):.2f}"
            lines.append(f"{kind}, not launch-bound: {len(ratios)} rows, priced / measured {bounds}")
    lines.append(
        "data sheets do not know: launch-bound rows (the CPU), layers on several GPUs (RTX-3090 has no others), the embedding"
    )
    return "\n".join(lines)


if __name__ == "__main__":
    main()
