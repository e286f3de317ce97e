"""``gathered(model)``: eager code on all ranks sees whole parameters, and what it writes goes back to the shards.

In: a sharded model. Within: modules hold whole parameters in the place of shards; ``model.parameters()`` has the whole ones, an
optimizer keeps the shards. Out: each rank's rows of what the whole ones have become. Ranks may have written different values, as
random initialisation does; those of the first rank count then. One that another rank alone has written is an error, not a lost
write.

All wholes of what is given are there at once. Memory for them is taken first, and ranks agree that each has it. In a gather, a
rank that has none would leave the others waiting.
"""

import contextlib
import hashlib
from collections.abc import Iterator, Sequence

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from autohete_fx.errors import ShardError
from autohete_fx.graph.collectives import gather, result_of
from autohete_fx.internals.tensors import local_of
from autohete_fx.ir.sizes import format_bytes
from autohete_fx.runtime.shard.kernels import gather_into
from autohete_fx.runtime.shard.parts import Part, part_of
from autohete_fx.runtime.shard.ranks import Ranks
from autohete_fx.runtime.shard.surface import WHOLE
from autohete_fx.runtime.wholes import note_change


class _Whole:
    """One parameter within the context: what ranks hold of it, its name, and what stands in its place."""

    def __init__(self, name: str, held: nn.Parameter, part: Part) -> None:
        self.name = name
        self.held = held
        self.part = part
        self.param = held
        self.before = ""
        self._memory: Tensor | None = None

    @property
    def num_bytes(self) -> int:
        """Memory that it takes beside the shard."""
        count = self.part.ranks.count if self.part.is_shard else 1
        return count * self.held.nbytes if self.part.is_dtensor else 0

    def take_memory(self) -> None:
        """Take memory for the whole. It is there until the context ends."""
        if self.part.is_shard:
            self._memory = result_of(gather, self.held.detach(), self.part.ranks.count)
        elif self.part.is_dtensor:
            self._memory = torch.empty_like(self.held)

    def fill(self) -> None:
        """Gather. All ranks do it, which then have the same."""
        memory, self._memory = self._memory, None
        if memory is not None:
            with torch.no_grad():
                if self.part.is_shard:
                    gather_into(memory, self.held.detach(), self.part.group)
                    memory = memory[: self.part.size[0]]
                else:
                    memory.copy_(self.held)
                whole: Tensor = memory if self.part.layout is None else self.part.layout.to_dtensor(memory)
                self.param = nn.Parameter(whole, requires_grad=self.held.requires_grad)
        self.before = _digest(self.param)

    @property
    def local(self) -> Tensor:
        """The tensor that this rank holds with its peers."""
        return _local(self.param)

    @property
    def is_of_all(self) -> bool:
        """Whether all ranks have the same whole, and not each of tensor parallelism's a part."""
        return self.part.layout is None or not self.part.layout.groups

    def bring_back(self) -> None:
        """Write this rank's rows."""
        if self.part.is_dtensor:
            with torch.no_grad():
                self.part.unpadded(self.held).copy_(self.part.own(self.local))


@contextlib.contextmanager
def gathered(model: nn.Module) -> Iterator[nn.Module]:
    """Let eager code see and write whole parameters. All ranks enter and leave it together.

    Functions that are compiled run eagerly within. A rank that compiled alone would know other sizes than the others afterwards.

    Args:
        model: that is sharded, or a part of one: its parameters are whole on the device at once.

    Raises:
        ShardError: the model is not sharded, a backward ran within, or a parameter was replaced by one of another size. Also
            where a rank has no room, wrote other values than the first one, or raised an error. Shards are as they were before.
    """
    found: dict[int, _Whole] = {}
    places: list[tuple[nn.Module, str, _Whole]] = []
    for path, module in model.named_modules():
        for name, param in module._parameters.items():
            part = None if param is None else part_of(param)
            if param is None or part is None:
                continue
            if id(param) not in found:
                found[id(param)] = _Whole(f"{path}.{name}" if path else name, param, part)
            places.append((module, name, found[id(param)]))
    if not found:
        raise ShardError(
            f"the {type(model).__name__} given to gathered has no parameter that ranks hold together. Expected was a model that"
            " autohete_fx.shard has returned, or a part of one, and not within gathered. Shard it first"
        )
    wholes = list(found.values())
    ranks = wholes[0].part.ranks
    _take_memory(model, wholes, ranks)
    for whole in wholes:
        whole.fill()
    _exchange(places, is_whole=True)
    failure: BaseException | None = None
    try:
        with torch.compiler.set_stance("force_eager"):
            yield model
    except BaseException as error:
        failure = error
        raise
    finally:
        problem = None if failure is None else f"raised {type(failure).__name__}"
        problem = problem or _taken_over(places)
        _exchange(places, is_whole=False)
        note_change()
        _bring_back(wholes, ranks, problem, is_raising=failure is not None)


def _take_memory(model: nn.Module, wholes: list[_Whole], ranks: Ranks) -> None:
    """Take memory for all wholes. Raises ShardError on all ranks where one has no room."""
    problem = None
    try:
        for whole in wholes:
            whole.take_memory()
    except RuntimeError as error:  # on a CPU it is not an OutOfMemoryError
        problem = str(error).splitlines()[0]
    everywhere = [problem] if ranks.total == 1 else ranks.exchange(problem)
    short = next(((rank, text) for rank, text in enumerate(everywhere) if text is not None), None)
    if short is not None:
        raise ShardError(
            f"gathered({type(model).__name__}) takes {format_bytes(sum(whole.num_bytes for whole in wholes))} for whole parameters"
            f" on each rank's device, for which rank {short[0]} has no room: {short[1]}. Expected was room for all of them at"
            " once. Gather one part after the other, as by 'with autohete_fx.gathered(model.layers[0]):', on all ranks"
        )


def _exchange(places: list[tuple[nn.Module, str, _Whole]], *, is_whole: bool) -> None:
    for module, name, whole in places:
        module._parameters[name] = whole.param if is_whole else whole.held
        if is_whole and WHOLE in vars(type(module)):
            setattr(module, WHOLE, True)
        else:
            vars(module).pop(WHOLE, None)  # as it was before, or compiled code would not know the module again


def _taken_over(places: list[tuple[nn.Module, str, _Whole]]) -> str | None:
    """Note parameters that replace others. What is wrong, if anything is."""
    replaced: dict[int, Tensor] = {}
    for module, name, whole in places:
        param = module._parameters.get(name)
        if param is None or tuple(param.shape) != whole.part.full_size or param.dtype != whole.held.dtype:
            return f"made {whole.name} a parameter of another size or dtype"
        if whole.part.is_dtensor and param.grad is not None:
            return f"ran a backward within gathered, whose gradient of {whole.name} no optimizer gets"
        if param is not whole.param and replaced.setdefault(id(whole), param) is not param:
            return f"replaced {whole.name} by different parameters, although it is tied"
    for _, _, whole in places:
        if (param := replaced.get(id(whole))) is not None:
            if whole.part.layout is not None:
                with torch.no_grad():
                    _local(whole.param).copy_(whole.part.layout.to_local(param.detach()))
            elif whole.part.is_shard:
                whole.param = nn.Parameter(param.detach(), requires_grad=False)
            else:
                whole.held.data.copy_(param.detach())
    return None


def _bring_back(wholes: list[_Whole], ranks: Ranks, problem: str | None, *, is_raising: bool) -> None:
    peers = 0 if ranks.tensor_parallel is None else dist.get_rank(ranks.tensor_parallel)
    mine: _Report = (problem, peers, [] if problem else [(whole.before, _digest(whole.param)) for whole in wholes])
    everywhere = [mine] if ranks.total == 1 else ranks.exchange(mine)
    wrong = [f"rank {rank} {text}" for rank, (text, _, _) in enumerate(everywhere) if text]
    if not wrong:
        lost = [whole.name for at, whole in enumerate(wholes) if _is_lost(everywhere, at, is_of_all=whole.is_of_all)]
        if lost:
            wrong = [f"a rank other than the first wrote {', '.join(lost[:3])}, and the first did not"]
    if wrong:
        if is_raising:
            return  # with its own error
        raise ShardError(
            f"within gathered, {'; '.join(wrong)}. Expected were the same writes on all ranks, or those of the first one, without a"
            " backward. The shards are as they were before; correct the code within gathered"
        )
    for at, whole in enumerate(wholes):
        if any(_differ(same, at) for same in _alike(everywhere, is_of_all=whole.is_of_all)):
            with torch.no_grad():
                ranks.broadcast(whole.local.data, is_of_all=whole.is_of_all)
        whole.bring_back()


_Report = tuple[str | None, int, list[tuple[str, str]]]
"""A rank's problem, its place in tensor parallelism, and for each parameter the digests of what was and what is."""


def _alike(everywhere: Sequence[_Report], *, is_of_all: bool) -> list[list[_Report]]:
    """The ranks' reports, together those of ranks that have the same of a parameter."""
    places = sorted({0 if is_of_all else place for _, place, _ in everywhere})
    return [[report for report in everywhere if is_of_all or report[1] == place] for place in places]


def _differ(same: Sequence[_Report], at: int) -> bool:
    return len({digests[at][1] for _, _, digests in same}) > 1


def _is_lost(everywhere: Sequence[_Report], at: int, *, is_of_all: bool) -> bool:
    """Whether a rank has written a parameter that the first of those with the same of it has not."""
    alike = _alike(everywhere, is_of_all=is_of_all)
    return any(_differ(same, at) and same[0][2][at][0] == same[0][2][at][1] for same in alike)


def _local(tensor: Tensor) -> Tensor:
    return local_of(tensor).detach() if isinstance(tensor, DTensor) else tensor.detach()


def _digest(tensor: Tensor) -> str:
    contents = _local(tensor).cpu().contiguous().flatten().view(torch.uint8)
    return hashlib.blake2b(contents.numpy().data, digest_size=16).hexdigest()
