"""``gathered(model)``: eager code on all ranks sees whole parameters, and what it writes goes back to the shards.

In: a sharded model. Within: modules hold whole parameters in the place of shards; ``model.parameters()`` has the whole ones, an
optimizer keeps the shards. Out: each rank's rows of what the whole ones have become. Ranks may have written different values, as
random initialisation does; those of the first rank count then. One that another rank alone has written is an error, not a lost
write.
"""

import contextlib
import hashlib
from collections.abc import Iterator

import torch
from torch import Tensor, nn

from autohete_fx.errors import ShardError
from autohete_fx.runtime.shard.parts import Part, gathered_from, part_of
from autohete_fx.runtime.shard.ranks import Ranks
from autohete_fx.runtime.shard.surface import WHOLE


class _Whole:
    """One parameter within the context: what ranks hold of it, its name, and what stands in its place."""

    def __init__(self, name: str, held: nn.Parameter, part: Part) -> None:
        self.name = name
        self.held = held
        self.part = part
        self.param = held
        if part.is_shard:
            with torch.no_grad():
                self.param = nn.Parameter(gathered_from(held, part), requires_grad=held.requires_grad)
        self.before = _digest(self.param)

    def bring_back(self) -> None:
        """Write this rank's rows."""
        if self.part.is_shard:
            with torch.no_grad():
                self.held[: self.part.num_own_rows].copy_(self.part.own(self.param.detach()))


@contextlib.contextmanager
def gathered(model: nn.Module) -> Iterator[nn.Module]:
    """Let eager code see and write whole parameters. All ranks enter and leave it together.

    Raises:
        ShardError: the model is not sharded, a backward ran within, or a parameter was replaced by one of another size. Also
            where one rank wrote other values than the first one, or raised an error. Shards are as they were before.
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
    _exchange(places, is_whole=True)
    failure: BaseException | None = None
    try:
        yield model
    except BaseException as error:
        failure = error
        raise
    finally:
        problem = None if failure is None else f"raised {type(failure).__name__}"
        problem = problem or _taken_over(places)
        _exchange(places, is_whole=False)
        _bring_back(wholes, ranks, problem, is_raising=failure is not None)


def _exchange(places: list[tuple[nn.Module, str, _Whole]], *, is_whole: bool) -> None:
    for module, name, whole in places:
        module._parameters[name] = whole.param if is_whole else whole.held
        if WHOLE in vars(type(module)):
            setattr(module, WHOLE, is_whole)


def _taken_over(places: list[tuple[nn.Module, str, _Whole]]) -> str | None:
    """Note parameters that replace others. What is wrong, if anything is."""
    replaced: dict[int, Tensor] = {}
    for module, name, whole in places:
        param = module._parameters.get(name)
        if param is None or tuple(param.shape) != whole.part.size or param.dtype != whole.held.dtype:
            return f"made {whole.name} a parameter of another size or dtype"
        if whole.part.is_shard and param.grad is not None:
            return f"ran a backward within gathered, whose gradient of {whole.name} no optimizer gets"
        if param is not whole.param and replaced.setdefault(id(whole), param) is not param:
            return f"replaced {whole.name} by different parameters, although it is tied"
    for _, _, whole in places:
        if (param := replaced.get(id(whole))) is not None:
            if whole.part.is_shard:
                whole.param = nn.Parameter(param.detach(), requires_grad=False)
            else:
                whole.held.data.copy_(param.detach())
    return None


def _bring_back(wholes: list[_Whole], ranks: Ranks, problem: str | None, *, is_raising: bool) -> None:
    if ranks.total == 1:
        everywhere = [(problem, [])]
    else:
        digests = [] if problem else [_digest(whole.param) for whole in wholes]
        everywhere = ranks.exchange((problem, digests))
    wrong = [f"rank {rank} {text}" for rank, (text, _) in enumerate(everywhere) if text]
    digests_of_first = everywhere[0][1]
    differing = [
        at for at in range(len(digests_of_first)) if len({theirs[at] for _, theirs in everywhere if theirs}) > 1
    ]
    if not wrong:
        lost = [wholes[at].name for at in differing if digests_of_first[at] == wholes[at].before]
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
        if at in differing:
            with torch.no_grad():
                ranks.broadcast(whole.param.data)
        whole.bring_back()


def _digest(tensor: Tensor) -> str:
    contents = tensor.detach().cpu().contiguous().flatten().view(torch.uint8)
    return hashlib.blake2b(contents.numpy().tobytes(), digest_size=16).hexdigest()
