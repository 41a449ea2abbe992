"""Who is slow, by windows of steps."""

from collections.abc import Sequence

import pytest

from controller.planner.stragglers import Slow, slow_ranks
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


def test_a_rank_slower_than_its_stages_other_replicas_is_slow() -> None:
    paces = steady(1.0, 3.0, 1.0, 3.0, 1.5, 3.0)  # stage 1 takes long on all replicas
    assert slow_ranks(paces, shape(2, 3), 1.3) == [Slow(4, 1.5)]


def test_of_two_replicas_the_slower_one_is_slow() -> None:
    (slow,) = slow_ranks(steady(1.0, 1.4), shape(1, 2), 1.3)
    assert slow.rank == 1
    assert slow.factor == pytest.approx(1.4)


def test_nobody_is_slow_within_the_factor() -> None:
    assert slow_ranks(steady(1.0, 1.29, 0.9), shape(1, 3), 1.5) == []


def test_one_slow_window_makes_nobody_slow_nor_do_too_few() -> None:
    mixed = {**steady(1.0, 1.0), 2: windows(*[2.0] * (WINDOWS - 1), 1.0)}
    assert slow_ranks(mixed, shape(1, 3), 1.3) == []
    few = {**steady(1.0, 1.0), 2: windows(2.0, 2.0)}
    assert slow_ranks(few, shape(1, 3), 1.3) == []


def test_without_replicas_the_calibration_tells_and_a_load_on_all_makes_nobody_slow() -> None:
    calibrated = (1.0, 2.0, 4.0)
    assert slow_ranks(steady(3.0, 6.0, 12.0), shape(3, 1), 1.3, calibrated) == []
    assert slow_ranks(steady(1.0, 2.0, 8.0), shape(3, 1), 1.3, calibrated) == [Slow(2, 2.0)]
    assert slow_ranks(steady(1.0, 2.0, 8.0), shape(3, 1), 1.3) == []
