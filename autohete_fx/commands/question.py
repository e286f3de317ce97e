"""The question of ``autohete plan``, as far as it is known without PyTorch: which options go together, the machine, the budgets.

In: parsed options. Out: a `Question`, or OptionError within a second, before anything is traced.
"""

import argparse
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from autohete_fx.arguments import DTYPES, PLAN
from autohete_fx.cluster.inputs.described import described
from autohete_fx.cluster.inputs.measurements import read, tokens_of
from autohete_fx.cluster.plan import ClusterPlan
from autohete_fx.errors import OptionError
from autohete_fx.ir import Machine
from autohete_fx.ir.files import why_unwritable
from autohete_fx.ir.sizes import format_bytes, format_flops
from autohete_fx.machine.devices import RESERVE_SHARE, find_device, machine_of_spec, net_of_spec
from autohete_fx.options import Share, Size, parse_size, resolve_bytes
from autohete_fx.report.plots import require_matplotlib
from autohete_fx.whatif.architectures import find_architecture, require_transformers
from autohete_fx.whatif.job import Job

_MOST_SAMPLES = 65536
"""Of a step that is planned for a cluster."""
HOST_SHARE = Share(0.9)
"""The share of the host's memory that homes may take unless told otherwise."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Question:
    """A plan for one rank of a job.

    Attributes:
        job: all of its ranks.
        machine: of that rank.
        source: where the machine's figures come from, in words.
        peak_flops_per_s, peak_name: the rate that utilization refers to, and in words.
        device_budget_bytes, host_budget_bytes: that a plan may take.
    """

    job: Job
    machine: Machine
    source: str
    peak_flops_per_s: float
    peak_name: str
    device_budget_bytes: int
    host_budget_bytes: int


def question(parsed: argparse.Namespace, job: Job) -> Question:
    """The question about one rank. Raises OptionError or MachineError."""
    machine, source, rate, name = _machine_for(parsed, job)
    device_bytes, host_bytes = _budgets(parsed, machine)
    return Question(
        job=job,
        machine=machine,
        source=source,
        peak_flops_per_s=rate,
        peak_name=name,
        device_budget_bytes=device_bytes,
        host_budget_bytes=host_bytes,
    )


def is_file(model: str) -> bool:
    """Whether a model is given as a file, and not by a name."""
    return model.endswith((".json", ".py")) or model.rpartition(":")[0].endswith(".py")


def check(parsed: argparse.Namespace) -> None:
    """Raise OptionError where options do not go together, or ClusterError for a wrong cluster, before anything is traced."""
    _refuse(parsed, _ELSEWHERE)
    if parsed.given:
        _take_batch(parsed)
    if parsed.costs:
        _take_seq(parsed)
    _refuse(parsed, _IN_SWEEPS)
    for option, path in (("--plot", parsed.plot), ("--save", parsed.save)):
        if path and (why := why_unwritable(path)):  # said now, not when all is solved
            raise OptionError(f"cannot write {path!r}: {why}; give {option} a file that can be written")
    if parsed.plot:
        require_matplotlib()
    _refuse(parsed, _WITH_SCIP)
    if not (is_file(parsed.model) or parsed.costs):
        find_architecture(parsed.model)
        require_transformers()
    if parsed.cluster and parsed.batch and parsed.batch > _MOST_SAMPLES:
        raise OptionError(
            f"a step of {parsed.batch} samples was given with --cluster. Expected were at most {_MOST_SAMPLES}, because it is"
            " simulated micro-batch by micro-batch. Plan for so many: a larger step takes longer in proportion"
        )
    if parsed.cluster and not parsed.costs:
        cluster = described(parsed.cluster, spot=parsed.spot).cluster
        if parsed.objective == "cost":
            cluster.require_prices()


@dataclass(frozen=True, slots=True, kw_only=True)
class _Refusal:
    """Options that do not go with others.

    Attributes:
        words: of the error, with the option's name and value.
        options: names, in the order in which they are looked at.
        where: whether the others are such.
    """

    words: str
    options: tuple[str, ...]
    where: Callable[[argparse.Namespace], object]


_ELSEWHERE = (
    _Refusal(
        words="{option} is about a sweep of budgets; give --sweep budget too",
        options=("--plot",),
        where=lambda parsed: parsed.sweep != "budget" and not parsed.cluster,
    ),
    _Refusal(
        words="{option} is about a sweep of budgets; give --sweep budget too",
        options=("--points",),
        where=lambda parsed: parsed.sweep != "budget",
    ),
    _Refusal(
        words="{option} is about clusters; give --cluster too, or leave it out",
        options=(
            "--costs",
            "--symmetric-tp",
            "--max-tp",
            "--max-shards",
            "--given",
            "--spot",
            "--solver",
            "--objective",
        ),
        where=lambda parsed: not parsed.cluster,
    ),
    _Refusal(
        words="{option} was given with --costs, whose layers were measured in a dtype of their own; leave {option} out",
        options=("--dtype",),
        where=lambda parsed: parsed.costs,
    ),
    _Refusal(
        words="{option} is about prices of data sheets, and --costs takes those of a cluster file alone; leave {option} out",
        options=("--spot",),
        where=lambda parsed: parsed.costs,
    ),
    _Refusal(
        words="{option} is about GPUs that are alike; leave it out, or name a --device instead of a --cluster",
        options=(
            "--sweep",
            "--ranks",
            "--nodes",
            "--replicas",
            "--node-rate",
            "--budget",
            "--host-budget",
            "--micro-batches",
            "--overlap",
            "--clip",
        ),
        where=lambda parsed: parsed.cluster,
    ),
    _Refusal(
        words="{option} is about ranks on several nodes; give --nodes too, or leave it out",
        options=("--node-rate",),
        where=lambda parsed: parsed.nodes == 1 and not parsed.cluster,
    ),
    _Refusal(
        words="{option} is about a search, and --given prices one plan; leave one of the two out",
        options=(
            "--symmetric-tp",
            "--max-tp",
            "--max-shards",
            "--solver",
            "--objective",
            "--time-limit",
            "--explain",
        ),
        where=lambda parsed: parsed.given,
    ),
)
_IN_SWEEPS = (
    _Refusal(
        words="{option} writes one plan, and a sweep makes several; leave one of the two out",
        options=("--save",),
        where=lambda parsed: parsed.sweep,
    ),
    _Refusal(
        words="{option} explains one plan, and a sweep makes several; leave one of the two out",
        options=("--explain",),
        where=lambda parsed: parsed.sweep,
    ),
    _Refusal(
        words=(
            "--sweep ranks was given with {option} {value}. Expected was one node, on which the sweep puts all ranks. Leave"
            " {option} out, or --sweep"
        ),
        options=("--nodes",),
        where=lambda parsed: parsed.sweep == "ranks",
    ),
    _Refusal(
        words=(
            "--sweep ranks was given with {option} {value}. Expected was one copy of the model, which the sweep shards over all"
            " ranks. Leave {option} out, or --sweep"
        ),
        options=("--replicas",),
        where=lambda parsed: parsed.sweep == "ranks",
    ),
)
_WITH_SCIP = (
    _Refusal(
        words="{option} was given with --solver scip, whose plans have one degree anyway; leave it out",
        options=("--symmetric-tp",),
        where=lambda parsed: parsed.solver == "scip",
    ),
    _Refusal(
        words="{option} was given with --solver scip, whose plans have no shards anyway; leave it out",
        options=("--max-shards",),
        where=lambda parsed: parsed.solver == "scip",
    ),
)


def _refuse(parsed: argparse.Namespace, refusals: Sequence[_Refusal]) -> None:
    """Raise OptionError for the first option that was given where it says nothing."""
    for refusal in refusals:
        for option in refusal.options:
            value = getattr(parsed, option.removeprefix("--").replace("-", "_"))
            if value and value != PLAN[option].get("default") and refusal.where(parsed):
                raise OptionError(refusal.words.format(option=option, value=value))


def _take_batch(parsed: argparse.Namespace) -> None:
    """The given plan's samples as those of ``--batch``. Raises OptionError where others were given."""
    samples = ClusterPlan.load(parsed.given).global_batch
    if parsed.batch not in (None, samples):
        raise OptionError(
            f"--batch {parsed.batch} was given, and the plan of --given has {samples} samples a step. Expected were its own. Leave"
            " --batch out"
        )
    parsed.batch = samples


def _take_seq(parsed: argparse.Namespace) -> None:
    """The tokens that layers were measured with as those of ``--seq``, where the file says them. Raises OptionError where others
    were given."""
    tokens = tokens_of(read(Path(parsed.costs) / "layers.json"), parsed.model)
    if tokens is None:
        return
    if parsed.seq not in (None, tokens):
        raise OptionError(
            f"--seq {parsed.seq} was given, and the layers of --costs were measured with sequences of {tokens} tokens. Expected"
            " were those, as seconds of others are not known. Leave --seq out, or give measurements of that length"
        )
    parsed.seq = tokens


def _machine_for(parsed: argparse.Namespace, job: Job) -> tuple[Machine, str, float, str]:
    """The machine of one rank, where its figures come from, and the rate that utilization refers to, with its name."""
    dtype = DTYPES[parsed.dtype or "bf16"]
    if parsed.machine:
        machine = Machine.load(parsed.machine)
        rate = machine.flops_per_s(dtype)
        return (
            job.machine_of(machine, None),
            f"measured ({parsed.machine})",
            rate,
            f"the measured {format_flops(rate)}",
        )
    spec, tf32 = find_device(parsed.device), parsed.dtype == "tf32"
    peak = spec.peak_flops_per_s(dtype, tf32=tf32)
    net = f", {net_of_spec(spec).name} between ranks" if job.num_ranks > 1 else ""
    source = f"from its data sheet ({spec.link.name}{net}; host assumed: {spec.host.name})"
    return (
        job.machine_of(machine_of_spec(spec, tf32=tf32), spec),
        source,
        peak,
        f"the data sheet's {peak / 1e12:.4g} TFLOP/s (MFU)",
    )


def _budgets(parsed: argparse.Namespace, machine: Machine) -> tuple[int, int]:
    """Bytes that a plan may take on the device and on the host."""
    device: Size = Share(1 - RESERVE_SHARE) if parsed.budget is None else parse_size(parsed.budget)
    host: Size = HOST_SHARE if parsed.host_budget is None else parse_size(parsed.host_budget)
    if parsed.budget is not None and resolve_bytes(device, machine.device_bytes) > machine.device_bytes:
        raise OptionError(
            f"--budget {parsed.budget} was given, but {machine.device_name} has {format_bytes(machine.device_bytes)} of device"
            " memory. Expected was no more than that. Give less, such as --budget 90%, or name a larger device"
        )
    # A data sheet only assumes its host.
    if parsed.machine and resolve_bytes(host, machine.host_bytes) > machine.host_bytes:
        raise OptionError(
            f"--host-budget {parsed.host_budget} was given, but a rank's part of the measured host memory is"
            f" {format_bytes(machine.host_bytes)}. Expected was no more than that. Give less, such as --host-budget 90%"
        )
    return resolve_bytes(device, machine.device_bytes), resolve_bytes(host, machine.host_bytes)
