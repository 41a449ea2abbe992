"""Good runs pass, and for each promise a run that broke it does not: a checker that cannot fail
proves nothing.
"""

from dataclasses import replace

import pytest

from controller.chaos.verdict import (
    MORPH_STEPS,
    Launch,
    Replay,
    Seen,
    difference,
    each_sample_once,
    nobody_died,
    nothing_left,
    nothing_saved_is_lost,
    one_writer,
    replays_equal,
    steps_monotone,
    went_on,
)

LOSSES = {step: 5.0 - step / 100 for step in range(1, 81)}
SECOND = Launch(2, 0, {step: LOSSES[step] for step in range(1, 41)})
"""Steps 1 to 40; the next one goes on from step 30."""
THIRD = Launch(3, 30, {step: LOSSES[step] for step in range(31, 81)})
LAUNCHES = (SECOND, THIRD)
REPLAYS = (
    Replay(2, {step: LOSSES[step] for step in range(1, 21)}),
    Replay(3, {step: LOSSES[step] for step in range(31, 51)}),
)


def looks(*told: tuple[int, int, int]) -> list[Seen]:
    """(generation, step, saved) a second."""
    return [Seen(float(at), *values) for at, values in enumerate(told)]


GOOD = looks((2, 0, 0), (2, 20, 10), (2, 40, 30), (3, 40, 30), (3, 33, 30), (3, 80, 70))


def test_a_good_run_keeps_every_promise() -> None:
    held = [
        each_sample_once(80, None),
        steps_monotone(GOOD, LAUNCHES),
        nothing_saved_is_lost(GOOD, LAUNCHES, condemned=0),
        one_writer([], 10),
        replays_equal(LAUNCHES, REPLAYS),
        nothing_left([]),
        nobody_died([]),
        went_on("", 80),
    ]
    assert [invariant.name for invariant in held if not invariant.holds] == []


# ---- the ledger


def test_a_gap_in_the_ledger_breaks_it() -> None:
    broken = each_sample_once(80, "step 31: no report of it came from generation 3")
    assert not broken.holds and "step 31" in broken.said


def test_no_step_at_all_is_no_proof() -> None:
    assert not each_sample_once(0, None).holds


# ---- committed steps


def test_a_step_back_without_a_new_generation_breaks_it() -> None:
    assert not steps_monotone(looks((2, 40, 30), (2, 39, 30)), LAUNCHES).holds


def test_a_second_step_back_of_one_generation_breaks_it() -> None:
    seen = looks((2, 40, 30), (3, 31, 30), (3, 45, 30), (3, 44, 30))
    assert not steps_monotone(seen, LAUNCHES).holds


def test_a_step_back_of_a_generation_that_had_begun_without_one_breaks_it() -> None:
    seen = looks((2, 40, 30), (3, 45, 30), (3, 44, 30))
    assert not steps_monotone(seen, LAUNCHES).holds


def test_a_step_back_to_before_where_the_new_generation_went_on_breaks_it() -> None:
    assert not steps_monotone(looks((2, 40, 30), (3, 29, 20)), LAUNCHES).holds


def test_a_step_back_before_any_new_generation_began_breaks_it() -> None:
    assert not steps_monotone(looks((2, 40, 30), (2, 35, 30), (3, 36, 30)), LAUNCHES).holds


def test_a_step_back_that_no_launch_explains_breaks_it() -> None:
    assert not steps_monotone(looks((2, 40, 30), (3, 33, 30)), [SECOND]).holds


def test_a_launch_that_comes_to_nothing_steps_back_for_as_long_as_it_lives() -> None:
    fourth = Launch(4, 30, {31: LOSSES[31]})
    seen = looks((2, 40, 30), (3, 30, 30), (3, 40, 30), (4, 30, 30), (4, 31, 30))
    assert steps_monotone(seen, [SECOND, replace(THIRD, losses={}), fourth]).holds


def test_a_launch_without_steps_needs_no_replay() -> None:
    assert replays_equal([*LAUNCHES, Launch(4, 80, {})], REPLAYS).holds


def test_a_generation_number_that_comes_back_breaks_it() -> None:
    assert not steps_monotone(looks((3, 40, 30), (2, 41, 30)), LAUNCHES).holds


def test_two_generations_may_step_back_one_after_the_other() -> None:
    fourth = Launch(4, 30, {31: LOSSES[31]})
    seen = looks((2, 40, 30), (4, 33, 30), (4, 31, 30))
    assert steps_monotone(seen, [*LAUNCHES, fourth]).holds


def test_a_run_that_nobody_looked_at_is_no_proof() -> None:
    assert not steps_monotone([], LAUNCHES).holds
    assert not one_writer([], looks=0).holds


# ---- what was saved


def test_a_generation_that_goes_back_behind_a_known_checkpoint_breaks_it() -> None:
    early = replace(THIRD, resumed_from=20)
    broken = nothing_saved_is_lost(GOOD, (SECOND, early), condemned=0)
    assert not broken.holds and "step 20" in broken.said and "step 30" in broken.said


def test_a_checkpoint_that_was_found_damaged_is_an_excuse() -> None:
    early = replace(THIRD, resumed_from=20)
    assert nothing_saved_is_lost(GOOD, (SECOND, early), condemned=1).holds


# ---- writers


def test_what_was_seen_of_a_second_writer_breaks_it() -> None:
    broken = one_writer(["part-0.json was written twice", "another thing"], 10)
    assert not broken.holds and "and 1 more" in broken.said


# ---- replays


def test_a_loss_that_differs_by_more_than_rounding_breaks_it() -> None:
    off = Replay(3, {**REPLAYS[1].losses, 40: LOSSES[40] * (1 + 3e-5)})
    broken = replays_equal(LAUNCHES, (REPLAYS[0], off))
    assert not broken.holds and "step 40 of generation 3" in broken.said


def test_rounding_does_not() -> None:
    off = Replay(3, {**REPLAYS[1].losses, 40: LOSSES[40] * (1 + 3e-6)})
    assert replays_equal(LAUNCHES, (REPLAYS[0], off)).holds


@pytest.mark.parametrize(
    "replays",
    [
        (),
        REPLAYS[:1],
        (REPLAYS[0], Replay(3, {}, "cannot be replayed: no checkpoint")),
        (REPLAYS[0], Replay(3, {})),
        (REPLAYS[0], Replay(3, {step: LOSSES[step] for step in range(31, 50)})),
    ],
    ids=["none", "one missing", "one failed", "one empty", "a step short"],
)
def test_what_was_not_replayed_is_no_proof(replays: tuple[Replay, ...]) -> None:
    assert not replays_equal(LAUNCHES, replays).holds


def test_no_launches_are_no_proof() -> None:
    assert not replays_equal((), ()).holds


def test_no_more_than_the_first_steps_are_compared() -> None:
    late = 31 + MORPH_STEPS
    off = replace(THIRD, losses={**THIRD.losses, late: 99.0})
    assert replays_equal((SECOND, off), REPLAYS).holds


def test_a_loss_that_is_no_number_equals_only_another_such() -> None:
    assert difference(None, None) == 0.0
    assert difference(None, 1.0) == difference(1.0, None) == float("inf")


# ---- the rest


def test_anything_left_breaks_it() -> None:
    broken = nothing_left(["process 1", "port 2", "/a", "/b"])
    assert not broken.holds and "and 1 more" in broken.said


def test_a_death_of_its_own_breaks_it() -> None:
    assert not nobody_died(["agent of node-1"]).holds


def test_a_job_that_does_not_go_on_breaks_it() -> None:
    assert not went_on("no 20 steps within 120 s", 40).holds
