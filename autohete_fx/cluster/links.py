"""Which link joins two nodes of a cluster."""

from autohete_fx.cluster.spec import Cluster, Link, slower_link
from autohete_fx.errors import ClusterError


class Links:
    """The links of a cluster by the names of its nodes."""

    def __init__(self, cluster: Cluster) -> None:
        self._gpu = {node.name: node.gpu for node in cluster.nodes}
        self._zone = {node.name: node.zone for node in cluster.nodes}
        self._within = {joined.source: joined.link for joined in cluster.within}
        self._between = {(joined.source, joined.target): joined.link for joined in cluster.between}
        self._zones = {(joined.source, joined.target): joined.link for joined in cluster.zones}
        self._apart: dict[tuple[str, str, str, str], Link] = {}

    def within(self, node: str) -> Link:
        """The fabric of a node. Raises ClusterError where nobody described it."""
        gpu = self._gpu[node]
        if gpu not in self._within:
            raise ClusterError(f"there is no link within nodes of {gpu}. Expected was one. Describe it in the cluster")
        return self._within[gpu]

    def between(self, source: str, target: str) -> Link:
        """From one node to another: by the port of the sender, and where zones differ by their link too, if it is slower. Raises
        ClusterError where there is none."""
        zones = self._zone[source], self._zone[target]
        pair = self._gpu[source], self._gpu[target]
        if pair not in self._between:
            raise ClusterError(
                f"there is no link from {pair[0]} to {pair[1]}. Expected was one for each pair of types. Describe it in the cluster"
            )
        if zones[0] == zones[1] or zones not in self._zones:
            return self._between[pair]
        if (*zones, *pair) not in self._apart:
            self._apart[*zones, *pair] = slower_link(self._zones[zones], self._between[pair])
        return self._apart[*zones, *pair]
