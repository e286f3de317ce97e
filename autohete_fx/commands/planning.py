"""The answer of ``autohete plan``: trace the model, solve, and word what was found. It takes PyTorch and its compiler.

In: parsed options, and a checked question for each number of ranks. Out: an `Answer`.
"""

import argparse
import dataclasses
import time
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from autohete_fx.arguments import BATCH, DTYPES, POINTS, SEQ, TIME_LIMIT_S, WORK_OF_BLOCK_S
from autohete_fx.commands.answers import Answer
from autohete_fx.commands.question import Question
from autohete_fx.compiler.problem import with_disk
from autohete_fx.errors import OptionError
from autohete_fx.ir import Overlap, Problem, Schedule
from autohete_fx.ir.sizes import format_count
from autohete_fx.options import Options
from autohete_fx.report.stages import Stages, plan_words
from autohete_fx.whatif.blueprint import read_model
from autohete_fx.whatif.depth import TracedStep
from autohete_fx.whatif.predict import Scaling, predict, predict_if_any, sweep_budgets, with_more
from autohete_fx.whatif.report import (
    Setting,
    draw_sweep,
    prediction_json,
    prediction_text,
    scaling_json,
    scaling_text,
    sweep_json,
    sweep_text,
)
from autohete_fx.whatif.trace import trace_model


@dataclass(frozen=True, kw_only=True)
class _Asked:
    """A step of one rank as the options ask for it."""

    step: TracedStep
    problem: Problem
    setting: Setting


def answer(parsed: argparse.Namespace, questions: Sequence[Question], stages: Stages) -> Answer:
    """Trace, solve and word it; draws where that is asked. Importing is under way in ``stages``."""
    if parsed.sweep == "ranks":
        return Answer(text=_scaling(parsed, questions, stages))
    (question,) = questions
    asked = _ask(parsed, question, stages)
    step, problem, setting = asked.step, asked.problem, asked.setting
    tokens, (limit_s, work_s) = setting.batch * setting.seq, _limits(parsed, problem)
    stages.begin("planning")
    if parsed.sweep:
        sweep = sweep_budgets(
            step, problem, tokens=tokens, num_points=parsed.points or POINTS, time_limit_s=limit_s, work_s=work_s
        )
        if parsed.plot:
            draw_sweep(setting, sweep, parsed.plot)
        return Answer(text=sweep_json(setting, sweep) if parsed.json else sweep_text(setting, sweep))
    given = predict(step, problem, "as given", tokens=tokens, time_limit_s=limit_s, work_s=work_s)
    stages.end(plan_words(given.plan, problem.device_budget_bytes))
    stages.begin("more")
    more = with_more(step, given, time_limit_s=limit_s / 2, work_s=work_s / 2)
    stages.end("tried more of each resource")
    text = (
        prediction_json(setting, given, more)
        if parsed.json
        else prediction_text(setting, given, more, explain=parsed.explain)
    )
    return Answer(text=text, plan=given.plan.to_json())


def _scaling(parsed: argparse.Namespace, questions: Sequence[Question], stages: Stages) -> str:
    """The sweep over numbers of ranks."""
    asked = [_ask(parsed, question, stages) for question in questions]
    setting, (limit_s, work_s) = asked[-1].setting, _limits(parsed, asked[-1].problem)
    tokens = setting.batch * setting.seq
    stages.begin("planning")
    points = tuple(predict_if_any(a.step, a.problem, tokens=tokens, time_limit_s=limit_s, work_s=work_s) for a in asked)
    if not any(points):
        predict(
            asked[-1].step, asked[-1].problem, "planned", tokens=tokens, time_limit_s=limit_s, work_s=work_s
        )  # raises, and says why
    scaling = Scaling(num_ranks=tuple(question.job.num_ranks for question in questions), points=points)
    return scaling_json(setting, scaling) if parsed.json else scaling_text(setting, scaling)


def _limits(parsed: argparse.Namespace, problem: Problem) -> tuple[float, float]:
    """Seconds of each solve by the clock, and of its work. Few blocks leave little to find, and who asks for a preview waits."""
    if parsed.time_limit:
        return parsed.time_limit, parsed.time_limit
    return TIME_LIMIT_S, WORK_OF_BLOCK_S * len(problem.costs)


def _ask(parsed: argparse.Namespace, question: Question, stages: Stages) -> _Asked:
    dtype = getattr(torch, DTYPES[parsed.dtype]) if parsed.dtype else None
    stages.begin("reading")
    blueprint = read_model(parsed.model, batch=parsed.batch, seq=parsed.seq, dtype=dtype)
    stages.end(f"{blueprint.num_layers} layers" if blueprint.num_layers else "a factory")
    stages.begin("tracing")
    began = time.perf_counter()
    job, options = question.job, Options(micro_batches=parsed.micro_batches)
    step = trace_model(blueprint, question.machine, options, job.num_ranks, job.num_replicas)
    stages.end(f"{step.traced_layers} layers, {format_count(step.num_params)} parameters")
    batch, seq = step.batch
    for option, value, default, own in (("--batch", parsed.batch, BATCH, batch), ("--seq", parsed.seq, SEQ, seq)):
        if value not in (default, own):
            raise OptionError(
                f"{option} {value} was given, and {parsed.model} returns inputs of its own, {batch} x {seq} tokens. Expected were"
                f" those. Leave {option} out, or let it return the module alone"
            )
    setting = Setting(
        model=parsed.model,
        batch=batch,
        seq=seq,
        dtype=parsed.dtype or ("bf16" if blueprint.num_layers else "its own dtype"),
        source=question.source,
        peak_flops_per_s=question.peak_flops_per_s,
        peak_name=question.peak_name,
        traced_layers=step.traced_layers,
        trace_s=time.perf_counter() - began,
        num_nodes=question.job.num_nodes,
    )
    problem = with_disk(
        dataclasses.replace(
            step.problem,
            device_budget_bytes=question.device_budget_bytes,
            host_budget_bytes=question.host_budget_bytes,
            schedule=Schedule(overlap=Overlap(parsed.overlap)),
            clips_gradients=parsed.clip,
        )
    )
    return _Asked(step=step, problem=problem, setting=setting)
