"""This rank's layers out of the checkpoint that its generation goes on from.

Only what is wrong condemns a checkpoint. A file that is missing or cannot be read may come (a
mount that is late, a server that starts again), so it is looked for until the load's time is up.
"""

import time
from collections.abc import Callable
from pathlib import Path

from trainer.checkpoint import (
    DamagedError,
    LayerState,
    UnreachableError,
    read_header,
    read_layers,
)
from trainer.contract.checkpoints import DataPosition, PartHeader, part_file
from trainer.contract.spec import RunSpec
from trainer.control import HaltingError
from trainer.data import same_data
from trainer.device import Device

_FIRST_PAUSE, _LONGEST_PAUSE = 0.1, 1.0


def load_layers(
    spec: RunSpec, mine: range, data: DataPosition, device: Device, check: Callable[[], None]
) -> tuple[PartHeader, dict[int, LayerState]]:
    """Where the checkpoint stands, and the state of the layers ``mine`` on ``device``.

    ``check`` raises HaltingError when waiting is of no use.

    Raises DamagedError or UnreachableError, which name the file, and ProgramError when the
    checkpoint is of other data than ``data``.
    """
    assert spec.load_from is not None
    deadline = time.monotonic() + spec.load_seconds
    pause = _FIRST_PAUSE
    while True:
        try:
            return _read(Path(spec.load_from), mine, spec.cuts[-1], data, device)
        except UnreachableError as error:
            if time.monotonic() + pause > deadline:
                raise
            try:
                check()
            except HaltingError:
                raise error from None
            print(f"Looking again for what is not there yet: {error}")
        time.sleep(pause)
        pause = min(2 * pause, _LONGEST_PAUSE)


def _read(
    folder: Path, mine: range, layer_count: int, data: DataPosition, device: Device
) -> tuple[PartHeader, dict[int, LayerState]]:
    header = read_header(folder)
    if header.layer_count != layer_count:
        part = folder / part_file(header.rank)
        reason = f"is of a model with {header.layer_count} layers, not {layer_count}"
        raise DamagedError(part, reason)
    same_data(header.data, data)
    return header, read_layers(folder, mine, device)
