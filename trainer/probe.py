"""What lies between devices, measured once, by the very links and groups that training uses.

Rank 0 plays ping-pong with a rank on its own node and one on another, one pair at a time, and all
ranks sum small and large buffers. The median of many rounds counts: it is what a step will meet.

    rank 0  --F 0-->  partner        latency: half of there and back
            <--B 0--
            --F 0..7-->              bandwidth: until all of them are there
            <--B 0--
"""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from statistics import fmean, median

import torch

from trainer.contract.costs import AllReduceCost, LayerCosts, LinkCost
from trainer.contract.schedule import Kind
from trainer.contract.spec import RunSpec
from trainer.groups import Group, Groups
from trainer.links import Links

ROUNDS, LARGE_ROUNDS, AT_ONCE = 30, 3, 8
SMALL, LARGE = 1, 1 << 16
"""Floats of a message; also what the two kinds of messages are told apart by."""
SMALL_SUM, LARGE_SUM = 1 << 10, 1 << 18
"""Floats that are summed. Gloo cuts a buffer into two pieces a rank, and sends those that are empty
to nobody: a sum of a single float took 0.8 ms over 8 ranks where one of 272 took 25 ms.
"""


@dataclass(frozen=True)
class Probed:
    """What rank 0 saw."""

    same_node: LinkCost | None
    cross_node: LinkCost | None
    all_reduce: AllReduceCost
    task_seconds: float
    """What handing over a message takes of the main loop."""
    link_jitter: float

    def added_to(self, costs: LayerCosts) -> LayerCosts:
        """The costs with the network in them."""
        return costs.model_copy(
            update={
                "same_node": self.same_node,
                "cross_node": self.cross_node,
                "all_reduce": self.all_reduce,
                "task_seconds": self.task_seconds,
                "jitter": costs.jitter.model_copy(update={"link": self.link_jitter}),
            }
        )


def probe(spec: RunSpec, groups: Groups) -> Probed | None:
    """All ranks together; None but on rank 0 of a world of several. Raises PeerLostError."""
    world = groups.world
    if world is None:
        return None
    links: list[tuple[LinkCost, float, float] | None] = []
    for partner in (spec.near, spec.far):
        links.append(_pair(spec.rank, partner, world) if partner is not None else None)
        world.sum(torch.zeros(1))
    reduced = _sums(world, spec.shape.world)
    seen = [link for link in links if link is not None]
    if spec.rank != 0:
        return None
    near, far = (link and link[0] for link in links)
    return Probed(
        near, far, reduced, fmean(link[1] for link in seen), fmean(link[2] for link in seen)
    )


def _pair(rank: int, partner: int, world: Group) -> tuple[LinkCost, float, float] | None:
    if rank == 0:
        return _lead(Links(world, None, partner))
    if rank == partner:
        _echo(Links(world, 0, None))
    return None


def _lead(links: Links) -> tuple[LinkCost, float, float]:
    """The link, what a send takes of this thread, how much messages are delayed at random."""
    links.expect([SMALL] * ROUNDS)
    ways, sends = [], []
    for m in range(ROUNDS):
        began = time.perf_counter()
        links.send(Kind.FORWARD, m, SMALL, torch.zeros(SMALL))
        sends.append(time.perf_counter() - began)
        _await(links, Kind.BACKWARD, [m])
        ways.append((time.perf_counter() - began) / 2)
    latency = median(ways[1:])  # the first one brings a header
    rates = []
    for _ in range(LARGE_ROUNDS + 1):
        links.expect([SMALL])
        began = time.perf_counter()
        for m in range(AT_ONCE):
            links.send(Kind.FORWARD, m, LARGE, torch.zeros(LARGE))
        _await(links, Kind.BACKWARD, [0])
        seconds = time.perf_counter() - began - 2 * latency
        rates.append(AT_ONCE * 4 * LARGE / max(seconds, 1e-6))
    links.settle()
    late = fmean(sorted(ways[1:])[: ROUNDS - ROUNDS // 10]) / latency - 1
    cost = LinkCost(latency_seconds=latency, bytes_per_second=median(rates[1:]))
    return cost, median(sends[1:]), max(0.0, late)


def _echo(links: Links) -> None:
    links.expect([SMALL] * ROUNDS)
    for m in range(ROUNDS):
        _await(links, Kind.FORWARD, [m])
        links.send(Kind.BACKWARD, m, SMALL, torch.zeros(SMALL))
    for _ in range(LARGE_ROUNDS + 1):
        links.expect([LARGE] * AT_ONCE)
        _await(links, Kind.FORWARD, range(AT_ONCE))
        links.send(Kind.BACKWARD, 0, SMALL, torch.zeros(SMALL))
    links.settle()


def _await(links: Links, kind: Kind, micro_batches: Sequence[int]) -> None:
    """Take those messages, which come in order."""
    missing = len(micro_batches)
    while missing:
        links.wait()
        for arrival in links.arrivals():
            links.take(*arrival)
            missing -= 1


def _sums(world: Group, ranks: int) -> AllReduceCost:
    small = _timed(lambda: world.sum(torch.zeros(SMALL_SUM)), ROUNDS)
    large = _timed(lambda: world.sum(torch.zeros(LARGE_SUM)), LARGE_ROUNDS)
    rounds = 2 * (ranks - 1)
    seconds = max(large - small, 1e-6)
    return AllReduceCost(
        round_seconds=small / rounds,
        bytes_per_second=4 * (LARGE_SUM - SMALL_SUM) / ranks * rounds / seconds,
    )


def _timed(deed: Callable[[], None], rounds: int) -> float:
    seconds = []
    for _ in range(rounds + 1):
        began = time.perf_counter()
        deed()
        seconds.append(time.perf_counter() - began)
    return median(seconds[1:])
