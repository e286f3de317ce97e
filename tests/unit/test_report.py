"""What people read: every figure is there, in the right row, with the right unit. Snapshots show the whole text once.

``EXPECTTEST_ACCEPT=1 pytest tests/unit/test_report.py`` writes the snapshots again.
"""

import dataclasses
import io
import itertools
import re
from dataclasses import replace

import pytest
import torch
from expecttest import assert_expected_inline
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console
from torch import fx, nn

from autohete_fx.graph import annotations
from autohete_fx.ir import (
    ActivationCost,
    Activations,
    BlockCost,
    BlockDecision,
    Lane,
    LaneTime,
    Optimizer,
    Params,
    Plan,
    Transfer,
)
from autohete_fx.options import parse_size
from autohete_fx.passes import PIPELINE, PassContext, Stage, run
from autohete_fx.planner.model.simulation import Event
from autohete_fx.report import (
    ComparisonRow,
    TrainingProgress,
    comparison_table,
    format_bytes,
    format_count,
    format_seconds,
    plan_table,
    render_timeline,
    transfers_table,
)
from autohete_fx.report import progress as progress_module
from autohete_fx.report.graph_text import graph_text, list_transfers

MIB = 2**20
HOST = BlockDecision(activations=Activations.OFFLOAD, params=Params.HOST, optimizer=Optimizer.HOST, prefetch_distance=2)
RECOMPUTE = BlockDecision(activations=Activations.RECOMPUTE)
PLAN = Plan(
    labels=("prologue", "layers.0", "layers.1", "layers.2", "layers.3", "epilogue"),
    decisions=(BlockDecision(), HOST, HOST, RECOMPUTE, RECOMPUTE, BlockDecision()),
    step_s=0.5,
    peak_bytes=3 * 2**30,
    host_bytes=2**30,
    busy_s=(LaneTime(lane=Lane.COMPUTE, busy_s=0.45), LaneTime(lane=Lane.H2D, busy_s=0.1)),
    lower_bound_s=0.48,
    gap=0.04,
    status="optimal",
    solve_s=1.25,
)


def cost(scale: int) -> BlockCost:
    return BlockCost(
        forward_s=0.1,
        backward_s=0.2,
        recompute_s=0.1,
        saved_bytes=10 * scale * MIB,
        boundary_bytes=scale * MIB,
        offloadable=(8 * scale * MIB,),
        forward_workspace_bytes=0,
        backward_workspace_bytes=0,
        param_bytes=4 * scale * MIB,
        grad_bytes=4 * scale * MIB,
        optimizer_bytes=8 * scale * MIB,
        num_params=scale * MIB,
    )


def test_a_plan_shows_blocks_that_are_decided_alike_in_one_row():
    assert_expected_inline(
        plan_table(PLAN),
        """\
block           activations  parameters  optimizer  prefetch
--------------  -----------  ----------  ---------  --------
prologue        keep         device      device            -
layers.0-1 (2)  offload      host        host              2
layers.2-3 (2)  recompute    device      device            -
epilogue        keep         device      device            -

predicted step  500 ms
predicted peak  3.00 GiB on the device, 1.00 GiB on the host
lanes busy      compute 450 ms (90%), h2d 100 ms (20%)
status          optimal, no plan beats 480 ms (gap 4.0%), solved in 1.25 s""",
    )


def test_a_plan_shows_what_is_kept_and_how_much_leaves():
    kept = BlockDecision(params=Params.HOST, keeps_fetched=True, activations=Activations.OFFLOAD, num_offloaded=1)
    plan = Plan(labels=("layers.0", "layers.1", "layers.2"), decisions=(kept, kept, HOST))
    rows = [" ".join(line.split()) for line in plan_table(plan).splitlines()]
    assert "layers.0-1 (2) offload 1 largest host, kept device 1" in rows
    assert "layers.2 offload host host 2" in rows
    several = dataclasses.replace(cost(1), offloadable=(5 * MIB, 3 * MIB))
    table = plan_table(plan, [several] * 3)
    assert "offload 1 of 2  host, kept" in table
    assert "30.0 MiB in all, 18.0 MiB of it off the device" in table  # 5 + 5 + (5 + 3)


def test_a_plan_shows_whose_states_leave():
    some = BlockDecision(optimizer=Optimizer.HOST, num_moved_states=2)
    plan = Plan(labels=("layers.0", "layers.1"), decisions=(some, some))
    assert "host 2 smallest" in plan_table(plan)
    one = dataclasses.replace(cost(1), num_params=8, trained=(1, 1, 6))
    table = plan_table(plan, [one] * 2)
    assert "host 2 of 3" in table
    split = dataclasses.replace(some, other_states=Optimizer.STREAMED)
    assert "host 2 of 3, streamed" in plan_table(Plan(labels=("layers.0",), decisions=(split,)), [one])
    assert f"{format_bytes(2 * one.optimizer_bytes)} in all, {format_bytes(one.optimizer_bytes // 2)} of it" in table


def test_costs_add_bytes_and_split_rows_that_cost_differently():
    table = plan_table(PLAN, [cost(1), cost(1), cost(1), cost(1), cost(2), cost(1)])
    rows = {line.split()[0]: line.split() for line in table.splitlines() if line}
    assert rows["layers.0-1"][-6:] == ["10.0", "MiB", "4.00", "MiB", "8.00", "MiB"]
    assert rows["layers.3"][-6:] == ["20.0", "MiB", "8.00", "MiB", "16.0", "MiB"]
    # 2 x 8 MiB offloaded, 9 + 18 MiB recomputed; two blocks of 4 MiB parameters and 8 MiB of states on the host
    totals = {line.split()[0]: line for line in table.splitlines() if "in all" in line}
    assert totals["activations"].endswith("70.0 MiB in all, 43.0 MiB of it off the device")
    assert totals["parameters"].endswith("28.0 MiB in all, 8.00 MiB of it off the device")
    assert totals["optimizer"].endswith("56.0 MiB in all, 16.0 MiB of it off the device")


def test_selective_recomputation_frees_what_it_does_not_hold():
    costs = [
        replace(cost(1), partial=((Activations.SELECTIVE, ActivationCost(held_bytes=6 * MIB, recompute_s=0.01)),)),
        cost(1),
    ]
    plan = Plan(labels=("a", "b"), decisions=(BlockDecision(activations=Activations.SELECTIVE), BlockDecision()))
    table = plan_table(plan, costs)
    assert table.splitlines()[2].split()[:2] == ["a", "selective"]
    assert "20.0 MiB in all, 4.00 MiB of it off the device" in table


def test_a_plan_made_by_hand_predicts_nothing():
    table = plan_table(Plan(labels=("a", "b"), decisions=(BlockDecision(), HOST)))
    assert table.endswith("status          given (no predictions)") and "0 s" not in table


def transfer(node: str, lane: Lane, num_bytes: int, waits_on: str) -> Transfer:
    return Transfer(
        graph="forward",
        node=node,
        op=node.partition("_")[0],
        block=1,
        lane=lane,
        priority=1,
        num_bytes=num_bytes,
        waits_on=waits_on,
        needed_by="mm",
    )


def test_transfers_stand_in_schedule_order_with_totals_by_lane():
    long = "scaled_dot_product_attention_backward_12"
    given = [
        transfer("offload_gelu", Lane.D2H, 3 * MIB, long),
        transfer("prefetch_w", Lane.H2D, MIB, ""),
        transfer("prefetch_b", Lane.H2D, MIB, "mm"),
    ]
    assert_expected_inline(
        transfers_table(given),
        """\
graph    op        block  lane  priority     bytes  issued after                  needed by
-------  --------  -----  ----  --------  --------  ----------------------------  ---------
forward  offload       1   d2h         1  3.00 MiB  scaled_dot_product..kward_12  mm
forward  prefetch      1   h2d         1  1.00 MiB  (start)                       mm
forward  prefetch      1   h2d         1  1.00 MiB  mm                            mm
3 transfers: h2d 2.00 MiB in 2, d2h 3.00 MiB in 1""",
    )
    assert transfers_table([]) == "no transfers"


def test_runs_are_compared_with_a_baseline():
    rows = [
        ComparisonRow(name="plain", step_s=1.0, peak_bytes=2**30),
        ComparisonRow(name="ours", step_s=1.5, peak_bytes=2**29),
        ComparisonRow(name="predicted", peak_bytes=2**29),
    ]
    assert_expected_inline(
        comparison_table(rows, baseline="plain"),
        """\
           step time  vs plain  peak memory  vs plain
---------  ---------  --------  -----------  --------
plain         1.00 s     1.00x     1.00 GiB     1.00x
ours          1.50 s     1.50x      512 MiB     0.50x
predicted          -         -      512 MiB     0.50x""",
    )
    assert "vs" not in comparison_table(rows)


def event(lane: Lane, label: str, block: int, start_s: float, end_s: float) -> Event:
    return Event(lane=lane, label=label, block=block, start_s=start_s, end_s=end_s)


def test_lanes_are_drawn_to_scale():
    events = [
        event(Lane.COMPUTE, "forward", 0, 0, 1),
        event(Lane.COMPUTE, "forward", 1, 1, 2),
        event(Lane.COMPUTE, "backward", 1, 2, 4),
        event(Lane.H2D, "prefetch", 1, 0, 0.5),
        event(Lane.D2H, "offload", 1, 2.9999, 3.0001),
    ]
    assert_expected_inline(
        render_timeline(events, width=60),
        """\
          0                 2.00 s             4.00 s
compute  |F0=========F1=========B1===================|  100%
h2d      |P1===                                      |   12%
d2h      |                                O          |    0%
F forward   P prefetch   B backward   O offload""",
    )


@pytest.mark.parametrize("width", [40, 100, 200])
def test_a_timeline_is_as_wide_as_asked_and_hides_no_lane(width: int):
    events = [event(lane, "copy", 0, place, place + 1e-6) for place, lane in enumerate(Lane)]
    lines = render_timeline(events, width=width).splitlines()
    bars = [line for line in lines if "|" in line]
    assert len(bars) == len(Lane) and all("C" in bar for bar in bars), "a moment too short for a column stays visible"
    assert {bar.rindex("|") for bar in bars} == {lines[1].rindex("|")} and max(map(len, lines)) <= width


def test_timelines_without_time_say_so():
    assert render_timeline([]) == "no events"
    assert render_timeline([event(Lane.COMPUTE, "forward", 0, 1, 1)]) == "no time passes between the events"


@pytest.mark.parametrize(
    ("given", "text"),
    [(0, "0 B"), (1023, "1023 B"), (1536, "1.50 KiB"), (20 * 2**30, "20.0 GiB"), (2**60, "1024 PiB")],
)
def test_bytes(given: int, text: str):
    assert format_bytes(given) == text


@given(st.integers(min_value=1, max_value=2**55))
def test_the_option_reads_back_what_is_shown(num_bytes: int):
    read = parse_size(format_bytes(num_bytes))
    assert isinstance(read, int) and read == pytest.approx(num_bytes, rel=0.006)


@pytest.mark.parametrize(("given", "text"), [(0, "0"), (950, "950"), (999.6, "1.00 K"), (1.02e9, "1.02 B")])
def test_counts(given: float, text: str):
    assert format_count(given) == text


@pytest.mark.parametrize(
    ("given", "text"),
    [
        (0, "0 s"),
        (1e-9, "1.00 ns"),
        (35.2e-6, "35.2 us"),
        (0.99996, "1.00 s"),
        (59.96, "1 min 00 s"),
        (3720, "1 h 02 min"),
        (-125, "-2 min 05 s"),
    ],
)
def test_seconds(given: float, text: str):
    assert format_seconds(given) == text


def run_of(steps: int, monkeypatch: pytest.MonkeyPatch, *, step_s: float = 1.0, terminal: bool = False) -> str:
    """What a run prints whose steps take ``step_s``; step 1, which compiles, takes ten times as long."""
    ticks = itertools.chain([0.0, 0.0, 0.0], (step_s * (10 + i) for i in range(steps)))
    monkeypatch.setattr(progress_module.time, "monotonic", lambda: next(ticks))
    out = io.StringIO()
    console = Console(file=out, force_terminal=terminal, width=100, highlight=False)
    with TrainingProgress(steps, budget_bytes=64 * MIB, console=console) as progress:
        progress.print("plan [bold]as it is")
        for step in range(1, steps + 1):
            progress.update(step, loss=1 / step, tokens=1000, peak_bytes=(40 - step) * MIB)
    return out.getvalue()


def test_progress_in_a_file_is_a_plain_line_every_tenth(monkeypatch: pytest.MonkeyPatch):
    lines = run_of(20, monkeypatch).splitlines()
    assert lines[0] == "plan [bold]as it is"
    assert [line.split()[1] for line in lines[1:]] == ["1/20", *(f"{step}/20" for step in range(2, 21, 2))]
    # The first step compiles, so its rate is none; the peak is the largest so far.
    assert lines[1] == "step  1/20  loss 1.000  - tokens/s  peak 39.0 MiB of 64.0 MiB"
    assert lines[-1] == "step 20/20  loss 0.050  1,000 tokens/s  peak 39.0 MiB of 64.0 MiB"


def test_progress_in_a_file_does_not_fall_silent_in_slow_steps(monkeypatch: pytest.MonkeyPatch):
    lines = run_of(100, monkeypatch, step_s=11.0).splitlines()
    assert len(lines) == 1 + 100


def test_progress_on_a_terminal_is_one_bar(monkeypatch: pytest.MonkeyPatch):
    out = io.StringIO()
    console = Console(file=out, force_terminal=True, width=120)
    with TrainingProgress(3, console=console) as progress:
        for step in range(1, 4):
            progress.update(step, loss=2.5, tokens=10)
    assert "3/3" in out.getvalue() and "loss 2.500" in out.getvalue() and "peak" not in out.getvalue()


def product_of_two() -> fx.GraphModule:
    """``(x @ w0) @ w1``, a block each, with the second weight in host memory."""
    graph = fx.Graph()
    x, w0, w1 = (graph.placeholder(name) for name in ("x", "w0", "w1"))
    first = graph.create_node("call_function", torch.ops.aten.mm.default, (x, w0), name="first")
    second = graph.create_node("call_function", torch.ops.aten.mm.default, (first, w1), name="second")
    graph.output((second,))
    for node in graph.nodes:
        node.meta["val"] = torch.empty(512, 512, device="meta")
    annotations.set_block(first, 0)
    annotations.set_block(second, 1)
    plan = Plan(labels=("a", "b"), decisions=(BlockDecision(), BlockDecision(params=Params.HOST)))
    context = PassContext(stage=Stage.FORWARD, plan=plan, session="s", owners={"w0": 0, "w1": 1}, num_outputs=1)
    return run(PIPELINE, fx.GraphModule(nn.Module(), graph), context, given=("blocks",))


def test_a_graph_says_what_each_inserted_node_is_for():
    gm = product_of_two()
    assert_expected_inline(
        re.sub(" {2,}#", "  #", graph_text(gm)),  # comments stand in a column of their own
        """\
x: float32[512, 512] = input
w0: float32[512, 512] = input
w1: float32[512, 512] = input
prefetch_w1: int64[1] = autohete.prefetch.default(w1, 's', 1, 1)  # block 1, parameter, lane h2d, priority 1, 1.00 MiB
first: float32[512, 512] = aten.mm.default(x, w0)  # block 0
wait_w1: float32[512, 512] = autohete.wait.default(prefetch_w1, w1, 's')  # block 1, parameter, 1.00 MiB
second: float32[512, 512] = aten.mm.default(first, wait_w1)  # block 1
return (second,)
""",
    )
    (copy,) = list_transfers(gm, "forward")
    assert (copy.op, copy.block, copy.lane, copy.num_bytes) == ("prefetch", 1, Lane.H2D, MIB)
    assert copy.waits_on == "" and copy.needed_by == "second"
