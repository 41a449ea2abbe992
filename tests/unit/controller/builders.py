"""Small builders, one per noun, so that a test says only what it is about."""

from typing import Any

from controller.core.jobspec import JobSpec
from controller.core.states import JobState
from controller.core.world import Job
from trainer.contract.costs import LayerCost, LayerCosts


def costs_of(
    layers: int,
    forward: float = 0.004,
    backward: float = 0.008,
    parameter_bytes: int = 800_000,
    output_bytes: int = 130_000,
    micro_batch: int = 4,
) -> LayerCosts:
    layer = LayerCost(
        name="Block",
        forward_seconds=forward,
        backward_seconds=backward,
        parameter_bytes=parameter_bytes,
        output_bytes=output_bytes,
    )
    return LayerCosts(micro_batch=micro_batch, layers=(layer,) * layers)


def job(
    letter: str = "a",
    *,
    nodes: str = "2..8",
    steps: int = 100,
    submitted_at: float = 0.0,
    costs: LayerCosts | None = None,
    **spec: Any,
) -> Job:
    """A job that has just been submitted."""
    fields = {"program": "builtin:gpt", "batch_size": 32, "checkpoint": {"dir": "/ckpt"}, **spec}
    return Job(
        id=f"job_{letter}",
        name=f"job-{letter}",
        spec=JobSpec.model_validate({"nodes": nodes, "steps": steps, **fields}),
        state=JobState.WAITING,
        reason=None,
        message="",
        submitted_at=submitted_at,
        cancel_wanted=False,
        costs=costs,
        current=None,
        past=(),
        checkpoints=(),
        waiting_since=1000.0,
    )
