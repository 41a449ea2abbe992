"""Submitting a job: read the spec in whatever form it came, refuse it by field, store it once."""

import asyncio
import hashlib
import posixpath
import re
import tarfile
import zlib
from dataclasses import dataclass
from pathlib import Path as FilePath
from typing import Annotated, Any

import sqlalchemy as sa
from fastapi import APIRouter, Depends, Header, Request, Response

from controller.api import schemas, views
from controller.api.deps import Here, job_row
from controller.api.errors import ProblemException, StrictRoute, loose_json, refuse_spec
from controller.bell import FEED, RECONCILER
from controller.core.jobspec import JOB_AT_STEP, JobSpec
from controller.specfile import BadSpecError, SpecError, read_object, read_yaml
from controller.store import folders, jobs
from controller.store.launching import job_root
from controller.store.tables import bundles
from trainer.contract.builtins import BUILTINS, layer_count, path_of, wrong_args

router = APIRouter(prefix="/api/v1/jobs", tags=["jobs"], route_class=StrictRoute)
_REACHED = re.compile(r"/|file:///.|(abfs|abfss|az|s3|gs|gcs)://[^/]+")
"""What every VM can mean the same by."""
_YAML = ("application/yaml", "application/x-yaml", "text/yaml")


@dataclass(frozen=True)
class Asked:
    """A spec that was read and checked; ``below`` is where in the body it stands."""

    spec: JobSpec
    below: str
    body_hash: str


async def asked(request: Request) -> Asked:
    """What the body asks for."""
    body = await request.body()
    kind = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    below = "" if kind in _YAML else "/spec"
    spec = await asyncio.to_thread(_read, body, below)  # slow enough to keep agents waiting
    return Asked(spec, below, hashlib.sha256(kind.encode() + b"\0" + body).hexdigest())


def _read(body: bytes, below: str) -> JobSpec:
    try:
        spec = read_object(_spec_in(body)) if below else read_yaml(_text(body))
    except BadSpecError as bad:
        raise refuse_spec(bad, below) from None
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
        given = loose_json(body)
    except ValueError as error:
        raise ProblemException(422, f"The body is not JSON: {error}") from None
    if not isinstance(given, dict) or set(given) != {"spec"}:
        raise ProblemException(422, 'The body must be {"spec": {…}} and nothing else.')
    return given["spec"]


def check_spec(spec: JobSpec) -> list[SpecError]:
    """What is wrong with it beyond its form, as far as that is known before a node has looked."""
    if (folder := spec.checkpoint.dir) and not _REACHED.match(folder):
        message = (
            "`checkpoint.dir` must be an absolute path that every VM reaches, or a URL of "
            f"file, abfs, s3 or gs, not {folder!r}"
        )
        return [SpecError("/checkpoint/dir", None, message)]
    if spec.setup and spec.bundle is None:
        message = "`setup` runs in the folder of a program of your own, which `varuna submit` packs"
        return [SpecError("/setup", None, message)]
    if spec.init_from and "://" in spec.init_from:
        message = "`init_from` must be a folder that every VM reaches, or JOB@STEP"
        return [SpecError("/init_from", None, message)]
    is_in_bundle = spec.bundle is not None or (spec.init_from or "/").startswith("/")
    if not is_in_bundle and not JOB_AT_STEP.match(spec.init_from or ""):
        message = "`init_from` must be absolute where no workdir is sent along"
        return [SpecError("/init_from", None, message)]
    if path_of(spec.program) is not None:
        if spec.bundle is None and not (spec.workdir or "").startswith("/"):
            message = "A program file needs a `bundle` (or an absolute `workdir` on every VM)"
            return [SpecError("/program", None, message, "`varuna submit` packs and uploads it.")]
        return []
    name = spec.program.removeprefix("builtin:")
    if name not in BUILTINS:
        message = f"There is no builtin:{name}; there are: {', '.join(BUILTINS)}"
        return [SpecError("/program", None, message)]
    if wrong := list(wrong_args(name, spec.args)):
        return [SpecError(f"/args/{arg}", None, sentence) for arg, sentence in wrong]
    layers = layer_count(name, spec.args)
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
    given: Annotated[Asked, Depends(asked)],
    idempotency_key: Annotated[str | None, Header(min_length=1, max_length=255)] = None,
) -> Response:
    """A new job; it waits until the reconciler has looked."""
    _need_program(here.bundles, given)
    at = here.clock.now()

    def work(connection: sa.Connection) -> jobs.Remembered:
        if idempotency_key:
            known = jobs.remembered(connection, idempotency_key, given.body_hash)
            if known:
                return known
        _need_bundle(connection, given)
        job = jobs.new_job_id(at)
        jobs.submit(connection, job, _with_weights(connection, given), at)
        view = views.job_view(connection, job_row(connection, job))
        first = jobs.Remembered(job, view.model_dump_json())
        if idempotency_key:
            jobs.remember(connection, idempotency_key, given.body_hash, first, at)
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


def _with_weights(connection: sa.Connection, given: Asked) -> JobSpec:
    """The spec with the folder of the checkpoint that ``init_from: JOB@STEP`` means."""
    found = JOB_AT_STEP.match(given.spec.init_from or "")
    if found is None:
        return given.spec
    name, step = found.groups()
    row = jobs.find(connection, name)
    steps = folders.complete(connection, row.id) if row else {}
    wanted = max(steps, default=None) if step == "newest" else int(step)
    root = row.spec["checkpoint"]["dir"] if row else None
    if row is None:
        wrong = f"`init_from`: there is no job {name!r}"
    elif wanted not in steps:
        there = f"those of steps {', '.join(map(str, sorted(steps)))}" if steps else "none"
        wrong = f"`init_from`: {name} has no complete checkpoint of {step}; there are {there}"
    elif root is None or "://" in root:
        wrong = f"`init_from`: the checkpoints of {name} are in no folder that every VM reaches"
    else:
        place = f"{job_root(root, row.id)}/{steps[wanted]}"
        return given.spec.model_copy(update={"init_from": place})
    raise refuse_spec(BadSpecError([SpecError("/init_from", None, wrong)]), given.below)


def _need_bundle(connection: sa.Connection, given: Asked) -> None:
    digest = given.spec.bundle
    known = sa.select(bundles.c.digest).where(bundles.c.digest == digest)
    if digest is not None and connection.execute(known).first() is None:
        missing = SpecError("/bundle", None, f"Bundle {digest} was not uploaded")
        raise refuse_spec(BadSpecError([missing]), given.below)


def _need_program(folder: FilePath, given: Asked) -> None:
    """The program's file is in the bundle, when that is here."""
    path, digest = path_of(given.spec.program), given.spec.bundle or ""
    packed = folder / f"{digest.removeprefix('sha256:')}.tar.gz"
    if path is None or not digest or not packed.exists():
        return
    try:
        with tarfile.open(packed) as tar:
            names = {posixpath.normpath(name) for name in tar.getnames()}
    except (tarfile.TarError, OSError, EOFError, zlib.error):
        wrong = SpecError("/bundle", None, f"Bundle {digest} is no tar.gz")
        raise refuse_spec(BadSpecError([wrong]), given.below) from None
    if posixpath.normpath(path) not in names:
        mend = "Look at workdir, .gitignore and .varunaignore."
        wrong = SpecError("/program", None, f"`{path}` is not in the bundle", mend)
        raise refuse_spec(BadSpecError([wrong]), given.below)
