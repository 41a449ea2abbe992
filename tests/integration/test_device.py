"""Trainers on a device that is made believe to lie apart from the host (:mod:`tests.fakes.apart`):
what is computed was placed, what is sent was fetched, what is saved is the device's.
"""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.fakes.standing import hashes
from tests.fakes.trainers import Generation, Trainers
from tests.integration.test_trainer_numbers import Job, curve
from trainer.contract.progress import Evaluated, Inspected, PartWritten
from trainer.contract.spec import Saving

pytestmark = pytest.mark.integration


@pytest.fixture(scope="module")
def apart(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Trainers]:
    with Trainers(tmp_path_factory.mktemp("logs"), "apart") as trainers:
        yield trainers


@pytest.fixture(scope="module")
def job(trainers: Trainers, tmp_path_factory: pytest.TempPathFactory) -> Job:
    args = {"tied": True, "dropout": 0.2, "samples": 60}
    return Job(trainers, tmp_path_factory.mktemp("job"), args=args, steps=6, batch_size=22,
               clip_grad_norm=0.5, evaluate_every=3)  # fmt: skip


def run(job: Job, trainers: Trainers, depth: int, replicas: int, **more: Any) -> Generation:
    job.trainers = trainers
    return job.run(depth, replicas, **more)


def held_out(generation: Generation) -> list[float | None]:
    return [line.loss for line in generation.ranks[0].all(Evaluated)]


def test_the_first_weights_are_measured_there_and_stay_as_they_are(
    job: Job, apart: Trainers, tmp_path: Path
) -> None:
    first = apart.first_weights(tmp_path, job.program, job.training)
    assert first.codes == [0], first.ranks[0].lines
    assert len(first.ranks[0].one(Inspected).costs.layers) == 6
    assert hashes(tmp_path, 0) == hashes(job.root, 0)


def test_no_number_depends_on_it(job: Job, trainers: Trainers, apart: Trainers) -> None:
    here, there = run(job, trainers, 2, 2), run(job, apart, 2, 2)
    assert curve(there) == curve(here)
    assert held_out(there) == held_out(here) != []


def test_a_step_saved_there_is_gone_on_from_anywhere(
    job: Job, trainers: Trainers, apart: Trainers
) -> None:
    saving = Saving(root=str(job.root), every_steps=3)
    whole = run(job, apart, 3, 1, saving=saving)
    assert [part.step for part in whole.ranks[0].all(PartWritten)] == [3, 6]
    for device in (trainers, apart):
        assert curve(run(job, device, 2, 1, step=3)) == curve(whole)[3:]
