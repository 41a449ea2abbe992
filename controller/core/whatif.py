"""What would a job do on so many nodes? The planner's table, without a job. PURE."""

import hashlib
import json
from collections.abc import Iterable
from dataclasses import dataclass

from controller.core.assign import depths_of
from controller.core.jobspec import JobSpec
from controller.planner.choose import Choice, NoPlan, choose
from controller.planner.problem import Problem
from controller.planner.shapes import auto_micro_batch
from trainer.contract.costs import LayerCosts


@dataclass(frozen=True)
class Kind:
    """Of node."""

    devices: int = 1
    device_memory_bytes: int = 0
    """0: unknown, not checked."""
    price_per_hour: float | None = None
    """USD."""


@dataclass(frozen=True)
class Row:
    """What so many nodes get."""

    nodes: int
    found: Choice | NoPlan
    examples_per_second: float | None
    price_per_million: float | None
    """USD for a million examples; all nodes are paid, spare ones too."""


def program_key(spec: JobSpec) -> str:
    """What costs hang on, but for the device: the code, its arguments, the precision."""
    code = spec.bundle or f"{spec.workdir}/{spec.program}"
    known = json.dumps([code, spec.program, spec.args, spec.precision], sort_keys=True)
    return hashlib.sha256(known.encode()).hexdigest()[:16]


def problem_for(spec: JobSpec, costs: LayerCosts, kind: Kind) -> Problem:
    """What a plan for ``spec`` has to solve on nodes of ``kind``."""
    wanted = spec.plan.micro_batch
    if wanted == "auto":
        wanted = auto_micro_batch(costs, spec.batch_size, spec.nodes.min, spec.nodes.max)
    return Problem(
        costs=costs,
        batch_size=spec.batch_size,
        micro_batch=wanted,
        depths=depths_of(spec),
        schedule=spec.plan.schedule,
        device_memory_bytes=kind.device_memory_bytes,
        devices_per_node=kind.devices,
    )


def what_if(spec: JobSpec, costs: LayerCosts, nodes: Iterable[int], kind: Kind) -> list[Row]:
    """One row for each number of nodes."""
    problem = problem_for(spec, costs, kind)
    return [_row(spec, choose(problem, count * kind.devices), count, kind) for count in nodes]


def _row(spec: JobSpec, found: Choice | NoPlan, nodes: int, kind: Kind) -> Row:
    if isinstance(found, NoPlan) or not found.seconds:
        return Row(nodes, found, None, None)
    rate = spec.batch_size / found.seconds
    hourly = kind.price_per_hour
    price = None if hourly is None else nodes * hourly / 3600 / rate * 1e6
    return Row(nodes, found, rate, price)
