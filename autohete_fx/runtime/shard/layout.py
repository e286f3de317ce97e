"""How tensor parallelism lays a tensor out over its ranks, as `DTensor` says it.

In: a DTensor. Out: its `Layout`, by which tensors of this rank are made DTensors that lie alike, and wholes are cut.
"""

from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Placement, distribute_tensor

from autohete_fx.internals.tensors import local_of
from autohete_fx.runtime.lanes.failures import named_failures


@dataclass(frozen=True, slots=True)
class Layout:
    """A value, equal for tensors that lie alike.

    Attributes:
        mesh: the ranks that have parts or copies of the tensor.
        placements: for each dimension of the mesh.
        size, stride: of the whole.
    """

    mesh: DeviceMesh
    placements: tuple[Placement, ...]
    size: tuple[int, ...]
    stride: tuple[int, ...]

    @classmethod
    def of(cls, tensor: DTensor) -> "Layout":
        """That of a tensor."""
        return cls(tensor.device_mesh, tuple(tensor.placements), tuple(tensor.shape), tuple(tensor.stride()))

    @property
    def groups(self) -> tuple[dist.ProcessGroup, ...]:
        """The process groups over which parts differ: all that the mesh replicates it over is left out."""
        groups = (self.mesh.get_group(dim) for dim in range(self.mesh.ndim))
        return tuple(group for group, place in zip(groups, self.placements, strict=True) if not place.is_replicate())

    def to_dtensor(self, local: Tensor) -> DTensor:
        """The whole that a tensor of this rank is a part of. It refers to the tensor's memory."""
        return DTensor.from_local(
            local, self.mesh, self.placements, run_check=False, shape=torch.Size(self.size), stride=self.stride
        )

    def to_local(self, value: Tensor) -> Tensor:
        """This rank's part of a whole tensor. All ranks call it where the value is a DTensor."""
        if not isinstance(value, DTensor):
            value = distribute_tensor(value, self.mesh, self.placements, src_data_rank=None)
        elif value.device_mesh != self.mesh or tuple(value.placements) != self.placements:
            with named_failures(None):
                value = value.full_tensor()
            value = distribute_tensor(value, self.mesh, self.placements, src_data_rank=None)
        return local_of(value)
