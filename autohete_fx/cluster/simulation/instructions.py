"""The order in which a stage of a pipeline works: forward and backward passes, sends and receives.

Enter a place, a depth, a number of micro-batches and a schedule; leave `Instruction`s, which `events` carries out.
"""

import enum
import functools
from collections.abc import Iterator
from dataclasses import dataclass

from autohete_fx.cluster.memory import in_flight
from autohete_fx.cluster.plan import PipelineSchedule


class Kind(enum.Enum):
    FORWARD = "forward"
    BACKWARD = "backward"
    SEND = "send"
    RECEIVE = "receive"


@dataclass(frozen=True, slots=True)
class Instruction:
    """``ahead``: of a message, towards later stages; ``micro_batch``: its index."""

    kind: Kind
    micro_batch: int
    ahead: bool = True


@functools.lru_cache(maxsize=1024)
def instructions(place: int, depth: int, micro_batches: int, schedule: PipelineSchedule) -> tuple[Instruction, ...]:
    """All that the stage at ``place`` of ``depth`` does in a step, in order.

    Sends and receives of neighbours stand in the same order in both, so that blocking ones always meet. Towards the previous
    stage, the activation is received before the last gradient is sent. Towards the next one, the activation is sent before the
    gradient is received.
    """
    return tuple(_in_order(place, depth, micro_batches, schedule))


def _in_order(place: int, depth: int, micro_batches: int, schedule: PipelineSchedule) -> Iterator[Instruction]:
    warm = in_flight(place, depth, micro_batches, schedule)
    first, last = place == 0, place == depth - 1
    order: list[tuple[bool, int]] = [(True, index) for index in range(warm)]
    for index in range(micro_batches):
        order.append((False, index))
        if warm + index < micro_batches:
            order.append((True, warm + index))
    unsent: int | None = None
    for forward, index in order:
        if forward:
            if not first:
                yield Instruction(Kind.RECEIVE, index)
                if unsent is not None:
                    yield Instruction(Kind.SEND, unsent, ahead=False)
            unsent = None
            yield Instruction(Kind.FORWARD, index)
            if not last:
                yield Instruction(Kind.SEND, index)
        else:
            if not first and unsent is not None:
                yield Instruction(Kind.SEND, unsent, ahead=False)
            if not last:
                yield Instruction(Kind.RECEIVE, index, ahead=False)
            yield Instruction(Kind.BACKWARD, index)
            unsent = index
    if not first and unsent is not None:
        yield Instruction(Kind.SEND, unsent, ahead=False)
