"""Who may speak: tokens by their SHA-256, with a role. The plain token is shown once, kept nowhere.

All are in memory too (there are few, and every request asks); the table is the truth.
"""

import hashlib
import secrets
from dataclasses import dataclass
from enum import StrEnum

import sqlalchemy as sa

from controller.store.engine import Store
from controller.store.tables import tokens


class Role(StrEnum):
    """What a token is good for. Viewer < user < admin; an agent is none of them."""

    VIEWER = "viewer"
    USER = "user"
    ADMIN = "admin"
    AGENT = "agent"

    def may(self, wanted: "Role") -> bool:
        """Whether this role may do what ``wanted`` is asked for."""
        if Role.AGENT in (self, wanted):
            return self is wanted
        order = [Role.VIEWER, Role.USER, Role.ADMIN]
        return order.index(self) >= order.index(wanted)


@dataclass(frozen=True)
class Token:
    """A token as it is stored."""

    role: Role
    label: str
    expires_at: float | None


class Tokens:
    """The known tokens of ``store``."""

    def __init__(self, store: Store) -> None:
        self._store = store
        with store.read() as connection:
            rows = connection.execute(sa.select(tokens)).all()
        self._known = {row.hash: Token(Role(row.role), row.label, row.expires_at) for row in rows}

    def check(self, given: str, now: float) -> Token | None:
        """The token behind ``given``, if it is one and not expired.

        Looked up by its hash, so the time taken tells nothing of the token.
        """
        token = self._known.get(_hash(given))
        if token is None or (token.expires_at is not None and token.expires_at <= now):
            return None
        return token

    def create(self, role: Role, label: str, now: float, ttl: float | None = None) -> str:
        """A new token, durable; ``ttl`` in seconds."""
        plain = f"vrn_{role}_{secrets.token_urlsafe(32)}"
        self.admit(plain, Token(role, label, now + ttl if ttl else None), now)
        return plain

    def admit(self, plain: str, token: Token, now: float) -> None:
        """Make ``plain`` known (again)."""
        row = {"hash": _hash(plain), "role": token.role.value, "label": token.label,
               "created_at": now, "expires_at": token.expires_at}  # fmt: skip

        def write(connection: sa.Connection) -> None:
            connection.execute(tokens.delete().where(tokens.c.hash == row["hash"]))
            connection.execute(tokens.insert().values(row))

        self._store.write(write).result()
        self._known[_hash(plain)] = token

    def revoke(self, plain: str) -> None:
        """Forget it; unknown ones too."""

        def write(connection: sa.Connection) -> None:
            connection.execute(tokens.delete().where(tokens.c.hash == _hash(plain)))

        self._store.write(write).result()
        self._known.pop(_hash(plain), None)


def _hash(plain: str) -> str:
    return hashlib.sha256(plain.encode("utf-8", "replace")).hexdigest()
