"""Modules whose parameters are parts of DTensors, in a process that is a rank of a fake group."""

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate
from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module

import autohete_fx
from autohete_fx.errors import OptimizerStateError, ShardError
from autohete_fx.internals.fake_group import fake_default_group
from autohete_fx.internals.groups import mesh_of
from autohete_fx.runtime.shard.imagined import imagined_mesh
from autohete_fx.runtime.shard.layout import Layout
from autohete_fx.runtime.shard.parts import Part
from autohete_fx.runtime.shard.ranks import ranks_of
from autohete_fx.runtime.shard.surface import read_wholes


def test_what_a_module_reads_lies_over_its_own_mesh_though_an_equal_one_was_there_before():
    """As where a job goes on with another plan in one process: the groups of the old mesh may be gone."""
    with fake_default_group(2):
        along = ranks_of(DeviceMesh("cpu", [0]))
        for _ in range(2):
            mesh = DeviceMesh.from_group(dist.new_group([0, 1]), "cpu", mesh_dim_names=("tp",))
            layer = nn.Linear(2, 2, bias=False)
            layout = Layout(mesh, (Replicate(),), (2, 2), (2, 1))
            read_wholes(layer, [(layer.weight, Part(size=(2, 2), group=along.digest, is_shard=False, layout=layout))])
            whole: torch.Tensor = layer.weight
            assert isinstance(whole, DTensor) and whole.device_mesh is mesh


def test_results_of_operators_lie_over_the_mesh_of_what_they_read():
    """Not over that of an earlier job, whose results PyTorch keeps, in the same world or in one that is gone."""
    for _ in range(2):
        with fake_default_group(2):
            for _ in range(2):
                group: Any = dist.new_group([0, 1])
                mesh = mesh_of({"tp": group}, "cpu")
                read = DTensor.from_local(torch.ones(2), mesh, [Replicate()], run_check=False)
                made = read.detach()
                assert isinstance(made, DTensor) and made.device_mesh is mesh
                assert mesh_of({"tp": group}, "cpu") == mesh


def test_a_mesh_that_pytorch_takes_for_one_whose_groups_are_gone_is_refused_and_one_of_another_name_is_not():
    def weight(*names: str) -> DTensor:
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=names)[names[-1]]
        placed = parallelize_module(nn.Linear(4, 4), mesh, ColwiseParallel()).weight
        assert isinstance(placed, DTensor)
        return placed

    with fake_default_group(4):
        ranks = ranks_of(weight("dp", "tp").device_mesh)
        assert ranks_of(weight("dp", "tp").device_mesh) is ranks
        dist.destroy_process_group(ranks.group)
        with pytest.raises(ShardError, match=r"group is not there: .*give the new one other names"):
            ranks_of(weight("dp", "tp").device_mesh)
        assert ranks_of(weight("dp_2", "tp_2").device_mesh).group is not ranks.group


def test_an_attribute_is_refused_where_training_takes_a_parameter():
    with imagined_mesh(2) as mesh:
        model = autohete_fx.shard(nn.Sequential(nn.Linear(256, 256)), mesh)
        attribute, itself = model[0].weight, dict(model.named_parameters())["0.weight"]
        for made in (autohete_fx.AdamW, autohete_fx.SGD):
            with pytest.raises(
                OptimizerStateError, match=r"shape \(256, 256\) was given, as an attribute of a sharded module"
            ):
                made([attribute])
            made([itself])
        for ask in (lambda: attribute.grad, lambda: attribute.requires_grad_(False)):
            with pytest.raises(
                ShardError, match=r"called (grad|requires_grad_) with .* from model.named_parameters\(\)"
            ):
                ask()
        for name, ask in {
            "norm": attribute.norm,
            "add": lambda: torch.add(attribute, 1),
            "data": lambda: attribute.data,
        }.items():
            with pytest.raises(ShardError, match=f"called {name} with .* within autohete_fx.gathered"):
                ask()


@pytest.mark.parametrize("loss_scale", [1.0, 1024.0])
def test_a_grad_scaler_is_refused_unless_it_scales_nothing(loss_scale: float):
    with imagined_mesh(2) as mesh:
        model = autohete_fx.shard(nn.Linear(128, 128), mesh)
        for optimizer in (autohete_fx.AdamW(model.parameters()), torch.optim.SGD(model.parameters(), fused=True)):
            scaler = torch.amp.GradScaler("cpu", init_scale=loss_scale)
            scaler.scale(torch.ones(()))
            for call in (scaler.unscale_, scaler.step):
                with pytest.raises(
                    ShardError, match="a GradScaler got an optimizer of 2 parameters that ranks hold together"
                ):
                    call(optimizer)
        alone = nn.Linear(4, 4)
        alone(torch.ones(4)).sum().backward()
        scaler.step(torch.optim.SGD(alone.parameters()))


def test_wrappers_that_average_or_divide_are_refused_around_a_sharded_model_and_within_one():
    with imagined_mesh(2) as mesh:
        model = autohete_fx.shard(nn.Linear(128, 128), mesh)
        values = model._parameters["weight"].detach().clone()
        with pytest.raises(
            ShardError, match="DistributedDataParallel got a model of which ranks hold 2 parameters together"
        ):
            nn.parallel.DistributedDataParallel(model)
        assert torch.equal(model._parameters["weight"], values)
        with pytest.raises(AttributeError, match=r"has no '_local_tensor'.* such as fully_shard"):
            print(model.weight._local_tensor)
    with fake_default_group(2):
        divided = nn.Sequential(nn.Linear(128, 128))
        fully_shard(divided[0], mesh=init_device_mesh("cpu", (2,)))
        averaged = nn.Sequential(nn.parallel.DistributedDataParallel(nn.Linear(128, 128)))
        for wrapped, kind in ((divided, "fully_shard"), (averaged, "DistributedDataParallel")):
            with pytest.raises(
                ShardError, match=f"the module 0 is one of {kind}. .* give it the model as it was before"
            ):
                autohete_fx.shard(wrapped, init_device_mesh("cpu", (2,)))


def test_a_mesh_whose_order_its_process_group_has_not_is_told_so():
    with fake_default_group(2), pytest.raises(ShardError, match=r"order \[1, 0\], .* in the order \[0, 1\]"):
        autohete_fx.shard(nn.Linear(128, 128), DeviceMesh("cpu", [1, 0]))
