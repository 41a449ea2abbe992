"""What agents report, made durable exactly once: facts only, nothing is decided here.

Each batch is one transaction: reports at or below the node's watermark are known already, those
above are taken in order. A fact counts for a generation only while that is not ended; of an ended
one the exits, the parts on disk and the steps are still written down (they are true, and the
lineage bounds what they are good for). What names a seat that is not the reporter's is dropped.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import sqlalchemy as sa

from agent import wire
from controller.core.events import EventType
from controller.core.jobspec import JobSpec
from controller.core.salvage import KIND
from controller.core.whatif import program_key
from controller.store import events, history, saves, spares
from controller.store.folders import take_listing, take_part
from controller.store.known import known_costs
from controller.store.nodes import reported, take_notice, withdraw_notice
from controller.store.paths import take_paths
from controller.store.rows import changed, insert_new
from controller.store.tables import ENDED, evaluations, generations, jobs, nodes, orders, seats
from controller.store.tables import steps as steps_table
from trainer.contract import progress
from trainer.contract.checkpoints import FolderName
from trainer.contract.costs import LayerCosts


@dataclass
class Taken:
    """The outcome of one batch."""

    reported: int
    """The last durable number."""
    decisive: bool = False
    """Something came that a decision may hang on: more than one more step of a run."""
    dropped: int = 0
    """Reports that say nothing any more: of seats that the reporter does not hold, of ended
    generations, of withdrawn orders.
    """
    logs_over: list[tuple[str, int, int]] = field(default_factory=list)


def take(
    connection: sa.Connection,
    node: str,
    incarnation: str,
    reports: Sequence[wire.Report],
    at: float,
) -> Taken:
    """Write down what is new among ``reports``; ``at`` is when they were received.

    Raises :class:`~controller.store.nodes.UnknownIncarnationError`.
    """
    taken = Taken(reported(connection, node, incarnation))
    before = taken.reported
    for report in reports:
        if report.number <= taken.reported:
            continue
        if report.number != taken.reported + 1:
            break  # a gap: the answer makes the agent send again from there
        match report.body:
            case wire.Said() as said:
                _said(connection, node, incarnation, said, at, taken)
            case wire.NoticeGone(event=event):
                withdraw_notice(connection, node, incarnation, event, at)
                taken.decisive = True
            case wire.SetAside() as refused:
                _refused(connection, node, refused, at)
            case wire.Exited() as exited:
                _exited(connection, node, incarnation, exited, at, taken)
            case wire.OrderDone() as done:
                _order_done(connection, node, done, at, taken)
            case wire.Looked() as looked:
                take_listing(connection, looked, at)
                taken.decisive = True
            case wire.Connected() as connected:
                take_paths(connection, node, connected, at)
                taken.decisive = True
            case wire.Noticed() as noticed:
                take_notice(connection, node, incarnation, noticed, at)
                taken.decisive = True
        taken.reported = report.number
    if taken.reported > before:
        connection.execute(
            nodes.update()
            .where(nodes.c.name == node, nodes.c.incarnation == incarnation)
            .values(reported=taken.reported)
        )
    return taken


def take_line(
    connection: sa.Connection, node: str, incarnation: str, said: wire.Said, at: float
) -> None:
    """What a trainer said before anybody here knew of it, as an agent tells at registration."""
    _said(connection, node, incarnation, said, at, Taken(0))


def _refused(connection: sa.Connection, node: str, refused: wire.SetAside, at: float) -> None:
    message = f"A report of {node} ({refused.refused}) was refused and set aside: {refused.because}"
    events.record(
        connection, at, EventType.REPORT_REFUSED, message,
        job=refused.job, node=node, generation=refused.generation,
    )  # fmt: skip


# ---- what a trainer said


def _seat_of(
    connection: sa.Connection, node: str, incarnation: str, body: wire.Said | wire.Exited
) -> Any:
    """The seat with its generation's state and kind, if it is this reporter's."""
    return connection.execute(
        sa.select(
            seats,
            generations.c.state,
            generations.c.first_step_at,
            generations.c.resumed_from,
        )
        .join(generations)
        .where(
            seats.c.job == body.job,
            seats.c.generation == body.generation,
            seats.c.rank == body.rank,
            seats.c.node == node,
            seats.c.incarnation == incarnation,
        )
    ).one_or_none()


def _said(
    connection: sa.Connection,
    node: str,
    incarnation: str,
    said: wire.Said,
    at: float,
    taken: Taken,
) -> None:
    seat = _seat_of(connection, node, incarnation, said)
    if seat is None:
        taken.dropped += 1
        return
    over = seat.state == ENDED
    match said.line:
        case progress.StepCommitted() as step:
            first = _step(connection, seat, step, at, over)
            taken.decisive = taken.decisive or first
        case progress.Evaluated() as found:
            insert_new(
                connection, evaluations, job=seat.job, generation=seat.generation, step=found.step,
                at=at, loss=found.loss, samples=found.samples, seconds=found.seconds,
                metrics=found.metrics,
            )  # fmt: skip
        case progress.Paced() as paced:
            if not over:
                paces = [*(seat.paces or ()), paced.model_dump(mode="json", exclude={"kind"})]
                _update_seat(connection, seat, paces=paces[-progress.WINDOWS :])
        case progress.PartWritten() as part:
            begun = history.resumed_from(seat.resumed_from)
            take_part(connection, seat.job, part, seat.generation, seat.rank, begun, at)
            taken.decisive = True
        case progress.SaveFailed() as failed:
            message = f"Checkpoint at step {failed.step:,} failed on {node}: {failed.message}"
            _event(connection, at, EventType.SAVE_FAILED, message, seat)
            if not over:
                saves.failed(connection, seat.job, seat.generation, failed)
            if _is_salvage(failed.folder) and not over:
                _update_seat(connection, seat, save_failed=events.printable(failed.message))
                taken.decisive = True
        case _ if over:
            taken.dropped += 1
        case progress.PhaseBegun() as begun_phase:
            phases = {begun_phase.phase.value: at} | seat.phases
            _update_seat(
                connection, seat, phase=begun_phase.phase.value, phase_at=at, phases=phases
            )
            taken.decisive = True
        case progress.Inspected() as inspected:
            _inspected(connection, seat, inspected, at)
            taken.decisive = True
        case progress.Halted() as halted:
            _update_seat(
                connection, seat, halted=halted.model_dump(mode="json"),
                halted_at=seat.halted_at or at,
                phases={progress.Phase.HALTED.value: at} | seat.phases,
            )  # fmt: skip
            if seat.halted_at is None:
                message = f"Rank {seat.rank} on {node} stands still: {halted.cause}"
                _event(connection, at, EventType.TRAINER_HALTED, message, seat)
            taken.decisive = True
        case progress.Stopped() as stopped:
            _update_seat(connection, seat, stopped=stopped.step)
            taken.decisive = True
        case progress.Failed() as failed_line:
            cleaned = _clean(failed_line.model_dump(mode="json"))
            _update_seat(connection, seat, failed=cleaned, failed_at=at)
            _event(
                connection, at, EventType.TRAINER_FAILED,
                f"Rank {seat.rank} on {node}: {failed_line.message}", seat,
                code=int(failed_line.code), details=failed_line.details[-4000:],
            )  # fmt: skip
            taken.decisive = True
        case progress.NonFinite() as not_finite:
            _update_seat(connection, seat, non_finite=_clean(not_finite.model_dump(mode="json")))
            message = (
                f"Rank {seat.rank} on {node}: {not_finite.what} is not finite at step"
                f" {not_finite.step:,}, replica {not_finite.replica}."
            )
            _event(connection, at, EventType.TRAINER_NOT_FINITE, message, seat,
                   step=not_finite.step)  # fmt: skip
            taken.decisive = True
        case progress.Finished():
            taken.decisive = True


def _step(
    connection: sa.Connection, seat: Any, step: progress.StepCommitted, at: float, over: bool
) -> bool:
    """Whether it is the first step of its generation."""
    insert_new(
        connection, steps_table, job=seat.job, generation=seat.generation, step=step.step, at=at,
        loss=step.loss, grad_norm=step.grad_norm, samples=step.samples, seconds=step.seconds,
        sample_ids_hash=step.sample_ids_hash, metrics=step.metrics,
    )  # fmt: skip
    if over:
        return False
    _update_seat(connection, seat, applied=max(seat.applied, step.step))
    first = seat.first_step_at is None
    started = {"first_step_at": at} if first else {}
    newer = changed(
        connection,
        generations.update()
        .where(generations.c.job == seat.job, generations.c.number == seat.generation)
        .where(generations.c.committed < step.step)
        .values(committed=step.step, committed_at=at, **started),
    )
    if newer and first:
        connection.execute(
            jobs.update()
            .where(jobs.c.id == seat.job, jobs.c.started_at.is_(None))
            .values(started_at=at)
        )
        history.close_recovery(connection, seat.job, seat.generation, at)
    return first


def _inspected(
    connection: sa.Connection, seat: Any, inspected: progress.Inspected, at: float
) -> None:
    stored = connection.execute(sa.select(jobs.c.spec).where(jobs.c.id == seat.job)).scalar_one()
    spec = JobSpec.model_validate(stored)
    costs = inspected.costs.model_copy(update={"program": program_key(spec)})
    known = known_costs(connection, spec, costs.device_kind)
    if known is not None and _fits(known[1], costs):
        costs = known[1]
    new = changed(
        connection,
        jobs.update()
        .where(jobs.c.id == seat.job, jobs.c.costs.is_(None))
        .values(costs=costs.model_dump(mode="json"), samples=inspected.samples),
    )
    if new:
        layers = inspected.costs.layers
        size = sum(layer.parameter_bytes for layer in layers) / 2**20
        message = f"The program has {len(layers)} layers ({size:.1f} MB of parameters)"
        message += f" and {inspected.samples:,} samples."
        _event(connection, at, EventType.PROGRAM_INSPECTED, message, seat)


def _fits(known: LayerCosts, seen: LayerCosts) -> bool:
    """Whether it is the same model that was measured before."""
    return [one.parameter_bytes for one in known.layers] == [
        one.parameter_bytes for one in seen.layers
    ]


def _exited(
    connection: sa.Connection,
    node: str,
    incarnation: str,
    exited: wire.Exited,
    at: float,
    taken: Taken,
) -> None:
    seat = _seat_of(connection, node, incarnation, exited)
    if seat is None:
        taken.dropped += 1
        return
    tail = events.printable(exited.log_tail)
    gone = {"code": exited.code, "signal": exited.signal, "log_tail": tail}
    _update_seat(connection, seat, exit=gone, exit_at=at)
    taken.decisive = True
    taken.logs_over.append((seat.job, seat.generation, seat.rank))
    if seat.state != ENDED and exited.code != progress.ExitCode.DONE:
        how = f"signal {exited.signal}" if exited.code is None else f"code {exited.code}"
        message = f"Rank {seat.rank} on {node} ended with {how}."
        _event(connection, at, EventType.TRAINER_EXITED, message, seat, log_tail=tail)


# ---- orders


def _order_done(
    connection: sa.Connection, node: str, done: wire.OrderDone, at: float, taken: Taken
) -> None:
    order = connection.execute(
        sa.select(orders).where(orders.c.number == done.number, orders.c.node == node)
    ).one_or_none()
    if order is None or order.closed_at is not None:  # withdrawn: it is no news that it failed
        taken.dropped += 1
        return
    connection.execute(
        orders.update()
        .where(orders.c.number == done.number)
        .values(closed_at=at, error=events.printable(done.error) if done.error else None)
    )
    if order.kind == "prepare":
        spares.answered(connection, order, done.error, at)
    if done.error is not None:
        message = f"{node} could not {order.kind.replace('_', ' ')}: {done.error}"
        events.record(
            connection, at, EventType.ORDER_FAILED, message,
            job=order.job, node=node, generation=order.generation,
        )  # fmt: skip
        if order.kind == "start":
            _never_started(connection, order, message, at)
        if order.kind == "connect":
            about = {"number": done.number, "job": order.job, "generation": order.generation}
            take_paths(connection, node, wire.Connected.model_validate(about), at)
        if order.kind == "look":
            looked = wire.Looked(
                number=done.number, job=order.job, generation=order.generation, error=done.error
            )
            take_listing(connection, looked, at)
        taken.decisive = True


def _never_started(connection: sa.Connection, order: Any, message: str, at: float) -> None:
    """A trainer that could not be started ends its launch as one that failed at once."""
    code = progress.ExitCode.INTERNAL
    failed = progress.Failed(code=code, message=message)
    connection.execute(
        seats.update()
        .where(
            seats.c.job == order.job,
            seats.c.generation == order.generation,
            seats.c.rank == order.body["spec"]["rank"],
            seats.c.exit_at.is_(None),
        )
        .values(
            failed=failed.model_dump(mode="json"),
            failed_at=at,
            exit={"code": int(code), "signal": None, "log_tail": message},
            exit_at=at,
        )
    )


# ---- small


def _update_seat(connection: sa.Connection, seat: Any, **values: Any) -> None:
    connection.execute(
        seats.update()
        .where(
            seats.c.job == seat.job,
            seats.c.generation == seat.generation,
            seats.c.rank == seat.rank,
        )
        .values(**values)
    )


def _event(
    connection: sa.Connection, at: float, type_: EventType, message: str, seat: Any, **data: Any
) -> None:
    events.record(
        connection, at, type_, message,
        job=seat.job, node=seat.node, generation=seat.generation, rank=seat.rank, **data,
    )  # fmt: skip


def _is_salvage(folder: str) -> bool:
    name = FolderName.parse(folder)
    return name is not None and name.kind == KIND


def _clean(said: dict[str, Any]) -> dict[str, Any]:
    return {k: events.printable(v) if isinstance(v, str) else v for k, v in said.items()}
