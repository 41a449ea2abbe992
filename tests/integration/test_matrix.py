"""Every shape, micro-batch and batch size trains as a plain loop does, clipped, tied or not; and no
bit depends on the depth.
"""

from itertools import product
from pathlib import Path

import pytest

from tests.fakes.trainers import Trainers
from tests.integration.test_trainer_numbers import Curve, Job, farthest, plain_loop

pytestmark = pytest.mark.integration

DEPTHS, REPLICAS, MICRO_BATCHES = (1, 2, 3, 4), (1, 2, 3), (1, 2, 3, 5)
STEPS = 20

Kind = tuple[int, bool]
"""Batch size; whether an embedding and a head, and four layers of the middle, share weights."""

# Any two values of any two of them meet somewhere, each number of replicas at two depths, with as
# few processes as that takes.
PAIRWISE: list[tuple[Kind, int, int, tuple[int, ...]]] = [
    ((25, False), 1, 1, (1, 4)),
    ((24, False), 1, 2, (2,)),
    ((25, True), 1, 3, (3,)),
    ((24, True), 1, 5, (3, 4)),
    ((25, True), 2, 1, (2,)),
    ((25, False), 2, 2, (3, 4)),
    ((24, False), 2, 3, (2,)),
    ((25, False), 2, 5, (1,)),
    ((24, True), 3, 1, (3,)),
    ((24, True), 3, 2, (1,)),
    ((25, False), 3, 3, (1, 4)),
    ((24, True), 3, 5, (2,)),
]


class Jobs:
    """One job per kind, and its plain loop's curve."""

    def __init__(self, trainers: Trainers, root: Path) -> None:
        self._trainers = trainers
        self._root = root
        self._jobs: dict[Kind, tuple[Job, Curve]] = {}

    def of(self, kind: Kind) -> tuple[Job, Curve]:
        if kind not in self._jobs:
            batch_size, tied = kind
            args = {"samples": batch_size, "tied": tied, "shared": tied}
            root = self._root / f"{batch_size}-{tied}"
            job = Job(self._trainers, root, batch_size=batch_size, steps=STEPS, args=args,
                      clip_grad_norm=0.1)  # fmt: skip
            self._jobs[kind] = job, plain_loop(job)
        return self._jobs[kind]

    def check(self, kind: Kind, replicas: int, m: int, depths: tuple[int, ...]) -> None:
        """The curves of ``depths`` are the plain loop's, and the same in each bit."""
        job, plain = self.of(kind)
        curves = [job.curve(depth, replicas, m=m) for depth in depths]
        assert len(plain) == STEPS
        assert farthest(curves[0], plain) < 1e-5
        for depth, curve in zip(depths, curves, strict=True):
            assert curve == curves[0], f"depth {depth}"


@pytest.fixture(scope="module")
def jobs(trainers: Trainers, tmp_path_factory: pytest.TempPathFactory) -> Jobs:
    return Jobs(trainers, tmp_path_factory.mktemp("jobs"))


@pytest.mark.parametrize(("kind", "replicas", "m", "depths"), PAIRWISE)
def test_a_shape_trains_like_a_plain_loop_and_no_bit_depends_on_the_depth(
    jobs: Jobs, kind: Kind, replicas: int, m: int, depths: tuple[int, ...]
) -> None:
    jobs.check(kind, replicas, m, depths)


@pytest.mark.soak
@pytest.mark.parametrize("kind", list(product((24, 25), (False, True))))
@pytest.mark.parametrize("replicas", REPLICAS)
def test_all_of_them_do(jobs: Jobs, kind: Kind, replicas: int) -> None:
    for m in MICRO_BATCHES:
        jobs.check(kind, replicas, m, DEPTHS)
