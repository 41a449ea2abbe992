"""Salvage, drain and notices between the store and the wire: what is ordered, and what is known."""

import math

import pytest
import sqlalchemy as sa

from agent import wire
from controller.core import actions
from controller.core.states import GenerationState, NodeState, Reason
from controller.core.world import Checkpoint, Generation
from controller.store import history, jobs, tables
from controller.store import nodes as store_nodes
from tests.fakes.agents import committed
from tests.fakes.told import LIFE, Told, said
from trainer.contract import progress

pytestmark = pytest.mark.integration

ONE, TWO = actions.Survivor(0, "vm-1", LIFE), actions.Survivor(1, "vm-2", LIFE)
SALVAGE = "step-000003.g2.salvage"


@pytest.fixture
def told(told: Told) -> Told:
    """Two ranks that have committed three steps."""
    told.plan()
    told.launch()
    told.report("vm-1", *(said(0, committed(told.spec("vm-1"), step)) for step in (1, 2, 3)))
    told.decide(actions.MoveGeneration("job_a", 2, GenerationState.RUNNING, "it runs"))
    return told


def still(state: GenerationState, reason: Reason = Reason.NODE_LOST) -> actions.StandStill:
    return actions.StandStill("job_a", 2, state, reason, False, "1 of 2 VMs lost")


def halted(applied: int) -> progress.Halted:
    return progress.Halted(
        applied=applied, prepared=3, vote_step=applied, ballot=(0.1, None), holds=(0, 1), cause="x"
    )


def part(*layers: int) -> progress.PartWritten:
    return progress.PartWritten(
        folder=SALVAGE, step=3, layers=layers, layer_count=2, num_bytes=2000, seconds=0.5
    )


def kinds(told: Told, node: str) -> list[str]:
    """Of its standing orders, but the listing that the plan began with."""
    return [o.body.kind for o in told.orders(node) if o.body.kind != "look"]


def generation(told: Told) -> Generation:
    (job,) = told.world().jobs
    assert job.current is not None
    return job.current


def salvaged(told: Told) -> Checkpoint:
    (job,) = told.world().jobs
    return next(c for c in job.checkpoints if c.folder == SALVAGE)


def test_a_salvage_is_ordered_known_and_complete(told: Told) -> None:
    told.decide(still(GenerationState.HALTED))
    assert kinds(told, "vm-1") == kinds(told, "vm-2") == ["start", "halt"]
    ending = generation(told).ending
    assert ending is not None and ending.reason is Reason.NODE_LOST

    told.report("vm-1", said(0, halted(3)))
    told.report("vm-2", said(1, halted(2)))
    known = generation(told).seats[1].halted
    assert known is not None and known.ballot == (0.1, None) and known.holds == (0, 1)
    told.decide(actions.RollForward("job_a", 2, 3, (0.1, None), (TWO,), "one is behind"))
    assert generation(told).seats[1].forwarded_at > 0
    told.report("vm-2", said(1, halted(3)))

    told.decide(actions.Salvage("job_a", 2, 3, (ONE, TWO), ((0,), (1,)), "they save"))
    assert [seat.saving for seat in generation(told).seats] == [(0,), (1,)]
    told.report("vm-1", said(0, part(0)))
    assert salvaged(told).layers == {0} and not salvaged(told).complete
    told.report("vm-2", said(1, progress.SaveFailed(folder=SALVAGE, step=3, message="disk full")))
    assert [seat.refused for seat in generation(told).seats] == [False, True]
    told.decide(actions.Salvage("job_a", 2, 3, (ONE,), ((1,),), "the other saves it"))
    assert generation(told).seats[0].saving == (0, 1)
    told.report("vm-1", said(0, part(0, 1)))
    assert salvaged(told).complete, "a survivor's part grows"
    (job,) = told.world().jobs
    assert job.save_rate == 4000.0

    told.end()
    assert set(kinds(told, "vm-2")) == {"stop"}, "what stood is withdrawn"
    (row,) = told.rows(tables.generations)
    with told.store.read() as connection:
        phases = history.phases_of(connection, row, None, None)
    assert phases["save"] == pytest.approx(row.ended_at - row.still_at)


def fail(told: Told, step: int, *, put_off: bool = False) -> None:
    folder = f"step-{step:06d}.g2"
    told.report("vm-2", said(1, progress.SaveFailed(folder=folder, step=step, message="disk full",
                                                    put_off=put_off)))  # fmt: skip


def save(told: Told, step: int) -> None:
    folder = f"step-{step:06d}.g2"
    told.report("vm-1", said(0, part(0, 1).model_copy(update={"folder": folder, "step": step})))


def saves_fail(told: Told) -> bool:
    (job,) = told.world().jobs
    return job.saves_fail


def test_a_save_that_failed_is_remembered_until_one_of_its_step_or_later_succeeds(
    told: Told,
) -> None:
    assert not saves_fail(told)
    fail(told, 3)
    save(told, 2)
    fail(told, 4, put_off=True)
    assert saves_fail(told)
    save(told, 3)
    assert not saves_fail(told)


def test_a_save_that_was_put_off_is_no_trouble_once_any_succeeds(told: Told) -> None:
    fail(told, 3, put_off=True)
    assert saves_fail(told)
    save(told, 2)
    assert not saves_fail(told)


def test_a_newer_generation_takes_over_that_saves_failed_until_one_of_its_own_succeeds(
    told: Told,
) -> None:
    fail(told, 3)
    told.end()
    told.plan(3)
    told.launch(3)
    assert saves_fail(told)
    fail(told, 9)
    found = part(0, 1).model_copy(update={"folder": "step-000002.g3", "step": 2})
    told.report("vm-1", said(0, found, generation=3))
    assert not saves_fail(told), "and what a generation that is over says counts no more"
    fail(told, 9)
    assert not saves_fail(told)


def test_a_survivor_that_is_gone_has_refused(told: Told) -> None:
    told.decide(still(GenerationState.HALTED))
    told.report("vm-1", said(0, halted(3)))
    told.decide(actions.Salvage("job_a", 2, 3, (ONE,), ((0, 1),), "it saves"))
    number = told.orders("vm-1")[-1].number
    told.report("vm-1", wire.OrderDone(number=number, error="it does not run here"))
    assert generation(told).seats[0].refused


def test_nodes_that_are_lost_are_not_told_to_stand_still(told: Told) -> None:
    told.decide(
        actions.MarkNode("vm-2", LIFE, NodeState.LOST, "gone"),
        still(GenerationState.HALTED),
    )
    assert kinds(told, "vm-1") == ["start", "halt"]
    assert kinds(told, "vm-2") == ["start"]


def test_a_drain_is_ordered_and_a_stop_is_known(told: Told) -> None:
    told.decide(still(GenerationState.DRAINING, Reason.USER))
    assert kinds(told, "vm-1") == kinds(told, "vm-2") == ["start", "drain"]
    told.report("vm-2", said(1, progress.Stopped(step=4)))
    assert [seat.stopped for seat in generation(told).seats] == [0, 4]


def test_a_notice_is_kept_with_its_deadline(told: Told) -> None:
    told.report("vm-2", wire.Noticed(notice="preempt", seconds_left=30.0, event="e1"))
    notice = {node.name: node.notice for node in told.world().nodes}
    assert notice["vm-1"] is None and notice["vm-2"] is not None
    assert notice["vm-2"].deadline == told.at + 30


def test_a_node_is_emptied_until_it_may_be_used_again(told: Told) -> None:
    def ask(wanted: bool) -> object:
        return told.store.write(
            lambda c: store_nodes.drain(c, "vm-2", "test", told.at, wanted=wanted)
        ).result()

    assert ask(True) == ("vm-2", LIFE)
    (notice,) = [node.notice for node in told.world().nodes if node.name == "vm-2"]
    assert notice is not None and notice.deadline == math.inf
    assert ask(False) == ("vm-2", LIFE)
    assert all(node.notice is None for node in told.world().nodes)


def test_saving_now_is_asked_of_one_rank_of_a_run(told: Told) -> None:
    def ask(connection: sa.Connection) -> tuple[str, str] | None:
        return jobs.save_now(connection, "job_a", "test", told.at)

    assert told.store.write(ask).result() == ("vm-1", LIFE)
    assert kinds(told, "vm-1") == ["start", "save_now"]
    told.end()
    assert told.store.write(ask).result() is None


def test_a_hang_is_dumped_by_all_and_known(told: Told) -> None:
    assert generation(told).dumped_at == 0.0
    told.decide(actions.DumpStacks("job_a", 2, "it hangs"))
    assert kinds(told, "vm-1") == kinds(told, "vm-2") == ["start", "dump"]
    assert generation(told).dumped_at > 0


def test_nodes_try_their_paths_before_a_launch_and_say_whom_they_miss(told: Told) -> None:
    told.end()
    both = (("vm-1", LIFE), ("vm-2", LIFE))
    told.decide(actions.PlanGeneration("job_a", 3, "vm-1", LIFE, "planning", both))
    assert generation(told).paths == (("vm-1", None), ("vm-2", None))
    (first,) = [o for o in told.orders("vm-1") if isinstance(o.body, wire.Connect)]
    (second,) = [o for o in told.orders("vm-2") if isinstance(o.body, wire.Connect)]
    assert isinstance(first.body, wire.Connect)
    assert [(peer.node, peer.port) for peer in first.body.peers] == [("vm-2", 29500)]
    about = {"job": "job_a", "generation": 3}
    found = wire.Connected.model_validate({"number": first.number, "unreached": ["vm-2"], **about})
    told.report("vm-1", found)
    told.report("vm-2", wire.OrderDone(number=second.number, error="no such order"))
    assert dict(generation(told).paths) == {"vm-1": ("vm-2",), "vm-2": ()}
    assert "connect" not in kinds(told, "vm-1")


def test_a_phase_that_comes_again_counts_from_its_last_entry(told: Told) -> None:
    told.report("vm-1", said(0, progress.PhaseBegun(phase=progress.Phase.STEP)))
    first = told.at
    told.report("vm-1", said(0, progress.PhaseBegun(phase=progress.Phase.EVALUATION)))
    told.report("vm-1", said(0, progress.PhaseBegun(phase=progress.Phase.STEP)))
    assert generation(told).seats[0].phase_at == told.at > first
    (row,) = [row for row in told.rows(tables.seats) if row.rank == 0]
    assert row.phases["step"] == first, "the timeline keeps the first"
