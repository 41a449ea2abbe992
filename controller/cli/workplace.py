"""Where a verb runs a cluster of its own: its folder, and the signals that end it."""

import signal
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from controller.client.rest import CliError


@contextmanager
def stopped_by_signals() -> Iterator[None]:
    """SIGTERM ends what is run here as Ctrl-C does."""

    def stop(*_: object) -> None:
        raise KeyboardInterrupt

    before = signal.signal(signal.SIGTERM, stop)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


@contextmanager
def folder_for(verb: str, data: Path | None) -> Iterator[Path]:
    """``data``, or a fresh folder, which is the caller's to remove when it ends well: the logs of a
    failure are in it.
    """
    folder = data.absolute() if data else Path(tempfile.mkdtemp(prefix=f"varuna-{verb}-"))
    folder.mkdir(parents=True, exist_ok=True)
    try:
        yield folder
    except CliError as error:
        raise CliError(f"{error} Everything is kept in {folder}.", error.exit_code) from None
