"""Which answers are worth another try, and how long the pauses are."""

import asyncio
from collections.abc import Callable

import httpx2
import pytest

from agent import wire
from agent.client import AwayError, Client, ControllerError, RefusedError, UnknownError

BEAT = wire.Beat(incarnation="incarnation")


def client(answer: Callable[[httpx2.Request], httpx2.Response], **more: object) -> Client:
    transport = httpx2.MockTransport(answer)
    return Client("http://controller", "vrn_agent_x", "vm-1", transport=transport, **more)  # type: ignore[arg-type]


def problem(status: int, type_: str = "about:blank") -> httpx2.Response:
    return httpx2.Response(status, json={"type": type_, "title": "No", "detail": "Because."})


def beaten(answer: httpx2.Response) -> wire.BeatAnswer:
    return asyncio.run(client(lambda _: answer).beat(BEAT))


@pytest.mark.parametrize(
    ("answer", "error"),
    [
        (problem(500), AwayError),
        (problem(503), AwayError),
        (problem(429), AwayError),
        (httpx2.Response(302, headers={"Location": "/login"}), AwayError),
        (httpx2.Response(200, text="<html>a proxy</html>"), AwayError),
        (problem(409, "https://varuna/problems/unknown-incarnation"), UnknownError),
        (problem(409), RefusedError),
        (problem(401), RefusedError),
        (httpx2.Response(404, text="nothing"), RefusedError),
    ],
)
def test_an_answer_that_is_none_says_what_to_do_next(
    answer: httpx2.Response, error: type[ControllerError]
) -> None:
    with pytest.raises(ControllerError) as raised:
        beaten(answer)
    assert type(raised.value) is error


def test_a_refusal_carries_the_controllers_own_sentence() -> None:
    with pytest.raises(RefusedError, match=r"422: Because\."):
        beaten(problem(422))


def test_every_request_carries_the_token_and_the_nodes_name() -> None:
    def answer(request: httpx2.Request) -> httpx2.Response:
        assert request.headers["Authorization"] == "Bearer vrn_agent_x"
        assert request.url.path == "/api/v1/agents/vm-1/beat"
        return httpx2.Response(200, json={"reported": 7})

    assert asyncio.run(client(answer).beat(BEAT)) == wire.BeatAnswer(reported=7)


def test_a_controller_that_is_away_is_tried_at_least_once_a_second_until_it_is_there() -> None:
    pauses: list[float] = []

    async def sleep(seconds: float) -> None:
        pauses.append(seconds)

    def answer(_: httpx2.Request) -> httpx2.Response:
        if len(pauses) < 50:
            raise httpx2.ConnectError("refused")
        return httpx2.Response(200, json={"reported": 0})

    async def story() -> wire.BeatAnswer:
        away = client(answer, sleep=sleep)
        return await away.patiently(lambda: away.beat(BEAT))

    assert asyncio.run(story()).reported == 0
    assert pauses[0] <= 0.1 and pauses == sorted(pauses) and max(pauses) == 1.0


def test_a_refusal_is_not_tried_again() -> None:
    asked = []

    def answer(request: httpx2.Request) -> httpx2.Response:
        asked.append(request)
        return problem(403)

    async def story() -> None:
        refused = client(answer)
        await refused.patiently(lambda: refused.beat(BEAT))

    with pytest.raises(RefusedError):
        asyncio.run(story())
    assert len(asked) == 1
