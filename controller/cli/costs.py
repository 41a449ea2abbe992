"""Costs that plans are made by: read from a file or measured here; `profile`."""

import json
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Annotated

import typer
from rich.console import RenderableType

from controller import words
from controller.cli.jobs import read_spec
from controller.cli.local import what_to_try
from controller.cli.options import AsJson, Set, SpecFile
from controller.client import output
from controller.client.children import PYTHON
from controller.client.rest import FAILURE, USAGE, CliError
from controller.core.jobspec import JobSpec
from controller.planner.costsfile import read_costs
from controller.planner.shapes import largest_micro_batch
from controller.planner.stagefile import StageFile
from trainer.contract.costs import LayerCosts


def profile(
    spec_file: SpecFile,
    micro_batch: Annotated[
        int | None, typer.Option(min=1, help="The largest to measure; else what the job may get.")
    ] = None,
    set_: Set = None,
    json_: AsJson = False,
) -> None:
    """Measure what a program costs on this machine, as its first launch does on its nodes."""
    spec = read_spec(spec_file, ["nodes=1", *(set_ or ())])
    text = _measure(spec, spec_file, micro_batch)
    if json_:
        output.say(text.rstrip())
        return
    costs = LayerCosts.model_validate_json(text)
    output.console().print(_costs_table(costs))
    took = f" in {costs.measured_seconds:.1f} s" if costs.measured_seconds else ""
    output.note(f"{costs.host}{took}. Keep it: varuna profile {spec_file} --json > costs.json")


def read(path: Path) -> LayerCosts | StageFile:
    """The costs in a file, `-` is standard input; CliError otherwise."""
    try:
        return read_costs(sys.stdin.read() if str(path) == "-" else path.read_text())
    except OSError as error:
        raise CliError(f"Cannot read {path}: {error.strerror}.", USAGE) from None
    except ValueError as error:
        raise CliError(f"Cannot use {path}: {error}.", USAGE) from None


def layers(path: Path | None, spec: JobSpec, spec_file: Path) -> tuple[LayerCosts, str]:
    """From a file, else measured here; and whose they are."""
    if path is None:
        output.note("Measuring the program on this machine ...")
        return LayerCosts.model_validate_json(_measure(spec, spec_file, None)), "this machine"
    known = read(path)
    if isinstance(known, StageFile):
        raise CliError(f"{path} holds stages: a plan needs layers.", USAGE)
    return known, str(path)


def _measure(spec: JobSpec, spec_file: Path, micro_batch: int | None) -> str:
    """The costs as `agent.measure` prints them."""
    largest = largest_micro_batch(spec.batch_size, spec.nodes.min, spec.nodes.max)
    with tempfile.NamedTemporaryFile("w", prefix="varuna-profile-", suffix=".json") as file:
        json.dump(what_to_try(spec, spec_file), file)
        file.flush()
        command = [*PYTHON, "agent.measure", "--spec", file.name]
        command += ["--micro-batch", str(micro_batch or largest)]
        done = subprocess.run(command, stdout=subprocess.PIPE, text=True)
    if done.returncode:
        raise CliError("The program could not be measured.", FAILURE)
    return done.stdout


def _costs_table(costs: LayerCosts) -> RenderableType:
    columns = ["LAYER", "", ">FORWARD", ">BACKWARD", ">PARAMETERS", ">HANDS ON", ">KEEPS"]
    rows = [
        [str(at), one.name, f"{one.forward_seconds * 1000:.2f} ms",
         f"{one.backward_seconds * 1000:.2f} ms", words.size(one.parameter_bytes),
         words.size(one.output_bytes), words.size(one.saved_bytes)]
        for at, one in enumerate(costs.layers)
    ]  # fmt: skip
    return output.table(columns, rows)
