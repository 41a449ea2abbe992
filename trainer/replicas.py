"""What all ranks agree on: gradients summed over replicas and over the holders of tied weights, and
the vote by which a step commits.

Gradients are sums over samples, summed in an order that does not depend on the depth: over the
replicas layer by layer, then over the layers that hold a tied weight. The vote is one all-reduce of
float64 in which each slot but the first four, which count ranks, has a single contributor, so that
the sum is exact; what really adds up is added here, in layer and replica order. So whoever is given
the sum later does exactly what the others did.
"""

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from trainer.contract.progress import Ballot
from trainer.contract.samples import hash_of, mix32
from trainer.contract.spec import RunSpec
from trainer.contract.topology import Seat, stage_of, stages_of
from trainer.data import Batch
from trainer.groups import Groups
from trainer.program import LossSum, ProgramError
from trainer.stages import Stage

_COUNT, _STOP, _SAVE, _BUSY, _FIRST_LAYER = range(5)
_FIRST_METRIC = 4
_NAMES_BYTES = 1024
_ROW = 1024


@dataclass
class Totals:
    """What one replica's last stage saw of a step; nothing on other stages."""

    loss: Tensor = field(default_factory=lambda: torch.zeros((), dtype=torch.float64))
    weight: float = 0.0
    samples: int = 0
    ids: int = 0
    metrics: dict[str, tuple[float, float]] = field(default_factory=dict)

    def add(self, loss: LossSum, batch: Batch) -> None:
        """One more micro-batch."""
        self.loss = self.loss + loss.sum.detach()  # which may lie on a GPU
        self.weight += loss.weight
        self.samples += len(batch.ids)
        self.ids += sum(map(mix32, batch.ids))
        for name, (total, weight) in loss.metrics.items():
            before = self.metrics.get(name, (0.0, 0.0))
            self.metrics[name] = before[0] + total, before[1] + weight

    def in_a_row(self, metrics: Sequence[str]) -> list[float]:
        """Loss, weight, samples, ids, then sum and weight of each of ``metrics``.

        Raises ProgramError when there is another metric.
        """
        if unknown := self.metrics.keys() - set(metrics):
            raise ProgramError(f"loss() gives a new metric {min(unknown)!r} in mid-run")
        pairs = (self.metrics.get(name, (0.0, 0.0)) for name in metrics)
        numbers = (number for pair in pairs for number in pair)
        ids = self.ids % 2**32  # all that is reported of it; a float64 holds no more than 53 bits
        return [self.loss.item(), self.weight, self.samples, ids, *numbers]


@dataclass(frozen=True)
class Sums:
    """What all replicas saw together."""

    mean: float
    """Loss; NaN without any weight."""
    weight: float
    samples: int
    ids: int
    metrics: dict[str, float]


@dataclass(frozen=True)
class Wishes:
    """What one rank wants of all; it counts when any rank wants it."""

    stop: bool = False
    """After this step."""
    save: bool = False
    """After this step."""
    is_busy: bool = False
    """No save now: this rank still writes the one before."""


@dataclass(frozen=True)
class Vote:
    """What everyone knows of a step once it is voted."""

    loss: float
    """Mean over the global batch; NaN without any weight."""
    weight: float
    norm: float
    """Of the mean gradient, before clipping."""
    samples: int
    sample_ids_hash: str
    metrics: dict[str, float]
    wishes: Wishes
    """Of any rank."""
    loss_factor: float
    """By which the gradients are larger than they should be."""
    ballot: Ballot
    """All that the vote says, as it was summed."""

    @property
    def is_sound(self) -> bool:
        """Whether the step can be applied: loss and gradients are finite and there is something to
        learn from.
        """
        return math.isfinite(self.norm) and math.isfinite(self.loss)

    @property
    def is_spoilt(self) -> bool:
        """Whether loss or gradients are not finite though there is something to learn from."""
        return self.weight > 0 and not self.is_sound

    def gradient_scale(self, clip_grad_norm: float | None) -> float:
        """By what the sums of gradients are multiplied: mean, then clip."""
        clip = min(1.0, clip_grad_norm / (self.norm + 1e-6)) if clip_grad_norm else 1.0
        return clip / self.weight / self.loss_factor


class Replicas:
    """This rank among all others; in a world of one it talks to nobody."""

    def __init__(
        self, spec: RunSpec, stage: Stage, ties: Mapping[str, tuple[int, ...]], groups: Groups
    ) -> None:
        self._spec = spec
        self._seat = Seat.of(spec.rank, spec.shape)
        self._stage = stage
        self._ties = {owner: layers for owner, layers in ties.items() if owner in stage.weights}
        self._groups = groups
        self._metrics: tuple[str, ...] | None = None

    def sum_gradients(self) -> None:
        """Make every weight's gradient that of the whole global batch. Raises PeerLostError."""
        if group := self._groups.replicas:
            group.sum(*(g for index in self._stage.layers for g in self._stage.gradients_of(index)))
        for owner, layers in self._ties.items():
            self._sum_over_holders(owner, layers)
        self._groups.settle()

    def vote(self, totals: Totals, wishes: Wishes) -> Vote:
        """Commit the step: everybody gets the same vote or nobody can go on.

        Raises PeerLostError.
        """
        if self._metrics is None:
            self._metrics = self._agree_on_metrics(totals)
        ballot = self._ballot(totals, self._metrics, wishes)
        if group := self._groups.world:
            group.sum(ballot)
        return self.count([n if math.isfinite(n) else None for n in ballot.tolist()])

    def count(self, ballot: Sequence[float | None]) -> Vote:
        """What the summed ballot of a vote in which this rank took part says."""
        shape, layers = self._spec.shape, self._stage.layer_count
        numbers = [math.nan if number is None else number for number in ballot]
        if numbers[_COUNT] != shape.world:
            raise RuntimeError(f"{numbers[_COUNT]} ballots in a world of {shape.world}")
        squares = sum(numbers[_FIRST_LAYER : _FIRST_LAYER + layers])
        sums = self._sums(numbers[_FIRST_LAYER + layers :])
        norm = math.sqrt(squares) / self._stage.loss_factor if squares >= 0 else math.nan
        return Vote(
            loss=sums.mean,
            weight=sums.weight,
            norm=_ratio(norm, sums.weight),
            samples=sums.samples,
            sample_ids_hash=hash_of(sums.ids),
            metrics=sums.metrics,
            loss_factor=self._stage.loss_factor,
            wishes=Wishes(*(numbers[slot] > 0 for slot in (_STOP, _SAVE, _BUSY))),
            ballot=tuple(ballot),
        )

    def evaluation(self, totals: Totals) -> "Sums":
        """What all replicas saw of the held-out samples. Raises PeerLostError."""
        assert self._metrics is not None
        numbers = torch.tensor(self._rows(totals, self._metrics), dtype=torch.float64)
        if group := self._groups.world:
            group.sum(numbers)
        return self._sums(numbers.tolist())

    def is_any(self, wish: bool) -> bool:
        """Whether any rank says so; waits until every rank has come here. Raises PeerLostError."""
        count = torch.tensor(float(wish))
        if group := self._groups.world:
            group.sum(count)
        return bool(count)

    def wait_for_all(self) -> None:
        """Wait until every rank has come here. Raises PeerLostError."""
        self.is_any(False)

    def _sums(self, rows: Sequence[float]) -> "Sums":
        """Add up rows, one per replica, in their order."""
        assert self._metrics is not None
        width = _FIRST_METRIC + 2 * len(self._metrics)
        loss, weight, samples, ids, *pairs = (sum(rows[at::width]) for at in range(width))
        means = map(_ratio, pairs[::2], pairs[1::2])
        metrics = dict(zip(self._metrics, means, strict=True))
        return Sums(_ratio(loss, weight), weight, int(samples), int(ids), metrics)

    def _sum_over_holders(self, owner: str, layers: tuple[int, ...]) -> None:
        """Add the gradients of one tied weight in layer order, on every stage that holds it."""
        cuts, weight = self._spec.cuts, self._stage.weights[owner]
        group = self._groups.ties.get(stages_of(layers, cuts))
        total: Tensor | None = None
        for layer in layers:
            gradient = self._stage.gradient_of(owner, layer)
            if gradient is None:
                gradient = torch.empty_like(weight.parameter)
            if group:
                holder = Seat(stage_of(layer, cuts), self._seat.replica)
                group.share(gradient, holder.rank(self._spec.shape))
            total = gradient.clone() if total is None else total.add_(gradient)
        assert total is not None
        weight.gradient.copy_(total)

    def _ballot(self, totals: Totals, metrics: Sequence[str], wishes: Wishes) -> Tensor:
        """Slots for all, then one per layer, then a row per replica."""
        seat, stage = self._seat, self._stage
        squares = self._squares() if seat.replica == 0 else [0.0] * stage.layer_count
        wanted = (float(wish) for wish in (wishes.stop, wishes.save, wishes.is_busy))
        slots = [1.0, *wanted, *squares, *self._rows(totals, metrics)]
        return torch.tensor(slots, dtype=torch.float64)

    def _squares(self) -> list[float]:
        """Per layer, that of its gradients' norm; one look at the device for all of them."""
        squares = [0.0] * self._stage.layer_count
        of_layers = [i for i, flats in self._stage.gradients.items() for _ in flats]
        flats = (flat for flats in self._stage.gradients.values() for flat in flats)
        sums = [_square_sum(flat) for flat in flats]
        if sums:
            for index, square in zip(of_layers, torch.stack(sums).tolist(), strict=True):
                squares[index] += square
        return squares

    def _rows(self, totals: Totals, metrics: Sequence[str]) -> list[float]:
        """One row per replica, all zero but what this rank has to say."""
        shape, seat = self._spec.shape, self._seat
        rows = [[0.0] * (_FIRST_METRIC + 2 * len(metrics)) for _ in range(shape.replicas)]
        if seat.stage == shape.depth - 1:
            rows[seat.replica] = totals.in_a_row(metrics)
        return [number for row in rows for number in row]

    def _agree_on_metrics(self, totals: Totals) -> tuple[str, ...]:
        """The metrics' names, which only the last stage knows; once, in the first vote."""
        group = self._groups.world
        if group is None:
            return tuple(sorted(totals.metrics))
        text = json.dumps(sorted(totals.metrics)).encode()
        if len(text) > _NAMES_BYTES:
            raise ProgramError(f"loss() gives metrics whose names need over {_NAMES_BYTES} bytes")
        names = torch.frombuffer(bytearray(text.ljust(_NAMES_BYTES)), dtype=torch.uint8)
        last = Seat(self._spec.shape.depth - 1, 0).rank(self._spec.shape)
        group.share(names, last)
        return tuple(json.loads(bytes(names.tolist())))


def _square_sum(flat: Tensor) -> Tensor:
    """Of a flat tensor, in float64; but rows of it in float32, which takes a tenth of the time."""
    whole = flat.numel() - flat.numel() % _ROW
    dtype = torch.promote_types(flat.dtype, torch.float32)
    norms = torch.linalg.vector_norm(flat[:whole].view(-1, _ROW), dim=1, dtype=dtype)
    rest = torch.linalg.vector_norm(flat[whole:], dtype=dtype)
    total: Tensor = norms.double().square().sum() + rest.double().square()
    return total


def _ratio(total: float, weight: float) -> float:
    return total / weight if weight > 0 else math.nan
