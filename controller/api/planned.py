"""The planner's answers as views, for REST and for a CLI that has the costs at hand."""

from controller.api import schemas
from controller.core.whatif import Kind, Row, what_if
from controller.planner.choose import Candidate, Choice
from trainer.contract.costs import LayerCosts
from trainer.contract.spec import Shape

MOST_NODES = 1024


def table(asked: schemas.PlansRequest, costs: LayerCosts, origin: str) -> schemas.PlansView:
    """One row for each number of nodes that was asked for. Raises ValueError."""
    bounds = asked.nodes or asked.spec.nodes
    last = bounds.max or bounds.min
    if last > MOST_NODES:
        raise ValueError(f"At most {MOST_NODES:,} nodes can be asked for, not {last:,}")
    kind = Kind(asked.devices_per_node, asked.device_memory_bytes, asked.price_per_node_hour)
    rows = what_if(asked.spec, costs, range(bounds.min, last + 1), kind)
    return schemas.PlansView(costs_from=origin, items=tuple(map(_row, rows)))


def _row(row: Row) -> schemas.PlanView:
    found = row.found
    if not isinstance(found, Choice):
        return schemas.PlanView(
            nodes=row.nodes, shape=None, step_time_seconds=None, examples_per_second=None,
            bubble=None, memory_bytes=None, price_per_million_examples=None, because=found.because,
        )  # fmt: skip
    return schemas.PlanView(
        nodes=row.nodes,
        shape=_shape(found.shape),
        step_time_seconds=found.seconds,
        examples_per_second=row.examples_per_second,
        bubble=found.bubble,
        memory_bytes=max(stage.total for stage in found.stages),
        price_per_million_examples=row.price_per_million,
        stages=tuple(
            schemas.PlannedStageView(
                first_layer=found.cuts[at],
                last_layer=found.cuts[at + 1] - 1,
                in_flight=found.in_flight[at],
                size_bytes=stage.total,
            )
            for at, stage in enumerate(found.stages)
        ),
        runners_up=tuple(map(_runner_up, found.runners_up)),
        because=found.because,
    )


def _runner_up(slower: Candidate) -> schemas.RunnerUpView:
    return schemas.RunnerUpView(
        shape=_shape(slower.shape),
        step_time_seconds=slower.seconds,
        at_least=slower.is_bound,
        because=slower.because,
    )


def _shape(shape: Shape) -> schemas.ShapeView:
    return schemas.ShapeView(
        depth=shape.depth, replicas=shape.replicas, micro_batch=shape.micro_batch
    )
