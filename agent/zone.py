"""In which zone of its cloud this VM is, by the cloud's metadata service. Not known is no error: a
VM may be in no zone, and an agent does not wait for a service that says nothing.
"""

import asyncio

import structlog
from pydantic import BaseModel

from agent.metadata import (
    AZURE_COMPUTE,
    AZURE_HEADERS,
    GCP_HEADERS,
    METADATA,
    NoAnswerError,
    Service,
    aws_headers,
    aws_token,
    understood,
)

_PATIENCE_SECONDS = 2.0
_LONGEST = 64

log = structlog.get_logger()


class _Place(BaseModel):
    location: str = ""
    zone: str = ""


async def zone_of(cloud: str, url: str | None = None) -> str | None:
    """``westeurope-1``, ``eu-west-1a``, ``europe-west4-b``; None: it cannot be found out in two
    seconds, or ``cloud`` has no metadata service.
    """
    if cloud not in METADATA:
        return None
    try:
        async with asyncio.timeout(_PATIENCE_SECONDS):
            zone = await _asked(cloud, Service(url or METADATA[cloud]))
    except (NoAnswerError, TimeoutError) as error:
        because = str(error) or f"no answer in {_PATIENCE_SECONDS:g} s"
        log.warning("the zone is not known", cloud=cloud, because=because)
        return None
    return zone[:_LONGEST] or None


async def _asked(cloud: str, service: Service) -> str:
    """The zone's name, empty if there is none. Raises NoAnswerError."""
    match cloud:
        case "azure":  # zones are numbered within a region
            place = understood(await service.ask(AZURE_COMPUTE, AZURE_HEADERS), _Place)
            return f"{place.location}-{place.zone}" if place.zone else ""
        case "aws":
            headers = aws_headers(await aws_token(service))
            path = "/latest/meta-data/placement/availability-zone"
            return (await service.ask(path, headers)).text.strip()
        case _:  # projects/NUMBER/zones/ZONE
            answer = await service.ask("/computeMetadata/v1/instance/zone", GCP_HEADERS)
            return answer.text.strip().rpartition("/")[2]
