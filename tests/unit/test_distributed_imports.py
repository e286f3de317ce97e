"""``torch.distributed`` is known to the few places that talk to other ranks; all others get values."""

from tests.sources import imported

ALLOWED = (
    "autohete_fx/cluster/commands/doctor.py",
    "autohete_fx/cluster/job/",
    "autohete_fx/cluster/measuring/",
    "autohete_fx/cluster/model/",
    "autohete_fx/cluster/stages/run.py",
    "autohete_fx/cluster/store/",
    "autohete_fx/compiler/agreement.py",
    "autohete_fx/internals/",
    "autohete_fx/machine/net.py",
    "autohete_fx/optim/shards.py",
    "autohete_fx/runtime/lanes/failures.py",
    "autohete_fx/runtime/lanes/net.py",
    "autohete_fx/runtime/lanes/positions.py",
    "autohete_fx/runtime/shard/",
)


def importers() -> list[str]:
    distributed = "torch.distributed"
    return sorted({path for path, name in imported() if name == distributed or name.startswith(f"{distributed}.")})


def test_few_places_import_torch_distributed():
    found = importers()
    assert "autohete_fx/runtime/shard/ranks.py" in found
    assert [path for path in found if not path.startswith(ALLOWED)] == []
