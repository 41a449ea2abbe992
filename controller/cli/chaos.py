"""`varuna chaos`: random trouble from a seed, for a cluster of its own on this machine, and whether
the promises held.
"""

import json
import random
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated

import typer

from controller.chaos.deeds import Deed, schedule
from controller.chaos.report import Report
from controller.chaos.run import Run
from controller.cli import output
from controller.cli.client import USAGE, CliError
from controller.cli.cluster import stopped_by_signals
from controller.cli.options import AsJson
from controller.core.jobspec import parse_duration

_LEAST_SECONDS = 10.0


def chaos(
    for_: Annotated[str, typer.Option("--for", metavar="DURATION", help="Of the trouble.")] = "2m",
    seed: Annotated[int, typer.Option(help="The same seed: the same deeds, the same times.")] = 0,
    nodes: Annotated[int, typer.Option(min=2, max=16, help="Local agents.")] = 4,
    minimum: Annotated[int, typer.Option("--min", min=1, help="Nodes that the job needs.")] = 2,
    list_: Annotated[bool, typer.Option("--list", help="Print the deeds; do nothing.")] = False,
    data: Annotated[Path | None, typer.Option(help="Keep everything here.")] = None,
    json_: AsJson = False,
) -> None:
    """Do random harm to a cluster of its own on this machine; check that the promises hold."""
    seconds = _duration(for_)
    if minimum > nodes:
        raise CliError(f"--min {minimum} is more than --nodes {nodes}.", USAGE)
    names = [f"node-{i}" for i in range(1, nodes + 1)]
    deeds = schedule(random.Random(seed).random, names, minimum, seconds)
    if list_:
        _list(deeds, json_)
        return
    report = Report(seed, seconds, nodes, minimum)
    with stopped_by_signals(), _folder(data, report) as folder:
        try:
            Run(folder, names, minimum, deeds, seconds, report).go()
        except KeyboardInterrupt:
            output.note(f"Stopped. Everything is kept in {folder}.")
            raise typer.Exit(130) from None
        if json_:
            print(json.dumps(report.as_json()), flush=True)
        else:
            report.say()
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


@contextmanager
def _folder(data: Path | None, report: Report) -> Iterator[Path]:
    """``data``, or a fresh folder that goes when all promises held."""
    folder = data.absolute() if data else Path(tempfile.mkdtemp(prefix="varuna-chaos-"))
    if data and folder.exists() and any(folder.iterdir()):
        raise CliError(f"{data} is not empty.", USAGE)
    folder.mkdir(parents=True, exist_ok=True)
    try:
        yield folder
    except CliError as error:
        raise CliError(f"{error} Everything is kept in {folder}.", error.exit_code) from None
    if data is None and report.holds:
        shutil.rmtree(folder, ignore_errors=True)
    else:
        output.note(f"Everything is kept in {folder}.")
