"""When this rank saves, and the thread that writes while the training goes on.

A periodic save is copied and written by a thread (:mod:`trainer.snapshot`); the next step of the
optimizer waits for the copy, when it comes so soon. Whether all ranks save after a step is agreed
by the vote (:mod:`trainer.replicas`): when one that is due finds any rank still at the one before,
it is put off until all are free. A disk that is full or slow never stops the training. The last
step, a drain and a salvage wait for their own write.
"""

import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import suppress

from trainer.checkpoint import SaveError, write_part
from trainer.contract.checkpoints import Committed, DataPosition, PartHeader
from trainer.contract.progress import Line, SaveFailed
from trainer.contract.spec import RunSpec
from trainer.contract.topology import Seat
from trainer.layerfile import LayerState
from trainer.snapshot import Snapshot
from trainer.stages import Stage

_LOOK_SECONDS = 0.05
SALVAGE = "salvage"


class Saves:
    """One rank's checkpoints: of its stage's layers those whose number is its replica's mod D."""

    def __init__(
        self, spec: RunSpec, data: DataPosition, stage: Stage, say: Callable[[Line], None]
    ) -> None:
        replica = Seat.of(spec.rank, spec.shape).replica
        self._share = [i for i in stage.layers if i % spec.shape.replicas == replica]
        self.every_seconds = spec.saving.every_seconds
        """May be told anew while it trains."""
        self._spec = spec
        self._data = data
        self._stage = stage
        self._say = say
        self._committed: list[Committed] = []
        self._saved = spec.resumed_from.step if spec.resumed_from else 0
        """The last step of which this rank's part is durable."""
        self._snapshot = Snapshot(stage.device)
        self._writer = ThreadPoolExecutor(1, "writer")
        self._writing: Future[None] | None = None
        self._stall = 0.0
        """How many seconds the newest periodic save has held up the training."""
        self._began_at = time.monotonic()
        self._is_put_off = False

    # --- when ---------------------------------------------------------------------------------

    def is_due(self, step: int) -> bool:
        """Whether all ranks should save after ``step``; one rank's clock asks for all."""
        saving = self._spec.saving
        is_nth = saving.every_steps is not None and step % saving.every_steps == 0
        is_late = (
            self.every_seconds is not None
            and self._spec.rank == 0
            and time.monotonic() - self._began_at >= self.every_seconds
        )
        return is_nth or is_late or self._is_put_off

    @property
    def is_busy(self) -> bool:
        """Whether the save before is still being written.

        Raises what ended the writing for good: StaleError, ProgramError.
        """
        if self._writing is None or not self._writing.done():
            return self._writing is not None
        error, self._writing = self._writing.exception(), None
        if error and not isinstance(error, SaveError | OSError):
            raise error
        return False

    def put_off(self, step: int) -> None:
        """A save is due after ``step``, but a rank is busy: do it as soon as none is."""
        if self.is_busy and not self._is_put_off:
            folder = self._header(step).folder
            message = "it is put off, because the one before is still being written"
            self._say(SaveFailed(folder=folder, step=step, message=message, put_off=True))
        self._is_put_off = True

    # --- how ----------------------------------------------------------------------------------

    def record(self, committed: Committed) -> None:
        """Note a step of the ledger for the next part."""
        self._committed.append(committed)

    def start(self, step: int) -> None:
        """Let the writer copy and write this rank's share as it is after ``step``."""
        self._is_put_off = False
        self._began_at = time.monotonic()
        states, header = self._stage.states(self._share), self._header(step)
        self._snapshot.announce()
        self._writing = self._writer.submit(self._copy_and_write, header, states)
        self._stall = time.monotonic() - self._began_at

    def settle(self) -> None:
        """To be called before the state is changed: wait for what is still to be copied of it."""
        self._stall += self._snapshot.wait()

    def finish(self, step: int, check: Callable[[], None]) -> None:
        """Write this rank's share as it is after ``step`` and wait until it is durable.

        ``check`` may raise meanwhile; the writing goes on then. Raises SaveError, OSError,
        StaleError.
        """
        states = self._stage.states(self._share)
        self._writing = self._writer.submit(self._write, self._header(step), states)
        while not wait([self._writing], _LOOK_SECONDS).done:
            check()
        self._writing.result()

    def salvage(self, step: int, layers: Sequence[int]) -> None:
        """Write ``layers`` as they are after ``step``, now, beside what the writer may be at.

        Raises StaleError.
        """
        header = self._header(step, SALVAGE)
        if elsewhere := sorted(set(layers) - set(self._stage.layers)):
            message = f"layer {elsewhere[0]} is not on this stage"
            self._say(SaveFailed(folder=header.folder, step=step, message=message))
            return
        with suppress(SaveError, OSError):  # it is said
            self._write(header, self._stage.states(layers))

    def _header(self, step: int, kind: str = "") -> PartHeader:
        self._committed = [one for one in self._committed if one.step > self._saved]
        spec = self._spec
        return PartHeader(
            step=step,
            generation=spec.generation,
            kind=kind,
            rank=spec.rank,
            shape=spec.shape,
            layer_count=self._stage.layer_count,
            resumed_from=spec.resumed_from,
            data=self._data,
            committed=tuple(self._committed),
            loss_scale=self._stage.loss_scale,
            outside=self._stage.outside,
        )

    def _copy_and_write(self, header: PartHeader, states: Mapping[int, LayerState]) -> None:
        self._write(header, self._snapshot.take(states), is_beside=True)

    def _write(
        self, header: PartHeader, states: Mapping[int, LayerState], *, is_beside: bool = False
    ) -> None:
        """Write a part and say so, or why not. Unless ``is_beside``, the training waits for it."""
        root, folder = self._spec.saving.root, header.folder
        if not header.kind and header.step <= self._saved:
            return
        try:
            written = write_part(root, folder, header, states)
        except (SaveError, OSError) as error:
            self._say(SaveFailed(folder=folder, step=header.step, message=str(error)))
            raise
        stall = self._stall if is_beside else written.seconds
        self._saved = max(self._saved, header.step)
        self._say(written.model_copy(update={"stall_seconds": stall}))
