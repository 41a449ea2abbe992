"""The job's page in a real browser, under its strict CSP: it is live, draws, and fits a phone."""

import shutil
from collections.abc import Iterator

import pytest
import sqlalchemy as sa
from playwright.sync_api import Browser, Page, expect, sync_playwright

from controller.bell import FEED
from controller.core.events import EventType
from controller.store.events import record
from controller.store.tokens import Role
from tests.fakes import story
from tests.fakes.served import Served, served
from tests.fakes.waiting import until

CHROMIUM = shutil.which("chromium")
pytestmark = [
    pytest.mark.integration,
    pytest.mark.skipif(CHROMIUM is None, reason="needs Debian's chromium"),
]


@pytest.fixture(scope="module")
def controller(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    with served(tmp_path_factory.mktemp("browser"), tick=1000, lost_after=1e6) as running:
        until(lambda: running.parts.looked_at > 0)
        story.tell(running.parts.store, running.parts.clock.now())
        yield running


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    with sync_playwright() as playwright:
        chromium = playwright.chromium.launch(
            executable_path=CHROMIUM,
            args=["--no-sandbox", "--disable-gpu", "--disable-background-networking"],
        )
        yield chromium
        chromium.close()


@pytest.fixture
def page(browser: Browser, controller: Served) -> Iterator[Page]:
    """Signed in, on the job's page; nothing may have gone wrong in its console at the end."""
    context = browser.new_context()
    page = context.new_page()
    wrong: list[str] = []
    page.on("console", lambda said: wrong.append(said.text) if said.type == "error" else None)
    page.on("pageerror", lambda error: wrong.append(str(error)))
    page.goto(f"{controller.url}/login?next=/jobs/gpt-mini")
    page.get_by_label("Token").fill(controller.token(Role.VIEWER))
    page.get_by_role("button", name="Sign in").click()
    page.wait_for_url("**/jobs/job_*")
    yield page
    assert wrong == []
    context.close()


def test_what_happens_appears_without_a_reload(page: Page, controller: Served) -> None:
    expect(page.locator("#badge")).to_have_text("● Live")
    expect(page.locator(".plot canvas")).to_have_count(2)

    def happen(connection: sa.Connection) -> None:
        now = controller.parts.clock.now()
        record(connection, now, EventType.SAVE_FAILED, "The disk is <b>full</b>.", job=story.JOB)

    controller.parts.store.write(happen).result()
    controller.parts.loop.call_soon_threadsafe(controller.parts.bell.ring, FEED)
    expect(page.locator(".events li").first).to_contain_text("The disk is <b>full</b>.")


def test_a_chart_is_a_table_on_wish(page: Page) -> None:
    expect(page.locator("#capacity canvas")).to_have_count(1)
    page.locator("[data-table=capacity]").click()
    expect(page.locator("#capacity tbody tr").first).to_be_visible()
    page.locator("[data-table=capacity]").click()
    expect(page.locator("#capacity canvas")).to_have_count(1)


def test_the_held_out_loss_is_drawn_beside_the_trainings(page: Page) -> None:
    expect(page.locator("#loss .u-legend")).to_contain_text("held-out")
    page.locator("[data-table=loss]").click()
    expect(page.locator("#loss thead")).to_contain_text("Held-out")
    row = page.locator("#loss tbody tr").filter(has=page.get_by_text("180", exact=True))
    loss, held_out = (row.locator("td").nth(column) for column in (1, 3))
    assert float(held_out.inner_text()) == pytest.approx(float(loss.inner_text()) + 0.125, abs=1e-4)
    assert row.locator("xpath=following-sibling::tr[1]/td[4]").inner_text() == "–"


@pytest.mark.parametrize("scheme", ["dark", "light"])
def test_a_phone_shows_it_without_sideways_scroll(page: Page, scheme: str) -> None:
    page.emulate_media(color_scheme=scheme)  # type: ignore[arg-type]
    page.set_viewport_size({"width": 390, "height": 844})
    expect(page.locator(".plot canvas")).to_have_count(2)
    assert page.evaluate("document.documentElement.scrollWidth") <= 390


def test_a_click_on_a_seat_opens_its_log(page: Page, controller: Served) -> None:
    controller.parts.logs.append(story.JOB, 4, 1, 0, "<i>hello</i>\n")
    page.get_by_role("link", name="node-3").click()
    expect(page.locator("pre.log")).to_have_text("<i>hello</i>")
    page.get_by_role("button", name="Refresh").click()
    expect(page.locator("pre.log")).to_have_text("<i>hello</i>")
