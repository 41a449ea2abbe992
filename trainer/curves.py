"""The job's curves as files in its folder, for whoever has no controller at hand:

    curves/g7/steps.csv                  what generation 7 said of its steps, a line each
    curves/g7/evaluations.csv            and of its evaluations
    curves/g7/events.out.tfevents…       the same for TensorBoard, where tensorboardX is installed

Rank 0 alone writes, into a folder of its generation, so no file has two writers. A step that a
later generation did again counts as that one has it. A thread writes: no disk holds a step up, and
a trouble with one ends the curves, not the training.
"""

import csv
import queue
import threading
import time
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import IO, Any

from trainer.contract.progress import Evaluated, StepCommitted
from trainer.contract.spec import RunSpec

Line = StepCommitted | Evaluated
FOLDER = "curves"

_LAST_WORDS_SECONDS = 5.0
_COLUMNS: dict[type[Line], tuple[str, tuple[str, ...]]] = {
    StepCommitted: (
        "steps",
        ("step", "loss", "grad_norm", "samples", "seconds", "loss_scale", "skipped"),
    ),
    Evaluated: ("evaluations", ("step", "loss", "samples", "seconds")),
}
_DRAWN = ("loss", "grad_norm", "seconds", "loss_scale")


class Curves:
    """One generation's."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._rows: queue.SimpleQueue[tuple[Line, Sequence[str], float] | None]
        self._rows = queue.SimpleQueue()
        self._files: dict[str, IO[str]] = {}
        self._board: Any = None
        self._thread = threading.Thread(target=self._run, name="curves", daemon=True)

    @classmethod
    def of(cls, spec: RunSpec) -> "Curves":
        """Those of the spec's generation."""
        return cls(Path(spec.saving.root) / FOLDER / f"g{spec.generation}")

    def add(self, line: Line, metrics: Iterable[str]) -> None:
        """One more point; ``metrics``: the names of all there are, finite or not."""
        if self._thread.ident is None:
            self._thread.start()
        if self._thread.is_alive():
            self._rows.put((line, sorted(metrics), time.time()))

    def close(self) -> None:
        """Wait until all is written; a disk that hangs is waited for only so long."""
        self._rows.put(None)
        if self._thread.ident is not None:
            self._thread.join(_LAST_WORDS_SECONDS)

    def _run(self) -> None:
        try:
            self._folder.mkdir(parents=True, exist_ok=True)
            self._board = _board(self._folder)
            while row := self._rows.get():
                self._write(*row)
        except OSError as error:
            print(f"The curves in {self._folder} end here: {error}", flush=True)
        finally:
            for file in self._files.values():
                file.close()
            if self._board:
                self._board.close()

    def _write(self, line: Line, metrics: Sequence[str], at: float) -> None:
        name, columns = _COLUMNS[type(line)]
        if name not in self._files:
            # Line by line: whoever reads along, and a kill, find whole ones.
            self._files[name] = (self._folder / f"{name}.csv").open("a", buffering=1, newline="")
            csv.writer(self._files[name]).writerow([*columns, "unix_time", *metrics])
        values = [getattr(line, column) for column in columns]
        row = [*values, f"{at:.3f}", *(line.metrics.get(metric) for metric in metrics)]
        csv.writer(self._files[name]).writerow(row)
        if self._board:
            self._draw(line, at)

    def _draw(self, line: Line, at: float) -> None:
        prefix = "evaluation/" if isinstance(line, Evaluated) else ""
        numbers = {name: getattr(line, name, None) for name in _DRAWN} | line.metrics
        for name, number in numbers.items():
            if number is not None:
                self._board.add_scalar(prefix + name, number, line.step, at)


def _board(folder: Path) -> Any:
    """TensorBoard's writer; None where it is not installed."""
    try:
        from tensorboardX import SummaryWriter
    except ImportError:
        print("The curves are written as CSV only: tensorboardX is not installed.", flush=True)
        return None
    return SummaryWriter(str(folder), flush_secs=10)
