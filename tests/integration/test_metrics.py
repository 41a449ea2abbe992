"""What Prometheus reads: the job's figures as its pages show them, behind a token."""

from collections.abc import Iterator
from pathlib import Path

import httpx2
import pytest
from prometheus_client.parser import text_string_to_metric_families

from controller.store.tokens import Role
from tests.fakes import story
from tests.fakes.served import Served, served

pytestmark = pytest.mark.integration


@pytest.fixture(scope="module")
def controller(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    folder: Path = tmp_path_factory.mktemp("metrics")
    with served(folder, tick=1000, lost_after=1e6) as running:
        story.tell(running.parts.store, running.parts.clock.now())
        yield running


def samples(controller: Served) -> dict[tuple[str, tuple[str, ...]], float]:
    """(name, the values of its labels but the job's) -> value."""
    with controller.client(Role.VIEWER) as client:
        answer = client.get("/metrics")
    assert answer.status_code == 200
    assert answer.headers["content-type"].startswith("text/plain")
    return {
        (
            sample.name,
            tuple(v for k, v in sorted(sample.labels.items()) if k not in ("job", "name")),
        ): sample.value
        for family in text_string_to_metric_families(answer.text)
        for sample in family.samples
    }


def test_they_say_what_the_rows_say(controller: Served) -> None:
    found = samples(controller)
    assert found["varuna_job_state", ("running",)] == 1
    assert found["varuna_job_state", ("failed",)] == 0
    assert found["varuna_job_step", ()] == 187
    assert found["varuna_recoveries_total", ()] == 2
    assert found["varuna_lost_steps_total", ()] == 7
    assert found["varuna_recovery_seconds_total", ("launch",)] == pytest.approx(0.6)
    assert 0.5 < found["varuna_job_goodput_ratio", ()] <= 1
    assert found["varuna_nodes", ("lost",)] == 3
    assert found["varuna_dropped_reports_total", ()] == 0


def test_nobody_reads_them_without_a_token(controller: Served) -> None:
    assert httpx2.get(f"{controller.url}/metrics").status_code == 401
    with controller.client(Role.AGENT) as client:
        assert client.get("/metrics").status_code == 403
