"""Plan files: what is saved comes back, and what is no plan is refused with what is wrong and what to do."""

import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from autohete_fx.errors import PlanError
from autohete_fx.ir import (
    SCHEMA_VERSION,
    Activations,
    Alternative,
    BlockDecision,
    BlockReasons,
    Lane,
    LaneTime,
    MemoryUse,
    Optimizer,
    Params,
    Plan,
    Reasons,
)
from autohete_fx.options import Options

decisions = st.builds(
    BlockDecision,
    activations=st.sampled_from(Activations),
    params=st.sampled_from(Params),
    optimizer=st.sampled_from(Optimizer),
    prefetch_distance=st.integers(1, 9),
)
numbers = st.floats(0, allow_infinity=False)
sizes = st.integers(0)
uses = st.lists(
    st.builds(MemoryUse, used_bytes=sizes, limit_bytes=st.none() | sizes, block=st.none() | sizes), max_size=3
).map(tuple)
alternatives = st.none() | st.builds(
    Alternative, decision=decisions, step_s=numbers, more_copies_s=numbers, exceeded=uses
)


@st.composite
def plans(draw: st.DrawFn) -> Plan:
    decided = tuple(draw(st.lists(decisions, max_size=4)))
    return Plan(
        labels=tuple(draw(st.text(max_size=5)) for _ in decided),
        decisions=decided,
        block_digests=tuple(draw(st.text("0123456789abcdef", max_size=16)) for _ in decided),
        step_s=draw(numbers),
        peak_bytes=draw(st.integers(0)),
        host_bytes=draw(st.integers(0)),
        busy_s=tuple(LaneTime(lane=lane, busy_s=draw(numbers)) for lane in Lane),
        lower_bound_s=draw(numbers),
        gap=draw(numbers),
        status=draw(st.text(max_size=9)),
        problem_digest=draw(st.text(max_size=9)),
        solve_s=draw(numbers),
        reasons=draw(st.none() | reasons(len(decided))),
    )


def reasons(num_blocks: int) -> st.SearchStrategy[Reasons]:
    block = st.builds(BlockReasons, num_others=st.integers(0, 99), next_best=alternatives, barred=alternatives)
    return st.builds(
        Reasons,
        blocks=st.lists(block, min_size=num_blocks, max_size=num_blocks).map(tuple),
        memory=uses,
        waits_s=numbers,
        meanwhile=st.lists(st.builds(LaneTime, lane=st.sampled_from(Lane), busy_s=numbers), max_size=4).map(tuple),
        more_bytes=sizes,
        more_step_s=numbers,
    )


@given(plans())
def test_every_plan_comes_back_as_it_was(plan: Plan):
    again = Plan.from_json(plan.to_json())
    assert again == plan and again.digest == plan.digest


def example() -> Plan:
    other = Alternative(decision=BlockDecision(), step_s=4.0, more_copies_s=-1.0)
    return Plan(
        labels=("préface", "b"),
        decisions=(BlockDecision(), BlockDecision(params=Params.HOST)),
        peak_bytes=5,
        reasons=Reasons(
            blocks=(BlockReasons(num_others=0), BlockReasons(num_others=1, next_best=other)),
            memory=(),
            waits_s=0.0,
            meanwhile=(),
            more_bytes=0,
            more_step_s=3.0,
        ),
    )


def test_a_saved_file_is_read_by_load_and_by_the_option(tmp_path: Path):
    file = tmp_path / "plan.json"
    example().save(file)
    assert Plan.load(file) == Plan.load(str(file)) == example()
    assert Options.from_user({"plan": file}).plan == Options.from_user({"plan": str(file)}).plan == example()


def test_the_digest_is_of_what_is_decided():
    predicted = Plan(labels=example().labels, decisions=example().decisions, step_s=3.0, status="optimal")
    assert predicted.digest == example().digest
    assert Plan(labels=example().labels, decisions=(BlockDecision(),) * 2).digest != example().digest


def changed(change: Callable[[dict[str, Any]], object]) -> str:
    raw = json.loads(example().to_json())
    change(raw)
    return json.dumps(raw)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "not a plan file: .*expected the JSON that Plan.save writes"),
        (example().to_json()[:-9], "not a plan file: .*expected the JSON that Plan.save writes"),
        ("[]", "no schema_version"),
        (changed(lambda raw: raw.pop("schema_version")), "no schema_version"),
        (
            changed(lambda raw: raw.update(schema_version=SCHEMA_VERSION + 1)),
            f"schema version {SCHEMA_VERSION + 1}, this autohete_fx reads {SCHEMA_VERSION}; make the plan again",
        ),
        (changed(lambda raw: raw.pop("labels")), "damaged: it lacks 'labels'; make the plan again"),
        (changed(lambda raw: raw.update(nickname="x")), r"unknown entries \['nickname'\]"),
        (changed(lambda raw: raw.update(labels="ab")), "labels is 'ab'; expected list"),
        (changed(lambda raw: raw.update(step_s="fast")), "step_s is 'fast'; expected int or float"),
        (
            changed(lambda raw: raw.update(step_s=math.nan)),
            "damaged: step_s is nan; expected a number of at least 0 that",
        ),
        (changed(lambda raw: raw.update(solve_s=math.inf)), "solve_s is inf; expected"),
        (changed(lambda raw: raw.update(host_bytes=-1)), "host_bytes is -1; expected"),
        (changed(lambda raw: raw.update(peak_bytes=10**400)), "peak_bytes is 10{19}; expected"),
        (changed(lambda raw: raw.update(busy_s=[{"lane": "h2d", "busy_s": -1.0}])), "busy_s is -1.0; expected"),
        (
            changed(lambda raw: raw["reasons"]["blocks"][1]["next_best"].update(more_copies_s=-math.inf)),
            "more_copies_s is -inf; expected a number that",
        ),
        (changed(lambda raw: raw.update(busy_s=[3])), "3 stands where an object with 'lane' was expected"),
        (changed(lambda raw: raw["decisions"].pop()), "2 labels and 1 decisions"),
        (
            changed(lambda raw: raw["decisions"][1].update(params="moon")),
            r"in decisions\[1\], 'moon' is not a valid Params",
        ),
        (
            changed(lambda raw: raw["decisions"][0].update(prefetch_distance=0)),
            r"decisions\[0\], .*is 0; expected at least 1",
        ),
        (changed(lambda raw: raw["decisions"][0].pop("optimizer")), "lacks 'optimizer'"),
        (changed(lambda raw: raw.pop("reasons")), "lacks 'reasons'"),
        (changed(lambda raw: raw["reasons"]["blocks"].pop()), "reasons were given 1 entries for 2 decisions"),
        (
            changed(lambda raw: raw["reasons"]["blocks"][1]["next_best"].update(mood="good")),
            r"in blocks\[1\], it has the unknown entries \['mood'\]",
        ),
        (
            changed(lambda raw: raw["reasons"]["blocks"][1].update(barred="yes")),
            r"in blocks\[1\], barred is 'yes'; expected dict or NoneType",
        ),
    ],
)
def test_what_is_no_plan_is_refused_by_file_and_fault(text: str, message: str, tmp_path: Path):
    file = tmp_path / "broken.json"
    file.write_text(text)
    with pytest.raises(PlanError, match=message) as caught:
        Plan.load(file)
    assert str(file) in str(caught.value)


def test_files_that_cannot_be_read_are_named(tmp_path: Path):
    with pytest.raises(
        PlanError, match=r"absent\.json': No such file or directory; expected a file that Plan.save wrote"
    ):
        Plan.load(tmp_path / "absent.json")
    with pytest.raises(PlanError, match="Is a directory"):
        Plan.load(tmp_path)
    (tmp_path / "picture").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(PlanError, match="picture' is not a plan file: it is not text"):
        Plan.load(tmp_path / "picture")


def test_plans_made_by_hand_are_checked_too():
    with pytest.raises(PlanError, match="1 labels and 2 decisions; expected one decision a block"):
        Plan(labels=("a",), decisions=(BlockDecision(),) * 2)
    with pytest.raises(PlanError, match="expected at least 1"):
        BlockDecision(prefetch_distance=0)
    with pytest.raises(PlanError, match="other_states is 'streamed' with optimizer 'host' and num_moved_states None"):
        BlockDecision(optimizer=Optimizer.HOST, other_states=Optimizer.STREAMED)
