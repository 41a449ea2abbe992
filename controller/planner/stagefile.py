"""Stage times given by hand or from another system's log, as ``varuna simulate-step`` reads them.

    {"stages": [{"forward": 0.04, "recompute": 0.04, "backward": 0.09}, …],
     "send_same_node_s": 0.005, "send_cross_node_s": 0.04, "devices_per_node": 4,
     "allreduce_s": 8.3, "jitter": {"compute_cv": 0.1, "link": 0.5}}

All in seconds, for one micro-batch. What else stands there (a note, a source) is left alone.
"""

from typing import Annotated

from pydantic import BaseModel, ConfigDict, Field

from controller.planner.pipeline import Hop, Jitter, Pipeline, StageTimes

Seconds = Annotated[float, Field(ge=0, le=1e9, allow_inf_nan=False)]


class _Part(BaseModel):
    model_config = ConfigDict(frozen=True, extra="ignore")


class Stage(_Part):
    """One stage; the last one never recomputes and may leave it out."""

    forward: Seconds
    recompute: Seconds | None = None
    backward: Seconds


class Scatter(_Part):
    """``compute_cv``: of single tasks. ``link``: the mean of an exponential delay, as a part of a
    message's time.
    """

    compute_cv: Seconds = 0.0
    link: Seconds = 0.0


class StageFile(_Part):
    """P stages with what lies between them."""

    stages: tuple[Stage, ...] = Field(min_length=1)
    send_same_node_s: Seconds = 0.0
    send_cross_node_s: Seconds = 0.0
    devices_per_node: int = Field(default=1, ge=1)
    allreduce_s: Seconds | tuple[Seconds, ...] = 0.0
    """Of each stage's gradients; one number: the same for all."""
    jitter: Scatter = Scatter()

    def pipeline(self) -> Pipeline:
        """Stage i and i+1 share a node unless a multiple of ``devices_per_node`` lies between.

        Raises ValueError when the list of all-reduces is not one per stage.
        """
        depth = len(self.stages)
        reduce = self.allreduce_s
        if isinstance(reduce, float):
            reduce = (reduce,) * depth
        if len(reduce) != depth:
            raise ValueError(f"{len(reduce)} allreduce_s for {depth} stages")
        return Pipeline(
            stages=tuple(
                StageTimes(s.forward, _recompute(s), s.backward, is_last=at == depth - 1)
                for at, s in enumerate(self.stages)
            ),
            hops=tuple(
                Hop(self.send_same_node_s if at % self.devices_per_node else self.send_cross_node_s)
                for at in range(1, depth)
            ),
            reduce=reduce,
        )

    def scatter(self) -> Jitter:
        """How single times vary."""
        return Jitter.of(self.jitter.compute_cv, self.jitter.link)


def _recompute(stage: Stage) -> float:
    return stage.forward if stage.recompute is None else stage.recompute
