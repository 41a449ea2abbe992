"""``/metrics`` for Prometheus: read from the store when it is asked for, kept nowhere.

A registry of its own for each answer, filled with what the rows say now; counters are counts of
rows, so a controller that was started again goes on where it stood. Behind a token, as all is.
"""

from collections.abc import Iterable
from typing import Any

import sqlalchemy as sa
from fastapi import APIRouter, Response
from prometheus_client import CollectorRegistry
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.exposition import CONTENT_TYPE_PLAIN_0_0_4, generate_latest
from prometheus_client.registry import Collector

from controller.api.deps import Here
from controller.core.states import JobState, NodeState
from controller.store import totals

router = APIRouter(tags=["metrics"])


@router.get("/metrics")
def metrics(here: Here) -> Response:
    """Jobs, nodes, recoveries, orders, as Prometheus' text."""
    with here.store.read() as connection:
        told = exposition(connection, here.clock.now(), here.dropped_reports)
    return Response(told, media_type=CONTENT_TYPE_PLAIN_0_0_4)


def exposition(connection: sa.Connection, now: float, dropped: int) -> bytes:
    """The text; ``dropped`` reports since the start."""
    registry = CollectorRegistry()
    registry.register(_Made(list(_families(connection, now, dropped))))
    return generate_latest(registry)


class _Made(Collector):
    """What was counted already."""

    def __init__(self, made: list[Metric]) -> None:
        self._made = made

    def collect(self) -> Iterable[Metric]:
        return self._made


def _families(connection: sa.Connection, now: float, dropped: int) -> Iterable[Metric]:
    live = totals.of_jobs(connection)
    yield _gauge("varuna_job_state", "1 for the state that a job is in.", ("state",), (
        ((job.id, job.name, state.value), float(job.state == state))
        for job in live for state in JobState
    ))  # fmt: skip
    yield _gauge("varuna_job_step", "The last committed step.", (), (
        ((job.id, job.name), float(job.step)) for job in live
    ))  # fmt: skip
    yield _gauge("varuna_job_goodput_ratio", "Seconds in kept steps by seconds since the first.",
                 (), (((job.id, job.name), job.goodput(now)) for job in live if job.started_at)
                 )  # fmt: skip
    yield _counter("varuna_recoveries", "Stops that a job has come back from.", (), (
        ((job.id, job.name), float(job.recoveries)) for job in live
    ))  # fmt: skip
    yield _counter("varuna_lost_steps", "Steps that were done again.", (), (
        ((job.id, job.name), float(job.lost_steps)) for job in live
    ))  # fmt: skip
    yield _counter("varuna_recovery_seconds", "Where recoveries spent their time.", ("phase",), (
        ((job.id, job.name, phase), seconds)
        for job in live for phase, seconds in job.phases.items()
    ))  # fmt: skip
    nodes = GaugeMetricFamily("varuna_nodes", "Nodes by state.", labels=("state",))
    counted = totals.of_nodes(connection)
    for state in NodeState:
        nodes.add_metric((state.value,), counted.get(state.value, 0))
    yield nodes
    orders = GaugeMetricFamily("varuna_standing_orders", "Not yet carried out.", labels=("kind",))
    for kind, number in totals.of_orders(connection).items():
        orders.add_metric((kind,), number)
    yield orders
    yield CounterMetricFamily(
        "varuna_dropped_reports",
        "Of ended generations or seats that the reporter does not hold, since the start.",
        value=dropped,
    )


_OF_A_JOB = ("job", "name")


def _gauge(name: str, what: str, labels: tuple[str, ...], samples: Any) -> GaugeMetricFamily:
    family = GaugeMetricFamily(name, what, labels=(*_OF_A_JOB, *labels))
    for values, value in samples:
        family.add_metric(values, value)
    return family


def _counter(name: str, what: str, labels: tuple[str, ...], samples: Any) -> CounterMetricFamily:
    family = CounterMetricFamily(name, what, labels=(*_OF_A_JOB, *labels))
    for values, value in samples:
        family.add_metric(values, value)
    return family
