"""What an earlier incarnation may have left running, written down while it runs.

The death chain ends every trainer with its agent; this is for the case that the chain was broken.
Only a process with the recorded number AND start time on the same boot is ours.
"""

import contextlib
import json
import os
import signal
from pathlib import Path


class Sessions:
    """The trainers' sessions that run now, in a small file."""

    def __init__(self, path: Path, boot_id: str) -> None:
        self._path = path
        self._boot_id = boot_id
        self._running: dict[int, int] = {}

    def sweep(self) -> int:
        """Kill what was recorded and still lives, and forget it; how many sessions that were."""
        try:
            recorded = json.loads(self._path.read_bytes())
            ours = {int(pid): start for pid, start in recorded["sessions"].items()}
            same_boot = recorded["boot_id"] == self._boot_id
        except FileNotFoundError:
            return 0
        except (ValueError, KeyError, AttributeError):  # not ours to guess
            ours, same_boot = {}, False
        left = [pid for pid, start in ours.items() if same_boot and started_at(pid) == start]
        for pid in left:
            _kill_session(pid)
        self._write()
        return len(left)

    def add(self, pid: int) -> None:
        """A trainer has begun."""
        if (start := started_at(pid)) is not None:
            self._running[pid] = start
            self._write()

    def remove(self, pid: int) -> None:
        """A trainer is gone."""
        if self._running.pop(pid, None) is not None:
            self._write()

    def _write(self) -> None:
        text = json.dumps({"boot_id": self._boot_id, "sessions": self._running})
        with contextlib.suppress(OSError):  # a full disk is no reason to stop training
            beside = self._path.with_suffix(".tmp")
            beside.write_text(text)
            beside.replace(self._path)


def started_at(pid: int) -> int | None:
    """When the process began, in ticks since boot; None when it is gone."""
    stat = _stat(pid)
    return int(stat[19]) if stat and stat[0] != b"Z" else None


def _stat(pid: int) -> list[bytes] | None:
    """The fields of /proc/PID/stat from the third on."""
    try:
        return Path(f"/proc/{pid}/stat").read_bytes().rpartition(b")")[2].split()
    except OSError:
        return None


def _kill_session(leader: int) -> None:
    members = [int(name) for name in os.listdir("/proc") if name.isdigit()]
    for pid in members:
        if (stat := _stat(pid)) and int(stat[3]) == leader:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
