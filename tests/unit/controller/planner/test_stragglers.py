"""Who is slow, by windows of steps."""

from collections.abc import Mapping, Sequence

from controller.planner.stragglers import Pace, paces_of
from trainer.contract.progress import WINDOWS, Paced
from trainer.contract.spec import Shape


def windows(*forward: float) -> list[Paced]:
    return [
        Paced(step=step, forward_seconds=seconds, recompute_seconds=0, backward_seconds=0,
              reduce_seconds=0)
        for step, seconds in enumerate(forward)
    ]  # fmt: skip


def steady(*ranks: float) -> dict[int, Sequence[Paced]]:
    return {rank: windows(*[seconds] * WINDOWS) for rank, seconds in enumerate(ranks)}


def shape(depth: int, replicas: int) -> Shape:
    return Shape(depth=depth, replicas=replicas, micro_batch=1)


def slow(paces: Mapping[int, Pace], factor: float = 1.3) -> dict[int, float]:
    return {rank: round(pace.least, 6) for rank, pace in paces.items() if pace.is_slow(factor)}


def test_a_rank_slower_than_its_stages_other_replicas_is_slow() -> None:
    windows = steady(1.0, 3.0, 1.0, 3.0, 1.5, 3.0)  # stage 1 takes long on all replicas
    assert slow(paces_of(windows, shape(2, 3))) == {4: 1.5}


def test_of_two_replicas_the_slower_one_is_slow() -> None:
    assert slow(paces_of(steady(1.0, 1.4), shape(1, 2))) == {1: 1.4}


def test_nobody_is_slow_within_the_factor() -> None:
    assert not slow(paces_of(steady(1.0, 1.29, 0.9), shape(1, 3)), 1.5)


def test_one_slow_window_makes_nobody_slow_nor_do_too_few() -> None:
    mixed = {**steady(1.0, 1.0), 2: windows(*[2.0] * (WINDOWS - 1), 1.0)}
    assert not slow(paces_of(mixed, shape(1, 3)))
    few = {**steady(1.0, 1.0), 2: windows(2.0, 2.0)}
    assert 2 not in paces_of(few, shape(1, 3))


def test_who_is_nearly_slow_is_not_as_fast_as_the_others_either() -> None:
    found = paces_of(steady(1.0, 1.1, 1.25), shape(1, 3))
    assert found[1].is_as_others(1.3) and not found[2].is_as_others(1.3)
    assert not found[2].is_slow(1.3)


def test_one_slow_window_is_enough_not_to_be_as_fast_as_the_others() -> None:
    mixed = {**steady(1.0, 1.0), 2: windows(*[1.0] * (WINDOWS - 1), 2.0)}
    assert not paces_of(mixed, shape(1, 3))[2].is_as_others(1.3)


def test_without_replicas_the_calibration_tells_and_a_load_on_all_makes_nobody_slow() -> None:
    calibrated = (1.0, 2.0, 4.0)
    assert not slow(paces_of(steady(3.0, 6.0, 12.0), shape(3, 1), calibrated))
    assert slow(paces_of(steady(1.0, 2.0, 8.0), shape(3, 1), calibrated)) == {2: 2.0}
    assert not paces_of(steady(1.0, 2.0, 8.0), shape(3, 1))
