"""The loss scale of float16 follows from what the steps were like, and from nothing else."""

from trainer.contract.scaling import FIRST_SCALE, GROWTH_STEPS, SMALLEST_SCALE, LossScale


def after(scale: LossScale, *steps: bool) -> LossScale:
    for is_finite in steps:
        scale = scale.after(is_finite)
    return scale


def test_a_step_that_is_not_finite_halves_it() -> None:
    assert after(LossScale(), True, False, False).scale == FIRST_SCALE / 4


def test_it_doubles_after_many_good_steps_in_a_row() -> None:
    good = [True] * (GROWTH_STEPS - 1)
    assert after(LossScale(), *good).scale == FIRST_SCALE
    assert after(LossScale(), *good, True) == LossScale(scale=FIRST_SCALE * 2)
    assert after(LossScale(), *good, False, *good).scale == FIRST_SCALE / 2
    assert after(LossScale(), *good, False, *good, True).scale == FIRST_SCALE


def test_there_is_a_smallest_one() -> None:
    scale = LossScale(scale=SMALLEST_SCALE * 2)
    assert not scale.is_smallest and scale.after(False).is_smallest
