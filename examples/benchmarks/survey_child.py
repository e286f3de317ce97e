"""One family of `survey.py`, in its own process."""

import contextlib
import gc
import json
import logging
import os
import random
import re
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch._inductor.compile_fx
import transformers.modeling_utils
from families import batch_of, loss_of, small_model
from torch import Tensor, nn
from torch._dynamo.utils import counters
from torch._functorch import config as functorch_config
from torch._inductor import config as inductor_config
from torch._inductor.utils import fresh_cache

import autohete_fx
import autohete_fx.backend

Cache = Callable[[], contextlib.AbstractContextManager[Any]]
STEPS = 3
EXACT = 4.0
"""A run that is not bitwise equal counts as exact where it differs from plain by no more than so many times what plain itself
differs from eager PyTorch."""
_SETTINGS: dict[str, Any] = {"lr": 1e-3, "eps": 1e-5}


@dataclass(kw_only=True)
class Trained:
    """What a few steps computed and took."""

    seen: list[Tensor] = field(default_factory=list)
    peak_bytes: int = 0
    seconds: list[float] = field(default_factory=list)

    @property
    def compile_s(self) -> float:
        """Seconds of all steps beside what the fastest one takes, of cores: others on the machine do not count, compilers that the
        process started do."""
        return sum(self.seconds) - STEPS * min(self.seconds)


def run(family: str, inner: str, share: float, caches: str, kernels: Path | None, words: Path, answer: Path) -> None:
    """In a process of its own: write the row of a family to ``answer``, and what it prints meanwhile to ``words``. ``kernels`` is a
    directory of C++ kernels that families share, or None."""
    for stream in (1, 2):
        os.dup2(os.open(words, os.O_WRONLY | os.O_CREAT | os.O_APPEND), stream)
    os.environ |= {
        "TORCHINDUCTOR_CACHE_DIR": str(kernels or f"{caches}/inductor"),
        "AUTOHETE_CACHE_DIR": f"{caches}/autohete",
    }
    torch.set_num_threads(
        1
    )  # Two add up in an order that changes: Whisper's embedding then differs from run to run without us.
    transformers.logging.set_verbosity_error()
    row = row_of(family, inner, share, fresh_cache if kernels is None else shared_kernels)
    if kernels is not None:
        row = {name: value for name, value in row.items() if name not in ("plain compile s", "compile s")}
    answer.write_text(json.dumps(row))


@contextlib.contextmanager
def shared_kernels() -> Iterator[None]:
    """In place of ``fresh_cache``: kernels that were compiled before are taken, graphs are lowered nevertheless."""
    with inductor_config.patch(fx_graph_cache=False), functorch_config.patch(enable_autograd_cache=False):
        yield


def row_of(family: str, inner: str, share: float, cache: Cache = fresh_cache) -> dict[str, Any]:
    """Train plain and ours, each with Inductor's ``cache``."""
    how = {"backend": _plain(inner)}
    try:
        small_model(family)
    except Exception as error:
        return {"result": "not built", "error": first_line(error)}
    with cache():
        if inner != "eager":
            warm_up(how, torch.optim.AdamW)
        counters.clear()
        try:
            plain = train(family, how, torch.optim.AdamW)
        except Exception as error:
            return {"result": "plain fails", "error": first_line(error)}
        row: dict[str, Any] = breaks()
    if not all(torch.isfinite(tensor.double()).all() for tensor in plain.seen):
        row["not finite"] = True
    row |= {"plain peak bytes": plain.peak_bytes, "plain compile s": plain.compile_s}
    return row | ours_beside(family, inner, int(share * plain.peak_bytes), plain, cache)


def _plain(inner: str) -> str:
    return "aot_eager" if inner == "eager" else "inductor"


def ours_beside(family: str, inner: str, budget_bytes: int, plain: Trained, cache: Cache) -> dict[str, Any]:
    """Our figures; under the budget that a refusal names where the given one is refused."""
    row: dict[str, Any] = {"result": "trained", "budget bytes": budget_bytes}
    options = {"memory_budget": budget_bytes, "inner_backend": inner}
    with cache(), told() as said:
        if inner != "eager":
            warm_up({"backend": "autohete", "options": {**options, "memory_budget": 2**40}}, autohete_fx.AdamW)
        while True:
            earlier = autohete_fx.compilations()
            try:
                ours = train(family, {"backend": "autohete", "options": options}, autohete_fx.AdamW)
                break
            except autohete_fx.InfeasiblePlanError as error:
                enough = error.smallest_budget_bytes
                if row["result"] == "refused" or enough is None:
                    return row | {
                        "result": "failed",
                        "error": f"refused {options['memory_budget']} bytes: {first_line(error)}",
                    }
                row |= {"result": "refused", "budget bytes": enough, "refusal": first_line(error)}
                options["memory_budget"] = enough
            except Exception as error:
                return row | {"result": "failed", "error": first_line(error), "warnings": said()}
    made = [each for each in autohete_fx.compilations() if not any(each is other for other in earlier)]
    plans = [each for each in made if each.training]
    row |= {
        "blocks": [len(each.plan.decisions) for each in plans],
        "layers found": sorted({label for each in plans for label in each.plan.labels if "." in label}),
        "predicted peak bytes": max((each.plan.peak_bytes for each in plans), default=0),
        "peak bytes": ours.peak_bytes,
        "compile s": ours.compile_s,
        "of that s": {
            name: sum(each.compile_s.get(name, 0.0) for each in plans) for name in ("profiling", "solving", "rewriting")
        },
        "warnings": said(),
    }
    gap = difference(ours.seen, plain.seen)
    row |= {"bitwise": gap == 0.0, "difference": gap}
    if gap:
        row["plain's difference"] = own_difference(family, inner, cache)
    own = row.get("plain's difference", 0.0)  # infinite where eager code trained other parameters
    row["exact"] = bool(gap <= EXACT * own and np.isfinite(own))
    return row


def own_difference(family: str, inner: str, cache: Cache) -> float:
    """Plain's from eager PyTorch, both with random numbers drawn alike."""
    with inductor_config.patch(fallback_random=True), cache():
        plain = train(family, {"backend": _plain(inner)}, torch.optim.AdamW)
        return difference(plain.seen, train(family, None, torch.optim.AdamW).seen)


def train(family: str, how: dict[str, Any] | None, kind: Any) -> Trained:
    """A few steps; ``how`` to compile, or None for eager PyTorch."""
    torch._dynamo.reset()
    gc.collect()
    with autohete_fx.MemoryMeter("cpu") as meter:
        others = meter.start_bytes
    torch.manual_seed(0)
    model = small_model(family)
    optimizer = kind(model.parameters(), **_SETTINGS, **({"fused": True} if kind is torch.optim.AdamW else {}))
    if how is not None:
        model.compile(**how)
    result = Trained()
    for step in range(STEPS):
        batch = batch_of(model, family, step)
        seed(step)
        begin = core_s()
        with autohete_fx.MemoryMeter("cpu") as meter:
            loss = loss_of(model(**batch))
            loss.backward()
            optimizer.step()
        result.seconds.append(core_s() - begin)
        result.peak_bytes = max(result.peak_bytes, meter.peak_bytes - others)
        result.seen += [copied(loss), *(copied(p.grad) for p in model.parameters() if p.grad is not None)]
        del loss, batch
        optimizer.zero_grad()
    result.seen += map(copied, model.parameters())
    return result


def warm_up(how: dict[str, Any], kind: Any) -> None:
    """Compile something small: loads the compiler, compiles its headers and, for ours, measures the machine."""
    torch._dynamo.reset()
    model = nn.Sequential(nn.Linear(8, 8), nn.GELU())
    optimizer = kind(model.parameters())
    torch.compile(lambda x: model(x).sum(), **how)(torch.randn(4, 8)).backward()
    optimizer.step()


def core_s() -> float:
    """Seconds of cores that the process and those that it has waited for have used."""
    used = os.times()
    return used.user + used.system + used.children_user + used.children_system


def seed(number: int) -> None:
    """Everything that models draw from."""
    torch.manual_seed(number)
    random.seed(number)
    np.random.seed(number)


def copied(tensor: Tensor) -> Tensor:
    """The values now, in NumPy's memory, which no meter counts."""
    values = tensor.detach().contiguous().reshape(-1).view(torch.uint8).numpy().copy()
    return torch.from_numpy(values).view(tensor.dtype).view(tensor.shape)


def difference(given: list[Tensor], expected: list[Tensor]) -> float:
    """The largest between elements, over the largest element of its kind; 0 where all bits are equal."""
    if len(given) != len(expected):
        return float("inf")
    pairs = [(a, b) for a, b in zip(given, expected, strict=True) if not _same_bits(a, b)]
    largest = max((float(b.double().abs().max()) for b in expected if b.numel()), default=1.0)
    gaps = [float((a.double() - b.double()).abs().max()) for a, b in pairs]
    return (
        max(gaps, default=0.0) / largest
        if all(map(np.isfinite, [*gaps, largest]))
        else (float("inf") if pairs else 0.0)
    )


def _same_bits(a: Tensor, b: Tensor) -> bool:
    return a.shape == b.shape and torch.equal(a.reshape(-1).view(torch.uint8), b.reshape(-1).view(torch.uint8))


def breaks() -> dict[str, Any]:
    """What Dynamo made of plain's model."""
    reasons = [reason.strip().splitlines()[0][:160] for reason in counters["graph_break"]]
    return {"graphs": counters["stats"]["unique_graphs"], "breaks": sorted(set(reasons))}


def first_line(error: BaseException) -> str:
    """Its kind, and what it says first."""
    lines = [line for line in str(error).splitlines() if line.strip()]
    return f"{type(error).__name__}: {without_paths((lines or [''])[0])[:400]}"


def without_paths(text: str) -> str:
    """Files of packages, without where this machine has them."""
    return re.sub(r"[^\s(]*/site-packages/", "", text)


@contextlib.contextmanager
def told() -> Iterator[Any]:
    """Gives a function that lists what was warned of so far by our package."""
    said: list[str] = []

    class Listener(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            said.append(without_paths(record.getMessage()))

    log, listener = logging.getLogger("autohete_fx"), Listener(logging.WARNING)
    log.addHandler(listener)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        yield lambda: sorted({*said, *(str(each.message) for each in caught if "autohete_fx" in each.filename)})
    log.removeHandler(listener)
