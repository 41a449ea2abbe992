"""What to do now, given what runs here and what was ordered. PURE.

Nothing is started before everything older of its job is gone from this node; each order is carried
out once; a start or a look of an older generation than the newest known one is void; what is passed
on to trainers needs one that is alive; who trains needs not get ready for a seat. The node asks
again whenever an order has come or a trainer is gone, and carries out what is answered.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from agent.wire import (
    Connect,
    ForwardOrder,
    Look,
    OrderBody,
    Passed,
    Prepare,
    Release,
    SaveLayers,
    Start,
    Stop,
)


@dataclass(frozen=True)
class Runner:
    """A trainer that is being prepared or is alive on this node."""

    job: str
    generation: int
    rank: int
    is_ending: bool = False
    """It was killed and is not gone yet."""


@dataclass(frozen=True)
class Kill:
    """End this trainer: SIGKILL, it holds nothing."""

    runner: Runner


@dataclass(frozen=True)
class CarryOut:
    """Do what the order says, now, once, and answer it."""

    number: int
    body: OrderBody


@dataclass(frozen=True)
class Answer:
    """Say that the order is done (``error`` None) or why it never will be."""

    number: int
    error: str | None = None


Action = Kill | CarryOut | Answer


@dataclass(frozen=True)
class Standing:
    """What was ordered in this incarnation."""

    open: Mapping[int, OrderBody] = field(default_factory=dict)
    """By number; nothing was begun of it."""
    settled: frozenset[int] = frozenset()
    """Carried out or answered: never again."""
    newest: Mapping[str, int] = field(default_factory=dict)
    """Per job, the newest generation that is known to be meant."""

    def taking(self, orders: Mapping[int, OrderBody]) -> "Standing":
        """With ``orders`` come in, again or for the first time."""
        new = {number: body for number, body in orders.items() if number not in self.settled}
        newest = dict(self.newest)
        for body in new.values():
            job = _job(body)
            newest[job] = max(newest.get(job, 0), _meant(body))
        return Standing({**self.open, **new}, self.settled, newest)

    def settling(self, number: int) -> "Standing":
        """With order ``number`` out of the way."""
        still = {n: body for n, body in self.open.items() if n != number}
        return Standing(still, self.settled | {number}, self.newest)


def decide(standing: Standing, runners: Iterable[Runner]) -> tuple[Action, ...]:
    """What can be done at once; what must wait for a death is answered by a later call."""
    runners = tuple(runners)
    kills: dict[Runner, Kill] = {}
    answers: list[Action] = []
    here = {(r.job, r.generation, r.rank) for r in runners}

    def gone(job: str, up_to: int) -> bool:
        older = [r for r in runners if r.job == job and r.generation <= up_to]
        kills.update({runner: Kill(runner) for runner in older if not runner.is_ending})
        return not older

    def trains() -> bool:
        return len(here) > len(runners) or any(not (r.is_ending or r in kills) for r in runners)

    for number, body in sorted(standing.open.items()):
        newest = standing.newest[_job(body)]
        match body:
            case Start() if body.spec.generation < newest:
                answers.append(_void(number, body.spec.generation, newest))
            case Look() | Connect() if body.generation < newest:
                answers.append(_void(number, body.generation, newest))
            case Start() if _place(body) in here:
                answers.append(Answer(number))
            case Start():
                if gone(body.spec.job, body.spec.generation - 1):
                    here.add(_place(body))
                    answers.append(CarryOut(number, body))
            case Stop():
                if gone(body.job, body.up_to_generation):
                    answers.append(Answer(number))
            case Release():
                if gone(body.job, body.generation):
                    answers.append(CarryOut(number, body))
            case Prepare() if body.generation < newest or trains():
                answers.append(Answer(number))
            case Prepare() if runners:
                pass
            case _ if isinstance(body, Passed) and not any(is_for(body, r) for r in runners):
                answers.append(Answer(number, "the trainer it is for does not run here"))
            case _:
                answers.append(CarryOut(number, body))
    return (*kills.values(), *answers)


def is_for(body: Passed, runner: Runner) -> bool:
    """Whether ``body`` is to be passed on to ``runner``."""
    meant = (body.job, body.generation) == (runner.job, runner.generation)
    if isinstance(body, ForwardOrder | SaveLayers):
        meant = meant and body.rank == runner.rank
    return meant and not runner.is_ending


def _job(body: OrderBody) -> str:
    return body.spec.job if isinstance(body, Start) else body.job


def _meant(body: OrderBody) -> int:
    """The generation that is current when such an order is given, as far as it tells.

    What is passed on to trainers and a deletion are meant for their own generation even when a
    newer one is planned.
    """
    match body:
        case Start():
            return body.spec.generation
        case Look() | Connect() | Prepare():
            return body.generation
        case Stop():
            return body.up_to_generation + 1
        case Release():
            return body.generation + 1
    return 0


def _void(number: int, generation: int, newest: int) -> Answer:
    return Answer(number, f"void: generation {generation} is older than {newest}")


def _place(start: Start) -> tuple[str, int, int]:
    return start.spec.job, start.spec.generation, start.spec.rank
