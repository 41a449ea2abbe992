"""The heart: load the world, decide, record, wake those whose orders changed. Dull on purpose.

    wake-up or tick -> World (rows + signs of life) -> core.reconcile -> each Decision recorded in
    one fenced transaction -> bells ring -> again, until a look is quiet

It holds nothing between two looks but times: a controller that starts again only loads the world.
"""

import asyncio
import contextlib
import math
from concurrent.futures import Future, ThreadPoolExecutor

import sqlalchemy as sa
import structlog

from controller.bell import FEED, RECONCILER
from controller.core.actions import Decision
from controller.core.assign import foresee
from controller.core.events import EventType
from controller.core.reconcile import reconcile
from controller.core.states import GenerationState, JobState, NodeState
from controller.core.world import Generation, Job, Node, World
from controller.parts import Parts
from controller.store import events, nodes, pruning
from controller.store.decisions import Fence, Here, Recorder
from controller.store.engine import Urgency
from controller.store.rows import StaleError
from controller.store.snapshot import Sign, Snapshots

log = structlog.get_logger()

NodeKey = tuple[str, str]
_LOOKS = 20
"""A tick that is not quiet after so many looks leaves the rest to the next one."""
_FLUSH_SECONDS = 1.0
_PRUNE_SECONDS, _PRUNE_AGAIN_SECONDS = 60.0, 0.5
_HASTE_SECONDS = 0.05
"""Between two looks while a job starts or recovers: a decision may wait for time alone to pass."""


class Reconciler:
    """Ticks on wake-ups and every ``settings.tick`` seconds until the controller closes."""

    def __init__(self, parts: Parts) -> None:
        self._parts = parts
        self._rules = parts.settings.rules()
        self._snapshots = Snapshots()
        # Its own: a decision never waits behind requests.
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="reconciler")
        now = parts.clock.now()
        self._started_at = now
        self._grace_until = now + self._rules.lost_after
        self._looked_at = now
        self._flushed_at = now
        self._prune_at = now + _PRUNE_SECONDS
        self._in_haste = False

    async def run(self) -> None:
        """Until the controller closes."""
        with self._thread, self._parts.bell.listen(RECONCILER) as rung:
            while not self._parts.closing:
                rung.clear()
                await self.tick()
                pause = _HASTE_SECONDS if self._in_haste else self._parts.settings.tick
                with contextlib.suppress(TimeoutError):
                    await asyncio.wait_for(rung.wait(), pause)

    async def tick(self) -> None:
        """Look and record until a look is quiet. A failure is logged; the next tick tries again."""
        self._flush(self._parts.clock.now())
        self._prune(self._parts.clock.now())
        try:
            for _ in range(_LOOKS):
                # Of one moment: should we stand still in the middle, nobody has been silent.
                now, signs = self._moment(), self._parts.presence.signs()
                recorded = await self._parts.loop.run_in_executor(
                    self._thread, self.look, signs, now
                )
                self._ring(recorded)
                if not recorded:
                    break
            self._parts.looked_at = self._parts.clock.now()
        except Exception:
            log.exception("tick_failed")

    def _moment(self) -> float:
        """The time of a look. If the one before is long ago we stood still, not they: everybody
        gets the time to be heard again.
        """
        now = self._parts.clock.now()
        if now - self._looked_at > self._rules.lost_after:
            self._grace_until = now + self._rules.lost_after
        self._looked_at = now
        return now

    def look(self, signs: dict[NodeKey, Sign], now: float) -> list[Recorder]:
        """One look: the decisions that were recorded; ``signs`` as they stood at ``now``.

        Runs in a thread.
        """
        with self._parts.store.read() as connection:
            world = self._snapshots.load(connection, signs, self._grace_until, self._started_at)
        self._in_haste = any(needs_haste(job) for job in world.jobs)
        recorded = []
        for decision in reconcile(world, now, self._rules):
            if not decision.actions:
                continue
            try:
                recorded.append(self._record(world, decision))
            except StaleError as stale:
                log.info("decision_dropped", job=decision.job, because=str(stale))
            except Exception:  # our mistake about one job is not the others' loss
                log.exception("decision_failed", job=decision.job, because=decision.because)
            else:
                log.info("decided", job=decision.job, because=decision.because)
        if not recorded and not self._in_haste:
            _look_ahead(world)
        return recorded

    def _record(self, world: World, decision: Decision) -> Recorder:
        settings, now = self._parts.settings, self._parts.clock.now()
        job = next((job for job in world.jobs if job.id == decision.job), None)
        fence = Fence(job.id, job.state, job.last_number) if job else None
        here = Here(self._parts.boot_id, settings.data.absolute() / "checkpoints")
        loss_at = first_loss(world, job) if job else None

        def work(connection: sa.Connection) -> Recorder:
            recorder = Recorder(connection, now, here)
            recorder.record(decision, fence, loss_at)
            return recorder

        return self._parts.store.write(work, Urgency.DECISION).result()

    def _ring(self, recorded: list[Recorder]) -> None:
        for recorder in recorded:
            self._parts.presence.dismiss(recorder.lost)
            self._parts.bell.ring_each(recorder.told | recorder.lost)
        if recorded:
            self._parts.bell.ring(FEED)

    def _prune(self, now: float) -> None:
        """A little of what is old; soon again while there is more."""
        if now < self._prune_at:
            return
        self._prune_at = math.inf
        before = now - 86400 * self._parts.settings.keep_days

        def gone(pruned: Future[int]) -> None:
            error = pruned.exception()
            if error is not None:
                log.error("prune_failed", because=str(error))
            more = error is None and pruned.result() > 0
            pause = _PRUNE_AGAIN_SECONDS if more else _PRUNE_SECONDS
            self._prune_at = self._parts.clock.now() + pause

        work = self._parts.store.write(lambda c: pruning.prune(c, before), Urgency.BEAT)
        work.add_done_callback(gone)

    def _flush(self, now: float) -> None:
        if now - self._flushed_at >= _FLUSH_SECONDS:
            self._flushed_at = now
            heard = {key: sign.heard_at for key, sign in self._parts.presence.signs().items()}
            self._parts.store.write(lambda c: nodes.flush_heard(c, heard), Urgency.BEAT)


def _look_ahead(world: World) -> None:
    """Have the planner find out one answer that a loss may ask for."""
    for job in world.jobs:
        if job.state is JobState.RUNNING and job.current is not None:
            mine = set(job.current.nodes)
            free = NodeState.READY
            nodes = [n for n in world.nodes if (n.name, n.incarnation) in mine or n.state is free]
            if foresee(job, nodes):
                return


def needs_haste(job: Job) -> bool:
    """Whether nobody trains for it though somebody could: each moment is a gap."""
    if job.current is None or job.state is JobState.WAITING:
        return False
    stands_still = any(seat.halted or seat.exit for seat in job.current.seats)
    return stands_still or job.current.state is GenerationState.PLANNED


def first_loss(world: World, job: Job) -> float | None:
    """The first fact of the loss that stops the job's generation: an exit, a halt, a node that
    broke off or fell silent.
    """
    if job.current is None or not job.current.seats:
        return None
    live = {(node.name, node.incarnation): node for node in world.nodes}
    facts = [*_seat_facts(job.current), *_node_facts(world, job.current, live)]
    return min((at for at in facts if at >= job.current.committed_at), default=None)


def _seat_facts(generation: Generation) -> list[float]:
    exits = [seat.exit.at for seat in generation.seats if seat.exit]
    return exits + [seat.halted_at for seat in generation.seats if seat.halted]


def _node_facts(world: World, generation: Generation, live: dict[NodeKey, Node]) -> list[float]:
    facts = []
    for seat in generation.seats:
        node = live.get((seat.node, seat.incarnation))
        if node is None:
            facts.append(world.last_loss_at)
        elif node.suspect_since is not None:
            facts.append(node.suspect_since)
    return facts


async def say_started(parts: Parts) -> None:
    """The event log tells when the controller was started."""
    now = parts.clock.now()
    await asyncio.wrap_future(
        parts.store.write(
            lambda c: events.record(
                c, now, EventType.CONTROLLER_STARTED, "The controller was started."
            )
        )
    )
