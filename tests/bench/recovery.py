"""From a loss to the first new step on all ranks: Varuna beside torchrun's elastic agents.

    python -m tests.bench.recovery [--quick] [--rounds N] [--only CASE] [--json]

Both train the same small GPT on four nodes with a batch of the same samples; both are timed by the
same clock, which the ranks themselves write (:mod:`tests.bench.programs.clocked_gpt`). Rounds
alternate, everything is started anew in each. Then what only Varuna is asked: three of eight nodes
at once, a second loss during the launch, a frozen node, one that is told that it goes, and one
whose cables are pulled: all of them, or only those to the other trainers.
"""

import os
import random
import shutil
import signal
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, contextmanager
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any
from unittest.mock import patch

from controller.api.schemas import RecoveryPhases
from controller.client.cluster import Cluster
from controller.settings import Settings
from tests.bench import figures, network
from tests.bench.figures import median, ratio, tell
from tests.bench.network import CONTROL, HUB, PEERS, Network, WiredFleet
from tests.bench.torchrun import Torchrun
from tests.bench.trees import until
from tests.bench.varuna import (
    BATCH_SIZE,
    MODEL,
    NOTICE_SECONDS,
    RECOVER_SECONDS,
    SAVE_EVERY,
    START_SECONDS,
    STEADY_STEP,
    Outcome,
    Varuna,
)

# --- what happens to Varuna's nodes


def kill_one(varuna: Varuna, chance: random.Random) -> Outcome:
    """SIGKILL all of one seated node."""
    return _struck(varuna, [chance.choice(varuna.seated())])


def kill_three(varuna: Varuna, chance: random.Random) -> Outcome:
    """SIGKILL three nodes at once."""
    return _struck(varuna, chance.sample(varuna.seated(), 3))


def freeze_one(varuna: Varuna, chance: random.Random) -> Outcome:
    """SIGSTOP all of one node: no socket closes, only silence tells."""
    return _struck(varuna, [chance.choice(varuna.seated())], signal.SIGSTOP)


def cut_one(varuna: Varuna, chance: random.Random) -> Outcome:
    """Pull all cables of one node, which trains on as far as it can."""
    return _cut(varuna, chance, [CONTROL, PEERS])


def cut_peers(varuna: Varuna, chance: random.Random) -> Outcome:
    """Pull the cable from one node to the others; every agent still reaches the controller."""
    return _cut(varuna, chance, [PEERS])


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
    varuna.fleet.notice(victim, NOTICE_SECONDS)
    with ThreadPoolExecutor(1) as beside:
        emptied = beside.submit(varuna.emptied_at, victim)
        outcome = varuna.outcome(since, before, was)
        return replace(outcome, seat_empty_s=emptied.result() - since)


def _struck(varuna: Varuna, names: list[str], number: signal.Signals = signal.SIGKILL) -> Outcome:
    return _lost(varuna, names, lambda: varuna.strike(names, number))


def _cut(varuna: Varuna, chance: random.Random, switches: list[str]) -> Outcome:
    fleet, victim = varuna.fleet, chance.choice(varuna.seated())
    assert isinstance(fleet, WiredFleet), "its cables cannot be pulled"
    return _lost(varuna, [victim], lambda: fleet.network.cut(victim, switches))


def _lost(varuna: Varuna, names: list[str], happens: Callable[[], float]) -> Outcome:
    """What becomes of it when ``happens`` takes ``names``, at the moment that it returns."""
    was, before = varuna.newest(), varuna.clock.pids()
    outcome = varuna.outcome(happens(), before, was)
    held = {seat.stage for seat in was.seats if seat.node not in names}
    return replace(outcome, is_covered=held == {seat.stage for seat in was.seats})


# --- the ground they stand on, and all that is tried


@contextmanager
def local(folder: Path) -> Iterator[Varuna]:
    """A controller and a warm fleet, without nodes."""
    with Cluster(folder, port=0) as cluster:
        cluster.fleet.wait_for_torch()
        yield Varuna(cluster, cluster.fleet)


@contextmanager
def wired(folder: Path) -> Iterator[Varuna]:
    """The same, with a network for each node to come."""
    in_the_open = {
        "VARUNA_HOST": HUB,
        "VARUNA_INSECURE_HTTP": "1",
        "VARUNA_AGENT_INSECURE_HTTP": "1",
        "NO_PROXY": HUB,
    }
    with (
        patch.dict(os.environ, in_the_open),
        Network() as wires,
        Cluster(folder, port=0) as cluster,
        WiredFleet(wires, cluster) as fleet,
    ):
        yield Varuna(cluster, fleet)


@dataclass(frozen=True)
class Scenario:
    """One kind of loss."""

    name: str
    nodes: int
    most_deep: int
    happens: Callable[[Varuna, random.Random], Outcome]
    ground: Callable[[Path], AbstractContextManager[Varuna]] = local

    @property
    def why_not(self) -> str | None:
        """Why it cannot be tried here, as a sentence."""
        return network.why_not() if self.ground is wired else None


LOSS_OF_ONE = Scenario("kill 1 of 4", 4, 3, kill_one)
OTHERS = (
    Scenario("kill 3 of 8", 8, 4, kill_three),
    Scenario("kill during launch", 4, 3, kill_during_launch),
    Scenario("freeze 1 of 4", 4, 3, freeze_one),
    Scenario("notice to 1 of 4", 4, 3, announce_one),
    Scenario("cut 1 of 4", 4, 3, cut_one, wired),
    Scenario("cut 1 of 4 from its peers", 4, 3, cut_peers, wired),
)


def varuna_once(varuna: Varuna, scenario: Scenario, round_: int) -> Outcome:
    """Start, train, strike, measure, end."""
    chance = random.Random(f"{scenario.name} {round_}")
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


def main() -> None:
    """Measure and tell."""
    names = [scenario.name for scenario in (LOSS_OF_ONE, *OTHERS)]
    called = figures.flags(__doc__ or "", quick_rounds=1, full_rounds=5, cases=names)
    wanted = [scenario for scenario in OTHERS if called.only in (None, scenario.name)]
    for scenario in wanted:
        if scenario.why_not and called.only:
            sys.exit(scenario.why_not)
    machine = figures.Machine()
    folder = Path(tempfile.mkdtemp(prefix="varuna-bench-"))
    ours: dict[str, list[Outcome]] = {}
    rivals: list[Outcome] = []
    for round_ in range(called.rounds if called.only in (None, LOSS_OF_ONE.name) else 0):
        machine.look()
        with local(folder / f"varuna-{round_}") as varuna:
            ours.setdefault(LOSS_OF_ONE.name, []).append(varuna_once(varuna, LOSS_OF_ONE, round_))
        rivals.append(torchrun_once(folder / f"torchrun-{round_}", round_))
    for scenario in wanted:
        if scenario.why_not:
            tell(f"{scenario.name}: not tried. {scenario.why_not}")
            continue
        ours[scenario.name] = []
        for round_ in range(1 if called.quick else 3):
            machine.look()
            with scenario.ground(folder / f"{scenario.name.replace(' ', '-')}-{round_}") as varuna:
                ours[scenario.name].append(varuna_once(varuna, scenario, round_))
    shutil.rmtree(folder, ignore_errors=True)
    report = {
        "bench": "recovery",
        "quick": called.quick,
        "machine": machine.view(),
        "work": {"model": MODEL, "batch_size": BATCH_SIZE, "save_every_steps": SAVE_EVERY},
        "notice_s": NOTICE_SECONDS,
        "lost_after_s": Settings.model_fields["lost_after"].default,
        "varuna": {name: _sum_up(outcomes) for name, outcomes in ours.items()},
        "torchrun": {LOSS_OF_ONE.name: _sum_up(rivals)} if rivals else {},
        "not_tried": {s.name: s.why_not for s in wanted if s.why_not},
    }
    report["ratio"] = ratio(
        median(o.gap_s for o in ours.get(LOSS_OF_ONE.name, ())), median(o.gap_s for o in rivals)
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
