"""A training job on GPUs that may not be alike: one rank's part of it.

The global batch of a step is the same whatever the plan. Step k trains on the samples from k G to (k + 1) G - 1, where G is
their number. Clipping, the learning rate and the optimizer's step do not depend on the plan either. A job that was planned
again goes on as if nothing had happened, but for the rounding of sums and the draws of dropout.
"""

import contextlib
import json
import math
import re
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from autohete_fx.cluster.deploy import Deployment, Member
from autohete_fx.cluster.job.leaving import Notice, hand_over
from autohete_fx.cluster.job.sums import GradientSums, SumGroups, clip_factor
from autohete_fx.cluster.model.building import BuildModel
from autohete_fx.cluster.model.layers import LayerMap
from autohete_fx.cluster.model.pieces import Piece
from autohete_fx.cluster.model.tensor_parallel import TensorLayout, check_whole
from autohete_fx.cluster.model.unit import Unit
from autohete_fx.cluster.stages.module import Loss, StageModule
from autohete_fx.cluster.stages.run import Load, StageRun
from autohete_fx.cluster.store.saving import Saved, Saver
from autohete_fx.cluster.store.states import states_of
from autohete_fx.cluster.store.store import Save, Store
from autohete_fx.errors import AutoHeteError, ClusterError, CollectiveError, ShardError
from autohete_fx.runtime.shard.parts import note_gradient, part_of

_ANSWER_S = 10.0
"""In which a rank that lives tells the first one so, after an error."""
_RANKS = re.compile(r"Ranks? (\d+(?:, \d+)*) failed")

MakeOptimizer = Callable[[list[nn.Parameter]], torch.optim.Optimizer]


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainStep:
    """The results of a step.

    Attributes:
        step: its index.
        loss: mean over the global batch, before the update.
        grad_norm: of all gradients, before clipping.
        seconds: of this rank.
    """

    step: int
    loss: float
    grad_norm: float
    seconds: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Recipe:
    """The model and its training; nothing of it depends on the plan.

    Attributes:
        build_model: makes the model.
        loss: of its output and a batch, the mean over the batch's samples.
        global_batch: samples of a step.
        make_optimizer: of the parameters of a stage.
        learning_rate: of a step's index; None: as the optimizer has it.
        max_grad_norm: to which gradients of all parameters together are clipped; None: not.
        seed: of dropout, and of weights that modules initialise.
    """

    build_model: BuildModel
    loss: Loss
    global_batch: int
    make_optimizer: MakeOptimizer
    learning_rate: Callable[[int], float] | None = None
    max_grad_norm: float | None = None
    seed: int = 0


class JobLog:
    """Lines for people on stderr, and for programs in a file of JSON lines; of the first rank alone.

    Args:
        path: of the file; None: none.
        speaks: whether this rank writes.
    """

    def __init__(self, path: str | None, speaks: bool) -> None:
        self._path, self._speaks = path, speaks

    def say(self, line: str) -> None:
        """A line for people."""
        if self._speaks:
            print(f"autohete: {line}", file=sys.stderr, flush=True)

    def write(self, event: str, **values: Any) -> None:
        """A line for programs."""
        if self._speaks and self._path is not None:
            row = json.dumps({"event": event, "time_s": time.time(), **values})
            try:
                with Path(self._path).open("a", encoding="utf-8") as file:
                    file.write(row + "\n")
            except OSError as error:  # a full disk stops no training
                self.say(f"the log {self._path} cannot be written, and ends here: {error.strerror}")
                self._path = None


class Job:
    """One rank's part of a training job; `join` makes it.

    Attributes:
        step: index of the next step.
        deployment: the plan and who takes which stage.
        members: all ranks.
        layer_map: of the model.
        stage: this rank's layers; None where it is idle.
        params: by name, what this rank has of the stage's parameters.
        held: the pieces of the whole parameters that these are.
        optimizer: of the stage's parameters; None where it is idle or all are frozen.
        saver: of a job with a store.
        notice: whether this rank was told to leave, once it listens.

    Args:
        began: the save that the job goes on from; None: from none.
    """

    def __init__(
        self,
        recipe: Recipe,
        deployment: Deployment,
        members: list[Member],
        layer_map: LayerMap,
        *,
        layout: TensorLayout,
        unit: Unit | None,
        stage: StageModule | None,
        run: StageRun | None,
        group: dist.ProcessGroup | None,
        watch: dist.ProcessGroup | None = None,
        groups: SumGroups,
        store: Store | None,
        generation: str,
        job_log: JobLog,
        began: Save | None = None,
    ) -> None:
        self.step, self.deployment, self.members, self.layer_map, self.stage = 0, deployment, members, layer_map, stage
        self._recipe, self._run, self._group, self._log = recipe, run, group, job_log
        self._rank, self._unit = dist.get_rank(), unit
        self.params: dict[str, nn.Parameter] = stage.parts if stage else {}
        trained = [param for param in self.params.values() if param.requires_grad]
        self.optimizer = recipe.make_optimizer(trained) if trained else None
        seat = deployment.seat(self._rank)
        self.held: dict[str, Piece] = deployment.held(seat, layer_map, layout) if seat else {}
        self._owners = deployment.owners(layer_map, layout)
        shares = unit.shares(layer_map.shapes, self.held) if unit else {}
        self._sums = GradientSums(self._owners, groups, layer_map, self.params, self.held, shares)
        if stage:
            self._sums.overlap(stage.named())
        self._store, self.saver = store, None
        self.notice, self._unchecked, self._watch = Notice(), True, watch
        if store is not None:
            mine = members[self._rank].node
            self.saver = Saver(
                store,
                generation,
                group,
                owned=[piece for piece, ranks in self._owners.items() if ranks[0] == self._rank],
                held=self.held,
                all_names=list(layer_map.readers),
                facts=self.facts,
                cleans=[member.node for member in members].index(mine) == self._rank,
                began=began,
            )

    @property
    def facts(self) -> dict[str, object]:
        """By name, the facts that saves say of the job."""
        kind = type(self.optimizer).__name__ if self.optimizer is not None else ""
        return {"optimizer": kind, "seed": self._recipe.seed, "global_batch": self._recipe.global_batch}

    # -- training -------------------------------------------------------------------------------------------------

    def train_step(self, load: Load) -> TrainStep:
        """Train on the next global batch.

        Args:
            load: of indices of samples, the batch of these. A rank calls it with those of its pipeline. One of several shards
                calls it for each micro-batch, with its part of that. An idle rank does not call it.

        Returns:
            The same loss and norm on every rank.

        Raises:
            ClusterError: another rank is gone, or leaves after this step.
            SystemExit: this rank was told to leave. Its state is with the others then, or where all leave, in the cloud. A
                handler of SIGTERM from before `join` is called first.
        """
        start = time.perf_counter()
        try:
            totals = self._train(load)
        except (RuntimeError, ShardError) as error:
            explained = self._explained(error)
            if explained is error:  # raised "from" itself it would forget its own cause
                raise
            raise explained from error
        loss, norm = float(totals[0]), float(totals[1].sqrt())
        done = TrainStep(step=self.step, loss=loss, grad_norm=norm, seconds=time.perf_counter() - start)
        self.step += 1
        self._log.write("step", step=done.step, loss=loss, grad_norm=norm, seconds=done.seconds)
        if totals[2]:
            self._leave()
        elif self._store is not None and self.step % self._store.every == 0:
            self.save(cloud=self.step % self._store.cloud_every == 0)
        return done

    def _train(self, load: Load) -> torch.Tensor:
        """Passes, sums, clipping, update. Returns the loss, the squared norm, and how many ranks were told to leave."""
        zero = torch.zeros((), dtype=torch.float64)
        parallel = self._unit.tensor_parallel if self._unit else None
        checks = parallel is not None and self._unchecked  # gradients before they are summed
        before_last = None if checks else self._sums.begin_last
        loss = self._run.passes(load, self.step, self._recipe.seed, before_last) if self._run else zero
        if self.stage is not None and self._unit is not None and parallel is not None:
            self.stage.take_gradients()
            if checks:
                check_whole(self.params, self._unit.layout, parallel)
                self._unchecked = False
        self._sums.reduce()
        totals = torch.stack([loss, self._sums.squares(), zero + self.notice.given])
        dist.all_reduce(totals, group=self._group)
        factor = clip_factor(float(totals[1].sqrt()), self._recipe.max_grad_norm)
        if factor != 1.0:
            self._sums.scale(factor)
        for param in self.params.values():
            if part_of(param) is not None:  # the step refuses gradients of shards that others wrote
                note_gradient(param)
        if self.optimizer is not None:
            if self._recipe.learning_rate is not None:
                rate = self._recipe.learning_rate(self.step)
                _check_rate(rate, self.step)
                for group in self.optimizer.param_groups:
                    group["lr"] = rate
            self.optimizer.step()
            self.optimizer.zero_grad()
        return totals

    def _explained(self, error: Exception) -> Exception:
        """The error that a user can do something about: our own, which the schedule wraps, or that a rank is gone."""
        causes = list(_causes(error))
        collective = next((each for each in causes if isinstance(each, CollectiveError)), None)
        own = next((each for each in causes if isinstance(each, AutoHeteError)), None)
        if own is not None and collective is None:
            return own
        words = str(error) if collective is None else collective.reason
        lost = isinstance(error, dist.DistError) or any(word in words for word in ("gloo", "NCCL", "Connection"))
        if not lost and collective is None:
            return error
        mine = self.members[self._rank]
        cause = next(iter(words.strip().splitlines()), "")
        if _is_timeout(words):  # else a peer is gone: to ask the others would keep those that wait for this rank
            cause = f"{self._absent()}{cause}"
        return ClusterError(
            f"rank {self._rank} on {mine.node} lost another rank in step {self.step}: {cause}. Expected were all"
            f" {len(self.members)}. Start the job again; torchrun with --max-restarts does so itself"
        )

    def _absent(self) -> str:
        """The ranks that do not answer, as far as this rank is told. The first one hears of all; the others hear of the first."""
        try:
            dist.monitored_barrier(self._watch, timeout=timedelta(seconds=_ANSWER_S), wait_all_ranks=True)
        except RuntimeError as error:
            found = _RANKS.search(str(error))
            ranks = [int(number) for number in found[1].split(", ")] if found else []
            ranks = ranks or [0] * _is_timeout(str(error))  # a first rank that had raised would be gone
            named = ", ".join(f"rank {rank} on {self.members[rank].node}" for rank in ranks if rank != self._rank)
            return f"{named} does not answer. " if named else ""
        return ""

    # -- saving ---------------------------------------------------------------------------------------------------

    @property
    def saved(self) -> Saved:
        """The newest steps that all ranks have saved, as of the last save that began."""
        return self.saver.saved if self.saver else Saved()

    def save(self, *, cloud: bool = True) -> None:
        """Begin a save of the state now; training goes on meanwhile. All ranks call it."""
        if self.saver is None:
            raise ClusterError(
                "a job without a store was asked to save. Expected was a store. Give store= to cluster.join"
            )
        start = time.perf_counter()
        self.saver.save(self.step, states_of(self.params, self.optimizer, self.held), cloud=cloud)
        saved = self.saver.saved
        seconds = time.perf_counter() - start
        self._log.write("save", step=self.step, seconds=seconds, local=saved.local, cloud=saved.cloud)

    def finish(self) -> Saved:
        """Save the last step everywhere, and wait for it. All ranks call it; returns what is saved.

        SIGTERM goes to the handler from before `join` again.

        Raises:
            SystemExit: this rank was told to leave meanwhile, and there was no such handler.
        """
        saved = self._saved_everywhere(self.saver) if self.saver else Saved()
        self.notice.end()
        return saved

    def _saved_everywhere(self, saver: Saver) -> Saved:
        saved = saver.drain()
        if saved.local < self.step or (self._store and self._store.cloud and saved.cloud < self.step):
            self.save()
            saved = saver.drain()
        if max(saved.local, saved.cloud) < self.step:
            self._log.say(
                f"step {self.step} is saved nowhere: {saver.error or 'another rank could not write it, as its log says'}"
            )
        self._log.write("finish", step=self.step, local=saved.local, cloud=saved.cloud)
        return saved

    def _leave(self) -> None:
        """Save, give the state of those who leave to those who stay, and leave or stop."""
        told: list[Any] = [None] * len(self.members)
        dist.all_gather_object(told, self.notice.given, group=self._group)
        nodes = sorted({member.node for member, leaves in zip(self.members, told, strict=True) if leaves})
        self._log.say(f"{', '.join(nodes)} was told to leave after step {self.step - 1}")
        if self.saver is not None and self._store is not None:
            num_bytes = self._hand_over(self.saver, self._store, set(nodes))
            self._log.write("leave", step=self.step, nodes=nodes, peer_bytes=num_bytes)
        self.notice.end()
        if self.members[self._rank].node in nodes:
            sys.exit(0)
        raise ClusterError(
            f"{', '.join(nodes)} left the job after step {self.step - 1}. Expected were all {len(self.members)} ranks. Start"
            " the job again; torchrun with --max-restarts does so itself"
        )

    def _hand_over(self, saver: Saver, store: Store, leaving: set[str]) -> int:
        """Save for those who stay, and where nobody does, everywhere. Returns bytes that went to other nodes."""
        if all(member.node in leaving for member in self.members):
            self.save()  # on the disks at once, however long the cloud writes an earlier step
            saved = self._saved_everywhere(saver)
            found = {"on their disks": saved.local, "in the cloud": saved.cloud}
            places = [place for place, step in found.items() if step == self.step]
            self._log.say(f"no node stays: step {self.step} is saved {' and '.join(places) or 'nowhere'}")
            return 0
        self.save(cloud=False)
        saver.settle()
        num_bytes = hand_over(
            store,
            saver.last,
            self._owners,
            self.members,
            leaving,
            self.params,
            self.optimizer,
            self.held,
            self._group,
        )
        self._log.say(f"its state went to other nodes: {num_bytes / 2**20:.1f} MiB")
        return num_bytes


def _check_rate(rate: Any, step: int) -> None:
    with contextlib.suppress(TypeError, ValueError):
        if math.isfinite(float(rate)):
            return
    raise ClusterError(f"learning_rate gave {rate!r} for step {step}. Expected was a finite number. Correct it")


def _causes(error: BaseException | None) -> Iterator[BaseException]:
    """An error, and those that it came of."""
    while error is not None:
        yield error
        error = error.__cause__ or error.__context__


def _is_timeout(message: str) -> bool:
    return any(words in message.lower() for words in ("timed out", "timeout"))
