"""``autohete plan``: what a training step would be on a device that need not be here.

In: parsed options. Out: the text to print. Mistakes are told without PyTorch, which takes seconds to import, and so are answers to
questions that were asked before.
"""

import argparse
from collections.abc import Sequence

from autohete_fx.arguments import BATCH, DTYPES, MOST_OF_SWEEP, SEQ, TIME_LIMIT_S
from autohete_fx.cluster.plan import ClusterPlan
from autohete_fx.commands.answers import Answer, keep, kept, key_of
from autohete_fx.commands.question import Question, check, question
from autohete_fx.errors import OptionError
from autohete_fx.ir import Plan
from autohete_fx.report.stages import Stages
from autohete_fx.whatif.job import Job


def plan(parsed: argparse.Namespace) -> str:
    """Answer, save and draw as asked. Raises AutoHeteError."""
    check(parsed)
    parsed.batch, parsed.seq = parsed.batch or BATCH, parsed.seq or SEQ
    with Stages() as stages:
        answer = _answer(parsed, stages)
    if parsed.save:
        _save((ClusterPlan if parsed.cluster else Plan).from_json(answer.plan), parsed.save)
    return answer.text


def _answer(parsed: argparse.Namespace, stages: Stages) -> Answer:
    questions = [] if parsed.cluster else [question(parsed, job) for job in _jobs(parsed)]
    name = parsed.cluster or questions[0].machine.device_name
    stages.say(f"{parsed.model} on {name}, {parsed.batch} x {parsed.seq} tokens")
    key = key_of(parsed)
    answer = None if key is None else kept(key)
    if answer is not None:
        stages.say("answered from the cache; --no-cache plans again")
        return answer
    answer = _for_cluster(parsed, stages) if parsed.cluster else _for_device(parsed, questions, stages)
    if key is not None:
        keep(key, answer)
    return answer


def _for_device(parsed: argparse.Namespace, questions: Sequence[Question], stages: Stages) -> Answer:
    stages.begin("importing")
    from autohete_fx.commands import planning

    stages.end("PyTorch and its compiler")
    return planning.answer(parsed, questions, stages)


def _jobs(parsed: argparse.Namespace) -> list[Job]:
    """One, or those of a sweep over numbers of ranks, from one on by doubling."""
    if parsed.sweep == "ranks":
        most = parsed.ranks or MOST_OF_SWEEP
        return [Job(num_ranks=1 << n) for n in range(most.bit_length())]
    return [
        Job(
            num_ranks=parsed.ranks or 1,
            num_nodes=parsed.nodes,
            num_replicas=parsed.replicas,
            node_bytes_per_s=parsed.node_rate * 1e9,
        )
    ]


def _for_cluster(parsed: argparse.Namespace, stages: Stages) -> Answer:
    stages.begin("importing")
    import torch

    from autohete_fx.cluster.commands.plan import Request, plan_for_cluster

    stages.end("PyTorch and its compiler")
    stages.begin("planning")
    text, plan = plan_for_cluster(
        Request(
            model=parsed.model,
            cluster=parsed.cluster,
            global_batch=parsed.batch,
            seq=parsed.seq,
            measured=parsed.costs,
            dtype=getattr(torch, DTYPES[parsed.dtype]) if parsed.dtype else None,
            tf32=parsed.dtype == "tf32",
            objective=parsed.objective,
            solver=parsed.solver,
            spot=parsed.spot,
            symmetric_tp=parsed.symmetric_tp,
            max_tp=parsed.max_tp,
            max_shards=parsed.max_shards,
            given=parsed.given,
            explain=parsed.explain,
            as_json=parsed.json,
            plot=parsed.plot,
            time_limit_s=parsed.time_limit or TIME_LIMIT_S,
        )
    )
    return Answer(text=text, plan=plan.to_json())


def _save(plan: Plan | ClusterPlan, path: str) -> None:
    try:
        plan.save(path)
    except OSError as error:
        raise OptionError(f"cannot write {path!r}: {error.strerror}; give --save a file that can be written") from error
