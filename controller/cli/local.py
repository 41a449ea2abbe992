"""The verbs that need no controller, or are one: serve, try, schedule, checkpoint.

What needs torch runs as a child of its own, so that the CLI never imports it.
"""

import json
import tempfile
from enum import StrEnum
from pathlib import Path
from typing import Annotated, NoReturn

import typer

from controller.cli.jobs import program_folder, read_spec
from controller.cli.options import AsJson, Set, SpecFile
from controller.client import output
from controller.client.children import become, flags, run
from controller.client.rest import USAGE, CliError
from controller.core.jobspec import JOB_AT_STEP, JobSpec
from trainer.contract.builtins import source_in
from trainer.contract.schedule import as_text, static_order
from trainer.contract.spec import Program

DEFAULT_MICRO_BATCH = 4
"""Of `varuna try`: never dependent on the shape, so that runs at two shapes compare."""


class Schedule(StrEnum):
    """``trainer.contract.spec.ScheduleName`` as an option."""

    VARUNA = "varuna"
    ONE_F_ONE_B = "1f1b"
    GPIPE = "gpipe"


class ExportFormat(StrEnum):
    """What ``checkpoint export`` writes."""

    TORCH = "torch"
    HF = "hf"


def serve(
    host: Annotated[str | None, typer.Option(help="Else 127.0.0.1.")] = None,
    port: Annotated[int | None, typer.Option(min=0, max=65535, help="Else 8430; 0: any.")] = None,
    data: Annotated[Path | None, typer.Option(help="The controller's folder.")] = None,
    tls_cert: Annotated[Path | None, typer.Option(help="PEM; needed off loopback.")] = None,
    tls_key: Annotated[Path | None, typer.Option(help="PEM.")] = None,
    insecure_http: Annotated[
        bool, typer.Option("--insecure-http", help="Listen off loopback without TLS.")
    ] = False,
) -> None:
    """Run the controller until Ctrl-C."""
    arguments = flags(host=host, port=port, data=data, tls_cert=tls_cert, tls_key=tls_key)
    become("controller.serve", *arguments, *(["--insecure-http"] if insecure_http else []))


def try_(
    spec_file: SpecFile,
    shape: Annotated[str, typer.Option(metavar="PxD", help="Stages x replicas, as 2x1.")],
    micro_batch: Annotated[int, typer.Option(min=1, help="Examples.")] = DEFAULT_MICRO_BATCH,
    steps: Annotated[
        int | None, typer.Option(min=1, help="How many; else up to the spec's.")
    ] = None,
    seed: Annotated[int | None, typer.Option(help="Else the spec's.")] = None,
    checkpoint_dir: Annotated[
        Path | None, typer.Option(help="Keep checkpoints here, below an id of this run.")
    ] = None,
    resume: Annotated[
        str | None,
        typer.Option(metavar="STEP", help="Go on from this step in --checkpoint-dir, or `newest`."),
    ] = None,
    logs: Annotated[
        bool, typer.Option("--logs", help="Show what the program prints, rank by rank.")
    ] = False,
    set_: Set = None,
    json_: AsJson = False,
) -> None:
    """Run a program on this machine at a fixed shape, without a controller."""
    overrides = ["nodes=1", *(set_ or ())]  # one machine: needs no checkpoint.dir
    overrides += [f"seed={seed}"] if seed is not None else []
    if resume is not None and checkpoint_dir is None:
        raise CliError("--resume needs --checkpoint-dir.", USAGE)
    spec = read_spec(spec_file, overrides)
    if spec.setup:
        output.note("`setup` is for VMs; it is not run here.")
    with tempfile.NamedTemporaryFile("w", prefix="varuna-try-", suffix=".json") as file:
        json.dump(what_to_try(spec, spec_file), file)
        file.flush()
        folder = checkpoint_dir.absolute() if checkpoint_dir else None
        arguments = flags(
            spec=file.name,
            shape=shape,
            micro_batch=micro_batch,
            steps=steps,
            checkpoint_dir=folder,
            resume=resume,
        )
        switches = [*(["--json"] if json_ else []), *(["--logs"] if logs else [])]
        raise typer.Exit(run("agent.local", *arguments, *switches))


def schedule(
    stages: Annotated[int, typer.Option(min=1, help="P.")],
    micro_batches: Annotated[int, typer.Option(min=1, help="N, of one replica.")],
    schedule_: Annotated[Schedule, typer.Option("--schedule")] = Schedule.VARUNA,
    json_: AsJson = False,
) -> None:
    """Print the static order in which each stage works: Forward, Recompute, Backward."""
    orders = [as_text(order) for order in static_order(schedule_.value, stages, micro_batches)]
    if json_:
        output.say(json.dumps({"stages": orders}))
        return
    for stage, order in enumerate(orders):
        output.say(f"stage {stage}: {order}")


checkpoint = typer.Typer(help="Look into a checkpoint folder.", no_args_is_help=True)
CheckpointFolder = Annotated[
    str, typer.Argument(metavar="DIR", help="A path or a URL: of a job, of jobs, or a checkpoint.")
]


@checkpoint.command("list")
def list_(folder: CheckpointFolder, json_: AsJson = False) -> None:
    """List the checkpoints in DIR: which are complete, which were skipped and why."""
    _tool("list", folder, json_)


@checkpoint.command()
def verify(folder: CheckpointFolder, json_: AsJson = False) -> None:
    """Read every file in DIR and check its size and hash."""
    _tool("verify", folder, json_)


@checkpoint.command()
def export(
    folder: CheckpointFolder,
    to: Annotated[ExportFormat, typer.Option(help="A state dict, or safetensors and their index.")],
    step: Annotated[int | None, typer.Option(min=0, help="Of a job; else its newest.")] = None,
    out: Annotated[
        Path | None, typer.Option(help="Else a name made of the job's and step's.")
    ] = None,
    names: Annotated[
        Path | None, typer.Option(help="JSON: `layers.0` and the like -> a name of your own.")
    ] = None,
    json_: AsJson = False,
) -> None:
    """Write a checkpoint as plain files that need nothing of Varuna."""
    arguments = [folder, *flags(to=to.value, step=step, out=out, names=names)]
    become("trainer.export", *arguments, *(["--json"] if json_ else []))


def _tool(verb: str, folder: str, json_: bool) -> NoReturn:
    become("trainer.tools", "checkpoint", verb, folder, *(["--json"] if json_ else []))


def what_to_try(spec: JobSpec, spec_file: Path) -> dict[str, object]:
    """What a child that runs the program here is told."""
    folder = program_folder(spec, spec_file)
    program = Program(
        source=source_in(str(folder), spec.program),
        workdir=str(folder) if folder else None,
        args=spec.args,
    )
    return {
        "program": program.model_dump(mode="json"),
        "training": spec.training().model_dump(mode="json"),
        "every_steps": spec.checkpoint.every.steps,
        "init_from": _init_from(spec, folder),
    }


def _init_from(spec: JobSpec, folder: Path | None) -> str | None:
    if spec.init_from is None:
        return None
    if JOB_AT_STEP.match(spec.init_from):
        raise CliError("`varuna try` knows no jobs; give init_from a folder.", USAGE)
    return str((folder or Path.cwd()) / spec.init_from)
