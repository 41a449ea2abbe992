"""One run on a screen and as an object."""

import pytest

from controller.chaos.deeds import Verb
from controller.chaos.report import Report
from controller.chaos.verdict import Invariant

KEPT = Invariant("each sample once", True, "in 80 steps")
BROKEN = Invariant("nothing left", False, "process 17")


def report(*invariants: Invariant) -> Report:
    made = Report(seed=3, seconds=60.0, nodes=4, minimum=2, invariants=list(invariants))
    made.done.update({Verb.KILL: 2, Verb.JOIN: 2})
    made.left_out[Verb.DISK_FULL] = "only root can"
    return made


def test_all_promises_must_have_been_kept_and_looked_at() -> None:
    assert report(KEPT).holds
    assert not report(KEPT, BROKEN).holds
    assert not report().holds


def test_the_screen_has_a_line_for_each_promise_and_how_to_do_it_again(
    capsys: pytest.CaptureFixture[str],
) -> None:
    report(KEPT, BROKEN).say()
    said = capsys.readouterr().out
    assert "✓ each sample once: in 80 steps" in said
    assert "✕ nothing left: process 17" in said
    assert "2 kill, 2 join" in said and "disk-full: only root can" in said
    assert "NOT all promises held. Again: varuna chaos --nodes 4 --min 2 --for 60s --seed 3" in said


def test_the_object_has_the_same() -> None:
    made = report(KEPT, BROKEN).as_json()
    assert made["holds"] is False
    assert made["invariants"] == [vars(KEPT), vars(BROKEN)]
    assert made["deeds"] == {"join": 2, "kill": 2}
    assert made["left_out"] == {"disk-full": "only root can"}


def test_on_a_demo_the_command_names_its_job() -> None:
    on_demo = Report(seed=3, seconds=60.0, nodes=4, minimum=2, job="demo")
    assert on_demo.command == "varuna chaos demo --for 60s --seed 3"
