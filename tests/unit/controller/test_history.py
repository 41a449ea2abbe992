"""How a gap is cut into phases."""

import pytest

from controller.store.history import PHASES, _differences


@pytest.mark.parametrize(
    ("ends", "phases"),
    [
        ([1, 2, 2, 3, 5, 8, 8, 9], [1, 1, 0, 1, 2, 3, 0, 1]),
        ([1, 4, 4, 3, 5, 8, 8, 9], [1, 3, 0, 0, 1, 3, 0, 1]),  # stopped before it was decided
        ([1, 2, 2, 3, None, None, None, None], [1, 1, 0, 1, None, None, None, None]),
        ([None] * 8, [None] * 8),
    ],
)
def test_phases_add_up_to_the_gap(ends: list[float | None], phases: list[float | None]) -> None:
    found = _differences(0.0, ends)
    assert found == phases
    assert len(found) == len(PHASES)
    if ends[-1] is not None:
        assert sum(p for p in found if p is not None) == ends[-1]
