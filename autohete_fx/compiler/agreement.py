"""The agreement of ranks that hold a model together while they compile it.

In: what one rank has measured, looked up or decided. Out: one value for all of them, so that each writes the same collectives
into its graphs in the same order. Ranks take the same way through a compilation because all that it turns on is exchanged here.
That is the least budget, the slowest machine, the link that all measure together, and the longest seconds. It is also what caches
have on all of them, and the first rank's plan. A rank that compiles something else, or fails, is named by the
others' errors: each exchange says what it is about.

Exchanges have a process group of their own, so that they never wait for a collective of a graph.
"""

import contextlib
import dataclasses
import hashlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, TypeVar

import torch

from autohete_fx import errors
from autohete_fx.capture.inputs import GraphInput
from autohete_fx.compiler.compilation import Compilation
from autohete_fx.errors import AutoHeteError, CollectiveError, ShardError
from autohete_fx.ir import BlockCost, Lane, Machine, Profile
from autohete_fx.ir.machine import slowest_machine
from autohete_fx.machine.net import load_or_measure_net
from autohete_fx.runtime.shard.ranks import Ranks
from autohete_fx.runtime.shard.same_call import SameCall, check_all_compile
from autohete_fx.runtime.shard.tensor_parallel import dtensor_of, ranks_of_graph

_Value = TypeVar("_Value")
_FAILED = "failure"


class Agreement:
    """That of one compilation. With parameters that no other rank has a part of, each value is its own.

    Args:
        params: of the graph.
    """

    def __init__(self, params: Iterable[torch.Tensor]) -> None:
        params = list(params)
        self._ranks: Ranks | None = ranks_of_graph(params)
        is_with_shards = self._ranks is not None and self._ranks.tensor_parallel is not None
        self._is_tensor_parallel = is_with_shards or any(dtensor_of(param) is not None for param in params)
        self._is_over = self._is_settled = False

    @property
    def rank_of_code(self) -> int | None:
        """This rank, where the ranks' graphs differ in sizes and constants though they are of one model; None where they do not."""
        return self._ranks.number if self._ranks is not None and self._is_tensor_parallel else None

    @property
    def is_shared(self) -> bool:
        """Whether other ranks compile the same graph."""
        return self._ranks is not None

    @property
    def num_on_host(self) -> int:
        """How many ranks that compile the same graph share this one's host."""
        return 1 if self._ranks is None else self._ranks.num_on_host

    def exchange(self, what: str, value: _Value) -> list[_Value]:
        """The values of all ranks, in their order.

        Raises:
            ShardError: another rank is elsewhere, or has failed, or does not answer in the time that its process group allows.
        """
        if self._ranks is None or self._is_settled:
            return [value]
        try:
            everywhere = self._ranks.exchange((what, value))
        except CollectiveError as error:
            self._is_over = True
            raise _unanswered(what, error) from error
        topics = [topic for topic, _ in everywhere]
        if len(set(topics)) > 1:
            self._is_over = True
            failed = [
                f"rank {rank} failed: {found}" for rank, (topic, found) in enumerate(everywhere) if topic == _FAILED
            ]
            places = [f"rank {rank} {topic}" for rank, topic in enumerate(topics)]
            raise ShardError(
                f"ranks that compile one model went different ways: {'; '.join(failed or places)}. Expected was the same on all"
                " ranks. Correct what differs, and start all of them again"
            )
        return [found for _, found in everywhere]

    def same(self, what: str, values: Mapping[str, object]) -> None:
        """Raise ShardError on all ranks where one has other values."""
        everywhere = self.exchange(what, values)
        differing = next((name for name in values if any(other[name] != values[name] for other in everywhere)), None)
        if differing is not None:
            self._is_over = True
            found = "; ".join(f"{other[differing]} on rank {rank}" for rank, other in enumerate(everywhere))
            raise ShardError(
                f"ranks that compile one model differ in the {what}: {differing} is {found}. Expected was the same on all ranks."
                " Give all of them the same model, inputs, options and versions"
            )

    def least(self, what: str, value: int | None) -> int | None:
        """The smallest; None counts as no limit."""
        return min((found for found in self.exchange(what, value) if found is not None), default=None)

    def share_of_host(self, num_bytes: int | None) -> int | None:
        """An even part of what a host has, for each of the ranks that run on it."""
        return None if num_bytes is None else num_bytes // self.num_on_host

    def by_turns(self, what: str, make: Callable[[], _Value]) -> _Value:
        """The result of this rank, which uses its host while the others there wait for their turns."""
        if self._ranks is None:
            return make()
        hosts, number, made = self._ranks.hosts, self._ranks.number, list[_Value]()
        mine = hosts[:number].count(hosts[number])
        for turn in range(max(map(hosts.count, hosts))):
            made += [make()] if turn == mine else []
            self.exchange(f"{what}, turn {turn}", None)
        return made[0]

    def most(self, what: str, value: int) -> int:
        """The largest."""
        return max(self.exchange(what, value))

    def common(self, what: str, text: str | None) -> str | None:
        """A text that all ranks have; None where one has another, or none."""
        digest = None if text is None else hashlib.sha256(text.encode()).hexdigest()
        return text if len(set(self.exchange(what, digest))) == 1 else None

    def machine(self, machine: Machine, device: torch.device) -> Machine:
        """The slowest of all ranks' in each figure, with the rate of the link between them, which all measure together."""
        slowest = slowest_machine(self.exchange("machine", machine))
        lacks = self._ranks is not None and self._ranks.num_replicas > 1 and not slowest.replica_net_bytes_per_s
        if self._ranks is None or (slowest.net_bytes_per_s and not lacks):
            return slowest
        return load_or_measure_net(slowest, self._ranks, device, self.exchange)

    def slowest(self, profile: Profile) -> Profile:
        """The costs with the longest seconds and the largest workspaces of all ranks."""
        everywhere = self.exchange("profile", profile)
        if len({len(other.costs) for other in everywhere}) > 1:
            raise AssertionError("the same graph has the same blocks")
        costs = tuple(_slowest(same) for same in zip(*(other.costs for other in everywhere), strict=True))
        return dataclasses.replace(profile, costs=costs)

    def described(self, compilation: Compilation) -> str:
        """The part of a compilation that all ranks must have alike: the graphs, or of tensor parallelism their collectives.

        There each rank's graphs have sizes and constants of its own, such as where its rows of an embedding begin.
        """
        if not self._is_tensor_parallel:
            return repr(compilation.graphs)
        moved = (each for each in compilation.transfers if each.lane is Lane.NET)
        return repr([(each.graph, each.op, each.block, each.num_bytes) for each in moved])

    def same_call(self, graphs: str, *, training: bool) -> SameCall | None:
        """The check that all ranks run graphs of that text at a time; None where no other rank runs any."""
        if self._ranks is None or self._ranks.total == 1:
            return None
        number = next(self._ranks.numbers)  # graphs of layers that are alike have one text
        return SameCall(self._ranks.digest, f"{number} {training} {graphs}", "training" if training else "evaluation")

    def first(self, what: str, make: Callable[[], _Value]) -> _Value:
        """The result of the first rank, which alone makes it. Raises what it raises there, on all ranks."""
        if self._ranks is None or self._is_settled:
            return make()
        made: Any = None
        if self._ranks.number == 0:
            try:
                made = make()
            except AutoHeteError as error:
                made = _Raised(type(error).__name__, str(error), dict(vars(error)))
        made = self.exchange(what, made)[0]
        if isinstance(made, _Raised):
            raise made.error()
        return made

    @contextlib.contextmanager
    def settled(self, is_settled: bool) -> Iterator[None]:
        """Around what not all ranks may do, because the caches of some have its result.

        Where all of them have the same plan from an earlier compilation, nothing is exchanged, and each value is its own.
        """
        self._is_settled = is_settled
        try:
            yield
        finally:
            self._is_settled = False

    @contextlib.contextmanager
    def announced(self, inputs: Sequence[GraphInput]) -> Iterator[None]:
        """Around a compilation of a graph with these inputs: all ranks compile, or none does.

        Where this rank fails, the others learn it at their next exchange. The last one is at the end.
        """
        self._begin(inputs)
        try:
            yield
            self.exchange("end", None)
        except BaseException as error:
            if self._ranks is not None and not self._is_over:
                self._is_over = True
                with contextlib.suppress(ShardError):  # where none of them listens: what is wrong here counts
                    self._ranks.exchange((_FAILED, f"{type(error).__name__}: {error}"))
            raise

    def _begin(self, inputs: Sequence[GraphInput]) -> None:
        if self._ranks is None:
            return
        given = (item.tensor for item in inputs if item.tensor is not None and not item.is_parameter)
        try:
            check_all_compile(self._ranks, [tuple(tensor.shape) for tensor in given])
        except CollectiveError as error:
            raise _unanswered("graph", error) from error


def _unanswered(what: str, error: CollectiveError) -> ShardError:
    return ShardError(
        f"a rank that compiles got no answer from the others about the {what}: {error.reason}. Expected was that all ranks compile"
        " in the same step. Give all of them inputs of the same sizes, and let all of them train and evaluate"
    )


@dataclasses.dataclass(frozen=True, slots=True)
class _Raised:
    """An error of the first rank's, on its way to the others."""

    kind: str
    message: str
    fields: dict[str, Any]

    def error(self) -> AutoHeteError:
        kind = getattr(errors, self.kind, AutoHeteError)
        found = kind.__new__(kind)
        Exception.__init__(found, self.message)
        found.__dict__.update(self.fields)
        return found


def _slowest(costs: tuple[BlockCost, ...]) -> BlockCost:
    def most(name: str) -> Any:
        return max(getattr(cost, name) for cost in costs)

    names = ("forward_s", "backward_s", "recompute_s", "forward_workspace_bytes", "backward_workspace_bytes")
    again_s = [{kind: part.recompute_s for kind, part in cost.partial} for cost in costs]
    partial = tuple(
        (kind, dataclasses.replace(part, recompute_s=max(each.get(kind, 0.0) for each in again_s)))
        for kind, part in costs[0].partial
    )
    return dataclasses.replace(costs[0], partial=partial, **{name: most(name) for name in names})
