"""The CLI finds its controller, and every refusal is one sentence and an exit code."""

import json
from collections.abc import Callable
from itertools import islice
from pathlib import Path

import httpx2
import pytest

from controller.api.schemas import HealthView, JobView, VersionView
from controller.client.rest import (
    CliError,
    Controller,
    Place,
    RefusedError,
    UnreachableError,
    current_file,
    find,
)
from controller.settings import Settings

Answer = Callable[[httpx2.Request], httpx2.Response]


@pytest.fixture
def environ(tmp_path: Path) -> dict[str, str]:
    return {"XDG_CONFIG_HOME": str(tmp_path)}


@pytest.fixture
def served(tmp_path: Path, environ: dict[str, str]) -> dict[str, str]:
    """What `varuna serve` leaves behind."""
    (tmp_path / "admin.token").write_text("vrn_admin_served\n")
    current = current_file(environ)
    current.parent.mkdir(parents=True)
    current.write_text(
        json.dumps({"url": "http://127.0.0.1:8430", "token_file": str(tmp_path / "admin.token")})
    )
    return environ


def test_what_was_served_last_is_found(served: dict[str, str]) -> None:
    assert find(None, None, served) == Place("http://127.0.0.1:8430", "vrn_admin_served")


def test_serve_and_the_cli_agree_on_a_config_folder_of_ones_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("VARUNA_CONFIG_DIR", str(tmp_path / "own"))
    assert current_file().parent == Settings().config_dir == tmp_path / "own"


def test_flags_win_over_the_environment_which_wins_over_what_was_served(
    served: dict[str, str], tmp_path: Path
) -> None:
    environ = served | {"VARUNA_URL": "http://b/", "VARUNA_TOKEN": "tb"}
    assert find(None, None, environ) == Place("http://b", "tb")
    (tmp_path / "t").write_text("tf")
    assert find("http://f", tmp_path / "t", environ) == Place("http://f", "tf")


def test_the_served_token_is_never_sent_to_another_url(served: dict[str, str]) -> None:
    with pytest.raises(CliError, match="No token for http://elsewhere"):
        find("http://elsewhere", None, served)


@pytest.mark.parametrize("text", ["", "[]", "{}", "nonsense"])
def test_nothing_known_says_how_to_start(environ: dict[str, str], text: str) -> None:
    current_file(environ).parent.mkdir(parents=True)
    current_file(environ).write_text(text)
    with pytest.raises(UnreachableError, match="varuna serve") as refused:
        find(None, None, environ)
    assert refused.value.exit_code == 4


def controller(answer: Answer) -> Controller:
    return Controller(Place("http://c", "t"), httpx2.MockTransport(answer))


def test_the_token_goes_along() -> None:
    seen: list[str] = []

    def answer(request: httpx2.Request) -> httpx2.Response:
        seen.append(request.headers["authorization"])
        return httpx2.Response(200, json={"ready": True})

    assert controller(answer).get("/readyz", HealthView).ready
    assert seen == ["Bearer t"]


def test_all_follows_the_cursor() -> None:
    def answer(request: httpx2.Request) -> httpx2.Response:
        after = int(request.url.params.get("after", 0))
        item = {"version": str(after), "wire_version": 1, "epoch": "e"}
        return httpx2.Response(
            200, json={"items": [item], "next": after + 1 if after < 2 else None}
        )

    views = controller(answer).all("/x", VersionView)
    assert [view.version for view in views] == ["0", "1", "2"]


@pytest.mark.parametrize(
    ("status", "exit_code"), [(404, 3), (401, 5), (403, 5), (409, 6), (422, 2), (500, 1)]
)
def test_a_problem_is_one_sentence_and_an_exit_code(status: int, exit_code: int) -> None:
    problem = {"title": "No", "status": status, "detail": "There is no job `x`."}
    with pytest.raises(RefusedError, match=r"^There is no job `x`\.$") as refused:
        controller(lambda _: httpx2.Response(status, json=problem)).get("/x", JobView)
    assert refused.value.exit_code == exit_code


def test_the_faults_of_a_body_are_told_one_by_one_with_their_mends() -> None:
    fault = {"pointer": "/spec/batchsize", "detail": "Unknown field `batchsize`.",
             "suggestion": "Did you mean `batch_size`?"}  # fmt: skip
    problem = {"title": "Invalid", "status": 422, "errors": [fault]}
    with pytest.raises(RefusedError) as refused:
        controller(lambda _: httpx2.Response(422, json=problem)).post("/x", {}, JobView)
    assert str(refused.value) == "Unknown field `batchsize`. Did you mean `batch_size`?"


def test_an_answer_that_is_no_problem_is_still_one_sentence() -> None:
    with pytest.raises(RefusedError, match="http://c/x answered 502"):
        controller(lambda _: httpx2.Response(502, text="<html>")).get("/x", JobView)


def test_another_schema_is_said_and_no_traceback() -> None:
    with pytest.raises(CliError, match="did not answer as a controller of this version does"):
        controller(lambda _: httpx2.Response(200, json={"a": 1})).get("/x", JobView)


def test_no_answer_is_unreachable() -> None:
    def answer(request: httpx2.Request) -> httpx2.Response:
        raise httpx2.ConnectError("Connection refused", request=request)

    with pytest.raises(UnreachableError, match=r"http://c does not answer \(Connection refused\)"):
        controller(answer).get("/x", JobView)


def test_the_stream_is_read_message_by_message() -> None:
    text = ': ping\n\nevent: hello\ndata: {"seq": 1}\n\nevent: tick\nid: 2\ndata: a\u2028b\n\n'

    def answer(request: httpx2.Request) -> httpx2.Response:
        assert request.url.params["after"] == "7"
        return httpx2.Response(200, text=text, headers={"content-type": "text/event-stream"})

    messages = controller(answer).stream(after=7)
    said = [(m.event, m.data) for m in islice(messages, 2)]
    assert said == [("hello", '{"seq": 1}'), ("tick", "a\u2028b")]
    with pytest.raises(UnreachableError, match="has gone away"):
        next(messages)
