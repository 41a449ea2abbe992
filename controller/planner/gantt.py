"""A played mini-batch as rows of letters, a picture for a terminal. PURE.

stage 0  FFFFRRBBBB··RRBBBB      each letter what the stage does most of that time, · nothing
"""

from collections.abc import Sequence

from controller.planner.simulate import Span
from trainer.contract.schedule import Kind

IDLE = "·"


def rows(spans: Sequence[Sequence[Span]], width: int) -> list[str]:
    """One row of ``width`` letters a stage, all on the same time."""
    whole = max((span.end for stage in spans for span in stage), default=0.0)
    return [_row(stage, whole, width) for stage in spans]


def _row(spans: Sequence[Span], whole: float, width: int) -> str:
    if not whole:
        return IDLE * width
    shares = [dict.fromkeys((*Kind, IDLE), 0.0) for _ in range(width)]
    for task, start, end in spans:
        for cell in range(int(start / whole * width), width):
            left, right = cell * whole / width, (cell + 1) * whole / width
            if left >= end:
                break
            shares[cell][task.kind] += min(end, right) - max(start, left)
    for share in shares:
        share[IDLE] = whole / width - sum(share.values())
    return "".join(max(share, key=lambda what: share[what]) for share in shares)
