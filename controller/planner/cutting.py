"""A model cut into stages: what each takes, holds, sends and sums. PURE.

A stage's seconds are sums of its layers'; a recompute takes what a forward takes, but the first
stage's, which fetches its samples once (as the last one does, for the labels). What a trainer adds
to each task (its loop, handing over a message) counts on every task.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise

from controller.planner.balance import cut
from controller.planner.pipeline import Hop, Pipeline, StageTimes
from trainer.contract.costs import LayerCosts, LinkCost
from trainer.contract.topology import stages_of


@dataclass(frozen=True)
class Cutting:
    """``depth`` stages at one micro-batch size."""

    cuts: tuple[int, ...]
    times: tuple[StageTimes, ...]
    handed_bytes: tuple[float, ...]
    """What crosses between stage s and s+1, either way, per micro-batch."""
    hops_apart: tuple[Hop, ...]
    hops_within: tuple[Hop, ...]
    """The way there between nodes, and within one."""
    parameter_bytes: tuple[int, ...]
    buffers: tuple[int, ...]
    """How many buffers of gradients a stage sums over the replicas."""
    graph_bytes: tuple[float, ...]
    """One recomputed set."""
    shared: Mapping[int, tuple[float, ...]]
    """Of stages that hold tied weights with others: the bytes of each share that is passed on."""

    @property
    def depth(self) -> int:
        """How many stages."""
        return len(self.times)

    def pipeline(self, costs: LayerCosts, replicas: int, within_node: Sequence[bool]) -> Pipeline:
        """As it is played; ``within_node``: of each hop, whether it stays on a node."""
        hops = self.hops_apart
        if any(within_node):
            three = zip(self.hops_apart, self.hops_within, within_node, strict=True)
            hops = tuple(within if inside else apart for apart, within, inside in three)
        reducing, after = self.reducing(costs, replicas), self.after(costs, replicas)
        return Pipeline(self.times, hops, reducing, after)

    def reducing(self, costs: LayerCosts, replicas: int) -> tuple[float, ...]:
        """Per stage, seconds until its gradients are those of the whole batch."""
        one, link = costs.reducing(), costs.link(within_node=False)
        per_buffer = one.seconds(0, 1, replicas)
        per_byte = one.seconds(1, 0, replicas)
        summed = [
            num_bytes * per_byte + buffers * per_buffer
            for num_bytes, buffers in zip(self.parameter_bytes, self.buffers, strict=True)
        ]
        for stage, shares in self.shared.items():
            summed[stage] += sum(map(link.seconds, shares))
        return tuple(summed)

    def after(self, costs: LayerCosts, replicas: int) -> float:
        """Seconds of the vote and the optimizer's step."""
        vote = costs.reducing().seconds(0, 1, self.depth * replicas)
        rate = costs.optimizer_bytes_per_second
        return vote + (max(self.parameter_bytes) / rate if rate else 0.0)


class Model:
    """The layers at one micro-batch size, as sums up to each cut-point: cut it as often as you
    like.
    """

    def __init__(self, costs: LayerCosts, micro_batch: int) -> None:
        sized, scale = costs.at(micro_batch), micro_batch / costs.micro_batch
        outputs = [layer.output_bytes * scale for layer in costs.layers]
        graphs = [max(float(s.saved_bytes), out) for s, out in zip(sized, outputs, strict=True)]
        self.layers = len(sized)
        self._costs = costs
        self._fetching = costs.fetch_seconds * micro_batch
        self._once = [s.forward_seconds + s.backward_seconds for s in sized]
        self._steady = [2 * s.forward_seconds + s.backward_seconds for s in sized]
        if not any(self._steady):  # nobody has measured it: by bytes
            self._once = [float(one.parameter_bytes) for one in costs.layers]
            self._steady = list(self._once)
        else:
            self._steady[0] += self._fetching
            self._once[-1] += self._fetching
        self._forward = _sums(s.forward_seconds for s in sized)
        self._backward = _sums(s.backward_seconds for s in sized)
        self._parameters = _sums(layer.parameter_bytes for layer in costs.layers)
        self._buffers = _sums(min(1, layer.parameter_tensors) for layer in costs.layers)
        self._graphs = _sums(graphs)
        self._handed = [0.0, *outputs]
        self._cuttings: dict[int, Cutting] = {}

    def cutting(self, depth: int) -> Cutting:
        """The most even cut into ``depth`` stages. Raises ValueError if there are fewer layers."""
        if depth not in self._cuttings:
            self._cuttings[depth] = self.cut_at(cut(self._steady, self._once, depth))
        return self._cuttings[depth]

    def cutting_for(self, factors: Sequence[float]) -> Cutting:
        """The most even cut for devices of which stage s's takes ``factors[s]`` times as long."""
        return self.cut_at(cut(self._steady, self._once, len(factors), factors))

    def cut_at(self, cuts: tuple[int, ...]) -> Cutting:
        """Those very cuts."""
        last = len(cuts) - 2
        pairs = list(pairwise(cuts))
        handed = tuple(self._handed[b] for _, b in pairs[:-1])
        return Cutting(
            cuts=cuts,
            times=tuple(
                self._times(*pair, is_first=stage == 0, is_last=stage == last)
                for stage, pair in enumerate(pairs)
            ),
            handed_bytes=handed,
            hops_apart=_hops(self._costs.link(within_node=False), handed),
            hops_within=_hops(self._costs.link(within_node=True), handed),
            parameter_bytes=tuple(round(_between(self._parameters, *pair)) for pair in pairs),
            buffers=tuple(round(_between(self._buffers, *pair)) for pair in pairs),
            graph_bytes=tuple(_between(self._graphs, *pair) for pair in pairs),
            shared=self._shared(cuts),
        )

    def _times(self, start: int, end: int, *, is_first: bool, is_last: bool) -> StageTimes:
        more = self._costs.task_seconds
        forward = _between(self._forward, start, end) + more
        backward = _between(self._backward, start, end) + more
        fetching = self._fetching if is_first or is_last else 0.0
        return StageTimes(forward + fetching, forward, backward, is_last)

    def _shared(self, cuts: Sequence[int]) -> Mapping[int, tuple[float, ...]]:
        shared: dict[int, tuple[float, ...]] = {}
        for layers in self._costs.tied:
            holders = stages_of(layers, cuts)
            if len(holders) > 1:  # each holder's gradient goes to all others, in turn
                one = float(min(self._costs.layers[at].parameter_bytes for at in layers))
                for stage in holders:
                    shared[stage] = shared.get(stage, ()) + (one,) * len(layers)
        return shared


def _hops(link: LinkCost, handed: Iterable[float]) -> tuple[Hop, ...]:
    return tuple(Hop(link.latency_seconds, one / link.bytes_per_second) for one in handed)


def _sums(values: Iterable[float]) -> list[float]:
    return [0.0, *accumulate(values)]


def _between(sums: Sequence[float], start: int, end: int) -> float:
    return sums[end] - sums[start]
