"""Numbers, times and states are written one way everywhere."""

from datetime import UTC, datetime

import pytest

from controller import words
from controller.api.schemas import (
    GenerationView,
    RecoveryPhases,
    RecoveryView,
    ReplayView,
    SeatView,
)
from controller.core.states import GenerationState, JobState, NodeState

NOON = datetime(2026, 11, 29, 12, tzinfo=UTC)


@pytest.mark.parametrize(
    ("value", "text"),
    [(0, "0s"), (4.9, "4s"), (60, "1m"), (725, "12m 5s"), (7800, "2h 10m"), (3600 * 76, "3d 4h"),
     (-3, "0s"), (86405, "1d")],
)  # fmt: skip
def test_a_long_span_is_told_in_its_two_largest_units(value: float, text: str) -> None:
    assert words.age(value) == text


@pytest.mark.parametrize(
    ("value", "text"),
    [(None, "–"), (0.213, "0.21 s"), (9.23, "9.2 s"), (27.4, "27 s"), (130, "2m 10s")],
)
def test_a_short_span_has_as_many_digits_as_matter(value: float | None, text: str) -> None:
    assert words.seconds(value) == text


@pytest.mark.parametrize(
    ("value", "text"), [(None, "–"), (31.42, "31.4"), (0.0, "0.0"), (1262.7, "1,263")]
)
def test_a_number_has_a_thousands_separator(value: float | None, text: str) -> None:
    assert words.number(value) == text


@pytest.mark.parametrize(
    ("value", "text"), [(0, "0 B"), (999, "999 B"), (1200, "1.2 kB"), (5_000_000_000_000, "5.0 TB")]
)
def test_a_size_is_in_powers_of_a_thousand(value: int, text: str) -> None:
    assert words.size(value) == text


def test_one_is_singular() -> None:
    assert [words.count(n, "step") for n in (0, 1, 1240)] == ["0 steps", "1 step", "1,240 steps"]


def test_every_state_has_a_glyph() -> None:
    assert set(words.JOB_GLYPH) == set(JobState)
    assert set(words.NODE_GLYPH) == set(NodeState)


def recovery(**but: object) -> RecoveryView:
    whole: dict[str, object] = {
        "number": 1, "at_step": 243, "resumed_from": 240, "lost_steps": 3, "gap_s": 2.14,
        "phases": RecoveryPhases(), "from_shape": "4x2", "to_shape": "5x1", "from_generation": 2,
        "to_generation": 3, "reason": None, "because": "", "began_at": NOON, "ended_at": NOON,
    }  # fmt: skip
    return RecoveryView.model_validate(whole | but)


def test_a_recovery_is_told_as_move_and_cost() -> None:
    assert words.recovery(recovery()) == "4×2 → 5×1; resumed from step 240 (lost 3 steps, 2.1 s)"


def test_a_recovery_that_goes_on_says_so() -> None:
    running = recovery(resumed_from=None, lost_steps=None, gap_s=None, to_shape=None)
    assert words.recovery(running) == "4×2 → …; not yet resumed"


def seat(stage: int, replica: int, **but: object) -> SeatView:
    whole: dict[str, object] = {
        "rank": replica * 2 + stage, "stage": stage, "replica": replica, "node": f"vm-{stage}",
        "incarnation": "i", "device": 0, "phase": "step", "step": 3,
    }  # fmt: skip
    return SeatView.model_validate(whole | but)


def generation(*seats: SeatView) -> GenerationView:
    return GenerationView(
        number=2, kind="train", state=GenerationState.RUNNING, shape=None, cuts=(0, 3, 4),
        seats=seats, resumed_from=None, committed=3, because="", end_reason=None, end_because=None,
        created_at=NOON, launched_at=NOON, first_step_at=None, ended_at=None,
    )  # fmt: skip


def test_the_grid_has_a_row_a_stage_and_a_column_a_replica() -> None:
    seats = [seat(stage, replica) for replica in (1, 0) for stage in (1, 0)]
    rows = words.grid(generation(*seats))
    assert [[cell.seat.rank for cell in row] for row in rows] == [[0, 2], [1, 3]]


@pytest.mark.parametrize(
    ("but", "glyph", "word"),
    [
        ({}, "●", "training"),
        ({"phase": None}, "◌", "starting"),
        ({"phase": "first_step"}, "◐", "first step"),
        ({"phase": "halted"}, "‖", "halted"),
        ({"exit_signal": 9}, "✕", "lost"),
        ({"exit_code": 21, "failed": "boom"}, "✕", "failed"),
        ({"exit_code": 0}, "✓", "done"),
        ({"exit_code": 20, "phase": "halted"}, "◌", "left"),
    ],
)
def test_a_seat_is_a_glyph_and_a_word(but: dict[str, object], glyph: str, word: str) -> None:
    ((cell,),) = words.grid(generation(seat(0, 0, **but)))
    assert (cell.glyph, cell.word) == (glyph, word)


def test_the_layers_of_a_stage_are_named_by_its_cuts() -> None:
    assert [words.layers_of((0, 3, 4), s) for s in (0, 1, 2)] == ["layers 0-2", "layer 3", ""]


@pytest.mark.parametrize(
    ("view", "said"),
    [
        ((0, 0.0, None, None), ""),
        ((3, 1.2e-7, 9, None), "replayed steps match: max difference 1.2e-07 (3 steps)"),
        ((1, 0.0, 9, None), "replayed steps match: max difference 0 (1 step)"),
        ((3, 0.5, 9, 8), "replayed steps do not match: step 8 is another one"),
    ],
)
def test_whether_what_was_done_again_gave_the_same(
    view: tuple[int, float, int | None, int | None], said: str
) -> None:
    steps, difference, at, mismatch = view
    made = ReplayView(steps=steps, max_difference=difference, at_step=at, first_mismatch=mismatch)
    assert words.replay(made) == said
