"""How a gap is cut into phases."""

import pytest

from controller.store.history import PHASES, sum_of

NAMES = ("detect", "decide", "save", "decide", *PHASES[3:])


@pytest.mark.parametrize(
    ("ends", "phases"),
    [
        ([1, 2, 2, 2, 3, 5, 8, 8, 9], [1, 1, 0, 1, 2, 3, 0, 1]),  # from disk
        ([1, 2, 4, 5, 6, 7, 8, 8, 9], [1, 2, 2, 1, 1, 1, 0, 1]),  # survivors saved
        ([1, 4, 4, 4, 3, 5, 8, 8, 9], [1, 3, 0, 0, 1, 3, 0, 1]),  # stopped before it was decided
        ([1, 2, 4, None, None, None, None, None, None], [1, 1, 2, *[None] * 5]),
        ([None] * 9, [None] * 8),
    ],
)
def test_phases_add_up_to_the_gap(ends: list[float | None], phases: list[float | None]) -> None:
    found = sum_of(0.0, list(zip(NAMES, ends, strict=True)))
    assert list(found) == list(PHASES)
    assert list(found.values()) == phases
    if ends[-1] is not None:
        assert sum(p for p in found.values() if p is not None) == ends[-1]
