"""Calls of one compiled graph by the ranks that hold its model: all of them have to run the same graph at a time.

In: the ranks, and what the graph is. Out: a context around each call. Collectives are paired by their order alone. Where one rank
evaluates while the others train, or has a batch of another size, each would take what others meant for another graph. No error
would tell where sizes agree. A message to all ranks goes beside each forward, and is read when that has ended. A rank
that finds another graph raises, and writes so where those look that wait for a collective which is not coming.

A rank that compiles sends one, too, before anything else: the others may run what they have compiled before. A rank whose optimizer
steps sends one as well, for gradients are averaged by the order of its parameters.

Code that raises on one rank leaves collectives half done. The others are told why at once. This rank's next forward begins when all
have failed alike, as they may go on then; else it raises, before its collectives meet those.

The message carries small numbers of each rank beside, such as what it saw of steps, and all get the largest of them.
"""

import contextlib
import hashlib
import queue
import threading
import weakref
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future

import torch
import torch.distributed as dist

from autohete_fx.errors import CollectiveError, ShardError
from autohete_fx.runtime.lanes.failures import raise_known, tell_end, tell_refusal
from autohete_fx.runtime.lanes.net import all_reduce
from autohete_fx.runtime.lanes.positions import collectives_of_all, note_backward, note_forward, position_of
from autohete_fx.runtime.pending.fence import tensors_in
from autohete_fx.runtime.shard.parts import part_of
from autohete_fx.runtime.shard.ranks import Ranks, ranks_by_digest

_NUM_TOLD = 3
_COMPILES = 1
"""The number that stands for no graph yet. No digest of a graph is likely to be as small."""


def check_all_compile(ranks: Ranks, sizes: Sequence[tuple[int, ...]]) -> None:
    """Wait until all ranks compile.

    Args:
        sizes: of the inputs, for an error.

    Raises:
        ShardError: another rank runs a graph meanwhile.
        CollectiveError: another rank is not there.
    """
    if ranks.total == 1:
        return
    largest = _messages.send((_COMPILES, -_COMPILES, *(0,) * _NUM_TOLD), ranks).result()
    if _is_same(largest):
        return
    _raise_failed(largest, ranks.control)
    error = ShardError(
        f"a rank compiles a graph for inputs of sizes {list(sizes)}, and another runs one that it has, or steps an optimizer."
        " Expected was that all ranks compile in the same step. A graph is compiled for new sizes, and where inputs or parameters"
        " need gradients that did not before. Give all ranks batches of the same sizes, and change the model on all of them"
    )
    tell_refusal(error, ranks.control)
    raise error


def check_all_step(ranks: Ranks, updated: Sequence[tuple[int, bool]]) -> None:
    """Wait until all ranks step.

    Args:
        updated: by parameter of the optimizer, in its order, its number and whether it has a gradient. That is of those whose
            gradient all ranks have, or none.

    Raises:
        ShardError: another rank steps others, or without these gradients, or runs or compiles a graph meanwhile.
        CollectiveError: another rank is not there.
    """
    if ranks.total == 1:
        return
    number = _number(f"step {list(updated)} after {collectives_of_all(ranks.control)} collectives")
    largest = _messages.send((number, -number, *(0,) * _NUM_TOLD), ranks).result()
    if _is_same(largest):
        return
    _raise_failed(largest, ranks.control)
    error = ShardError(
        f"optimizer.step() began on this rank, of an optimizer of {len(updated)} parameters that ranks hold together. Another rank"
        " steps an optimizer of others, or in another order. It may also have left out a backward, have gradients set to None, or"
        " run a forward meanwhile. Expected were the same steps in the same order on all ranks. Step several optimizers in one"
        " order, and leave a backward, its gradients or a step out on all ranks or on none"
    )
    tell_refusal(error, ranks.control)
    raise error


_FAILED = 1 << 60
"""Added to the number of a graph by a rank whose last forward or backward raised."""
_MANY = 1_000_003
_ended: "weakref.WeakSet[dist.ProcessGroup]" = weakref.WeakSet()
"""Those whose other ranks were told that this one runs no more."""
_failures: "weakref.WeakKeyDictionary[dist.ProcessGroup, tuple[str, bool]]" = weakref.WeakKeyDictionary()
"""By the ranks' group for values, how that ended here, and whether it was a collective that failed."""


class SameCall:
    """Sees that all ranks run a graph at a time.

    Args:
        digest: of the ranks that have compiled it. Compiled code must not keep their process groups.
        graph: what it is: a text that is the same on all of them, and another for another graph.
        kind: of graph, in an error's words.
    """

    def __init__(self, digest: str, graph: str, kind: str) -> None:
        self._digest, self._kind = digest, kind
        self._number = _number(graph)

    @contextlib.contextmanager
    def checked(
        self, inputs: Sequence[object], told: Sequence[int], hear: Callable[[Sequence[int]], object]
    ) -> Iterator[None]:
        """Around a forward with these inputs.

        Args:
            told: three numbers of this rank.
            hear: gets the largest of each when the forward has ended.

        Raises:
            ShardError: another rank ran another graph meanwhile, or has failed. The forward has ended by then. Also before it where
                the forward or backward before failed on this rank.
        """
        tensors = list(tensors_in(inputs))
        sizes = [tuple(t.shape) for t in tensors if not isinstance(t, torch.nn.Parameter)]
        # Models that are alike may have one graph, but not one parameter.
        number = self._number + next((part.number for t in tensors if (part := part_of(t)) is not None), 0)
        assert len(told) == _NUM_TOLD, "a rank that compiles sends as many"
        del tensors  # the code may release them
        ranks = ranks_by_digest(self._digest)
        failure, is_broken = _failures.get(ranks.control, ("", False))
        if is_broken:
            error = _unpaired(failure)
            if ranks.control not in _ended:
                _ended.add(ranks.control)
                tell_end(error, ranks.control)
            raise error
        if failure:
            number = _FAILED + (number + position_of(ranks.control).collectives * _MANY) % _FAILED
        note_forward(ranks.control)
        control, largest = ranks.control, _messages.send((number, -number, *told), ranks)
        del ranks
        if failure:
            try:
                if not _is_same(largest.result()):
                    raise _unpaired(failure)
            except CollectiveError as error:
                raise _unpaired(failure) from error
            del _failures[control]
        try:
            yield
        except Exception as error:
            if largest.done() and largest.exception() is None and not _is_same(largest.result()):
                raise self._refusal(
                    sizes, largest.result(), control
                ) from error  # collectives of different sizes are why
            raise
        if not _is_same(largest.result()):
            raise self._refusal(sizes, largest.result(), control)
        hear(largest.result()[2:])

    def note_backward(self) -> None:
        """The graph's backward begins."""
        note_backward(ranks_by_digest(self._digest).control)

    def note_failure(self, error: BaseException) -> None:
        """The code of a forward or backward has raised: the others, which may wait for its collectives, are told why."""
        ranks = ranks_by_digest(self._digest)
        control, is_collective = ranks.control, isinstance(error, CollectiveError)
        words = error.reason if isinstance(error, CollectiveError) else error
        # Under tensor parallelism graphs run collectives of their own.
        is_counted = position_of(control).collectives and ranks.tensor_parallel is None
        _failures[control] = f"{type(error).__name__}: {words}", is_collective or not is_counted
        if isinstance(error, Exception) and not is_collective:
            tell_refusal(error, control)

    def _refusal(self, sizes: list[tuple[int, ...]], largest: Sequence[int], among: dist.ProcessGroup) -> ShardError:
        _raise_failed(largest, among)
        elsewhere = "one that is to be compiled" if -largest[1] == _COMPILES else "another"
        error = ShardError(
            f"ranks that hold a model ran different graphs of it at a time: here {self._kind} of inputs of sizes {sizes}, elsewhere"
            f" {elsewhere}. Expected was the same on all ranks, whose collectives are of one graph. Give all of them as many"
            " batches, of the same sizes, and let all of them train, evaluate or step at a time; text is generated with"
            " synced_gpus=True"
        )
        tell_refusal(error, among)
        return error


def _number(what: str) -> int:
    """A number that is the same on all ranks for the same text."""
    return int.from_bytes(hashlib.sha256(what.encode()).digest()[:7], "big")


def _raise_failed(largest: Sequence[int], among: dist.ProcessGroup) -> None:
    """Raise CollectiveError where another rank's forward or backward has failed, and it has told why."""
    if largest[0] >= _FAILED:
        raise_known(among)


def _unpaired(failure: str) -> ShardError:
    return ShardError(
        f"the forward or backward before failed on this rank, with {failure}. Expected was that all ranks run the same graphs to"
        " their ends: collectives of the others wait for those that this one left out. Start all ranks again"
    )


class _Messages:
    """A thread of its own that sends them, one after another; the interpreter does not wait for it when it ends.

    PyTorch keeps the stack of whoever starts a collective, for its flight recorder, and with it the code of each function there.
    Code that Dynamo made would not die then, nor would the model.
    """

    def __init__(self) -> None:
        self._waiting: queue.SimpleQueue[tuple[Future[list[int]], Sequence[int], Ranks]] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None

    def send(self, numbers: Sequence[int], ranks: Ranks) -> "Future[list[int]]":
        """The largest of each number that any rank has sent, once all have."""
        if self._thread is None:
            self._thread = threading.Thread(target=self._serve, name="autohete-calls", daemon=True)
            self._thread.start()
        found: Future[list[int]] = Future()
        self._waiting.put((found, numbers, ranks))
        return found

    def _serve(self) -> None:
        while True:
            found, numbers, ranks = self._waiting.get()
            try:
                found.set_result(_largest(numbers, ranks))
            except BaseException as error:
                found.set_exception(error)
            del found, ranks  # the groups are not to live until the next message


_messages = _Messages()


def _largest(numbers: Sequence[int], ranks: Ranks) -> list[int]:
    found = torch.tensor(numbers, device="cpu")
    all_reduce(found, ranks.calls, dist.ReduceOp.MAX, among=ranks.control)
    return found.tolist()


def _is_same(largest: Sequence[int]) -> bool:
    """Whether all ranks sent the same graph's number, by the largest of it and of its negative."""
    return largest[0] == -largest[1]
