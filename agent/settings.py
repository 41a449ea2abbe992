"""Every knob of the agent: flags over ``VARUNA_AGENT_*`` over defaults, read once, frozen."""

import re
import socket
from ipaddress import ip_address
from pathlib import Path
from typing import Literal, Self
from urllib.parse import urlsplit

from pydantic import Field, field_validator, model_validator
from pydantic_settings import BaseSettings, SettingsConfigDict

from agent.notices import source
from agent.wire import NODE_NAME


def default_name() -> str:
    """The host's name, made fit for a node's."""
    plain = re.sub(r"[^a-z0-9.-]+", "-", socket.gethostname().lower())[:63]
    return plain.strip(".-") or "node"


class Settings(BaseSettings):
    """What one daemon is told by its operator."""

    model_config = SettingsConfigDict(env_prefix="VARUNA_AGENT_", frozen=True, extra="forbid")

    controller: str
    """``https://host:port``."""
    token_file: Path
    """Holds the token of role agent, nothing else."""
    ca_file: Path | None = None
    """The authority that signed the controller's certificate, when the system does not know it."""
    insecure_http: bool = False
    """Allow ``http://`` to another machine: the token then travels in the clear."""
    name: str = Field(default_factory=default_name, pattern=NODE_NAME)
    state_dir: Path | None = None
    """Logs, bundles, the lock. None: ``~/.local/state/varuna/<name>``."""
    zygote_fd: int | None = None
    """Adopt the zygote at the other end of this inherited socket; None: start one."""
    devices: Literal["auto", "cpu", "cuda"] = "auto"
    threads: int = Field(default=1, ge=1)
    """Of torch, in each trainer."""
    notices: str = "none"
    """Who says that this machine is about to go: azure, aws, gcp, file:PATH or none."""
    notices_url: str | None = None
    """Another address of the cloud's metadata service."""
    zone: str | None = Field(default=None, min_length=1, max_length=64)
    """Where this machine is; replicas are kept apart by it. None: what the cloud that ``notices``
    names says.
    """

    @field_validator("controller")
    @classmethod
    def _is_a_url(cls, url: str) -> str:
        parts = urlsplit(url)
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise ValueError(f"must be an http(s) URL, not {url!r}")
        return url.rstrip("/")

    @field_validator("notices")
    @classmethod
    def _is_a_source(cls, where: str) -> str:
        source(where)
        return where

    @model_validator(mode="after")
    def _keeps_the_token_safe(self) -> Self:
        parts = urlsplit(self.controller)
        if parts.scheme == "http" and not self.insecure_http and not _is_loopback(parts.hostname):
            raise ValueError(
                "the controller is on another machine and its URL is http: use https, "
                "or --insecure-http on a network that you trust"
            )
        return self

    @property
    def address(self) -> tuple[str, int]:
        """Where the controller listens."""
        parts = urlsplit(self.controller)
        assert parts.hostname, "a URL was checked to have a host"
        return parts.hostname, parts.port or (443 if parts.scheme == "https" else 80)

    @property
    def folder(self) -> Path:
        """Where this agent keeps things."""
        return self.state_dir or Path.home() / ".local" / "state" / "varuna" / self.name


def _is_loopback(host: str | None) -> bool:
    try:
        return ip_address(host or "").is_loopback
    except ValueError:
        return host == "localhost"
