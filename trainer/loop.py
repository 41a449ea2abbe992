"""Training: a mini-batch through the pipeline, the vote, the optimizer's step; then the next.

Read :meth:`Loop.run` from the top. What all ranks must agree on, :mod:`trainer.replicas` asks; how
a checkpoint is written while the next steps are computed, :mod:`trainer.saves` knows.
"""

import math
import time
from contextlib import suppress

from trainer.checkpoint import SaveError
from trainer.contract.checkpoints import Committed
from trainer.contract.progress import (
    ExitCode,
    Finished,
    Forward,
    Phase,
    Save,
    StepCommitted,
    Stopped,
)
from trainer.contract.samples import positions_of
from trainer.contract.spec import RunSpec
from trainer.control import Control
from trainer.groups import PeerLostError
from trainer.pipeline import Pipeline
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
    ) -> None:
        self._spec = spec
        self._stage = stage
        self._pipeline = pipeline
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
            vote = self._commit(step, totals)
            self._report(step, vote, time.monotonic() - began)
            if step == done + 1:
                self._control.enter(Phase.STEP)
                self._saves.touch()
            if step == last:
                self._save_and_wait(step)
            elif vote.wishes.stop:
                return self._stop(step)
            elif vote.wishes.save and vote.wishes.is_busy:
                self._saves.put_off(step)
            elif vote.wishes.save:
                self._saves.start(step)
        return self._end()

    def _commit(self, step: int, totals: Totals) -> Vote:
        """Sum, vote, apply."""
        self._replicas.sum_gradients()
        self._control.standing.prepared = step
        vote = self._replicas.vote(totals, self._wishes(step))
        self._apply(step, vote)
        return vote

    def _wishes(self, step: int) -> Wishes:
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
            standing.is_applying = True
            self._stage.apply(step, vote.gradient_scale(training.clip_grad_norm))
            standing.is_applying = False
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
        self._control.say(
            StepCommitted(
                step=step,
                loss=vote.loss if math.isfinite(vote.loss) else None,
                grad_norm=vote.norm if math.isfinite(vote.norm) else None,
                samples=vote.samples,
                sample_ids_hash=vote.sample_ids_hash,
                metrics={k: v for k, v in vote.metrics.items() if math.isfinite(v)},
                seconds=seconds,
            )
        )

    # --- the end, or a standstill -------------------------------------------------------------

    def _save_and_wait(self, step: int) -> None:
        self._control.enter(Phase.SAVE)
        self._saves.finish(step, self._control.check)

    def _end(self) -> ExitCode:
        """Finished, once every rank is: who goes early looks dead to the others."""
        self._replicas.wait_for_all()
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
