"""A job's life through the real controller with make-believe agents: submit, train, recover."""

import sqlite3
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx2
import pytest

from agent import wire
from controller.api.schemas import EventView, GenerationView, JobView, LedgerView, RecoveryView
from controller.store.tokens import Role
from tests.fakes.agents import Fleet
from tests.fakes.served import Served, served
from tests.fakes.waiting import until

pytestmark = pytest.mark.integration


@pytest.fixture
def controller(tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[Served]:
    with served(tmp_path, **getattr(request, "param", {})) as running:
        yield running


@pytest.fixture
def fleet(controller: Served) -> Iterator[Fleet]:
    with Fleet(controller.url, controller.token(Role.AGENT)) as agents:
        yield agents


@pytest.fixture
def user(controller: Served) -> Iterator[httpx2.Client]:
    with controller.client(Role.USER) as client:
        yield client


def submit(user: httpx2.Client, folder: Path, **spec: Any) -> str:
    body = {
        "name": "a", "program": "builtin:gpt", "nodes": "1..8", "batch_size": 24, "steps": 30,
        "checkpoint": {"dir": str(folder), "every": "5 steps"}, "plan": {"micro_batch": 4},
    }  # fmt: skip
    answer = user.post("/api/v1/jobs", json={"spec": {**body, **spec}})
    assert answer.status_code == 201, answer.text
    return str(answer.json()["id"])


def job(user: httpx2.Client, name: str = "a") -> JobView:
    return JobView.model_validate_json(user.get(f"/api/v1/jobs/{name}").content)


def items(user: httpx2.Client, what: str, view: Any) -> list[Any]:
    answer = user.get(f"/api/v1/jobs/a/{what}")
    assert answer.status_code == 200, answer.text
    return [view.model_validate(item) for item in answer.json()["items"]]


def ledger(user: httpx2.Client) -> LedgerView:
    return LedgerView.model_validate_json(user.get("/api/v1/jobs/a/ledger").content)


def test_a_job_runs_from_submission_to_its_final_checkpoint(
    fleet: Fleet, user: httpx2.Client, tmp_path: Path
) -> None:
    fleet.add("vm-1", "vm-2", "vm-3", "vm-4")
    submit(user, tmp_path, nodes="4", evaluate_every=10)
    until(lambda: job(user).state.is_over, 20)
    view = job(user)
    assert (view.state, view.reason, view.step, view.recoveries) == ("succeeded", "done", 30, 0)
    assert view.last_checkpoint_step == 30
    assert ledger(user).samples_committed_once
    assert ledger(user).samples == 30 * 24
    kinds = [g.kind for g in items(user, "generations", GenerationView)]
    assert kinds == ["first_weights", "train"]

    def orders() -> list[str]:
        return [o.body.kind for a in fleet.agents.values() for o in a.orders]

    until(lambda: orders().count("mark_done") == 1 and orders().count("release") == 4)
    assert orders().count("start") == 4 + 4, "the first weights are measured on all"
    series = user.get("/api/v1/jobs/a/series").json()
    assert [point["step"] for point in series["points"]] == list(range(1, 31))
    assert max(point["used"] for point in series["capacity"]) == 4
    assert [(one["step"], one["loss"]) for one in series["evaluations"]] == [
        (step, 6.0 / step) for step in (10, 20, 30)
    ]
    assert view.evaluation is not None
    assert (view.evaluation.step, view.evaluation.metrics) == (30, {"accuracy": 0.5})


@pytest.mark.parametrize("controller", [{"lost_after": 60, "suspect_after": 30}], indirect=True)
def test_a_killed_agent_costs_one_recovery_and_its_silence_is_not_waited_for(
    fleet: Fleet, user: httpx2.Client, tmp_path: Path
) -> None:
    fleet.add("vm-1", "vm-2", "vm-3")
    submit(user, tmp_path, steps=60)
    until(lambda: job(user).step >= 12, 20)
    fleet.kill("vm-2")
    until(lambda: job(user).recoveries == 1, 10)
    until(lambda: job(user).state.is_over, 20)
    assert job(user).state == "succeeded"
    (recovery,) = items(user, "recoveries", RecoveryView)
    assert recovery.resumed_from % 5 == 0
    assert recovery.lost_steps == recovery.at_step - recovery.resumed_from
    assert recovery.from_generation + 1 == recovery.to_generation
    phases = recovery.phases.model_dump().values()
    assert all(seconds is not None and seconds >= 0 for seconds in phases)
    assert 0 < sum(phases) < 10
    assert recovery.gap_s <= sum(phases)
    proof = ledger(user)
    assert proof.samples_committed_once, proof.first_gap
    assert [(link.first, link.last) for link in proof.lineage][-1][1] == 60
    (said,) = [e for e in items(user, "events?type=recovered", EventView)]
    assert said.message.startswith("1 of 3 VMs lost; re-planned ")


def test_a_silent_node_is_lost_after_its_time(
    fleet: Fleet, user: httpx2.Client, tmp_path: Path
) -> None:
    fleet.add("vm-1", "vm-2")
    submit(user, tmp_path, steps=60)
    until(lambda: job(user).step >= 8, 20)
    fleet.silence("vm-1")
    until(lambda: job(user).state.is_over, 20)
    assert (job(user).state, job(user).recoveries) == ("succeeded", 1)


def test_without_nodes_the_job_waits_and_goes_on_when_they_are_back(
    fleet: Fleet, user: httpx2.Client, tmp_path: Path
) -> None:
    fleet.add("vm-1", "vm-2")
    submit(user, tmp_path, steps=60)
    until(lambda: job(user).step >= 8, 20)
    fleet.kill("vm-1", "vm-2")
    until(lambda: job(user).state == "waiting", 10)
    assert job(user).nodes.used == 0
    fleet.add("vm-1", "vm-3", incarnation="second-life")
    until(lambda: job(user).state.is_over, 20)
    assert job(user).state == "succeeded"
    assert ledger(user).samples_committed_once


def test_the_same_name_started_again_is_a_new_node(
    fleet: Fleet, user: httpx2.Client, tmp_path: Path
) -> None:
    """Killed and back before anybody missed it: what ran there is lost all the same."""
    fleet.add("vm-1", "vm-2")
    submit(user, tmp_path, steps=60)
    until(lambda: job(user).step >= 8, 20)
    fleet.kill("vm-1")
    fleet.add("vm-1", incarnation="second-life")
    until(lambda: job(user).state.is_over, 20)
    assert (job(user).state, job(user).recoveries) == ("succeeded", 1)
    gone = [n for n in user.get("/api/v1/nodes?all=true").json()["items"] if n["gone_at"]]
    assert [(n["name"], n["incarnation"]) for n in gone] == [("vm-1", "first-life")]


def test_a_cancelled_job_leaves_nothing_running(
    fleet: Fleet, user: httpx2.Client, tmp_path: Path
) -> None:
    fleet.add("vm-1", "vm-2")
    submit(user, tmp_path, steps=10_000)
    until(lambda: job(user).step >= 3, 20)
    assert user.post("/api/v1/jobs/a/actions/cancel").status_code == 202
    until(lambda: job(user).state == "cancelled", 5)
    until(lambda: not any(agent.trainers for agent in fleet.agents.values()), 5)
    again = user.post("/api/v1/jobs/a/actions/cancel")
    assert (again.status_code, again.json()["state"]) == (202, "cancelled")
    assert len(items(user, "events?type=cancel_asked", EventView)) == 1


def test_a_new_controller_on_the_same_data_takes_the_run_over(tmp_path: Path) -> None:
    """The agents go on by themselves meanwhile; nothing is started again."""
    folder = tmp_path / "c"
    with served(folder) as first:
        port = first.url.rpartition(":")[2]
        fleet = Fleet(first.url, first.token(Role.AGENT), step_seconds=0.05)
        fleet.__enter__()
        fleet.add("vm-1", "vm-2")
        with first.client() as user:
            submit(user, tmp_path, steps=60)
            until(lambda: job(user).step >= 5, 20)
    try:
        with served(folder, port=int(port)) as second, second.client() as user:
            until(lambda: job(user).state.is_over, 20)
            assert (job(user).state, job(user).recoveries) == ("succeeded", 0)
            assert len(items(user, "generations", GenerationView)) == 2
            assert ledger(user).samples_committed_once
            assert len(items(user, "events?type=job_submitted", EventView)) == 1
    finally:
        fleet.__exit__()


def test_a_step_that_is_not_finite_pauses_the_job_until_it_is_resumed(
    fleet: Fleet, user: httpx2.Client, tmp_path: Path
) -> None:
    fleet.spoilt = 8
    fleet.add("vm-1", "vm-2")
    submit(user, tmp_path)
    until(lambda: job(user).state == "paused", 20)
    view = job(user)
    assert (view.reason, view.step, view.last_checkpoint_step) == ("non_finite_loss", 7, 7)
    assert view.message == (
        "The loss of micro-batch 0 is not finite at step 8 on replica 0."
        " Paused. Resume from step 7, or see the log."
    )
    assert view.nodes.used == 0
    fleet.spoilt = 0
    assert user.post("/api/v1/jobs/a/actions/resume").status_code == 202
    until(lambda: job(user).state.is_over, 20)
    assert job(user).state == "succeeded"
    assert ledger(user).samples_committed_once


def test_an_old_copy_of_the_store_takes_over_what_runs_and_stops_nothing(tmp_path: Path) -> None:
    """A backup is restored: the job runs on in a generation that the copy never heard of."""
    folder, copy = tmp_path / "c", tmp_path / "copy.db"
    with served(folder) as first:
        port = int(first.url.rpartition(":")[2])
        fleet = Fleet(first.url, first.token(Role.AGENT), step_seconds=0.02)
        fleet.__enter__()
        fleet.add("vm-1", "vm-2", "vm-3")
        with first.client() as user:
            submit(user, tmp_path, steps=10_000)
            until(lambda: job(user).step >= 5, 20)
            _copy(folder / "data" / "varuna.db", copy)
            known = job(user).generation or 0
            fleet.kill("vm-2")
            until(lambda: job(user).recoveries == 1, 20)
            until(lambda: job(user).step >= 12, 20)
            newest = job(user).generation or 0
            assert newest > known
    try:
        for old in (folder / "data").glob("varuna.db*"):
            old.unlink()
        copy.rename(folder / "data" / "varuna.db")
        with served(folder, port=port) as second, second.client() as user:
            until(lambda: job(user).state == "running" and job(user).generation == newest, 20)
            at = job(user).step
            until(lambda: job(user).step > at, 20)
            assert len(items(user, "events?type=generation_adopted", EventView)) == 1
            starts = [
                order.body.spec.generation
                for agent in fleet.agents.values()
                for order in agent.orders
                if isinstance(order.body, wire.Start)
            ]
            assert max(starts, default=newest) == newest, "nothing was started again"
            fleet.kill("vm-3")
            until(lambda: (job(user).generation or 0) > newest, 20)
            until(lambda: job(user).state == "running", 20)
            numbers = [g.number for g in items(user, "generations", GenerationView)]
            assert numbers == sorted(set(numbers)) and numbers[-2:] == [newest, newest + 1]
    finally:
        fleet.__exit__()


def _copy(database: Path, to: Path) -> None:
    source, target = sqlite3.connect(database), sqlite3.connect(to)
    with target:
        source.backup(target)
    source.close()
    target.close()


def test_a_name_that_is_back_after_it_was_lost_is_missed_again_in_normal_time(
    fleet: Fleet, user: httpx2.Client, tmp_path: Path
) -> None:
    """Neither its old silence nor its old exit is held against the new incarnation."""
    fleet.add("vm-1", "vm-2", "vm-3")
    submit(user, tmp_path, nodes="3", steps=10_000)
    until(lambda: job(user).step >= 8, 20)
    fleet.kill("vm-3")
    until(lambda: job(user).state == "waiting", 20)
    fleet.add("vm-3", incarnation="second-life")
    until(lambda: job(user).state == "running", 20)
    step = job(user).step
    until(lambda: job(user).step >= step + 10, 20)
    assert job(user).recoveries == 1
    fleet.silence("vm-3")
    until(lambda: job(user).state == "waiting", 20)
    lost = [e.message for e in events_of(user, "node_lost") if e.node == "vm-3"]
    assert len(lost) == 2


def events_of(user: httpx2.Client, kind: str) -> list[EventView]:
    answer = user.get(f"/api/v1/events?type={kind}&limit=1000").json()
    return [EventView.model_validate(item) for item in answer["items"]]


@pytest.mark.parametrize("dead", [("vm-1",), ("vm-1", "vm-2")], ids=["one", "all"])
def test_trainers_that_died_while_the_controller_was_away_are_replaced_when_it_is_back(
    tmp_path: Path, dead: tuple[str, ...]
) -> None:
    folder = tmp_path / "c"
    with served(folder) as first:
        port = int(first.url.rpartition(":")[2])
        fleet = Fleet(first.url, first.token(Role.AGENT), step_seconds=0.05)
        fleet.__enter__()
        fleet.add("vm-1", "vm-2")
        with first.client() as user:
            submit(user, tmp_path, nodes="2", steps=60)
            until(lambda: job(user).step >= 5, 20)
    try:
        fleet.kill_trainers(*dead)
        with served(folder, port=port) as second, second.client() as user:
            until(lambda: job(user).state.is_over, 30)
            assert (job(user).state, job(user).recoveries) == ("succeeded", 1)
            assert ledger(user).samples_committed_once
    finally:
        fleet.__exit__()
