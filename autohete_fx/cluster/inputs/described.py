"""Clusters that users describe: a short form such as ``8xA100-40G,4xH20``, or a JSON file.

Enter text; leaves a `Cluster`, whose figures are the device table's wherever the text gives none. A file is one object:

    {"schema_version": 1,
     "nodes": [{"gpu": "a100-40g", "gpus": 8, "count": 2, "zone": "us-a"}, {"gpu": "h20", "gpus": 4}],
     "node_gb_per_s": {"a100-40g": 12.5},
     "within_gb_per_s": {"h20": 450},
     "zones_gb_per_s": [["us-a", "", 1.5]],
     "usd_per_hour": {"a100-40g": 1.1},
     "memory_gib": {"h20": 90}}

``schema_version`` and ``nodes`` are needed. Rates are in 10^9 bytes a second. ``node_gb_per_s`` is what one GPU's adapter sends to
other nodes. ``within_gb_per_s`` is what one GPU sends to another of its node, in sums over the GPUs of a unit too.
``zones_gb_per_s`` is what all GPUs of a node send together to another zone. A file of `doctor --cluster` has two entries more:
``devices``, a `DeviceSpec` of each type as it was measured, and ``links``, the `TimedLinks` between types. They count before the
device table and the rates.
"""

import itertools
import json
import re
import sys
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from autohete_fx.cluster.spec import Cluster, Gpu, Joined, Link, Node, TimedLinks, steady_link
from autohete_fx.errors import ClusterError, OptionError
from autohete_fx.ir.files import SavedAs, checked, is_file, spelled, write_text
from autohete_fx.machine.data_sheets import PRICES_DATE
from autohete_fx.machine.devices import (
    NET_LATENCY_S,
    NODE_GB_PER_S,
    RESERVE_SHARE,
    DeviceSpec,
    Net,
    find_device,
    net_of_spec,
)

NODE_GPUS = 8
"""GPUs of a node where the short form has more of a type."""
NODE_LATENCY_S = 3e-5
"""Seconds of a message between nodes before its first byte."""
_SHORT = re.compile(r"\s*(\d+)\s*[xX*]\s*([A-Za-z][\w.\- ]*?)\s*")
_RATES = ("node_gb_per_s", "within_gb_per_s", "usd_per_hour", "memory_gib")
"""Entries with a number of a type of GPU."""
_KEYS = ("nodes", *_RATES, "zones_gb_per_s", "devices", "links", "schema_version")
_NODE_KEYS = ("gpu", "gpus", "count", "zone", "name")
_LARGE_BYTES = 2.0**30
"""Of a message by which a timed link is told in one rate."""
MOST_GPUS = 16384
"""More are taken for a slip of the keyboard."""
_FILES = SavedAs(
    kind="cluster",
    writer="the user, or `autohete doctor --cluster FILE`",
    again="correct the file",
    schema_version=1,
    error=ClusterError,
    wrong="was given",
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Described:
    """A cluster with the device table's entry of each type.

    Attributes:
        cluster: its GPUs are named as in the table.
        specs: by that name, with the rates within nodes that the description gives.
        assumed: sentences on what the description left open.
    """

    cluster: Cluster
    specs: Mapping[str, DeviceSpec]
    assumed: tuple[str, ...]


def counted_devices(text: str, *, example: str) -> Iterator[tuple[int, str]]:
    """The parts of a short form. Raises ClusterError, with an example, for a part that is none, and for too many GPUs in all."""
    total = 0
    for part in text.split(","):
        match = _SHORT.fullmatch(part)
        if match is None or not 0 < int(match[1]) <= MOST_GPUS:
            raise ClusterError(
                f"the cluster {text!r} has the part {part.strip()!r}. Expected was a count up to {MOST_GPUS} and a device, such as"
                f" {example}. Write parts so, with commas between them, or give a JSON file"
            )
        total += int(match[1])
        if total > MOST_GPUS:
            raise ClusterError(
                f"the cluster {text!r} has {total} GPUs up to its part {part.strip()!r}. Expected were at most {MOST_GPUS} in all."
                " Give fewer"
            )
        yield int(match[1]), match[2]


def described(text: str, *, spot: bool = False) -> Described:
    """The cluster of a short form, or of the file of that name.

    ``spot``: prices of the table are those of GPUs that may be taken away.

    Raises ClusterError for anything else.
    """
    if text.strip().endswith(".json") or is_file(text):
        return _FILES.load(text, lambda found: _FILES.parse(found, lambda raw: _from_file(raw, spot)))
    nodes, many = [], False
    for count, name in counted_devices(text, example="8xA100-40G"):
        spec = _device(name)
        many = many or count > NODE_GPUS
        sizes = [NODE_GPUS] * (count // NODE_GPUS) + [count % NODE_GPUS] * bool(count % NODE_GPUS)
        nodes.extend({"gpu": spec.name, "gpus": size} for size in sizes)
    found = _from_file({"nodes": nodes}, spot)
    on_nodes = f"up to {NODE_GPUS} GPUs of a type are one node" if many else "GPUs of a type are one node"
    return Described(cluster=found.cluster, specs=found.specs, assumed=(on_nodes, *found.assumed))


def _device(name: str, own: Mapping[str, DeviceSpec] | None = None) -> DeviceSpec:
    """The device of the file's own ones, else of the table."""
    if own and name in own:
        return own[name]
    try:
        return find_device(name)
    except OptionError as error:
        raise ClusterError(str(error).partition("; or give a machine file")[0]) from error


def _from_file(raw: dict[str, Any], spot: bool) -> Described:
    unknown = sorted(set(raw) - set(_KEYS))
    if unknown:
        raise ValueError(f"it has the unknown entries {unknown}")
    devices = checked(raw, "devices", list) if "devices" in raw else ()
    own = {spec.name: spec for spec in (spelled(DeviceSpec, row) for row in devices)}
    nodes = tuple(_nodes(checked(raw, "nodes", list), own))
    sizes: dict[str, int] = {}
    for node in nodes:
        sizes[node.gpu] = max(node.gpus, sizes.get(node.gpu, 0))
    given = {key: _rates(raw, key, own, sizes) for key in _RATES}
    node_rates = {gpu: rate * 1e9 for gpu, rate in given["node_gb_per_s"].items()}
    within_rates, prices, memory = given["within_gb_per_s"], given["usd_per_hour"], given["memory_gib"]
    timed = spelled(TimedLinks, raw["links"]) if "links" in raw else TimedLinks(within=(), between=())
    for joined in (*timed.within, *timed.between):
        if not joined.link.rates or not all(rates.points for rates in joined.link.rates):
            raise ValueError(f"the link {joined.link.name} has no rates")
        pairs = [rates.pairs for rates in joined.link.rates]
        sizes_of = [[size for size, _ in rates.points] for rates in joined.link.rates]
        if any(low >= high for row in ([0, *pairs], *sizes_of) for low, high in itertools.pairwise(row)):
            raise ValueError(
                f"the link {joined.link.name} has rates of {pairs} pairs with messages of {sizes_of} bytes; expected both to rise,"
                " from at least 1 pair on"
            )
    timed_within = {joined.source: joined for joined in timed.within}
    timed_between = {(joined.source, joined.target): joined for joined in timed.between}
    within_rates |= {gpu: _reached(timed_within[gpu].link, sizes[gpu]) for gpu in sizes if gpu in timed_within}
    specs = {gpu: _with_net(_device(gpu, own), within_rates.get(gpu)) for gpu in sizes}

    def port(source: str, target: str) -> Link:
        rates = [node_rates.get(gpu, NODE_GB_PER_S * 1e9) for gpu in (source, target)]
        return steady_link(f"{source} to {target}", min(rates), latency_s=NODE_LATENCY_S, pairs=sizes[source])

    def inside(gpu: str) -> Link:
        rate = net_of_spec(specs[gpu]).reached_gb_per_s * 1e9
        return steady_link(f"within {gpu}", rate, latency_s=NET_LATENCY_S, pairs=sizes[gpu])

    between_zones = checked(raw, "zones_gb_per_s", list) if "zones_gb_per_s" in raw else ()
    zones = tuple(_zones(between_zones, {node.zone for node in nodes}))
    cluster = Cluster(
        gpus=tuple(
            Gpu(
                name=gpu,
                memory_bytes=int(memory.get(gpu, spec.memory_gib * (1 - RESERVE_SHARE)) * 2**30),
                usd_per_hour=prices.get(gpu, spec.spot_usd_per_hour if spot else spec.usd_per_hour),
            )
            for gpu, spec in specs.items()
        ),
        nodes=nodes,
        within=tuple(timed_within.get(gpu) or Joined(source=gpu, target=gpu, link=inside(gpu)) for gpu in specs),
        between=tuple(
            timed_between.get((a, b)) or Joined(source=a, target=b, link=port(a, b)) for a in specs for b in specs
        ),
        zones=zones,
    )
    sent = {*node_rates, *(source for source, target in timed_between if source == target)}
    assumed = tuple(_assumed(cluster, specs, sent, within_rates, prices, spot=spot))
    return Described(cluster=cluster, specs=specs, assumed=assumed)


def _reached(link: Link, pairs: int) -> float:
    """10^9 bytes a second of each of so many pairs at once, with large messages."""
    return link.bytes_per_s(_LARGE_BYTES, pairs) / pairs / 1e9


def _with_net(spec: DeviceSpec, gb_per_s: float | None) -> DeviceSpec:
    """A device with another rate within a node; None: its own. Sums over the GPUs of a unit are priced by it."""
    if gb_per_s is None:
        return spec
    return replace(spec, net=Net(name="the described net", gb_per_s=gb_per_s, reached_gb_per_s=gb_per_s))


def _nodes(rows: list[Any], own: Mapping[str, DeviceSpec]) -> Iterator[Node]:
    counts: dict[str, int] = {}
    left = MOST_GPUS
    for row in rows:
        spec = _device(checked(row, "gpu", str), own)
        unknown = sorted(set(row) - set(_NODE_KEYS))
        if unknown:
            raise ValueError(f"a node has the unknown entries {unknown}; expected some of {list(_NODE_KEYS)}")
        count, gpus = checked(row, "count", int) if "count" in row else 1, checked(row, "gpus", int)
        left -= count * gpus
        if min(count, gpus) < 1:
            raise ValueError(f"{spec.name} has a count of {count} nodes of {gpus} GPUs; expected at least 1 of each")
        if left < 0:
            raise ValueError(
                f"it has {MOST_GPUS - left} GPUs up to a count of {count} nodes of {gpus} {spec.name}; expected were at most"
                f" {MOST_GPUS} GPUs in all"
            )
        zone, name = (checked(row, key, str) if key in row else "" for key in ("zone", "name"))
        for _ in range(count):
            counts[spec.name] = counts.get(spec.name, 0) + 1
            yield Node(name=name or f"{spec.name}-{counts[spec.name]}", gpu=spec.name, gpus=gpus, zone=zone)


def _zones(rows: Sequence[Any], there: Collection[str]) -> Iterator[Joined]:
    """Links between zones, both ways; ``there``: zones of nodes."""
    known: set[frozenset[str]] = set()
    for row in rows:
        if not (isinstance(row, list) and len(row) == 3 and all(isinstance(zone, str) for zone in row[:2])):
            raise ValueError(f"zones_gb_per_s has {row!r}; expected [zone, zone, rate]")
        source, target = row[:2]
        rate = rate_of(f"zones_gb_per_s from {source!r} to {target!r}", row[2])
        pair = frozenset(row[:2])
        if len(pair) < 2 or not pair <= set(there):
            raise ValueError(
                f"zones_gb_per_s is from {source!r} to {target!r}; expected two different zones out of those of nodes,"
                f" {sorted(there)}"
            )
        if pair in known:
            raise ValueError(
                f"zones_gb_per_s has {source!r} and {target!r} twice; expected one rate, which is for both ways"
            )
        known.add(pair)
        link = steady_link(f"{source or 'no zone'} to {target or 'no zone'}", rate * 1e9, latency_s=1e-3)
        yield Joined(source=source, target=target, link=link)
        yield Joined(source=target, target=source, link=link)


def _rates(raw: dict[str, Any], key: str, own: Mapping[str, DeviceSpec], sizes: Mapping[str, int]) -> dict[str, float]:
    """By type of GPU, the numbers of an entry. Raises ValueError for a type that no node has, or that is there twice."""
    given = checked(raw, key, dict) if key in raw else {}
    found: dict[str, float] = {}
    for gpu, value in given.items():
        name = _device(gpu, own).name
        if name in found:
            raise ValueError(f"{key} has {name} twice, once as {gpu!r}; expected each type once")
        if name not in sizes:
            raise ValueError(f"{key} has {gpu!r}, which no node has; expected types of nodes, {sorted(sizes)}")
        found[name] = rate_of(f"{key} of {gpu}", value)
    return found


def rate_of(what: str, value: object) -> float:
    """A number of more than 0 that a float can be. Raises ValueError about ``what`` for anything else."""
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 < value <= sys.float_info.max:
        raise ValueError(f"{what} is {value!r}; expected a number of more than 0")
    return float(value)


def _assumed(
    cluster: Cluster,
    specs: Mapping[str, DeviceSpec],
    nodes: Collection[str],
    within: Collection[str],
    prices: Collection[str],
    *,
    spot: bool,
) -> Iterator[str]:
    """Sentences on what was not described; ``nodes``, ``within`` and ``prices``: types whose rates and prices were."""
    inside = [f"{net_of_spec(spec).name} within {gpu}" for gpu, spec in specs.items() if gpu not in within]
    if inside and any(node.gpus > 1 for node in cluster.nodes):
        yield ", ".join(inside)
    if len(cluster.nodes) > 1 and set(specs) - set(nodes):
        yield f"{NODE_GB_PER_S:g} GB/s from each GPU to other nodes"
    table = [gpu.name for gpu in cluster.gpus if gpu.usd_per_hour is not None and gpu.name not in prices]
    if table:
        yield f"{'spot' if spot else 'on-demand'} prices of {PRICES_DATE} for {', '.join(table)}"
    known = {(joined.source, joined.target) for joined in cluster.zones}
    places = sorted({node.zone for node in cluster.nodes})
    apart = [
        f"{a or 'no zone'} and {b or 'no zone'}" for a, b in itertools.combinations(places, 2) if (a, b) not in known
    ]
    if apart:
        yield f"nodes of {', '.join(apart)} reach each other as those of one zone do"


def save_cluster(text: str, path: str | Path) -> None:
    """Write the file form of a short form, to be corrected by hand. Raises ClusterError where it cannot be written."""
    cluster = described(text).cluster
    rows = [{"gpu": node.gpu, "gpus": node.gpus, "zone": node.zone} for node in cluster.nodes]
    body = {"schema_version": 1, "nodes": rows, "node_gb_per_s": {gpu.name: NODE_GB_PER_S for gpu in cluster.gpus}}
    _write(body, path)


def save_measured(cluster: Cluster, specs: Sequence[DeviceSpec], path: str | Path) -> None:
    """Write the file of a measured cluster; ``specs``: its types. Raises ClusterError where it cannot be written."""
    rows = [{"name": node.name, "gpu": node.gpu, "gpus": node.gpus, "zone": node.zone} for node in cluster.nodes]
    body = {
        "schema_version": 1,
        "nodes": rows,
        "memory_gib": {gpu.name: gpu.memory_bytes / 2**30 for gpu in cluster.gpus},
        "devices": [asdict(spec) for spec in specs],
        "links": asdict(TimedLinks(within=cluster.within, between=cluster.between)),
    }
    _write(body, path)


def _write(body: Mapping[str, Any], path: str | Path) -> None:
    try:
        write_text(path, json.dumps(body, indent=1) + "\n")
    except OSError as error:
        raise ClusterError(
            f"cannot write {str(path)!r}: {error.strerror}. Expected was a file that can be written. Give another path"
        ) from error
