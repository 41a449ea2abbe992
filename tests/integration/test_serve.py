"""The controller as a process: where it says it is, how it ends, what a kill leaves, TLS."""

import contextlib
import datetime
import json
import signal
import socket
import ssl
import subprocess
import sys
import time
from collections.abc import Iterator
from ipaddress import IPv4Address
from pathlib import Path

import httpx2
import pytest
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec

from tests.fakes.waiting import until

pytestmark = pytest.mark.integration

SPEC = {"name": "a", "program": "builtin:gpt", "nodes": 1, "batch_size": 8, "steps": 10}


def command(data: Path, *flags: str) -> list[str]:
    return [sys.executable, "-I", "-u", "-m", "controller.serve", "--data", str(data),
            "--port", "0", *flags]  # fmt: skip


@contextlib.contextmanager
def serving(
    data: Path, *flags: str, config: Path | None = None
) -> Iterator[tuple[subprocess.Popen[bytes], str]]:
    """The process and its URL; the CLI is told in ``config``, else in a folder of its own."""
    environ = {"VARUNA_CONFIG_DIR": str(config or data / "config"), "PATH": "/usr/bin:/bin"}
    with subprocess.Popen(command(data, *flags), env=environ, stdout=subprocess.DEVNULL) as process:
        where = data / "controller.json"
        try:
            until(
                lambda: where.exists() and json.loads(where.read_text())["pid"] == process.pid, 20
            )
            yield process, json.loads(where.read_text())["url"]
        finally:
            process.kill()


def client(data: Path, url: str, trusted: ssl.SSLContext | bool = True) -> httpx2.Client:
    headers = {"Authorization": f"Bearer {(data / 'admin.token').read_text().strip()}"}
    return httpx2.Client(base_url=url, headers=headers, verify=trusted)


def test_it_says_where_it_is_and_ends_when_asked(tmp_path: Path) -> None:
    with serving(tmp_path) as (process, url):
        current = json.loads((tmp_path / "config" / "current.json").read_text())
        assert current == {"url": url, "token_file": str(tmp_path / "admin.token")}
        with client(tmp_path, url) as user:
            assert user.get("/readyz").json() == {"ready": True, "reasons": []}
            with user.stream("GET", "/api/v1/stream") as stream:
                assert next(stream.iter_lines()) == "event: hello"
                began = time.monotonic()
                process.send_signal(signal.SIGTERM)
                assert process.wait(5) == 0
                assert time.monotonic() - began < 2.5


def test_one_that_ends_sends_the_cli_back_to_the_one_before(tmp_path: Path) -> None:
    config = tmp_path / "config"

    def told() -> str:
        return str(json.loads((config / "current.json").read_text())["url"])

    with serving(tmp_path / "first", config=config) as (_, first):
        with serving(tmp_path / "second", config=config) as (process, second):
            assert told() == second
            process.send_signal(signal.SIGTERM)
            assert process.wait(10) == 0
        assert told() == first


def test_a_folder_has_one_controller(tmp_path: Path) -> None:
    with serving(tmp_path):
        second = subprocess.run(
            command(tmp_path), check=False, capture_output=True, text=True, timeout=30
        )
        assert second.returncode == 1
        assert "Another controller runs" in second.stderr


def test_another_host_is_refused_without_tls(tmp_path: Path) -> None:
    refused = subprocess.run(
        command(tmp_path, "--host", "0.0.0.0"),
        check=False, capture_output=True, text=True, timeout=30,
    )  # fmt: skip
    assert refused.returncode == 2
    assert "not loopback" in refused.stderr


def test_a_taken_port_is_a_sentence(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = str(taken.getsockname()[1])
        refused = subprocess.run(
            [*command(tmp_path), "--port", port],
            check=False, capture_output=True, text=True, timeout=30,
        )  # fmt: skip
    assert refused.returncode == 1
    assert f"Cannot listen on 127.0.0.1 port {port}: Address already in use." in refused.stderr
    assert "Traceback" not in refused.stderr


def test_a_kill_loses_no_job_and_no_token(tmp_path: Path) -> None:
    for life in range(3):
        with serving(tmp_path) as (process, url), client(tmp_path, url) as user:
            known = {job["name"] for job in user.get("/api/v1/jobs").json()["items"]}
            assert known == {f"job-{number}" for number in range(life)}
            spec = {**SPEC, "name": f"job-{life}"}
            assert user.post("/api/v1/jobs", json={"spec": spec}).status_code == 201
            process.send_signal(signal.SIGKILL)
            process.wait(5)


def test_it_speaks_tls(tmp_path: Path) -> None:
    certificate, key = self_signed(tmp_path)
    flags = ("--tls-cert", str(certificate), "--tls-key", str(key))
    with serving(tmp_path, *flags) as (_, url):
        assert url.startswith("https://127.0.0.1:")
        trusted = ssl.create_default_context(cafile=str(certificate))
        with client(tmp_path, url, trusted) as user:
            assert user.get("/version").status_code == 200


def self_signed(folder: Path) -> tuple[Path, Path]:
    key = ec.generate_private_key(ec.SECP256R1())
    name = x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, "controller")])
    now = datetime.datetime.now(datetime.UTC)
    certificate = (
        x509.CertificateBuilder()
        .subject_name(name).issuer_name(name).public_key(key.public_key())
        .serial_number(1).not_valid_before(now - datetime.timedelta(days=1))
        .not_valid_after(now + datetime.timedelta(days=1))
        .add_extension(
            x509.SubjectAlternativeName([x509.IPAddress(IPv4Address("127.0.0.1"))]), critical=False
        )
        .add_extension(x509.BasicConstraints(ca=True, path_length=None), critical=True)
        .sign(key, hashes.SHA256())
    )  # fmt: skip
    paths = folder / "cert.pem", folder / "key.pem"
    paths[0].write_bytes(certificate.public_bytes(serialization.Encoding.PEM))
    paths[1].write_bytes(
        key.private_bytes(
            serialization.Encoding.PEM,
            serialization.PrivateFormat.PKCS8,
            serialization.NoEncryption(),
        )
    )
    return paths
