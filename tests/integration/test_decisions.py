"""What agents report is written once; what is decided is written whole, or not at all."""

from typing import Any

import pytest
import sqlalchemy as sa
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from agent import wire
from controller.core import actions
from controller.core.actions import Decision
from controller.core.states import GenerationState, JobState, NodeState, Reason
from controller.store import jobs, nodes, tables
from controller.store.decisions import Fence, Here, Recorder
from controller.store.ledger import Ledger, Replay, ledger_of, replay_of
from controller.store.rows import StaleError
from tests.fakes.agents import INSPECTED, committed, part
from tests.fakes.told import LIFE, WEIGHTS, Told, said, spec_of
from trainer.contract import progress
from trainer.contract.checkpoints import Committed
from trainer.contract.spec import ResumedFrom, Shape

pytestmark = pytest.mark.integration

# ---- decisions


def test_a_decision_is_dropped_when_the_job_has_moved_on(told: Told) -> None:
    old = Fence("job_a", JobState.WAITING, 0)
    told.plan()
    with pytest.raises(StaleError):
        told.decide(actions.PlanGeneration("job_a", 3, "vm-1", LIFE, "again"), fence=old)
    assert len(told.rows(tables.generations)) == 1
    assert len(told.rows(tables.orders)) == 1


@pytest.mark.parametrize(
    "illegal",
    [
        actions.MoveJob("job_a", JobState.RECOVERING, None, "only running jobs recover"),
        actions.MoveGeneration("job_a", 2, GenerationState.RUNNING, "nobody sits there"),
        actions.PlanGeneration("job_a", 2, "vm-1", LIFE, "the number is taken"),
        actions.PlanGeneration("job_a", 5, "vm-9", LIFE, "no such node"),
        actions.MarkNode("vm-1", "other-life", NodeState.LOST, "no such life"),
        actions.Condemn("job_a", "step-000009.g1", "no such folder"),
    ],
)
def test_what_the_law_forbids_undoes_the_whole_decision(
    told: Told, illegal: actions.Action
) -> None:
    told.plan()
    before = [told.rows(table) for table in tables.metadata.sorted_tables]
    with pytest.raises(StaleError):
        told.decide(actions.MoveJob("job_a", JobState.STARTING, Reason.LAUNCHING, "go"), illegal)
    assert [told.rows(table) for table in tables.metadata.sorted_tables] == before


def test_a_launch_needs_its_nodes_alive(told: Told) -> None:
    told.plan()
    told.decide(actions.MarkNode("vm-2", LIFE, NodeState.LOST, "silent"))
    with pytest.raises(StaleError):
        told.launch()
    assert told.rows(tables.seats) == []


def test_a_job_that_is_over_stays_as_it_is(told: Told) -> None:
    told.decide(actions.MoveJob("job_a", JobState.CANCELLED, Reason.USER, "over"))
    over = Fence("job_a", JobState.CANCELLED, 0)

    def again(connection: sa.Connection) -> None:
        move = actions.MoveJob("job_a", JobState.CANCELLED, Reason.USER, "over again")
        recorder = Recorder(connection, told.at, Here("", told.folder))
        recorder.record(Decision("job_a", (move,), ""), over, None)

    with pytest.raises(StaleError):
        told.store.write(again).result()
    assert told.world().jobs == ()


def test_the_end_withdraws_starts_and_stops_everywhere_even_on_the_lost(told: Told) -> None:
    told.plan()
    recorder = told.launch()
    assert recorder.told == {("vm-1", LIFE), ("vm-2", LIFE)}
    told.decide(actions.MarkNode("vm-2", LIFE, NodeState.LOST, "silent"))
    assert told.end().told == {("vm-1", LIFE), ("vm-2", LIFE)}
    for node in ("vm-1", "vm-2"):
        (stop,) = told.orders(node)
        assert stop.body == wire.Stop(job="job_a", up_to_generation=2)


def test_that_a_withdrawn_order_was_not_carried_out_is_no_failure(told: Told) -> None:
    told.plan()
    told.launch()
    start = next(order for order in told.orders("vm-2") if order.body.kind == "start")
    told.end()
    taken = told.report("vm-2", wire.OrderDone(number=start.number, error="void"))
    assert (taken.dropped, taken.decisive) == (1, False)
    assert "order_failed" not in {event.type for event in told.rows(tables.events)}
    assert [seat.exit for seat in told.rows(tables.seats)] == [None, None]


def test_a_node_that_was_only_cut_off_stops_what_is_void(told: Told) -> None:
    told.plan()
    told.launch()
    told.decide(actions.MarkNode("vm-2", LIFE, NodeState.LOST, "silent"))
    with pytest.raises(nodes.UnknownIncarnationError):
        told.report("vm-2")
    told.end()
    running = wire.RunningTrainer(job="job_a", generation=2, rank=1, phase="step", step=3)
    newer = wire.RunningTrainer(job="job_b", generation=7, rank=0, phase="step")
    told.register("vm-2", LIFE, running, newer)
    assert {node.name for node in told.world().nodes} == {"vm-1", "vm-2"}
    stops = [order.body for order in told.orders("vm-2") if isinstance(order.body, wire.Stop)]
    assert {(stop.job, stop.up_to_generation) for stop in stops} == {("job_a", 2)}


def test_a_job_without_a_folder_fails_on_a_node_that_is_elsewhere(told: Told) -> None:
    spec = spec_of("b", nodes=1)
    told.store.write(lambda c: jobs.submit(c, "job_b", spec, told.at)).result()
    plan = actions.PlanGeneration("job_b", 1, "vm-1", LIFE, "planning")

    def work(connection: sa.Connection) -> None:
        recorder = Recorder(connection, told.at, Here("another machine", told.folder))
        fence = Fence("job_b", JobState.WAITING, 0)
        recorder.record(Decision("job_b", (plan,), ""), fence, None)

    told.store.write(work).result()
    row = next(row for row in told.rows(tables.jobs) if row.id == "job_b")
    assert (row.state, row.reason) == ("failed", "setup_failed")
    assert "checkpoint.dir" in row.message


# ---- reports


@pytest.mark.parametrize(("late", "lost"), [(True, 2), (False, 0)])
def test_steps_that_are_reported_after_the_end_are_lost_or_not_but_never_less_than_none(
    told: Told, late: bool, lost: int
) -> None:
    """Its checkpoint of step 3 was found in the folder, its steps past 1 were not heard of."""
    told.plan()
    told.launch()
    spec = told.spec("vm-1")
    told.report("vm-1", said(0, committed(spec, 1)))
    told.end()
    if late:
        told.report("vm-1", *(said(0, committed(spec, step)) for step in range(2, 6)))
    told.plan(3)
    begun = ResumedFrom(step=3, generation=2, folder="step-000003.g2")
    seats = (actions.SeatAt("vm-1", LIFE, 0),)
    told.decide(
        actions.Launch("job_a", 3, "train", Shape(depth=1, replicas=1, micro_batch=4), (0, 8),
                       seats, begun, "launching")
    )  # fmt: skip
    told.report("vm-1", said(0, committed(spec, 4), generation=3))
    (recovery,) = told.rows(tables.recoveries)
    assert (recovery.at_step - recovery.resumed_from, recovery.resumed_from) == (lost, 3)


def test_the_world_is_what_was_reported(told: Told) -> None:
    told.plan()
    (look,) = told.orders("vm-1")
    found = wire.PartFound(
        folder="step-000000.g1", step=0, generation=1, rank=0, layers=tuple(range(8)),
        layer_count=8, num_bytes=800, resumed_from=None,
    )  # fmt: skip
    marker = wire.MarkerFound(generation=4, resumed_from=None)
    told.report("vm-1", wire.Looked(number=look.number, job="job_a", generation=2, parts=(found,),
                                    markers=(marker,)))  # fmt: skip
    (job,) = told.world().jobs
    assert job.current and job.current.found and job.current.found.newest_marker == 4
    assert [(c.folder, c.complete) for c in job.checkpoints] == [("step-000000.g1", True)]
    assert told.orders("vm-1") == ()
    told.launch()
    spec = told.spec("vm-1")
    told.report("vm-1", said(0, progress.PhaseBegun(phase=progress.Phase.LOAD)), said(0, INSPECTED),
                said(0, committed(spec, 1)), said(0, part(0, spec, 1)))  # fmt: skip
    told.report("vm-2", said(1, committed(spec, 1)), said(1, part(1, spec, 1)))
    (job,) = told.world().jobs
    assert job.costs and len(job.costs.layers) == 8
    assert job.current and (job.current.committed, job.current.step_seconds) == (1, 0.01)
    assert [seat.applied for seat in job.current.seats] == [1, 1]
    assert job.current.seats[0].phase is progress.Phase.LOAD
    assert [c.complete for c in job.checkpoints] == [True, True]
    assert job.checkpoints[1].resumed_from == WEIGHTS


def test_of_an_ended_generation_only_what_is_true_for_ever_is_kept(told: Told) -> None:
    told.plan()
    told.launch()
    spec = told.spec("vm-1")
    told.report("vm-1", said(0, committed(spec, 1)))
    told.end()
    taken = told.report(
        "vm-1",
        said(0, committed(spec, 2)),
        said(0, part(0, spec, 2)),
        said(0, progress.Finished(step=2)),
        wire.Exited(job="job_a", generation=2, rank=0, signal=9),
    )
    assert taken.dropped == 1
    (generation,) = told.rows(tables.generations)
    assert (generation.committed, generation.state) == (1, "ended")
    assert [row.step for row in told.rows(tables.steps)] == [1, 2]
    assert [row.folder for row in told.rows(tables.parts)] == ["step-000002.g2"]
    (seat, _) = told.rows(tables.seats)
    assert seat.exit["signal"] == 9


def test_a_seat_speaks_only_through_its_own_node(told: Told) -> None:
    told.plan()
    told.launch()
    spec = told.spec("vm-1")
    taken = told.report("vm-2", said(0, committed(spec, 1)), said(5, committed(spec, 1)))
    assert (taken.reported, taken.dropped) == (2, 2)
    assert told.rows(tables.steps) == []


def test_a_start_that_failed_ends_its_seat(told: Told) -> None:
    told.plan()
    told.launch()
    (start,) = [o for o in told.orders("vm-2") if o.body.kind == "start"]
    told.report("vm-2", wire.OrderDone(number=start.number, error="the bundle is gone"))
    (job,) = told.world().jobs
    assert job.current
    seat = job.current.seats[1]
    assert seat.failed and "the bundle is gone" in seat.failed.message
    assert seat.exit and seat.exit.code == progress.ExitCode.INTERNAL


def test_what_a_look_does_not_find_is_not_there(told: Told) -> None:
    told.plan()
    told.launch()
    spec = told.spec("vm-1")
    told.report("vm-1", said(0, part(0, spec, 3)))
    told.report("vm-2", said(1, part(1, spec, 3)))
    assert [c.complete for c in told.world().jobs[0].checkpoints] == [True]
    told.end()
    told.plan(3)
    (look,) = [o for o in told.orders("vm-1") if o.body.kind == "look"]
    marker = wire.MarkerFound(generation=2, resumed_from=None)
    told.report("vm-1", wire.Looked(number=look.number, job="job_a", generation=3,
                                    markers=(marker,)))  # fmt: skip
    assert [c.complete for c in told.world().jobs[0].checkpoints] == [False]


@pytest.mark.parametrize("step", [0, 3], ids=["before the first step", "later"])
def test_a_folder_that_is_not_mounted_condemns_nothing(told: Told, step: int) -> None:
    told.plan()
    told.launch()
    spec = told.spec("vm-1")
    told.report("vm-1", said(0, part(0, spec, step)))
    told.report("vm-2", said(1, part(1, spec, step)))
    told.end()
    told.plan(3)
    (look,) = [o for o in told.orders("vm-1") if o.body.kind == "look"]
    told.report("vm-1", wire.Looked(number=look.number, job="job_a", generation=3))
    (job,) = told.world().jobs
    assert [c.complete for c in job.checkpoints] == [True]
    assert job.current and job.current.found and job.current.found.error
    assert "is it mounted?" in job.current.found.error


@pytest.mark.parametrize(
    ("there", "skipped", "why"),
    [
        ((0,), "layer-003.r1.safetensors", "layer-003.r1.safetensors has 3 bytes instead of 7"),
        ((0,), None, "some of its parts are gone"),
        ((), None, "it is gone from the folder"),
    ],
)
def test_a_checkpoint_that_a_look_finds_incomplete_is_named_once_with_what_is_wrong(
    told: Told, there: tuple[int, ...], skipped: str | None, why: str
) -> None:
    told.plan()
    told.launch()
    spec = told.spec("vm-1")
    told.report("vm-1", said(0, part(0, spec, 3)))
    told.report("vm-2", said(1, part(1, spec, 3)))
    told.end()
    for number in (3, 4):
        told.plan(number)
        listed = looked(told, number, *there, skipped=skipped)
        told.report("vm-1", listed)
        told.end(number)
    messages = [e.message for e in told.rows(tables.events) if e.type == "checkpoint_skipped"]
    assert messages == [f"Checkpoint step-000003.g2 is not used: {why}."]


def test_a_deletion_that_nobody_has_carried_out_is_taken_back_by_the_next_look(
    told: Told,
) -> None:
    """Else the checkpoint would neither be chosen nor ever be deleted."""
    told.plan()
    told.launch()
    spec = told.spec("vm-1")
    told.report("vm-1", said(0, part(0, spec, 3)))
    told.report("vm-2", said(1, part(1, spec, 3)))
    told.decide(actions.DeleteCheckpoints("job_a", 2, ("step-000003.g2",), "vm-2", LIFE))
    told.end()

    def is_chosen(number: int) -> bool:
        told.plan(number)
        told.report("vm-1", looked(told, number, 0, 1))
        told.end(number)
        return any(not c.condemned for c in told.world().jobs[0].checkpoints)

    assert not is_chosen(3), "vm-2 may be at it"
    (delete,) = [o for o in told.orders("vm-2") if o.body.kind == "delete"]
    told.report("vm-2", wire.OrderDone(number=delete.number, error="no newer one is seen here"))
    assert is_chosen(4)


def looked(told: Told, number: int, *ranks: int, skipped: str | None = None) -> wire.Looked:
    """The folder as vm-1 finds it: these ranks' parts of step 3, and what is skipped."""
    order = next(o for o in told.orders("vm-1") if o.body.kind == "look")
    folder = "step-000003.g2"
    found = tuple(
        wire.PartFound(
            folder=folder, step=3, generation=2, rank=rank, layers=layers, layer_count=8,
            num_bytes=7, resumed_from=0, resumed_from_generation=1,
        )
        for rank, layers in ((0, (0, 2, 4, 6)), (1, (1, 3, 5, 7))) if rank in ranks
    )  # fmt: skip
    wrong = wire.FileSkipped(path=f"{folder}/{skipped}", reason="has 3 bytes instead of 7")
    return wire.Looked(
        number=order.number, job="job_a", generation=number, parts=found,
        markers=(wire.MarkerFound(generation=2, resumed_from=0, resumed_from_generation=1),),
        newest_generation=2, skipped=(wrong,) if skipped else (),
    )  # fmt: skip


@settings(
    max_examples=25, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(cuts=st.lists(st.tuples(st.integers(0, 12), st.integers(0, 12)), max_size=12))
def test_reports_count_once_however_they_are_sent(
    tmp_path_factory: pytest.TempPathFactory, cuts: list[tuple[int, int]]
) -> None:
    """Any slices, overlapping, repeated, with gaps: then what is missing."""
    told = Told(tmp_path_factory.mktemp("once"))
    told.plan()
    told.launch()
    spec = told.spec("vm-1")
    every = [wire.Report(number=step, body=said(0, committed(spec, step))) for step in range(1, 13)]
    durable = 0
    for begin, size in cuts:
        taken = told.send("vm-1", *every[begin : begin + size])
        if begin <= durable:
            durable = max(durable, min(begin + size, 12))
        assert taken.reported == durable
        assert len(told.rows(tables.steps)) == durable
    assert told.send("vm-1", *every[durable:]).reported == 12
    (generation,) = told.rows(tables.generations)
    assert generation.committed == 12
    told.store.close()


# ---- history


def test_the_ledger_finds_what_is_wrong(told: Told) -> None:
    told.plan(1)
    alone = Shape(depth=1, replicas=1, micro_batch=1)
    seat = (actions.SeatAt("vm-1", LIFE, 0),)
    told.decide(actions.Launch("job_a", 1, "first_weights", alone, (), seat, None, "weights"))
    weights = told.spec("vm-1")
    told.report("vm-1", said(0, INSPECTED, 1), said(0, part(0, weights, 0), 1))
    told.end(1)
    told.plan()
    told.launch()
    spec = told.spec("vm-1")
    told.report("vm-1", *(said(0, committed(spec, step)) for step in (1, 2, 3)))

    def ledger() -> Ledger:
        (row,) = told.rows(tables.jobs)
        with told.store.read() as connection:
            return ledger_of(connection, row)

    def alter(statement: str) -> None:
        told.store.write(lambda c: c.exec_driver_sql(statement)).result()

    assert (ledger().steps, ledger().gap_at) == (3, None)
    (weighed,) = ledger().ranges
    assert (weighed.generation, weighed.first, weighed.last, weighed.samples) == (2, 1, 3, 24)
    hashes = [int(row.sample_ids_hash, 16) for row in told.rows(tables.steps)]
    assert weighed.hash == f"{sum(hashes) % 2**32:08x}"
    alter("UPDATE steps SET sample_ids_hash = 'deadbeef' WHERE step = 2")
    assert ledger().gap_at == 2 and "deadbeef" in ledger().gap
    alter("DELETE FROM steps WHERE step = 1")
    assert ledger().gap_at == 1


def test_steps_whose_reports_died_with_their_agents_are_known_by_their_checkpoint(
    told: Told,
) -> None:
    told.plan(1)
    alone = Shape(depth=1, replicas=1, micro_batch=1)
    seat = (actions.SeatAt("vm-1", LIFE, 0),)
    told.decide(actions.Launch("job_a", 1, "first_weights", alone, (), seat, None, "weights"))
    told.report("vm-1", said(0, INSPECTED, 1), said(0, part(0, told.spec("vm-1"), 0), 1))
    told.end(1)
    told.plan()
    told.launch()
    lines = [committed(told.spec("vm-1"), step) for step in range(1, 5)]
    told.report("vm-1", said(0, lines[0]))
    told.end()
    told.plan(3)
    (look,) = (order for order in told.orders("vm-1") if order.body.kind == "look")
    of_steps = tuple(
        Committed(step=line.step, first_position=8 * (line.step - 1), samples=line.samples,
                  sample_ids_hash=line.sample_ids_hash)
        for line in lines[:3]
    )  # fmt: skip
    found = wire.PartFound(
        folder="step-000003.g2", step=3, generation=2, rank=0, layers=tuple(range(8)),
        layer_count=8, num_bytes=800, resumed_from=0, resumed_from_generation=1,
        committed=of_steps,
    )  # fmt: skip
    for _ in range(2):  # again is no error
        told.report("vm-1", wire.Looked(number=look.number, job="job_a", generation=3,
                                        parts=(found,)))  # fmt: skip
    assert [row.step for row in told.rows(tables.found_steps)] == [2, 3]
    begun = ResumedFrom(step=3, generation=2, folder=found.folder)
    told.decide(actions.Launch("job_a", 3, "train", alone, (0, 8), seat, begun, "launching"))
    told.report("vm-1", said(0, lines[3], generation=3))
    (row,) = told.rows(tables.jobs)
    with told.store.read() as connection:
        proof = ledger_of(connection, row)
    assert (proof.steps, proof.gap) == (4, "")
    assert [(r.generation, r.first, r.last, r.samples) for r in proof.ranges] == [
        (2, 1, 3, 24), (3, 4, 4, 8)
    ]  # fmt: skip


def test_steps_that_were_done_again_are_compared(told: Told) -> None:
    told.plan()
    told.launch()
    first = told.spec("vm-1")
    told.report("vm-1", *(said(0, committed(first, step)) for step in (1, 2, 3)))
    told.end()
    told.plan(3)
    told.launch(3)
    again = [committed(first, step) for step in (2, 3, 4)]
    again[1] = again[1].model_copy(update={"loss": (again[1].loss or 0) + 0.25})
    told.report("vm-1", *(said(0, line, 3) for line in again))

    def compared() -> Replay:
        with told.store.read() as connection:
            return replay_of(connection, "job_a")

    assert compared() == Replay(steps=2, max_difference=0.25, at_step=3, mismatch=None)
    told.store.write(
        lambda c: c.exec_driver_sql(
            "UPDATE steps SET sample_ids_hash = 'deadbeef' WHERE step = 2 AND generation = 3"
        )
    ).result()
    assert compared().mismatch == 2


def test_what_is_not_finite_is_kept_of_the_seat_that_saw_it(told: Told) -> None:
    told.plan()
    told.launch()
    seen = progress.NonFinite(step=3, replica=1, stage=0, what="the loss of micro-batch 2")
    told.report("vm-2", said(1, seen))
    (job,) = told.world().jobs
    assert job.current and [seat.non_finite for seat in job.current.seats] == [None, seen]
    (event,) = [e for e in told.rows(tables.events) if e.type == "trainer_not_finite"]
    assert "the loss of micro-batch 2 is not finite at step 3, replica 1" in event.message


def test_a_job_that_is_paused_by_a_fault_stays_paused_until_it_is_resumed(told: Told) -> None:
    paused = actions.MoveJob("job_a", JobState.PAUSED, Reason.NON_FINITE_LOSS, "Paused.")
    told.decide(paused)
    (job,) = told.world().jobs
    assert (job.state, job.pause_wanted) == (JobState.PAUSED, True)
    told.store.write(lambda c: jobs.pause(c, "job_a", "me", told.at, wanted=False)).result()
    assert not told.world().jobs[0].pause_wanted


def test_a_report_that_was_set_aside_leaves_an_event(told: Told) -> None:
    told.report("vm-1", wire.SetAside(refused="said", because="422: no such kind", job="job_a"))
    (event,) = [e for e in told.rows(tables.events) if e.type == "report_refused"]
    assert (event.job, event.node) == ("job_a", "vm-1")
    assert "422: no such kind" in event.message


def test_a_notice_that_is_taken_back_leaves_the_node_usable(told: Told) -> None:
    def notice() -> Any:
        (node,) = [node for node in told.world().nodes if node.name == "vm-1"]
        return node.notice

    told.report("vm-1", wire.Noticed(notice="preempt", seconds_left=30, event="m-7"))
    assert notice() is not None
    told.report("vm-1", wire.NoticeGone(event="m-6"))
    assert notice() is not None, "another one was taken back"
    told.report("vm-1", wire.NoticeGone(event="m-7"))
    assert notice() is None
    assert "node_notice_withdrawn" in [event.type for event in told.rows(tables.events)]
