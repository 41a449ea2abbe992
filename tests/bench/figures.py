"""What all benches share: their flags, the machine they ran on, and how figures are told.

A bench prints lines for people while it goes, and as its very last line one JSON object. Every
number in it was measured in that run; what did not happen is null.
"""

import argparse
import json
import os
import platform
import statistics
import sys
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch


@dataclass(frozen=True)
class Flags:
    """How a bench was called."""

    quick: bool
    rounds: int
    only: str | None = None
    """The one case to be measured; None: all."""


def flags(about: str, quick_rounds: int, full_rounds: int, cases: Sequence[str] = ()) -> Flags:
    """Read the command line. ``cases``: what ``--only`` chooses from."""
    parser = argparse.ArgumentParser(description=about)
    parser.add_argument("--quick", action="store_true", help="fewer rounds, a smaller model")
    parser.add_argument("--rounds", type=int, help=f"of each pair (full: {full_rounds})")
    parser.add_argument("--json", action="store_true", help="stdout carries the JSON line alone")
    parser.set_defaults(only=None)
    if cases:
        parser.add_argument("--only", choices=cases, help="measure this case alone")
    given = parser.parse_args()
    if given.json:
        _Told.to = sys.stderr
    rounds = given.rounds or (quick_rounds if given.quick else full_rounds)
    return Flags(given.quick, rounds, given.only)


class _Told:
    to = sys.stdout


def tell(line: str = "") -> None:
    """A line for people."""
    print(line, file=_Told.to, flush=True)


@dataclass
class Machine:
    """Where and under what load the figures were taken: others' work on it shows in them."""

    loads: list[float] = field(default_factory=list)
    began: float = field(default_factory=time.monotonic)

    def look(self) -> None:
        """Note the load of the last minute, once a round."""
        self.loads.append(round(os.getloadavg()[0], 2))

    def view(self) -> dict[str, Any]:
        """For the JSON line."""
        return {
            "cores": os.cpu_count(),
            "system": platform.release(),
            "python": platform.python_version(),
            "torch": torch.__version__,
            "load1": self.loads,
            "bench_seconds": round(time.monotonic() - self.began, 1),
        }


def median(values: Iterable[float | None]) -> float | None:
    """Of those that are there; None without any."""
    there = [value for value in values if value is not None]
    return round(statistics.median(there), 4) if there else None


def ratio(one: float | None, other: float | None) -> float | None:
    """``one`` as a part of ``other``."""
    return round(one / other, 4) if one is not None and other else None


def shown(value: object) -> str:
    """A figure as people read it."""
    if value is None:
        return "-"
    return f"{value:.3f}" if isinstance(value, float) else str(value)


def table(head: Sequence[str], rows: Iterable[Sequence[object]]) -> None:
    """Tell rows under their heads, aligned."""
    texts = [list(head), *([shown(value) for value in row] for row in rows)]
    widths = [max(len(row[at]) for row in texts) for at in range(len(head))]
    for row in texts:
        first, *rest = (text.ljust(w) for text, w in zip(row, widths, strict=True))
        tell("  ".join([first, *rest]).rstrip())


def end(figures: Mapping[str, Any]) -> None:
    """The last line."""
    print(json.dumps(figures), flush=True)
