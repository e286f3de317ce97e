"""Costs of layers on each type of GPU at each degree of tensor parallelism: seconds and bytes.

A `CostTable` is one value whatever it was made from: measurements (`measurements`), our pricing of a traced block (`priced`), or
what this machine timed. Everything else in this folder asks it alone.
"""

import bisect
import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

from autohete_fx.errors import ClusterError

ACCUMULATE_SHARE = 12 / 28
"""The share of the bytes of AdamW's fp32 step that adding one gradient to another moves: two read and one written."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerTime:
    """Seconds of one layer for one micro-batch on one unit.

    Attributes:
        kind: of the layer, such as ``first``, ``layer``, ``last``.
        gpu: type.
        tp: GPUs that share the layer; their collectives are in the seconds.
        micro_batch: samples.
        forward_s: seconds.
        backward_s: seconds.
    """

    kind: str
    gpu: str
    tp: int
    micro_batch: int
    forward_s: float
    backward_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerBytes:
    """Bytes of one layer on each GPU of a unit.

    Attributes:
        kind: of the layer.
        tp: GPUs that share it.
        params_bytes: of this GPU's part of the weights.
        kept_bytes: that live from forward to backward where nothing is recomputed, for one sample, the output among them.
        output_bytes: of what the next layer reads, for one sample, whole.
        unsharded_bytes: of ``params_bytes``, those that shards do not divide.
    """

    kind: str
    tp: int
    params_bytes: int
    kept_bytes: int
    output_bytes: int
    unsharded_bytes: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class UpdateTime:
    """The optimizer's step on one type of GPU.

    Attributes:
        gpu: type.
        fixed_s: seconds of any step.
        s_per_byte: seconds for each byte of weights besides.
        host_s_per_byte: seconds for each byte of weights whose step the host does, copies included; None where nobody knows.
    """

    gpu: str
    fixed_s: float
    s_per_byte: float
    host_s_per_byte: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class StageCost:
    """Costs of one stage for one micro-batch on each GPU of its unit.

    Attributes:
        forward_s: seconds.
        backward_s: seconds, what is recomputed in them.
        update_s: seconds of a step's optimizer.
        accumulate_s: seconds in which a backward adds to the gradients of an earlier one.
        params_bytes: of the weights.
        kept_bytes: of activations of one micro-batch in flight.
        working_bytes: that backward needs besides for gradients of the activations of one layer, or to make them again; as much as
            the largest layer keeps. With shards, those of whole layers, too.
        offloaded_bytes: of ``params_bytes``, those whose optimizer states are on the host.
    """

    forward_s: float
    backward_s: float
    update_s: float
    accumulate_s: float
    params_bytes: int
    kept_bytes: int
    working_bytes: int
    offloaded_bytes: int = 0


@dataclass(frozen=True, kw_only=True)
class CostTable:
    """Costs of one model.

    Attributes:
        model: name.
        kinds: of each layer, in order.
        times: rows; micro-batches between two rows are interpolated, larger ones grow in proportion.
        sizes: rows, one for each kind and degree.
        updates: rows, one for each GPU.
        tied_bytes: of the first layer's weights, those that the last layer reads too. They count among the first one's; a last
            stage that lacks the first layer holds them besides.
        gradient_bytes_per_byte: of what replicas sum, for each byte of weights.
        optimizer_bytes_per_byte: of the optimizer's states, masters among them, for each byte of weights.
        accumulate_share: of the seconds of a step's optimizer on the GPU, those of adding one gradient to another.
        overhead_bytes: of each GPU's memory that nobody plans: context, libraries, collectives' buffers.
        source: of the figures.
    """

    model: str
    kinds: tuple[str, ...]
    times: tuple[LayerTime, ...]
    sizes: tuple[LayerBytes, ...]
    updates: tuple[UpdateTime, ...]
    tied_bytes: int = 0
    gradient_bytes_per_byte: float = 1.0
    optimizer_bytes_per_byte: float = 2.0
    accumulate_share: float = ACCUMULATE_SHARE
    overhead_bytes: int = 0
    source: str = ""
    _rows: Mapping[tuple[str, str, int], tuple[Sequence[int], Sequence[LayerTime]]] = field(
        init=False, repr=False, compare=False
    )
    _sizes: Mapping[tuple[str, int], LayerBytes] = field(init=False, repr=False, compare=False)
    _updates: Mapping[str, UpdateTime] = field(init=False, repr=False, compare=False)
    _sums: dict[tuple[str, int, int, int], "StageSums"] = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        rows: dict[tuple[str, str, int], list[LayerTime]] = {}
        for row in sorted(self.times, key=lambda row: row.micro_batch):
            rows.setdefault((row.kind, row.gpu, row.tp), []).append(row)
        by_key = {key: (tuple(row.micro_batch for row in found), tuple(found)) for key, found in rows.items()}
        object.__setattr__(self, "_rows", by_key)
        object.__setattr__(self, "_sums", {})
        object.__setattr__(self, "_updates", {row.gpu: row for row in self.updates})
        object.__setattr__(self, "_sizes", {(row.kind, row.tp): row for row in self.sizes})

    def up_to(self, degree: int) -> "CostTable":
        """The table without higher degrees of tensor parallelism."""
        return replace(self, times=tuple(row for row in self.times if row.tp <= degree))

    def degrees(self, gpu: str) -> tuple[int, ...]:
        """Degrees of tensor parallelism with costs on a type of GPU, by rising degree."""
        found = {tp for kind, of, tp in self._rows if of == gpu and (kind, tp) in self._sizes}
        kinds = set(self.kinds)
        return tuple(sorted(tp for tp in found if all((kind, gpu, tp) in self._rows for kind in kinds)))

    def micro_batches(self, gpu: str, tp: int) -> tuple[int, ...]:
        """Sizes of micro-batches with rows of their own."""
        return tuple(self._rows[self.kinds[0], gpu, tp][0])

    def layer_s(self, kind: str, gpu: str, tp: int, micro_batch: int) -> tuple[float, float]:
        """Seconds of forward and of backward. Raises ClusterError where there is no row of that GPU and degree."""
        try:
            sizes, rows = self._rows[kind, gpu, tp]
        except KeyError:
            known = sorted({f"{of} tp {degree}" for _, of, degree in self._rows})
            raise ClusterError(
                f"there are no costs of {self.model} on {gpu} with {tp} GPUs a layer. Expected was one of {', '.join(known)}."
                " Measure it, or leave it out"
            ) from None
        place = bisect.bisect_left(sizes, micro_batch)
        if place == len(sizes):
            grown = micro_batch / sizes[-1]
            return grown * rows[-1].forward_s, grown * rows[-1].backward_s
        if sizes[place] == micro_batch or not place:
            return rows[place].forward_s, rows[place].backward_s
        low, high = rows[place - 1], rows[place]
        share = (micro_batch - sizes[place - 1]) / (sizes[place] - sizes[place - 1])
        return (
            low.forward_s + share * (high.forward_s - low.forward_s),
            low.backward_s + share * (high.backward_s - low.backward_s),
        )

    def layer_bytes(self, kind: str, tp: int) -> LayerBytes:
        """Sizes of a kind of layer at a degree. Raises ClusterError where there is no row of that degree."""
        if (kind, tp) not in self._sizes:
            known = sorted({degree for of, degree in self._sizes if of == kind})
            raise ClusterError(
                f"there are no sizes of layer {kind!r} of {self.model} with {tp} GPUs a layer. Expected was one of {known}."
                " Measure it, or leave it out"
            )
        return self._sizes[kind, tp]

    def stage(
        self,
        layers: range,
        gpu: str,
        tp: int,
        micro_batch: int,
        *,
        shards: int = 1,
        recomputed: int = 0,
        offloaded: int = 0,
    ) -> StageCost:
        """Costs of consecutive layers on a unit; see `StageSums.stage`."""
        sums = self.sums(gpu, tp, micro_batch, shards)
        return sums.stage(layers.start, layers.stop, recomputed=recomputed, offloaded=offloaded)

    def sums(self, gpu: str, tp: int, micro_batch: int, shards: int = 1) -> "StageSums":
        """Costs of any consecutive layers on a unit. Raises ClusterError where there are none of that GPU and degree."""
        key = gpu, tp, micro_batch, shards
        if key not in self._sums:
            self._sums[key] = StageSums(self, *key)
        return self._sums[key]

    def update_s(self, gpu: str, params_bytes: float, offloaded_bytes: float = 0.0) -> float:
        """Seconds of the optimizer's step for so many bytes of weights of one GPU, there and on the host."""
        row = self._updates[gpu]
        here_s = row.fixed_s + row.s_per_byte * params_bytes
        if not offloaded_bytes:
            return here_s
        if row.host_s_per_byte is None:
            raise ClusterError(
                f"the plan offloads optimizer states of {gpu}, and its costs have no host. Expected were none offloaded. Make the"
                " plan again, or measure the host"
            )
        return max(here_s, row.host_s_per_byte * offloaded_bytes)

    def accumulate_s(self, gpu: str, params_bytes: float) -> float:
        """Seconds in which a GPU adds gradients of so many bytes of weights to earlier ones."""
        return self.accumulate_share * self._updates[gpu].s_per_byte * params_bytes

    def can_offload(self, gpu: str) -> bool:
        """Whether it is known what an optimizer's step on the host takes."""
        return self._updates[gpu].host_s_per_byte is not None

    def whole_bytes(self, layer: int) -> int:
        """Bytes of a layer's weights at its least degree, all GPUs together."""
        row = min((row for row in self.sizes if row.kind == self.kinds[layer]), key=lambda row: row.tp)
        return row.params_bytes * row.tp

    def tied_bytes_at(self, tp: int) -> int:
        """Bytes on one GPU of a unit of the weights that the first and the last layer share; divided as the first layer's are."""
        first = self.kinds[0]
        return int(self.tied_bytes * self.layer_bytes(first, tp).params_bytes / self.whole_bytes(0))

    def tied_unsharded_bytes_at(self, tp: int) -> int:
        """Those of `tied_bytes_at` that shards do not divide: as many as the first layer has."""
        return min(self.tied_bytes_at(tp), self.layer_bytes(self.kinds[0], tp).unsharded_bytes)

    def boundary_bytes(self, layer: int, micro_batch: int) -> int:
        """Bytes that a layer hands to the next one, whole."""
        size = next(row.output_bytes for row in self.sizes if row.kind == self.kinds[layer])
        return size * micro_batch


class StageSums:
    """Running sums over the layers of a model on one unit: any stage's costs in a few subtractions.

    Shards divide samples, weights and what belongs to them, but for weights that each GPU has. Two layers are whole at a time, with
    their gradients: one that computes, and one that is gathered or whose gradients are reduced meanwhile. Tied weights' gradient
    of the last layer is whole until the first layer's is added.
    """

    def __init__(self, costs: CostTable, gpu: str, tp: int, micro_batch: int, shards: int = 1) -> None:
        """``micro_batch``: samples of the whole unit."""
        self._costs, self._gpu, self._shards = costs, gpu, shards
        samples = micro_batch // shards
        seconds = {kind: costs.layer_s(kind, gpu, tp, samples) for kind in dict.fromkeys(costs.kinds)}
        sizes = {kind: costs.layer_bytes(kind, tp) for kind in seconds}
        kept = {kind: size.kept_bytes * samples for kind, size in sizes.items()}
        least = {kind: min(kept[kind], size.output_bytes * samples) for kind, size in sizes.items()}
        self._weights = [sizes[kind].params_bytes - sizes[kind].unsharded_bytes for kind in costs.kinds]
        self._kept_by_layer = [kept[kind] for kind in costs.kinds]
        self._forward_s = _running([seconds[kind][0] for kind in costs.kinds])
        self._backward_s = _running([seconds[kind][1] for kind in costs.kinds])
        self._divided = _running(self._weights)
        self._unsharded = _running([sizes[kind].unsharded_bytes for kind in costs.kinds])
        tied = (costs.tied_bytes_at(tp), costs.tied_unsharded_bytes_at(tp)) if costs.tied_bytes else (0, 0)
        self._tied_bytes = tied[0] - tied[1]
        self._tied_held = tied[1] + -(-self._tied_bytes // shards)
        self._num_layers = len(costs.kinds)
        self._kept = _running(self._kept_by_layer)
        self._least = _running([least[kind] for kind in costs.kinds])

    def weights(self, first: int, stop: int) -> tuple[list[int], list[int]]:
        """By layer, bytes of the sharded weights that a GPU gathers for it, and of those whose gradients are reduced after it.

        Tied weights are gathered for the first and for the last layer. Where a stage has both, their gradients are reduced once.
        """
        reduced = self._weights[first:stop]
        gathered = list(reduced)
        if stop == self._num_layers:
            gathered[-1] += self._tied_bytes
        return gathered, reduced if not first else gathered

    def stage(self, first: int, stop: int, *, recomputed: int = 0, offloaded: int = 0) -> StageCost:
        """Costs of the layers from ``first`` to before ``stop``, without the seconds of gathers.

        The first ``recomputed`` of them recompute their activations; the last ``offloaded`` have their optimizer's step on the
        host.
        """
        again = first + recomputed
        params_bytes, offloaded_bytes = self._held(first, stop), self._held(stop - offloaded, stop)
        if first and stop == self._num_layers:
            params_bytes += self._tied_held
        again_s = self._forward_s[again] - self._forward_s[first]
        whole_bytes = 0
        if self._shards > 1:
            gathered, reduced = self.weights(first, stop)
            waiting_bytes = gathered[-1] - reduced[-1]  # of tied weights, for the first layer's gradient
            gradient = self._costs.gradient_bytes_per_byte
            whole_bytes = int(2 * (1 + gradient) * max(gathered) + gradient * waiting_bytes)
        return StageCost(
            forward_s=self._forward_s[stop] - self._forward_s[first],
            backward_s=self._backward_s[stop] - self._backward_s[first] + again_s,
            update_s=self._costs.update_s(self._gpu, params_bytes - offloaded_bytes, offloaded_bytes),
            accumulate_s=self._costs.accumulate_s(self._gpu, params_bytes),
            params_bytes=int(params_bytes),
            kept_bytes=int(self._least[again] - self._least[first] + self._kept[stop] - self._kept[again]),
            working_bytes=max(self._kept_by_layer[first:stop]) + whole_bytes,
            offloaded_bytes=int(offloaded_bytes),
        )

    def backward_s(self, first: int, stop: int, *, recomputed: int = 0) -> float:
        """Seconds of backward of the layers from ``first`` to before ``stop``, of which the first ``recomputed`` recompute their
        activations."""
        again = min(first + recomputed, stop)
        return self._backward_s[stop] - self._backward_s[first] + self._forward_s[again] - self._forward_s[first]

    def _held(self, first: int, stop: int) -> float:
        """Bytes of the weights of layers that a GPU holds."""
        divided = self._divided[stop] - self._divided[first]
        return self._unsharded[stop] - self._unsharded[first] + -(-divided // self._shards)


def _running(values: Sequence[float]) -> list[float]:
    return [0, *itertools.accumulate(values)]
