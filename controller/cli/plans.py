"""`plan`: what would so many nodes get done? A controller that is there is asked what it has
measured.
"""

from pathlib import Path
from typing import Annotated

import typer
from rich.console import RenderableType
from rich.text import Text

from controller import words
from controller.api.planned import table
from controller.api.schemas import PlansRequest, PlansView, PlanView
from controller.cli.costs import layers
from controller.cli.jobs import read_spec
from controller.cli.options import AsJson, Connection, DevicesPerNode, Memory, Price, Set, SpecFile
from controller.client import output
from controller.client.rest import (
    CONFLICT,
    FAILURE,
    NOT_ALLOWED,
    USAGE,
    CliError,
    UnreachableError,
)
from controller.core.jobspec import NodeRange, parse_range


def plan(
    context: typer.Context,
    spec_file: SpecFile,
    nodes: Annotated[
        str | None, typer.Option(metavar="N..M", help="Numbers of nodes; else the spec's.")
    ] = None,
    costs: Annotated[
        Path | None,
        typer.Option(help="Of `varuna profile`; else the controller's, else measured here."),
    ] = None,
    devices_per_node: DevicesPerNode = 1,
    memory: Memory = 0.0,
    price: Price = None,
    set_: Set = None,
    json_: AsJson = False,
) -> None:
    """What-if: the best shape for each number of nodes, what it gets done and why. Ends with 1 when
    no plan fits at all.
    """
    spec = read_spec(spec_file, set_)
    asked = PlansRequest(
        spec=spec,
        nodes=_range(nodes),
        devices_per_node=devices_per_node,
        device_memory_bytes=round(memory * 1e9),
        price_per_node_hour=price,
    )
    made = _plans(context, asked, spec_file, costs)
    if json_:
        output.as_json(made)
    else:
        output.console().print(_plans_table(made, priced=price is not None))
        output.note(f"Costs from {made.costs_from}.")
    if not any(row.shape for row in made.items):
        raise typer.Exit(FAILURE)


def _plans(
    context: typer.Context, asked: PlansRequest, spec_file: Path, costs: Path | None
) -> PlansView:
    """By given costs, by what the controller knows, or by what is measured now."""
    if costs is None and (found := _ask(context, asked)):
        return found
    known, origin = layers(costs, asked.spec, spec_file)
    try:
        return table(asked, known, origin)
    except ValueError as error:
        raise CliError(f"{error}.", USAGE) from None


def _ask(context: typer.Context, asked: PlansRequest) -> PlansView | None:
    """None: no controller, or it has not measured this program."""
    try:
        body = asked.model_dump(mode="json")
        return Connection.of(context).post("/api/v1/plans", body, PlansView)
    except UnreachableError:
        return None
    except CliError as refused:
        if refused.exit_code in (CONFLICT, NOT_ALLOWED):
            return None
        raise


def _range(text: str | None) -> NodeRange | None:
    if text is None:
        return None
    try:
        return NodeRange.model_validate(parse_range(text))
    except ValueError:
        raise CliError(f"--nodes is N or N..M, as 1..16, not {text!r}.", USAGE) from None


def _plans_table(made: PlansView, *, priced: bool) -> RenderableType:
    columns = [">NODES", "PLAN", ">MICRO-BATCH", ">EX/S", ">A STEP", ">BUBBLE", ">MEMORY",
               *([">USD/1M EX"] if priced else []), ""]  # fmt: skip
    return output.table(columns, [_plan_row(one, priced) for one in made.items])


def _plan_row(one: PlanView, priced: bool) -> list[str | Text]:
    if one.shape is None:
        empty = [words.NOTHING] * (6 + priced)
        return [str(one.nodes), *empty, one.because]
    price = one.price_per_million_examples
    return [
        str(one.nodes),
        words.times(one.shape),
        str(one.shape.micro_batch),
        words.number(one.examples_per_second),
        words.seconds(one.step_time_seconds),
        f"{one.bubble or 0:.0%}",
        words.size(one.memory_bytes or 0),
        *([words.number(price, 2)] if priced else []),
        one.because,
    ]
