"""Machine files: what is saved comes back, and what is no machine is refused with what is wrong and what to do."""

import json
from collections.abc import Callable
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from autohete_fx.errors import MachineError
from autohete_fx.ir import Machine
from autohete_fx.ir.machine import slowest_machine
from tests.planner_problems import MACHINE

sizes, rates = st.integers(0, 2**60), st.floats(1e-3, 1e18)


@st.composite
def machines(draw: st.DrawFn) -> Machine:
    return Machine(
        device_name=draw(st.text(max_size=9)),
        device_type=draw(st.sampled_from(("cuda", "cpu"))),
        device_bytes=draw(sizes),
        host_bytes=draw(sizes),
        disk_bytes=draw(sizes),
        device_flops_per_s=tuple(draw(st.lists(st.tuples(st.text(max_size=9), rates), min_size=1, max_size=3))),
        device_bytes_per_s=draw(rates),
        h2d_bytes_per_s=draw(rates),
        d2h_bytes_per_s=draw(rates),
        disk_bytes_per_s=draw(st.floats(0, 1e18)),
        device_update_params_per_s=draw(rates),
        host_update_params_per_s=draw(rates),
        latency_s=draw(st.floats(0, 1)),
        backward_flops_per_s=tuple(draw(st.lists(st.tuples(st.text(max_size=9), rates), max_size=3))),
        launch_s=draw(st.floats(0, 1)),
        host_flops_per_s=draw(st.floats(0, 1e18)),
        mixed_update_speed=draw(st.floats(0, 10)),
        contention=draw(
            st.sampled_from([(), (("h2d", "d2h", 0.66), ("compute", "net", 1.0)), (("update", "h2d", 0.5),)])
        ),
    )


@settings(max_examples=50, deadline=None)
@given(machines())
def test_every_machine_comes_back_as_it_was(machine: Machine):
    again = Machine.from_json(machine.to_json())
    assert again == machine and again.digest == machine.digest


FIGURES = [each.name for each in fields(Machine) if each.type in (int, float, "int", "float")]
LONGEST = ("latency_s", "copy_share", "net_latency_s", "launch_s")


@pytest.mark.parametrize("name", FIGURES)
def test_ranks_that_run_one_plan_count_with_the_slowest_in_each_figure(name: str):
    alike = replace(EXAMPLE, **{each: 5 for each in FIGURES})
    assert len(FIGURES) == len(fields(Machine)) - 5  # two names, and three lists
    worst = 6 if name in LONGEST else 4
    for other in (4, 6):
        pair = [alike, replace(alike, device_name="another", **{name: other})]
        expected = replace(alike, **{name: worst if other == worst else 5})
        assert slowest_machine(pair) == expected
        assert slowest_machine(pair[::-1]) == replace(expected, device_name="another")


def test_the_slowest_machine_has_every_product_and_contention_of_all():
    assert slowest_machine([EXAMPLE]) == slowest_machine([EXAMPLE] * 3) == EXAMPLE
    other = replace(
        EXAMPLE,
        device_flops_per_s=(("float32", 2e13), ("float16", 5e13)),
        backward_flops_per_s=(("float32", 9e12),),
        contention=(("h2d", "d2h", 0.7), ("update", "h2d", 0.5)),
        host_flops_per_s=2e12,
        mixed_update_speed=1.5,
    )
    found = slowest_machine([replace(EXAMPLE, contention=(("h2d", "d2h", 0.6),)), other])
    assert found.device_flops_per_s == (("float32", 1e13), ("bfloat16", 2e13), ("float16", 1e13))
    assert found.backward_flops_per_s == (("float32", 9e12),)
    assert found.contention == (("h2d", "d2h", 0.6), ("update", "h2d", 0.5))
    # Where one rank knows, the others' count as assumed.
    assert (found.host_flops_per_s, found.mixed_update_speed) == (EXAMPLE.host_products_per_s, 1.0)


EXAMPLE = replace(MACHINE, device_flops_per_s=(("float32", 1e13), ("bfloat16", 1e14)))


def changed(change: Callable[[dict[str, Any]], object]) -> str:
    raw = json.loads(EXAMPLE.to_json())
    change(raw)
    return json.dumps(raw)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{", "not a machine file: .*expected the JSON that `autohete doctor --save` writes"),
        ("{}", "not a machine file: it has no schema_version"),
        (changed(lambda raw: raw.update(schema_version=0)), "schema version 0, this autohete_fx reads 1; measure"),
        (changed(lambda raw: raw.pop("h2d_bytes_per_s")), "it lacks 'h2d_bytes_per_s'; measure the machine again"),
        (changed(lambda raw: raw.update(tensor_cores=4)), r"unknown entries \['tensor_cores'\]"),
        (changed(lambda raw: raw.update(device_type="abacus")), "device_type is 'abacus'; expected 'cuda' or 'cpu'"),
        (changed(lambda raw: raw.update(device_bytes="40GiB")), "device_bytes is '40GiB'; expected int"),
        (changed(lambda raw: raw.update(host_bytes=-1)), "host_bytes is -1; expected at least 0"),
        (changed(lambda raw: raw.update(h2d_bytes_per_s=0)), "h2d_bytes_per_s is 0; expected more than 0"),
        (changed(lambda raw: raw.update(latency_s=float("nan"))), "latency_s is nan; expected at least 0"),
        (changed(lambda raw: raw.update(device_flops_per_s=[])), "expected pairs of a dtype and its rate"),
        (changed(lambda raw: raw.update(device_flops_per_s=[["float32", -1]])), "float32 is -1; expected more than 0"),
        (changed(lambda raw: raw.update(backward_flops_per_s=[3])), "expected pairs of a dtype and its rate"),
        (
            changed(lambda raw: raw.update(contention=[["h2d", "disk", 0.5]])),
            r"expected two of .*'update', 'net'\] and a rate",
        ),
        (changed(lambda raw: raw.update(contention=[["h2d", "h2d", 0.5]])), "contention has .*; expected two of"),
        (changed(lambda raw: raw.update(contention=[["h2d", "d2h", 1.5]])), "expected a rate of at most 1"),
        (changed(lambda raw: raw.update(contention=[["h2d", "d2h", 0]])), "contention is 0; expected more than 0"),
        (changed(lambda raw: raw.update(launch_s=-1)), "launch_s is -1; expected at least 0"),
        (changed(lambda raw: raw.update(mixed_update_speed=-1)), "mixed_update_speed is -1; expected at least 0"),
    ],
)
def test_what_is_no_machine_is_refused_by_file_and_fault(text: str, message: str, tmp_path: Path):
    file = tmp_path / "machine.json"
    file.write_text(text)
    with pytest.raises(MachineError, match=message) as caught:
        Machine.load(file)
    assert str(file) in str(caught.value)


def test_a_file_from_before_backward_had_rates_of_its_own_is_read():
    absent = ("backward_flops_per_s", "launch_s", "net_bytes_per_s", "host_flops_per_s", "mixed_update_speed")
    text = changed(lambda raw: [raw.pop(name) for name in absent])
    machine = Machine.from_json(text)
    assert machine.flops_per_s("bfloat16", backward=True) == machine.flops_per_s("bfloat16") == 1e14
    assert machine.launch_s == 0
    assert machine.updates_per_s(on_host=True, mixed_share=1.0) == machine.host_update_params_per_s


def test_a_saved_file_is_read_and_an_absent_one_is_named(tmp_path: Path):
    EXAMPLE.save(tmp_path / "machine.json")
    assert Machine.load(tmp_path / "machine.json") == EXAMPLE
    with pytest.raises(MachineError, match=r"cannot read the machine file .*absent\.json': No such file"):
        Machine.load(str(tmp_path / "absent.json"))
