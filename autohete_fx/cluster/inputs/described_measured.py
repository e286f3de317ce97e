"""Clusters of GPUs that were measured: a short form such as ``8xA100-40,4xV100-16``, or a JSON file with prices.

Enter text and a table of measured links; leaves a `Cluster`, whose GPUs are named as the table names them. A file is one object:

    {"schema_version": 1, "nodes": [{"gpu": "A100-40", "gpus": 4, "count": 2}], "usd_per_hour": {"A100-40": 1.1}, "memory_gib": {}}

``nodes`` alone is needed. Rates come from the table.
"""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from autohete_fx.cluster.inputs.described import MOST_GPUS, counted_devices, rate_of
from autohete_fx.cluster.inputs.measurements import cluster_of
from autohete_fx.cluster.spec import Cluster, Node
from autohete_fx.errors import ClusterError
from autohete_fx.ir.files import SavedAs, checked, is_file

_KEYS = ("nodes", "usd_per_hour", "memory_gib", "schema_version")
_NODE_KEYS = ("gpu", "gpus", "count")
_FILES = SavedAs(
    kind="cluster", writer="the user", again="correct the file", schema_version=1, error=ClusterError, wrong="was given"
)


def described_measured(text: str, network: Any) -> Cluster:
    """The cluster of a short form, or of the file of that name. Raises ClusterError for anything else."""
    if text.strip().endswith(".json") or is_file(text):
        return _FILES.load(text, lambda found: _FILES.parse(found, lambda raw: _from_file(raw, network)))
    counts: dict[str, int] = {}
    for count, gpu in counted_devices(text, example="8xA100-40"):
        counts[gpu] = counts.get(gpu, 0) + count
    return cluster_of(network, counts)


def _from_file(raw: Mapping[str, Any], network: Any) -> Cluster:
    unknown = sorted(set(raw) - set(_KEYS))
    if unknown:
        raise ValueError(f"it has the unknown entries {unknown}; with measured costs, expected some of {list(_KEYS)}")
    nodes: list[Node] = []
    for row in checked(raw, "nodes", list):
        gpu, gpus = checked(row, "gpu", str), checked(row, "gpus", int)
        count = checked(row, "count", int) if "count" in row else 1
        unknown = sorted(set(row) - set(_NODE_KEYS))
        if unknown:
            raise ValueError(
                f"a node has the unknown entries {unknown}; with measured costs, expected some of {list(_NODE_KEYS)}"
            )
        if not 0 < count <= MOST_GPUS or not 0 < gpus <= MOST_GPUS or len(nodes) + count > MOST_GPUS:
            raise ValueError(f"there are {count} nodes of {gpus} {gpu}; expected 1 to {MOST_GPUS} GPUs in the cluster")
        nodes.extend(Node(name=f"{gpu}-{len(nodes) + index}", gpu=gpu, gpus=gpus) for index in range(count))
    given = {key: checked(raw, key, dict) if key in raw else {} for key in ("usd_per_hour", "memory_gib")}
    prices, memory = (
        {gpu: rate_of(f"{key} of {gpu}", value) for gpu, value in values.items()} for key, values in given.items()
    )
    found = cluster_of(network, dict.fromkeys((node.gpu for node in nodes), 1))
    strangers = sorted({*prices, *memory} - {gpu.name for gpu in found.gpus})
    if strangers:
        raise ValueError(f"it has prices or memory of {strangers}, which no node has")
    gpus = tuple(
        replace(
            gpu,
            usd_per_hour=prices.get(gpu.name),
            memory_bytes=int(memory[gpu.name] * 2**30) if gpu.name in memory else gpu.memory_bytes,
        )
        for gpu in found.gpus
    )
    return replace(found, nodes=tuple(nodes), gpus=gpus)
