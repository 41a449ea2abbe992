"""Submitting a job: read the spec in whatever form it came, refuse it by field, store it once."""

import asyncio
import hashlib
from typing import Annotated, Any

import sqlalchemy as sa
from fastapi import APIRouter, Depends, Header, Request, Response

from controller.api import schemas, views
from controller.api.deps import Here, job_row
from controller.api.errors import ProblemException, StrictRoute, refuse_spec, strict_json
from controller.bell import FEED, RECONCILER
from controller.core.jobspec import JobSpec
from controller.specfile import BadSpecError, SpecError, read_object, read_yaml
from controller.store import jobs
from controller.store.tables import bundles
from trainer.contract.builtins import layer_count

router = APIRouter(prefix="/api/v1/jobs", tags=["jobs"], route_class=StrictRoute)
_YAML = ("application/yaml", "application/x-yaml", "text/yaml")


async def asked(request: Request) -> tuple[JobSpec, str]:
    """The spec in the body, checked, and the body's hash."""
    body = await request.body()
    kind = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    spec = await asyncio.to_thread(_read, kind, body)  # slow enough to keep agents waiting
    return spec, hashlib.sha256(kind.encode() + b"\0" + body).hexdigest()


def _read(kind: str, body: bytes) -> JobSpec:
    try:
        if kind in _YAML:
            spec, below = read_yaml(_text(body)), ""
        else:
            spec, below = read_object(_spec_in(body)), "/spec"
    except BadSpecError as bad:
        raise refuse_spec(bad, "" if kind in _YAML else "/spec") from None
    if wrong := check_spec(spec):
        raise refuse_spec(BadSpecError(wrong), below)
    return spec


def _text(body: bytes) -> str:
    try:
        return body.decode()
    except UnicodeError:
        raise ProblemException(422, "The body is not UTF-8.") from None


def _spec_in(body: bytes) -> Any:
    try:
        given = strict_json(body)
    except ValueError as error:
        raise ProblemException(422, f"The body is not JSON: {error}") from None
    if not isinstance(given, dict) or set(given) != {"spec"}:
        raise ProblemException(422, 'The body must be {"spec": {…}} and nothing else.')
    return given["spec"]


def check_spec(spec: JobSpec) -> list[SpecError]:
    """What is wrong with it beyond its form, as far as that is known before a node has looked."""
    if not spec.program.startswith("builtin:"):
        if spec.bundle is None and not (spec.workdir or "").startswith("/"):
            message = "A program file needs a `bundle` (or an absolute `workdir` on every VM)"
            return [SpecError("/program", None, message, "`varuna submit` packs and uploads it.")]
        return []
    try:
        layers = layer_count(spec.program.removeprefix("builtin:"), spec.args)
    except ValueError as wrong:
        place = "/args/layers" if "args" in str(wrong) else "/program"
        return [SpecError(place, None, str(wrong)[0].upper() + str(wrong)[1:])]
    depth = spec.plan.depth
    if depth != "auto" and depth.min > layers:
        message = f"`plan.depth` {depth.min} is more than the program's {layers} layers"
        return [SpecError("/plan/depth", None, message, f"Give at most {layers}, or auto.")]
    return []


@router.post("", status_code=201, response_model=schemas.JobView, openapi_extra={
    "requestBody": {"required": True, "content": {
        "application/json": {"schema": schemas.SubmitRequest.model_json_schema()},
        "application/yaml": {"schema": {"type": "string"}},
    }},
})  # fmt: skip
def submit(
    here: Here,
    spec_and_hash: Annotated[tuple[JobSpec, str], Depends(asked)],
    idempotency_key: Annotated[str | None, Header(min_length=1, max_length=255)] = None,
) -> Response:
    """A new job; it waits until the reconciler has looked."""
    spec, body_hash = spec_and_hash
    at = here.clock.now()

    def work(connection: sa.Connection) -> jobs.Remembered:
        if idempotency_key:
            known = jobs.remembered(connection, idempotency_key, body_hash)
            if known:
                return known
        _need_bundle(connection, spec)
        job = jobs.new_job_id(at)
        jobs.submit(connection, job, spec, at)
        view = views.job_view(connection, job_row(connection, job))
        first = jobs.Remembered(job, view.model_dump_json())
        if idempotency_key:
            jobs.remember(connection, idempotency_key, body_hash, first, at)
        return first

    try:
        answer = here.store.write(work).result()
    except jobs.NameTakenError as taken:
        raise ProblemException(409, f"{str(taken).capitalize()}.") from None
    except jobs.KeyReusedError as reused:
        raise ProblemException(422, f"{str(reused).capitalize()}.") from None
    here.ring(RECONCILER, FEED)
    return Response(
        answer.answer,
        status_code=201,
        media_type="application/json",
        headers={"Location": f"/api/v1/jobs/{answer.job}"},
    )


def _need_bundle(connection: sa.Connection, spec: JobSpec) -> None:
    known = sa.select(bundles.c.digest).where(bundles.c.digest == spec.bundle)
    if spec.bundle is not None and connection.execute(known).first() is None:
        raise ProblemException(422, f"Bundle {spec.bundle} was not uploaded.")
