"""A run on a `varuna demo` that is there already, and stays. It brings back what was killed: its
controller at once, a node when its name lies in the folder ``wanted``.
"""

import contextlib
import json
import os
import re
import signal
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import psutil

from controller.api.schemas import JobView, NodeView
from controller.chaos import processes, verdict
from controller.chaos.deeds import Deed, Verb
from controller.chaos.ground import Ground
from controller.chaos.replay import replay
from controller.chaos.report import Report
from controller.chaos.trial import Trial
from controller.chaos.watch import Watch
from controller.client.cluster import READY_SECONDS, WANTED
from controller.client.rest import CliError, Controller
from controller.client.waiting import until
from controller.cloud.local import kill_tree, machine_boot_id

_LOOK_SECONDS = 1.0
_NO_SUCH_THING = {
    Verb.CUT: "the demo's agents have no link that can be cut",
    Verb.MEND: "the demo's agents have no link that can be cut",
    Verb.DISK_FULL: "the demo's checkpoints are not on a disk of their own",
    Verb.DISK_FREE: "the demo's checkpoints are not on a disk of their own",
}


@dataclass(frozen=True)
class _Agent:
    """What an agent's command line says."""

    name: str
    pid: int
    state: Path
    notices: Path


def run_on_demo(
    job: JobView, ask: Callable[[], Controller], deeds: Sequence[Deed], aside: Path, report: Report
) -> None:
    """``report`` is filled in. CliError when the job is none that can be harmed."""
    agents = agents_here(ask().all("/api/v1/nodes", NodeView))
    if not job.program.startswith("builtin:"):
        raise CliError(f"{job.program} cannot be replayed here; chaos tries builtin programs only.")
    root = Path(job.spec.checkpoint.dir or "") / job.id
    if not root.is_dir():
        raise CliError(f"{root} is no folder of this machine; its checkpoints cannot be watched.")
    watch = Watch(job.id, root, aside, ask, time.monotonic())
    launches = Trial(DemoGround(job.id, ask, agents), watch, report).go(deeds, report.seconds)
    ours = [launch for launch in launches if launch.generation > (job.generation or 0)]
    report.invariants += [
        verdict.one_writer(watch.complaints, watch.looks),
        verdict.nobody_died([f"agent of {name}" for name in watch.deaths]),
        verdict.nothing_left(_left(root)),
        verdict.replays_equal(ours, replay(job.spec, ours, aside, None)),
    ]


def _left(root: Path) -> list[str]:
    """Temporary files of processes that are gone."""
    found = [(path, re.fullmatch(r"\..*\.(\d+)\.tmp", path.name)) for path in root.rglob(".*")]
    return [str(path) for path, match in found if match and not psutil.pid_exists(int(match[1]))]


def agents_here(nodes: Sequence[NodeView]) -> Mapping[str, _Agent]:
    """All live nodes, by name. CliError when one is not a demo's on this machine."""
    far = [node.name for node in nodes if node.boot_id != machine_boot_id()]
    if far:
        raise CliError(f"{', '.join(far)} is not on this machine; chaos harms local agents only.")
    found = {}
    for node in nodes:
        words = _command(node.pid)
        state, notices = _after("--state-dir", words), _after("--notices", words)
        if not state or not notices.startswith("file:") or Path(state).name != node.name:
            raise CliError(f"{node.name} was not started by `varuna demo`; chaos leaves it alone.")
        file = Path(notices.removeprefix("file:"))
        found[node.name] = _Agent(node.name, node.pid, Path(state), file)
    if not found:
        raise CliError("No agents are connected.")
    return found


class DemoGround(Ground):
    """The demo that ``job`` runs in; ``ask`` gives its controller."""

    def __init__(
        self, job: str, ask: Callable[[], Controller], agents: Mapping[str, _Agent]
    ) -> None:
        super().__init__(job)
        self._ask = ask
        self._agents = dict(agents)
        """Those that live, as far as is known."""
        self._looked_at = 0.0
        self._folder = next(iter(agents.values())).state.parent.parent

    def why_not(self, verb: Verb) -> str:
        """It has no proxy and no disk of its own."""
        return _NO_SUCH_THING.get(verb, "")

    def _do(self, deed: Deed) -> None:
        match deed.verb:
            case Verb.KILL | Verb.TAKE:
                if deed.node in self._agents:
                    kill_tree(self._agents.pop(deed.node).pid)
            case Verb.JOIN:
                (self._folder / WANTED / deed.node).touch()
            case Verb.NOTICE if deed.node in self._agents:
                notice = {"seconds": deed.seconds, "event": f"chaos-{time.monotonic_ns()}"}
                self._agents[deed.node].notices.write_text(json.dumps(notice))
            case Verb.CONTROLLER_KILL:
                os.kill(self._controller(), signal.SIGKILL)
                self.controller_is_up = False
            case Verb.CONTROLLER_START:
                self._wait_for_the_controller()
                self.controller_is_up = True

    def tick(self) -> None:
        """Who came back is known by its new process, sooner or later."""
        super().tick()
        if not self.controller_is_up or time.monotonic() < self._looked_at + _LOOK_SECONDS:
            return
        self._looked_at = time.monotonic()
        with contextlib.suppress(CliError):
            nodes = self._ask().all("/api/v1/nodes", NodeView)
            self._agents |= agents_here([n for n in nodes if psutil.pid_exists(n.pid)])

    def dead(self) -> list[str]:
        """By what their processes are."""
        return [
            name
            for name, agent in self._agents.items()
            if name not in self.troubled and not psutil.pid_exists(agent.pid)
        ]

    def _machine(self, node: str) -> list[psutil.Process]:
        with contextlib.suppress(psutil.NoSuchProcess, KeyError):
            agent = psutil.Process(self._agents[node].pid)
            seated = [t.pid for t in processes.trainers(self.job) if t.node == node]
            zygotes = {psutil.Process(pid).ppid() for pid in seated}
            forked = [p for zygote in zygotes for p in processes.zygote_children(zygote)]
            return [agent, *forked]
        return []

    def _controller(self) -> int:
        return int(json.loads((self._folder / "controller.json").read_text())["pid"])

    def _wait_for_the_controller(self) -> None:
        if not until(self._is_ready, READY_SECONDS):
            self._ask().check_ready()  # or say why not

    def _is_ready(self) -> bool:
        with contextlib.suppress(CliError):
            self._ask().check_ready()
            return True
        return False


def _command(pid: int) -> list[str]:
    try:
        return psutil.Process(pid).cmdline()
    except psutil.NoSuchProcess:
        return []


def _after(flag: str, words: Sequence[str]) -> str:
    return words[words.index(flag) + 1] if flag in words[:-1] else ""
