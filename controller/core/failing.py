"""What a failure was: is it the same one again? PURE.

Two failures are the same when they came after the same step and said the same, but for numbers
(ranks, addresses). What a node alone is blamed for is no failure of the program.
"""

import re
from collections.abc import Iterable, Sequence
from itertools import pairwise

from controller.core.states import Reason
from controller.core.world import EndedGeneration, Seat
from trainer.contract.progress import ExitCode, NonFinite

_LINES = 3
_LONGEST = 400


def words_of(seats: Iterable[Seat]) -> tuple[str, str]:
    """What a generation failed by, in the program's own words, and the last lines of its log."""
    ours = (ExitCode.PROGRAM_ERROR, ExitCode.INTERNAL)
    by_time = sorted(seats, key=lambda s: (s.failed_at or float("inf"), s.rank))
    for seat in by_time:
        if seat.failed is not None and seat.failed.code in ours:
            lines = seat.failed.details or (seat.exit.log_tail if seat.exit else "")
            return _plain(seat.failed.message), _tail(lines)
    if found := next((s.non_finite for s in by_time if s.non_finite), None):
        return _plain(found.what), ""
    tails = (s.exit.log_tail for s in by_time if s.exit and s.exit.code not in (None, *ExitCode))
    return "", _tail(next(tails, ""))


def same_in_a_row(past: Sequence[EndedGeneration]) -> list[EndedGeneration]:
    """The last launches that failed in one and the same way, newest last. What was lost on the way
    there with its nodes does not come between.
    """
    launched = [g for g in past if g.launched]
    if not launched or not launched[-1].failed:
        return []
    last = launched[-1]
    same = [last]
    for g in reversed(launched[:-1]):
        if g.failed and (g.reached, g.error) == (last.reached, last.error):
            same.insert(0, g)
        elif g.failed or g.reached > last.reached or g.reason is Reason.DONE:
            break
    return same


def is_of_one_node(same: Sequence[EndedGeneration]) -> bool:
    """Whether one node alone is blamed for all of them: it is the node then."""
    return same[0].blamed is not None and all(a.blamed == b.blamed for a, b in pairwise(same))


def of_not_finite(seats: Iterable[Seat]) -> NonFinite | None:
    """What is not finite, if anything is: a loss before gradients, which follow from it."""
    found = [seat.non_finite for seat in seats if seat.non_finite]
    return min(found, key=lambda said: ("loss" not in said.what, said.replica), default=None)


def _plain(message: str) -> str:
    """Without the numbers."""
    return re.sub(r"0x[0-9a-f]+|\d+", "#", message.removeprefix("rank "))


def _tail(text: str) -> str:
    """The last lines, in one."""
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    return " | ".join(lines[-_LINES:])[-_LONGEST:]
