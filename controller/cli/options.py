"""The options that several verbs share, and the connection that the global ones name."""

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import typer

from controller.client.rest import Controller, find

SpecFile = Annotated[
    Path, typer.Argument(metavar="SPEC", help="The job spec, a YAML file; - is standard input.")
]
Set = Annotated[
    list[str] | None,
    typer.Option("--set", metavar="FIELD=VALUE", help="Override a field: checkpoint.every=5m."),
]
AsJson = Annotated[bool, typer.Option("--json", help="Print JSON, as REST answers it.")]
DevicesPerNode = Annotated[int, typer.Option(min=1, max=64)]
Memory = Annotated[
    float, typer.Option(min=0, max=1e6, metavar="GB", help="Of the smallest device; 0: any.")
]
Price = Annotated[
    float | None, typer.Option(min=0, max=1e6, metavar="USD", help="Of a node for an hour.")
]
Yes = Annotated[bool, typer.Option("--yes", "-y", help="Do not ask.")]
Watch = Annotated[bool, typer.Option("--watch", "-w", help="Keep showing, until it is over.")]


@dataclass(frozen=True)
class Connection:
    """What the global options said; the controller is looked for when a verb needs it."""

    url: str | None
    token_file: Path | None

    @classmethod
    def of(cls, context: typer.Context) -> Controller:
        """The controller that this command speaks to."""
        said = context.find_object(cls) or cls(None, None)
        controller = Controller(find(said.url, said.token_file))
        context.call_on_close(controller.close)
        return controller
