"""The simulator of pipelines against what can be worked out by hand."""

import dataclasses
import itertools
from pathlib import Path

import pytest

from autohete_fx.cluster.costs import CostTable, LayerBytes, LayerTime, UpdateTime
from autohete_fx.cluster.inputs.measurements import costs_of, read
from autohete_fx.cluster.links import Links
from autohete_fx.cluster.memory import memory_of_plan
from autohete_fx.cluster.plan import ClusterPlan, Pipeline, PipelineSchedule, Stage
from autohete_fx.cluster.simulation.events import Sends
from autohete_fx.cluster.simulation.gradient_sums import last_sums_s, sums_of
from autohete_fx.cluster.simulation.instructions import instructions
from autohete_fx.cluster.simulation.simulate import simulate
from autohete_fx.cluster.spec import Cluster, Gpu, Joined, Node, steady_link
from autohete_fx.errors import ClusterError, PlanError
from autohete_fx.ir import BlockDecision, Plan

MEASURED = Path(__file__).parents[2] / "examples" / "benchmarks" / "measured"
KINDS = ("first", *["layer"] * 6, "last")
FORWARD_S, BACKWARD_S, OUTPUT_BYTES, PARAMS_BYTES, KEPT_BYTES = 1.0, 2.0, 1000, 4000, 500


def costs(*gpus: tuple[str, float]) -> CostTable:
    """Layers alike; ``gpus``: name and how many times as slow as the first."""
    rows = [
        LayerTime(
            kind=kind, gpu=gpu, tp=tp, micro_batch=1, forward_s=slow * FORWARD_S / tp, backward_s=slow * BACKWARD_S / tp
        )
        for kind in dict.fromkeys(KINDS)
        for gpu, slow in gpus
        for tp in (1, 2)
    ]
    sizes = [
        LayerBytes(
            kind=kind,
            tp=tp,
            params_bytes=PARAMS_BYTES // tp,
            kept_bytes=KEPT_BYTES // tp,
            output_bytes=OUTPUT_BYTES,
        )
        for kind in dict.fromkeys(KINDS)
        for tp in (1, 2)
    ]
    updates = [UpdateTime(gpu=gpu, fixed_s=0.5, s_per_byte=0.0) for gpu, _ in gpus]
    return CostTable(model="toy", kinds=KINDS, times=tuple(rows), sizes=tuple(sizes), updates=tuple(updates))


def cluster(*nodes: tuple[str, str, int], rate: float = 1e15, within: float = 1e15) -> Cluster:
    """``nodes``: name, type, GPUs."""
    types = sorted({gpu for _, gpu, _ in nodes})
    return Cluster(
        gpus=tuple(Gpu(name=gpu, memory_bytes=10**9) for gpu in types),
        nodes=tuple(Node(name=name, gpu=gpu, gpus=count) for name, gpu, count in nodes),
        within=tuple(
            Joined(source=gpu, target=gpu, link=steady_link("inside", within, latency_s=0.0)) for gpu in types
        ),
        between=tuple(
            Joined(source=a, target=b, link=steady_link("port", rate, latency_s=0.0)) for a in types for b in types
        ),
    )


def pipeline(*stages: tuple[str, str, int], micro_batches: int, tp: int = 1) -> Pipeline:
    """``stages``: node, type and number of layers."""
    found, first = [], 0
    for node, gpu, count in stages:
        found.append(Stage(node=node, gpu=gpu, tp=tp, first=first, last=first + count - 1))
        first += count
    return Pipeline(stages=tuple(found), micro_batch=1, micro_batches=micro_batches)


def plan(*pipelines: Pipeline, schedule: PipelineSchedule = PipelineSchedule.ONE_F_ONE_B) -> ClusterPlan:
    return ClusterPlan(model="toy", pipelines=pipelines, schedule=schedule)


def test_one_stage_takes_its_passes_and_its_update():
    step = simulate(plan(pipeline(("n", "a", 8), micro_batches=3)), cluster(("n", "a", 1)), costs(("a", 1.0)))
    assert step.iteration_s == pytest.approx(3 * 8 * 3.0 + 0.5)


@pytest.mark.parametrize("schedule", PipelineSchedule)
@pytest.mark.parametrize("sends", Sends)
@pytest.mark.parametrize(("depth", "micro_batches"), [(2, 1), (2, 5), (4, 4), (4, 9), (8, 16)])
def test_equal_stages_on_a_fast_network_lose_the_bubble(schedule, sends, depth, micro_batches):
    stages = [(f"n{place}", "a", 8 // depth) for place in range(depth)]
    given = plan(pipeline(*stages, micro_batches=micro_batches), schedule=schedule)
    step = simulate(given, cluster(*((node, "a", 1) for node, _, _ in stages)), costs(("a", 1.0)), sends=sends)
    slot = 8 // depth * (FORWARD_S + BACKWARD_S)
    assert step.pipelines_s == pytest.approx((micro_batches + depth - 1) * slot)


@pytest.mark.parametrize("sends", Sends)
@pytest.mark.parametrize("schedule", PipelineSchedule)
@pytest.mark.parametrize("depth", [1, 2, 3, 5, 8])
def test_sends_and_receives_always_meet(sends, schedule, depth):
    for micro_batches in range(1, 12):
        cuts = [8 // depth + (place < 8 % depth) for place in range(depth)]
        stages = [(f"n{place}", "a", count) for place, count in enumerate(cuts)]
        given = plan(pipeline(*stages, micro_batches=micro_batches), schedule=schedule)
        step = simulate(
            given, cluster(*((node, "a", 1) for node, _, _ in stages), rate=100.0), costs(("a", 1.0)), sends=sends
        )
        for unit in step.units:
            done = [(span.what, span.micro_batch) for span in unit.spans]
            assert [index for what, index in done if what == "backward"] == list(range(micro_batches))
            assert all(
                early.end_s <= late.begin_s + 1e-9 for early, late in zip(unit.spans, unit.spans[1:], strict=False)
            )


def test_a_stage_holds_no_more_micro_batches_than_1f1b_allows():
    for depth in range(1, 6):
        for place in range(depth):
            held = most = 0
            for instruction in instructions(place, depth, 9, PipelineSchedule.ONE_F_ONE_B):
                held += {"forward": 1, "backward": -1}.get(instruction.kind.value, 0)
                most = max(most, held)
            assert most == depth - place


def test_blocking_messages_stop_both_stages_and_buffered_ones_neither():
    given = plan(pipeline(("x", "a", 2), ("y", "a", 6), micro_batches=50))
    slow = cluster(("x", "a", 1), ("y", "a", 1), rate=1000.0)  # one second a message
    slot = 6 * (FORWARD_S + BACKWARD_S)
    blocking = simulate(given, slow, costs(("a", 1.0)), sends=Sends.BLOCKING)
    buffered = simulate(given, slow, costs(("a", 1.0)), sends=Sends.BUFFERED)
    assert blocking.pipelines_s == pytest.approx(50 * (slot + 2.0), rel=0.05)
    assert buffered.pipelines_s == pytest.approx(50 * slot, rel=0.05)


def test_pipelines_of_one_node_share_its_port():
    alone = plan(pipeline(("x", "a", 4), ("y", "a", 4), micro_batches=20))
    both = plan(*[pipeline(("x", "a", 4), ("y", "a", 4), micro_batches=20)] * 2)
    slow = cluster(("x", "a", 2), ("y", "a", 2), rate=1000.0)
    one, two = (simulate(given, slow, costs(("a", 1.0))).pipelines_s for given in (alone, both))
    compute_s = 21 * 4 * (FORWARD_S + BACKWARD_S)
    assert two - compute_s == pytest.approx(2 * (one - compute_s), rel=0.1)


def test_units_of_two_gpus_send_halves_and_gather_them():
    given = plan(pipeline(("x", "a", 4), ("y", "a", 4), micro_batches=1, tp=2))
    fast, slow = (
        simulate(given, cluster(("x", "a", 2), ("y", "a", 2), within=rate), costs(("a", 1.0))).pipelines_s
        for rate in (1e15, 1000.0)
    )
    assert slow - fast == pytest.approx(2 * OUTPUT_BYTES / 1000.0)  # each direction: two halves over one fabric


def test_replicas_sum_their_gradients_over_the_slowest_port():
    given = plan(*(pipeline((node, "a", 8), micro_batches=1) for node in ("x", "y", "z")))
    nodes, table = cluster(*((node, "a", 1) for node in "xyz"), rate=1000.0), costs(("a", 1.0))
    sums_s = 2 * 2 / 3 * 8 * PARAMS_BYTES / 1000.0
    # The last layer's begins when its backward is done, seven layers' before the pass ends.
    assert simulate(given, nodes, table).reduce_s == pytest.approx(sums_s - 7 * BACKWARD_S)
    assert last_sums_s(given, sums_of(given, table, Links(nodes))) == pytest.approx(sums_s - 7 * BACKWARD_S)
    assert simulate(given, nodes, table, sums_within=False).reduce_s == pytest.approx(sums_s)


def offloading(given: ClusterPlan, index: int, layers: int) -> ClusterPlan:
    """The plan with optimizer steps on the host of so many layers of the first stage of a pipeline."""
    pipelines = list(given.pipelines)
    first, *others = pipelines[index].stages
    stages = dataclasses.replace(first, offloaded=layers), *others
    pipelines[index] = dataclasses.replace(pipelines[index], stages=stages)
    return dataclasses.replace(given, pipelines=tuple(pipelines))


def with_hosts(table: CostTable) -> CostTable:
    """The costs with optimizer steps on the host that take no time."""
    return dataclasses.replace(
        table, updates=tuple(dataclasses.replace(row, host_s_per_byte=0.0) for row in table.updates)
    )


def test_sums_of_a_stage_with_gradients_on_the_host_begin_after_its_passes():
    """Those of its last layer come first in the order, and hold back the others."""
    given = offloading(plan(*(pipeline((node, "a", 8), micro_batches=1) for node in ("x", "y", "z"))), 1, 1)
    nodes, table = cluster(*((node, "a", 1) for node in "xyz"), rate=1000.0), with_hosts(costs(("a", 1.0)))
    sums_s = 2 * 2 / 3 * 8 * PARAMS_BYTES / 1000.0
    step = simulate(given, nodes, table)
    assert step.reduce_s == pytest.approx(sums_s)
    assert all(span.begin_s == step.pipelines_s for unit in step.units for span in unit.spans if span.what == "reduce")


def test_replicas_of_different_depth_and_degree_sum_what_they_share():
    given = plan(
        pipeline(("x", "a", 3), ("y", "a", 5), micro_batches=2), pipeline(("z", "b", 8), micro_batches=1, tp=2)
    )
    step = simulate(
        given, cluster(("x", "a", 1), ("y", "a", 1), ("z", "b", 2), rate=1000.0), costs(("a", 1.0), ("b", 2.0))
    )
    # All of it leaves the node of the second pipeline. Sums of the five layers begin in the last backward of the stage that has
    # them, four layers' before its end. A message follows, and the backward of the other three.
    message_s = OUTPUT_BYTES / 1000.0
    assert step.reduce_s == pytest.approx(8 * PARAMS_BYTES / 1000.0 - (4 + 3) * BACKWARD_S - message_s)
    ends_s = [(unit.backward_end_s, unit.spans[-2].begin_s, unit.spans[-2].end_s) for unit in step.units]
    assert [unit.spans[-2].what for unit in step.units] == ["reduce"] * 3
    first, second, other = ends_s
    assert second[1] == pytest.approx(second[0] - 4 * BACKWARD_S)
    assert first[1] == first[0] - 2 * BACKWARD_S > other[0], "its own port is free, though not that of the other owner"
    assert other[1:] == pytest.approx((second[1], first[2])) and step.iteration_s == pytest.approx(first[2] + 0.5)


def test_a_sum_that_is_done_before_the_passes_end_costs_nothing():
    """Two pipelines that share the layers of their last stages on fast ports: only the first layer's sum is waited for."""
    cut = [("w", "a", 2), ("x", "a", 6)], [("y", "a", 2), ("z", "a", 6)]
    given = plan(*(pipeline(*stages, micro_batches=2) for stages in cut))
    nodes = cluster(*((node, "a", 1) for node in "wxyz"), rate=PARAMS_BYTES * 6 / (2 * BACKWARD_S))
    step = simulate(given, nodes, costs(("a", 1.0)), sends=Sends.BUFFERED)
    assert step.reduce_s == pytest.approx(PARAMS_BYTES / nodes.between[0].link.bytes_per_s(1.0))


def test_what_is_left_of_sums_after_the_passes_is_no_less_than_its_bound():
    """Of two pipelines, cut anywhere, on ports of any speed; the second one's GPUs are slower, and the first layers tied."""
    bounds = []
    for first, second, rate, tied_bytes, offloaded in itertools.product(
        (1, 3, 8), (2, 5, 8), (500.0, 2000.0, 20_000.0), (0, 3000), (0, 1)
    ):
        cuts = [[("w", "a", first), ("x", "a", 8 - first)], [("y", "b", second), ("z", "b", 8 - second)]]
        given = plan(*(pipeline(*(stage for stage in stages if stage[2]), micro_batches=2) for stages in cuts))
        nodes = cluster(("w", "a", 1), ("x", "a", 1), ("y", "b", 1), ("z", "b", 1), rate=rate)
        given = offloading(given, 1, offloaded)
        table = with_hosts(dataclasses.replace(costs(("a", 1.0), ("b", 1.1)), tied_bytes=tied_bytes))
        bound_s = last_sums_s(given, sums_of(given, table, Links(nodes)))
        bounds.append((bound_s, simulate(given, nodes, table).reduce_s))
    assert all(0 < bound_s <= reduce_s + 1e-9 for bound_s, reduce_s in bounds)
    assert any(bound_s == pytest.approx(reduce_s) for bound_s, reduce_s in bounds), "it is reached"


def sharded(micro_batch: int, shards: int) -> Pipeline:
    stage = Stage(node="x", gpu="a", tp=1, first=0, last=7, shards=shards)
    return Pipeline(stages=(stage,), micro_batch=micro_batch, micro_batches=3)


def treated(*, tp: int = 1, **how: int) -> Pipeline:
    stage = Stage(node="x", gpu="a", tp=tp, first=0, last=7, **how)
    return Pipeline(stages=(stage,), micro_batch=1, micro_batches=1)


def test_shards_gather_beside_other_layers_and_take_a_part_of_the_samples():
    given = plan(sharded(2, 2))
    assert given.used() == {"a": 2}
    fast, slow = (
        simulate(given, cluster(("x", "a", 2), within=rate), costs(("a", 1.0))).iteration_s for rate in (1e15, 1000.0)
    )
    assert fast == pytest.approx(3 * 8 * (FORWARD_S + BACKWARD_S) + 0.5), "one sample each"
    gather_s = PARAMS_BYTES / 1000.0  # two halves over one fabric
    assert slow == pytest.approx(3 * 8 * 3 * gather_s + 0.5), "the fabric takes longer than what it hides"


def test_memory_of_shards_counts_their_states_and_whole_layers_in_use():
    ((found,),) = memory_of_plan(plan(sharded(2, 2)), costs(("a", 1.0)))
    assert found.states_bytes == 4 * 8 * PARAMS_BYTES // 2
    assert found.activations_bytes == 8 * KEPT_BYTES
    assert found.working_bytes == KEPT_BYTES + 2 * 2 * PARAMS_BYTES


def test_shards_gather_tied_weights_for_both_ends_and_reduce_their_gradients_once():
    """The head's whole gradient waits for the embedding's."""
    table, tied_bytes = costs(("a", 1.0)), 3000
    tied = dataclasses.replace(table, tied_bytes=tied_bytes)
    slow, given = cluster(("x", "a", 2), within=1000.0), plan(sharded(2, 2))
    more_s = simulate(given, slow, tied).iteration_s - simulate(given, slow, table).iteration_s
    assert more_s == pytest.approx(3 * 2 * tied_bytes / 1000.0), "one gather more in forward, and one in backward"
    (before,), (after,) = (memory_of_plan(given, each)[0] for each in (table, tied))
    assert after.states_bytes == before.states_bytes
    assert after.working_bytes - before.working_bytes == 2 * 2 * tied_bytes + tied_bytes
    ends = [each.stage(range(4, 8), "a", 1, 2, shards=2) for each in (table, tied)]
    assert ends[1].params_bytes - ends[0].params_bytes == tied_bytes // 2
    assert ends[1].working_bytes - ends[0].working_bytes == 2 * 2 * tied_bytes, "reduced at once"


def test_weights_that_shards_do_not_divide_are_held_by_each_and_not_gathered():
    table, unsharded_bytes = costs(("a", 1.0)), 1000
    rows = [dataclasses.replace(row, unsharded_bytes=unsharded_bytes) for row in table.sizes]
    partly, given = dataclasses.replace(table, sizes=tuple(rows)), plan(sharded(2, 2))
    ((found,),) = memory_of_plan(given, partly)
    assert found.states_bytes == 4 * 8 * (unsharded_bytes + (PARAMS_BYTES - unsharded_bytes) // 2)
    assert found.working_bytes == KEPT_BYTES + 2 * 2 * (PARAMS_BYTES - unsharded_bytes)
    slow = cluster(("x", "a", 2), within=1000.0)
    gather_s = (PARAMS_BYTES - unsharded_bytes) / 1000.0
    assert simulate(given, slow, partly).pipelines_s == pytest.approx(3 * 8 * 3 * gather_s)
    alone = plan(pipeline(("x", "a", 8), micro_batches=1))
    assert memory_of_plan(alone, partly) == memory_of_plan(alone, table)


def test_memory_counts_states_and_what_is_in_flight():
    given = plan(pipeline(("x", "a", 4), ("y", "a", 4), micro_batches=9))
    first, second = memory_of_plan(given, costs(("a", 1.0)))[0]
    assert first.states_bytes == second.states_bytes == 4 * 4 * PARAMS_BYTES
    assert (first.activations_bytes, second.activations_bytes) == (2 * 4 * KEPT_BYTES, 4 * KEPT_BYTES)


def test_a_plan_survives_its_file(tmp_path):
    given = plan(pipeline(("x", "a", 4), ("y", "a", 4), micro_batches=2))
    given.save(tmp_path / "plan.json")
    assert ClusterPlan.load(tmp_path / "plan.json") == given


def test_a_plan_of_the_other_kind_is_named_with_what_reads_it(tmp_path):
    plan(pipeline(("x", "a", 8), micro_batches=1)).save(tmp_path / "cluster.json")
    Plan(labels=("layer",), decisions=(BlockDecision(),)).save(tmp_path / "device.json")
    with pytest.raises(
        PlanError, match=r"cluster\.json': this is not a plan file, but a cluster's plan, which .* --given"
    ):
        Plan.load(tmp_path / "cluster.json")
    with pytest.raises(
        ClusterError, match=r"device\.json': this is not a cluster plan file, but one .* `autohete show`"
    ):
        ClusterPlan.load(tmp_path / "device.json")


@pytest.mark.parametrize(
    ("build", "message"),
    [
        (lambda: plan(), "no pipelines"),
        (lambda: plan(pipeline(("x", "a", 8), micro_batches=1), pipeline(("x", "a", 7), micro_batches=1)), "end with"),
        (lambda: plan(sharded(3, 2)), "micro-batches of 3 samples, and a stage of 2 shards"),
        (lambda: plan(pipeline(("x", "a", 8), micro_batches=0)), "1 stages and 0 micro-batches"),
        (lambda: plan(Pipeline(stages=(), micro_batch=1, micro_batches=1)), "0 stages and 1 micro-batches"),
        (lambda: plan(treated(tp=0)), "a stage of 0 GPUs a layer"),
        (lambda: plan(treated(recomputed=9)), "of 8 layers that recomputes 9 and offloads 0"),
        (lambda: plan(treated(offloaded=-1)), "of 8 layers that recomputes 0 and offloads -1"),
        (lambda: cluster(), "no nodes"),
        (lambda: cluster(("x", "a", 0)), "has 0 GPUs"),
        (lambda: cluster(("x", "a", 1), ("x", "a", 1)), "two nodes are called 'x'"),
        (lambda: cluster(("x", "a", 1), rate=-1.0), "rate of 0 or less"),
        (lambda: costs(("a", 1.0)).layer_s("layer", "b", 1, 1), "no costs of toy on b"),
        (lambda: costs_of(read(MEASURED / "layers.json"), read(MEASURED / "memory.json"), "nobody"), "'nobody'"),
        (lambda: read("/nowhere/runs.json"), "cannot read"),
    ],
)
def test_what_cannot_be_is_refused(build, message):
    with pytest.raises(ClusterError, match=message):
        build()


def test_a_last_stage_holds_tied_weights_too_and_sums_their_gradients():
    """Once where it has the first layer as well; else beside it, summed between both even within one pipeline."""
    untied, tied = costs(("a", 1.0)), dataclasses.replace(costs(("a", 1.0)), tied_bytes=3000)
    last = len(KINDS) - 1
    for first, more in ((0, 0), (1, 3000), (last, 3000)):
        held = [table.stage(range(first, last + 1), "a", 1, 1).params_bytes for table in (untied, tied)]
        assert held[1] - held[0] == more
    assert tied.stage(range(1, last), "a", 1, 1) == untied.stage(range(1, last), "a", 1, 1)
    slow = cluster(("x", "a", 1), ("y", "a", 1), rate=1000.0)
    one = plan(pipeline(("x", "a", 4), ("y", "a", 4), micro_batches=2))
    assert simulate(one, slow, untied).reduce_s == 0.0
    assert simulate(one, slow, tied).reduce_s == pytest.approx(3.0, rel=0.05)
