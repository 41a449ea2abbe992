"""A small file system that may be filled to the last byte."""

import ctypes
import os
import subprocess
from pathlib import Path
from typing import Self

DISK_BYTES = 256 << 20
_CLONE_NEWNS = 0x00020000
_LIBC = ctypes.CDLL(None, use_errno=True)


class Disk:
    """A small file system of its own for the checkpoints, that may be filled. A context manager;
    :attr:`why_not` says why there is none.

    It is mounted in a name space of mounts that this process makes for itself: it goes with the
    last process that was started from here, however that ends.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.why_not = ""
        self._filler = folder / "filler"

    def __enter__(self) -> Self:
        self.folder.mkdir(parents=True, exist_ok=True)
        options = f"size={DISK_BYTES}"
        try:
            if _LIBC.unshare(_CLONE_NEWNS):
                raise PermissionError
            for command in (
                ["mount", "--make-rprivate", "/"],
                ["mount", "-t", "tmpfs", "-o", options, "tmpfs", str(self.folder)],
            ):
                subprocess.run(command, check=True, capture_output=True)
        except (OSError, subprocess.CalledProcessError):
            self.why_not = "only root can mount a file system that may be filled"
        return self

    def __exit__(self, *_: object) -> None:
        if not self.why_not:
            subprocess.run(["umount", "--lazy", str(self.folder)], check=True)

    def fill(self) -> None:
        """Leave no byte free."""
        with self._filler.open("ab") as file:
            step = 16 << 20
            while step:
                try:
                    os.posix_fallocate(file.fileno(), file.tell(), step)
                    file.seek(0, os.SEEK_END)
                except OSError:
                    step = 0 if step <= 4096 else step // 2

    def free(self) -> None:
        """Give the room back."""
        self._filler.unlink(missing_ok=True)
