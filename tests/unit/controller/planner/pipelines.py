"""Pipelines to play."""

import json
from pathlib import Path

from controller.planner.pipeline import Hop, Pipeline, StageTimes
from controller.planner.stagefile import StageFile

DATA = Path(__file__).parent / "data"


def even(stages: int, send: float = 0.0, busy: float = 0.0, reduce: float = 0.0) -> Pipeline:
    """F = R = 1, B = 2."""
    times = (StageTimes(1, 1, 2, is_last=stage == stages - 1) for stage in range(stages))
    hops = (Hop(send, busy),) * (stages - 1)
    return Pipeline(tuple(times), hops, (reduce,) * stages)


def authors(run: str = "43") -> StageFile:
    """Stage times of the 20.5B run on 294 GPUs; 5 ms a message within a VM, 40 ms across."""
    logged = json.loads((DATA / "gpt2-20b-294gpu.json").read_text())["runs"][run]
    links = {"send_same_node_s": 0.005, "send_cross_node_s": 0.04, "devices_per_node": 4}
    return StageFile.model_validate({"stages": logged["stages"], **links})
