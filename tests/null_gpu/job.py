"""Run on the GPU that computes nothing: trains a small GPT, prints as JSON what the compiler wrote and the allocator counted."""

import dataclasses
import json

import torch
from torch._inductor import config
from torch._inductor.graph import GraphLowering

import autohete_fx
from autohete_fx.ir import Overlap, Schedule
from autohete_fx.options import Options
from autohete_fx.resources import tuning_bytes
from tests.training import Sizes, batch, make, plan, training_compilation

SIZES = Sizes(width=256, batch=4, time=128)


def main() -> None:
    # A process measures the machine once, in more memory than this model has.
    autohete_fx.explain(make("cuda"), batch("cuda", 0), options={"profile": "analytic"})
    torch._dynamo.reset()
    wrappers: list[str] = []
    GraphLowering.save_output_code = staticmethod(wrappers.append)
    model = make("cuda", SIZES)
    optimizer = autohete_fx.AdamW(model.parameters(), lr=1e-3, overlap="backward")
    chosen = dataclasses.replace(plan("mixed"), schedule=Schedule(overlap=Overlap.BACKWARD))
    model.compile(backend="autohete", options={"profile": "analytic", "plan": chosen})
    peaks = []
    with config.patch(force_disable_caches=True):
        for step in range(3):
            tokens = batch("cuda", step, sizes=SIZES)
            torch.cuda.reset_peak_memory_stats()
            model(tokens).backward()
            peaks.append(torch.cuda.max_memory_allocated())
            optimizer.step()
            optimizer.zero_grad()
            optimizer.synchronize()
    compilation = training_compilation()
    found = {
        "wrappers": wrappers[:2],
        "graphs": [compilation.readable("forward"), compilation.readable("backward")],
        "peaks": peaks,
        "predicted": compilation.plan.peak_bytes,
        "tuning": tuning_bytes(torch.device("cuda", 0), Options()),
    }
    print(json.dumps(found))


if __name__ == "__main__":
    main()
