"""A fleet of make-believe agents that speak the wire to a real controller and obey its orders.

Their trainers compute nothing: a step is committed when every rank of the generation is alive, and
checkpoints are names in :attr:`Fleet.folder`. What they say is what real ones say, in that order.
"""

import asyncio
import contextlib
import threading
from collections import defaultdict
from collections.abc import Coroutine, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any

import httpx2

from agent import wire
from agent.reports import Outbox
from controller.cloud.local import machine_boot_id
from trainer.contract import progress
from trainer.contract.costs import LayerCost, LayerCosts
from trainer.contract.samples import expected_hash
from trainer.contract.spec import RunSpec

LAYERS = 8
SAMPLES = 1000
Key = tuple[str, int]
"""(job, generation)."""


def facts(pid: int = 1, **more: Any) -> wire.Facts:
    """Of a small machine: this one."""
    values: dict[str, Any] = {
        "hostname": "here",
        "boot_id": machine_boot_id(),
        "pid": pid,
        "devices": (wire.Device(kind="cpu", index=0, memory_bytes=8 << 30),),
        "cores": 2,
        "memory_bytes": 8 << 30,
        "data_host": "127.0.0.1",
        "store_port": 29500,
        "agent_version": "0",
    }
    return wire.Facts(**{**values, **more})


def part(rank: int, spec: RunSpec, step: int) -> progress.PartWritten:
    """What ``rank`` saves: replica r of a stage those layers whose index mod D is r."""
    depth, replicas = spec.shape.depth, spec.shape.replicas
    if spec.kind == "first_weights":
        layers = tuple(range(LAYERS))
    else:
        held = range(spec.cuts[rank % depth], spec.cuts[rank % depth + 1])
        layers = tuple(i for i in held if i % replicas == rank // depth)
    return progress.PartWritten(
        folder=f"step-{step:06d}.g{spec.generation}", step=step, layers=layers,
        layer_count=LAYERS, num_bytes=100 * len(layers), seconds=0.01,
    )  # fmt: skip


def committed(spec: RunSpec, step: int) -> progress.StepCommitted:
    """A step as every rank reports it."""
    training = spec.training
    return progress.StepCommitted(
        step=step, loss=5.0 / step, grad_norm=1.0, samples=training.batch_size, seconds=0.01,
        sample_ids_hash=expected_hash(step, training.batch_size, SAMPLES, training.seed),
    )  # fmt: skip


def evaluated(step: int) -> progress.Evaluated:
    """An evaluation as every rank reports it."""
    accuracy = {"accuracy": 0.5}
    return progress.Evaluated(step=step, loss=6.0 / step, samples=7, metrics=accuracy, seconds=0.01)


INSPECTED = progress.Inspected(
    costs=LayerCosts(
        micro_batch=4,
        layers=(
            LayerCost(
                name="Block", forward_seconds=0.001, backward_seconds=0.002,
                parameter_bytes=1000, output_bytes=100,
            ),
        ) * LAYERS,
    ),
    samples=SAMPLES,
)  # fmt: skip


@dataclass
class Agent:
    """One agent; :meth:`Fleet.kill` breaks its connections, as the end of its process does."""

    name: str
    incarnation: str
    http: httpx2.AsyncClient
    outbox: Outbox = field(default_factory=Outbox)
    specs: dict[tuple[str, int, int], RunSpec] = field(default_factory=dict)
    said: dict[tuple[str, int, int], dict[str, progress.Line]] = field(default_factory=dict)
    trainers: dict[tuple[str, int, int], asyncio.Task[None]] = field(default_factory=dict)
    orders: list[wire.Order] = field(default_factory=list)
    tasks: list[asyncio.Task[None]] = field(default_factory=list)
    silent: bool = False


class Fleet:
    """Make-believe agents in one thread with an event loop of its own. A context manager."""

    def __init__(self, url: str, token: str, *, step_seconds: float = 0.02) -> None:
        self._url, self._token, self._pace = url, token, step_seconds
        self.folder: dict[tuple[str, str], dict[int, wire.PartFound]] = defaultdict(dict)
        self.agents: dict[str, Agent] = {}
        self.spoilt = 0
        """The step that is not finite; 0: all are."""
        self.beat_seconds = 0.1
        self._alive: defaultdict[Key, set[int]] = defaultdict(set)
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever)

    def __enter__(self) -> "Fleet":
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        for name in list(self.agents):
            self.kill(name)
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(10)
        self._loop.close()

    def _do(self, work: Coroutine[Any, Any, None]) -> None:
        future: Future[None] = asyncio.run_coroutine_threadsafe(work, self._loop)
        future.result(20)

    # ---- what a test does

    def add(self, *names: str, incarnation: str = "first-life") -> None:
        """Start agents; on return they are registered."""
        for name in names:
            self._do(self._start(name, incarnation))

    def kill(self, *names: str) -> None:
        """At once, with everything that runs there."""
        self._do(self._kill(names))

    def kill_trainers(self, *names: str) -> None:
        """What runs there dies; the agents report it as soon as they can."""
        for name in names:
            self._loop.call_soon_threadsafe(self._kill_trainers_of, self.agents[name])

    def silence(self, name: str) -> None:
        """Like SIGSTOP: connections stay open, nothing is said, its trainers stand still."""
        self.agents[name].silent = True
        for (job, generation, rank), trainer in self.agents[name].trainers.items():
            self._alive[(job, generation)].discard(rank)
            self._loop.call_soon_threadsafe(trainer.cancel)

    # ---- an agent's life

    async def _start(self, name: str, incarnation: str) -> None:
        http = httpx2.AsyncClient(
            base_url=f"{self._url}/api/v1/agents",
            headers={"Authorization": f"Bearer {self._token}"},
            timeout=httpx2.Timeout(10, read=30),
        )
        agent = self.agents[name] = Agent(name, incarnation, http)
        await self._register(agent)
        agent.tasks = [
            asyncio.ensure_future(self._beat(agent)),
            asyncio.ensure_future(self._obey(agent)),
        ]

    async def _register(self, agent: Agent) -> None:
        running = tuple(
            wire.RunningTrainer(
                job=key[0], generation=key[1], rank=key[2], phase="step", spec=agent.specs[key],
                said=tuple(agent.said[key].values()),
            )
            for key, trainer in agent.trainers.items()
            if not trainer.done()
        )  # fmt: skip
        asked = wire.Register(
            node=agent.name, incarnation=agent.incarnation, facts=facts(), running=running
        )
        answer = await agent.http.post("/register", content=asked.model_dump_json(), headers=JSON)
        assert answer.status_code == 200, answer.text
        durable = wire.Registered.model_validate_json(answer.content).reported
        if durable is not None and agent.outbox.resume(durable):
            agent.orders.clear()

    async def _beat(self, agent: Agent) -> None:
        while True:
            if not agent.silent:
                said = wire.Beat(incarnation=agent.incarnation)
                with contextlib.suppress(httpx2.TransportError):
                    await agent.http.post(
                        f"/{agent.name}/beat", content=said.model_dump_json(), headers=JSON
                    )
            await asyncio.sleep(self.beat_seconds)

    async def _obey(self, agent: Agent) -> None:
        after = 0
        while True:
            query: dict[str, str | int] = {
                "incarnation": agent.incarnation, "after": after, "wait": 20
            }  # fmt: skip
            try:
                answer = await agent.http.get(f"/{agent.name}/orders", params=query)
            except httpx2.TransportError:
                after = 0
                await asyncio.sleep(0.05)
                continue
            if answer.status_code == 409:
                await self._register(agent)
                after = 0
                continue
            for order in wire.Orders.model_validate_json(answer.content).orders:
                after = order.number
                if order.number not in {known.number for known in agent.orders}:
                    agent.orders.append(order)
                    await self._carry_out(agent, order)

    async def _carry_out(self, agent: Agent, order: wire.Order) -> None:
        match order.body:
            case wire.Start(spec=spec):
                await self._stop(agent, spec.job, spec.generation - 1)
                key = (spec.job, spec.generation, spec.rank)
                self._alive[key[:2]].add(spec.rank)
                agent.specs[key], agent.said[key] = spec, {}
                agent.trainers[key] = asyncio.ensure_future(self._train(agent, spec))
            case wire.Stop(job=job, up_to_generation=number):
                await self._stop(agent, job, number)
            case wire.Look() as look:
                await self._report(agent, self._looked(order.number, look))
                return
            case wire.Delete(job=job, folders=folders):
                for folder in folders:
                    self.folder.pop((job, folder), None)
        await self._report(agent, wire.OrderDone(number=order.number))

    def _looked(self, number: int, look: wire.Look) -> wire.Looked:
        parts = tuple(
            found
            for (job, _), by_rank in self.folder.items()
            if job == look.job
            for found in by_rank.values()
        )
        return wire.Looked(number=number, job=look.job, generation=look.generation, parts=parts)

    async def _stop(self, agent: Agent, job: str, up_to: int) -> None:
        for key in [k for k in agent.trainers if k[0] == job and k[1] <= up_to]:
            trainer = agent.trainers.pop(key)
            if not trainer.done():
                trainer.cancel()
                self._alive[key[:2]].discard(key[2])
                gone = wire.Exited(job=job, generation=key[1], rank=key[2], signal=9)
                await self._report(agent, gone)

    async def _kill(self, names: Sequence[str]) -> None:
        for name in names:
            agent = self.agents.pop(name)
            for task in (*agent.tasks, *agent.trainers.values()):
                task.cancel()
            await asyncio.gather(*agent.tasks, *agent.trainers.values(), return_exceptions=True)
            for job, generation, rank in agent.trainers:
                self._alive[(job, generation)].discard(rank)
            await agent.http.aclose()

    def _kill_trainers_of(self, agent: Agent) -> None:
        for (job, generation, rank), trainer in list(agent.trainers.items()):
            if not trainer.done():
                trainer.cancel()
                self._alive[(job, generation)].discard(rank)
                gone = wire.Exited(job=job, generation=generation, rank=rank, signal=9)
                agent.tasks.append(asyncio.ensure_future(self._report(agent, gone)))

    # ---- a trainer's life

    async def _train(self, agent: Agent, spec: RunSpec) -> None:
        for phase in ("boot", "program", "rendezvous", "load", "first_step"):
            await self._say(agent, spec, progress.PhaseBegun(phase=progress.Phase(phase)))
            await asyncio.sleep(0.002)
        world = spec.shape.world
        while len(self._alive[(spec.job, spec.generation)]) < world:
            await asyncio.sleep(0.002)
        if spec.kind == "first_weights":
            if spec.rank == 0:
                await self._say(agent, spec, INSPECTED)
                await self._save(agent, spec, 0)
            step = 0
        else:
            assert spec.resumed_from
            step = spec.resumed_from.step
            for step in range(spec.resumed_from.step + 1, spec.training.steps + 1):
                await asyncio.sleep(self._pace)
                alive = self._alive[(spec.job, spec.generation)]
                if len(alive) < world:
                    missing = tuple(rank for rank in range(world) if rank not in alive)
                    await self._say(agent, spec, _halted(step - 1, missing))
                    return
                if step == self.spoilt:
                    await self._stop_before(agent, spec, step)
                    return
                await self._say(agent, spec, committed(spec, step))
                if step % (spec.training.evaluate_every or step + 1) == 0:
                    await self._say(agent, spec, evaluated(step))
                if step % (spec.saving.every_steps or 10**9) == 0:
                    await self._save(agent, spec, step)
            if step % (spec.saving.every_steps or 10**9):
                await self._save(agent, spec, step)
        await self._say(agent, spec, progress.Finished(step=step))
        await self._report(
            agent, wire.Exited(job=spec.job, generation=spec.generation, rank=spec.rank, code=0)
        )

    async def _stop_before(self, agent: Agent, spec: RunSpec, step: int) -> None:
        """Nobody applies a step that is not finite: all save the one before, and stand still."""
        if spec.rank == 0:
            what = "the loss of micro-batch 0"
            await self._say(
                agent, spec, progress.NonFinite(step=step, replica=0, stage=0, what=what)
            )
        assert spec.resumed_from
        if step - 1 > spec.resumed_from.step:
            await self._save(agent, spec, step - 1)
        await self._say(agent, spec, progress.Stopped(step=step - 1))

    async def _save(self, agent: Agent, spec: RunSpec, step: int) -> None:
        written = part(spec.rank, spec, step)
        begun = spec.resumed_from
        self.folder[(spec.job, written.folder)][spec.rank] = wire.PartFound(
            folder=written.folder, step=step, generation=spec.generation, rank=spec.rank,
            layers=written.layers, layer_count=LAYERS, num_bytes=written.num_bytes,
            resumed_from=begun.step if begun else None,
            resumed_from_generation=begun.generation if begun else None,
        )  # fmt: skip
        await self._say(agent, spec, written)

    async def _say(self, agent: Agent, spec: RunSpec, line: progress.Line) -> None:
        said = wire.Said(job=spec.job, generation=spec.generation, rank=spec.rank, line=line)
        if not isinstance(line, progress.PartWritten):
            agent.said[(spec.job, spec.generation, spec.rank)][line.kind] = line
        await self._report(agent, said)

    async def _report(self, agent: Agent, body: wire.ReportBody) -> None:
        agent.outbox.add(body)
        while batch := agent.outbox.next_batch():
            said = wire.Reports(incarnation=agent.incarnation, reports=batch)
            try:
                answer = await agent.http.post(
                    f"/{agent.name}/reports", content=said.model_dump_json(), headers=JSON
                )
            except httpx2.TransportError:
                await asyncio.sleep(0.05)
                continue
            if answer.status_code == 409:
                await self._register(agent)
                continue
            assert answer.status_code == 200, answer.text
            durable = wire.ReportsAnswer.model_validate_json(answer.content).reported
            agent.outbox.acknowledge(durable)


JSON = {"content-type": "application/json"}


def _halted(applied: int, missing: tuple[int, ...]) -> progress.Halted:
    return progress.Halted(
        applied=applied, prepared=applied, cause="a link broke", suspects=missing
    )
