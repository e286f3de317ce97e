"""Clusters from short forms and files, and what is refused."""

import json
from dataclasses import asdict
from types import SimpleNamespace

import pytest

from autohete_fx.cluster.inputs.described import described, save_cluster
from autohete_fx.cluster.links import Links
from autohete_fx.cluster.planner.frontier import changes, frontier
from autohete_fx.cluster.spec import Joined, TimedLinks, steady_link
from autohete_fx.errors import ClusterError
from autohete_fx.machine.devices import find_device, net_of_spec


def test_a_short_form_has_nodes_of_eight():
    found = described("12xA100-40G, 2xh200")
    assert [(node.gpu, node.gpus) for node in found.cluster.nodes] == [
        ("a100-40g", 8),
        ("a100-40g", 4),
        ("h200-141g", 2),
    ]
    assert found.cluster.gpu("a100-40g").memory_bytes == int(0.95 * 40 * 2**30)
    assert any("up to 8 GPUs" in sentence for sentence in found.assumed)


def test_a_type_given_twice_has_different_nodes():
    assert [node.name for node in described("1xL40S,2xL40S").cluster.nodes] == ["l40s-48g-1", "l40s-48g-2"]


def test_a_file_says_what_the_table_does_not_know(tmp_path):
    path = tmp_path / "cluster.json"
    path.write_text(
        json.dumps(
            {
                "schema_version": 1,
                "nodes": [{"gpu": "a100-40g", "gpus": 4, "count": 2, "zone": "x"}, {"gpu": "l40s", "gpus": 8}],
                "node_gb_per_s": {"a100-40g": 10},
                "within_gb_per_s": {"l40s": 20},
                "zones_gb_per_s": [["x", "", 0.5]],
                "usd_per_hour": {"a100-40g": 1.5},
                "memory_gib": {"l40s": 40},
            }
        )
    )
    cluster = described(str(path)).cluster
    between = {(joined.source, joined.target): joined.link for joined in cluster.between}
    within = {joined.source: joined.link for joined in cluster.within}
    large = 2.0**30
    assert between["a100-40g", "l40s-48g"].bytes_per_s(large) == pytest.approx(10e9, rel=0.01)
    assert between["l40s-48g", "l40s-48g"].bytes_per_s(large, 8) == pytest.approx(8 * 25e9, rel=0.01)
    assert within["l40s-48g"].bytes_per_s(large) == pytest.approx(20e9, rel=0.01)
    assert {(joined.source, joined.target) for joined in cluster.zones} == {("x", ""), ("", "x")}
    assert (cluster.gpu("a100-40g").usd_per_hour, cluster.gpu("l40s-48g").memory_bytes) == (1.5, 40 * 2**30)


def test_rates_within_nodes_are_those_that_sums_of_a_unit_are_priced_by(tmp_path):
    slow = steady_link("within l40s-48g", 2e9, latency_s=1e-5, pairs=2)
    timed = TimedLinks(within=(Joined(source="l40s-48g", target="l40s-48g", link=slow),), between=())
    path = tmp_path / "cluster.json"
    path.write_text(
        json.dumps(
            {
                "schema_version": 1,
                "nodes": [{"gpu": gpu, "gpus": 4} for gpu in ("a100-40g", "l40s", "h20")],
                "within_gb_per_s": {"a100-40g": 0.5, "l40s": 7},
                "links": asdict(timed),
            }
        )
    )
    rates = {gpu: net_of_spec(spec).reached_gb_per_s for gpu, spec in described(str(path)).specs.items()}
    own = net_of_spec(find_device("h20")).reached_gb_per_s
    assert rates == {"a100-40g": 0.5, "l40s-48g": pytest.approx(1.0, rel=1e-3), "h20-96g": own}, (
        "two pairs share 2 GB/s"
    )


def test_a_short_form_is_written_as_a_file(tmp_path):
    save_cluster("8xA100-40G,2xL40S", tmp_path / "cluster.json")
    assert described(str(tmp_path / "cluster.json")).cluster == described("8xA100-40G,2xL40S").cluster


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("8A100", "has the part '8A100'"),
        ("0xA100-40G", "has the part '0xA100-40G'"),
        ("8xA100-40G,,2xL40S", "has the part ''"),
        ("8xA1000", "unknown device 'A1000'.*did you mean|unknown device 'A1000'"),
        ("99999999xH20", "a count up to 16384"),
        ("16384xH20,1xL40S", "has 16385 GPUs up to its part '1xL40S'. Expected were at most 16384 in all"),
        ("nowhere.json", "cannot read the cluster file 'nowhere.json'"),
        ("x" * 300, "has the part 'xxx"),
        ("a\0b", "has the part 'a.*b'"),
    ],
)
def test_short_forms_that_are_none(text, message):
    with pytest.raises(ClusterError, match=message):
        described(text)


@pytest.mark.parametrize(
    ("body", "message"),
    [
        ({}, "no schema_version"),
        ({"schema_version": 1}, "it lacks 'nodes'"),
        ({"schema_version": 1, "nodes": [], "cables": {}}, r"unknown entries \['cables'\]"),
        ({"schema_version": 1, "nodes": [], "links": {}}, "it lacks 'within'"),
        (
            {
                "schema_version": 1,
                "nodes": [{"gpu": "l40s", "gpus": 2}],
                "links": {
                    "within": [{"source": "l40s", "target": "l40s", "link": {"name": "bus", "rates": []}}],
                    "between": [],
                },
            },
            "the link bus has no rates",
        ),
        ({"schema_version": 1, "nodes": []}, "no nodes"),
        (
            {"schema_version": 1, "nodes": [{"gpu": "l40s", "gpus": 1}], "node_gb_per_s": {"l40s": 10**400}},
            "node_gb_per_s of l40s is 1000",
        ),
        (
            {"schema_version": 1, "nodes": [{"gpu": "l40s", "gpus": 1}], "memory_gib": {"l40s": 1e305}},
            "was given: cannot convert float infinity",
        ),
        ({"schema_version": 1, "nodes": [{"gpu": "l40s", "gpus": 0}]}, "0 GPUs"),
        (
            {"schema_version": 1, "nodes": [{"gpu": "l40s", "gpus": 1}], "node_gb_per_s": {"l40s": 0}},
            "node_gb_per_s of l40s is 0",
        ),
        (
            {"schema_version": 1, "nodes": [{"gpu": "l40s", "gpus": 1}], "usd_per_hour": {"l40s": 0}},
            "the cluster file was given: usd_per_hour of l40s is 0; expected a number of more than 0; correct the file",
        ),
        ({"schema_version": 1, "nodes": [{"gpu": "l40s", "gpus": -1}]}, "-1 GPUs"),
        ({"schema_version": 1, "nodes": [{"gpu": "l40s", "gpus": 1, "count": 0}]}, "l40s-48g has a count of 0 nodes"),
        (
            {"schema_version": 1, "nodes": [{"gpu": "l40s", "gpus": 2, "count": 10**9}]},
            "it has 2000000000 GPUs up to .*; expected were at most",
        ),
        ({"schema_version": 1, "nodes": [{"gpu": "l40s", "gpus": 1, "zones": "a"}]}, r"unknown entries \['zones'\]"),
        ({"schema_version": 1, "nodes": [{"gpu": "l40s", "gpus": 1, "zone": 3}]}, "zone is 3; expected str"),
        ({"schema_version": 1, "nodes": [{"gpu": "l40s", "gpus": 1}], "node_gb_per_s": 5}, "node_gb_per_s is 5"),
        ({"schema_version": 1, "nodes": [{"gpu": "l40s", "gpus": 1}], "memory_gib": {"l40s": float("inf")}}, "is inf"),
        ({"schema_version": 1, "nodes": [{"gpu": "l40s", "gpus": 1}], "devices": 3}, "devices is 3"),
        ({"schema_version": 1, "nodes": [{"gpu": "l40s", "gpus": 1}], "zones_gb_per_s": [["a", "b", 0]]}, "'b' is 0"),
        (
            {"schema_version": 1, "nodes": [{"gpu": "l40s", "gpus": 1}], "zones_gb_per_s": [["a", "b"]]},
            "zone, zone, rate",
        ),
    ],
)
def test_files_that_are_wrong(tmp_path, body, message):
    path = tmp_path / "cluster.json"
    path.write_text(json.dumps(body))
    with pytest.raises(ClusterError, match=message):
        described(str(path))


def link_of(pairs: list[int], sizes: list[float]) -> dict[str, object]:
    rates = [{"pairs": number, "points": [[size, 1e9] for size in sizes]} for number in pairs]
    joined = {"source": "l40s-48g", "target": "l40s-48g", "link": {"name": "port", "rates": rates}}
    return {"links": {"within": [], "between": [joined]}}


@pytest.mark.parametrize(
    ("entries", "message"),
    [
        (
            {"usd_per_hour": {"h20": 1}},
            r"usd_per_hour has 'h20', which no node has; expected types of nodes, \['l40s-48g'\]",
        ),
        (
            {"memory_gib": {"l40s": 40, "L40S": 30}},
            "memory_gib has l40s-48g twice, once as 'L40S'; expected each type once",
        ),
        (
            {"zones_gb_per_s": [["a", "a", 1]]},
            r"from 'a' to 'a'; expected two different zones out of those of nodes, \['', 'a'\]",
        ),
        ({"zones_gb_per_s": [["a", "b", 1]]}, "from 'a' to 'b'; expected two different zones"),
        ({"zones_gb_per_s": [["a", "", 1], ["", "a", 2]]}, "has '' and 'a' twice; expected one rate"),
        (
            link_of([0], [1.0]),
            r"the link port has rates of \[0\] pairs .* expected both to rise, from at least 1 pair on",
        ),
        (link_of([2, 1], [1.0]), r"rates of \[2, 1\] pairs"),
        (link_of([1], [9.0, 4.0]), r"messages of \[\[9.0, 4.0\]\] bytes"),
        ({"schema_version": "1"}, "has schema version '1', this autohete_fx reads 1"),
    ],
)
def test_entries_that_mean_nothing_are_told(tmp_path, entries, message):
    path = tmp_path / "cluster.json"
    nodes = [{"gpu": "l40s", "gpus": 1}, {"gpu": "l40s", "gpus": 1, "zone": "a"}]
    path.write_text(json.dumps({"schema_version": 1, "nodes": nodes} | entries))
    with pytest.raises(ClusterError, match=message):
        described(str(path))


@pytest.mark.parametrize("text", ["[" * 100_000, '{"schema_version": ' + "1" * 5000 + "}", '{"nodes": '])
def test_files_that_are_no_json_are_told(text, tmp_path):
    path = tmp_path / "cluster.json"
    path.write_text(text)
    with pytest.raises(ClusterError, match="this is not a cluster file"):
        described(str(path))


def test_changes_are_one_thing_each():
    cluster = described("8xA100-40G,4xL40S").cluster
    found = dict(changes(cluster))
    assert list(found) == [
        "1 more a100-40g",
        "1 less a100-40g",
        "8 more a100-40g",
        "8 less a100-40g",
        "1 more l40s-48g",
        "1 less l40s-48g",
        "4 more l40s-48g",
        "4 less l40s-48g",
        "twice the network",
    ]
    sizes = {name: sorted((n.gpu, n.gpus) for n in changed.nodes) for name, changed in found.items()}
    assert sizes["1 more a100-40g"] == [("a100-40g", 1), ("a100-40g", 8), ("l40s-48g", 4)], "the node of eight is full"
    assert sizes["1 less a100-40g"] == [("a100-40g", 7), ("l40s-48g", 4)]
    assert sizes["1 more l40s-48g"] == [("a100-40g", 8), ("l40s-48g", 5)]
    assert found["8 more a100-40g"].count("a100-40g") == 16
    assert [gpu.name for gpu in found["4 less l40s-48g"].gpus] == ["a100-40g"]
    assert found["twice the network"].between[0].link.bytes_per_s(1e9) == pytest.approx(
        2 * cluster.between[0].link.bytes_per_s(1e9)
    )


def test_a_node_of_one_has_no_node_less_beside_the_gpu_less():
    assert list(dict(changes(described("1xL40S").cluster))) == ["1 more l40s-48g"]
    assert list(dict(changes(described("2xL40S,1xT4").cluster)))[-3:] == [
        "1 more t4-16g",
        "1 less t4-16g",
        "twice the network",
    ]


@pytest.mark.parametrize(
    ("also", "more"), [({}, []), ({"l40s-48g": 2}, [2]), ({"l40s-48g": 4}, []), ({"t4-16g": 1}, [])]
)
def test_parts_are_halves_and_one_that_is_asked_for_where_it_is_there(also, more):
    """As halves of three GPUs leave out two, which another cluster's cheapest plan may have."""
    found = []

    def solve(part):
        found.append(part.count("l40s-48g"))
        return SimpleNamespace(plan=SimpleNamespace(iteration_s=1.0, used=lambda: {"l40s-48g": found[-1]}))

    frontier(described("3xL40S").cluster, solve, also)
    assert found == [3, 1, *more]


def test_a_node_more_has_a_name_of_its_own(tmp_path):
    path = tmp_path / "cluster.json"
    nodes = [{"gpu": "l40s", "gpus": 2}, {"gpu": "t4", "gpus": 2, "name": "l40s-48g-1-more"}]
    path.write_text(json.dumps({"schema_version": 1, "nodes": nodes}))
    more = dict(changes(described(str(path)).cluster))["2 more l40s-48g"]
    assert [node.name for node in more.nodes] == ["l40s-48g-1", "l40s-48g-1-more", "l40s-48g-1-more-more"]


def test_zones_bind_beside_the_ports(tmp_path):
    nodes = [{"gpu": "l40s", "gpus": 4, "zone": zone} for zone in ("a", "b", "c")]
    for number, node in enumerate(nodes):
        node["name"] = f"n{number}"
    path = tmp_path / "cluster.json"
    rates = {"node_gb_per_s": {"l40s": 10}, "zones_gb_per_s": [["a", "b", 15]]}
    path.write_text(json.dumps({"schema_version": 1, "nodes": nodes, **rates}))
    found = described(str(path))
    assert found.assumed[-1] == "nodes of a and c, b and c reach each other as those of one zone do"
    links, large = Links(found.cluster), 2.0**30
    for source, target, pairs, rate in (("n0", "n1", 1, 10), ("n1", "n0", 4, 15), ("n0", "n2", 4, 40)):
        assert links.between(source, target).bytes_per_s(large, pairs) == pytest.approx(rate * 1e9, rel=0.02)
