"""Places for checkpoints behind a URL: a folder of this machine, and Azure's blob emulator.

``azurite-blob`` (npm's azurite) is used where it is found: on the PATH, or named by
VARUNA_AZURITE.
"""

import os
import shutil
import socket
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from tests.fakes.waiting import until

_KEY = "Eby8vdM02xNOcqFlqUwJPLlmEtlCDXJ1OUzFT50uSRZ6IFsuFq2UVErCz4I6tq/K1SZFPTOtr/KBHBeksoGMGw=="
"""The emulator's own, which everybody knows."""


def azurite_command() -> str | None:
    return os.environ.get("VARUNA_AZURITE") or shutil.which("azurite-blob")


@contextmanager
def azurite(folder: Path) -> Iterator[str]:
    """A running emulator's container as a URL; the environment says how to reach it."""
    command = azurite_command()
    if command is None:
        pytest.skip("there is no azurite-blob here")
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    process = subprocess.Popen(
        [command, "--disableTelemetry", "--skipApiVersionCheck", "--silent",
         "--inMemoryPersistence", "--blobHost", "127.0.0.1", "--blobPort", str(port)],
        cwd=folder, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
    )  # fmt: skip
    said = (
        f"DefaultEndpointsProtocol=http;AccountName=devstoreaccount1;AccountKey={_KEY};"
        f"BlobEndpoint=http://127.0.0.1:{port}/devstoreaccount1;"
    )
    try:
        until(lambda: _listens(port), 30)
        with pytest.MonkeyPatch.context() as patch:
            patch.setenv("AZURE_STORAGE_CONNECTION_STRING", said)
            _make_container(said)
            _forget_file_systems()  # of another emulator, which may run on
            yield "abfs://varuna/runs"
    finally:
        _forget_file_systems()
        process.terminate()
        process.wait(10)


def _listens(port: int) -> bool:
    assert port
    with socket.socket() as trying:
        return trying.connect_ex(("127.0.0.1", port)) == 0


def _forget_file_systems() -> None:
    """fsspec keeps them by their arguments, and the port is not among these: the next emulator
    would be sought where this one was.
    """
    from adlfs import AzureBlobFileSystem  # type: ignore[import-untyped]

    AzureBlobFileSystem.clear_instance_cache()


def _make_container(connection: str) -> None:
    from azure.storage.blob import BlobServiceClient

    with BlobServiceClient.from_connection_string(connection) as service:
        service.create_container("varuna")
