"""The pages of a real controller: signing in, what they show, and what they never let through."""

import re
from collections.abc import Iterator

import httpx2
import pytest
import sqlalchemy as sa

from controller.dashboard.pages import CSP, PANELS
from controller.store.tables import events, jobs, seats
from controller.store.tokens import Role
from tests.fakes import story
from tests.fakes.served import Served, served
from tests.fakes.waiting import until

pytestmark = pytest.mark.integration

EVIL = "<script>alert('x')</script>"
JOB = f"/jobs/{story.JOB}"
PAGES = ["/", "/?all=true", "/nodes", JOB, f"{JOB}/logs?rank=1&generation=4", "/login"]
FRAGMENTS = ["/panels/jobs", "/panels/nodes", *(f"{JOB}/panels/{name}" for name in PANELS),
             f"{JOB}/panels/logs?rank=1&generation=4"]  # fmt: skip


@pytest.fixture(scope="module")
def controller(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    """The story, with markup in whatever a stranger can write."""
    with served(tmp_path_factory.mktemp("pages"), tick=1000, lost_after=1e6) as running:
        until(lambda: running.parts.looked_at > 0)
        story.tell(running.parts.store, running.parts.clock.now())
        running.parts.logs.append(story.JOB, 4, 1, 0, f"step 1 {EVIL}\n")

        def spoil(connection: sa.Connection) -> None:
            connection.execute(jobs.update().values(message=f"Says {EVIL}"))
            connection.execute(seats.update().where(seats.c.rank == 0).values(node=f"a{EVIL}"))
            connection.execute(
                events.insert().values(
                    at=1.0, type="node_lost", job=story.JOB, message=f"Lost {EVIL}", data={}
                )
            )

        running.parts.store.write(spoil).result()
        yield running


@pytest.fixture
def stranger(controller: Served) -> Iterator[httpx2.Client]:
    with httpx2.Client(base_url=controller.url, headers={"Accept": "text/html"}) as client:
        yield client


@pytest.fixture
def browser(controller: Served, stranger: httpx2.Client) -> httpx2.Client:
    """Signed in."""
    answer = sign_in(stranger, controller.token(Role.USER))
    assert answer.status_code == 303
    return stranger


def sign_in(client: httpx2.Client, token: str, next_: str = "/") -> httpx2.Response:
    return client.post("/login", data={"token": token, "next": next_})


# ---- the door


@pytest.mark.parametrize("page", [p for p in PAGES if p != "/login"])
def test_a_stranger_is_led_to_sign_in_and_back(stranger: httpx2.Client, page: str) -> None:
    answer = stranger.get(page)
    assert answer.status_code == 303
    assert answer.headers["location"].startswith("/login?next=/")


def test_a_token_becomes_a_cookie_that_scripts_cannot_read(
    stranger: httpx2.Client, controller: Served
) -> None:
    answer = sign_in(stranger, controller.token(Role.USER), JOB)
    cookie = answer.headers["set-cookie"].lower()
    assert answer.headers["location"] == JOB
    assert "httponly" in cookie and "samesite=strict" in cookie
    assert controller.token(Role.USER).lower() not in cookie


def test_signing_out_ends_the_session(browser: httpx2.Client) -> None:
    assert browser.get("/").status_code == 200
    session = dict(browser.cookies)
    browser.post("/login/out")
    browser.cookies.update(session)
    assert browser.get("/").status_code == 303


@pytest.mark.parametrize("elsewhere", ["//evil.example", "https://evil.example", "/\\evil.example"])
def test_nobody_is_led_elsewhere_after_signing_in(
    stranger: httpx2.Client, controller: Served, elsewhere: str
) -> None:
    assert sign_in(stranger, controller.token(Role.USER), elsewhere).headers["location"] == "/"


# ---- what is shown


@pytest.mark.parametrize("page", [*PAGES, *FRAGMENTS])
def test_nothing_foreign_runs_in_a_page(browser: httpx2.Client, page: str) -> None:
    answer = browser.get(page)
    assert answer.status_code == 200
    assert answer.headers["content-security-policy"] == CSP
    assert EVIL not in answer.text
    assert not re.search(r"<script(?![^>]* src=\"/static/)", answer.text)
    assert not re.search(r"\s(style|on\w+)=", re.sub(r'"[^"]*"', '""', answer.text))


@pytest.mark.parametrize("page", [JOB, f"{JOB}/logs?rank=1&generation=4"])
def test_what_strangers_wrote_is_shown_as_text(browser: httpx2.Client, page: str) -> None:
    assert "&lt;script&gt;alert(" in browser.get(page).text


def test_the_job_page_shows_figures_grid_recoveries_and_events(browser: httpx2.Client) -> None:
    text = browser.get(JOB).text
    for shown in (">187<", "of 2,000", "2×2", "stage 1", "layers 4-7", "node-6", "5×1 → 2×2",
                  "1.6 s", 'class="first_step"', "resumed from step 120", "Spare:"):  # fmt: skip
        assert shown in text


def test_a_name_leads_to_its_newest_job(browser: httpx2.Client) -> None:
    assert browser.get("/jobs/gpt-mini").headers["location"] == JOB


def test_the_stream_starts_where_the_page_ends(browser: httpx2.Client, controller: Served) -> None:
    seq = re.search(r'data-after="(\d+)"', browser.get(JOB).text)
    assert seq
    with browser.stream(
        "GET", f"/api/v1/stream?after={seq[1]}&job={story.JOB}", headers={"Accept": "*/*"}
    ) as answer:
        first = next(iter(httpx2.EventSource(answer)))
    assert (answer.status_code, first.event) == (200, "hello")


@pytest.mark.parametrize(
    ("page", "status"),
    [("/jobs/nobody", 404), (f"{JOB}/panels/nothing", 404), (f"{JOB}/logs?rank=99", 404),
     (f"{JOB}/logs?rank=x", 422)],
)  # fmt: skip
def test_errors_are_html_with_the_request_id(
    browser: httpx2.Client, page: str, status: int
) -> None:
    answer = browser.get(page)
    assert answer.status_code == status
    assert answer.headers["content-type"].startswith("text/html")
    assert answer.headers["x-request-id"] in answer.text


def test_a_panel_that_breaks_breaks_alone(
    browser: httpx2.Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(*_: object) -> dict[str, object]:
        raise RuntimeError("a secret of ours")

    monkeypatch.setitem(PANELS, "grid", broken)
    answer = browser.get(f"{JOB}/panels/grid")
    assert answer.status_code == 500 and "data-retry" in answer.text
    assert "secret" not in answer.text
    assert browser.get(f"{JOB}/panels/head").status_code == 200


@pytest.fixture(scope="module")
def empty(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    """Another controller, in which nothing has happened."""
    with served(tmp_path_factory.mktemp("empty"), tick=1000) as running:
        yield running


def test_an_empty_controller_says_the_next_command(empty: Served) -> None:
    with empty.client() as client:
        assert "varuna submit job.yaml" in client.get("/").text
        assert f"varuna-agent --controller {empty.url}" in client.get("/nodes").text


def test_a_wrong_token_is_said_and_too_many_are_stopped(empty: Served) -> None:
    with httpx2.Client(base_url=empty.url) as client:
        answers = [sign_in(client, "vrn_user_wrong") for _ in range(6)]
    assert [answer.status_code for answer in answers] == [401] * 5 + [429]
    assert 'role="alert"' in answers[0].text and "vrn_user_wrong" not in answers[0].text


@pytest.mark.parametrize("file", ["app.css", "live.js", "charts.js", "vendor/htmx.min.js"])
def test_the_files_need_no_token(stranger: httpx2.Client, file: str) -> None:
    answer = stranger.get(f"/static/{file}")
    assert answer.status_code == 200 and answer.headers["x-content-type-options"] == "nosniff"
