"""The ``varuna`` command: the verbs, the global options, and what every error looks like.

Exit codes: 0 done, 1 failure, 2 usage, 3 not found, 4 controller unreachable, 5 not allowed,
6 conflict; `wait`, `submit --wait` and `logs -f` to the end: 0 succeeded, 100 failed, 101 not
finished, 102 not found, 103 cancelled.
"""

import os
import re
import sys
from collections.abc import Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Annotated

import typer

from controller.cli import chaos, costs, demo, jobs, local, plans, plays, watch
from controller.cli.options import Connection
from controller.client import output
from controller.client.rest import FAILURE, CliError
from controller.cloud.port import CloudError

app = typer.Typer(
    help="Train big PyTorch models on spot VMs as if the VMs never went away.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)


def _show_version(wanted: bool) -> None:
    if wanted:
        output.say(f"varuna {version('varuna-spot')}")
        raise typer.Exit


@app.callback()
def _global_options(
    context: typer.Context,
    url: Annotated[str | None, typer.Option(help="The controller. Else VARUNA_URL.")] = None,
    token_file: Annotated[
        Path | None, typer.Option(help="Holds the token. Else VARUNA_TOKEN_FILE, VARUNA_TOKEN.")
    ] = None,
    version_: Annotated[
        bool, typer.Option("--version", callback=_show_version, is_eager=True)
    ] = False,
) -> None:
    context.obj = Connection(url, token_file)


for _verb in (local.serve, demo.demo, jobs.submit, jobs.validate, jobs.init, jobs.jobs, jobs.status,
              watch.logs, watch.events, watch.nodes, jobs.evict, jobs.cancel, jobs.pause,
              jobs.resume, jobs.save, jobs.wait,
              local.schedule, plans.plan, plays.simulate, plays.simulate_step, costs.profile,
              chaos.chaos):  # fmt: skip
    app.command()(_verb)
app.command("try")(local.try_)
app.add_typer(local.checkpoint, name="checkpoint")
app.add_typer(watch.node, name="node")


def main(arguments: Sequence[str] | None = None) -> None:
    """The console script."""
    given = sys.argv[1:] if arguments is None else arguments
    try:
        app(args=with_resume_value(given), prog_name="varuna")
    except CliError as error:
        output.note(str(error))
        sys.exit(error.exit_code)
    except CloudError as error:
        output.note(str(error))
        sys.exit(FAILURE)
    except BrokenPipeError:  # `varuna events | head`
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        sys.exit(0)


def with_resume_value(arguments: Sequence[str]) -> list[str]:
    """``--resume`` may stand alone: then it means ``--resume newest``, which typer cannot say."""
    words = list(arguments)
    for at in reversed([i for i, word in enumerate(words) if word == "--resume"]):
        if not re.fullmatch(r"\d+|newest", "".join(words[at + 1 : at + 2])):
            words.insert(at + 1, "newest")
    return words
