"""Training: a mini-batch under the schedule, the vote, the optimizer's step; then the next.

Read :meth:`Loop.run` from the top. What is next, :mod:`trainer.contract.schedule` says; what comes
from and goes to the neighbour stages, :mod:`trainer.links` carries; what all ranks must agree on,
:mod:`trainer.replicas` asks.
"""

import math
import time
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from typing import Any

import torch
from torch import Tensor

from trainer.checkpoint import SaveError, newer_marker, write_part
from trainer.contract.checkpoints import Committed, PartHeader
from trainer.contract.progress import Finished, Phase, SaveFailed, StepCommitted
from trainer.contract.samples import positions_of
from trainer.contract.schedule import Kind, StagePlan, StageState
from trainer.contract.spec import RunSpec
from trainer.contract.topology import Seat, micro_batches
from trainer.control import Control
from trainer.data import Batch, Batches
from trainer.groups import PeerLostError
from trainer.links import Links, in_a_tuple
from trainer.program import LoadedProgram, ProgramError
from trainer.replicas import Replicas, Totals, Vote
from trainer.stages import Stage


class StaleError(Exception):
    """A newer generation has begun: what this one writes is void."""


class Loop:
    """One rank's training, from the step that it resumed from to the last."""

    def __init__(
        self,
        spec: RunSpec,
        program: LoadedProgram,
        batches: Batches,
        stage: Stage,
        links: Links,
        replicas: Replicas,
        control: Control,
    ) -> None:
        self._spec = spec
        self._seat = seat = Seat.of(spec.rank, spec.shape)
        self._program = program
        self._stage = stage
        self._links = links
        self._replicas = replicas
        self._control = control
        self._batches = batches
        self._micro_batches = micro_batches(spec.training.batch_size, spec.shape)[seat.replica]
        self._plan = StagePlan.of(
            spec.training.schedule,
            seat.stage,
            spec.shape.depth,
            len(self._micro_batches),
            spec.in_flight[seat.stage] if spec.in_flight else None,
        )
        self._fetched: dict[int, Batch] = {}
        self._inputs: dict[int, Any] = {}
        self._graphs: dict[int, list[Tensor]] = {}
        self._first_output: list[Tensor] | None = None
        self._committed: list[Committed] = []
        self._saved_at = time.monotonic()

    def run(self) -> None:
        """Train to the last step and save it.

        Raises ProgramError, PeerLostError, HaltingError, SaveError (of the last step) or
        StaleError.
        """
        done, last = self._control.standing.applied, self._spec.training.steps
        self._control.enter(Phase.FIRST_STEP)
        for step in range(done + 1, last + 1):
            began = time.monotonic()
            totals = self._mini_batch(step)
            vote = self._commit(step, totals)
            self._report(step, vote, time.monotonic() - began)
            if step == done + 1:
                self._control.enter(Phase.STEP)
            if step == last or vote.save_is_due or self._is_nth(step):
                self._save(step)
        self._end()

    # --- one step -----------------------------------------------------------------------------

    def _mini_batch(self, step: int) -> Totals:
        """All micro-batches of this replica forward and backward through this stage."""
        state, totals = StageState(self._plan), Totals()
        self._stage.clear_gradients()
        self._links.expect([micro_batch.size for micro_batch in self._micro_batches])
        while not state.is_done:
            self._control.check()
            for kind, m in self._links.arrivals():
                state.arrived(kind, m)
            task = state.next_task()
            if task is None:
                self._links.wait()
            elif task.kind is Kind.FORWARD:
                self._forward(step, task.micro_batch, totals)
            elif task.kind is Kind.RECOMPUTE:
                self._grow_graph(step, task.micro_batch, totals)
            else:
                self._backward(task.micro_batch)
        self._links.settle()
        return totals

    def _forward(self, step: int, m: int, totals: Totals) -> None:
        self._inputs[m] = self._input_of(step, m)
        if not self._plan.recomputes:  # the last stage: its backward comes right after
            self._grow_graph(step, m, totals)
            return
        tensors = _tensors(self._inputs[m])
        versions = [tensor._version for tensor in tensors]
        with torch.no_grad():
            output = self._stage.forward(self._inputs[m], step, self._micro_batches[m].number)
        if versions != [tensor._version for tensor in tensors]:
            raise ProgramError(
                f"{self._my_layers} change their input in place, which a recompute would do twice"
            )
        if self._first_output is None:
            self._first_output = _tensors(output)
        if not self._plan.is_last:
            self._links.send(Kind.FORWARD, m, self._micro_batches[m].size, output)

    def _grow_graph(self, step: int, m: int, totals: Totals) -> None:
        """Run forward with a graph for the backward to consume; on the last stage up to the loss."""
        number = self._micro_batches[m].number
        if not self._plan.is_first:
            for tensor in _tensors(self._inputs[m]):
                tensor.requires_grad_(tensor.is_floating_point() or tensor.is_complex())
        output = self._stage.forward(self._inputs[m], step, number)
        if self._first_output:
            self._check_repeated(self._first_output, _tensors(output))
            self._first_output = []
        if self._plan.is_last:
            batch = self._batch(step, m)
            loss = self._stage.loss(output, batch, step, number)
            totals.add(loss, batch)
            self._graphs[m] = [loss.sum]
        else:
            self._graphs[m] = _tensors(output)

    def _backward(self, m: int) -> None:
        outputs, inputs = self._graphs.pop(m), _tensors(self._inputs.pop(m))
        self._fetched.pop(m, None)
        gradients: Sequence[Tensor | None] = [None]
        if not self._plan.is_last:
            gradients = in_a_tuple(self._links.take(Kind.BACKWARD, m))
            pairs = zip(outputs, gradients, strict=True)
            wanted = [(o, g) for o, g in pairs if o.requires_grad and g is not None]
            outputs, gradients = [o for o, _ in wanted], [g for _, g in wanted]
        with self._program.blaming(f"the backward pass of {self._my_layers}"):
            torch.autograd.backward(outputs, gradients)
        if not self._plan.is_first:
            size = self._micro_batches[m].size
            self._links.send(Kind.BACKWARD, m, size, tuple(tensor.grad for tensor in inputs))

    def _input_of(self, step: int, m: int) -> Any:
        if self._plan.is_first:
            return self._program.inputs(self._batch(step, m).tensors)
        return self._links.take(Kind.FORWARD, m)

    def _batch(self, step: int, m: int) -> Batch:
        if m not in self._fetched:
            self._fetched[m] = self._batches.fetch(step, self._micro_batches[m])
        return self._fetched[m]

    def _check_repeated(self, first: list[Tensor], second: list[Tensor]) -> None:
        """A recompute must give the very same bits; seen once, at the start."""
        if not all(map(_is_same, first, second)):
            raise ProgramError(
                f"{self._my_layers} give something else when they are run a second time: do they "
                "keep state, or draw random numbers that torch's generator does not give?"
            )

    @property
    def _my_layers(self) -> str:
        first, *_, last = *self._stage.layers, *self._stage.layers
        return f"layer {first}" if first == last else f"layers {first} to {last}"

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
            scale = vote.gradient_scale(training.clip_grad_norm)
            lr_scale = self._program.lr_scale(step)
            standing.is_applying = True
            self._stage.apply(scale, lr_scale)
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
        if newer := newer_marker(spec.saving.root, spec.generation):
            raise StaleError(f"generation {newer} has begun")
        self._control.enter(Phase.SAVE)
        header = PartHeader(
            step=step,
            generation=spec.generation,
            rank=spec.rank,
            shape=spec.shape,
            layer_count=self._stage.layer_count,
            resumed_from=spec.resumed_from,
            data=self._batches.position,
            committed=tuple(self._committed),
        )
        share = [i for i in self._stage.layers if i % spec.shape.replicas == self._seat.replica]
        states = self._stage.states(share)
        try:
            self._control.say(write_part(spec.saving.root, header.folder, header, states))
            self._committed.clear()
        except SaveError as error:
            if is_last:
                raise
            said = SaveFailed(folder=header.folder, step=step, message=str(error))
            self._control.say(said)
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


def _tensors(value: Any) -> list[Tensor]:
    """Those in what a layer takes or gives."""
    if isinstance(value, Tensor):
        return [value]
    if isinstance(value, Mapping):
        value = value.values()
    return [one for one in value if isinstance(one, Tensor)] if isinstance(value, Iterable) else []


def _is_same(first: Tensor, second: Tensor) -> bool:
    if torch.equal(first, second):
        return True
    return first.is_floating_point() and torch.allclose(first, second, 0, 0, equal_nan=True)
