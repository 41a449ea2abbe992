"""The rival of the recovery bench: torchrun's elastic agents with a tuned rendezvous.

Each agent is one "node" with one worker. The first agent serves the rendezvous, so it is never the
one that is killed: torchrun would not come back at all.
"""

import json
import os
import socket
import subprocess
import sys
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from controller.cloud.local import die_with_parent
from tests.bench.clock import Clock
from tests.bench.trees import strike, tree, until

RENDEZVOUS = "last_call_timeout=1,keep_alive_interval=1,keep_alive_max_attempt=3"
START_SECONDS = 300.0


class Torchrun:
    """``agents`` of them, at least ``at_least``, running :mod:`tests.bench.elastic`."""

    def __init__(self, folder: Path, agents: int, at_least: int, work: dict[str, Any]) -> None:
        folder.mkdir(parents=True)
        self.folder = folder
        self.clock = Clock(folder / "clock")
        self._count = agents
        self._at_least = at_least
        args = work["args"] | {"clock": str(self.clock.path)}
        self._work = json.dumps(work | {"args": args, "folder": str(folder)})
        self._agents: list[subprocess.Popen[bytes]] = []

    def __enter__(self) -> Self:
        with socket.create_server(("127.0.0.1", 0)) as probe:
            self._port = probe.getsockname()[1]
        self._agents.append(self._start(0))
        until(self._is_served, "torchrun's rendezvous", START_SECONDS)
        self._agents += [self._start(number) for number in range(1, self._count)]
        return self

    def __exit__(
        self, kind: type[BaseException] | None, e: BaseException | None, at: TracebackType | None
    ) -> None:
        strike(tree(agent.pid for agent in self._agents))
        for agent in self._agents:
            agent.wait()

    def kill_last(self) -> float:
        """SIGKILL the last agent and its worker; when (monotonic)."""
        return strike(tree([self._agents[-1].pid]))

    def _start(self, number: int) -> subprocess.Popen[bytes]:
        command = [
            *(sys.executable, "-m", "torch.distributed.run"),
            *(f"--nnodes={self._at_least}:{self._count}", "--nproc-per-node=1"),
            *("--rdzv-backend=c10d", f"--rdzv-endpoint=127.0.0.1:{self._port}"),
            *("--rdzv-id=bench", f"--rdzv-conf={RENDEZVOUS}", "--max-restarts=100"),
            *("--monitor-interval=0.1", "--local-addr=127.0.0.1"),
            *("-m", "tests.bench.elastic", self._work),
        ]
        env = os.environ | {
            "OMP_NUM_THREADS": "1",
            "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1",
            "GLOO_SOCKET_IFNAME": "lo",
        }
        with (self.folder / f"agent-{number}.log").open("ab") as log:
            return subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                env=env,
                start_new_session=True,
                preexec_fn=die_with_parent(os.getpid()),
            )

    def _is_served(self) -> bool | None:
        with socket.socket() as probe:
            return True if probe.connect_ex(("127.0.0.1", self._port)) == 0 else None
