"""A machine of chosen speeds: real training steps with real tensors, on lanes that take the seconds of a plan's prediction.

In: rates of the lanes and seconds of each block. Out: what the product then plans, predicts and measures. A lane waits for
``bytes / bandwidth`` or ``parameters / rate`` seconds before it really copies or updates; the device has memory of its own,
so parameters and gradients travel as they do for an accelerator; compute is a pass that lets each block's part of a graph
last its seconds. Nobody burns a core while waiting. Real work goes on inside the waits or is so small that it hardly shows: a
collective really runs in the middle of its seconds, and adds to them where it ends later than they do.
"""

import contextlib
import dataclasses
import itertools
import threading
import time
import weakref
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any
from unittest import mock

import torch
from torch import fx
from torch.fx.node import has_side_effect

from autohete_fx import AdamW
from autohete_fx.compiler import training
from autohete_fx.ir import BlockCost, Lane, Machine, Profile
from autohete_fx.passes import PassContext, Stage
from autohete_fx.passes.sort_regions import COMPUTED, region_keys, reorder
from autohete_fx.profiler import Partition
from autohete_fx.runtime.lanes.failures import Group
from autohete_fx.runtime.lanes.lanes import Lanes
from autohete_fx.runtime.lanes.net import Start, run_collective
from autohete_fx.runtime.lanes.thread import ThreadTicket
from autohete_fx.runtime.lanes.ticket import LaneRecord, Ticket

_INSTANT = 1e15
_SLACK_S = 4e-3
_AHEAD_S = 0.5
"""How long an accelerator is busy with what it was given while its host prepares more."""

_library = torch.library.Library("emulated", "DEF")
_library.define("begin_block(str machine) -> ()")
_library.define("end_block(str machine, str phase, int block, float seconds) -> ()")
_begin_block = torch.ops.emulated.begin_block.default
_end_block = torch.ops.emulated.end_block.default
for _op in (_begin_block, _end_block):
    has_side_effect(_op)


@dataclass(frozen=True, slots=True, kw_only=True)
class Speeds:
    """Of an emulated machine.

    Attributes:
        forward_s: of a layer; what lies around the layers takes a quarter, the backward twice as long, recomputation as
            long.
        h2d_bytes_per_s, d2h_bytes_per_s, update_params_per_s: of the lanes.
        net_bytes_per_s: of each rank's link to the others, one way.
        num_ranks: how many share the model.
    """

    forward_s: float
    h2d_bytes_per_s: float
    d2h_bytes_per_s: float
    update_params_per_s: float
    net_bytes_per_s: float = 0.0
    num_ranks: int = 1

    @property
    def machine(self) -> Machine:
        """As the planner sees it: a device with memory of its own."""
        return Machine(
            device_name="emulated",
            device_type="cuda",
            device_bytes=1 << 40,
            host_bytes=1 << 40,
            disk_bytes=0,
            device_flops_per_s=(("float32", _INSTANT),),
            device_bytes_per_s=_INSTANT,
            h2d_bytes_per_s=self.h2d_bytes_per_s,
            d2h_bytes_per_s=self.d2h_bytes_per_s,
            disk_bytes_per_s=0.0,
            device_update_params_per_s=_INSTANT,
            host_update_params_per_s=self.update_params_per_s,
            latency_s=0.0,
            net_bytes_per_s=self.net_bytes_per_s,
        )

    def timed(self, costs: Sequence[BlockCost]) -> tuple[BlockCost, ...]:
        """Costs with real bytes and these seconds."""
        last = len(costs) - 1
        timed = []
        for block, cost in enumerate(costs):
            forward_s = self.forward_s / (4 if block in (0, last) else 1)
            partial = tuple((kind, dataclasses.replace(part, recompute_s=forward_s / 4)) for kind, part in cost.partial)
            timed.append(
                dataclasses.replace(
                    cost, forward_s=forward_s, backward_s=2 * forward_s, recompute_s=forward_s, partial=partial
                )
            )
        return tuple(timed)


@dataclass(slots=True, eq=False)
class Emulation:
    """One emulated machine at work.

    Attributes:
        speeds: of its lanes.
        lanes: of the sessions that were opened on it, latest last.
        computed: what its compute lane did: phase, block, begin and end, as readings of ``time.perf_counter``.
        collectives: seconds that each real collective took, and by how much it ended after its time.
    """

    speeds: Speeds
    costs: tuple[BlockCost, ...] = ()
    lanes: list[Lanes] = field(default_factory=list)
    computed: list[tuple[str, int, float, float]] = field(default_factory=list)
    collectives: list[tuple[float, float]] = field(default_factory=list)
    _clocks: dict[Lane, "_Clock"] = field(default_factory=lambda: {lane: _Clock() for lane in Lane})
    _due_s: "weakref.WeakKeyDictionary[Ticket, float]" = field(default_factory=weakref.WeakKeyDictionary)
    _awaited_s: float = 0.0
    _current: threading.local = field(default_factory=threading.local)

    @contextlib.contextmanager
    def running(self) -> Iterator["Emulation"]:
        """Models that are compiled inside with these `options`, and trained inside, run on this machine."""
        real_lanes, real_profile = Lanes, training.profile_analytic

        def lanes(device: torch.device) -> Lanes:
            self.lanes.append(real_lanes(device, in_background=True, is_host=False, pace=self._pace))
            return self.lanes[-1]

        def profile(partition: Partition, machine: Machine) -> Profile:
            found = real_profile(partition, machine)
            self.costs = self.speeds.timed(found.costs)
            return dataclasses.replace(found, costs=self.costs)

        program, real_wait = threading.current_thread(), ThreadTicket.wait

        def wait(ticket: ThreadTicket) -> None:
            real_wait(ticket)
            if threading.current_thread() is program:
                self._awaited_s = max(self._awaited_s, self._due_s.get(ticket, 0.0))

        _running[self.uuid()] = self
        with (
            mock.patch.object(ThreadTicket, "wait", wait),
            mock.patch("autohete_fx.runtime.session.Lanes", lanes),
            mock.patch("autohete_fx.runtime.lanes.lanes.run_collective", self._collective),
            mock.patch("autohete_fx.compiler.training.profile_analytic", profile),
            mock.patch("autohete_fx.compiler.captured.machine_of", lambda *_: self.speeds.machine),
        ):
            yield self
        del _running[self.uuid()]

    @property
    def options(self) -> dict[str, Any]:
        """For the backend; a plan, or a budget, may be added."""
        return {"inner_backend": "eager", "profile": "analytic", "passes": {"final": self}}

    def uuid(self) -> str:
        """By which compiled code finds this machine, and no other code does."""
        return str(id(self))

    def records(self) -> list[LaneRecord]:
        """What the lanes did so far."""
        return [record for lanes in self.lanes for record in lanes.records()]

    def _pace(self, ticket: Ticket) -> float:
        if not ticket.num_bytes:  # of a thread that gives copies to the lanes, and takes none of their time
            return 0.0
        clock = self._clocks[ticket.lane]
        with clock.taken:  # gathers and reduces come from two threads, and share the link
            now = time.perf_counter()
            clock.begin(clock.free_at_s if now - clock.free_at_s < _SLACK_S else now)
            self._due_s[ticket] = clock.end_after(self.seconds_of(ticket))
        self._current.due_s = self._due_s[ticket]
        return 0.0 if ticket.lane is Lane.NET else max(0.0, self._due_s[ticket] - time.perf_counter())

    def _collective(self, start: Start, among: Group | None = None, *, on_cpu: bool) -> None:
        due_s = self._current.due_s
        time.sleep(max(0.0, due_s - time.perf_counter()) / 2)
        began_s = time.perf_counter()
        run_collective(start, among, on_cpu=on_cpu)
        ended_s = time.perf_counter()
        self.collectives.append((ended_s - began_s, max(0.0, ended_s - due_s)))
        time.sleep(max(0.0, due_s - ended_s))

    def begin_block(self) -> None:
        """The compute lane goes on, when what the program waited for was due: the host prepares kernels and copies ahead."""
        self._clocks[Lane.COMPUTE].begin(max(self._awaited_s, time.perf_counter() - _AHEAD_S))

    def seconds_of(self, work: Ticket | LaneRecord) -> float:
        """What a lane takes for it."""
        if work.lane is Lane.UPDATE:
            return work.num_bytes / 4 / self.speeds.update_params_per_s
        if work.lane is Lane.NET:
            others = (self.speeds.num_ranks - 1) / self.speeds.num_ranks
            return others * work.num_bytes / self.speeds.net_bytes_per_s
        h2d = work.lane is Lane.H2D
        return work.num_bytes / (self.speeds.h2d_bytes_per_s if h2d else self.speeds.d2h_bytes_per_s)

    def __call__(self, gm: fx.GraphModule, context: PassContext) -> None:
        """Pass at 'final': each block's part of the graph, without its waits for copies, lasts its seconds."""
        keys = region_keys(gm.graph, context)
        reorder(gm.graph, keys, {})
        in_order = [node for node in gm.graph.nodes if node in keys and node.op not in ("placeholder", "output")]
        for region in range(context.num_blocks):
            block = context.region(region)
            own = [node for node in in_order if keys[node] == (region, COMPUTED)]
            if not own:
                continue
            with gm.graph.inserting_before(own[0]):
                gm.graph.call_function(_begin_block, (self.uuid(),))
            with gm.graph.inserting_after(own[-1]):
                seconds = self._seconds(block, context)
                gm.graph.call_function(_end_block, (self.uuid(), context.stage.value, block, seconds))

    def _seconds(self, block: int, context: PassContext) -> float:
        cost = self.costs[block]
        if context.stage is not Stage.BACKWARD:
            return cost.forward_s
        return cost.backward_s + cost.activations(context.decision(block)).recompute_s


def steps_s(
    model: torch.nn.Module, optimizer: AdamW, tokens: torch.Tensor, *, warm_up: int, steps: int, micro_batches: int = 1
) -> list[float]:
    """Train on the same tokens; seconds of each step behind those that warm up."""
    began_s = []
    for _ in range(warm_up + steps + 1):
        began_s.append(time.perf_counter())
        for _ in range(micro_batches):
            model(tokens, tokens).backward()
        optimizer.step()
        optimizer.zero_grad()
    optimizer.synchronize()
    return [end - begin for begin, end in itertools.pairwise(began_s[warm_up:])]


class _Clock:
    """When a lane is free. Work of the others than compute that comes within `_SLACK_S` counts as having waited for the lane: real
    copies and updates and the handing over between threads take no time of their own.
    """

    def __init__(self) -> None:
        self.free_at_s = self.began_s = 0.0
        self.taken = threading.Lock()

    def begin(self, ready_s: float) -> None:
        self.began_s = max(self.free_at_s, ready_s)

    def end_after(self, seconds: float) -> float:
        """When work of so many seconds that has begun is due to end."""
        began_s = max(
            self.began_s, self.free_at_s
        )  # a block's first node may stand before the last one of the block before
        self.free_at_s = max(began_s + seconds, time.perf_counter())
        return self.free_at_s


_running: dict[str, Emulation] = {}


def _begin(machine: str) -> None:
    _running[machine].begin_block()


def _end(machine: str, phase: str, block: int, seconds: float) -> None:
    emulation = _running[machine]
    clock = emulation._clocks[Lane.COMPUTE]
    time.sleep(max(0.0, clock.end_after(seconds) - time.perf_counter()))
    emulation.computed.append((phase, block, clock.began_s, time.perf_counter()))


_library.impl("begin_block", _begin, "CompositeExplicitAutograd")
_library.impl("end_block", _end, "CompositeExplicitAutograd")
