"""A cloud's metadata service, as a VM asks it: where it is, which headers it wants, how long it may
take. What is asked for is :mod:`agent.notices`' and :mod:`agent.zone`'s affair.
"""

from collections.abc import Mapping
from types import MappingProxyType
from typing import Literal, TypeVar

import httpx2
from pydantic import BaseModel, ValidationError

METADATA = {
    "azure": "http://169.254.169.254",
    "aws": "http://169.254.169.254",
    "gcp": "http://metadata.google.internal",
}
"""Where each cloud's metadata service answers."""

AZURE_HEADERS: Mapping[str, str] = MappingProxyType({"Metadata": "true"})
AZURE_COMPUTE = "/metadata/instance/compute?api-version=2021-02-01&format=json"
GCP_HEADERS: Mapping[str, str] = MappingProxyType({"Metadata-Flavor": "Google"})

_ANSWER_SECONDS = 5.0
_FIRST_ANSWER_SECONDS = 130.0
"""Azure's very first answer may take two minutes."""
_TOKEN_SECONDS = 21600
_NO_CONNECTION_KEPT = httpx2.Limits(max_keepalive_connections=0)

M = TypeVar("M", bound=BaseModel)


class NoAnswerError(Exception):
    """A source said nothing that can be used; another try may help."""


class Service:
    """A metadata service: on the link, without TLS, never behind a proxy."""

    def __init__(self, url: str, answer_seconds: float | None = None) -> None:
        """``answer_seconds``: for each answer, the first one too."""
        self._url = url.rstrip("/")
        self._seconds = answer_seconds
        self._has_answered = False
        # It must not matter that the connection before is stuck: none is kept.
        self._http = httpx2.AsyncClient(trust_env=False, limits=_NO_CONNECTION_KEPT)

    async def ask(
        self,
        path: str,
        headers: Mapping[str, str],
        *,
        method: Literal["GET", "PUT", "POST"] = "GET",
        body: object = None,
        also: tuple[int, ...] = (),
        hang: float = 0.0,
    ) -> httpx2.Response:
        """An answer of 200 or ``also``; ``hang`` is by how much it may come later.

        Raises NoAnswerError.
        """
        first = _ANSWER_SECONDS if self._has_answered else _FIRST_ANSWER_SECONDS
        timeout = httpx2.Timeout((self._seconds or first) + hang, connect=self._seconds or 2.0)
        try:
            answer = await self._http.request(
                method, self._url + path, headers=headers, json=body, timeout=timeout
            )
        except httpx2.HTTPError as error:
            raise NoAnswerError(f"{self._url}: {error or type(error).__name__}") from error
        self._has_answered = True
        if answer.status_code not in (200, *also):
            raise NoAnswerError(f"{self._url}{path} answers {answer.status_code}")
        return answer


def understood(answer: httpx2.Response, wanted: type[M]) -> M:
    """The answer as ``wanted``. Raises NoAnswerError."""
    try:
        return wanted.model_validate_json(answer.content)
    except ValidationError as error:
        raise NoAnswerError(f"{answer.url} answers what is no {wanted.__name__}") from error


async def aws_token(service: Service) -> str:
    """A session's token, without which IMDSv2 answers nothing. Raises NoAnswerError."""
    lives = {"X-aws-ec2-metadata-token-ttl-seconds": str(_TOKEN_SECONDS)}
    return (await service.ask("/latest/api/token", lives, method="PUT")).text


def aws_headers(token: str) -> dict[str, str]:
    """What carries it."""
    return {"X-aws-ec2-metadata-token": token}
