"""The API as a stranger, a user and an agent meet it: the door, bad input, retries, the wire."""

import asyncio
import hashlib
import io
import json
import re
import socket
import tarfile
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import httpx2
import pytest
from fastapi.routing import APIRoute, iter_route_contexts

from agent import wire
from controller.api.auth import roles_for
from controller.api.schemas import Problem
from controller.store.tokens import Role
from tests.fakes import story
from tests.fakes.agents import JSON, facts
from tests.fakes.served import Served, served
from tests.fakes.waiting import until
from trainer.contract import progress

pytestmark = pytest.mark.integration

SPEC = {"name": "a", "program": "builtin:gpt", "nodes": 1, "batch_size": 8, "steps": 10}


@pytest.fixture(scope="module")
def controller(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    with served(tmp_path_factory.mktemp("api"), body_cap_bytes=64 << 10, lost_after=60) as running:
        yield running


@pytest.fixture(scope="module")
def user(controller: Served) -> Iterator[httpx2.Client]:
    with controller.client(Role.USER) as client:
        yield client


@pytest.fixture(scope="module")
def agent(controller: Served) -> Iterator[httpx2.Client]:
    with controller.client(Role.AGENT) as client:
        yield client


@pytest.fixture(autouse=True)
def no_job_is_left(user: httpx2.Client) -> Iterator[None]:
    yield
    for job in user.get("/api/v1/jobs").json()["items"]:
        user.post(f"/api/v1/jobs/{job['id']}/actions/cancel")
    until(lambda: not user.get("/api/v1/jobs").json()["items"])


def problem(answer: httpx2.Response, status: int) -> Problem:
    assert answer.status_code == status, answer.text
    assert answer.headers["content-type"] == "application/problem+json"
    found = Problem.model_validate_json(answer.content)
    assert (found.status, found.request_id) == (status, answer.headers["x-request-id"])
    return found


# ---- the door


def every_route(controller: Served) -> list[tuple[str, str]]:
    """(method, path) of all there are, pages and schema too, with made-up parameters."""
    routes = [("GET", "/openapi.json"), ("GET", "/docs"), ("GET", "/nowhere")]
    for context in iter_route_contexts(controller.app.routes):
        path = str(context.path)
        path = re.sub(r"\{[^}]*\}", "x", path)
        routes += [(method, path) for method in sorted(context.methods or ())]
    return routes


def test_no_route_opens_without_a_known_token(controller: Served) -> None:
    now = controller.parts.clock.now()
    expired = controller.parts.tokens.create(Role.ADMIN, "old", now, ttl=0.000001)
    routes = every_route(controller)
    assert len(routes) > 25
    with httpx2.Client(base_url=controller.url) as stranger:
        for method, path in routes:
            if not roles_for(method, path):
                assert path in ("/healthz", "/login", "/login/out"), path
                continue
            for token in (None, "vrn_admin_guess", expired):
                headers = {} if token is None else {"Authorization": f"Bearer {token}"}
                answer = stranger.request(method, path, content=b"{", headers=headers)
                assert answer.status_code == 401, (method, path, token, answer.text)
                assert answer.headers["www-authenticate"] == "Bearer"


def test_an_agent_opens_only_what_agents_need_and_a_user_never_that(controller: Served) -> None:
    for role in (Role.AGENT, Role.USER, Role.ADMIN, Role.VIEWER):
        with controller.client(role) as client:
            for method, path in every_route(controller):
                wanted = roles_for(method, path)
                if wanted and not any(role.may(each) for each in wanted):
                    answer = client.request(method, path, content=b"{", headers=JSON)
                    assert answer.status_code == 403, (role, method, path)
                elif role is Role.AGENT and wanted:
                    assert path.startswith(("/api/v1/agents", "/api/v1/bundles"))


def test_a_viewer_looks_but_does_not_touch(controller: Served) -> None:
    with controller.client(Role.VIEWER) as viewer:
        assert viewer.get("/api/v1/jobs").status_code == 200
        problem(viewer.post("/api/v1/jobs", json={"spec": SPEC}), 403)


def test_a_session_cookie_acts_only_from_our_own_pages(controller: Served) -> None:
    now = controller.parts.clock.now()
    session = controller.parts.tokens.create(Role.USER, "session", now, ttl=60)
    with httpx2.Client(base_url=controller.url, cookies={"varuna_session": session}) as browser:
        assert browser.get("/api/v1/jobs").status_code == 200
        problem(browser.post("/api/v1/jobs", json={"spec": SPEC}), 403)
        elsewhere = {"Origin": "http://evil.example"}
        problem(browser.post("/api/v1/jobs", json={"spec": SPEC}, headers=elsewhere), 403)
        ours = {"Origin": controller.url}
        assert browser.post("/api/v1/jobs", json={"spec": SPEC}, headers=ours).status_code == 201


def test_a_page_without_a_session_leads_to_the_login(controller: Served) -> None:
    with httpx2.Client(base_url=controller.url, headers={"Accept": "text/html"}) as browser:
        answer = browser.get("/jobs/a")
        assert (answer.status_code, answer.headers["location"]) == (303, "/login?next=/jobs/a")


def test_tokens_lie_in_private_files_and_only_hashes_in_the_store(controller: Served) -> None:
    token = controller.token(Role.ADMIN)
    data = controller.settings.data
    for name in ("admin.token", "agent.token"):
        assert (data / name).stat().st_mode & 0o777 == 0o600
    for file in data.glob("varuna.db*"):
        assert token.encode() not in file.read_bytes()


# ---- bad input


@pytest.mark.parametrize(
    ("change", "pointer"),
    [
        ({"batchsize": 8}, "/spec/batchsize"),
        ({"batch_size": 0}, "/spec/batch_size"),
        ({"batch_size": 2.5}, "/spec/batch_size"),
        ({"steps": None}, "/spec/steps"),
        ({"name": "x;touch /tmp/pwn"}, "/spec/name"),
        ({"name": "../../etc"}, "/spec/name"),
        ({"name": "café"}, "/spec/name"),
        ({"name": ""}, "/spec/name"),
        ({"name": "x" * 300}, "/spec/name"),
        ({"name": "a\nb"}, "/spec/name"),
        ({"program": "../gpt.py"}, "/spec/program"),
        ({"program": "gpt.py"}, "/spec/program"),
        ({"program": "builtin:nothing"}, "/spec/program"),
        ({"program": "hf:/config.json"}, "/spec/program"),
        ({"program": "hf:config.yaml"}, "/spec/program"),
        ({"setup": "pip install polars"}, "/spec/setup"),
        ({"setup": ["true", " "]}, "/spec/setup/1"),
        ({"setup_timeout": "ten"}, "/spec/setup_timeout"),
        ({"init_from": "gs://bucket/base"}, "/spec/init_from"),
        ({"init_from": "nobody@newest"}, "/spec/init_from"),
        ({"init_from": "base"}, "/spec/init_from"),
        ({"args": {"layers": "six"}}, "/spec/args/layers"),
        ({"args": {"layers": 0}}, "/spec/args/layers"),
        ({"args": {"layres": 6}}, "/spec/args/layres"),
        ({"args": {"tied": 1}}, "/spec/args/tied"),
        ({"args": {"dropout": 1.5}}, "/spec/args/dropout"),
        ({"args": {"width": 30, "heads": 4}}, "/spec/args/heads"),
        ({"name": "--help"}, "/spec/name"),
        ({"plan": {"depth": 9}}, "/spec/plan/depth"),
        ({"nodes": "2..1"}, "/spec/nodes"),
        ({"batch_size": True}, "/spec/batch_size"),
        ({"batch_size": "8"}, "/spec/batch_size"),
        ({"batch_size": 10**30}, "/spec/batch_size"),
        ({"clip_grad_norm": float("nan")}, "/spec/clip_grad_norm"),
        ({"args": {"lr": float("inf")}}, "/spec/args/lr"),
        ({"checkpoint": {"dir": "relative/folder"}}, "/spec/checkpoint/dir"),
        ({"checkpoint": {"dir": "ftp://host/folder"}}, "/spec/checkpoint/dir"),
        ({"checkpoint": {"dir": "file://relative"}}, "/spec/checkpoint/dir"),
        ({"program": "gpt.py", "bundle": "sha256:" + "0" * 64}, "/spec/bundle"),
    ],
)
def test_a_bad_spec_is_refused_by_field_and_leaves_nothing(
    user: httpx2.Client, change: dict[str, Any], pointer: str
) -> None:
    before = len(user.get("/api/v1/jobs?all=true&limit=1000").json()["items"])
    body = json.dumps({"spec": {**SPEC, **change}})
    answer = user.post("/api/v1/jobs", content=body, headers=JSON)
    assert pointer in [error.pointer for error in problem(answer, 422).errors]
    assert len(user.get("/api/v1/jobs?all=true&limit=1000").json()["items"]) == before


@pytest.mark.parametrize(
    "number", ["NaN", "Infinity", "-Infinity", "1e400", "1" + "0" * 30, "[" * 100_000]
)
def test_numbers_that_json_cannot_carry_are_refused(user: httpx2.Client, number: str) -> None:
    body = json.dumps({"spec": {**SPEC, "args": {"lr": 1}}}).replace('"lr": 1', f'"lr": {number}')
    problem(user.post("/api/v1/jobs", content=body, headers=JSON), 413 if "[" in number else 422)
    problem(user.post("/api/v1/jobs/a/actions/evict", content=number, headers=JSON),
            413 if "[" in number else 422)  # fmt: skip


@pytest.mark.parametrize("body", [b"", b"{", b"[]", b'{"spec": 3}', b"\xff\xfe", b'"\\ud800"'])
def test_what_is_no_spec_is_refused(user: httpx2.Client, body: bytes) -> None:
    problem(user.post("/api/v1/jobs", content=body, headers=JSON), 422)


def test_nesting_without_bottom_is_refused(user: httpx2.Client) -> None:
    body = b'{"spec": {"args": {"a": ' + b"[" * 20_000 + b"]" * 20_000 + b"}}}"
    problem(user.post("/api/v1/jobs", content=body, headers=JSON), 422)


def test_a_missing_program_names_its_field(user: httpx2.Client) -> None:
    spec = {key: value for key, value in SPEC.items() if key != "program"}
    (error,) = problem(user.post("/api/v1/jobs", json={"spec": spec}), 422).errors
    assert error.pointer == "/spec/program"


def test_yaml_is_taken_and_its_mistakes_have_lines(user: httpx2.Client) -> None:
    yaml = {"content-type": "application/yaml"}
    text = "name: a\nprogram: builtin:gpt\nnodes: 1\nbatch_size: 8\nsteps: 10\n"
    (error,) = problem(
        user.post("/api/v1/jobs", content=text + "batchsize: 3\n", headers=yaml), 422
    ).errors
    assert (error.line, error.suggestion) == (6, "Did you mean `batch_size`?")
    assert user.post("/api/v1/jobs", content=text, headers=yaml).status_code == 201


def test_a_body_too_large_is_refused_with_or_without_its_length(user: httpx2.Client) -> None:
    large = b'{"spec": "' + b"x" * (70 << 10) + b'"}'
    problem(user.post("/api/v1/jobs", content=large, headers=JSON), 413)
    pieces = (large[i : i + 1024] for i in range(0, len(large), 1024))
    problem(user.post("/api/v1/jobs", content=pieces, headers=JSON), 413)


@pytest.mark.parametrize(
    ("method", "path", "status"),
    [
        ("GET", "/api/v1/jobs/none", 404),
        ("GET", "/api/v1/jobs/none/ledger", 404),
        ("POST", "/api/v1/jobs/none/actions/cancel", 404),
        ("POST", "/api/v1/jobs/none/actions/pause", 404),
        ("POST", "/api/v1/nodes/none/actions/drain", 404),
        ("POST", "/api/v1/jobs/none/actions/checkpoint", 404),
        ("GET", "/api/v1/stream?job=none", 404),
        ("GET", "/nowhere", 404),
        ("DELETE", "/api/v1/jobs", 405),
        ("GET", "/api/v1/events?after=-1", 422),
        ("GET", "/api/v1/jobs?limit=0", 422),
    ],
)
def test_every_error_is_a_problem(user: httpx2.Client, method: str, path: str, status: int) -> None:
    problem(user.request(method, path), status)


def test_our_own_mistake_is_a_problem_too(
    controller: Served, user: httpx2.Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    def break_(*_: object) -> None:
        raise RuntimeError("secret of the house")

    monkeypatch.setattr("controller.api.views.job_views", break_)
    found = problem(user.get("/api/v1/jobs"), 500)
    assert "secret" not in found.model_dump_json()


# ---- pause, resume, save


def test_a_job_pauses_and_goes_on_and_saves_only_while_it_runs(user: httpx2.Client) -> None:
    user.post("/api/v1/jobs", json={"spec": SPEC})
    assert user.post("/api/v1/jobs/a/actions/pause").json()["pause_wanted"] is True
    until(lambda: user.get("/api/v1/jobs/a").json()["state"] == "paused")
    assert "no step to save" in problem(user.post("/api/v1/jobs/a/actions/checkpoint"), 409).detail
    assert user.post("/api/v1/jobs/a/actions/resume").status_code == 202
    until(lambda: user.get("/api/v1/jobs/a").json()["state"] == "waiting")
    asked = [e["type"] for e in user.get("/api/v1/jobs/a/events").json()["items"]]
    assert {"pause_asked", "resume_asked"} <= set(asked)


# ---- submit once


def test_an_unfinished_name_is_taken(user: httpx2.Client) -> None:
    first = user.post("/api/v1/jobs", json={"spec": SPEC})
    assert first.headers["location"] == f"/api/v1/jobs/{first.json()['id']}"
    problem(user.post("/api/v1/jobs", json={"spec": SPEC}), 409)
    user.post("/api/v1/jobs/a/actions/cancel")
    until(lambda: user.get("/api/v1/jobs/a").json()["state"] == "cancelled")
    second = user.post("/api/v1/jobs", json={"spec": SPEC})
    assert second.status_code == 201
    assert user.get("/api/v1/jobs/a").json()["id"] == second.json()["id"]
    assert user.get(f"/api/v1/jobs/{first.json()['id'][:29]}").json()["state"] == "cancelled"


def test_twenty_retries_with_one_key_make_one_job(user: httpx2.Client) -> None:
    def post(_: int) -> httpx2.Response:
        return user.post("/api/v1/jobs", json={"spec": SPEC}, headers={"Idempotency-Key": "k-1"})

    with ThreadPoolExecutor(20) as pool:
        answers = list(pool.map(post, range(20)))
    assert {answer.status_code for answer in answers} == {201}
    assert len({answer.content for answer in answers}) == 1
    assert len(user.get("/api/v1/jobs").json()["items"]) == 1
    other = {"spec": {**SPEC, "steps": 11}}
    problem(user.post("/api/v1/jobs", json=other, headers={"Idempotency-Key": "k-1"}), 422)


def test_jobs_are_listed_page_by_page(user: httpx2.Client) -> None:
    names = [f"page-{number}" for number in range(5)]
    for name in names:
        user.post("/api/v1/jobs", json={"spec": {**SPEC, "name": name}})
    seen, after = [], None
    while True:
        page = user.get("/api/v1/jobs?limit=2" + (f"&after={after}" if after else "")).json()
        seen += [item["name"] for item in page["items"]]
        if (after := page["next"]) is None:
            break
    assert seen == names[::-1]


def packed(*names: str) -> bytes:
    """A bundle with these files, all empty."""
    file = io.BytesIO()
    with tarfile.open(fileobj=file, mode="w:gz") as tar:
        for name in names:
            tar.addfile(tarfile.TarInfo(name))
    return file.getvalue()


@pytest.mark.parametrize(
    ("content", "pointer"),
    [(packed("other.py"), "/spec/program"), (b"not really a tar.gz", "/spec/bundle")],
)
def test_a_program_that_is_not_in_its_bundle_is_refused_before_any_node_is_used(
    user: httpx2.Client, content: bytes, pointer: str
) -> None:
    digest = f"sha256:{hashlib.sha256(content).hexdigest()}"
    assert user.put(f"/api/v1/bundles/{digest}", content=content).status_code == 201
    spec = {**SPEC, "program": "gpt.py", "bundle": digest}
    (error,) = problem(user.post("/api/v1/jobs", json={"spec": spec}), 422).errors
    assert error.pointer == pointer


def test_a_bundle_is_what_its_name_says(user: httpx2.Client, agent: httpx2.Client) -> None:
    content = packed("gpt.py")
    digest = f"sha256:{hashlib.sha256(content).hexdigest()}"
    problem(user.put(f"/api/v1/bundles/{digest}", content=b"something else"), 422)
    problem(agent.get(f"/api/v1/bundles/{digest}"), 404)
    spec = {**SPEC, "program": "gpt.py", "bundle": digest}
    problem(user.post("/api/v1/jobs", json={"spec": spec}), 422)
    assert user.put(f"/api/v1/bundles/{digest}", content=content).status_code == 201
    assert user.put(f"/api/v1/bundles/{digest}", content=content).status_code == 200
    assert agent.get(f"/api/v1/bundles/{digest}").content == content
    assert user.post("/api/v1/jobs", json={"spec": spec}).status_code == 201
    problem(user.put("/api/v1/bundles/sha256:..%2f..%2fx", content=content), 404)
    problem(user.put("/api/v1/bundles/sha256:x", content=content), 422)


# ---- the agents' wire


def register(agent: httpx2.Client, name: str, incarnation: str = "first-life") -> httpx2.Response:
    asked = wire.Register(node=name, incarnation=incarnation, facts=facts())
    return agent.post("/api/v1/agents/register", content=asked.model_dump_json(), headers=JSON)


def beat(agent: httpx2.Client, name: str, incarnation: str = "first-life") -> httpx2.Response:
    return agent.post(f"/api/v1/agents/{name}/beat", json={"incarnation": incarnation})


def orders(agent: httpx2.Client, name: str, after: int, wait: float) -> tuple[wire.Order, ...]:
    query = f"incarnation=first-life&after={after}&wait={wait}"
    answer = agent.get(f"/api/v1/agents/{name}/orders?{query}")
    return wire.Orders.model_validate_json(answer.content).orders


def report(agent: httpx2.Client, name: str, first: int, *bodies: wire.ReportBody) -> int:
    numbered = tuple(wire.Report(number=first + i, body=body) for i, body in enumerate(bodies))
    said = wire.Reports(incarnation="first-life", reports=numbered)
    answer = agent.post(
        f"/api/v1/agents/{name}/reports", content=said.model_dump_json(), headers=JSON
    )
    return wire.ReportsAnswer.model_validate_json(answer.content).reported


def test_registration_is_never_refused_and_closes_the_older_life(agent: httpx2.Client) -> None:
    assert register(agent, "vm-1").status_code == 200
    assert register(agent, "vm-1").status_code == 200
    assert beat(agent, "vm-1").status_code == 200
    assert register(agent, "vm-1", "second-life").status_code == 200
    stale = problem(beat(agent, "vm-1"), 409)
    assert stale.type == "unknown-incarnation"
    assert beat(agent, "vm-1", "second-life").status_code == 200
    problem(beat(agent, "vm-2"), 409)


@pytest.mark.parametrize("name", ["a b", "x;touch pwn", "../x", "é", "", "X", "a" * 64])
def test_a_node_has_a_plain_name(agent: httpx2.Client, name: str) -> None:
    body = {"node": name, "incarnation": "first-life", "facts": facts().model_dump(mode="json")}
    problem(agent.post("/api/v1/agents/register", json=body), 422)


def test_orders_stand_until_their_report_is_durable(
    agent: httpx2.Client, user: httpx2.Client, controller: Served
) -> None:
    """The whole road by hand: look, first weights, resent reports, log, an end."""
    register(agent, "vm-9")
    submitted = user.post("/api/v1/jobs", json={"spec": SPEC}).json()["id"]
    (look,) = orders(agent, "vm-9", 0, 10)
    assert orders(agent, "vm-9", 0, 0) == (look,), "it stands, so it is sent again"
    assert orders(agent, "vm-9", look.number, 0) == ()
    assert isinstance(look.body, wire.Look)
    assert look.body.root == str(controller.settings.data / "checkpoints" / submitted)
    looked = wire.Looked(number=look.number, job=submitted, generation=1)
    assert report(agent, "vm-9", 1, looked) == 1
    (start,) = orders(agent, "vm-9", look.number, 10)
    assert isinstance(start.body, wire.Start)
    assert (start.body.spec.kind, start.body.spec.generation) == ("first_weights", 1)
    done = wire.OrderDone(number=start.number)
    begun = wire.Said(
        job=submitted, generation=1, rank=0,
        line=progress.PhaseBegun(phase=progress.Phase.PROGRAM),
    )  # fmt: skip
    assert report(agent, "vm-9", 2, done, begun) == 3
    assert report(agent, "vm-9", 1, looked, done, begun) == 3, "all known already"
    assert report(agent, "vm-9", 9, begun) == 3, "a gap: from 4 on again, please"
    assert orders(agent, "vm-9", 0, 0) == ()

    def print_(offset: int, text: str) -> None:
        chunk = wire.LogChunk(
            incarnation="first-life", job=submitted, generation=1, rank=0,
            offset=offset, text=text,
        )  # fmt: skip
        path = "/api/v1/agents/vm-9/logs"
        assert agent.post(path, content=chunk.model_dump_json(), headers=JSON).status_code == 204

    for offset, text in ((0, "hello\n"), (0, "hello\n"), (6, "world\n")):
        print_(offset, text)
    log = user.get("/api/v1/jobs/a/logs", params={"tail": 1}).json()
    assert (log["text"], log["node"], log["over"]) == ("world\n", "vm-9", False)
    assert user.get("/api/v1/jobs/a/logs?offset=0").json()["text"] == "hello\nworld\n"
    (seat,) = user.get("/api/v1/jobs/a/generations").json()["items"][0]["seats"]
    assert (seat["phase"], seat["node"]) == ("program", "vm-9")
    problem(user.get("/api/v1/jobs/a/logs/setup"), 404)
    setup = progress.PhaseBegun(phase=progress.Phase.SETUP)
    assert report(agent, "vm-9", 4, begun.model_copy(update={"line": setup})) == 4
    print_(12, f"{wire.SETUP_ENDS}and more\n")
    log = user.get("/api/v1/jobs/a/logs/setup?node=vm-9&offset=6").json()
    assert (log["text"], log["over"]) == (f"world\n{wire.SETUP_ENDS}", True)
    problem(user.get("/api/v1/jobs/a/logs/setup?node=vm-8"), 404)


def test_reports_of_a_seat_that_is_not_ones_own_are_dropped(agent: httpx2.Client) -> None:
    register(agent, "vm-8")
    line = progress.StepCommitted(
        step=1, loss=1.0, grad_norm=1.0, samples=8, sample_ids_hash="00000000", seconds=1.0
    )
    said = wire.Said(job="job_of_nobody", generation=7, rank=0, line=line)
    assert report(agent, "vm-8", 1, said) == 1


def test_a_broken_order_request_makes_the_node_suspect_at_once(
    agent: httpx2.Client, user: httpx2.Client, controller: Served
) -> None:
    register(agent, "vm-7")
    place = urlsplit(controller.url)
    request = (
        "GET /api/v1/agents/vm-7/orders?incarnation=first-life&wait=30 HTTP/1.1\r\n"
        f"Host: x\r\nAuthorization: Bearer {controller.token(Role.AGENT)}\r\n\r\n"
    )

    def suspect() -> bool:
        nodes = user.get("/api/v1/nodes").json()["items"]
        return next(bool(n["suspect"]) for n in nodes if n["name"] == "vm-7")

    key = ("vm-7", "first-life")
    with socket.create_connection((str(place.hostname), int(place.port or 0))) as line:
        line.sendall(request.encode())
        until(lambda: controller.parts.presence._known[key].parked == 1)
        assert not suspect()
    broken_at = time.monotonic()
    until(suspect, 0.5)
    assert time.monotonic() - broken_at < 0.5
    beat(agent, "vm-7")
    assert suspect(), "a beat may have been on its way"
    orders(agent, "vm-7", 0, 0)
    assert not suspect()


# ---- the stream


def messages(stream: httpx2.Response, count: int) -> list[tuple[str, Any]]:
    found, kind = [], ""
    for line in stream.iter_lines():
        if line.startswith("event: "):
            kind = line.removeprefix("event: ")
        elif line.startswith("data: "):
            found.append((kind, json.loads(line.removeprefix("data: "))))
            if len(found) == count:
                break
    return found


def test_the_stream_tells_what_happens_and_starts_where_it_is_told(user: httpx2.Client) -> None:
    newest = user.get("/api/v1/events?last=1").json()["items"][0]["seq"]
    with user.stream("GET", f"/api/v1/stream?after={newest}") as stream:
        job = user.post("/api/v1/jobs", json={"spec": SPEC}).json()["id"]
        found = messages(stream, 4)
    assert found[0][0] == "hello"
    (first,) = [data for kind, data in found if kind == "event"][:1]
    assert (first["seq"], first["type"], first["job"]) == (newest + 1, "job_submitted", job)
    with user.stream("GET", f"/api/v1/stream?after={newest}&job={job}") as stream:
        again = messages(stream, 2)
    assert again[1][1]["seq"] == newest + 1
    with user.stream("GET", "/api/v1/stream?after=999999") as stream:
        assert [kind for kind, _ in messages(stream, 2)] == ["hello", "reset"]


def test_a_controller_stops_within_two_seconds_whoever_is_connected(tmp_path: Path) -> None:
    with served(tmp_path) as running:
        with running.client(Role.AGENT) as agent:
            register(agent, "vm-1")
        headers = {"Authorization": f"Bearer {running.token(Role.AGENT)}"}

        async def park() -> int:
            async with httpx2.AsyncClient(base_url=running.url, headers=headers) as client:
                query = {"incarnation": "first-life", "wait": "30"}
                answer = await client.get("/api/v1/agents/vm-1/orders", params=query, timeout=30)
                return answer.status_code

        with ThreadPoolExecutor(2) as pool, running.client() as user:
            parked = pool.submit(lambda: asyncio.run(park()))
            with user.stream("GET", "/api/v1/stream") as stream:
                messages(stream, 1)
                until(lambda: running.parts.presence._known[("vm-1", "first-life")].parked == 1)
                began = time.monotonic()
                running.stop()
                assert time.monotonic() - began < 2
            assert parked.result(1) == 200
            assert not running.parts.presence._known[("vm-1", "first-life")].suspect_since


def test_every_route_is_one_of_ours(controller: Served) -> None:
    """Strict JSON on every route that takes a body."""
    for context in iter_route_contexts(controller.app.routes):
        route = context.original_route
        if isinstance(route, APIRoute) and route.body_field is not None:
            assert type(route).__name__ == "StrictRoute", context.path


def test_a_drill_takes_no_node_of_another_job(tmp_path: Path) -> None:
    with served(tmp_path, tick=1000, lost_after=1e6) as running:
        story.tell(running.parts.store, running.parts.clock.now())
        with running.client(Role.USER) as user:
            assert user.post("/api/v1/jobs", json={"spec": SPEC | {"name": "b"}}).is_success
            answer = user.post("/api/v1/jobs/b/actions/evict", json={"nodes": ["node-1"]})
    assert answer.status_code == 409
    assert "node-1 works for another job" in answer.json()["detail"]
