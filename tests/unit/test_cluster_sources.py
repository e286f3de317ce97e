"""Where states come from: the way that is quickest for the slowest node, the nearest among equals, served to everyone once."""

from dataclasses import replace

from hypothesis import given, settings
from hypothesis import strategies as st

from autohete_fx.cluster.store.sources import Bandwidths, Moved, Wanted, move_s, moved_by, quickest

NAMES = "abcdef"
RATES = Bandwidths(local=4.0, peer=2.0, cloud=1.0, cloud_of_all=2.0, cloud_first_s=0.0)


def wanted(needs: list[str], disks: dict[str, str], nodes: str = "", cloud: str = NAMES, size: float = 1.0) -> Wanted:
    names = list(nodes or "mnop"[: len(needs)])
    return Wanted(
        needs=[list(keys) for keys in needs],
        nodes=names,
        disks={node: set(disks.get(node, "")) for node in names},
        cloud={key: key for key in cloud},
        sizes=dict.fromkeys(NAMES, size),
    )


def test_a_piece_comes_from_the_nearest_place_and_from_the_cloud_once():
    given = wanted(["ab", "bc", "cd", "d"], {"m": "a", "n": "b"}, "mnno")
    fetch = quickest(given, replace(RATES, cloud=0.01, cloud_of_all=0.02))
    assert fetch.local == {0: ("a",), 1: ("b",)}
    assert {key for keys in fetch.cloud.values() for key in keys} == {"c", "d"}
    assert sum(map(len, fetch.cloud.values())) == 2
    assert sum(map(len, fetch.peer.values())) == 3


def test_nodes_that_need_the_same_share_the_reading_where_peers_are_fast():
    rows = moved_by(quickest(wanted(["abcd", "abcd"], {}), replace(RATES, peer=100.0)), wanted(["abcd", "abcd"], {}))
    assert rows == {node: Moved(cloud=2, peer=2, sent=2) for node in "mn"}


def test_slow_peers_are_not_waited_for_where_the_cloud_is_quicker():
    given = wanted(["abcd", "abcd"], {"m": "abcd"})
    for peer, expected in ((2.0, Moved(peer=4)), (0.5, Moved(cloud=4))):
        fetch = quickest(given, replace(RATES, local=100.0, peer=peer))
        assert moved_by(fetch, given)["n"] == expected
    # it reads the cloud while the other node reads its disk, and then waits for less
    assert moved_by(quickest(given, replace(RATES, local=2.0)), given)["n"] == Moved(cloud=2, peer=2)
    # a cloud that takes long to begin is no help to states that are small
    assert moved_by(quickest(given, replace(RATES, peer=0.5, cloud_first_s=9.0)), given)["n"] == Moved(peer=4)
    # disks that are slower than the cloud
    assert moved_by(quickest(given, replace(RATES, local=0.1)), given)["m"] == Moved(cloud=4)


def test_a_node_that_sends_to_many_is_waited_for_and_so_is_its_disk():
    given = wanted(["ab", "cd", "cd", "cd"], {"m": "abcd"})
    rows = moved_by(quickest(given, replace(RATES, cloud=0.01, cloud_of_all=0.02)), given)
    assert rows["m"] == Moved(local=2, sent=6, served=2) and rows["n"] == Moved(peer=2)
    assert move_s(rows, RATES) == 4 / RATES.local + 6 / RATES.peer
    # where its port is the longest, others read some of it from the cloud
    rows = moved_by(quickest(given, replace(RATES, cloud_of_all=9.0)), given)
    assert rows["m"].sent < 6 and move_s(rows, RATES) < 4 / RATES.local + 6 / RATES.peer


def test_layers_and_their_parameters_come_from_the_same_places():
    """A plan is priced by layers before parameters are restored. Small pieces are received, the largest read in the cloud."""
    layers = {"first": ["u0"], "second": ["v0", "v1"], "last": ["w0"]}
    sizes = {"u0": 8.0, "v0": 7.5, "v1": 0.5, "w0": 0.25}
    whole = {layer: sum(sizes[key] for key in keys) for layer, keys in layers.items()}
    rates, rows = replace(RATES, local=10.0, peer=10.0, cloud=5.0, cloud_of_all=5.0), []
    for order in ([*layers], [*layers][::-1]):
        for keys, of in ((order, whole), ([key for layer in order for key in layers[layer]], sizes)):
            known = set(keys)
            given = Wanted(
                needs=[keys, keys],
                nodes=["m", "n"],
                disks={"m": known, "n": set()},
                cloud={key: key for key in keys},
                sizes=of,
            )
            rows.append(moved_by(quickest(given, rates), given)["n"])
    assert rows[0].cloud == 8.0 and rows[0].peer == 8.25
    assert all(abs(row.cloud - 8.0) <= 0.5 and abs(row.peer - 8.25) <= 0.5 for row in rows), rows


KEYS = st.text(NAMES, min_size=1, max_size=6).map(lambda text: "".join(sorted(set(text))))
RATE = st.sampled_from([0.1, 0.5, 1.0, 3.0, 10.0])


@settings(deadline=None)
@given(
    st.lists(KEYS, min_size=1, max_size=4),
    st.dictionaries(st.sampled_from("mnop"), KEYS),
    st.sampled_from(["mnop", "mmno", "mnnn"]),
    st.builds(
        Bandwidths, local=RATE, peer=RATE, cloud=RATE, cloud_of_all=RATE, cloud_first_s=st.sampled_from([0.0, 5.0])
    ),
    st.booleans(),
)
def test_everyone_gets_everything_once_and_no_later_than_by_simpler_ways(
    needs: list[str], disks: dict[str, str], nodes: str, rates: Bandwidths, all_in_cloud: bool
):
    near = set().union(*(disks.get(node, "") for node in nodes[: len(needs)]))
    cloud = NAMES if all_in_cloud else "".join(sorted(set(NAMES) - near))
    given = wanted(needs, disks, nodes[: len(needs)], cloud)
    fetch = quickest(given, rates)
    assert fetch == quickest(given, rates)
    for rank, keys in enumerate(needs):
        own = fetch.local.get(rank, ())
        assert set(own) <= given.disks[given.nodes[rank]]
        read = [key for key in fetch.cloud.get(rank, ()) if key in keys]
        assert set(read) == set(fetch.cloud.get(rank, ())) <= set(cloud)
        received = [key for (_, receiver), sent in fetch.peer.items() for key in sent if receiver == rank]
        assert sorted([*own, *read, *received]) == sorted(keys)
    for (sender, receiver), keys in fetch.peer.items():
        assert sender != receiver
        assert set(keys) <= given.disks[given.nodes[sender]] | set(fetch.cloud.get(sender, ()))
    seconds = move_s(moved_by(fetch, given), rates)
    nearest = quickest(given, replace(rates, cloud_first_s=1e9))
    assert seconds <= move_s(moved_by(nearest, given), rates) + 1e-9
    if all_in_cloud:
        whole = {node: set() for node in given.nodes}
        for rank, keys in enumerate(needs):
            whole[given.nodes[rank]] |= set(keys)
        rows = {node: Moved(cloud=len(keys)) for node, keys in whole.items()}
        assert seconds <= move_s(rows, rates) * 1.06 + 1e-9
