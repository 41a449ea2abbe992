"""Any number of micro-batches, however short the last, and more stages than there are of them."""

from pathlib import Path

import pytest

from tests.fakes.trainers import Trainers
from tests.integration.test_trainer_numbers import Job, farthest, plain_loop

pytestmark = [pytest.mark.integration, pytest.mark.soak]


@pytest.mark.parametrize("count", range(1, 10))
def test_any_number_of_micro_batches_trains_alike_at_every_depth(
    trainers: Trainers, tmp_path: Path, count: int
) -> None:
    """The last one is short, and the only one too."""
    args = {"samples": 3 * count - 1, "tied": True}
    job = Job(trainers, tmp_path / "job", batch_size=3 * count - 1, steps=5, args=args)
    curves = [job.curve(depth, 1, m=3) for depth in (1, 2, 3, 4)]
    assert farthest(curves[0], plain_loop(job)) < 1e-5
    assert all(curve == curves[0] for curve in curves)
