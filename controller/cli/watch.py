"""The verbs that show what happens: logs, events, nodes."""

import time
from datetime import UTC, datetime
from typing import Annotated
from urllib.parse import quote

import typer

from controller.api.schemas import EventView, GenerationView, JobView, LogView, NodeView, Page
from controller.cli.jobs import WAIT_EXIT
from controller.cli.options import AsJson, Connection
from controller.cli.pictures import nodes_table
from controller.client import output
from controller.client.rest import NOT_FOUND, CliError, Controller, job_path
from controller.core.events import EventType

_PAUSE = 0.5
"""Seconds, before a log that has grown no further is asked for again."""

Follow = Annotated[bool, typer.Option("--follow", "-f", help="Stay and print what comes.")]


def logs(
    context: typer.Context,
    job: str,
    follow: Follow = False,
    rank: Annotated[
        int | None, typer.Option(min=0, help="Whose. Else the last stage of replica 0.")
    ] = None,
    node: Annotated[str | None, typer.Option(help="The rank that this node holds.")] = None,
    generation: Annotated[int | None, typer.Option(min=1, help="Else the newest.")] = None,
    tail: Annotated[int, typer.Option(min=1, help="How many lines.")] = 200,
    setup: Annotated[
        bool, typer.Option("--setup", help="Only what the newest `setup` printed, on --node.")
    ] = False,
) -> None:
    """Print the log of one trainer; with -f through every re-plan, to the job's end."""
    controller = Connection.of(context)
    path = job_path(job)
    if setup:
        setup_log(controller, path, follow, node=node, rank=rank, generation=generation)
        return
    if node is not None:
        rank, generation = _seat_of(controller, path, node, generation)
    view = controller.get(f"{path}/logs", LogView, rank=rank, generation=generation, tail=tail)
    print(view.text, end="", flush=True)
    if not follow:
        if not view.text:
            output.note(f"Rank {view.rank} on {view.node} has printed nothing.")
        return
    try:
        raise typer.Exit(follow_log(controller, path, view, rank, pinned=generation is not None))
    except KeyboardInterrupt:
        output.note(f"\nDetached; the job goes on. To end it: varuna cancel {job}")


def events(
    context: typer.Context,
    job: Annotated[str | None, typer.Argument(help="Of this job; else of everything.")] = None,
    follow: Follow = False,
    type_: Annotated[EventType | None, typer.Option("--type", help="Only these.")] = None,
    last: Annotated[int, typer.Option(min=1, help="The newest N.")] = 50,
    json_: AsJson = False,
) -> None:
    """What has happened, the newest last."""
    controller = Connection.of(context)
    path = job_path(job, "/events") if job else "/api/v1/events"
    seen = list(controller.get(path, Page[EventView], last=last, type=type_).items)
    if json_ and not follow:
        output.as_json_items(seen)
        return
    for event in seen:
        _print_event(event, json_)
    if not seen and not follow:
        output.note("No events.")
    if follow:
        _follow_events(controller, job, seen[-1].seq if seen else 0, type_, json_)


def nodes(
    context: typer.Context,
    all_: Annotated[bool, typer.Option("--all", "-a", help="Gone ones too.")] = False,
    json_: AsJson = False,
) -> None:
    """List nodes: who they are, what runs there."""
    found = Connection.of(context).all("/api/v1/nodes", NodeView, all=all_ or None)
    if json_:
        output.as_json_items(found)
        return
    if not found:
        output.note(
            "No agents connected. On each VM run: varuna-agent --controller URL --token-file F"
        )
        return
    output.console().print(nodes_table(found))


node = typer.Typer(help="Empty a VM, use it again, or release it.", no_args_is_help=True)


@node.command("drain")
def drain(context: typer.Context, name: str, json_: AsJson = False) -> None:
    """Save what works on a VM and go on without it."""
    _tell(context, name, "drain", "is being emptied", json_)


@node.command("undrain")
def undrain(context: typer.Context, name: str, json_: AsJson = False) -> None:
    """Let jobs use a VM again."""
    _tell(context, name, "undrain", "may be used again", json_)


@node.command("release")
def release(context: typer.Context, name: str, json_: AsJson = False) -> None:
    """Use a VM again that was set aside, before its time."""
    _tell(context, name, "release", "may be used again", json_)


def _tell(context: typer.Context, name: str, action: str, news: str, json_: bool) -> None:
    path = f"/api/v1/nodes/{quote(name, safe='')}/actions/{action}"
    view = Connection.of(context).post(path, {}, NodeView)
    if json_:
        output.as_json(view)
    else:
        output.say(f"{view.name} {news}.")


def _seat_of(
    controller: Controller, path: str, node: str, generation: int | None
) -> tuple[int, int]:
    """Rank and generation of the newest seat that ``node`` held."""
    for view in reversed(controller.all(f"{path}/generations", GenerationView)):
        for seat in view.seats:
            if seat.node == node and generation in (None, view.number):
                return seat.rank, view.number
    raise CliError(f"Node {node} holds no seat of this job.", NOT_FOUND)


def setup_log(controller: Controller, path: str, follow: bool, **whose: str | int | None) -> None:
    """Print what the newest `setup` of ``whose`` said; with ``follow`` what it yet says."""
    path = f"{path}/logs/setup"
    view = controller.get(path, LogView, **whose)
    output.note(f"— generation {view.generation}, rank {view.rank} on {view.node} —")
    print(view.text, end="", flush=True)
    while not view.over and (follow or view.text):
        if not view.text:
            time.sleep(_PAUSE)
        view = _more(controller, path, view)


def follow_log(
    controller: Controller, path: str, view: LogView, rank: int | None, pinned: bool
) -> int:
    """Print what comes, generation after generation unless one is asked for; the exit code."""
    while True:
        if view.over:
            job = controller.get(path, JobView)
            if job.state.is_over:
                output.note(f"{job.name} {job.state}: {job.message}")
                return WAIT_EXIT[job.state]
            if pinned:
                return 0
            view = _next_generation(controller, path, view, rank)
        view = _more(controller, f"{path}/logs", view)
        if not view.text:
            time.sleep(_PAUSE)


def _more(controller: Controller, path: str, view: LogView) -> LogView:
    """Print what came after ``view``."""
    seat = {"rank": view.rank, "generation": view.generation}
    fresh = controller.get(path, LogView, **seat, offset=view.next_offset)
    print(fresh.text, end="", flush=True)
    return fresh


def _next_generation(controller: Controller, path: str, view: LogView, rank: int | None) -> LogView:
    """The log of a newer generation from its beginning, or ``view`` while there is none."""
    newest = controller.get(f"{path}/logs", LogView, rank=rank, tail=1)
    if newest.generation <= view.generation:
        return view
    output.note(f"— generation {newest.generation}, rank {newest.rank} on {newest.node} —")
    return newest.model_copy(update={"next_offset": 0, "over": False})


def _follow_events(
    controller: Controller, job: str | None, after: int, type_: EventType | None, json_: bool
) -> None:
    job_id = controller.get(job_path(job), JobView).id if job else None
    for message in controller.stream(job=job_id, after=after):
        if message.event == "event":
            event = EventView.model_validate_json(message.data)
            if type_ in (None, event.type):
                _print_event(event, json_)


def _print_event(event: EventView, json_: bool) -> None:
    if json_:
        output.as_json(event)
    else:
        at = event.at.astimezone(UTC).strftime("%H:%M:%S")
        day = "" if event.at.date() == datetime.now(UTC).date() else f"{event.at:%Y-%m-%d} "
        output.say(f"{day}{at}  {event.type:<22}  {event.message}")
