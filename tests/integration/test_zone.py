"""In which zone a VM is, from real HTTP servers on loopback that behave as the clouds do."""

import asyncio
import json
import threading
from pathlib import Path

import pytest
from structlog.testing import capture_logs

from agent.daemon import _zone
from agent.settings import Settings
from agent.zone import zone_of
from tests.fakes.metadata import Answer, Asked, metadata

pytestmark = pytest.mark.integration


def azure(asked: Asked, zone: str = "2") -> Answer:
    assert asked.path == "/metadata/instance/compute?api-version=2021-02-01&format=json"
    assert asked.headers["Metadata"] == "true"
    place = {"name": "spot_7", "location": "westeurope", "zone": zone, "vmSize": "NC24ads"}
    return Answer(text=json.dumps(place))


def azure_without_zones(asked: Asked) -> Answer:
    return azure(asked, zone="")


def aws(asked: Asked) -> Answer:
    if asked.path == "/latest/api/token":
        assert asked.method == "PUT" and asked.headers["X-aws-ec2-metadata-token-ttl-seconds"]
        return Answer(text="a-token")
    assert asked.path == "/latest/meta-data/placement/availability-zone"
    if asked.headers["X-aws-ec2-metadata-token"] != "a-token":
        return Answer(401)
    return Answer(text="eu-west-1a")


def gcp(asked: Asked) -> Answer:
    assert asked.path == "/computeMetadata/v1/instance/zone"
    assert asked.headers["Metadata-Flavor"] == "Google"
    return Answer(text="projects/123456789/zones/europe-west4-b")


CLOUDS = {
    "azure": (azure, "westeurope-2"),
    "aws": (aws, "eu-west-1a"),
    "gcp": (gcp, "europe-west4-b"),
}


@pytest.mark.parametrize("cloud", CLOUDS)
def test_each_clouds_metadata_service_names_the_zone(cloud: str) -> None:
    answer, zone = CLOUDS[cloud]
    with metadata(answer) as service:
        assert asyncio.run(zone_of(cloud, service.url)) == zone


def test_a_vm_in_no_zone_has_none() -> None:
    with metadata(azure_without_zones) as service, capture_logs() as logs:
        assert asyncio.run(zone_of("azure", service.url)) is None
    assert not logs, "and that is nothing to warn of"


@pytest.mark.parametrize("cloud", CLOUDS)
def test_a_service_that_refuses_makes_no_trouble(cloud: str) -> None:
    with metadata(lambda _: Answer(404)) as service, capture_logs() as logs:
        assert asyncio.run(zone_of(cloud, service.url)) is None
    assert [entry["event"] for entry in logs] == ["the zone is not known"]


def test_a_service_that_stalls_is_not_waited_for_long(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("agent.zone._PATIENCE_SECONDS", 0.2)
    over = threading.Event()
    with metadata(lambda _: Answer(stall=over)) as service, capture_logs() as logs:
        assert asyncio.run(zone_of("gcp", service.url)) is None
        over.set()
    assert [entry["because"] for entry in logs] == ["no answer in 0.2 s"]


def settings(**given: object) -> Settings:
    given = {"token_file": Path("t"), "controller": "http://127.0.0.1:1", **given}
    return Settings.model_validate(given)


def test_an_agent_reports_what_it_is_told_else_what_the_cloud_of_its_notices_says() -> None:
    with metadata(gcp) as service:
        told = settings(notices="gcp", notices_url=service.url)
        assert asyncio.run(_zone(told)) == "europe-west4-b"
        asked = len(service.asked)
        told = settings(notices="gcp", notices_url=service.url, zone="rack-7")
        assert asyncio.run(_zone(told)) == "rack-7"
        assert len(service.asked) == asked
    assert asyncio.run(_zone(settings())) is None
