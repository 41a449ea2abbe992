"""The processes of local nodes, found by what the machine itself says of them.

A trainer's standard output is its log, whose path names node, job, generation and rank; its parent
is the zygote of its node. Nobody's word is taken for that, so a trainer that everybody has
forgotten is found too.
"""

import contextlib
import os
import re
import signal
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil

_LOG = re.compile(
    r".*/(?P<node>[^/]+)/logs/(?P<job>[^/]+)\.g(?P<generation>\d+)\.r(?P<rank>\d+)\.log"
)
_GONE = (psutil.NoSuchProcess, psutil.AccessDenied)


@dataclass(frozen=True)
class Trainer:
    """One live trainer, or a data-loader worker of it."""

    pid: int
    node: str
    job: str
    generation: int
    rank: int


def trainers(job: str) -> list[Trainer]:
    """All of ``job`` that live on this machine, whoever started them."""
    found = []
    for name in os.listdir("/proc"):
        if not name.isdigit():
            continue
        with contextlib.suppress(OSError):
            match = _LOG.fullmatch(os.readlink(f"/proc/{name}/fd/1"))
            if match and match["job"] == job:
                numbers = int(match["generation"]), int(match["rank"])
                found.append(Trainer(int(name), match["node"], job, *numbers))
    return found


def zygote_children(zygote: int) -> list[psutil.Process]:
    """The zygote with all that it forked; nothing when it is gone."""
    try:
        parent = psutil.Process(zygote)
        return [parent, *parent.children(recursive=True)]
    except psutil.NoSuchProcess:
        return []


def send(number: signal.Signals, to: Iterable[psutil.Process]) -> None:
    """To each that still lives."""
    for process in to:
        with contextlib.suppress(*_GONE):
            process.send_signal(number)


def marked(word: str) -> list[psutil.Process]:
    """The live processes whose environment holds ``word``, but this one: what was started from
    here, by whom ever, wherever it hangs by now.
    """
    wanted, found = word.encode(), []
    for name in os.listdir("/proc"):
        if not name.isdigit() or int(name) == os.getpid():
            continue
        with contextlib.suppress(OSError, *_GONE):
            if wanted in Path(f"/proc/{name}/environ").read_bytes().split(b"\0"):
                process = psutil.Process(int(name))
                if process.status() != psutil.STATUS_ZOMBIE:
                    found.append(process)
    return found


def ports_of(processes: Iterable[psutil.Process]) -> set[int]:
    """Where they listen."""
    ports: set[int] = set()
    for process in processes:
        with contextlib.suppress(*_GONE):
            connections = process.net_connections("tcp")
            ports |= _listening_of(connections)
    return ports


def listening() -> set[int]:
    """Every port of this machine that somebody listens on."""
    return _listening_of(psutil.net_connections("tcp"))


def _listening_of(connections: Iterable[Any]) -> set[int]:
    return {c.laddr.port for c in connections if c.status == psutil.CONN_LISTEN}
