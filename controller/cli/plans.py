"""The verbs that look ahead: simulate-step. They need no controller."""

import json
import sys
from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer

from controller.cli import output
from controller.cli.client import USAGE, CliError
from controller.cli.options import AsJson
from controller.planner.costsfile import read_costs
from controller.planner.cutting import Model
from controller.planner.gantt import rows
from controller.planner.pipeline import Jitter, Pipeline
from controller.planner.simulate import Run, play
from controller.planner.spots import spots
from controller.planner.stagefile import StageFile
from trainer.contract.costs import LayerCosts
from trainer.contract.spec import Shape

CostsFile = Annotated[
    Path, typer.Option(help="Measured costs (of `varuna profile`), or times a stage, as JSON.")
]
_GANTT_WIDTH = 100


class PlayedSchedule(StrEnum):
    """``controller.planner.pipeline.Played`` as an option."""

    VARUNA = "varuna"
    STATIC = "varuna-static"
    ONE_F_ONE_B = "1f1b"
    GPIPE = "gpipe"


def simulate_step(
    costs: CostsFile,
    shape: Annotated[str, typer.Option(metavar="PxD", help="Stages x replicas, as 4x2.")],
    micro_batches: Annotated[int, typer.Option(min=1, help="N, of one replica.")],
    schedule: Annotated[
        PlayedSchedule, typer.Option(help="varuna-static: the order without deviation.")
    ] = PlayedSchedule.VARUNA,
    micro_batch: Annotated[
        int | None, typer.Option(min=1, help="Examples; else as measured. Of layers only.")
    ] = None,
    devices_per_node: Annotated[int, typer.Option(min=1, help="Of layers only.")] = 1,
    seed: Annotated[int, typer.Option(help="Of the jitter.")] = 0,
    json_: AsJson = False,
) -> None:
    """Play one mini-batch through a pipeline, without a cluster."""
    known, form = _read(costs), read_shape(shape)
    if isinstance(known, StageFile):
        pipeline, jitter = _of_stages(known, form, costs), known.scatter()
    else:
        sized = form.model_copy(update={"micro_batch": micro_batch or known.micro_batch})
        pipeline, jitter = _of_layers(known, sized, devices_per_node)
    played = play(
        pipeline, schedule.value, micro_batches, jitter=jitter, seed=seed, watched=not json_
    )
    if json_:
        output.say(json.dumps(_as_json(played)))
    else:
        _show(played)


def read_shape(text: str) -> Shape:
    """``4x2``; CliError otherwise."""
    try:
        depth, replicas = map(int, text.lower().split("x"))
        return Shape(depth=depth, replicas=replicas, micro_batch=1)
    except ValueError:
        raise CliError(f"A shape is PxD, as 4x2, not {text!r}.", USAGE) from None


def _read(path: Path) -> LayerCosts | StageFile:
    try:
        return read_costs(sys.stdin.read() if str(path) == "-" else path.read_text())
    except OSError as error:
        raise CliError(f"Cannot read {path}: {error.strerror}.", USAGE) from None
    except ValueError as error:
        raise CliError(f"Cannot use {path}: {error}.", USAGE) from None


def _of_stages(file: StageFile, shape: Shape, path: Path) -> Pipeline:
    if shape.depth != len(file.stages):
        raise CliError(f"{path} has {len(file.stages)} stages, --shape {shape.depth}.", USAGE)
    try:
        return file.pipeline()
    except ValueError as error:
        raise CliError(f"Cannot use {path}: {error}.", USAGE) from None


def _of_layers(costs: LayerCosts, shape: Shape, per_node: int) -> tuple[Pipeline, Jitter]:
    if shape.depth > len(costs.layers):
        raise CliError(f"{len(costs.layers)} layers make no {shape.depth} stages.", USAGE)
    cutting = Model(costs, shape.micro_batch).cutting(shape.depth)
    spot = spots(shape.depth, shape.replicas, per_node)[-1]
    pipeline = cutting.pipeline(costs, shape.replicas, spot.within_node)
    return pipeline, Jitter.measured(costs.jitter)


def _as_json(played: Run) -> dict[str, object]:
    return {
        "pipeline_s": played.pipeline_seconds,
        "minibatch_s": played.step_seconds,
        "bubble": played.bubble,
        "in_flight_peak": played.in_flight_peak,
    }


def _show(played: Run) -> None:
    output.say(f"pipeline   {played.pipeline_seconds:.4g} s")
    output.say(f"minibatch  {played.step_seconds:.4g} s, gradients summed and applied")
    output.say(f"bubble     {played.bubble:.1%} of the pipeline's time a stage does nothing")
    output.say("")
    for stage, row in enumerate(rows(played.spans, _GANTT_WIDTH)):
        output.say(f"stage {stage:<3} {row}  {played.in_flight_peak[stage]} in flight")
