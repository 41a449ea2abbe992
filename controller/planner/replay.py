"""Play a whole spot trace: what a job would get done, how often it would stop, what it would cost.
PURE, and the same trace twice gives the same numbers.

    a loss of nodes at work   stop: detect, decide, save what survivors hold together, launch, load;
                              where they do not hold every layer: back to the newest checkpoint
    a loss of spares          nothing
    nodes join                move, when :mod:`controller.planner.moving` finds it worth it
    fewer than the least      wait; zero is no exception

Nodes work in the order in which they joined; seats are filled node by node, so who is lost says
which layers are. A step that a stop interrupts is lost.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from math import inf

from controller.planner.moving import Losses, Move, weigh
from controller.planner.rates import Pace, Paces
from controller.planner.trace import Change


@dataclass(frozen=True)
class Stops:
    """What a stop takes; of the parts that grow with the model, per rank and node by node."""

    detect_seconds: float = 0.2
    decide_seconds: float = 0.4
    launch_seconds: float = 1.0
    """Stop, fork, rendezvous, first groups."""
    state_bytes: float = 0.0
    """Parameters and optimizer's state, of the whole model."""
    write_bytes_per_second: float = 100e6
    load_bytes_per_second: float = 400e6
    """Of one node."""

    def save(self, nodes: int) -> float:
        """The whole state, each node its share."""
        return self.state_bytes / max(1, nodes) / self.write_bytes_per_second

    def load(self, pace: Pace) -> float:
        """Each node its stage."""
        return self.state_bytes / (pace.depth or pace.nodes) / self.load_bytes_per_second


@dataclass(frozen=True)
class Policy:
    """How the job behaves."""

    fewest: int = 1
    most: float = inf
    checkpoint_steps: int | None = None
    checkpoint_seconds: float | None = 60.0
    min_gain: float = 0.05
    settle_seconds: float = 60.0
    salvages: bool = True
    """Survivors save what they hold."""
    grows: bool = True


@dataclass
class Outcome:
    """What came of it."""

    seconds: float = 0.0
    steps: int = 0
    """Kept ones."""
    lost_steps: int = 0
    losses: int = 0
    """Of nodes that were at work, one moment counts once."""
    salvaged: int = 0
    moves: int = 0
    """For nodes that joined."""
    stopped_seconds: float = 0.0
    waiting_seconds: float = 0.0
    training_seconds: float = 0.0
    kept_seconds: float = 0.0
    """In steps that were kept."""
    node_seconds: float = 0.0
    gaps: list[float] = field(default_factory=list)

    @property
    def goodput(self) -> float:
        """Seconds in kept steps by wall seconds."""
        return self.kept_seconds / self.seconds if self.seconds else 0.0


def replay(trace: Sequence[Change], paces: Paces, stops: Stops, policy: Policy) -> Outcome:
    """Play ``trace`` to its last moment."""
    job = _Job(paces, stops, policy)
    for change, until in zip(trace, [*(c.at for c in trace[1:]), trace[-1].at], strict=True):
        job.take(change)
        job.run(change.at, until)
    job.outcome.seconds = trace[-1].at - trace[0].at
    return job.outcome


class _Job:
    """The job as it stands."""

    def __init__(self, paces: Paces, stops: Stops, policy: Policy) -> None:
        self.outcome = Outcome()
        self._paces = paces
        self._stops = stops
        self._policy = policy
        self._nodes: list[str] = []
        """All there are, in the order in which they joined."""
        self._working: list[str] = []
        self._pace: Pace | None = None
        self._stopped = 0.0
        """Seconds of a stop that are still to come."""
        self._part = 0.0
        """Of the step that is being done."""
        self._since_saved: list[float] = []
        """Seconds of each step since the newest checkpoint."""
        self._saved_seconds = 0.0
        self._joined_at = -inf
        self._began = 0.0

    # --- what happens --------------------------------------------------------------------------

    def take(self, change: Change) -> None:
        """Nodes come and go."""
        lost = [node for node in self._working if node in change.left]
        self._nodes = [node for node in self._nodes if node not in change.left]
        self._nodes += [node for node in change.joined if node not in self._nodes]
        if change.joined:
            self._joined_at = change.at
        if lost:
            self._lose(lost)
        if self._pace is None:
            self._launch(stopped=self._stops.launch_seconds)

    def run(self, start: float, end: float) -> None:
        """From one moment to the next."""
        now = start
        self.outcome.node_seconds += (end - start) * len(self._nodes)
        while now < end:
            grow_at = max(now, self._joined_at + self._policy.settle_seconds)
            until = min(end, grow_at) if grow_at > now else end
            if self._wants_to_grow(now):
                now = min(until, now + self._move())
            now = self._pass(now, until)

    def _pass(self, now: float, until: float) -> float:
        """Stopped, waiting, or step after step."""
        span = until - now
        if self._pace is None:
            self.outcome.waiting_seconds += span
            return until
        still = min(self._stopped, span)
        self._stopped -= still
        self.outcome.stopped_seconds += still
        self._train(span - still)
        return until

    def _train(self, seconds: float) -> None:
        if self._pace is None or seconds <= 0:
            return
        each = self._pace.step_seconds
        self.outcome.training_seconds += seconds
        progress = self._part + seconds / each
        whole = int(progress + 1e-9)
        self._part = max(0.0, progress - whole)
        self._since_saved += [each] * whole
        self._saved_seconds += seconds
        self._save_when_due()

    def _save_when_due(self) -> None:
        """Saving is a copy in memory and a thread that writes: it stops nothing."""
        steps, seconds = self._policy.checkpoint_steps, self._policy.checkpoint_seconds
        if steps:
            due = len(self._since_saved) // steps * steps
        elif seconds and self._saved_seconds >= seconds and self._pace:
            beyond = self._saved_seconds % seconds
            due = max(0, len(self._since_saved) - int(beyond / self._pace.step_seconds))
            self._saved_seconds = beyond
        else:
            return
        self._keep(due)

    def _keep(self, steps: int) -> None:
        self.outcome.steps += steps
        self.outcome.kept_seconds += sum(self._since_saved[:steps])
        del self._since_saved[:steps]

    # --- stops ---------------------------------------------------------------------------------

    def _lose(self, lost: Sequence[str]) -> None:
        stops = self._stops
        self.outcome.losses += 1
        stopped = stops.detect_seconds + stops.decide_seconds + stops.launch_seconds
        if self._covers(lost):
            self.outcome.salvaged += 1
            stopped += stops.save(len(self._working) - len(lost))
            self._keep(len(self._since_saved))
        else:
            self.outcome.lost_steps += len(self._since_saved)
            self._since_saved.clear()
        self._launch(stopped)

    def _covers(self, lost: Sequence[str]) -> bool:
        """Whether who is left holds every stage, at a step that is whole."""
        if not self._policy.salvages or self._pace is None or self._stopped > 0:
            return False
        depth = self._pace.depth
        if depth is None:
            return False
        alive = [at for at, node in enumerate(self._working) if node not in lost]
        share = self._pace.devices_per_node
        held = {(at * share + device) % depth for at in alive for device in range(share)}
        return len(held) == depth

    def _launch(self, stopped: float) -> None:
        self._part = 0.0
        self._saved_seconds = 0.0
        count = int(min(len(self._nodes), self._policy.most))
        pace = self._paces.of(count) if count >= self._policy.fewest else None
        self._pace = pace
        self._working = self._nodes[: pace.nodes] if pace else []
        self._stopped = stopped + self._stops.load(pace) if pace else 0.0
        if pace:
            self.outcome.gaps.append(self._stopped)

    # --- growing -------------------------------------------------------------------------------

    def _wants_to_grow(self, now: float) -> bool:
        if self._pace is None or self._stopped > 0 or not self._policy.grows:
            return False
        count = int(min(len(self._nodes), self._policy.most))
        if count <= len(self._working) or now < self._joined_at + self._policy.settle_seconds:
            return False
        then = self._paces.of(count)
        if then is None:
            return False
        found = weigh(
            self._pace.step_seconds,
            then.step_seconds,
            min_gain=self._policy.min_gain,
            move_seconds=self._move_seconds(then),
            seconds_left=inf,
            losses=Losses(self.outcome.losses, now),
        )
        return isinstance(found, Move)

    def _move(self) -> float:
        """All stop after a step and save it: nothing is lost. How long that step still took."""
        self.outcome.moves += 1
        assert self._pace is not None
        rest = (1 - self._part) * self._pace.step_seconds
        self._train(rest)
        self._keep(len(self._since_saved))
        self._launch(self._stops.launch_seconds + self._stops.save(len(self._working)))
        return rest

    def _move_seconds(self, then: Pace) -> float:
        stops = self._stops
        return stops.launch_seconds + stops.save(len(self._working)) + stops.load(then)
