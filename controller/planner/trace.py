"""A spot trace as a file: when nodes came and went. PURE.

    t_seconds,event,node
    0,add,vm-1
    712.5,remove,vm-1

Rows of one second are one event.
"""

import csv
from dataclasses import dataclass
from itertools import groupby
from math import inf


@dataclass(frozen=True)
class Change:
    """At one moment of a trace."""

    at: float
    joined: tuple[str, ...]
    left: tuple[str, ...]


def read_trace(text: str) -> tuple[Change, ...]:
    """CSV with the columns ``t_seconds,event,node``; add or remove. Raises ValueError."""
    rows = csv.DictReader(text.splitlines())
    if not {"t_seconds", "event", "node"} <= set(rows.fieldnames or ()):
        raise ValueError("a trace has the columns t_seconds,event,node")
    moments = []
    for number, row in enumerate(rows, start=2):
        if row["event"] not in ("add", "remove"):
            raise ValueError(f"line {number}: the event is add or remove, not {row['event']!r}")
        if not row["node"]:
            raise ValueError(f"line {number}: it names no node")
        moments.append((number_at(row["t_seconds"], number), row["event"], row["node"]))
    if len({at for at, _, _ in moments}) < 2:
        raise ValueError("a trace has rows at two moments or more: it is played up to the last")
    moments.sort(key=lambda moment: moment[0])  # stable: within a second as written
    return tuple(
        Change(
            at,
            tuple(node for _, event, node in group if event == "add"),
            tuple(node for _, event, node in group if event == "remove"),
        )
        for at, group in ((at, list(g)) for at, g in groupby(moments, key=lambda m: m[0]))
    )


def number_at(text: str | None, line: int) -> float:
    """``text``, which stands in ``line``, as a finite number. Raises ValueError."""
    if text is None or not is_number(text):
        raise ValueError(f"line {line}: {text!r} is not a number")
    return float(text)


def is_number(text: str) -> bool:
    """Whether it is a finite one."""
    try:
        return abs(float(text)) < inf
    except ValueError:
        return False
