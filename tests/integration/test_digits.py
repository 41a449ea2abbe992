"""The example that is no transformer: a CNN with GroupNorm on scikit-learn's digits."""

import runpy
from pathlib import Path

import pytest
import torch

from controller.specfile import read_yaml
from tests.fakes.trainers import Trainers
from tests.integration.test_trainer_numbers import Job, farthest

pytestmark = pytest.mark.integration

EXAMPLES = Path(__file__).parents[2] / "trainer" / "examples"


def test_it_learns_alike_at_1x1_and_3x2_and_reads_most_digits(
    warmed: Trainers, tmp_path: Path
) -> None:
    spec = read_yaml((EXAMPLES / "digits.yaml").read_text(), ["batch_size=48"])
    job = Job(
        warmed, tmp_path / "job", str(EXAMPLES / "digits"), layers=5, args=spec.args,
        batch_size=spec.batch_size, steps=30, clip_grad_norm=1,
    )  # fmt: skip
    alone, deep = job.run(1, 1, m=8), job.run(3, 2, m=8)
    curves = [[(s.loss, s.grad_norm) for s in run.ranks[0].steps] for run in (alone, deep)]
    assert farthest(curves[1], curves[0]) < 1e-5
    right = [step.metrics["accuracy"] for step in deep.ranks[0].steps]
    assert right[0] < 0.3
    assert sum(right[-5:]) / 5 > 0.5


def test_what_is_held_out_is_apart_and_does_not_move() -> None:
    program = runpy.run_path(str(EXAMPLES / "digits.py"))
    training, held_out = program["dataset"]({}), program["eval_dataset"]({})
    assert (len(training), len(held_out)) == (1500, 297)
    assert torch.equal(held_out[5]["image"], held_out[5]["image"])
