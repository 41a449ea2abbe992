"""Recording a decision: ONE transaction, all of it or nothing, fenced by what it was decided on.

Each write names the state that it expects (`UPDATE … WHERE state IN …`), the tables of legal moves
being the law; no row changed = someone was faster = :class:`~controller.store.rows.StaleError`.
Orders are rows; who must be told is in the answer, and telling is the caller's, after the commit.
"""

from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import sqlalchemy as sa

from agent import wire
from controller.core import actions
from controller.core.events import EventType
from controller.core.jobspec import JobSpec
from controller.core.states import GenerationState, JobState, NodeState, Reason, may_move
from controller.core.words import ended
from controller.store import conduct, events, spares
from controller.store.known import known_costs
from controller.store.launching import Place, job_root, program_of, run_specs, setup_of
from controller.store.nodes import give_order
from controller.store.rows import StaleError, guarded
from controller.store.tables import checkpoints, generations, jobs, nodes, orders, seats

NodeKey = tuple[str, str]
"""(name, incarnation)."""

WITH_THE_GENERATION = (
    "start", "look", "connect", "halt", "dump", "drain", "save_now", "save_every",
    "forward", "save_layers",
)  # fmt: skip
"""Orders that are withdrawn when their generation ends."""


@dataclass(frozen=True)
class Fence:
    """How the job stood in the world that was decided on."""

    job: str
    state: JobState
    last_number: int


@dataclass(frozen=True)
class Here:
    """Where the controller runs: for jobs without a checkpoint folder of their own."""

    boot_id: str
    checkpoints: Path


class Recorder:
    """Writes one decision in the transaction of ``connection``; ``told`` collects whose orders or
    incarnation changed.
    """

    def __init__(self, connection: sa.Connection, at: float, here: Here) -> None:
        self.connection = connection
        self.at = at
        self.here = here
        self.told: set[NodeKey] = set()
        self.lost: set[NodeKey] = set()

    def record(
        self, decision: actions.Decision, fence: Fence | None, loss_at: float | None
    ) -> None:
        """All actions in order. ``loss_at``: the first fact of a loss, for a generation that
        ends.
        """
        if fence is not None:
            # Touches the row for the guard's sake; a cancel that came meanwhile is no conflict.
            guarded(
                self.connection,
                jobs.update()
                .where(jobs.c.id == fence.job, jobs.c.state == fence.state.value)
                .where(jobs.c.generation == fence.last_number)
                .values(generation=fence.last_number),
                f"job {fence.job}",
            )
        for action in decision.actions:
            match action:
                case actions.MarkNode():
                    self._mark_node(action)
                case actions.QuarantineNode():
                    conduct.set_aside(self.connection, action, self.at)
                case actions.ReleaseNode(node, because):
                    conduct.served(self.connection, node, because, self.at)
                case actions.MarkSlow():
                    self._mark_slow(action)
                case actions.PlanGeneration():
                    if not self._plan(action):
                        return
                case actions.Launch():
                    self._launch(action)
                case actions.MoveGeneration():
                    self._move_generation(action)
                case actions.DumpStacks():
                    self._dump(action)
                case actions.StandStill():
                    self._stand_still(action, loss_at)
                case actions.RollForward():
                    self._roll_forward(action)
                case actions.Salvage():
                    self._salvage(action)
                case actions.EndGeneration():
                    self._end(action, loss_at)
                case actions.SaveEvery():
                    self._save_every(action)
                case actions.PrepareSpares():
                    self._prepare(action)
                case actions.MoveJob():
                    self._move_job(action)
                case actions.LearnCosts():
                    self._learn_costs(action)
                case actions.Condemn():
                    self._condemn(action)
                case actions.DeleteCheckpoints():
                    self._delete(action)
                case actions.MarkDone():
                    self._mark_done(action)

    # ---- nodes

    def _mark_node(self, action: actions.MarkNode) -> None:
        gone = action.state.is_gone
        since = {"gone_at": action.since or self.at} if gone else {}
        guarded(
            self.connection,
            nodes.update()
            .where(nodes.c.name == action.node, nodes.c.incarnation == action.incarnation)
            .where(nodes.c.state.in_(_before(action.state)))
            .values(state=action.state.value, **since),
            f"node {action.node}",
        )
        if gone:
            lost = action.state is NodeState.LOST
            type_ = EventType.NODE_LOST if lost else EventType.NODE_EVICTED
            events.record(self.connection, self.at, type_, action.because, node=action.node)
            self.lost.add((action.node, action.incarnation))
            if lost:
                conduct.lost(self.connection, action.node, action.since or self.at)

    def _mark_slow(self, action: actions.MarkSlow) -> None:
        guarded(
            self.connection,
            nodes.update()
            .where(nodes.c.name == action.node, nodes.c.incarnation == action.incarnation)
            .where(nodes.c.gone_at.is_(None))
            .values(slow=asdict(action.slow)),
            f"node {action.node}",
        )
        over = action.slow.is_over
        type_ = EventType.NODE_AS_FAST_AGAIN if over else EventType.NODE_SLOW
        events.record(self.connection, self.at, type_, action.because, node=action.node,
                      factor=action.slow.factor)  # fmt: skip

    # ---- generations

    def _plan(self, action: actions.PlanGeneration) -> bool:
        """False: the job was failed instead, because its checkpoints would be out of reach."""
        job = self._job(action.job)
        root = self._root(job, self._place(action.node, action.incarnation))
        if root is None:
            message = (
                f"The job has no checkpoint.dir, and {action.node} is not on the controller's"
                " machine. Submit it with a folder that the VM reaches."
            )
            self._move_job(actions.MoveJob(job.id, JobState.FAILED, Reason.SETUP_FAILED, message))
            return False
        look = wire.Look(job=action.job, generation=action.number, root=root)
        guarded(
            self.connection,
            jobs.update()
            .where(jobs.c.id == action.job, jobs.c.generation < action.number)
            .values(generation=action.number),
            f"generation {action.number} of {action.job}",
        )
        self.connection.execute(
            generations.insert().values(
                job=action.job,
                number=action.number,
                state=GenerationState.PLANNED.value,
                cuts=[],
                look_node=action.node,
                look_incarnation=action.incarnation,
                because=action.because,
                created_at=self.at,
                committed=0,
                charged=False,
                look_order=self._order(action.node, action.incarnation, look),
                paths={node: None for node, _ in action.connect} or None,
            )
        )
        self._connect(action)
        self._event(
            EventType.GENERATION_PLANNED, action.because, action.job, action.number, action.node
        )
        return True

    def _connect(self, action: actions.PlanGeneration) -> None:
        """Each tries all others."""
        places = {node: self._place(node, incarnation) for node, incarnation in action.connect}
        peers = {
            node: wire.Peer(node=node, host=place.facts.data_host, port=place.facts.store_port)
            for node, place in places.items()
        }
        for node, incarnation in action.connect:
            others = tuple(peer for name, peer in peers.items() if name != node)
            body = wire.Connect(job=action.job, generation=action.number, peers=others)
            self._order(node, incarnation, body)

    def _launch(self, action: actions.Launch) -> None:
        job = self._job(action.job)
        begun = action.resumed_from
        guarded(
            self.connection,
            self._generation(action.job, action.number, GenerationState.LAUNCHING).values(
                state=GenerationState.LAUNCHING.value,
                kind=action.kind,
                shape=action.shape.model_dump(mode="json"),
                cuts=list(action.cuts),
                resumed_from=begun.model_dump(mode="json") if begun else None,
                because=action.because,
                launched_at=self.at,
                save_every=action.save_every,
                save_because=action.save_because or None,
            ),
            f"generation {action.number} of {action.job}",
        )
        places = [self._place(seat.node, seat.incarnation) for seat in action.seats]
        root = self._root(job, places[0])
        if root is None:
            raise StaleError(f"{places[0].name} does not reach the checkpoints of {action.job}")
        self.connection.execute(
            seats.insert(),
            [
                {
                    "job": action.job, "generation": action.number, "rank": rank, "applied": 0,
                    "node": seat.node, "incarnation": seat.incarnation, "device": seat.device,
                    "phases": {},
                }
                for rank, seat in enumerate(action.seats)
            ],
        )  # fmt: skip
        spec = JobSpec.model_validate(job.spec)
        first = action.kind == "first_weights"
        glance = first and known_costs(self.connection, spec, places[0].device_kind) is not None
        runs = run_specs(action, spec, root, places, glance=glance)
        for seat, run in zip(action.seats, runs, strict=True):
            start = wire.Start(spec=run, bundle=spec.bundle, setup=setup_of(spec))
            self._order(seat.node, seat.incarnation, start)
        spares.seated(self.connection, [(seat.node, seat.incarnation) for seat in action.seats])
        self._event(
            EventType.GENERATION_LAUNCHED, action.because, action.job, action.number,
            shape=str(action.shape), kind=action.kind, plan=action.plan_because,
            resumed_from=begun.step if begun else None,
        )  # fmt: skip

    def _move_generation(self, action: actions.MoveGeneration) -> None:
        guarded(
            self.connection,
            self._generation(action.job, action.number, action.state).values(
                state=action.state.value
            ),
            f"generation {action.number} of {action.job}",
        )
        if action.state is GenerationState.RUNNING:
            self._event(EventType.GENERATION_RUNNING, action.because, action.job, action.number)

    def _dump(self, action: actions.DumpStacks) -> None:
        for node, incarnation in self._seated(action.job, action.number, alive=True):
            order = wire.DumpOrder(job=action.job, generation=action.number)
            self._order(node, incarnation, order)
        self._event(EventType.STACKS_DUMPED, action.because, action.job, action.number)

    def _save_every(self, action: actions.SaveEvery) -> None:
        """Rank 0's clock asks for a save, and the vote has all do it after the same step."""
        running = generations.c.state == GenerationState.RUNNING.value
        guarded(
            self.connection,
            generations.update()
            .where(generations.c.job == action.job, generations.c.number == action.number, running)
            .values(save_every=action.seconds, save_because=action.because),
            f"generation {action.number} of {action.job}",
        )
        clock = self.connection.execute(
            sa.select(seats).where(
                seats.c.job == action.job, seats.c.generation == action.number, seats.c.rank == 0
            )
        ).one_or_none()
        if clock is None:
            raise StaleError("rank 0 sits nowhere")
        every = wire.SaveEveryOrder(
            job=action.job, generation=action.number, seconds=action.seconds
        )
        self._order(clock.node, clock.incarnation, every)
        self._event(EventType.SAVE_PERIOD_MOVED, action.because, action.job, action.number,
                    seconds=action.seconds)  # fmt: skip

    def _prepare(self, action: actions.PrepareSpares) -> None:
        spec = JobSpec.model_validate(self._job(action.job).spec)
        for spare in action.spares:
            self._place(spare.node, spare.incarnation)  # it is alive
            spares.told(self.connection, (spare.node, spare.incarnation), action.job)
            prepare = wire.Prepare(
                job=action.job,
                generation=action.number,
                program=program_of(spec),
                bundle=spec.bundle,
                setup=setup_of(spec),
                trainers=spare.trainers,
            )
            self._order(spare.node, spare.incarnation, prepare)

    def _stand_still(self, action: actions.StandStill, loss_at: float | None) -> None:
        guarded(
            self.connection,
            self._generation(action.job, action.number, action.state).values(
                state=action.state.value,
                still_at=self.at,
                end_reason=action.reason.value,
                end_because=action.because,
                charged=action.charged,
                blamed=action.blamed,
                loss_at=loss_at or self.at,
            ),
            f"generation {action.number} of {action.job}",
        )
        halted = action.state is GenerationState.HALTED
        kind = wire.HaltOrder if halted else wire.DrainOrder
        for node, incarnation in self._seated(action.job, action.number, alive=True):
            self._order(node, incarnation, kind(job=action.job, generation=action.number))
        type_ = EventType.GENERATION_HALTED if halted else EventType.GENERATION_DRAINING
        self._event(type_, ended(action.because), action.job, action.number,
                    reason=action.reason.value)  # fmt: skip

    def _roll_forward(self, action: actions.RollForward) -> None:
        for survivor in action.survivors:
            forward = wire.ForwardOrder(
                job=action.job,
                generation=action.number,
                rank=survivor.rank,
                step=action.step,
                ballot=action.ballot,
            )
            self._order(survivor.node, survivor.incarnation, forward)
        self._event(EventType.ROLLED_FORWARD, action.because, action.job, action.number,
                    step=action.step, ranks=[s.rank for s in action.survivors])  # fmt: skip

    def _salvage(self, action: actions.Salvage) -> None:
        for survivor, layers in zip(action.survivors, action.layers, strict=True):
            save = wire.SaveLayers(
                job=action.job, generation=action.number, rank=survivor.rank, layers=layers
            )
            self._order(survivor.node, survivor.incarnation, save)
        self._event(EventType.SALVAGE_ORDERED, action.because, action.job, action.number,
                    step=action.step, ranks=[s.rank for s in action.survivors])  # fmt: skip

    def _end(self, action: actions.EndGeneration, loss_at: float | None) -> None:
        guarded(
            self.connection,
            self._generation(action.job, action.number, GenerationState.ENDED).values(
                state=GenerationState.ENDED.value,
                ended_at=self.at,
                end_reason=action.reason.value,
                end_because=action.because,
                charged=action.charged,
                blamed=action.blamed,
                loss_at=sa.func.coalesce(generations.c.loss_at, loss_at or self.at),
            ),
            f"generation {action.number} of {action.job}",
        )
        self.connection.execute(
            orders.update()
            .where(orders.c.job == action.job, orders.c.generation <= action.number)
            .where(orders.c.kind.in_(WITH_THE_GENERATION), orders.c.closed_at.is_(None))
            .values(closed_at=self.at)
        )
        stop = wire.Stop(job=action.job, up_to_generation=action.number)
        for node, incarnation in self._seated(action.job, action.number):
            # One that is lost gets it too: it may only be cut off, and come back.
            self._order(node, incarnation, stop)
        self._event(EventType.GENERATION_ENDED, action.because, action.job, action.number,
                    reason=action.reason.value, charged=action.charged)  # fmt: skip

    # ---- jobs

    def _move_job(self, action: actions.MoveJob) -> None:
        was = self._job(action.job)
        times: dict[str, float | None] = {}
        if was.state != action.state.value:
            waiting = action.state is JobState.WAITING
            times = {"waiting_since": self.at if waiting else None}
            if action.state.is_over:
                times["finished_at"] = self.at
        # Paused by a fault is paused until somebody says otherwise, too.
        paused = {"pause_wanted": True} if action.state is JobState.PAUSED else {}
        guarded(
            self.connection,
            jobs.update()
            .where(jobs.c.id == action.job)
            .where(jobs.c.state.in_([*_before(action.state), *_same(action.state)]))
            .values(
                state=action.state.value,
                reason=action.reason.value if action.reason else None,
                message=action.message,
                **times,
                **paused,
            ),
            f"job {action.job}",
        )
        if action.state.is_over:
            root = self._given_root(was) or self._own_root(was)
            self.told |= spares.release(self.connection, action.job, was.generation, root, self.at)
        if was.state != action.state.value:  # a message by itself is news only on the job's page
            self._event(
                EventType.JOB_STATE_CHANGED, action.message, action.job,
                state=action.state.value, was=was.state,
                reason=action.reason.value if action.reason else None,
            )  # fmt: skip

    # ---- checkpoints

    def _learn_costs(self, action: actions.LearnCosts) -> None:
        guarded(
            self.connection,
            jobs.update()
            .where(jobs.c.id == action.job)
            .values(costs=action.costs.model_dump(mode="json")),
            f"job {action.job}",
        )

    def _condemn(self, action: actions.Condemn) -> None:
        guarded(
            self.connection,
            checkpoints.update()
            .where(checkpoints.c.job == action.job, checkpoints.c.folder == action.folder)
            .where(checkpoints.c.condemned_at.is_(None))
            .values(condemned_at=self.at, condemned_because=action.because),
            f"checkpoint {action.folder}",
        )
        self._event(EventType.CHECKPOINT_CONDEMNED, action.because, action.job,
                    folder=action.folder)  # fmt: skip

    def _delete(self, action: actions.DeleteCheckpoints) -> None:
        job, place = self._job(action.job), self._place(action.node, action.incarnation)
        root = self._root(job, place)
        if root is None:
            return
        self.connection.execute(
            checkpoints.update()
            .where(checkpoints.c.job == action.job, checkpoints.c.folder.in_(action.folders))
            .values(deleted_at=self.at)
        )
        self._order(
            action.node,
            action.incarnation,
            wire.Delete(
                job=action.job, generation=action.generation, root=root, folders=action.folders
            ),
        )
        message = f"Superseded: {', '.join(action.folders)}."
        self._event(EventType.CHECKPOINTS_DELETED, message, action.job, action.generation,
                    action.node, folders=list(action.folders))  # fmt: skip

    def _mark_done(self, action: actions.MarkDone) -> None:
        job, place = self._job(action.job), self._place(action.node, action.incarnation)
        root = self._root(job, place)
        if root is None:
            return
        self._order(
            action.node,
            action.incarnation,
            wire.MarkDone(
                job=action.job,
                generation=action.generation,
                root=root,
                step=action.step,
                folder=action.folder,
            ),
        )
        message = f"The final checkpoint is {action.folder}."
        self._event(EventType.JOB_DONE_MARKED, message, action.job, action.generation, action.node,
                    folder=action.folder)  # fmt: skip

    # ---- small

    def _job(self, job: str) -> Any:
        return self.connection.execute(sa.select(jobs).where(jobs.c.id == job)).one()

    def _place(self, node: str, incarnation: str) -> Place:
        facts = self.connection.execute(
            sa.select(nodes.c.facts).where(
                nodes.c.name == node, nodes.c.incarnation == incarnation, nodes.c.gone_at.is_(None)
            )
        ).scalar()
        if facts is None:
            raise StaleError(f"node {node} is gone")
        return Place(node, wire.Facts.model_validate(facts))

    def _root(self, job: Any, place: Place) -> str | None:
        """The job's checkpoint folder as ``place`` reaches it; None: it does not."""
        is_here = place.facts.boot_id == self.here.boot_id
        return self._given_root(job) or (self._own_root(job) if is_here else None)

    def _given_root(self, job: Any) -> str | None:
        given = job.spec["checkpoint"]["dir"]
        return None if given is None else job_root(given, job.id)

    def _own_root(self, job: Any) -> str:
        """On the controller's machine, for a job that names no folder."""
        return str(self.here.checkpoints / job.id)

    def _generation(self, job: str, number: int, wanted: GenerationState) -> sa.Update:
        return generations.update().where(
            generations.c.job == job,
            generations.c.number == number,
            generations.c.state.in_(_before(wanted)),
        )

    def _seated(self, job: str, number: int, *, alive: bool = False) -> Sequence[NodeKey]:
        rows = self.connection.execute(
            sa.select(seats.c.node, seats.c.incarnation)
            .join(
                nodes,
                (nodes.c.name == seats.c.node) & (nodes.c.incarnation == seats.c.incarnation),
            )
            .where(seats.c.job == job, seats.c.generation == number)
            .where(nodes.c.gone_at.is_(None) if alive else sa.true())
            .distinct()
        )
        return [(row.node, row.incarnation) for row in rows]

    def _order(self, node: str, incarnation: str, body: wire.OrderBody) -> int:
        self.told.add((node, incarnation))
        match body:
            case wire.Start(spec=spec):
                job, number = spec.job, spec.generation
            case wire.Stop(job=job, up_to_generation=number):
                pass
            case _:
                job, number = body.job, body.generation
        return give_order(self.connection, node, incarnation, job, number, body, self.at)

    def _event(
        self,
        type_: EventType,
        message: str,
        job: str,
        generation: int | None = None,
        node: str | None = None,
        **data: Any,
    ) -> None:
        events.record(
            self.connection, self.at, type_, message,
            job=job, generation=generation, node=node, **data,
        )  # fmt: skip


def _before(wanted: JobState | NodeState | GenerationState) -> list[str]:
    """The states from which the law allows the step to ``wanted``."""
    states: Iterable[Any] = type(wanted)
    return [state.value for state in states if may_move(state, wanted)]


def _same(state: JobState) -> list[str]:
    """A job that is over changes no more, not even its message."""
    return [] if state.is_over else [state.value]
