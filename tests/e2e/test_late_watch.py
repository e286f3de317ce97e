"""Functions that other backends compiled before ours was asked for wait for updates too; and importing changes nothing of PyTorch.

Each case is a process of its own: in this one the hooks may be there already."""

import functools
import textwrap

import pytest

from tests.main_job import slow
from tests.processes import Ended, run_python
from tests.thorough import thorough

BEFORE = """
import torch

@torch.no_grad()  # nothing of PyTorch's Python API runs but the function's own graph
def double(w):
    return w * 2

def broken(w):
    torch._dynamo.graph_break()
    return w * 2

def given_up(w):
    with torch.no_grad():
        print("", end="")
        return w * 2

function = {function}
compiled = torch.compile(function, backend={backend!r})
for _ in range(2):
    compiled(torch.nn.Parameter(torch.ones(128, 128)))  # code that would serve the model's, too

import pytest
import autohete_fx, autohete_fx.backend
from tests.held_updates import Gate, Training, Stack, labels, use_lanes, weight_of
from autohete_fx.runtime.pending import calls, watching
assert not watching._watch.has_begun
gate, patch = Gate(), pytest.MonkeyPatch()
use_lanes(patch, pace=gate)
patch.setattr(torch._dynamo, "reset", lambda: None)  # which the tests' helpers call
"""

LATER = """
state = Training(gate)
assert watching._watch.has_begun
gate.opened.set()
state.optimizer.synchronize()
compiled(weight_of(state.model))
num_graphs = torch._dynamo.utils.counters["stats"]["unique_graphs"]
state.hold()
state.assert_waits(lambda model, optimizer: compiled(weight_of(model)))
assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == num_graphs, "the fence must not be seen by guards"
state.hold()
state.assert_waits(lambda model, optimizer: torch.compile(function, backend={backend!r})(weight_of(model)))
"""

UNDER_WAY = """
import time
from autohete_fx import Plan
from tests.held_updates import OPTIMIZER_ON_HOST, STEP, updates_of
use_lanes(patch, pace=lambda ticket: 0.05)  # so that updates are pending where they may
X, was_pending = torch.ones(8, 128), []

def train(steps, model, optimizer):
    for _ in range(steps):
        model(X).backward()
        optimizer.step()
        was_pending.append(updates_of(model).is_pending)
        optimizer.zero_grad()

def whole(x):
    torch._dynamo.graph_break()
    model = Stack()
    optimizer = autohete_fx.AdamW(model.parameters(), lr=1e-2)
    plan = Plan(labels=names, decisions=(OPTIMIZER_ON_HOST,) * len(names), schedule=STEP)
    model.compile(backend="autohete", options=dict(inner_backend="eager", profile="analytic", plan=plan))
    assert watching._watch.has_begun and len(calls.under_way()) == 1, "the call of the function that is under way"
    train(3, model, optimizer)
    assert was_pending == [False] * 3, "what follows in the function is not guarded"
    return model, optimizer

names = ("prologue", *(f"layer@{{i}}" for i in range(1, 5)), "epilogue")
trained = torch.compile(torch._dynamo.disable(whole), backend="eager")(X)
assert not calls.is_within_call()
train(3, *trained)
assert was_pending[-1], "updates overlap again"
weight = weight_of(trained[0])
assert torch.equal(compiled(weight), weight * 2) and not updates_of(trained[0]).is_pending
"""

EARLY = """
from autohete_fx import OptimizerStateError
from tests.early_updates import Loop, X
loop = Loop(gate)
assert watching._watch.has_begun
elsewhere = torch.nn.Parameter(torch.ones(128, 128))
def touch(of):
    for model, optimizer in loop.pairs():
        model(X).backward()
        compiled(of(model))
        optimizer.step()
        optimizer.zero_grad()
touch(lambda model: elsewhere)  # has nothing to do with the updates
for ours, plain in zip(loop.model.parameters(), loop.twin.parameters(), strict=True):
    assert torch.equal(ours, plain)
with pytest.raises(OptimizerStateError):
    touch(weight_of)
"""


def run(script: str) -> Ended:
    return run_python(["-W", "ignore", "-c", script], has_ours=False)


def passes(*scripts: str, **values: str) -> None:
    done = run("".join(textwrap.dedent(script).format(**values) for script in scripts))
    assert done.returncode == 0, done.stderr[-4000:]


@pytest.mark.parametrize(
    ("backend", "function"),
    [
        thorough("inductor", "double"),
        slow("aot_eager", "double"),
        thorough("eager", "double"),
        slow("eager", "broken"),
        slow("eager", "given_up"),
    ],
)
def test_a_function_that_was_compiled_before_ours_waits(backend: str, function: str):
    passes(BEFORE, LATER, backend=backend, function=function)


@pytest.mark.slow
@pytest.mark.parametrize("backend", [thorough("inductor"), "aot_eager"])
def test_its_graphs_are_looked_at_between_backward_and_step(backend: str):
    passes(BEFORE, EARLY, backend=backend, function="double")


@pytest.mark.slow
def test_a_call_that_is_under_way_when_ours_is_asked_for_counts_as_one():
    passes(BEFORE, UNDER_WAY, backend="aot_eager", function="double")


SNAPSHOT = """
import importlib, sys, torch
for name in {names}:
    importlib.import_module(name)

def attributes():
    found = {{}}
    for name, module in list(sys.modules.items()):
        if name.partition(".")[0] in ("torch", "functorch") and module is not None:
            owners = [(name, module)] + [
                (f"{{name}}.{{key}}", value) for key, value in vars(module).items()
                if isinstance(value, type) and value.__module__ == name
            ]
            for owner, value in owners:
                for key, attribute in list(vars(value).items()):
                    found[f"{{owner}}.{{key}}"] = attribute  # kept, so that no identity is given twice
    return found

before = attributes()
{act}
after = attributes()
changed = [key for key in before if key not in after or after[key] is not before[key]]
added = [key for key in after if key not in before]
print(*changed, *added, sep="\\n")
"""


IMPORTS = "import autohete_fx, autohete_fx.backend"
ASKS = "autohete_fx.backend.autohete"


@functools.cache
def names_imported() -> list[str]:
    """The modules of PyTorch that are imported once our backend is asked for."""
    listing = "print(*(n for n in sys.modules if n.partition('.')[0] == 'torch'), sep='\\n')"
    names = run(f"import sys, torch; {IMPORTS}; {ASKS}; {listing}").stdout.split()
    assert len(names) > 100
    return names


def changes(act: str) -> list[str]:
    """What is another, or is new, in PyTorch's modules and classes after some statements. Its modules were imported before."""
    done = run(SNAPSHOT.format(names=names_imported(), act=act))
    assert done.returncode == 0, done.stderr[-4000:]
    return done.stdout.split()


OURS = "torch.ops.autohete"  # the name of our own operators


@pytest.mark.slow
def test_importing_changes_nothing_of_pytorch():
    assert changes(IMPORTS) == [OURS]


@pytest.mark.slow
def test_that_could_fail():
    planted = "; torch.nn.Linear.forward = lambda self, x: x; torch.planted = 1"
    assert {*changes(IMPORTS + planted)} == {"torch.nn.modules.linear.Linear.forward", "torch.planted", OURS}


@pytest.mark.slow
def test_what_is_hooked_once_our_backend_is_asked_for():
    assert {*changes(f"{IMPORTS}; {ASKS}")} == {
        "torch._dynamo.convert_frame.CatchErrorsWrapper.__call__",
        "torch._dynamo.eval_frame.OptimizeContext.enter_exit_hooks",
        "torch._dynamo.repro.after_dynamo.WrapBackendDebug.__call__",
        "torch._dynamo.symbolic_convert.InstructionTranslatorBase.raise_loop_graph_break",
        "torch._dynamo.utils.get_optimize_ddp_mode",
        OURS,
    }
