"""`varuna logs -f` goes on through every re-plan to the job's end, `--setup` to its own."""

from collections.abc import Iterator
from typing import Any

import httpx2
import pytest

from controller.api.schemas import LogView
from controller.cli import watch
from controller.client.rest import Controller, Place


def log(generation: int, text: str, *, begin: int = 0, over: bool = False) -> dict[str, Any]:
    return {"generation": generation, "rank": 3, "node": "vm-1", "offset": begin,
            "next_offset": begin + len(text), "text": text, "over": over}  # fmt: skip


def job(state: str) -> dict[str, Any]:
    return {
        "id": "job_1", "name": "a", "state": state, "reason": None, "message": "so it is",
        "program": "builtin:gpt", "cancel_wanted": False, "shape": None, "cuts": [],
        "generation": 2, "nodes": {"min": 1, "max": 1, "used": 0, "ready": 0}, "step": 3,
        "steps": 3, "batch_size": 8, "loss": None, "examples_per_second": None,
        "step_time_seconds": None, "last_checkpoint_step": None, "recoveries": 0,
        "gap_seconds": 0, "lost_steps": 0, "priority": 0, "drills": False, "labels": {},
        "submitted_at": "2026-11-29T12:00:00Z", "started_at": None, "finished_at": None,
        "spec": {"program": "builtin:gpt", "nodes": 1, "batch_size": 8, "steps": 3},
    }  # fmt: skip


@pytest.mark.parametrize(("state", "code"), [("succeeded", 0), ("failed", 100), ("cancelled", 103)])
def test_a_log_is_followed_into_the_next_generation_to_the_end(
    capsys: pytest.CaptureFixture[str], state: str, code: int
) -> None:
    asked: list[dict[str, str]] = []

    def script() -> Iterator[dict[str, Any]]:
        yield log(1, "b\n", begin=2, over=True)
        yield job("recovering")
        yield log(2, "…")  # the newest: there is another generation
        yield log(2, "c\n")
        yield log(2, "d\n", begin=2, over=True)
        yield job(state)

    answers = script()

    def answer(request: httpx2.Request) -> httpx2.Response:
        asked.append(dict(request.url.params))
        return httpx2.Response(200, json=next(answers))

    controller = Controller(Place("http://c", "t"), httpx2.MockTransport(answer))
    begun = LogView.model_validate(log(1, "a\n"))
    assert watch.follow_log(controller, "/api/v1/jobs/a", begun, rank=3, pinned=False) == code
    out, err = capsys.readouterr()
    assert out == "b\nc\nd\n"
    assert "generation 2, rank 3 on vm-1" in err
    assert [(a.get("generation"), a.get("offset")) for a in asked if "offset" in a] == [
        ("1", "2"), ("2", "0"), ("2", "2"),
    ]  # fmt: skip


def test_the_log_of_a_setup_is_followed_until_it_is_done(
    capsys: pytest.CaptureFixture[str],
) -> None:
    answers = iter([log(2, "a\n"), log(2, "b\n", begin=2, over=True)])
    asked: list[tuple[str, dict[str, str]]] = []

    def answer(request: httpx2.Request) -> httpx2.Response:
        asked.append((request.url.path, dict(request.url.params)))
        return httpx2.Response(200, json=next(answers))

    controller = Controller(Place("http://c", "t"), httpx2.MockTransport(answer))
    watch.setup_log(controller, "/api/v1/jobs/a", follow=True, node="vm-1")
    out, err = capsys.readouterr()
    assert out == "a\nb\n" and "generation 2, rank 3 on vm-1" in err
    assert asked == [
        ("/api/v1/jobs/a/logs/setup", {"node": "vm-1"}),
        ("/api/v1/jobs/a/logs/setup", {"rank": "3", "generation": "2", "offset": "2"}),
    ]
