"""How near to the best a plan is proven to be, and how soon: identical and different blocks, few and many, tight and wide.

    python examples/benchmarks/planner_gap.py --layers 12 24 48 96
    python examples/benchmarks/planner_gap.py --layers 12 24 48 --machine examples/benchmarks/machines/h200.json

No model is traced: blocks are transformer layers in closed form, with an embedding before and a loss behind, on a device whose data
sheet ships, or on a machine that was measured. "Different" layers draw their size and their MLP's width at random. Budgets are
shares of what plain training takes. The gap is ``(step - lower bound) / step``, both as the simulator counts. ``--prove`` gives the
bound alone more seconds after each solve.
"""

import argparse
import dataclasses
import random
import time
from pathlib import Path

from results import environment, print_figures, save

from autohete_fx.errors import InfeasiblePlanError
from autohete_fx.ir import BlockCost, BlockDecision, Machine, Overlap, Problem, Schedule
from autohete_fx.machine.devices import find_device, machine_of_spec
from autohete_fx.planner.model.simulate import simulate
from autohete_fx.planner.solve import proven, solve

_SHARES = (0.15, 0.2, 0.35, 0.5, 0.7, 0.9)
_VOCABULARY = 50_000


def main() -> None:
    """Run."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layers", type=int, nargs="+", default=[12, 24, 48, 96])
    parser.add_argument("--width", type=int, default=4096)
    parser.add_argument("--tokens", type=int, default=8192)
    parser.add_argument("--device", default="a100-40g")
    parser.add_argument("--machine", type=Path, help="a file of `autohete doctor --save`, in place of --device")
    parser.add_argument("--overlap", choices=[overlap.value for overlap in Overlap], nargs="+", default=["step"])
    parser.add_argument("--time-limit", type=float, default=10.0)
    parser.add_argument(
        "--prove", type=float, default=0.0, help="seconds of branching after each solve, for the bound alone"
    )
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    print_figures(environment())
    rows = []
    for overlap in arguments.overlap:
        for layers in arguments.layers:
            for different in (False, True):
                free = stack(layers, arguments, Overlap(overlap), different=different)
                limits = arguments.time_limit, arguments.prove
                rows += [row(free, share, layers, different, limits) for share in _SHARES]
                print(*(f"{key} {value}" for key, value in rows[-1].items() if key in ("overlap", "layers", "blocks")))
                for each in rows[-len(_SHARES) :]:
                    print(
                        f"  {each['share']:>4.0%}  gap {each['gap']:<8} solved in {each['seconds']} s",
                        each.get("proven gap", ""),
                        flush=True,
                    )
    save(arguments.json, rows)


def row(free: Problem, share: float, layers: int, different: bool, limits: tuple[float, float]) -> dict[str, object]:
    """Solve one budget; ``limits`` are seconds of solving and of proving."""
    plain = simulate(free, [BlockDecision()] * len(free.costs), events=False).peak_bytes
    found: dict[str, object] = {
        "overlap": free.schedule.overlap.value,
        "layers": layers,
        "blocks": "different" if different else "identical",
        "share": share,
    }
    began = time.perf_counter()
    try:
        within = dataclasses.replace(free, device_budget_bytes=int(share * plain))
        plan = solve(within, time_limit_s=limits[0])
    except InfeasiblePlanError:
        return {**found, "gap": "no plan", "seconds": round(time.perf_counter() - began, 1)}
    found |= {"gap": f"{plan.gap:.2%}", "seconds": round(time.perf_counter() - began, 1)}
    return found | ({"proven gap": f"{proven(within, plan, time_limit_s=limits[1]).gap:.2%}"} if limits[1] else {})


def stack(layers: int, arguments: argparse.Namespace, overlap: Overlap, *, different: bool) -> Problem:
    """A whole model as the planner sees it."""
    measured = arguments.machine
    machine = Machine.load(measured) if measured else machine_of_spec(find_device(arguments.device))
    rate, draw = machine.flops_per_s("bfloat16"), random.Random(0)
    width, tokens = arguments.width, arguments.tokens
    table = block(width, tokens, rate, size=0.01)
    words = _VOCABULARY * width
    embedding = dataclasses.replace(
        table,
        param_bytes=2 * words,
        grad_bytes=2 * words,
        optimizer_bytes=12 * words,
        num_params=words,
        trained=(words,),
    )
    loss = dataclasses.replace(
        block(width, tokens, rate, size=0.5), param_bytes=0, grad_bytes=0, optimizer_bytes=0, num_params=0, trained=()
    )
    sizes = [(draw.uniform(0.5, 1.6), draw.choice((3, 4, 5))) if different else (1.0, 4) for _ in range(layers)]
    middle = [block(width, tokens, rate, size=size, expansion=expansion) for size, expansion in sizes]
    return Problem(
        labels=("embedding", *(f"layers.{i}" for i in range(layers)), "loss"),
        costs=(embedding, *middle, loss),
        edges=(),
        machine=machine,
        host_budget_bytes=machine.host_bytes,
        schedule=Schedule(overlap=overlap),
        clips_gradients=True,
        allow_streamed_optimizer=True,
        allow_moving_some_states=True,
    )


def block(width: int, tokens: int, flops_per_s: float, *, size: float, expansion: int = 4) -> BlockCost:
    """One layer: 16-bit parameters and activations, fp32 master weights and moments."""
    parts = [int(size * n * width * width) for n in (1, 3, expansion, expansion)]  # attention out and in, MLP
    params, token_bytes = sum(parts), 2 * tokens * width
    forward_s = 2 * params * tokens / flops_per_s
    large, small = int(size * expansion * token_bytes), int(size * token_bytes)
    saved = 2 * large + 10 * small
    return BlockCost(
        forward_s=1.1 * forward_s,
        backward_s=2.1 * forward_s,
        recompute_s=forward_s,
        saved_bytes=saved,
        boundary_bytes=min(token_bytes, saved),
        offloadable=(large, large, *[small] * 8),
        forward_workspace_bytes=4 * token_bytes,
        backward_workspace_bytes=6 * token_bytes,
        param_bytes=2 * params,
        grad_bytes=2 * params,
        optimizer_bytes=12 * params,
        num_params=params,
        trained=tuple(parts),
    )


if __name__ == "__main__":
    main()
