"""What a command writes: data on stdout, progress and errors on stderr.

A table on a terminal, the same columns as plain text off one; ``NO_COLOR`` is obeyed; JSON is the
REST schema, one object a line where it streams. What others wrote (names, messages) never reaches a
terminal with control characters in it.
"""

import json
import sys
from collections.abc import Sequence

from pydantic import BaseModel
from rich.console import Console
from rich.table import Table
from rich.text import Text

from controller.core.states import JobState, NodeState

_STYLE = {
    JobState.RUNNING: "green",
    JobState.SUCCEEDED: "green",
    JobState.FAILED: "red",
    JobState.RECOVERING: "yellow",
    JobState.WAITING: "yellow",
    JobState.STARTING: "cyan",
    NodeState.WORKING: "green",
    NodeState.LOST: "red",
    NodeState.EVICTED: "red",
}
PLAIN_WIDTH = 10_000
"""Off a terminal nothing is wrapped or cut."""


def console() -> Console:
    """Standard output."""
    return Console(
        file=sys.stdout,
        markup=False,
        highlight=False,
        soft_wrap=True,
        width=None if sys.stdout.isatty() else PLAIN_WIDTH,
    )


def note(sentence: str) -> None:
    """One line of progress on standard error."""
    print(clean(sentence), file=sys.stderr, flush=True)


def say(line: str = "") -> None:
    """One line of data."""
    print(clean(line), flush=True)


def as_json(view: BaseModel) -> None:
    """One view as one line."""
    print(view.model_dump_json(), flush=True)


def as_json_items(views: Sequence[BaseModel]) -> None:
    """A list as the REST page that holds all of it."""
    items = [view.model_dump(mode="json") for view in views]
    print(json.dumps({"items": items, "next": None}), flush=True)


def table(columns: Sequence[str], rows: Sequence[Sequence[str | Text]]) -> Table:
    """A table without lines. A column whose name begins with ``>`` is set to the right."""
    made = Table(box=None, pad_edge=False, header_style="dim", show_edge=False)
    for column in columns:
        made.add_column(
            column.removeprefix(">"),
            justify="right" if column.startswith(">") else "left",
            no_wrap=True,
            overflow="ellipsis" if column == "" else "ignore",
        )
    for row in rows:
        made.add_row(*(cell if isinstance(cell, Text) else Text(clean(cell)) for cell in row))
    return made


def state(value: JobState | NodeState, glyph: str) -> Text:
    """A state as glyph, word and colour."""
    return Text(f"{glyph} {value}", style=_STYLE.get(value, ""))


def clean(text: str) -> str:
    """``text`` without control characters, which a terminal might obey."""
    return "".join(c if c.isprintable() or c in "\t\n" else "�" for c in text)
