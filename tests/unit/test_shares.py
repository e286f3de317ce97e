"""Which graphs of a call are compiled again for their shares, and which begin a call that is planned anew."""

from autohete_fx.compiler.shares import Origin, Shares, Unsettled
from autohete_fx.ir import Overlap, Schedule
from autohete_fx.planner.model.footprint import Footprint
from autohete_fx.planner.sharing import joined
from tests.planner_problems import cost, problem

MODEL = Origin("model.py:forward", "forward", frozenset({"weight"}))
LOSS = Origin("loss.py:loss", "loss", frozenset())


class Call:
    """Stands for one."""


def unsettled(digest: str) -> Unsettled:
    return Unsettled(
        digest=digest,
        problem=problem([cost()]),
        decisions=(),
        footprint=Footprint(),
        small_bytes=0,
        modelled_bytes=0,
        peak_bytes=0,
    )


def after_a_call(call: Call) -> Shares:
    """The shares of a model whose call runs two functions that are compiled apart, so that neither knows itself the last."""
    shares = Shares()
    for graph, digest in ((MODEL, "64 tokens"), (LOSS, "loss of 64")):
        shares.note_graph(graph, digest, "", call)
        shares.store(graph, Footprint(), unsettled(digest))
    return shares


def test_graphs_that_come_again_for_their_shares_begin_no_new_call():
    first, second = Call(), Call()
    shares = after_a_call(first)
    assert shares.end_call() == [MODEL, LOSS]
    shares.note_graph(MODEL, "64 tokens", "", second)
    assert shares.is_call_over and shares.num_calls == 1 and set(shares.unsettled) == {MODEL, LOSS}


def test_a_loss_that_is_compiled_apart_runs_beside_its_model_and_not_beside_itself():
    assert MODEL.runs_beside(LOSS) and LOSS.runs_beside(MODEL)
    assert not LOSS.runs_beside(LOSS) and not MODEL.runs_beside(MODEL)


def test_graphs_of_one_place_run_in_the_order_in_which_they_came():
    """As where a decorator, or a function that calls what it is given, is compiled for each of them."""
    first, second, loss = (Origin("apart.py:apart", "apart", frozenset(names)) for names in (("a",), ("b",), ()))
    shares, call = Shares(), Call()
    for graph in (first, second, loss):
        shares.note_graph(graph, str(graph), "", call)
        shares.store(graph, Footprint(resident_bytes=1, held_bytes=10, gradient_bytes=100), unsettled(str(graph)))
    assert all(
        one.runs_beside(other) == (one is not other) for one in (first, second, loss) for other in shares.unsettled
    )
    assert shares.in_order([loss, second, first]) == [first, second, loss]
    assert [shares.taken_by_others(graph, 1) for graph in (first, second, loss)] == [202, 112, 22]
    assert shares.least_bytes(1) == 202 and Shares().least_bytes(1) == 0
    assert shares.end_call() == [first, second, loss]


def test_a_graph_that_a_call_runs_more_than_once_takes_that_many_times_as_much():
    shares = after_a_call(Call())
    shares.footprints[MODEL] = Footprint(resident_bytes=1, held_bytes=10, gradient_bytes=100)
    for call in (Call(), Call()):
        for _ in range(3):
            shares.note_run(MODEL, call)
        shares.note_run(LOSS, call)
    assert shares.times == {MODEL: 3, LOSS: 1} and shares.repeats
    assert (shares.taken_by_others(MODEL, 1), shares.taken_by_others(LOSS, 1)) == (222, 333)


def test_a_graph_that_comes_for_other_sizes_begins_a_call_that_is_planned_anew():
    first, second = Call(), Call()
    shares = after_a_call(first)
    shares.end_call()
    shares.note_graph(MODEL, "32 tokens", "", second)
    assert not shares.is_call_over and shares.num_calls == 2 and not shares.unsettled


def test_a_loss_without_parameters_decides_nothing_about_how_the_others_are_updated():
    updates = {"clips_gradients": True, "schedule": Schedule(overlap=Overlap.BACKWARD), "num_replicas": 2}
    model, loss = problem([cost()], **updates), problem([cost(param_bytes=0, grad_bytes=0, optimizer_bytes=0)])
    whole = joined([model, loss])
    assert {name: getattr(whole, name) for name in updates} == updates
    assert whole.allow_host_optimizer and len(whole.costs) == 2


def test_functions_that_share_a_tied_weight_are_no_versions_of_each_other():
    frames = [Origin(f"model.py:{name}", name, frozenset({"tied", name})) for name in ("embed", "head")]
    shares, call = Shares(), Call()
    for graph in frames:
        shares.note_graph(graph, graph.function, "", call)
        shares.store(graph, Footprint(), unsettled(graph.function))
    assert shares.in_order(reversed(frames)) == frames
    assert shares.end_call() == [], "the first is not known any more, so the second cannot be planned with it"


def test_a_graph_that_a_call_runs_again_and_again_stays_as_it_takes_least():
    shares, call = after_a_call(Call()), Call()
    for _ in range(2):
        shares.note_run(MODEL, call)
    assert shares.repeats and shares.end_call() == []
