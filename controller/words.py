"""How numbers, times and states are written for people, so that terminal and page say the same.

Past tense, number and unit, glyph beside word (never colour alone). Pure: the time is an argument.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime

from controller.api.schemas import (
    GenerationView,
    JobView,
    LedgerView,
    NodeView,
    RecoveryView,
    ReplayView,
    SeatView,
)
from controller.core.states import JobState, NodeState
from controller.core.words import count as count
from controller.core.words import times as times
from trainer.contract.progress import ExitCode

NOTHING = "–"
"""What a missing value looks like in a table."""

JOB_GLYPH: Mapping[JobState, str] = {
    JobState.WAITING: "◌",
    JobState.STARTING: "◐",
    JobState.RUNNING: "●",
    JobState.RECOVERING: "↻",
    JobState.PAUSED: "‖",
    JobState.SUCCEEDED: "✓",
    JobState.FAILED: "✕",
    JobState.CANCELLED: "⊘",
}
NODE_GLYPH: Mapping[NodeState, str] = {
    NodeState.JOINING: "◐",
    NodeState.READY: "○",
    NodeState.WORKING: "●",
    NodeState.DRAINING: "◑",
    NodeState.LOST: "✕",
    NodeState.EVICTED: "✕",
}


def number(value: float | None, digits: int = 1) -> str:
    """``31.4``; a thousand and more without decimals: ``1,262``."""
    if value is None:
        return NOTHING
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.{digits}f}"


def seconds(value: float | None) -> str:
    """A short span: ``0.21 s``, ``9.2 s``, ``27 s``, then as :func:`age`."""
    if value is None:
        return NOTHING
    if value >= 100:
        return age(value)
    return f"{value:.0f} s" if value >= 10 else f"{value:.1f} s" if value >= 1 else f"{value:.2f} s"


def age(value: float) -> str:
    """A long span in its two largest units: ``4s``, ``12m 5s``, ``2h 10m``, ``3d 4h``."""
    left = max(0, int(value))
    parts: list[str] = []
    for unit, size in (("d", 86400), ("h", 3600), ("m", 60), ("s", 1)):
        amount, left = divmod(left, size)
        if amount or parts:
            parts.append(f"{amount}{unit}")
    kept = [part for part in parts[:2] if not part.startswith("0")]
    return " ".join(kept) or "0s"


def since(then: datetime, now: datetime) -> str:
    """How long ago."""
    return age((now - then).total_seconds())


def size(num_bytes: int) -> str:
    """``812 B``, ``1.2 MB``: powers of 1000."""
    if num_bytes < 1000:
        return f"{num_bytes} B"
    value = float(num_bytes)
    for unit in ("kB", "MB", "GB"):
        value /= 1000
        if value < 1000:
            return f"{value:.1f} {unit}"
    return f"{value / 1000:.1f} TB"


def step(job: JobView) -> str:
    """``1,262/20,000``."""
    return f"{job.step:,}/{job.steps:,}"


def nodes(job: JobView) -> str:
    """``5/8``: used of at most; ``5/2+`` when there is no upper bound."""
    return f"{job.nodes.used}/{job.nodes.max or f'{job.nodes.min}+'}"


def recoveries(job: JobView) -> str:
    """``3 (27 s)``."""
    return f"{job.recoveries} ({seconds(job.gap_seconds)})" if job.recoveries else "0"


def recovery(view: RecoveryView) -> str:
    """``4×2 → 5×1; resumed from step 240 (lost 3 steps, 2.1 s)``, or ``(no steps lost, 0.9 s)``."""
    there = times(view.to_shape) if view.to_shape else "…"
    move = f"{times(view.from_shape)} → {there}"
    if view.resumed_from is None or view.lost_steps is None:
        return f"{move}; not yet resumed"
    cost = [f"lost {count(view.lost_steps, 'step')}" if view.lost_steps else "no steps lost"]
    cost += [seconds(view.gap_s)] if view.gap_s is not None else []
    return f"{move}; resumed from step {view.resumed_from:,} ({', '.join(cost)})"


def slow(node: NodeView) -> str:
    """``slow 1.60×``; empty: it is not."""
    return f"slow {node.slow:.2f}×" if node.slow else ""


def quarantine(node: NodeView) -> str:
    """Why it is not used; empty: it may be."""
    return node.quarantine.because if node.quarantine else ""


def replay(view: ReplayView) -> str:
    """``replayed steps match: max difference 1.2e-07 (3 steps)``; empty when none was."""
    if not view.steps:
        return ""
    if view.first_mismatch is not None:
        return f"replayed steps do not match: step {view.first_mismatch:,} is another one"
    again = count(view.steps, "step")
    return f"replayed steps match: max difference {view.max_difference:.2g} ({again})"


def samples(view: LedgerView) -> str:
    """``each of 480 samples once, steps 1 to 20``, or what is wrong."""
    if view.first_gap is not None:
        return f"NOT each once: step {view.first_gap.step:,}: {view.first_gap.what}"
    return f"each of {view.samples:,} once, in {count(view.steps, 'step')}"


def node_ranks(node: NodeView) -> str:
    """``0, 4`` or nothing."""
    return ", ".join(str(rank) for rank in node.ranks) or NOTHING


@dataclass(frozen=True)
class Cell:
    """One seat of the stage x replica grid: a glyph, a word for it, and who sits there."""

    glyph: str
    word: str
    seat: SeatView


def grid(generation: GenerationView) -> tuple[tuple[Cell, ...], ...]:
    """Rows are stages, columns replicas; empty while nobody is seated."""
    rows: dict[int, list[Cell]] = {}
    for seat in sorted(generation.seats, key=lambda s: (s.stage, s.replica)):
        rows.setdefault(seat.stage, []).append(Cell(*_seat_state(seat), seat=seat))
    return tuple(tuple(row) for row in rows.values())


def layers_of(cuts: Sequence[int], stage: int) -> str:
    """``layers 0-2``; the last one is the next cut's neighbour."""
    if stage + 1 >= len(cuts):
        return ""
    first, last = cuts[stage], cuts[stage + 1] - 1
    return f"layer {first}" if first == last else f"layers {first}-{last}"


def _seat_state(seat: SeatView) -> tuple[str, str]:
    if seat.failed:
        return "✕", "failed"
    match seat.exit_code:
        case ExitCode.DONE:
            return "✓", "done"
        case ExitCode.LEFT:
            return "◌", "left"
    if seat.exit_signal is not None or seat.exit_code is not None:
        return "✕", "lost"
    match seat.phase:
        case "step" | "save":
            return "●", "training" if seat.phase == "step" else "saving"
        case "halted":
            return "‖", "halted"
        case "done":
            return "✓", "done"
        case None:
            return "◌", "starting"
        case _:
            return "◐", seat.phase.replace("_", " ")
