"""The four passes that insert copies: what each emits, where it emits nothing, what it refuses, and what it computes."""

from collections.abc import Callable

import pytest
from expecttest import assert_expected_inline
from torch import fx

from autohete_fx import Activations, BlockDecision, Optimizer, Params, PassError, passes
from autohete_fx.graph import annotations, ops
from autohete_fx.graph.saved import output_args
from autohete_fx.passes import PassContext, PassFunction, Stage
from autohete_fx.passes.base import output_node
from tests.two_blocks import (
    SIDE,
    assert_same_results,
    aten,
    backward,
    code,
    context,
    forward,
    forward_that_saves_a_weight,
)

HOST = BlockDecision(activations=Activations.OFFLOAD, params=Params.HOST, optimizer=Optimizer.HOST)
OFFLOAD = BlockDecision(activations=Activations.OFFLOAD)
KEPT = BlockDecision(params=Params.HOST, keeps_fetched=True)
CASES: dict[str, tuple[PassFunction, Stage, Callable[[], fx.GraphModule]]] = {
    "offload_activations": (passes.offload_activations, Stage.FORWARD, forward),
    "reload_activations": (passes.reload_activations, Stage.BACKWARD, backward),
    "prefetch_parameters": (passes.prefetch_parameters, Stage.FORWARD, forward),
    "prefetch_parameters-backward": (passes.prefetch_parameters, Stage.BACKWARD, backward),
    "offload_gradients": (passes.offload_gradients, Stage.BACKWARD, backward),
}


def rewritten(case: str, decision: BlockDecision = HOST, **changes: object) -> fx.GraphModule:
    function, stage, graph = CASES[case]
    return passes.run(passes.only(function), graph(), context(stage, decision, **changes), given=("blocks",))


def test_offload_activations():
    assert_expected_inline(
        code(rewritten("offload_activations")),
        """\
def forward(self, x, w0, w1):
first = aten.mm.default(x, w0)
offload_first = autohete.offload.default(first, 'two blocks', 2, 0)
wait_first = autohete.wait.default(offload_first, first, 'two blocks')
gelu = aten.gelu.default(first)
offload_gelu = autohete.offload.default(gelu, 'two blocks', 2, 0)
wait_gelu = autohete.wait.default(offload_gelu, gelu, 'two blocks')
w1_t = aten.permute.default(w1, [1, 0])
second = aten.mm.default(gelu, w1_t)
return (second, wait_first, wait_gelu)""",
    )


def test_reload_activations():
    assert_expected_inline(
        code(rewritten("reload_activations")),
        """\
def forward(self, x, w1, first, gelu, tangent):
reload_first = autohete.reload.default(first, 'two blocks', 1, 0)
wait_first = autohete.wait.default(reload_first, first, 'two blocks')
reload_gelu = autohete.reload.default(gelu, 'two blocks', 1, 0)
wait_gelu = autohete.wait.default(reload_gelu, gelu, 'two blocks')
grad_t = aten.permute.default(tangent, [1, 0])
grad_w1 = aten.mm.default(grad_t, wait_gelu)
grad_gelu = aten.mm.default(tangent, w1)
grad_first = aten.gelu_backward.default(grad_gelu, wait_first)
x_t = aten.permute.default(x, [1, 0])
grad_w0 = aten.mm.default(x_t, grad_first)
return (None, grad_w0, grad_w1)""",
    )


def test_a_reload_is_awaited_where_the_first_reader_of_a_view_stands():
    """The view is of the block that made the value, its reader of the next one, whose backward is earlier."""
    gm = backward()
    node = {node.name: node for node in gm.graph.nodes}
    with gm.graph.inserting_before(node["grad_w1"]):
        view = gm.graph.call_function(aten.view.default, (node["gelu"], [SIDE, SIDE]))
    view.meta["val"] = node["gelu"].meta["val"]
    annotations.set_block(view, 0)
    node["grad_w1"].replace_input_with(node["gelu"], view)
    gm = passes.run(passes.only(passes.reload_activations), gm, context(Stage.BACKWARD, HOST), given=("blocks",))
    notes = {node.name: note for node in gm.graph.nodes if (note := annotations.inserted(node))}
    assert (notes["wait_gelu"].slot, notes["wait_first"].slot) == (0, 1)


def test_prefetch_parameters():
    assert_expected_inline(
        code(rewritten("prefetch_parameters")),
        """\
def forward(self, x, w0, w1):
prefetch_w0 = autohete.prefetch.default(w0, 'two blocks', 1, 0)
wait_w0 = autohete.wait.default(prefetch_w0, w0, 'two blocks')
prefetch_w1 = autohete.prefetch.default(w1, 'two blocks', 1, 0)
wait_w1 = autohete.wait.default(prefetch_w1, w1, 'two blocks')
first = aten.mm.default(x, wait_w0)
gelu = aten.gelu.default(first)
w1_t_1 = aten.permute.default(wait_w1, [1, 0])
second = aten.mm.default(gelu, w1_t_1)
return (second, first, gelu)""",
    )


def test_prefetch_parameters_in_backward():
    assert_expected_inline(
        code(rewritten("prefetch_parameters-backward")),
        """\
def forward(self, x, w1, first, gelu, tangent):
prefetch_w1 = autohete.prefetch.default(w1, 'two blocks', 1, 0)
wait_w1 = autohete.wait.default(prefetch_w1, w1, 'two blocks')
grad_t = aten.permute.default(tangent, [1, 0])
grad_w1 = aten.mm.default(grad_t, gelu)
grad_gelu = aten.mm.default(tangent, wait_w1)
grad_first = aten.gelu_backward.default(grad_gelu, first)
x_t = aten.permute.default(x, [1, 0])
grad_w0 = aten.mm.default(x_t, grad_first)
return (None, grad_w0, grad_w1)""",
    )


def with_kept_weights(stage: Stage, graph: Callable[[], fx.GraphModule], kept: frozenset[str]) -> fx.GraphModule:
    given = context(stage, KEPT, kept=kept)
    return passes.run(passes.only(passes.prefetch_parameters), graph(), given, given=("blocks",))


def backward_with_readers_out_of_order() -> fx.GraphModule:
    """A view of ``w1`` has two readers, and the one that was added last stands first, as recomputation may put it."""
    gm = backward()
    named = {node.name: node for node in gm.graph.nodes}
    tangent, before = named["tangent"], named["grad_gelu"]
    for name, target, args in (
        ("view", aten.permute.default, (named["w1"], [1, 0])),
        ("late", aten.mm.default, (tangent, "view")),
        ("early", aten.mm.default, (tangent, "view")),
        ("both", aten.add.Tensor, ("late", "early")),
    ):
        given = tuple(named[arg] if isinstance(arg, str) else arg for arg in args)
        with gm.graph.inserting_before(named["late"] if name == "early" else before):
            named[name] = gm.graph.create_node("call_function", target, given, name=name)
        named[name].meta["val"] = tangent.meta["val"]
        annotations.set_block(named[name], 1)
    output_node(gm).args = ((named["both"], *output_args(gm)[1:]),)
    return gm


def test_a_fetched_copy_stands_before_all_that_read_it():
    given = context(Stage.BACKWARD, BlockDecision(params=Params.HOST))
    gm = passes.run(
        passes.only(passes.prefetch_parameters), backward_with_readers_out_of_order(), given, given=("blocks",)
    )
    assert_same_results(gm, backward_with_readers_out_of_order())


def test_a_kept_copy_is_saved_in_the_place_of_its_parameter():
    gm = with_kept_weights(Stage.FORWARD, forward_that_saves_a_weight, frozenset({"w1"}))
    assert_expected_inline(
        code(gm),
        """\
def forward(self, x, w0, w1):
prefetch_w0 = autohete.prefetch.default(w0, 'two blocks', 1, 0)
wait_w0 = autohete.wait.default(prefetch_w0, w0, 'two blocks')
prefetch_w1 = autohete.prefetch.default(w1, 'two blocks', 1, 0)
wait_w1 = autohete.wait.default(prefetch_w1, w1, 'two blocks')
first = aten.mm.default(x, wait_w0)
gelu = aten.gelu.default(first)
w1_t_1 = aten.permute.default(wait_w1, [1, 0])
second = aten.mm.default(gelu, w1_t_1)
return (second, wait_w1, first, gelu)""",
    )
    assert_same_results(gm, forward_that_saves_a_weight())


def test_a_saved_view_is_taken_of_the_kept_copy():
    gm = with_kept_weights(Stage.FORWARD, lambda: forward_that_saves_a_weight("w1_t"), frozenset({"w1_t"}))
    assert code(gm).splitlines()[-1] == "return (second, w1_t_1, first, gelu)"
    assert "w1_t_1 = aten.permute.default(wait_w1, [1, 0])" in code(gm)
    assert_same_results(gm, forward_that_saves_a_weight("w1_t"))


def test_what_is_not_kept_is_saved_as_the_parameter_itself():
    gm = with_kept_weights(Stage.FORWARD, forward_that_saves_a_weight, frozenset())
    assert code(gm).splitlines()[-1] == "return (second, w1, first, gelu)"


def test_backward_reads_a_kept_copy_as_it_arrives():
    assert code(with_kept_weights(Stage.BACKWARD, backward, frozenset({"w1"}))) == code(backward())


def test_an_inference_graph_keeps_nothing():
    once = code(with_kept_weights(Stage.INFERENCE, forward, frozenset()))
    given = context(Stage.INFERENCE, BlockDecision(params=Params.HOST))
    assert once == code(passes.run(passes.only(passes.prefetch_parameters), forward(), given, given=("blocks",)))


def test_what_is_kept_follows_the_plan_and_what_backward_reads():
    fetched = BlockDecision(params=Params.HOST)
    assert passes.select_kept(backward(), context(Stage.BACKWARD, KEPT)) == {"w1"}
    assert not passes.select_kept(backward(), context(Stage.BACKWARD, KEPT, fetched))
    unread = backward()
    product = next(node for node in unread.graph.nodes if node.name == "grad_gelu")
    product.replace_input_with(product.args[1], product.args[0])
    assert not passes.select_kept(unread, context(Stage.BACKWARD, KEPT))


@pytest.mark.parametrize(("owner", "kept"), [(0, False), (1, True)], ids=["an earlier block's", "its own"])
def test_a_shared_parameter_is_kept_only_by_an_owner_that_reads_it_last(owner: int, kept: bool):
    """Block 1 reads it in backward. A copy of block 0's would stay for a backward that does not want it."""
    given = context(Stage.BACKWARD, KEPT, owners={"w1": owner})
    assert passes.select_kept(backward(), given) == ({"w1"} if kept else set())


def test_offload_gradients():
    assert_expected_inline(
        code(rewritten("offload_gradients")),
        """\
def forward(self, x, w1, first, gelu, tangent):
grad_t = aten.permute.default(tangent, [1, 0])
grad_w1 = aten.mm.default(grad_t, gelu)
offload_grad_w1 = autohete.offload.default(grad_w1, 'two blocks', 2, 0)
wait_grad_w1 = autohete.wait.default(offload_grad_w1, grad_w1, 'two blocks')
grad_gelu = aten.mm.default(tangent, w1)
grad_first = aten.gelu_backward.default(grad_gelu, first)
x_t = aten.permute.default(x, [1, 0])
grad_w0 = aten.mm.default(x_t, grad_first)
offload_grad_w0 = autohete.offload.default(grad_w0, 'two blocks', 2, 0)
wait_grad_w0 = autohete.wait.default(offload_grad_w0, grad_w0, 'two blocks')
return (None, wait_grad_w0, wait_grad_w1)""",
    )


@pytest.mark.parametrize("case", CASES)
def test_results_are_those_of_the_graph_as_it_was(case: str):
    graph = CASES[case][2]
    assert_same_results(rewritten(case), graph())


@pytest.mark.parametrize("case", CASES)
def test_a_plan_that_asks_for_nothing_leaves_the_graph(case: str):
    """Nothing is offloaded then; the compiler names no activations where no block's are."""
    gm = rewritten(case, BlockDecision(), offloaded={})
    assert code(gm) == code(CASES[case][2]())


def test_gradients_of_streamed_states_stay():
    gm = rewritten("offload_gradients", BlockDecision(optimizer=Optimizer.STREAMED), offloaded={})
    assert code(gm) == code(backward())


@pytest.mark.parametrize("case", CASES)
def test_only_the_blocks_that_the_plan_names_are_copied(case: str):
    function, stage, graph = CASES[case]
    one = context(stage, BlockDecision(), HOST, offloaded={"gelu": 0})
    gm = passes.run(passes.only(function), graph(), one, given=("blocks",))
    copies = [node for node in gm.graph.nodes if node.target in ops.ISSUING_OPS]
    assert len(copies) == 1
    assert_same_results(gm, graph())


@pytest.mark.parametrize("case", CASES)
def test_copies_are_not_inserted_behind_lanes(case: str):
    function, stage, graph = CASES[case]
    with pytest.raises(PassError, match=rf"{function.__name__} on the {stage.value} graph conflicts with \['lanes'\]"):
        facts = ("blocks", "gathered", "reduced", "lanes")
        passes.run(passes.only(function)[-1:], graph(), context(stage, HOST), given=facts)


@pytest.mark.parametrize("case", CASES)
def test_a_copy_that_nothing_waits_for_is_refused(case: str):
    """What the runner checks behind every pass, whoever wrote it."""
    function, stage, graph = CASES[case]

    def drop_a_wait(gm: fx.GraphModule, _: PassContext) -> fx.GraphModule:
        wait = next(node for node in gm.graph.nodes if node.target is ops.wait)
        wait.replace_all_uses_with(wait.args[1])
        gm.graph.erase_node(wait)
        return gm

    careless = passes.Pass(function=drop_a_wait, stages=(stage,))
    with pytest.raises(PassError, match=rf"drop_a_wait left a broken {stage.value} graph: .* must be used by one wait"):
        passes.run((*passes.only(function), careless), graph(), context(stage, HOST), given=("blocks",))


def test_what_is_offloaded_follows_the_plan():
    assert passes.select_offloaded(forward(), context(Stage.FORWARD, OFFLOAD)) == {"first": 0, "gelu": 0}
    assert not passes.select_offloaded(forward(), context(Stage.FORWARD, BlockDecision(), OFFLOAD))
    assert passes.select_offloaded(forward(), context(Stage.FORWARD, OFFLOAD, num_outputs=2)) == {"gelu": 0}


@pytest.mark.parametrize(("count", "chosen"), [(1, {"gelu"}), (2, {"first", "gelu"}), (3, {"first", "gelu"})])
def test_of_what_can_leave_the_first_ones_do(count: int, chosen: set[str]):
    """The candidates are in the profiler's order, which need not be this graph's."""
    some = context(Stage.FORWARD, BlockDecision(activations=Activations.OFFLOAD, num_offloaded=count))
    assert passes.select_offloaded(forward(), some, ("gelu", "first")).keys() == chosen


def test_what_the_profiler_did_not_count_stays_and_what_is_not_saved_is_not_replaced():
    some = context(Stage.FORWARD, BlockDecision(activations=Activations.OFFLOAD, num_offloaded=1))
    assert passes.select_offloaded(forward(), some, ("first",)) == {"first": 0}
    recomputed = forward()
    outputs = output_args(recomputed)
    output_node(recomputed).args = ((outputs[0], outputs[2]),)
    assert not passes.select_offloaded(recomputed, some, ("first", "gelu"))


def test_a_partial_offload_copies_one_of_two():
    some = BlockDecision(activations=Activations.OFFLOAD, num_offloaded=1)
    chosen = passes.select_offloaded(forward(), context(Stage.FORWARD, some))
    gm = rewritten("offload_activations", some, offloaded=chosen)
    assert code(gm).splitlines()[-1] == "return (second, wait_first, gelu)"
    assert_same_results(gm, forward())


def with_a_transposed_gradient() -> fx.GraphModule:
    gm = backward()
    outputs = output_args(gm)
    source = outputs[2]
    assert source is not None
    with gm.graph.inserting_after(source):
        transposed = gm.graph.call_function(aten.permute.default, (source, [1, 0]))
    transposed.meta = {**source.meta, "val": source.meta["val"].t()}
    output_node(gm).args = ((*outputs[:2], transposed),)
    return gm


def test_a_gradient_gets_the_strides_of_its_parameter_before_it_leaves():
    """Else autograd would copy the home once more to make it ``.grad``."""
    gm = with_a_transposed_gradient()
    gm = passes.run(passes.only(passes.offload_gradients), gm, context(Stage.BACKWARD, HOST), given=("blocks",))
    clones = [node for node in gm.graph.nodes if node.target is aten.clone.default]
    assert len(clones) == 1
    assert clones[0].meta["val"].stride() == (SIDE, 1)
    assert [node.target for node in clones[0].users] == [ops.offload, ops.wait]
    assert_same_results(gm, with_a_transposed_gradient())
