"""Tables, timelines and explanations of plans whose ranks share blocks."""

from dataclasses import replace

from autohete_fx.ir import Alternative, BlockDecision, BlockReasons, Lane, LaneTime, Params, Plan, Problem, Reasons
from autohete_fx.planner.baselines import evaluate
from autohete_fx.planner.model.simulate import simulate
from autohete_fx.planner.solve import solve
from autohete_fx.report import plan_table, render_timeline
from autohete_fx.report.why import why
from tests.planner_problems import MACHINE, cost, problem

AGAIN, KEPT, REPLICATED = BlockDecision(), BlockDecision(keeps_fetched=True), BlockDecision(replicates=True)
WHOLE = cost(gathered_bytes=40, gathered_again_bytes=40, reduced_bytes=40)


def shared(count: int, rate: float) -> Problem:
    return problem([WHOLE] * count, machine=replace(MACHINE, net_bytes_per_s=rate), num_ranks=2)


def column(table: str, title: str) -> list[str]:
    header, _, *rows = table.splitlines()
    at = header.index(title)
    return [row[at:].split("  ")[0] for row in rows[: rows.index("")]]


def test_the_table_says_whether_parameters_are_gathered_again():
    decisions = (
        AGAIN,
        KEPT,
        BlockDecision(params=Params.HOST),
        BlockDecision(params=Params.HOST, keeps_fetched=True),
        REPLICATED,
        AGAIN,
    )
    plan = Plan(labels=("embed", "a.0", "b.1", "c.2", "d.3", "head"), decisions=decisions)
    assert column(plan_table(plan, [*[WHOLE] * 5, cost()]), "parameters") == [
        "device, gathered again",
        "device, kept till backward",
        "host, gathered again",
        "host, kept till backward",
        "device, replicated",
        "device",
    ]
    # Without costs nobody knows who gathers, but for what is kept on the device.
    known = ["device", "device, kept till backward", "host", "host, kept", "device, replicated", "device"]
    assert column(plan_table(plan), "parameters") == known


def test_the_table_says_how_many_blocks_ahead_a_block_gathers():
    plan = Plan(labels=("embed", "a.0", "b.1"), decisions=(AGAIN, BlockDecision(params=Params.HOST), KEPT))
    for table in (plan_table(plan, [cost(), WHOLE, WHOLE]), plan_table(plan, gathered_again=[1], gathered=[1, 2])):
        header, _, *rows = table.splitlines()
        at = header.index("prefetch")
        columns = [line[at:].split()[:2] for line in (header, *rows[:3])]
        assert columns == [["prefetch", "gather"], ["-", "-"], ["1", "1"], ["-", "1"]]
    assert "gather" not in plan_table(plan, [cost()] * 3).splitlines()[0]


def test_equal_decisions_of_blocks_that_gather_and_do_not_are_two_rows():
    plan = Plan(labels=("layers.0", "layers.1", "layers.2"), decisions=(AGAIN,) * 3)
    table = plan_table(plan, [cost(), WHOLE, WHOLE])
    assert column(table, "parameters") == ["device", "device, gathered again"]


def test_the_net_is_named_among_the_lanes_where_there_is_one():
    decisions = (AGAIN,) * 2
    for given, is_there in ((shared(2, 40.0), True), (replace(shared(2, 40.0), num_ranks=1), False)):
        busy = next(
            line for line in plan_table(evaluate(given, decisions, "given")).splitlines() if "lanes busy" in line
        )
        assert ("net 3.00 s" in busy) == is_there == ("net" in busy)


def test_the_timeline_has_a_row_for_the_net():
    rows = render_timeline(simulate(shared(2, 40.0), [AGAIN] * 2).events).splitlines()
    net = next(row for row in rows if row.startswith("net"))
    assert "G0" in net and "G1" in net and rows[-1].startswith("G gather") and "reduce" in rows[-1]


def test_the_net_lane_is_named_where_it_binds():
    slow = shared(3, 5.0)
    plan = solve(slow)
    assert plan.decisions[1].keeps_fetched
    told = why(plan).splitlines()
    assert told[0].startswith("the net lane binds: compute waits")
    assert any("kept for backward" in line for line in told)
    told = why(solve(replace(slow, micro_batches=4, allow_replicating=True))).splitlines()
    assert any("parameters device and replicated" in line for line in told)


def test_an_alternative_with_more_traffic_counts_collectives():
    other = BlockReasons(num_others=1, next_best=Alternative(decision=AGAIN, step_s=10.0, more_copies_s=0.25))
    reasons = Reasons(blocks=(other,), memory=(), waits_s=0.0, meanwhile=(), more_bytes=0, more_step_s=10.0)
    busy_s = tuple(LaneTime(lane=lane, busy_s=1.0) for lane in (Lane.COMPUTE, Lane.NET))
    plan = Plan(labels=("layers.0",), decisions=(KEPT,), step_s=10.0, busy_s=busy_s, reasons=reasons)
    assert why(plan).splitlines()[-2:] == [
        "layers.0: keep, parameters device and kept for backward",
        "    next best: parameters device, as fast but with 250 ms more of copies and collectives",
    ]
