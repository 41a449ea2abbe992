"""The verbs about jobs: submit, validate, init, jobs, status, evict, cancel, pause,
resume, save, wait.
"""

import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import typer
from rich.live import Live

from controller import words
from controller.api.schemas import EvictAnswer, EvictRequest, JobView, NodeView
from controller.cli.options import AsJson, Connection, Set, SpecFile, Watch, Yes
from controller.cli.pictures import jobs_table, picture, show_plan
from controller.client import output
from controller.client.jobs import changes, send
from controller.client.pack import Bundle, pack
from controller.client.rest import (
    FAILURE,
    NOT_FOUND,
    USAGE,
    CliError,
    Controller,
    RefusedError,
    UnreachableError,
    job_path,
)
from controller.core.jobspec import JobSpec
from controller.core.states import JobState
from controller.specfile import BadSpecError, read_yaml
from trainer.contract.builtins import path_of

WAIT_EXIT = {JobState.SUCCEEDED: 0, JobState.FAILED: 100, JobState.CANCELLED: 103}
NOT_FINISHED, JOB_NOT_FOUND = 101, 102
LOOK_SECONDS = 0.5
AWAY_SECONDS = 60.0
"""How long `wait` puts up with a controller that does not answer, once it has."""

SKELETON = """\
name: gpt-mini            # a-z, 0-9 and -, unique among unfinished jobs
program: builtin:gpt      # or a .py file in workdir, with layers(), dataset() and loss()
# workdir: .              # the folder to pack and send; .gitignore and .varunaignore are obeyed
nodes: 2..8               # VMs: N, min..max or min..
batch_size: 64            # examples per step, kept through every re-plan
steps: 2000
checkpoint:
  dir: /mnt/shared/gpt    # a folder that every VM reaches
  every: 50 steps         # or a duration: 5m; left out: as often as pays
"""


def init(
    file: Annotated[Path, typer.Argument(help="The file to write.")] = Path("job.yaml"),
) -> None:
    """Write a job spec of ten commented lines."""
    try:
        with file.open("x") as fresh:
            fresh.write(SKELETON)
    except FileExistsError:
        raise CliError(f"{file} is there already.", USAGE) from None
    output.note(f"Wrote {file}. Next: varuna validate {file}; varuna submit {file}")


def validate(spec_file: SpecFile, set_: Set = None, json_: AsJson = False) -> None:
    """Check a job spec and show it resolved."""
    spec = read_spec(spec_file, set_)
    folder, path = program_folder(spec, spec_file), path_of(spec.program)
    if folder and path and not (folder / path).is_file():
        raise CliError(f"`program`: there is no file {path} in {folder}.", USAGE)
    if json_:
        output.as_json(spec)
    else:
        output.say(f"{spec_file} is a valid job spec.")


def submit(
    context: typer.Context,
    spec_file: SpecFile,
    set_: Set = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Send nothing.")] = False,
    yes: Yes = False,
    wait_: Annotated[bool, typer.Option("--wait", help="Stay until the job is over.")] = False,
    quiet: Annotated[bool, typer.Option("--quiet", "-q", help="Print the id only.")] = False,
    json_: AsJson = False,
) -> None:
    """Pack the program, show what will run, ask, and submit the job."""
    spec = read_spec(spec_file, set_)
    bundle = _bundle(spec, spec_file)
    if bundle:
        spec = spec.model_copy(update={"bundle": bundle.digest})
    if dry_run:
        show_plan(spec, bundle, ready=None)
        output.as_json(spec)
        return
    controller = Connection.of(context)
    if not quiet:
        show_plan(spec, bundle, ready=len(controller.all("/api/v1/nodes", NodeView)))
    if not yes:
        _ask("Submit?")
    job = send(controller, spec, bundle)
    if json_:
        output.as_json(job)
    elif quiet:
        output.say(job.id)
    else:
        output.say(f"Submitted {job.name} as {job.id}.")
        output.note(f"Next: varuna status {job.name} -w; varuna logs {job.name} -f")
    if wait_:
        raise typer.Exit(_wait(controller, job.id, None))


def jobs(
    context: typer.Context,
    all_: Annotated[bool, typer.Option("--all", "-a", help="Finished ones too.")] = False,
    state: Annotated[JobState | None, typer.Option(help="Only these.")] = None,
    quiet: Annotated[bool, typer.Option("--quiet", "-q", help="Print ids only.")] = False,
    json_: AsJson = False,
) -> None:
    """List jobs, the newest first."""
    everything = True if all_ or (state and state.is_over) else None
    found = Connection.of(context).all("/api/v1/jobs", JobView, all=everything, state=state)
    if json_:
        output.as_json_items(found)
    elif quiet:
        for job in found:
            output.say(job.id)
    elif found:
        output.console().print(jobs_table(found))
    else:
        output.note("No jobs. Next: varuna init; varuna submit job.yaml")


def status(context: typer.Context, job: str, watch: Watch = False, json_: AsJson = False) -> None:
    """Show one job: its figures, who sits where, its last events."""
    controller = Connection.of(context)
    if not watch:
        view = controller.get(job_path(job), JobView)
        if json_:
            output.as_json(view)
        else:
            output.console().print(picture(controller, view))
        return
    console = output.console()
    if json_ or not console.is_terminal:
        for view in changes(controller, job):
            output.as_json(view)
        return
    with Live(console=console, auto_refresh=False) as live:
        for view in changes(controller, job):
            live.update(picture(controller, view), refresh=True)


def evict(
    context: typer.Context,
    job: str,
    count: Annotated[int, typer.Option(min=1, help="How many nodes.")] = 1,
    seed: Annotated[int | None, typer.Option(help="Which ones: the same seed, the same.")] = None,
    json_: AsJson = False,
) -> None:
    """A drill: kill nodes of the job without notice, as a reclaim does."""
    seed = time.time_ns() % 1_000_000 if seed is None else seed
    body = EvictRequest(count=count, seed=seed).model_dump(mode="json")
    answer = Connection.of(context).post(job_path(job, "/actions/evict"), body, EvictAnswer)
    if json_:
        output.as_json(answer)
    else:
        taken = words.count(len(answer.nodes), "node")
        output.say(f"Evicted {taken}: {', '.join(answer.nodes)} (seed {seed}).")
        output.note(f"Next: varuna status {job} -w")


def cancel(context: typer.Context, job: str, yes: Yes = False, json_: AsJson = False) -> None:
    """End a job for good. Its checkpoints stay."""
    controller = Connection.of(context)
    if not yes:
        view = controller.get(job_path(job), JobView)
        _ask(f"Cancel {view.name} at step {words.step(view)}?")
    view = controller.post(job_path(job, "/actions/cancel"), {}, JobView)
    if json_:
        output.as_json(view)
    else:
        news = f"was over already: {view.state}" if view.state.is_over else "is being cancelled"
        output.say(f"{view.name} {news}.")


def pause(context: typer.Context, job: str, json_: AsJson = False) -> None:
    """Save a job's next step and free its nodes until `resume`."""
    _ask_for(context, job, "pause", "is being paused", json_)


def resume(context: typer.Context, job: str, json_: AsJson = False) -> None:
    """Go on with a paused job."""
    _ask_for(context, job, "resume", "goes on", json_)


def save(context: typer.Context, job: str, json_: AsJson = False) -> None:
    """Save a checkpoint of a job's next step, and train on."""
    _ask_for(context, job, "checkpoint", "saves its next step", json_)


def _ask_for(context: typer.Context, job: str, action: str, news: str, json_: bool) -> None:
    view = Connection.of(context).post(job_path(job, f"/actions/{action}"), {}, JobView)
    if json_:
        output.as_json(view)
    elif view.state.is_over:
        output.say(f"{view.name} was over already: {view.state}.")
    else:
        output.say(f"{view.name} {news}.")


def wait(
    context: typer.Context,
    job: str,
    state: Annotated[JobState | None, typer.Option("--for", help="Stay until this state.")] = None,
    timeout: Annotated[float | None, typer.Option(min=0, help="Seconds.")] = None,
) -> None:
    """Stay until a job is over.

    Exit: 0 succeeded (or the state reached), 100 failed, 101 not finished, 102 not found,
    103 cancelled.
    """
    try:
        code = _wait(Connection.of(context), job, timeout, state)
    except RefusedError as refused:
        if refused.exit_code != NOT_FOUND:
            raise
        raise CliError(str(refused), JOB_NOT_FOUND) from None
    raise typer.Exit(code)


def read_spec(path: Path, overrides: Sequence[str] | None = None) -> JobSpec:
    """The spec in ``path`` (``-``: standard input); CliError with all its mistakes."""
    try:
        text = sys.stdin.read() if str(path) == "-" else path.read_text()
    except (OSError, UnicodeDecodeError) as error:
        why = error.strerror if isinstance(error, OSError) else "it is not UTF-8 text"
        raise CliError(f"{path} cannot be read: {why}.", USAGE) from None
    try:
        return read_yaml(text, overrides or ())
    except BadSpecError as bad:
        raise CliError("\n".join(str(error) for error in bad.errors), USAGE) from None


def program_folder(spec: JobSpec, spec_file: Path) -> Path | None:
    """Where the program lives: ``workdir`` as seen from the spec's file; None for a builtin."""
    if spec.workdir is None and path_of(spec.program) is None:
        return None
    around = Path.cwd() if str(spec_file) == "-" else spec_file.parent
    return (around / (spec.workdir or ".")).resolve()


def _bundle(spec: JobSpec, spec_file: Path) -> Bundle | None:
    folder = program_folder(spec, spec_file)
    if folder is None:
        return None
    path = path_of(spec.program)
    if path is None:
        raise CliError(f"workdir is of no use with program {spec.program}; leave it out.", USAGE)
    return pack(folder, path)


def _ask(question: str) -> None:
    if not sys.stdin.isatty():
        raise CliError("There is no terminal to ask on; say -y.", USAGE)
    if not typer.confirm(question, err=True):
        raise CliError("Nothing was done.", FAILURE)


def _wait(
    controller: Controller, job: str, timeout: float | None, wanted: JobState | None = None
) -> int:
    """The exit code; a controller that is away for a while (an upgrade, say) is waited for."""
    view: JobView | None = None
    begun = heard_at = time.monotonic()
    while True:
        now = time.monotonic()
        try:
            view, heard_at = controller.get(job_path(job), JobView), now
        except UnreachableError:
            if view is None or now - heard_at > AWAY_SECONDS:
                raise
        if view.state is wanted:
            return 0
        if view.state.is_over:
            output.note(f"{view.name} {view.state}: {view.message}")
            return NOT_FINISHED if wanted else WAIT_EXIT[view.state]
        if timeout is not None and now - begun >= timeout:
            output.note(f"{view.name} is {view.state} at step {words.step(view)}.")
            return NOT_FINISHED
        time.sleep(LOOK_SECONDS)
