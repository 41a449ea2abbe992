"""`varuna demo`: a controller, local agents and a small real job on this machine, and evictions on
wish.

Every figure that it prints was asked from the controller's REST API.
"""

import contextlib
import json
import os
import random
import re
import shutil
import signal
import sys
import time
import webbrowser
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated

import typer

from controller import words
from controller.api.schemas import (
    EventView,
    EvictAnswer,
    EvictRequest,
    JobView,
    LedgerView,
    Page,
    RecoveryView,
)
from controller.cli.jobs import WAIT_EXIT
from controller.cli.options import AsJson
from controller.cli.workplace import folder_for, stopped_by_signals
from controller.client import output
from controller.client.cluster import Cluster, free_or_any
from controller.client.jobs import send
from controller.client.rest import USAGE, CliError, Controller, UnreachableError, job_path
from controller.core.events import EventType
from controller.core.jobspec import Checkpointing, Every, JobSpec, NodeRange, Plan, parse_duration
from controller.core.states import JobState

PORT = 8430
NAME = "demo"
BATCH_SIZE = 32
MODEL = {"layers": 6, "width": 96, "heads": 4, "context": 64}
"""Small: a step takes a fraction of a second with eight trainers on two cores."""

_ENOUGH_FOR_STAGES = 4
"""From so many nodes on there are always stages to be seen: on one machine, whose links are fast
and whose cores are shared, replicas alone would win.
"""

_LOOK_SECONDS = 0.2
_AIM_SECONDS = 0.01
"""Between looks when an eviction is near: it is to come at its step, not a step later."""
_NEAR_STEPS = 5
_TOLD = frozenset(
    {
        EventType.JOB_STATE_CHANGED,
        EventType.NODE_LOST,
        EventType.NODE_EVICTED,
        EventType.NODE_QUARANTINED,
        EventType.RECOVERED,
        EventType.TRAINER_FAILED,
        EventType.ORDER_FAILED,
        EventType.SAVE_FAILED,
        EventType.CHECKPOINT_CONDEMNED,
    }
)
"""The events that the terminal shows; `varuna events demo` has all."""


def demo(
    nodes: Annotated[int, typer.Option(min=1, max=64, help="Local agents.")] = 8,
    steps: Annotated[int, typer.Option(min=1, help="Of the job.")] = 2000,
    evict: Annotated[
        str,
        typer.Option(metavar="N@STEP,…", help="Kill N nodes when STEP is done: 1@20,2@40."),
    ] = "",
    evict_every: Annotated[
        str | None,
        typer.Option(metavar="DURATION", help="Kill a node and bring one back, again and again."),
    ] = None,
    seed: Annotated[int, typer.Option(help="Of the training, and of who is killed.")] = 0,
    data: Annotated[
        Path | None, typer.Option(help="Keep everything here, every checkpoint too.")
    ] = None,
    exit_: Annotated[bool, typer.Option("--exit", help="End with the job.")] = False,
    no_browser: Annotated[bool, typer.Option("--no-browser", help="Open no page.")] = False,
    json_: AsJson = False,
) -> None:
    """See it work: a controller, local agents and a small real job on this machine."""
    plan = read_evictions(evict)
    pause = _duration(evict_every)
    kept = data is not None or not exit_
    with stopped_by_signals(), folder_for("demo", data) as folder:
        try:
            with Cluster(folder, 0 if exit_ else free_or_any(PORT)) as cluster:
                names = [f"node-{i}" for i in range(1, nodes + 1)]
                cluster.fleet.wait_for_torch()
                cluster.add(names)
                job = _submit(cluster, nodes, steps, seed, keep_all=data is not None)
                show = _Show(cluster, job.id, quiet=json_)
                show.head(names)
                if not (exit_ or no_browser):
                    _open_page(cluster)
                evictions = Evictions(cluster, plan, pause, random.Random(seed))
                code = _watch(cluster, job.id, evictions, show, stay=not exit_)
                if json_:
                    print(json.dumps(outcome(cluster, job.id)), flush=True)
        except KeyboardInterrupt:
            code = 130 if exit_ else 0
            again = f"Start again: varuna demo --data {folder}"
            left = f" Data kept in {folder}. {again}" if kept else ""
            output.note(f"\nStopped.{left}")
        if not kept:
            shutil.rmtree(folder, ignore_errors=True)
    raise typer.Exit(code)


@dataclass(frozen=True)
class Eviction:
    """Kill ``count`` nodes when ``step`` is committed."""

    count: int
    step: int


def read_evictions(text: str) -> tuple[Eviction, ...]:
    """``1@20,2@40``; CliError with the form otherwise."""
    found = [re.fullmatch(r"\s*([1-9]\d*)@(\d+)\s*", part) for part in text.split(",") if part]
    if not all(found):
        raise CliError(f"`--evict {text}` is not of the form N@STEP,N@STEP.", USAGE)
    pairs = (match.groups() for match in found if match)
    return tuple(sorted((Eviction(int(n), int(s)) for n, s in pairs), key=lambda e: e.step))


@dataclass
class Evictions:
    """Who is killed when: by step, and every so often one, which later comes back."""

    cluster: Cluster
    planned: tuple[Eviction, ...]
    every_seconds: float | None
    chance: random.Random
    _next_at: float = 0.0
    _away: list[str] = field(default_factory=list)

    def look(self, job: JobView, now: float) -> None:
        """Kill whose time has come; ``now`` is monotonic."""
        while self.planned and job.step >= self.planned[0].step:
            self._kill(self.planned[0].count, job)
            self.planned = self.planned[1:]
        if self.every_seconds and now >= self._next_at and job.state is JobState.RUNNING:
            self._take_turns(job, now)

    def are_near(self, job: JobView) -> bool:
        """Whether the next planned one is due within a few steps."""
        return bool(self.planned) and job.step >= self.planned[0].step - _NEAR_STEPS

    def _take_turns(self, job: JobView, now: float) -> None:
        """Half of the time one node is away; the first half it is there."""
        if self._away:
            self.cluster.add(self._away)
            output.note(f"Step {job.step}: {', '.join(self._away)} is back.")
            self._away = []
        elif self._next_at:
            self._away = self._kill(1, job)
        assert self.every_seconds
        self._next_at = now + self.every_seconds / 2

    def _kill(self, count: int, job: JobView) -> list[str]:
        """Nodes that hold seats first, drawn by the seed; without notice, all at once. A drill, as
        `varuna evict` is one: it is not held against them.
        """
        ours = (node for node in self.cluster.nodes() if node.job in (None, job.id))
        live = sorted(ours, key=lambda node: node.name)
        drawn = self.chance.sample(live, len(live))
        victims = sorted(drawn, key=lambda node: not node.ranks)[:count]
        names = sorted(node.name for node in victims)
        if not names:
            return []
        drill = EvictRequest(nodes=tuple(names)).model_dump(mode="json")
        self.cluster.controller.post(job_path(job.id, "/actions/evict"), drill, EvictAnswer)
        output.note(f"Step {job.step}: killed {', '.join(names)} of {len(live)} nodes.")
        return names


def outcome(cluster: Cluster, job_id: str) -> dict[str, object]:
    """What became of the job, each value as the controller says it."""
    ask = cluster.controller
    job = ask.get(job_path(job_id), JobView)
    told = {"at_step", "resumed_from", "lost_steps", "gap_s", "phases", "from_shape", "to_shape"}
    recoveries = ask.all(job_path(job_id, "/recoveries"), RecoveryView)
    ledger = ask.get(job_path(job_id, "/ledger"), LedgerView)
    return {
        "state": job.state,
        "steps": job.step,
        "final_loss": job.loss,
        "recoveries": [view.model_dump(mode="json", include=told) for view in recoveries],
        "samples_committed_once": ledger.samples_committed_once,
        "replay": ledger.replay.model_dump(mode="json"),
    }


class _Show:
    """What the terminal says while the job runs."""

    def __init__(self, cluster: Cluster, job_id: str, quiet: bool) -> None:
        self._cluster = cluster
        self._job_id = job_id
        self._quiet = quiet
        self._running = False
        before = self._ask.get(job_path(job_id, "/events"), Page[EventView], last=1).items
        self._seen = before[-1].seq if before else 0

    @property
    def _ask(self) -> Controller:
        return self._cluster.controller

    def head(self, names: list[str]) -> None:
        """Where everything is."""
        varuna = Path(sys.executable).with_name("varuna")
        self._line("Controller", self._ask.place.url)
        self._line("Sign in", f"with the token in {self._cluster.token_file}")
        self._line("Agents", f"{len(names)} of {len(names)} connected")
        self._line("varuna", str(varuna))

    def look(self, job: JobView) -> None:
        """Tell the first step, then each event worth telling."""
        if not self._running and job.state is JobState.RUNNING and job.shape:
            self._running = True
            rate = f"{words.number(job.examples_per_second)} ex/s"
            self._line(
                "Job " + job.name, f"running {words.times(job.shape)}, step {job.step}, {rate}"
            )
            self._line("Next", f"varuna evict {job.name} --count 3")
        page = self._ask.get(job_path(self._job_id, "/events"), Page[EventView], after=self._seen)
        for event in page.items:
            self._seen = event.seq
            if event.type in _TOLD:
                self._say(f"{event.at.astimezone():%H:%M:%S}  {event.message}")

    def end(self, job: JobView) -> None:
        """How it went."""
        for view in self._ask.all(job_path(self._job_id, "/recoveries"), RecoveryView):
            self._line(f"Recovery {view.number}", words.recovery(view))
        ledger = self._ask.get(job_path(self._job_id, "/ledger"), LedgerView)
        self._line(
            "Job " + job.name,
            f"{job.state}, step {words.step(job)}, loss {words.number(job.loss, 4)}",
        )
        self._line("Samples", words.samples(ledger))
        if again := words.replay(ledger.replay):
            self._line("Replay", again)

    def _line(self, what: str, text: str) -> None:
        self._say(f"    {what:<12}{text}")

    def _say(self, line: str) -> None:
        (output.note if self._quiet else output.say)(line)


def _submit(cluster: Cluster, nodes: int, steps: int, seed: int, keep_all: bool) -> JobView:
    """The demo's job; one that an earlier demo in this folder left unfinished goes on."""
    left = [j for j in cluster.controller.all("/api/v1/jobs", JobView) if j.name == NAME]
    if left:
        return left[0]
    fewest = 2 if nodes >= _ENOUGH_FOR_STAGES else 1
    spec = JobSpec(
        name=NAME,
        program="builtin:gpt",
        args=dict(MODEL),
        nodes=NodeRange(min=fewest, max=nodes),
        plan=Plan(depth=NodeRange(min=fewest, max=None)),
        batch_size=BATCH_SIZE,
        steps=steps,
        seed=seed,
        checkpoint=Checkpointing(
            dir=str(cluster.folder / "checkpoints"),
            every=Every(steps=10),
            keep=1_000_000 if keep_all else 3,
        ),
        drills=True,
    )
    return send(cluster.controller, spec, None)


def _watch(cluster: Cluster, job_id: str, evictions: Evictions, show: _Show, stay: bool) -> int:
    """Look until the job is over (``stay``: until Ctrl-C); the exit code that says how it ended."""
    while True:
        cluster.fleet.list()  # collects agents that a drill has killed
        if cluster.keep_up():
            output.note("The controller had ended and was started again.")
        pause = _LOOK_SECONDS
        with contextlib.suppress(UnreachableError):  # then it is started again
            job = cluster.controller.get(job_path(job_id), JobView)
            show.look(job)
            if job.state.is_over:
                break
            evictions.look(job, time.monotonic())
            pause = _AIM_SECONDS if evictions.are_near(job) else _LOOK_SECONDS
        time.sleep(pause)
    show.end(job)
    while stay:
        output.note("Ctrl-C ends the demo.")
        signal.pause()
    return WAIT_EXIT[job.state]


def _open_page(cluster: Cluster) -> None:
    if sys.stdout.isatty() and (os.environ.get("DISPLAY") or os.environ.get("WAYLAND_DISPLAY")):
        webbrowser.open(cluster.controller.place.url)


def _duration(text: str | None) -> float | None:
    try:
        return parse_duration(text) if text else None
    except ValueError as error:
        raise CliError(f"--evict-every: {error}.", USAGE) from None
