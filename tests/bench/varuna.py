"""Our side of the recovery bench: a job on nodes of this machine, and what became of a loss."""

import json
import signal
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

from controller.api.schemas import GenerationView, JobView, RecoveryView
from controller.client.cluster import Cluster
from controller.client.jobs import send
from controller.client.pack import pack
from controller.client.rest import job_path
from controller.cloud.port import Machine
from controller.core.jobspec import Checkpointing, Every, JobSpec, NodeRange, Plan
from controller.core.states import GenerationState
from tests.bench.clock import Clock, Gap
from tests.bench.trees import strike, tree, until

PROGRAMS = Path(__file__).parent / "programs"
MODEL = {"layers": 6, "width": 96, "heads": 4, "context": 64}
BATCH_SIZE = 24
"""Even among 2, 3, 4, 6 and 8 ranks."""
MICRO_BATCH = 3
"""Of Varuna's pipeline; the rival computes its share of the batch at once."""
SAVE_EVERY = 10
STEADY_STEP = 15
"""Warm, and a checkpoint is there."""
START_SECONDS = 300.0
RECOVER_SECONDS = 120.0
TOLD_SECONDS = 5.0
NOTICE_SECONDS = 30.0
"""As Azure and GCP give."""


@dataclass(frozen=True)
class Outcome:
    """One loss and what became of it."""

    gap_s: float | None
    """None: no new step within :data:`RECOVER_SECONDS`."""
    pause_s: float | None = None
    """From the last step before to the first one after: what an announced loss costs."""
    lost_steps: int | None = None
    ranks_after: int | None = None
    step_s: float | None = None
    """Of a step before the loss."""
    shapes: str | None = None
    resumed_from: str | None = None
    """The folder that was loaded."""
    launches: int | None = None
    ended_by: str | None = None
    """Why, to the controller, the launch ended that met the loss."""
    is_covered: bool | None = None
    """Whether the survivors of an unannounced loss held every stage."""
    seat_empty_s: float | None = None
    """From a notice until nothing ran on its node any more."""
    phases: dict[str, float | None] = field(default_factory=dict)


class Fleet(Protocol):
    """Nodes of this machine: a :class:`~controller.cloud.local.LocalFleet`, or one whose links can
    be cut.
    """

    def create(self, names: Sequence[str]) -> None: ...
    def delete(self, names: Sequence[str]) -> None: ...
    def list(self) -> tuple[Machine, ...]: ...
    def pids(self, name: str) -> tuple[int, int]: ...
    def notice(self, name: str, seconds: float) -> None: ...


class Varuna:
    """A cluster, its nodes and one job at a time."""

    def __init__(self, cluster: Cluster, fleet: Fleet) -> None:
        self.cluster = cluster
        self.fleet = fleet
        self._job = ""

    def start(self, nodes: int, most_deep: int, name: str) -> None:
        """A job on ``nodes`` nodes, trained until steady."""
        names = {f"node-{i}" for i in range(1, nodes + 1)}
        self.fleet.create(sorted(names))
        until(self._have_registered(names), "registered nodes", START_SECONDS)
        self.clock = Clock(self.cluster.folder / f"clock-{name}")
        spec = JobSpec(
            name=name,
            program="clocked_gpt.py",
            args={**MODEL, "clock": str(self.clock.path)},
            nodes=NodeRange(min=2, max=nodes),
            batch_size=BATCH_SIZE,
            steps=1_000_000,
            plan=Plan(depth=NodeRange(min=2, max=most_deep), micro_batch=MICRO_BATCH),
            checkpoint=Checkpointing(
                dir=str(self.cluster.folder / "checkpoints"), every=Every(steps=SAVE_EVERY)
            ),
        )
        bundle = pack(PROGRAMS, spec.program)
        spec = spec.model_copy(update={"bundle": bundle.digest})
        self._job = send(self.cluster.controller, spec, bundle).id
        until(self._is_steady, f"steady training of {name}", START_SECONDS)

    def finish(self) -> None:
        """Cancel the job and remove all nodes."""
        self.cluster.controller.post(job_path(self._job, "/actions/cancel"), {}, JobView)
        self.fleet.delete([machine.name for machine in self.fleet.list()])

    def strike(self, names: list[str], number: signal.Signals = signal.SIGKILL) -> float:
        """Signal all processes of nodes at once; when."""
        return strike(tree(pid for name in names for pid in self.fleet.pids(name)), number)

    def seated(self) -> list[str]:
        """The nodes that hold seats."""
        return list(dict.fromkeys(seat.node for seat in self.newest().seats))

    def newest(self) -> GenerationView:
        """The newest launch."""
        return self._generations()[-1]

    def outcome(self, since: float, before: frozenset[int], was: GenerationView) -> Outcome:
        """Wait for the first new step on all ranks, and for what the controller says of it."""
        step_s = self.clock.step_seconds()

        def look() -> Gap | None:
            if not self.clock.begun(before):
                return None
            newest = self.newest()
            running = newest.state is GenerationState.RUNNING
            return self.clock.gap(since, before, len(newest.seats)) if running else None

        try:
            gap = until(look, "the first new step", RECOVER_SECONDS, pause=0.01)
        except TimeoutError:
            return Outcome(None, step_s=step_s)
        told = self._recovery()
        newest = self.newest()
        return Outcome(
            gap_s=gap.seconds,
            pause_s=gap.pause,
            lost_steps=gap.lost_steps,
            ranks_after=gap.ranks,
            step_s=step_s,
            shapes=f"{was.shape} -> {newest.shape}",
            resumed_from=newest.resumed_from.folder if newest.resumed_from else None,
            launches=sum(
                g.launched_at is not None for g in self._generations() if g.number > was.number
            ),
            ended_by=self._ended_by(was.number),
            phases=told.phases.model_dump() if told else {},
        )

    def emptied_at(self, name: str) -> float:
        """When no trainer of node ``name`` runs any more."""
        told = self.cluster.folder / "agents" / name / "sessions.json"

        def look() -> float | None:
            return None if json.loads(told.read_text())["sessions"] else time.monotonic()

        return until(look, f"an empty {name}", NOTICE_SECONDS * 2)

    def wait_for_launch(self, after: int) -> GenerationView:
        """Until a generation newer than ``after`` is being launched."""

        def look() -> GenerationView | None:
            newest = self.newest()
            launching = newest.number > after and newest.state is GenerationState.LAUNCHING
            return newest if launching else None

        return until(look, "the launch", RECOVER_SECONDS, pause=0.005)

    def _is_steady(self) -> bool | None:
        if self.clock.everywhere(ranks=1) < STEADY_STEP:
            return None
        newest = self.newest()
        if newest.state is not GenerationState.RUNNING:
            return None
        return self.clock.everywhere(len(newest.seats)) >= STEADY_STEP or None

    def _have_registered(self, names: set[str]) -> Callable[[], bool | None]:
        return lambda: names <= {node.name for node in self.cluster.nodes()} or None

    def _ended_by(self, number: int) -> str | None:
        (found,) = (g for g in self._generations() if g.number == number)
        return found.end_reason

    def _generations(self) -> list[GenerationView]:
        return self.cluster.controller.all(job_path(self._job, "/generations"), GenerationView)

    def _recovery(self) -> RecoveryView | None:
        """What the controller says of it; None: to it this was none."""
        path = job_path(self._job, "/recoveries")

        def look() -> RecoveryView | None:
            over = [r for r in self.cluster.controller.all(path, RecoveryView) if r.ended_at]
            return over[-1] if over else None

        try:
            return until(look, "the controller's view", TOLD_SECONDS)
        except TimeoutError:
            return None
