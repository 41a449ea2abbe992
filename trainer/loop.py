"""Training: a mini-batch through the pipeline, the vote, the optimizer's step; then the next.

Read :meth:`Loop.run` from the top. What all ranks must agree on, :mod:`trainer.replicas` asks.
"""

import math
import time
from contextlib import suppress

from trainer.checkpoint import SaveError, newer_marker, write_part
from trainer.contract.checkpoints import Committed, DataPosition, PartHeader
from trainer.contract.progress import Finished, Phase, SaveFailed, StepCommitted
from trainer.contract.samples import positions_of
from trainer.contract.spec import RunSpec
from trainer.contract.topology import Seat
from trainer.control import Control
from trainer.groups import PeerLostError
from trainer.pipeline import Pipeline
from trainer.replicas import Replicas, Totals, Vote
from trainer.stages import Stage


class StaleError(Exception):
    """A newer generation has begun: what this one writes is void."""


class Loop:
    """One rank's training, from the step that it resumed from to the last."""

    def __init__(
        self,
        spec: RunSpec,
        data: DataPosition,
        stage: Stage,
        pipeline: Pipeline,
        replicas: Replicas,
        control: Control,
    ) -> None:
        self._spec = spec
        self._data = data
        self._stage = stage
        self._pipeline = pipeline
        self._replicas = replicas
        self._control = control
        self._committed: list[Committed] = []
        self._saved_at = time.monotonic()

    def run(self) -> None:
        """Train to the last step and save it.

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
            if step == last or vote.save_is_due or self._is_nth(step):
                self._save(step)
        self._end()

    def _commit(self, step: int, totals: Totals) -> Vote:
        """Sum, vote, apply."""
        training, standing = self._spec.training, self._control.standing
        self._replicas.sum_gradients()
        standing.prepared = step
        vote = self._replicas.vote(totals, save_is_due=self._is_late())
        standing.vote_step = step
        if vote.samples != training.batch_size:
            raise RuntimeError(f"step {step} took {vote.samples} of {training.batch_size} samples")
        if vote.is_sound:
            standing.is_applying = True
            self._stage.apply(step, vote.gradient_scale(training.clip_grad_norm))
            standing.is_applying = False
        standing.applied = step
        return vote

    def _report(self, step: int, vote: Vote, seconds: float) -> None:
        positions = positions_of(step, self._spec.training.batch_size)
        self._committed.append(
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

    # --- saving -------------------------------------------------------------------------------

    def _is_nth(self, step: int) -> bool:
        every = self._spec.saving.every_steps
        return every is not None and step % every == 0

    def _is_late(self) -> bool:
        """One rank's clock asks for a save by time; the vote makes it everybody's."""
        every = self._spec.saving.every_seconds
        if every is None or self._spec.rank != 0:
            return False
        return time.monotonic() - self._saved_at >= every

    def _save(self, step: int) -> None:
        """Write this rank's share: of my stage's layers those whose number is mine mod D."""
        spec, is_last = self._spec, step == self._spec.training.steps
        self._control.enter(Phase.SAVE)
        header = PartHeader(
            step=step,
            generation=spec.generation,
            rank=spec.rank,
            shape=spec.shape,
            layer_count=self._stage.layer_count,
            resumed_from=spec.resumed_from,
            data=self._data,
            committed=tuple(self._committed),
        )
        replica = Seat.of(spec.rank, spec.shape).replica
        share = [i for i in self._stage.layers if i % spec.shape.replicas == replica]
        states = self._stage.states(share)
        try:
            if newer := newer_marker(spec.saving.root, spec.generation):
                raise StaleError(f"generation {newer} has begun")
            self._control.say(write_part(spec.saving.root, header.folder, header, states))
            self._committed.clear()
        except (SaveError, OSError) as error:
            if is_last:
                raise
            self._control.say(SaveFailed(folder=header.folder, step=step, message=str(error)))
        self._saved_at = time.monotonic()
        if not is_last:
            self._control.enter(Phase.STEP)

    def _end(self) -> None:
        """Finished, once every rank is: who goes early looks dead to the others."""
        self._replicas.wait_for_all()
        self._control.say(Finished(step=self._spec.training.steps))
        self._control.enter(Phase.DONE)
        self._control.unwatch()
        with suppress(PeerLostError):
            self._replicas.wait_for_all()
