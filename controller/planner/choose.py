"""The best shape for so many devices, its runners-up, and why. PURE.

Every shape is a candidate. The one with the least bound is played first, event by event; who can
only be slower than the best that was played is not played at all: so the choice is the best of all
shapes, though few are simulated. Ties go to fewer stages, then fewer devices.

A :class:`Planner` keeps what it has found out about one problem. Its table says the best for each
number of devices: the best for g is the best for g-1, or one of those that need exactly g. More
devices therefore never give a slower plan.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache

from controller.planner.bound import least_seconds
from controller.planner.cutting import Cutting, Model
from controller.planner.entry import Entry, Paces, paces_by_node
from controller.planner.memory import StageBytes, TooBig, held, in_flight_caps
from controller.planner.problem import Problem
from controller.planner.spots import Spots, spots
from trainer.contract.spec import Shape

RUNNERS_UP = 3
_MOST_WITH_SLOW = 6


@dataclass(frozen=True)
class Candidate:
    """A shape that fits, and what a step is thought to take."""

    shape: Shape
    cuts: tuple[int, ...]
    in_flight: tuple[int, ...]
    seconds: float
    """Played; or, if ``is_bound``, it takes no less than this."""
    bubble: float = 0.0
    is_bound: bool = False
    because: str = ""
    """Of a runner-up: what it loses by."""


@dataclass(frozen=True)
class Choice:
    """The best candidate; ``because`` is one sentence."""

    shape: Shape
    cuts: tuple[int, ...]
    in_flight: tuple[int, ...]
    seconds: float
    bubble: float
    because: str
    runners_up: tuple[Candidate, ...]
    stages: tuple[StageBytes, ...] = ()
    """What each stage holds."""


@dataclass(frozen=True)
class NoPlan:
    """Nothing fits; ``hopeless``: nor would it on any number of such devices."""

    because: str
    hopeless: bool


def choose(problem: Problem, devices: int) -> Choice | NoPlan:
    """Choose for ``devices`` devices; what was found out for this problem is kept."""
    return planner_of(problem).choose(devices)


class Planner:
    """All that is known of one problem."""

    def __init__(self, problem: Problem) -> None:
        self.problem = problem
        self.model = Model(problem.costs, problem.micro_batch)
        self._entries: list[Entry] = []
        """All of up to ``_listed`` devices, by their bounds."""
        self._listed = 0
        self._answers: dict[int, Choice | NoPlan] = {}
        self._with_slow: dict[tuple[tuple[int, ...], tuple[float, ...]], Choice | None] = {}
        self._played: dict[tuple[Shape, tuple[int, ...], Paces], float] = {}

    def choose(self, devices: int) -> Choice | NoPlan:
        """The best for ``devices`` devices; known ones at once."""
        if devices not in self._answers:
            self._answers[devices] = self._choose(devices)
        return self._answers[devices]

    def knows(self, devices: int) -> bool:
        """Whether the answer for so many is there already."""
        return devices in self._answers

    def seconds(self, shape: Shape, cuts: tuple[int, ...], paces: Paces = ()) -> float:
        """What a step of a given plan takes, played as a candidate is."""
        asked = shape, cuts, paces
        if asked not in self._played:
            entry = self._seated(shape, self.model.cut_at(cuts), paces, memory=0)
            assert isinstance(entry, Entry)
            entry.play(self.problem)
            self._played[asked] = entry.step_seconds
        return self._played[asked]

    def choose_with_slow(
        self, devices: tuple[int, ...], factors: tuple[float, ...]
    ) -> Choice | None:
        """On all of these nodes, of ``devices`` devices each, of which node i takes ``factors[i]``
        times as long: the slowest, which stand last, get fewer layers. None: nothing fits.
        """
        asked = devices, factors
        if asked not in self._with_slow:
            self._with_slow[asked] = self._choose_with_slow(devices, factors)
        return self._with_slow[asked]

    def _choose_with_slow(
        self, devices: tuple[int, ...], factors: tuple[float, ...]
    ) -> Choice | None:
        there = sum(devices)
        self._list(there)
        shapes = dict.fromkeys(entry.shape for entry in self._entries)  # the most promising first
        wanted = [s for s in shapes if there - devices[-1] < s.world <= there]
        tried = []
        for shape in wanted[:_MOST_WITH_SLOW]:
            if not (paces := paces_by_node(shape, devices, factors)):
                continue
            slowest = [max(at_stage) for at_stage in zip(*paces, strict=True)]
            cutting = self.model.cutting_for(slowest)
            entry = self._seated(shape, cutting, paces, self.problem.device_memory_bytes)
            if isinstance(entry, Entry):
                entry.play(self.problem)
                tried.append(entry)
        if not tried:
            return None
        best = min(tried, key=lambda e: (e.step_seconds, e.shape.depth))
        return self._choice(best, (), there)

    def _seated(self, shape: Shape, cutting: Cutting, paces: Paces, memory: int) -> Entry | TooBig:
        spot = spots(shape.depth, shape.replicas, self.problem.devices_per_node)[0]
        entry = self._entry(cutting, shape, spot, memory)
        return replace(entry, paces=paces) if isinstance(entry, Entry) else entry

    def _choose(self, devices: int) -> Choice | NoPlan:
        if refusal := self._refuse_depths(devices):
            return refusal
        self._list(devices)
        there = [entry for entry in self._entries if entry.devices <= devices]
        if not there:
            return self._no_plan(devices)
        played = self._play_the_best(there)
        best, *slower = sorted(played, key=lambda e: (e.step_seconds, e.shape.depth, e.devices))
        # What other questions have had played is not known here: the answer hangs on no history.
        others = [_runner_up(best, entry, entry.step_seconds, False) for entry in slower]
        others += [
            _runner_up(best, entry, entry.bound, True)
            for entry in there[len(played) : len(played) + 2 * RUNNERS_UP]
        ]
        return self._choice(best, others, devices)

    def _play_the_best(self, entries: Sequence[Entry]) -> list[Entry]:
        """Play those that may be the best, the most promising first."""
        least, played = float("inf"), []
        for entry in entries:
            if entry.bound > least:
                break
            entry.play(self.problem)
            least = min(least, entry.step_seconds)
            played.append(entry)
        return played

    # --- candidates ---------------------------------------------------------------------------

    def _list(self, devices: int) -> None:
        """Know all shapes of up to ``devices`` devices."""
        if devices > self._listed:
            self._entries += self._fresh(self._listed, devices)
            self._entries.sort(key=lambda e: (e.bound, e.shape.depth, e.devices))
            self._listed = devices

    def _fresh(self, known: int, devices: int) -> Iterator[Entry]:
        for depth in range(1, min(self.model.layers, devices) + 1):
            if not self.problem.depths.allow(depth):
                continue
            for replicas in self._replicas(devices // depth):
                shape = _shape(depth, replicas, self.problem.micro_batch)
                for spot in spots(depth, replicas, self.problem.devices_per_node):
                    if known < spot.devices <= devices:
                        cutting = self.model.cutting(depth)
                        entry = self._entry(cutting, shape, spot, self.problem.device_memory_bytes)
                        if isinstance(entry, Entry):
                            yield entry

    def _replicas(self, most: int) -> Iterator[int]:
        """Of those that leave a replica equally many micro-batches only the fewest: more of them
        only make the sum of gradients longer.
        """
        before = 0
        for replicas in range(1, min(most, self.problem.micro_batches) + 1):
            each = self.problem.per_replica(replicas)
            if each != before:
                yield replicas
            before = each

    def _entry(self, cutting: Cutting, shape: Shape, spot: Spots, memory: int) -> Entry | TooBig:
        problem, replicas = self.problem, shape.replicas
        count = problem.per_replica(replicas)
        copies = problem.costs.state_copies
        caps = in_flight_caps(cutting, copies, problem.schedule, count, memory)
        if isinstance(caps, TooBig):
            return caps
        pipeline = cutting.pipeline(problem.costs, replicas, spot.within_node)
        bound = least_seconds(pipeline, count, problem.last_size(replicas), caps)
        return Entry(spot.devices, shape, cutting, pipeline, count, caps, bound)

    def _too_big(self, depth: int, replicas: int) -> TooBig:
        count = self.problem.per_replica(min(replicas, self.problem.micro_batches))
        copies, memory = self.problem.costs.state_copies, self.problem.device_memory_bytes
        cutting = self.model.cutting(depth)
        found = in_flight_caps(cutting, copies, self.problem.schedule, count, memory)
        assert isinstance(found, TooBig)
        return found

    # --- words --------------------------------------------------------------------------------

    def _choice(self, best: Entry, others: Sequence[Candidate], devices: int) -> Choice:
        shapes = dict.fromkeys(str(other.shape) for other in others if other.shape != best.shape)
        first = {str(other.shape): other for other in reversed(others)}
        runners_up = tuple(first[shape] for shape in shapes)[:RUNNERS_UP]
        copies = self.problem.costs.state_copies
        return Choice(
            shape=best.shape,
            cuts=best.cutting.cuts,
            in_flight=best.in_flight,
            seconds=best.step_seconds,
            bubble=best.bubble,
            because=self._because(best, runners_up, devices),
            runners_up=runners_up,
            stages=held(best.cutting, copies, best.in_flight, best.micro_batches),
        )

    def _because(self, best: Entry, runners_up: Sequence[Candidate], devices: int) -> str:
        count = self.problem.micro_batches
        batches = f"{count} micro-batch{'es' * (count != 1)}"
        took = f"an estimated {_ms(best.step_seconds)} a step of {batches}"
        said = f"{best.shape} takes {took}"
        if runners_up:
            said += "; " + runners_up[0].because.removesuffix(".")
        spare = devices - best.shape.world
        stay = "stays" if spare == 1 else "stay"
        return said + (f"; {spare} of {devices} devices {stay} spare." if spare else ".")

    def _refuse_depths(self, devices: int) -> NoPlan | None:
        fewest, layers = self.problem.depths.fewest, self.model.layers
        asked = f"No plan fits: plan.depth asks for at least {fewest} stages,"
        if fewest > layers:
            mend = f"Set plan.depth to at most {layers}."
            return NoPlan(f"{asked} the program has {layers} layers. {mend}", hopeless=True)
        if fewest > devices:
            there = "there is 1 device" if devices == 1 else f"there are {devices} devices"
            return NoPlan(f"{asked} {there}.", hopeless=False)
        return None

    def _no_plan(self, devices: int) -> NoPlan:
        """Say how near the leanest shape came, and what would help."""
        depths = [d for d in range(1, devices + 1) if self.problem.depths.allow(d)]
        depths = [depth for depth in depths if depth <= self.model.layers]
        big = [self._too_big(depth, devices // depth) for depth in depths]
        nearest = min(big, key=lambda one: one.num_bytes)
        at_most = min(self.model.layers, self.problem.depths.most or self.model.layers)
        hopeless = depths[-1] == at_most
        mend = (
            "Try a smaller plan.micro_batch, more layers to cut between, or larger devices."
            if hopeless
            else f"More than {devices} device{'s' * (devices != 1)} would allow more stages."
        )
        return NoPlan(
            f"No plan fits: stage {nearest.stage} needs {_gb(nearest.num_bytes)}, the smallest"
            f" device has {_gb(self.problem.device_memory_bytes)}. {mend}",
            hopeless=hopeless,
        )


@lru_cache(maxsize=64)
def planner_of(problem: Problem) -> Planner:
    """The one that knows ``problem``."""
    return Planner(problem)


@lru_cache(maxsize=1 << 15)
def _shape(depth: int, replicas: int, micro_batch: int) -> Shape:
    return Shape(depth=depth, replicas=replicas, micro_batch=micro_batch)


def _runner_up(best: Entry, entry: Entry, seconds: float, is_bound: bool) -> Candidate:
    took = f"{'at least ' if is_bound else ''}{_ms(seconds)}"
    return Candidate(
        shape=entry.shape,
        cuts=entry.cutting.cuts,
        in_flight=entry.in_flight,
        seconds=seconds,
        bubble=0.0 if is_bound else entry.bubble,
        is_bound=is_bound,
        because=f"{entry.shape} would take {took}: {_loses_by(best, entry)}.",
    )


def _loses_by(best: Entry, other: Entry) -> str:
    """The part of its step in which it is furthest behind."""
    parts = zip(_parts(best), _parts(other), strict=True)
    (_, mine), (what, its) = max(parts, key=lambda two: two[1][1] - two[0][1])
    if its <= mine:
        return "no part of it is faster"
    return f"{what} {_ms(its)} instead of {_ms(mine)}"


def _parts(entry: Entry) -> tuple[tuple[str, float], ...]:
    pipeline = entry.pipeline
    slowest = max(times.each for times in pipeline.stages)
    once = sum(times.forward + times.backward for times in pipeline.stages)
    return (
        ("its busiest stage works", slowest * entry.micro_batches),
        ("filling and emptying the pipeline takes", once - slowest),
        ("messages between stages take", 2 * sum(hop.seconds for hop in pipeline.hops)),
        ("summing gradients takes", max(pipeline.reduce)),
        ("the vote and the optimizer take", pipeline.after),
    )


def _ms(seconds: float) -> str:
    return f"{seconds * 1000:,.1f} ms" if seconds < 10 else f"{seconds:,.1f} s"


def _gb(num_bytes: float) -> str:
    return f"{num_bytes / 1e9:,.1f} GB" if num_bytes >= 1e9 else f"{num_bytes / 1e6:,.1f} MB"
