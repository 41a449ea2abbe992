"""Is it alive, is it ready, who is it; and the schema of a job."""

import asyncio
from importlib.metadata import version
from typing import Any

from fastapi import APIRouter, Response

from agent.wire import WIRE_VERSION
from controller.api import schemas
from controller.api.deps import Here
from controller.core.jobspec import JobSpec

router = APIRouter(tags=["health"])
_SLOW_SECONDS = 1.0


@router.get("/healthz")
async def alive() -> dict[str, str]:
    """The process answers. The one route that asks for no token: it tells nothing."""
    return {"status": "ok"}


@router.get("/readyz", responses={503: {"model": schemas.HealthView}})
async def ready(here: Here, response: Response) -> schemas.HealthView:
    """Whether the store takes writes and the reconciler keeps looking."""
    reasons = []
    try:
        write = asyncio.wrap_future(here.store.write(lambda connection: None))
        await asyncio.wait_for(write, _SLOW_SECONDS)
    except TimeoutError:
        reasons.append("The store has not answered within a second.")
    since = here.clock.now() - here.looked_at
    if since > here.settings.tick + _SLOW_SECONDS:
        reasons.append(f"The reconciler has not looked for {since:.1f} s.")
    if reasons:
        response.status_code = 503
    return schemas.HealthView(ready=not reasons, reasons=tuple(reasons))


@router.get("/version")
async def who(here: Here) -> schemas.VersionView:
    """Who answers."""
    return schemas.VersionView(
        version=version("varuna-spot"), wire_version=WIRE_VERSION, epoch=here.epoch
    )


@router.get("/api/v1/schema/job.json")
async def job_schema() -> dict[str, Any]:
    """The JSON Schema of a job spec."""
    return JobSpec.model_json_schema()
