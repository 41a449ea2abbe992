"""From a loss to the first new step on all ranks: Varuna beside torchrun's elastic agents.

    python -m tests.bench.recovery [--quick] [--rounds N] [--json]

Both train the same small GPT on four nodes with a batch of the same samples; both are timed by the
same clock, which the ranks themselves write (:mod:`tests.bench.programs.clocked_gpt`). Rounds
alternate, everything is started anew in each. Then what only Varuna is asked: three of eight nodes
at once, a second loss during the launch, a frozen node, and one that is told that it goes.
"""

import json
import random
import shutil
import signal
import tempfile
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from controller.api.schemas import GenerationView, JobView, RecoveryPhases, RecoveryView
from controller.client.cluster import Cluster
from controller.client.jobs import send
from controller.client.pack import pack
from controller.client.rest import job_path
from controller.core.jobspec import Checkpointing, Every, JobSpec, NodeRange, Plan
from controller.core.states import GenerationState
from controller.settings import Settings
from tests.bench import figures
from tests.bench.clock import Clock, Gap
from tests.bench.figures import median, ratio, tell
from tests.bench.torchrun import Torchrun
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
    is_covered: bool | None = None
    """Whether the survivors of an unannounced loss held every stage."""
    seat_empty_s: float | None = None
    """From a notice until nothing ran on its node any more."""
    phases: dict[str, float | None] = field(default_factory=dict)


class Varuna:
    """A cluster of local agents and one job at a time."""

    def __init__(self, cluster: Cluster) -> None:
        self.cluster = cluster
        self._job = ""

    def start(self, nodes: int, most_deep: int, name: str) -> None:
        """A job on ``nodes`` nodes, trained until steady."""
        self.cluster.add([f"node-{i}" for i in range(1, nodes + 1)])
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
        self.cluster.fleet.delete([machine.name for machine in self.cluster.fleet.list()])

    def strike(self, names: list[str], number: signal.Signals = signal.SIGKILL) -> float:
        """Signal all processes of nodes at once; when."""
        return strike(tree(pid for name in names for pid in self.cluster.fleet.pids(name)), number)

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


# --- what happens to Varuna's nodes


def kill_one(varuna: Varuna, chance: random.Random) -> Outcome:
    """SIGKILL all of one seated node."""
    return _loss(varuna, [chance.choice(varuna.seated())])


def kill_three(varuna: Varuna, chance: random.Random) -> Outcome:
    """SIGKILL three nodes at once."""
    return _loss(varuna, chance.sample(varuna.seated(), 3))


def freeze_one(varuna: Varuna, chance: random.Random) -> Outcome:
    """SIGSTOP all of one node: no socket closes, only silence tells."""
    return _loss(varuna, [chance.choice(varuna.seated())], signal.SIGSTOP)


def kill_during_launch(varuna: Varuna, chance: random.Random) -> Outcome:
    """SIGKILL one node, and another of the survivors as soon as the next launch is under way."""
    was, before = varuna.newest(), varuna.clock.pids()
    since = varuna.strike([chance.choice(varuna.seated())])
    launched = varuna.wait_for_launch(was.number)
    varuna.strike([launched.seats[-1].node])
    return varuna.outcome(since, before, was)


def announce_one(varuna: Varuna, chance: random.Random) -> Outcome:
    """Tell one node that it goes; it must hold no seat when its time is over."""
    was, before = varuna.newest(), varuna.clock.pids()
    victim, since = chance.choice(varuna.seated()), time.monotonic()
    varuna.cluster.fleet.notice(victim, NOTICE_SECONDS)
    with ThreadPoolExecutor(1) as beside:
        emptied = beside.submit(varuna.emptied_at, victim)
        outcome = varuna.outcome(since, before, was)
        return replace(outcome, seat_empty_s=emptied.result() - since)


def _loss(varuna: Varuna, names: list[str], number: signal.Signals = signal.SIGKILL) -> Outcome:
    was, before = varuna.newest(), varuna.clock.pids()
    outcome = varuna.outcome(varuna.strike(names, number), before, was)
    held = {seat.stage for seat in was.seats if seat.node not in names}
    return replace(outcome, is_covered=held == {seat.stage for seat in was.seats})


@dataclass(frozen=True)
class Scenario:
    """One kind of loss."""

    name: str
    nodes: int
    most_deep: int
    happens: Callable[[Varuna, random.Random], Outcome]


LOSS_OF_ONE = Scenario("kill 1 of 4", 4, 3, kill_one)
OTHERS = (
    Scenario("kill 3 of 8", 8, 4, kill_three),
    Scenario("kill during launch", 4, 3, kill_during_launch),
    Scenario("freeze 1 of 4", 4, 3, freeze_one),
    Scenario("notice to 1 of 4", 4, 3, announce_one),
)


def varuna_once(cluster: Cluster, scenario: Scenario, round_: int) -> Outcome:
    """Start, train, strike, measure, end."""
    chance = random.Random(f"{scenario.name} {round_}")
    varuna = Varuna(cluster)
    varuna.start(scenario.nodes, scenario.most_deep, f"{scenario.name.replace(' ', '-')}-{round_}")
    time.sleep(chance.random())  # strike at any moment of a step
    outcome = scenario.happens(varuna, chance)
    varuna.finish()
    _tell(f"varuna, {scenario.name}", outcome)
    return outcome


def torchrun_once(folder: Path, round_: int) -> Outcome:
    """The same with the rival, one of four."""
    work = {"args": MODEL, "batch_size": BATCH_SIZE, "every": SAVE_EVERY}
    with Torchrun(folder, agents=4, at_least=2, work=work) as rival:
        clock = rival.clock
        until(
            lambda: clock.everywhere(ranks=4) >= STEADY_STEP or None,
            f"steady training of torchrun (see {folder})",
            START_SECONDS,
        )
        time.sleep(random.Random(f"torchrun {round_}").random())
        before, step_s = clock.pids(), clock.step_seconds()
        since = rival.kill_last()
        try:
            gap = until(
                lambda: clock.gap(since, before, ranks=3), "the first new step", RECOVER_SECONDS
            )
        except TimeoutError:
            outcome = Outcome(None, step_s=step_s)
        else:
            outcome = Outcome(gap.seconds, gap.pause, gap.lost_steps, gap.ranks, step_s)
    _tell("torchrun, kill 1 of 4", outcome)
    return outcome


@contextmanager
def fresh_cluster(folder: Path) -> Iterator[Cluster]:
    """A controller and a warm fleet, without nodes."""
    with Cluster(folder, port=0) as cluster:
        cluster.fleet.wait_for_torch()
        yield cluster


def main() -> None:
    """Measure and tell."""
    called = figures.flags(__doc__ or "", quick_rounds=1, full_rounds=5)
    machine = figures.Machine()
    folder = Path(tempfile.mkdtemp(prefix="varuna-bench-"))
    ours: dict[str, list[Outcome]] = {}
    rivals: list[Outcome] = []
    for round_ in range(called.rounds):
        machine.look()
        with fresh_cluster(folder / f"varuna-{round_}") as cluster:
            ours.setdefault(LOSS_OF_ONE.name, []).append(varuna_once(cluster, LOSS_OF_ONE, round_))
        rivals.append(torchrun_once(folder / f"torchrun-{round_}", round_))
    for scenario in OTHERS:
        machine.look()
        with fresh_cluster(folder / scenario.name.replace(" ", "-")) as cluster:
            ours[scenario.name] = [
                varuna_once(cluster, scenario, round_) for round_ in range(1 if called.quick else 3)
            ]
    shutil.rmtree(folder, ignore_errors=True)
    report = {
        "bench": "recovery",
        "quick": called.quick,
        "machine": machine.view(),
        "work": {"model": MODEL, "batch_size": BATCH_SIZE, "save_every_steps": SAVE_EVERY},
        "notice_s": NOTICE_SECONDS,
        "lost_after_s": Settings.model_fields["lost_after"].default,
        "varuna": {name: _sum_up(outcomes) for name, outcomes in ours.items()},
        "torchrun": {LOSS_OF_ONE.name: _sum_up(rivals)},
    }
    report["ratio"] = ratio(
        median(o.gap_s for o in ours[LOSS_OF_ONE.name]), median(o.gap_s for o in rivals)
    )
    _tell_all(report)
    figures.end(report)


def _sum_up(outcomes: list[Outcome]) -> dict[str, Any]:
    """Medians, and each round as it was."""
    return {
        "median_gap_s": median(o.gap_s for o in outcomes),
        "max_gap_s": max((o.gap_s for o in outcomes if o.gap_s is not None), default=None),
        "median_pause_s": median(o.pause_s for o in outcomes),
        "not_recovered": sum(o.gap_s is None for o in outcomes),
        "lost_steps": [o.lost_steps for o in outcomes],
        "covered": [o.is_covered for o in outcomes],
        "seat_empty_s": [o.seat_empty_s for o in outcomes],
        "median_step_s": median(o.step_s for o in outcomes),
        "median_phases_s": {
            phase: median(o.phases.get(phase) for o in outcomes)
            for phase in RecoveryPhases.model_fields
            if any(o.phases.get(phase) is not None for o in outcomes)
        },
        "rounds": [asdict(o) for o in outcomes],
    }


def _tell(what: str, outcome: Outcome) -> None:
    more = f", {outcome.shapes}, from {outcome.resumed_from}" if outcome.shapes else ""
    tell(
        f"{what}: gap {figures.shown(outcome.gap_s)} s, lost steps "
        f"{figures.shown(outcome.lost_steps)}{more}"
    )


def _tell_all(report: dict[str, Any]) -> None:
    tell()
    figures.table(
        ["", "median gap s", "max gap s", "median pause s", "lost steps", "step s"],
        [
            [
                f"{side}, {name}",
                sums["median_gap_s"],
                sums["max_gap_s"],
                sums["median_pause_s"],
                " ".join(map(figures.shown, sums["lost_steps"])),
                sums["median_step_s"],
            ]
            for side in ("varuna", "torchrun")
            for name, sums in report[side].items()
        ],
    )
    for name, sums in report["varuna"].items():
        if covered := [one for one in sums["covered"] if one is not None]:
            tell(f"survivors covered the model, {name}: {sum(covered)} of {len(covered)}")
        if any(sums["seat_empty_s"]):
            told = ", ".join(map(figures.shown, sums["seat_empty_s"]))
            tell(f"seat empty after a notice of {NOTICE_SECONDS:.0f} s: {told} s")
        phases = "  ".join(f"{p} {figures.shown(s)}" for p, s in sums["median_phases_s"].items())
        tell(f"phases of {name}: {phases}")
    tell(f"ratio of medians, varuna to torchrun: {figures.shown(report['ratio'])}")
    tell(f"load: {report['machine']['load1']} on {report['machine']['cores']} cores")


if __name__ == "__main__":
    main()
