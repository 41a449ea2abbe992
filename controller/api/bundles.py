"""Bundles: a program's folder as a tar.gz, named by its SHA-256. Never unpacked here."""

import asyncio
import hashlib
import os
import secrets
from collections.abc import AsyncIterator
from pathlib import Path as FilePath
from typing import Annotated

from fastapi import APIRouter, Path, Request, Response
from fastapi.responses import FileResponse

from controller.api import schemas
from controller.api.deps import Here
from controller.api.errors import ProblemException, not_found
from controller.store.rows import insert_new
from controller.store.tables import bundles

router = APIRouter(prefix="/api/v1/bundles", tags=["bundles"])
Digest = Annotated[str, Path(pattern=r"^sha256:[0-9a-f]{64}$")]


@router.put("/{digest}", status_code=201, response_model=schemas.BundleView)
async def put(here: Here, request: Request, response: Response, digest: Digest) -> object:
    """Take it in when its hash is right; there already: 200."""
    path = _file(here.bundles, digest)
    if path.exists():
        response.status_code = 200
        return schemas.BundleView(digest=digest, size_bytes=path.stat().st_size)
    part = path.with_name(f"{path.name}.{secrets.token_hex(4)}.part")
    try:
        size, found = await _receive(request.stream(), part)
        if found != digest:
            raise ProblemException(422, f"The body hashes to {found}, not {digest}.")
        await asyncio.to_thread(os.replace, part, path)
    finally:
        part.unlink(missing_ok=True)
    at = here.clock.now()
    await asyncio.wrap_future(
        here.store.write(
            lambda c: insert_new(c, bundles, digest=digest, num_bytes=size, created_at=at)
        )
    )
    return schemas.BundleView(digest=digest, size_bytes=size)


async def _receive(body: AsyncIterator[bytes], path: FilePath) -> tuple[int, str]:
    path.parent.mkdir(parents=True, exist_ok=True)
    size, digest = 0, hashlib.sha256()
    with path.open("wb") as file:
        async for piece in body:
            size += len(piece)
            digest.update(piece)
            file.write(piece)
        file.flush()
        await asyncio.to_thread(os.fsync, file.fileno())
    return size, f"sha256:{digest.hexdigest()}"


@router.get("/{digest}")
def get(here: Here, digest: Digest) -> FileResponse:
    """The bytes."""
    path = _file(here.bundles, digest)
    if not path.exists():
        raise not_found(f"bundle {digest}")
    return FileResponse(path, media_type="application/gzip")


def _file(folder: FilePath, digest: str) -> FilePath:
    return folder / f"{digest.removeprefix('sha256:')}.tar.gz"
