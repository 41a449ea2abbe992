"""A loss or gradient that is not finite spoils no weight: all ranks stop as they were before, and
who is at fault says so. In float16 it is an overflow: all skip the step and go on.
"""

from pathlib import Path
from typing import Any

import pytest

from tests.fakes.programs import path
from tests.fakes.trainers import Generation, Trainers
from trainer.contract.listing import read_folder
from trainer.contract.progress import (
    ExitCode,
    Leave,
    NonFinite,
    PartWritten,
    Phase,
    PhaseBegun,
    Stopped,
)
from trainer.contract.samples import sample_at
from trainer.contract.scaling import FIRST_SCALE
from trainer.contract.spec import Precision, Program, Shape, Training

pytestmark = pytest.mark.integration

BATCH, SEED, MICRO_BATCH, SAMPLES = 12, 5, 3, 60
STEP, PLACE = 3, 7
"""Where in the training the spoilt sample comes: in micro-batch 2, the first of replica 1."""
SPOILT = sample_at((STEP - 1) * BATCH + PLACE, SAMPLES, SEED)


def run(
    trainers: Trainers,
    root: Path,
    how: str,
    precision: Precision = "float32",
    shape: str = "2x2",
    steps: int = 6,
    **args: Any,
) -> Generation:
    training = Training(batch_size=BATCH, steps=steps, seed=SEED, precision=precision)
    program = Program(source=str(path("spoilt")), args={"how": how, "sample": SPOILT, **args})
    if not root.exists():
        assert trainers.first_weights(root, program, training, MICRO_BATCH).codes == [0]
    depth, replicas = map(int, shape.split("x"))
    sizes = Shape(depth=depth, replicas=replicas, micro_batch=MICRO_BATCH)
    return trainers.start(trainers.specs(root, program, training, sizes, layers=4))


def stands_still(generation: Generation) -> bool:
    return all(PhaseBegun(phase=Phase.HALTED) in rank.lines for rank in generation.ranks)


def stopped(trainers: Trainers, generation: Generation) -> Generation:
    """It stood still by itself and was told to leave."""
    trainers.wait(generation, stands_still)
    generation.order(Leave())
    assert trainers.wait(generation).codes == [ExitCode.LEFT] * len(generation.ranks)
    return generation


@pytest.mark.parametrize("precision", ["float32", "bfloat16"])
@pytest.mark.parametrize(
    ("how", "stage", "what"),
    [
        ("input", 0, "the input of micro-batch 2"),
        ("layer", 1, "layer 2's output of micro-batch 2"),
        ("loss", 1, "the loss of micro-batch 2"),
        ("gradient", 0, "the gradient of layers.1.linear.bias"),
    ],
)
def test_all_stop_after_the_last_good_step_and_who_is_at_fault_says_what(
    trainers: Trainers, tmp_path: Path, how: str, stage: int, what: str, precision: Precision
) -> None:
    generation = stopped(trainers, run(trainers, tmp_path / "job", how, precision))
    said = [line for rank in generation.ranks for line in rank.all(NonFinite)]
    assert said == [NonFinite(step=STEP, replica=1, stage=stage, what=what)]
    for rank in generation.ranks:
        assert [step.step for step in rank.steps] == [1, 2]
        assert rank.one(Stopped).step == rank.one(PartWritten).step == STEP - 1


def test_what_stopped_it_stops_it_again_without_another_checkpoint(
    trainers: Trainers, tmp_path: Path
) -> None:
    stopped(trainers, run(trainers, tmp_path / "job", "loss"))
    again = stopped(trainers, run(trainers, tmp_path / "job", "loss", shape="1x1"))
    assert again.ranks[0].one(NonFinite).step == STEP
    assert again.ranks[0].one(Stopped).step == STEP - 1
    assert not again.ranks[0].all(PartWritten) and not again.ranks[0].steps


def test_what_is_not_found_again_is_said_so(trainers: Trainers, tmp_path: Path) -> None:
    running = run(trainers, tmp_path / "job", "reached", rank=1, at=[3])
    generation = stopped(trainers, running)
    (said,) = (line for rank in generation.ranks for line in rank.all(NonFinite))
    assert (said.step, said.what.split(",")[0]) == (3, "a sum over the whole batch")


def test_in_float16_all_skip_the_step_that_overflows_on_one_rank_and_train_on(
    trainers: Trainers, tmp_path: Path
) -> None:
    running = run(trainers, tmp_path / "job", "reached", "float16", rank=2, at=[3])
    generation = trainers.wait(running)
    assert generation.codes == [0] * 4
    for rank in generation.ranks:
        assert [step.step for step in rank.steps if step.skipped] == [3]
        assert [step.samples for step in rank.steps] == [BATCH] * 6
        scales = [step.loss_scale for step in rank.steps]
        assert scales == [FIRST_SCALE] * 3 + [FIRST_SCALE / 2] * 3
        norms = [step.grad_norm for step in rank.steps]
        assert norms[2] is None and norms[3] is not None
    for rank in generation.ranks[1:]:
        same = [step.model_copy(update={"seconds": 0.0}) for step in rank.steps]
        assert same == [s.model_copy(update={"seconds": 0.0}) for s in generation.ranks[0].steps]


def test_the_loss_scale_is_part_of_the_checkpoint(trainers: Trainers, tmp_path: Path) -> None:
    root = tmp_path / "job"
    running = run(trainers, root, "reached", "float16", rank=0, at=[1, 3], shape="2x1", steps=4)
    assert trainers.wait(running).codes == [0, 0]
    parts, _ = read_folder(root / "step-000004.g2")
    for part in parts:
        assert part.loss_scale is not None
        assert (part.loss_scale.scale, part.loss_scale.good_steps) == (FIRST_SCALE / 4, 1)
    running = run(trainers, root, "reached", "float16", rank=0, at=[], shape="1x2")
    (scale,) = {s.loss_scale for rank in trainers.wait(running).ranks for s in rank.steps}
    assert scale == FIRST_SCALE / 4


def test_float16_gives_up_when_no_scale_helps(trainers: Trainers, tmp_path: Path) -> None:
    running = run(trainers, tmp_path / "job", "reached", "float16", rank=0, at=list(range(99)),
                  shape="1x1", steps=99)  # fmt: skip
    generation = stopped(trainers, running)
    scales = [step.loss_scale for step in generation.ranks[0].steps]
    assert scales[0] == FIRST_SCALE and scales[-1] == 2.0**-13
    assert generation.ranks[0].one(NonFinite).step == len(scales) + 1
