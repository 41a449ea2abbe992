"""One mini-batch through this stage: forwards, recomputes and backwards as the schedule says.

Of a micro-batch in flight only the stage's input is kept; the recompute grows the graph that the
backward consumes. The last stage grows it right away, up to the loss.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from trainer.contract.schedule import Kind, StagePlan, StageState
from trainer.contract.spec import RunSpec
from trainer.contract.topology import MicroBatch, Seat, micro_batches
from trainer.data import Batch, Batches, HeldOut
from trainer.device import Mark
from trainer.diagnosis import Witness
from trainer.links import Links, in_a_tuple, tensors_in
from trainer.program import LoadedProgram, ProgramError
from trainer.replicas import Totals
from trainer.stages import Stage

_AHEAD = 4
"""Inputs of an evaluation that may wait for a stage beside the one that it is at."""


@dataclass(frozen=True)
class Share:
    """What one rank does in every step."""

    micro_batches: tuple[MicroBatch, ...]
    plan: StagePlan

    @classmethod
    def of(cls, spec: RunSpec) -> "Share":
        """Raises ValueError when the spec contradicts itself."""
        seat = Seat.of(spec.rank, spec.shape)
        mine = micro_batches(spec.training.batch_size, spec.shape)[seat.replica]
        schedule, depth = spec.training.schedule, spec.shape.depth
        plan = StagePlan.of(schedule, seat.stage, depth, len(mine), caps=spec.in_flight)
        return cls(mine, plan)


class Pipeline:
    """This rank's stage between its neighbours."""

    def __init__(
        self, share: Share, program: LoadedProgram, batches: Batches, stage: Stage, links: Links
    ) -> None:
        self._micro_batches = share.micro_batches
        self._plan = share.plan
        self._program = program
        self._batches = batches
        self._stage = stage
        self._device = stage.device
        self._links = links
        self._fetched: dict[int, Batch] = {}
        self._inputs: dict[int, Any] = {}
        self._graphs: dict[int, list[Tensor]] = {}
        self._first_output: list[Tensor] | None = None
        self._witness: Witness | None = None
        self.worked = dict.fromkeys(Kind, 0.0)
        """Seconds of tasks by kind, ever since."""

    def run(self, step: int, check: Callable[[], None]) -> Totals:
        """All micro-batches of this replica forward and backward; ``check`` may raise in between.

        Leaves the sums of gradients in the stage. Raises ProgramError or PeerLostError.
        """
        state, totals, device = StageState(self._plan), Totals(), self._device
        done: list[tuple[Kind, Mark, Mark]] = []
        self._stage.clear_gradients()
        self._links.expect([micro_batch.size for micro_batch in self._micro_batches])
        while not state.is_done:
            check()
            for kind, m in self._links.arrivals():
                state.arrived(kind, m)
            task = state.next_task()
            if task is None:
                self._links.wait()
                continue
            began = device.mark()
            if task.kind is Kind.FORWARD:
                self._forward(step, task.micro_batch, totals)
            elif task.kind is Kind.RECOMPUTE:
                self._grow_graph(step, task.micro_batch, totals)
            else:
                self._backward(task.micro_batch)
            done.append((task.kind, began, device.mark()))
        self._links.settle()
        device.synchronize()
        for kind, began, ended in done:
            self.worked[kind] += device.seconds(began, ended)
        return totals

    @property
    def full_micro_batches(self) -> float:
        """How many a step of this rank has; a short one is a part of one."""
        largest = max(micro_batch.size for micro_batch in self._micro_batches)
        return sum(micro_batch.size for micro_batch in self._micro_batches) / largest

    def evaluate(
        self, step: int, held_out: HeldOut, mine: Sequence[MicroBatch], check: Callable[[], None]
    ) -> Totals:
        """Forward only: the held-out samples of ``mine``, which all stages of this replica know.

        Raises ProgramError or PeerLostError.
        """
        totals, asked = Totals(), 0
        with self._stage.evaluating():
            for m, micro_batch in enumerate(mine):
                check()
                ahead = [one.size for one in mine[asked : m + 1 + _AHEAD]]
                self._links.expect_held_out(ahead, first=asked)
                asked += len(ahead)
                self._evaluate(step, held_out, m, micro_batch, totals)
        self._links.settle()
        return totals

    def _evaluate(
        self, step: int, held_out: HeldOut, m: int, micro_batch: MicroBatch, totals: Totals
    ) -> None:
        plan, stage = self._plan, self._stage
        batch = held_out.fetch(micro_batch) if plan.is_first or plan.is_last else None
        value = self._program.inputs(batch.tensors) if batch and plan.is_first else None
        if not plan.is_first:
            value = self._links.take_held_out(m)
        output = stage.forward(value, step, micro_batch)
        if batch and plan.is_last:
            totals.add(stage.loss(output, batch, step, micro_batch), batch)
        else:
            self._links.send(Kind.FORWARD, m, micro_batch.size, output, held_out=True)

    def explain(self, step: int, check: Callable[[], None]) -> str | None:
        """Compute ``step`` once more, whose loss or gradients are not finite: what this stage made
        of finite numbers that is not, if anything. All stages must do so.

        Raises ProgramError or PeerLostError.
        """
        self._witness = witness = Witness(self._stage)
        with witness.watching():
            self.run(step, check)
        self._witness = None
        return witness.found

    def _forward(self, step: int, m: int, totals: Totals) -> None:
        self._inputs[m] = self._input_of(step, m)
        if not self._plan.recomputes:  # the last stage: its backward comes right after
            self._grow_graph(step, m, totals)
            return
        tensors = tensors_in(self._inputs[m])
        versions = [tensor._version for tensor in tensors]
        with torch.no_grad():
            output = self._stage.forward(self._inputs[m], step, self._micro_batches[m])
        if versions != [tensor._version for tensor in tensors]:
            raise ProgramError(
                f"{self._my_layers}: the input is changed in place, which a recompute does twice"
            )
        if self._first_output is None:
            self._first_output = tensors_in(output)
        if not self._plan.is_last:
            self._links.send(Kind.FORWARD, m, self._micro_batches[m].size, output)

    def _grow_graph(self, step: int, m: int, totals: Totals) -> None:
        """Run forward with a graph for the backward; on the last stage up to the loss."""
        micro_batch = self._micro_batches[m]
        if self._witness:
            self._witness.at(micro_batch)
        if not self._plan.is_first:
            for tensor in tensors_in(self._inputs[m]):
                tensor.requires_grad_(tensor.is_floating_point() or tensor.is_complex())
        output = self._stage.forward(self._inputs[m], step, micro_batch)
        if self._first_output:
            self._check_repeated(self._first_output, tensors_in(output))
            self._first_output = []
        if self._plan.is_last:
            batch = self._batch(step, m)
            loss = self._stage.loss(output, batch, step, micro_batch)
            if self._witness:
                self._witness.made("the loss", loss.sum)
            totals.add(loss, batch)
            self._graphs[m] = [loss.sum * self._stage.loss_factor]
        else:
            self._graphs[m] = tensors_in(output)

    def _backward(self, m: int) -> None:
        outputs, inputs = self._graphs.pop(m), tensors_in(self._inputs.pop(m))
        self._fetched.pop(m, None)
        gradients: Sequence[Tensor | None] = [None]
        if not self._plan.is_last:
            gradients = in_a_tuple(self._links.take(Kind.BACKWARD, m))
            if self._witness:
                self._witness.received(gradients)
            pairs = zip(outputs, gradients, strict=True)
            wanted = [(o, g) for o, g in pairs if o.requires_grad and g is not None]
            outputs, gradients = [o for o, _ in wanted], [g for _, g in wanted]
        if outputs:  # else nothing here is to be trained
            with self._program.blaming(f"the backward pass of {self._my_layers}"):
                torch.autograd.backward(outputs, gradients)
        if not self._plan.is_first:
            size = self._micro_batches[m].size
            self._links.send(Kind.BACKWARD, m, size, tuple(tensor.grad for tensor in inputs))

    def _input_of(self, step: int, m: int) -> Any:
        if self._witness:
            self._witness.at(self._micro_batches[m])
        if not self._plan.is_first:
            message = self._links.take(Kind.FORWARD, m)
            if self._witness:
                self._witness.received(message)
            return message
        inputs = self._program.inputs(self._batch(step, m).tensors)
        if self._witness:
            self._witness.made("the input", inputs)
        return inputs

    def _batch(self, step: int, m: int) -> Batch:
        if m not in self._fetched:
            self._fetched[m] = self._batches.fetch(step, self._micro_batches[m])
        return self._fetched[m]

    def _check_repeated(self, first: list[Tensor], second: list[Tensor]) -> None:
        """A recompute must give the very same bits, on a GPU nearly; seen once, at the start."""
        pairs = zip(first, second, strict=False)
        if not all(_is_same(*pair, self._device.tolerance) for pair in pairs):
            raise ProgramError(
                f"{self._my_layers}: a second run gives something else, and a recompute is one: is "
                "there state, or are numbers drawn from another generator than torch's?"
            )

    @property
    def _my_layers(self) -> str:
        first, *_, last = *self._stage.layers, *self._stage.layers
        return f"layer {first}" if first == last else f"layers {first} to {last}"


def _is_same(first: Tensor, second: Tensor, tolerance: float) -> bool:
    """``tolerance``: as a part of the largest number."""
    if first.shape != second.shape or not first.is_floating_point():
        return torch.equal(first, second)
    near = tolerance * float(first.abs().max()) if tolerance and first.numel() else 0.0
    return torch.allclose(first, second, 0, near, equal_nan=True)
