"""Training: a mini-batch through the pipeline, the vote, the optimizer's step; then the next.

Read :meth:`Loop.run` from the top. What all ranks must agree on, :mod:`trainer.replicas` asks; how
a checkpoint is written while the next steps are computed, :mod:`trainer.saves` knows.
"""

import math
import time
from collections.abc import Mapping
from contextlib import suppress

from trainer.checkpoint import SaveError
from trainer.contract.checkpoints import Committed
from trainer.contract.progress import (
    Evaluated,
    ExitCode,
    Finished,
    Forward,
    NonFinite,
    Phase,
    Save,
    StepCommitted,
    Stopped,
)
from trainer.contract.samples import positions_of
from trainer.contract.spec import RunSpec
from trainer.contract.topology import Seat, deal
from trainer.control import Control
from trainer.curves import Curves
from trainer.data import HeldOut
from trainer.groups import PeerLostError
from trainer.pace import Pace
from trainer.pipeline import Pipeline
from trainer.program import LoadedProgram
from trainer.replicas import Replicas, Totals, Vote, Wishes
from trainer.saves import Saves
from trainer.stages import Stage


class Loop:
    """One rank's training, from the step that it resumed from to the last."""

    def __init__(
        self,
        spec: RunSpec,
        stage: Stage,
        pipeline: Pipeline,
        replicas: Replicas,
        saves: Saves,
        control: Control,
        program: LoadedProgram,
    ) -> None:
        self._spec = spec
        self._seat = Seat.of(spec.rank, spec.shape)
        self._program = program
        self._curves = Curves.of(spec) if spec.rank == 0 else None
        self._stage = stage
        self._pipeline = pipeline
        self._pace = Pace(pipeline)
        self._replicas = replicas
        self._saves = saves
        self._control = control

    def run(self) -> ExitCode:
        """Train to the last step and save it, or stop before when that is ordered.

        Raises ProgramError, PeerLostError, HaltingError, StaleError; when the last step cannot be
        saved, SaveError or OSError.
        """
        done, last = self._control.standing.applied, self._spec.training.steps
        self._control.enter(Phase.FIRST_STEP)
        for step in range(done + 1, last + 1):
            began = time.monotonic()
            totals = self._pipeline.run(step, self._control.check)
            vote = self._vote(step, totals)
            if self._must_not_be_applied(vote):
                return self._stop_before(step)
            self._apply(step, vote)
            self._report(step, vote, time.monotonic() - began)
            if paced := self._pace.stepped(step):
                self._control.say(paced)
            if step == done + 1:
                self._control.enter(Phase.STEP)
            if self._is_to_be_evaluated(step) and not vote.wishes.stop:
                self._evaluate(step)
            if step == last:
                self._save_and_wait(step)
            elif vote.wishes.stop:
                return self._stop(step)
            elif vote.wishes.save and vote.wishes.is_busy:
                self._saves.put_off(step)
            elif vote.wishes.save:
                self._saves.start(step)
        return self._end()

    def _vote(self, step: int, totals: Totals) -> Vote:
        began = time.monotonic()
        self._replicas.sum_gradients()
        self._pace.reduced(time.monotonic() - began)
        self._control.standing.prepared = step
        return self._replicas.vote(totals, self._wishes(step))

    def _wishes(self, step: int) -> Wishes:
        self._saves.every_seconds = self._control.save_every or self._saves.every_seconds
        is_due = self._saves.is_due(step)
        if self._control.is_to_save.is_set():
            self._control.is_to_save.clear()
            is_due = True
        return Wishes(self._control.is_to_stop.is_set(), is_due, self._saves.is_busy)

    def _apply(self, step: int, vote: Vote) -> None:
        training, standing = self._spec.training, self._control.standing
        standing.vote_step, standing.ballot = step, vote.ballot
        if vote.samples != training.batch_size:
            raise RuntimeError(f"step {step} took {vote.samples} of {training.batch_size} samples")
        if vote.is_sound:
            self._saves.settle()
            standing.is_applying = True
            self._stage.apply(step, vote.gradient_scale(training.clip_grad_norm))
            standing.is_applying = False
        if self._stage.loss_scale:
            self._stage.loss_scale = self._stage.loss_scale.after(not vote.is_spoilt)
        standing.applied = step

    def _report(self, step: int, vote: Vote, seconds: float) -> None:
        positions = positions_of(step, self._spec.training.batch_size)
        self._saves.record(
            Committed(
                step=step,
                first_position=positions.start,
                samples=vote.samples,
                sample_ids_hash=vote.sample_ids_hash,
            )
        )
        line = StepCommitted(
            step=step,
            loss=_or_none(vote.loss),
            grad_norm=_or_none(vote.norm),
            samples=vote.samples,
            sample_ids_hash=vote.sample_ids_hash,
            metrics=_finite(vote.metrics),
            seconds=seconds,
            loss_scale=vote.loss_factor if self._stage.loss_scale else None,
            skipped=not vote.is_sound,
        )
        self._control.say(line)
        if self._curves:
            self._curves.add(line, vote.metrics)

    # --- evaluation ---------------------------------------------------------------------------

    def _is_to_be_evaluated(self, step: int) -> bool:
        """Every so many steps, and after the last."""
        every = self._spec.training.evaluate_every
        return every is not None and (step % every == 0 or step == self._spec.training.steps)

    def _evaluate(self, step: int) -> None:
        """All replicas share the held-out samples."""
        began = time.monotonic()
        self._control.enter(Phase.EVALUATION)
        seed, device = self._spec.training.seed, self._stage.device
        held_out = HeldOut(self._program.eval_dataset, seed, device)
        mine = deal(len(held_out), self._spec.shape)[self._seat.replica]
        totals = self._pipeline.evaluate(step, held_out, mine, self._control.check)
        sums = self._replicas.evaluation(totals)
        line = Evaluated(
            step=step,
            loss=_or_none(sums.mean),
            samples=sums.samples,
            metrics=_finite(sums.metrics),
            seconds=time.monotonic() - began,
        )
        self._control.say(line)
        if self._curves:
            self._curves.add(line, sums.metrics)
        self._control.enter(Phase.STEP)

    def _close_curves(self) -> None:
        if self._curves:
            self._curves.close()

    # --- a step that is not finite ------------------------------------------------------------

    def _must_not_be_applied(self, vote: Vote) -> bool:
        """Float16 overflows now and then: it skips the step and goes on with a smaller scale."""
        scale = self._stage.loss_scale
        return vote.is_spoilt and (scale is None or scale.is_smallest)

    def _stop_before(self, step: int) -> ExitCode:
        """Whoever is at fault says so; all stop as they were after the step before."""
        self._control.standing.prepared = step - 1
        what = self._pipeline.explain(step, self._control.check)
        if not self._replicas.is_any(what is not None) and self._spec.rank == 0:
            what = "a sum over the whole batch, though each part of it was when computed again"
        if what is not None:
            self._control.say(
                NonFinite(step=step, replica=self._seat.replica, stage=self._seat.stage, what=what)
            )
        return self._stop(step - 1)

    # --- the end, or a standstill -------------------------------------------------------------

    def _save_and_wait(self, step: int) -> None:
        self._control.enter(Phase.SAVE)
        self._saves.finish(step, self._control.check)

    def _end(self) -> ExitCode:
        """Finished, once every rank is: who goes early looks dead to the others."""
        self._replicas.wait_for_all()
        self._close_curves()
        self._control.say(Finished(step=self._spec.training.steps))
        self._control.enter(Phase.DONE)
        self._control.unwatch()
        with suppress(PeerLostError):
            self._replicas.wait_for_all()
        return ExitCode.DONE

    def _stop(self, step: int) -> ExitCode:
        """All ranks stop after ``step``: save, say so, stand still."""
        with suppress(SaveError, OSError):  # it is said
            self._save_and_wait(step)
        self._control.say(Stopped(step=step))
        self._close_curves()
        self.stand_still()
        return ExitCode.LEFT

    def stand_still(self) -> None:
        """Do what is ordered until nothing has been for too long.

        Raises ProgramError, StaleError.
        """
        for order in self._control.stand_still(self._spec.limbo_seconds):
            match order:
                case Forward():
                    self._forward(order)
                case Save():
                    self._saves.salvage(self._control.standing.applied, order.layers)

    def _forward(self, order: Forward) -> None:
        """Catch up with those who saw the vote of the step that this rank is prepared for: the
        gradients are as they were.
        """
        standing, began = self._control.standing, time.monotonic()
        if order.step == standing.prepared == standing.applied + 1:
            vote = self._replicas.count(order.ballot)
            self._apply(order.step, vote)
            self._report(order.step, vote, time.monotonic() - began)


def _or_none(number: float) -> float | None:
    return number if math.isfinite(number) else None


def _finite(metrics: Mapping[str, float]) -> dict[str, float]:
    return {name: value for name, value in metrics.items() if math.isfinite(value)}
