"""Which graphs of a call are compiled again for their shares, and which begin a call that is planned anew."""

import weakref

from autohete_fx.compiler.shares import Origin, Run, Shares, Times, Unsettled
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


LEFT = Footprint(resident_bytes=1, held_bytes=10, gradient_bytes=100)


def run(shares: Shares, graph: Origin, call: Call, module: int = 0, finds_gradients: bool = False) -> Run:
    """A forward of a graph, with the parameters of one of the modules that share its code."""
    made = Run(graph=graph, footprint=LEFT, call=weakref.ref(call), parameters=(module,))
    shares.note_run(made, lambda: finds_gradients)
    return made


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
    assert MODEL.may_run_beside(LOSS) and LOSS.may_run_beside(MODEL)
    assert not LOSS.may_run_beside(LOSS) and not MODEL.may_run_beside(MODEL)


def test_functions_of_two_modules_whose_parameters_have_the_same_names_run_beside_each_other():
    """And those that read one parameter may be the same, until they meet."""
    one, two, tied = (
        Origin(f"{name}.py:forward", "forward", frozenset({"weight"}), tensors=frozenset(read))
        for name, read in (("one", {1, 2}), ("two", {3}), ("tied", {2, 4}))
    )
    assert one.may_run_beside(two) and two.may_run_beside(one) and not one.may_run_beside(tied)
    again = Origin(one.function, one.part, one.parameters, tensors=frozenset({5}))  # a layer that shares its code
    assert again == one and not again.may_run_beside(one)
    shares = Shares()
    for graph in (one, two):
        shares.store(graph, LEFT, None)
    assert set(shares.footprints) == {one, two} and shares.taken_by_others(one, 1) == LEFT.total_bytes
    shares.store(tied, LEFT, None)
    assert set(shares.footprints) == {two, tied}, "it replaces the one that it may be a version of"


def test_graphs_of_one_place_run_in_the_order_in_which_they_came():
    """As where a decorator, or a function that calls what it is given, is compiled for each of them."""
    first, second, loss = (Origin("apart.py:apart", "apart", frozenset(names)) for names in (("a",), ("b",), ()))
    shares, call = Shares(), Call()
    for graph in (first, second, loss):
        shares.note_graph(graph, str(graph), "", call)
        shares.store(graph, LEFT, unsettled(str(graph)))
    assert all(
        shares.runs_beside(one, other) == (one is not other)
        for one in (first, second, loss)
        for other in shares.unsettled
    )
    assert shares.in_order([loss, second, first]) == [first, second, loss]
    assert [shares.taken_by_others(graph, 1) for graph in (first, second, loss)] == [202, 112, 22]
    assert shares.least_bytes(1) == 202 and Shares().least_bytes(1) == 0
    assert shares.end_call() == [first, second, loss]


def test_a_graph_that_a_call_runs_for_several_modules_takes_that_many_times_as_much():
    shares, kept = after_a_call(Call()), []
    shares.footprints[MODEL] = LEFT
    for call in (Call(), Call()):
        kept += [run(shares, MODEL, call, module) for module in range(3)] + [run(shares, LOSS, call)]
    assert shares.times == {MODEL: Times(modules=3, waiting=3), LOSS: Times()} and shares.repeats
    assert (shares.taken_by_others(MODEL, 1), shares.taken_by_others(LOSS, 1)) == (222, 333)


def test_of_a_module_that_a_call_runs_again_only_activations_and_earlier_gradients_count_again():
    shares, call = after_a_call(Call()), Call()
    shares.footprints[MODEL] = LEFT
    kept = [run(shares, MODEL, call) for _ in range(3)]
    assert shares.times == {MODEL: Times(waiting=3)} and len(kept) == 3
    assert [shares.taken_by_others(MODEL, micro_batches) for micro_batches in (1, 2)] == [120, 20]
    assert shares.taken_by_others(LOSS, 1) == 131


def test_a_run_whose_backward_is_over_or_whose_result_is_gone_holds_nothing_beside_the_next():
    shares, call = after_a_call(Call()), Call()
    shares.footprints[MODEL] = LEFT
    for _ in range(3):
        run(shares, MODEL, call)  # nobody keeps the result
    for _ in range(3):
        kept = run(shares, MODEL, call)
        shares.note_backward(kept)
    assert not shares.repeats and shares.taken_by_others(MODEL, 1) == 0
    run(shares, MODEL, call, finds_gradients=True)
    assert shares.repeats and shares.accumulates and shares.taken_by_others(MODEL, 1) == 100


def test_gradients_that_the_first_run_of_a_call_finds_are_of_another_call():
    shares = after_a_call(Call())
    run(shares, MODEL, Call(), finds_gradients=True)
    assert not shares.accumulates


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


def test_functions_that_share_a_weight_run_beside_each_other_once_a_forward_of_both_has():
    embed, head = (Origin(f"model.py:{name}", name, frozenset({"tied", name})) for name in ("embed", "head"))
    shares, call = Shares(), Call()
    shares.note_graph(embed, "embed", "", call)
    shares.store(embed, LEFT, unsettled("embed"))
    waiting = run(shares, embed, call)
    shares.note_graph(head, "head", "", call)
    assert shares.taken_by_others(head, 1) == 11 and shares.read_by_others(head) == embed.parameters
    shares.store(head, LEFT, unsettled("head"))
    assert not shares.is_outdated and shares.end_call() == [embed, head] and not waiting.is_over
    assert shares.afresh().runs_beside(embed, head)


def test_graphs_that_were_planned_as_versions_of_one_are_planned_again_once_they_run_beside_each_other():
    short, long = (Origin("model.py:forward", "forward", frozenset({"weight", name})) for name in ("short", "long"))
    shares = Shares()
    for graph in (short, long):
        shares.note_graph(graph, "", "", Call())
        shares.store(graph, LEFT, None)
        shares.note_backward(run(shares, graph, Call()))
    assert list(shares.footprints) == [long] and not shares.is_outdated
    kept = [run(shares, graph, Call()) for graph in (short, long)]
    assert shares.is_outdated and not shares.afresh().is_outdated and len(kept) == 2
    assert shares.footprints == {long: LEFT, short: LEFT}


def test_a_model_that_is_planned_again_waits_for_the_functions_that_it_had():
    shares = after_a_call(Call()).afresh()
    assert shares.awaits_others(MODEL)
    shares.note_graph(MODEL, "64 tokens", "", Call())
    assert not shares.awaits_others(LOSS)


def test_of_a_model_that_is_planned_again_twice_before_any_of_its_graphs_comes_all_functions_are_awaited():
    shares = after_a_call(Call()).afresh().afresh()
    assert shares.awaits_others(MODEL) and shares.awaits_others(LOSS)


def test_a_graph_that_a_call_runs_again_and_again_stays_as_it_takes_least():
    shares, call = after_a_call(Call()), Call()
    kept = [run(shares, MODEL, call) for _ in range(2)]
    assert shares.repeats and shares.end_call() == [] and len(kept) == 2


def test_a_graph_that_a_later_call_runs_again_was_planned_for_one_run_and_is_planned_again_once():
    """Such as that of layers of which each call drops some by chance."""
    shares = after_a_call(Call())
    shares.end_call()
    assert not shares.is_outdated
    kept = [run(shares, MODEL, call, module) for call in (Call(), Call()) for module in range(2)]
    assert shares.is_outdated and len(kept) == 4
    again = shares.afresh()
    assert again.repeats and not again.is_outdated
    again.note_graph(MODEL, "graph", "", Call())
    assert again.end_call() == []
    more = Call()
    kept += [run(again, MODEL, more, module) for module in range(3)]
    assert not again.is_outdated, "it takes least by now"
