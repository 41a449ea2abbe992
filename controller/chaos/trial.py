"""One trial: the deeds at their times, what was seen meanwhile, and what the controller says of it
afterwards.
"""

import functools
import statistics
import time
from collections import defaultdict, deque
from collections.abc import Sequence

from controller.api.schemas import (
    GenerationView,
    JobView,
    LedgerView,
    RecoveryView,
    SeriesPoint,
    SeriesView,
)
from controller.chaos import verdict
from controller.chaos.deeds import Deed
from controller.chaos.ground import Ground
from controller.chaos.report import Report
from controller.chaos.verdict import Launch
from controller.chaos.watch import Watch
from controller.client import output
from controller.client.rest import CliError, job_path
from controller.core.states import JobState

_TURN_SECONDS = 0.05
_FIRST_SECONDS = 120.0
_QUIET_SECONDS = 120.0
"""For the steps after the last deed."""


class Trial:
    """Of the job that ``watch`` looks at, on ``ground``; ``report`` is filled in."""

    def __init__(self, ground: Ground, watch: Watch, report: Report) -> None:
        self._ground = ground
        self._watch = watch
        self._report = report

    def go(self, deeds: Sequence[Deed], seconds: float) -> list[Launch]:
        """Until all is mended and the job has gone on; its launches."""
        self._wait_for_the_first_steps()
        try:
            self._do_all(deque(deeds), seconds)
            problem = self._wait_until_quiet()
        finally:
            self._ground.mend()
        self._report.done, self._report.left_out = self._ground.done, self._ground.left_out
        return self._look_back(problem)

    def _wait_for_the_first_steps(self) -> None:
        deadline = time.monotonic() + _FIRST_SECONDS
        while (job := self._watch.job_view()).step < verdict.MORPH_STEPS:
            self._watch.look(set(), controller_is_up=True)
            if job.state.is_over or time.monotonic() > deadline:
                raise CliError(f"The job has not begun to train: {job.message}")
            time.sleep(_TURN_SECONDS)

    def _do_all(self, deeds: deque[Deed], seconds: float) -> None:
        """Each deed at its time, or as soon after as the ones before leave room."""
        self._watch.began = began = time.monotonic()
        while deeds or time.monotonic() < began + seconds:
            while deeds and time.monotonic() >= began + deeds[0].at:
                deed = deeds.popleft()
                output.note(str(deed))
                self._ground.do(deed)
            self._turn()

    def _turn(self) -> None:
        ground, watch = self._ground, self._watch
        ground.tick()
        watch.deaths += [name for name in ground.dead() if name not in watch.deaths]
        watch.look(set(ground.troubled), ground.controller_is_up)
        time.sleep(_TURN_SECONDS)

    def _wait_until_quiet(self) -> str:
        """Until enough steps were committed after the last deed; else why not."""
        deadline = time.monotonic() + _QUIET_SECONDS
        done: dict[int, int] = {}
        while time.monotonic() < deadline:
            self._turn()
            job = self._watch.job_view()
            if job.state is JobState.SUCCEEDED:
                return ""
            if job.state.is_over:
                return f"it is {job.state}: {job.message}"
            first = done.setdefault(job.generation or 0, job.step)
            if job.state is JobState.RUNNING and job.step > first + verdict.MORPH_STEPS:
                return ""
        return f"no {verdict.MORPH_STEPS} steps within {_QUIET_SECONDS:.0f} s: {job.message}"

    def _look_back(self, problem: str) -> list[Launch]:
        """What the controller knows of the whole run, judged; all launches."""
        watch = self._watch
        ask, path = watch.ask(), functools.partial(job_path, watch.job)
        job = ask.get(path(), JobView)
        ledger = ask.get(path("/ledger"), LedgerView)
        points = ask.get(path("/series"), SeriesView, points=10_000).points
        generations = ask.all(path("/generations"), GenerationView)
        recoveries = ask.all(path("/recoveries"), RecoveryView)
        launches = _launches(generations, points)
        gap = ledger.first_gap
        report = self._report
        report.invariants = [
            verdict.went_on(problem, job.step),
            verdict.each_sample_once(ledger.steps, f"step {gap.step}: {gap.what}" if gap else None),
            verdict.steps_monotone(watch.seen, launches),
            verdict.nothing_saved_is_lost(watch.seen, launches, watch.condemned()),
        ]
        report.steps, report.recoveries = job.step, job.recoveries
        report.lost_steps = job.lost_steps
        gaps = [view.gap_s for view in recoveries if view.gap_s is not None]
        report.median_gap_s = statistics.median(gaps) if gaps else None
        kept = [point for point in points if not point.superseded]
        wall = (kept[-1].at - kept[0].at).total_seconds() + kept[0].step_time_seconds
        share = job.step / len(kept)  # of a thinned series
        report.goodput = min(1.0, share * sum(point.step_time_seconds for point in kept) / wall)
        return launches


def _launches(generations: Sequence[GenerationView], points: Sequence[SeriesPoint]) -> list[Launch]:
    """Those that were given seats to train, by number."""
    losses: defaultdict[int, dict[int, float | None]] = defaultdict(dict)
    for point in points:
        losses[point.generation][point.step] = point.loss
    return [
        Launch(g.number, g.resumed_from.step, losses[g.number], g.shape.micro_batch)
        for g in generations
        if g.launched_at and g.resumed_from and g.shape
    ]
