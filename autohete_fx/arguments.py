"""The options of ``autohete plan``: names, defaults, and what their text may be. PyTorch is not needed to read them."""

import argparse
import math
from typing import Any

from autohete_fx.ir import Overlap
from autohete_fx.machine.devices import DEVICES, NODE_GB_PER_S, RESERVE_SHARE
from autohete_fx.whatif.architectures import ARCHITECTURES

DTYPES = {"bf16": "bfloat16", "fp16": "float16", "fp32": "float32", "tf32": "float32"}
"""The names of dtypes in PyTorch."""
POINTS, MOST_OF_SWEEP = 10, 8
"""Budgets of a sweep, and where one of ranks ends, unless told otherwise."""
_MOST_RANKS = 1 << 16
"""Devices that train together at most: every one of them is imagined, in some 30 kB of this process's memory."""
BATCH = 8
"""Sequences of a micro-batch, unless told otherwise."""
SEQ = 1024
"""Tokens of a sequence, unless told otherwise."""
TIME_LIMIT_S, WORK_OF_BLOCK_S = 10.0, 0.1
"""Seconds of each solve at most, and of a solve's work for each block, unless told otherwise."""
SOLVERS = ("cp-sat", "scip")
"""Searches of plans for clusters, the default first."""
EXPLAIN = "also say why: what binds, and for each block what else could have been chosen and what that would cost"


def _positive(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not an integer of at least 1")
    return int(text)


def _ranks(text: str) -> int:
    if not text.isdecimal() or not 1 <= int(text) <= _MOST_RANKS:
        raise argparse.ArgumentTypeError(f"{text!r} is not an integer from 1 to {_MOST_RANKS}")
    return int(text)


def _seconds(text: str) -> float:
    return _more_than_0(text, "seconds")


def _rate(text: str) -> float:
    return _more_than_0(text, "gigabytes a second")


def _more_than_0(text: str, unit: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = 0.0
    if not 0.0 < value < math.inf:
        raise argparse.ArgumentTypeError(f"{text!r} is not a positive number of {unit}")
    return value


PLAN: dict[str, dict[str, Any]] = {
    # The model and its batch.
    "model": dict(metavar="MODEL", help="a name, a JSON file of a transformers config, or file.py:factory (see below)"),
    "--batch": dict(
        type=_positive,
        metavar="N",
        help=f"sequences per micro-batch of each rank (default: {BATCH}, or those of the --given plan, or a factory's inputs)",
    ),
    "--seq": dict(
        type=_positive,
        metavar="N",
        help=f"tokens per sequence (default: {SEQ}, or those of the layers of --costs, or a factory's inputs)",
    ),
    # One of these is given (`_WHERE`).
    "--device": dict(metavar="NAME", help="a device that ships, such as a100-40g, h100, 4090"),
    "--cluster": dict(
        metavar="SPEC",
        help="GPUs that are not alike, such as 8xA100-40G,4xH20, or a JSON file; --batch is then all of a step's sequences",
    ),
    "--machine": dict(metavar="FILE", help="a machine that `autohete doctor --save` measured"),
    # Ranks.
    "--ranks": dict(
        type=_ranks,
        metavar="N",
        help="devices that train the model together, each with its shards and a batch of its own (default: 1); of --sweep ranks the"
        f" most (default: {MOST_OF_SWEEP})",
    ),
    "--nodes": dict(type=_positive, metavar="N", default=1, help="machines that the ranks are on, evenly (default: 1)"),
    "--replicas": dict(
        type=_positive,
        metavar="N",
        default=1,
        help="copies of the model, each sharded over an even part of the ranks, which average gradients once a step (default: 1)",
    ),
    "--node-rate": dict(
        type=_rate,
        metavar="GB/S",
        default=NODE_GB_PER_S,
        help="what each rank's network adapter sends to other nodes, in 10^9 bytes a second (default: %(default)g)",
    ),
    # A rank's step.
    "--budget": dict(
        metavar="SIZE",
        help=f"peak device memory of each rank: 24GiB, 60%%, ... (default: the capacity less {100 * RESERVE_SHARE:.0f}%%, for what"
        " CUDA and the allocator take)",
    ),
    "--host-budget": dict(metavar="SIZE", help="host memory for what one rank offloads (default: 90%% of its part)"),
    "--dtype": dict(
        choices=tuple(DTYPES),
        help="of parameters and products; AdamW holds fp32 masters of 16-bit ones (default: bf16; a factory's as it is)",
    ),
    "--micro-batches": dict(
        type=_positive, metavar="N", default=1, help="forward and backward passes per step (default: 1)"
    ),
    "--overlap": dict(
        choices=[overlap.value for overlap in Overlap],
        default=Overlap.STEP.value,
        help="what updates on the host overlap: nothing, the next forward, or the backward too (default: %(default)s, as AdamW)",
    ),
    # Clusters.
    "--objective": dict(
        choices=("throughput", "cost"),
        default="throughput",
        help="of --cluster: the fastest step, or the fewest dollars a token (default: %(default)s)",
    ),
    "--solver": dict(
        choices=SOLVERS,
        default=SOLVERS[0],
        help="of --cluster: our search, or the two stages of AutoHet's paper, which SCIP solves (default: %(default)s)",
    ),
    "--spot": dict(action="store_true", help="of --cluster: prices of GPUs that may be taken away"),
    "--symmetric-tp": dict(
        action="store_true", help="of --cluster: one degree of tensor parallelism for all pipelines"
    ),
    "--max-tp": dict(
        type=_positive, metavar="N", help="of --cluster: the most GPUs that share a layer by tensor parallelism"
    ),
    "--max-shards": dict(
        type=_positive,
        metavar="N",
        help="of --cluster: the most shards that the GPUs of a stage hold its parameters in; 1: none",
    ),
    "--given": dict(
        metavar="PLAN.json", help="of --cluster: price this plan, its step and memory, instead of searching"
    ),
    "--costs": dict(
        metavar="DIR", help="of --cluster: measured layers.json, memory.json and network.json, instead of data sheets"
    ),
    # Either.
    "--clip": dict(action="store_true", help="gradients are clipped by their global norm"),
    # Sweeps.
    "--sweep": dict(
        choices=("budget", "ranks"), help="solve for a range of budgets, or of numbers of ranks, instead of one"
    ),
    "--points": dict(type=_positive, metavar="N", help=f"budgets of a sweep (default: {POINTS})"),
    "--plot": dict(
        metavar="FILE.png",
        help="draw the sweep; of --cluster the step of each stage, or with --objective cost seconds against dollars (needs"
        " matplotlib)",
    ),
    # The answer.
    "--explain": dict(action="store_true", help=EXPLAIN),
    "--json": dict(action="store_true", help="print one JSON object instead of tables"),
    "--save": dict(
        metavar="PLAN.json", help="write the plan, for the option 'plan' of the backend, or of cluster.join"
    ),
    "--no-cache": dict(
        action="store_true",
        help="trace and solve again what has been planned before; without it the same question gets the answer of the first time",
    ),
    "--time-limit": dict(
        type=_seconds,
        metavar="SECONDS",
        help=f"of each solve (default: {TIME_LIMIT_S:g}, and no more work than for {WORK_OF_BLOCK_S:g} a block); half for those"
        " that tell what more of a resource would buy",
    ),
}
"""The options of the subcommand, in the order of its help: what argparse is told of each."""
_WHERE = ("--device", "--cluster", "--machine")


def add_plan(commands: "argparse._SubParsersAction[argparse.ArgumentParser]") -> argparse.ArgumentParser:
    """Add the subcommand; returns its parser."""
    plan = commands.add_parser(
        "plan",
        help="plan a training step for a GPU that need not be here, and predict its time and memory",
        description="Trace a model without its weights, price it for a device, and solve for the fastest plan within a"
        " memory budget. Nothing is downloaded, no GPU is needed.",
        epilog=f"models: {', '.join(ARCHITECTURES)}. devices: {', '.join(spec.name for spec in DEVICES)}.",
    )
    where = plan.add_mutually_exclusive_group(required=True)
    for name, how in PLAN.items():
        (where if name in _WHERE else plan).add_argument(name, **how)
    return plan
