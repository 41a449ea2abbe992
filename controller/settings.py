"""Every knob of the controller, read once (``VARUNA_*``, or given by the CLI), frozen, handed down.

No other module reads the environment.
"""

import os
from pathlib import Path

from pydantic import Field, model_validator
from pydantic_settings import BaseSettings, SettingsConfigDict

from controller.core.world import Bounds, Rules

MUTE_TIMES = 10
"""An agent whose job goes on may be silent for so many times ``lost_after``."""
LOOPBACK = ("127.0.0.1", "::1", "localhost")


def default_data_dir() -> Path:
    """``$XDG_DATA_HOME/varuna``, or ``~/.local/share/varuna``."""
    home = os.environ.get("XDG_DATA_HOME") or Path.home() / ".local" / "share"
    return Path(home) / "varuna"


def default_config_dir() -> Path:
    """``$XDG_CONFIG_HOME/varuna``, or ``~/.config/varuna``: where the CLI finds the controller."""
    home = os.environ.get("XDG_CONFIG_HOME") or Path.home() / ".config"
    return Path(home) / "varuna"


class Settings(BaseSettings):
    """The controller's configuration. ``Settings()`` reads the environment, once, at the start."""

    model_config = SettingsConfigDict(env_prefix="VARUNA_", frozen=True, extra="forbid")

    host: str = "127.0.0.1"
    port: int = Field(default=8430, ge=0, le=65535)
    """0: any free port; ``controller.json`` says which."""
    data: Path = Field(default_factory=default_data_dir)
    """The controller's own folder: database, logs, bundles, tokens."""
    config_dir: Path = Field(default_factory=default_config_dir)
    """``current.json`` goes here."""
    database: str | None = None
    """An SQLAlchemy URL; None: ``varuna.db`` in ``data``. ``postgresql+psycopg://…`` works too."""
    tls_cert: Path | None = None
    tls_key: Path | None = None
    insecure_http: bool = False
    """Listen on a host that is not loopback without TLS, knowingly."""

    beat_seconds: float = Field(default=1.0, gt=0)
    lost_after: float = Field(default=5.0, gt=0)
    """Seconds of silence after which a node is lost."""
    suspect_after: float = Field(default=2.0, gt=0)
    coalesce: float = Field(default=0.3, ge=0)
    bounds: Bounds = Bounds()
    """Seconds that each phase of a trainer may take: ``VARUNA_BOUNDS='{"step": 600}'``."""
    look_deadline: float = Field(default=10.0, gt=0)
    slow_lapses: float = Field(default=600.0, gt=0)
    """A node that is spared because it was slow is tried again so many seconds after; twice as long
    each time that it was slow again.
    """
    max_launches_without_progress: int = Field(default=6, ge=1)
    max_offline: float = Field(default=3600.0, gt=0)
    tick: float = Field(default=0.25, gt=0)

    keep_days: float = Field(default=30.0, gt=0)
    """Events, closed orders, parts of deleted checkpoints and gone nodes are forgotten after that,
    launches never; of old steps a sum and a thinner curve stay (:mod:`controller.store.pruning`).
    """
    log_cap_bytes: int = Field(default=64 << 20, ge=1 << 16)
    """Per rank and generation; past it only the tail is kept."""
    bundle_cap_bytes: int = Field(default=100 << 20, ge=1)
    body_cap_bytes: int = Field(default=1 << 20, ge=1 << 10)
    """Of a user's request; agents' reports have their own, larger one."""

    @model_validator(mode="after")
    def _no_bare_http_in_the_open(self) -> "Settings":
        if (self.tls_cert is None) != (self.tls_key is None):
            raise ValueError("give both --tls-cert and --tls-key")
        if self.host not in LOOPBACK and self.tls_cert is None and not self.insecure_http:
            raise ValueError(
                f"{self.host} is not loopback: give --tls-cert and --tls-key,"
                " or say --insecure-http"
            )
        return self

    @property
    def database_url(self) -> str:
        """Where the store is."""
        return self.database or f"sqlite:///{self.data.absolute() / 'varuna.db'}"

    @property
    def scheme(self) -> str:
        """``https`` when a certificate is given."""
        return "https" if self.tls_cert else "http"

    def rules(self) -> Rules:
        """The part that decisions depend on."""
        return Rules(
            lost_after=self.lost_after,
            mute_after=MUTE_TIMES * self.lost_after,
            suspect_after=self.suspect_after,
            coalesce=self.coalesce,
            bounds=self.bounds,
            look_deadline=self.look_deadline,
            slow_lapses=self.slow_lapses,
            max_launches_without_progress=self.max_launches_without_progress,
        )
