"""`varuna chaos`: random trouble from a seed, for a demo that runs or a cluster of its own on this
machine, and whether the promises held.
"""

import json
import random
import shutil
from pathlib import Path
from typing import Annotated

import typer

from controller.api.schemas import JobView, NodeView
from controller.chaos.deeds import Deed, schedule
from controller.chaos.demo import agents_here, run_on_demo
from controller.chaos.own import OwnRun
from controller.chaos.report import Report
from controller.cli.options import AsJson, Connection
from controller.cli.workplace import folder_for, stopped_by_signals
from controller.client import output
from controller.client.rest import USAGE, CliError, job_path
from controller.core.jobspec import parse_duration

_LEAST_SECONDS = 10.0


def chaos(
    context: typer.Context,
    job: Annotated[
        str | None, typer.Argument(help="Of a running demo; else a cluster is started for this.")
    ] = None,
    for_: Annotated[str, typer.Option("--for", metavar="DURATION", help="Of the trouble.")] = "2m",
    seed: Annotated[int, typer.Option(help="The same seed: the same deeds, the same times.")] = 0,
    nodes: Annotated[int, typer.Option(min=2, max=16, help="Local agents. Without JOB.")] = 4,
    minimum: Annotated[
        int, typer.Option("--min", min=1, help="Nodes that the job needs. Without JOB.")
    ] = 2,
    list_: Annotated[bool, typer.Option("--list", help="Print the deeds; do nothing.")] = False,
    data: Annotated[Path | None, typer.Option(help="Keep everything here.")] = None,
    json_: AsJson = False,
) -> None:
    """Do random harm to local agents and their controller; check that the promises hold."""
    seconds = _duration(for_)
    if minimum > nodes:
        raise CliError(f"--min {minimum} is more than --nodes {nodes}.", USAGE)
    controller = Connection.of(context) if job else None
    view = controller.get(job_path(job), JobView) if controller and job else None
    if controller and view:
        names = sorted(agents_here(controller.all("/api/v1/nodes", NodeView)))
        minimum = view.nodes.min
    else:
        names = [f"node-{i}" for i in range(1, nodes + 1)]
    deeds = schedule(random.Random(seed).random, names, minimum, seconds)
    if list_:
        _list(deeds, json_)
        return
    if data and data.exists() and any(data.iterdir()):
        raise CliError(f"{data} is not empty.", USAGE)
    report = Report(seed, seconds, len(names), minimum, job or "")
    with stopped_by_signals(), folder_for("chaos", data) as folder:
        try:
            if controller and view:
                run_on_demo(view, lambda: controller, deeds, folder, report)
            else:
                OwnRun(folder, names, report).go(deeds)
        except KeyboardInterrupt:
            output.note(f"Stopped. Everything is kept in {folder}.")
            raise typer.Exit(130) from None
        if json_:
            print(json.dumps(report.as_json()), flush=True)
        else:
            report.say()
        if data is None and report.holds:
            shutil.rmtree(folder, ignore_errors=True)
        else:
            output.note(f"Everything is kept in {folder}.")
    raise typer.Exit(0 if report.holds else 1)


def _list(deeds: tuple[Deed, ...], json_: bool) -> None:
    if json_:
        print(json.dumps({"deeds": [vars(deed) for deed in deeds]}), flush=True)
        return
    for deed in deeds:
        output.say(str(deed))


def _duration(text: str) -> float:
    try:
        seconds = parse_duration(text)
    except ValueError as error:
        raise CliError(f"--for: {error}.", USAGE) from None
    if seconds < _LEAST_SECONDS:
        raise CliError(f"--for {text} is too short: give {_LEAST_SECONDS:.0f}s or more.", USAGE)
    return seconds
