"""The verbs that play: `simulate` a spot trace, `simulate-step` one mini-batch. No controller."""

import dataclasses
import json
from collections.abc import Mapping
from enum import StrEnum
from pathlib import Path
from typing import Annotated, Any

import typer

from controller import words
from controller.cli.costs import layers, read
from controller.cli.jobs import read_spec
from controller.cli.options import AsJson, DevicesPerNode, Memory, Price, Set, SpecFile
from controller.client import output
from controller.client.rest import USAGE, CliError
from controller.core.jobspec import JobSpec
from controller.core.period import UNMEASURED
from controller.core.whatif import Kind, problem_for
from controller.planner.choose import planner_of
from controller.planner.cutting import Model
from controller.planner.gantt import rows
from controller.planner.pipeline import Jitter, Pipeline
from controller.planner.rates import Paces, Planned, Tabled
from controller.planner.replay import Outcome, Policy, Stops, replay
from controller.planner.simulate import Run, play
from controller.planner.spots import spots
from controller.planner.stagefile import StageFile
from controller.planner.trace import read_trace
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
    known, form = read(costs), read_shape(shape)
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


def simulate(
    context: typer.Context,
    spec_file: SpecFile,
    trace: Annotated[Path, typer.Option(help="CSV: t_seconds,event,node; add or remove.")],
    throughput: Annotated[
        Path | None, typer.Option(help="CSV: devices,samples_per_second, instead of costs.")
    ] = None,
    stages: Annotated[
        int | None, typer.Option(min=1, help="With --throughput: so many, if known.")
    ] = None,
    state: Annotated[
        float | None,
        typer.Option(min=0, max=1e6, metavar="GB", help="With --throughput: weights, optimizer."),
    ] = None,
    costs: Annotated[
        Path | None, typer.Option(help="Of `varuna profile`; else measured here.")
    ] = None,
    devices_per_node: DevicesPerNode = 1,
    memory: Memory = 0.0,
    price: Price = None,
    stop_seconds: Annotated[
        float,
        typer.Option(
            min=0, max=86400, help="Detect, decide and launch, as `bench recovery` measures."
        ),
    ] = 1.6,
    set_: Set = None,
    json_: AsJson = False,
) -> None:
    """Play a spot trace: what a job would get done, how often it would stop, what it would cost."""
    spec = read_spec(spec_file, set_)
    paces, stops = _paces(spec, spec_file, throughput, stages, state, costs, devices_per_node,
                          memory, stop_seconds)  # fmt: skip
    try:
        moments = read_trace(_text(trace))
    except ValueError as error:
        raise CliError(f"Cannot use {trace}: {error}.", USAGE) from None
    played = {
        name: replay(moments, paces, stops, policy) for name, policy in _policies(spec).items()
    }
    answer = {
        "policies": {name: _outcome(one, spec, price) for name, one in played.items()},
        "assumptions": _assumptions(spec, stops, throughput, stages),
    }
    if json_:
        output.say(json.dumps(answer))
    else:
        _show_policies(answer)


def read_shape(text: str) -> Shape:
    """``4x2``; CliError otherwise."""
    try:
        depth, replicas = map(int, text.lower().split("x"))
        return Shape(depth=depth, replicas=replicas, micro_batch=1)
    except ValueError:
        raise CliError(f"A shape is PxD, as 4x2, not {text!r}.", USAGE) from None


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


# --- a trace -------------------------------------------------------------------------------------


def _paces(
    spec: JobSpec,
    spec_file: Path,
    throughput: Path | None,
    stages: int | None,
    state: float | None,
    costs: Path | None,
    per_node: int,
    memory: float,
    stop_seconds: float,
) -> tuple[Paces, Stops]:
    """What so many nodes get done, and what a stop takes."""
    if throughput is not None:
        try:
            tabled = Tabled.read(_text(throughput), spec.batch_size, stages)
        except ValueError as error:
            raise CliError(f"Cannot use {throughput}: {error}.", USAGE) from None
        return tabled, Stops(0.0, 0.0, stop_seconds, (state or 0.0) * 1e9)
    known, _ = layers(costs, spec, spec_file)
    kind = Kind(per_node, round(memory * 1e9))
    num_bytes = sum(one.parameter_bytes for one in known.layers) * (known.state_copies - 1)
    stops = Stops(
        0.0,
        0.0,
        stop_seconds,
        num_bytes,
        known.moving.write_bytes_per_second,
        known.moving.load_bytes_per_second,
    )
    return Planned(planner_of(problem_for(spec, known, kind))), stops


def _policies(spec: JobSpec) -> dict[str, Policy]:
    every = spec.checkpoint.every
    usual = Policy(
        fewest=spec.nodes.min,
        most=float("inf") if spec.nodes.max is None else spec.nodes.max,
        checkpoint_steps=every.steps,
        checkpoint_seconds=UNMEASURED if every.auto else every.seconds,
        min_gain=spec.plan.min_gain,
        settle_seconds=spec.plan.settle,
    )
    return {
        "varuna": usual,
        "checkpoints_only": dataclasses.replace(usual, salvages=False),
        "never_grows": dataclasses.replace(usual, grows=False),
    }


def _outcome(one: Outcome, spec: JobSpec, price: float | None) -> dict[str, object]:
    examples = one.steps * spec.batch_size
    cost = None if price is None else one.node_seconds / 3600 * price
    return {
        "seconds": one.seconds,
        "training_seconds": one.training_seconds,
        "steps": one.steps,
        "samples_per_second": examples / one.seconds if one.seconds else 0.0,
        "goodput": one.goodput,
        "lost_steps": one.lost_steps,
        "losses": one.losses,
        "salvaged": one.salvaged,
        "moves": one.moves,
        "gaps": len(one.gaps),
        "gap_seconds": one.stopped_seconds,
        "longest_gap_seconds": max(one.gaps, default=0.0),
        "waiting_seconds": one.waiting_seconds,
        "node_hours": one.node_seconds / 3600,
        "cost_usd": cost,
        "usd_per_million_samples": cost / examples * 1e6 if cost is not None and examples else None,
    }


def _assumptions(
    spec: JobSpec, stops: Stops, throughput: Path | None, stages: int | None
) -> list[str]:
    every = spec.checkpoint.every
    seconds = every.seconds or UNMEASURED
    often = words.count(every.steps, "step") if every.steps else words.age(seconds)
    said = [
        f"A stop takes {stops.launch_seconds:g} s to detect, decide and launch.",
        f"The state is {words.size(round(stops.state_bytes))}; a node writes"
        f" {stops.write_bytes_per_second / 1e6:,.0f} and loads"
        f" {stops.load_bytes_per_second / 1e6:,.0f} MB a second.",
        f"A checkpoint every {often}, which stops nothing.",
        f"A job grows for {spec.plan.min_gain:.0%} or more, {spec.plan.settle:g} s after a join.",
        "The step that a stop interrupts is lost.",
    ]
    if throughput is not None and stages is None:
        said.append("Nobody knows the stages, so survivors are taken to hold too little.")
    elif throughput is not None:
        said.append(f"There are {stages} stages; survivors save when they hold all of them.")
    return said


def _show_policies(answer: Mapping[str, Any]) -> None:
    columns = ["POLICY", ">SAMPLES/S", ">GOODPUT", ">STEPS", ">LOST", ">STOPS", ">STOPPED",
               ">WAITED", ">NODE-HOURS", ">USD"]  # fmt: skip
    rows = [
        [name, f"{one['samples_per_second']:.1f}", f"{one['goodput']:.1%}", f"{one['steps']:,}",
         f"{one['lost_steps']:,}", f"{one['gaps']:,}", words.age(one["gap_seconds"]),
         words.age(one["waiting_seconds"]), f"{one['node_hours']:,.0f}",
         words.NOTHING if one["cost_usd"] is None else f"{one['cost_usd']:,.2f}"]
        for name, one in answer["policies"].items()
    ]  # fmt: skip
    output.console().print(output.table(columns, rows))
    for sentence in answer["assumptions"]:
        output.note(sentence)


def _text(path: Path) -> str:
    try:
        return path.read_text()
    except OSError as error:
        raise CliError(f"Cannot read {path}: {error.strerror}.", USAGE) from None
