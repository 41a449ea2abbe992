"""Nodes on this machine: agents as child processes that share one torch import by fork.

    fleet ==socket== mother zygote --fork--> zygote of agent 1 ==socket== agent 1
      |                              +-----> zygote of agent 2 ==socket== agent 2
      +-- agent 1, agent 2 …  (children of the fleet)

Nothing outlives anything: an agent that dies takes its zygote and its trainers along (they see the
end of its socket), a fleet that dies takes its agents (parent-death signal) and its mother zygote
(end of the socket). Use from the main thread: the parent-death signal is bound to the thread that
started a child.
"""

import contextlib
import ctypes
import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import IO, Self

import psutil

from controller.cloud.port import CloudError, Machine
from trainer.contract import forks

IMPORT_SECONDS = 180.0
"""How long importing torch may take on a slow disk."""
_ANSWER_SECONDS = 10.0
_GONE_SECONDS = 5.0
_PR_SET_PDEATHSIG = 1
_LIBC = ctypes.CDLL(None, use_errno=True)


@dataclass(frozen=True)
class _Node:
    agent: subprocess.Popen[bytes]
    zygote: int

    @property
    def is_alive(self) -> bool:
        return self.agent.poll() is None


def machine_boot_id() -> str:
    """Equal on two processes = one machine."""
    return Path("/proc/sys/kernel/random/boot_id").read_text().strip()


class LocalFleet:
    """A :class:`~controller.cloud.port.Cloud` of agents on this machine. A context manager: at its
    end every process that it started is gone.
    """

    def __init__(self, controller: str, token_file: Path, folder: Path) -> None:
        """``folder`` holds each agent's state and log; ``token_file`` is that of role agent."""
        self.way: Callable[[str], str] = lambda node: controller
        """The URL by which a node reaches the controller."""
        self._token_file = token_file
        self._folder = folder
        self._nodes: dict[str, _Node] = {}
        self._mother: subprocess.Popen[bytes] | None = None
        self._socket: socket.socket | None = None

    def __enter__(self) -> Self:
        """Start importing torch; :meth:`wait_for_torch` says when that is done."""
        self._folder.mkdir(parents=True, exist_ok=True)
        ours, theirs = forks.pair()
        with theirs, (self._folder / "zygote.log").open("ab") as log:
            self._socket = ours
            self._mother = _start(
                ["trainer.zygote", "--fd", str(theirs.fileno())], log, theirs.fileno()
            )
        return self

    def __exit__(
        self, kind: type[BaseException] | None, e: BaseException | None, at: TracebackType | None
    ) -> None:
        self.delete(tuple(self._nodes))
        if self._socket:
            self._socket.close()
        if self._mother:
            _end(self._mother)

    def wait_for_torch(self) -> str:
        """Block until agents can be made; the version of torch."""
        answer = self._answer(IMPORT_SECONDS)
        if not isinstance(answer, forks.Ready):
            raise CloudError(f"The zygote said {answer.kind} where it should say that it is ready.")
        return answer.torch_version

    def create(self, names: Sequence[str]) -> None:
        """Start an agent for each name that does not live. Needs the zygote to be ready."""
        for name in names:
            if name not in self._nodes or not self._nodes[name].is_alive:
                self._nodes[name] = self._start_node(name)

    def delete(self, names: Sequence[str]) -> None:
        """SIGKILL agents, zygotes and trainers at once, without notice, and see them gone."""
        nodes = [self._nodes.pop(name) for name in names if name in self._nodes]
        for node in nodes:
            node.agent.kill()
            _kill(node.zygote)
        for node in nodes:
            node.agent.wait()

    def list(self) -> tuple[Machine, ...]:
        """Every agent that was started and not deleted."""
        return tuple(
            Machine(name, "running" if node.is_alive else "gone")
            for name, node in self._nodes.items()
        )

    def notice(self, name: str, seconds: float) -> None:
        """Tell a node, as a cloud would, that it will be taken. Taking it is the caller's."""
        text = json.dumps({"seconds": seconds, "event": f"drill-{time.monotonic_ns()}"})
        self._notice_file(name).write_text(text)

    def _notice_file(self, name: str) -> Path:
        return self._folder / name / "notice.json"

    def pids(self, name: str) -> tuple[int, int]:
        """The processes of a node: its agent and its zygote."""
        return self._nodes[name].agent.pid, self._nodes[name].zygote

    def lend_zygote(self, name: str) -> socket.socket:
        """A warm zygote for somebody else, who is to inherit this end of its socket; it ends with
        the last copy of it.
        """
        ours, theirs = forks.pair()
        with theirs:
            self._fork_zygote(name, theirs)
        return ours

    def _start_node(self, name: str) -> _Node:
        state = self._folder / name
        state.mkdir(parents=True, exist_ok=True)
        self._notice_file(name).unlink(missing_ok=True)  # of one who had the name before
        agents, zygotes = forks.pair()
        with agents, zygotes, (state / "agent.log").open("ab") as log:
            zygote = self._fork_zygote(name, zygotes)
            command = ["agent.daemon", "--controller", self.way(name),
                       "--token-file", str(self._token_file), "--name", name,
                       "--state-dir", str(state), "--zygote-fd", str(agents.fileno()),
                       "--notices", f"file:{self._notice_file(name)}"]  # fmt: skip
            return _Node(_start(command, log, agents.fileno()), zygote)

    def _fork_zygote(self, name: str, end: socket.socket) -> int:
        """Have the mother fork a zygote that serves the other end of ``end``'s pair; its pid."""
        id_ = f"{name}@{time.monotonic_ns()}"
        assert self._socket, "the fleet is not started"
        forks.send(self._socket, forks.StartZygote(id=id_), end.fileno())
        while True:
            answer = self._answer(_ANSWER_SECONDS)
            match answer:
                case forks.Started() if answer.id == id_:
                    return answer.pid
                case forks.Refused() if answer.id == id_:
                    raise CloudError(f"Node {name} cannot be made: {answer.message}.")
                case _:  # an older zygote's end
                    continue

    def _answer(self, seconds: float) -> forks.Answer:
        assert self._socket, "the fleet is not started"
        self._socket.settimeout(seconds)
        try:
            received = forks.receive(self._socket)
        except TimeoutError:
            raise CloudError(f"The zygote has not answered for {seconds:.0f} s.") from None
        if received is None:
            log = self._folder / "zygote.log"
            last = log.read_text(errors="replace").strip().splitlines()[-1:]
            raise CloudError(f"The zygote has ended: {' '.join(last) or 'no word'} (see {log}).")
        return forks.ANSWER.validate_json(received[0])


def kill_tree(pid: int) -> None:
    """The drill: SIGKILL an agent with all its descendants, as a reclaim without notice does.

    What it forked through a shared zygote dies with it by the chain of death. Only for an agent on
    this machine. Returns when the agent is gone; gone already is no error.
    """
    try:
        agent = psutil.Process(pid)
        if not _is_agent(agent.cmdline()):  # the number belongs to somebody else by now
            return
        tree = [agent, *agent.children(recursive=True)]
    except psutil.NoSuchProcess:
        return
    for process in tree:
        with contextlib.suppress(psutil.NoSuchProcess):
            process.kill()
    psutil.wait_procs([agent], timeout=_GONE_SECONDS)


def _is_agent(command: Sequence[str]) -> bool:
    return any(Path(word).name in ("varuna-agent", "agent.daemon") for word in command)


def die_with_parent(parent: int) -> Callable[[], None]:
    """For ``preexec_fn``: the child is killed when process ``parent`` (its parent) ends."""

    def ask() -> None:
        _LIBC.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
        if os.getppid() != parent:  # it was gone before we asked
            os.kill(os.getpid(), signal.SIGKILL)

    return ask


def _start(module: list[str], log: IO[bytes], descriptor: int) -> subprocess.Popen[bytes]:
    return subprocess.Popen(
        [sys.executable, "-I", "-u", "-m", *module],
        stdin=subprocess.DEVNULL,
        stdout=log,
        stderr=log,
        pass_fds=[descriptor],
        env=os.environ | forks.ONE_THREAD,
        start_new_session=True,
        preexec_fn=die_with_parent(os.getpid()),
    )


def _end(process: subprocess.Popen[bytes]) -> None:
    """It goes by itself when its socket is closed; else it is killed."""
    try:
        process.wait(_GONE_SECONDS)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()


def _kill(pid: int) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, signal.SIGKILL)
