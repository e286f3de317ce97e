"""Jobs of several ranks, planned without them: how many there are, on how many nodes, and one rank's part of the machine.

In: a machine that one rank has alone, from its data sheet or measured. Out: the `Machine` of each rank of a job.
"""

from dataclasses import dataclass, replace

from autohete_fx.errors import OptionError
from autohete_fx.ir import Machine
from autohete_fx.machine.devices import NET_LATENCY_S, NODE_GB_PER_S, DeviceSpec, machine_of_rank, net_of_spec


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """The ranks that train a model together, as many on each node.

    Attributes:
        num_ranks, num_nodes: of the whole job.
        num_replicas: how many ranks hold the same shards; so many copies of the model are sharded over an even part of the ranks.
        node_bytes_per_s: of one rank's adapter to other nodes, in one direction.

    Raises:
        OptionError: ranks cannot be so divided.
    """

    num_ranks: int = 1
    num_nodes: int = 1
    num_replicas: int = 1
    node_bytes_per_s: float = NODE_GB_PER_S * 1e9

    def __post_init__(self) -> None:
        if self.num_ranks % self.num_nodes:
            raise OptionError(
                f"--ranks {self.num_ranks} on --nodes {self.num_nodes} was given. Expected was a number of ranks that the nodes"
                f" divide evenly. Give --ranks {self.num_nodes * -(-self.num_ranks // self.num_nodes)}, or fewer nodes"
            )

        if self.num_ranks % self.num_replicas:
            enough = self.num_replicas * -(-self.num_ranks // self.num_replicas)
            raise OptionError(
                f"--replicas {self.num_replicas} of --ranks {self.num_ranks} was given. Expected was a number of ranks that the"
                f" replicas divide evenly. Give --ranks {enough}, or fewer replicas"
            )

    @property
    def ranks_of_node(self) -> int:
        """How many share a host."""
        return self.num_ranks // self.num_nodes

    @property
    def ranks_of_replica(self) -> int:
        """How many hold shards of one copy of the model."""
        return self.num_ranks // self.num_replicas

    def machine_of(self, machine: Machine, spec: DeviceSpec | None) -> Machine:
        """A rank's part of a machine. The net is that of the data sheet, else that of the machine.

        Raises:
            OptionError: a measured machine does not say how fast its ranks' links are.
        """
        if self.num_ranks == 1:
            return machine
        if spec is None and not machine.net_bytes_per_s:
            raise OptionError(
                f"--ranks {self.num_ranks} was given with a machine file that has no rate of the link between ranks. Expected was a"
                " machine that several ranks have measured. Measure it by `torchrun --nproc-per-node N -m autohete_fx doctor"
                " --save FILE`, or name a --device"
            )
        inside, latency_s = machine.net_bytes_per_s, machine.net_latency_s
        if spec is not None:
            inside, latency_s = net_of_spec(spec).reached_gb_per_s * 1e9, NET_LATENCY_S
        of_rank = machine_of_rank(
            machine,
            ranks_of_node=self.ranks_of_node,
            net_bytes_per_s=self.crossing(inside),
            net_latency_s=latency_s,
        )
        return of_rank if self.num_replicas == 1 else replace(of_rank, replica_net_bytes_per_s=self.between(inside))

    def crossing(self, inside_bytes_per_s: float) -> float:
        """Bytes a second that one rank sends while all of them gather.

        It is the rate within a node where the ranks of a replica are on one. Else it is what the adapters of its node let
        through together.
        """
        through = self.node_bytes_per_s * self.ranks_of_node
        stays = self.ranks_of_node % self.ranks_of_replica == 0
        return inside_bytes_per_s if stays else min(inside_bytes_per_s, through)

    def between(self, inside_bytes_per_s: float) -> float:
        """Bytes a second that one rank sends while all of them average over replicas. The rings of as many shards as a node has
        cross it at once, and share its adapters."""
        rings = min(self.ranks_of_replica, self.ranks_of_node)
        through = self.node_bytes_per_s * self.ranks_of_node / rings
        return inside_bytes_per_s if self.num_nodes == 1 else min(inside_bytes_per_s, through)
