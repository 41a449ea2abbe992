"""A whole Varuna on this machine: a controller as a child process and a fleet of local agents.

    with Cluster(folder, port=0) as cluster:      # torch is being imported meanwhile
        cluster.add(["node-1", "node-2"])
        cluster.controller.post(…)

At its end, however it ends, nothing of it is alive.
"""

import contextlib
import json
import os
import socket
import subprocess
from collections.abc import Callable, Sequence
from pathlib import Path
from types import TracebackType
from typing import Self, TypeVar

import httpx2

from controller.api.schemas import NodeView
from controller.client.children import PYTHON, flags
from controller.client.rest import CliError, Controller, Place, RefusedError, UnreachableError
from controller.client.waiting import until
from controller.cloud.local import LocalFleet, die_with_parent

READY_SECONDS = 60.0
CONNECT_SECONDS = 60.0
STOP_SECONDS = 10.0
WANTED = "wanted"
"""A folder in the cluster's: an agent is started for each name that lies there."""

T = TypeVar("T")


class Cluster:
    """A controller and agents. ``controller`` speaks to it as admin."""

    controller: Controller
    fleet: LocalFleet
    _serve: subprocess.Popen[bytes]

    def __init__(self, folder: Path, port: int) -> None:
        """``folder`` holds all of it; ``port`` 0 is any free one."""
        self.folder = folder.absolute()
        self._port = port
        self._stack = contextlib.ExitStack()

    def __enter__(self) -> Self:
        (self.folder / WANTED).mkdir(parents=True, exist_ok=True)
        with contextlib.ExitStack() as stack:
            self.start_controller()
            stack.callback(self._stop_controller)
            self.fleet = stack.enter_context(
                LocalFleet(
                    self.controller.place.url,
                    self.folder / "agent.token",
                    self.folder / "agents",
                )
            )
            self._stack = stack.pop_all()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, e: BaseException | None, at: TracebackType | None
    ) -> None:
        self._stack.close()

    @property
    def token_file(self) -> Path:
        """Opens the controller as admin."""
        return self.folder / "admin.token"

    def add(self, names: Sequence[str]) -> None:
        """Start agents and wait until they are registered. Needs torch to be there."""
        self.fleet.create(names)
        wanted = set(names)
        self._wait(
            lambda: wanted <= {n.name for n in self.nodes()},
            CONNECT_SECONDS,
            f"Not all of {', '.join(names)} have registered (see {self.folder / 'agents'})",
        )

    def start_controller(self) -> None:
        """Serve from the folder, and wait until that is ready. Later ones listen where the first
        did: agents find them.
        """
        self._serve = _serve(self.folder, self._port)
        try:
            self.controller = self._connect()
        except BaseException:
            self._serve.kill()
            self._serve.wait()
            raise
        self._port = httpx2.URL(self.controller.place.url).port or self._port

    def keep_up(self) -> bool:
        """Bring back what another process has killed: the controller, at once, and the agents whose
        names it has put into the folder ``wanted``. Whether it was the controller.
        """
        has_ended = self._serve.poll() is not None
        if has_ended:
            self.controller.close()
            self.start_controller()
        wanted = list((self.folder / WANTED).iterdir())
        self.fleet.create([path.name for path in wanted])
        for path in wanted:
            path.unlink()
        return has_ended

    def kill_controller(self) -> None:
        """SIGKILL, as a crash; agents and trainers go on."""
        self._serve.kill()
        self._serve.wait()
        self.controller.close()

    def nodes(self) -> list[NodeView]:
        """The live ones."""
        return self.controller.all("/api/v1/nodes", NodeView)

    def _connect(self) -> Controller:
        """The controller of this very run, once it is ready."""
        written = self.folder / "controller.json"

        def ready() -> Controller | None:
            with contextlib.suppress(OSError, ValueError, UnreachableError, RefusedError):
                said = json.loads(written.read_text())
                if said["pid"] == self._serve.pid:
                    token = self.token_file.read_text().strip()
                    with contextlib.closing(Controller(Place(said["url"], token))) as controller:
                        controller.check_ready()
                    return Controller(controller.place)
            return None

        return self._wait(ready, READY_SECONDS, "The controller is not ready")

    def _wait(self, look: Callable[[], T | None], seconds: float, complaint: str) -> T:
        def look_and_check() -> T | None:
            found = look()
            if not found:
                self._check()
            return found

        if found := until(look_and_check, seconds):
            return found
        raise CliError(f"{complaint} after {seconds:.0f} s.")

    def _stop_controller(self) -> None:
        self.controller.close()
        self._serve.terminate()
        try:
            self._serve.wait(STOP_SECONDS)
        except subprocess.TimeoutExpired:
            self._serve.kill()
            self._serve.wait()

    def _check(self) -> None:
        if self._serve.poll() is not None:
            log = self.folder / "controller.log"
            last = log.read_text(errors="replace").strip().splitlines()[-1:]
            raise CliError(f"The controller has ended: {' '.join(last) or 'no word'} (see {log}).")


def _serve(folder: Path, port: int) -> subprocess.Popen[bytes]:
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / "controller.log").open("ab") as log:
        return subprocess.Popen(
            [*PYTHON, "controller.serve", *flags(data=folder, port=port)],
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            start_new_session=True,
            preexec_fn=die_with_parent(os.getpid()),
        )


def free_or_any(port: int) -> int:
    """``port`` if nobody listens there, else 0: any."""
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("127.0.0.1", port))
        except OSError:
            return 0
    return port
