"""A PostgreSQL server of our own in a folder, when its programs are on this machine."""

import contextlib
import os
import pwd
import shutil
import subprocess
import tempfile
from collections.abc import Iterator
from pathlib import Path

from tests.fakes.waiting import until


def programs() -> Path | None:
    """The folder of initdb and postgres, None: not installed."""
    found = shutil.which("initdb")
    places = [Path(found).resolve().parent] if found else []
    places += sorted(Path("/usr/lib/postgresql").glob("*/bin"), reverse=True)
    return next((p for p in places if (p / "initdb").exists() and (p / "postgres").exists()), None)


@contextlib.contextmanager
def running() -> Iterator[str]:
    """The URL of an empty database, over a Unix socket. The server refuses to run as root."""
    bin_ = programs()
    assert bin_
    folder = Path(tempfile.mkdtemp(prefix="varuna-pg-"))
    initdb = [str(bin_ / "initdb"), "-D", str(folder / "data"), "-U", "varuna", "-A", "trust", "-N"]
    user = _nobody()
    if user is not None:
        shutil.chown(folder, user)
    environ = {"PATH": os.environ["PATH"], "LC_ALL": "C.UTF-8", "HOME": str(folder)}
    subprocess.run(
        initdb,
        check=True, capture_output=True, user=user, env=environ, cwd=folder,
    )  # fmt: skip
    with (folder / "log").open("wb") as log:
        server = subprocess.Popen(
            [bin_ / "postgres", "-D", folder / "data", "-k", folder, "-c", "listen_addresses=",
             "-c", "fsync=off"],
            stdout=log, stderr=log, user=user, env=environ, cwd=folder,
        )  # fmt: skip
    try:
        ready = [str(bin_ / "pg_isready"), "-h", str(folder), "-U", "varuna", "-q"]
        until(lambda: subprocess.run(ready, check=False).returncode == 0, 30)
        yield f"postgresql+psycopg://varuna@/postgres?host={folder}"
    finally:
        server.terminate()
        server.wait(10)
        shutil.rmtree(folder)


def _nobody() -> str | None:
    if os.getuid() != 0:
        return None
    names = {entry.pw_name for entry in pwd.getpwall()}
    return "postgres" if "postgres" in names else "nobody"
