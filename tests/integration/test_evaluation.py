"""Every so many steps the held-out samples run through the pipeline, forward only."""

import csv
import importlib.util
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from tests.fakes.programs import path
from tests.fakes.trainers import Generation, Rank, Trainers
from trainer.contract.progress import (
    Evaluated,
    ExitCode,
    Failed,
    Halt,
    Halted,
    Leave,
    Phase,
    PhaseBegun,
)
from trainer.contract.spec import Program, Shape, Training

pytestmark = pytest.mark.integration

LAYERS, HELD_OUT = 6, 7
TRAINING = Training(batch_size=12, steps=5, seed=3, evaluate_every=2)


def run(trainers: Trainers, root: Path, shape: str, **more: Any) -> Generation:
    return trainers.wait(start(trainers, root, shape, **more))


def start(
    trainers: Trainers,
    root: Path,
    shape: str,
    m: int = 2,
    training: Training = TRAINING,
    **args: Any,
) -> Generation:
    given = {"dropout": 0.3, "held_out": HELD_OUT} | args
    program = Program(source=str(path("ladder")), args=given)
    assert trainers.first_weights(root, program, training).codes == [0]
    depth, replicas = map(int, shape.split("x"))
    sizes = Shape(depth=depth, replicas=replicas, micro_batch=m)
    specs = trainers.specs(root, program, training, sizes, layers=LAYERS, step=0)
    return trainers.start(specs)


def said(generation: Generation) -> list[Evaluated]:
    """What rank 0 did; all others said the same."""
    every = [
        [line.model_copy(update={"seconds": 0.0}) for line in rank.all(Evaluated)]
        for rank in generation.ranks
    ]
    assert all(other == every[0] for other in every)
    return every[0]


def by_hand(root: Path, folder: str) -> float:
    """The mean loss of the held-out samples with the weights in ``folder``, in one go."""
    found = importlib.util.spec_from_file_location("plain_ladder", path("ladder"))
    assert found and found.loader
    ladder = importlib.util.module_from_spec(found)
    found.loader.exec_module(ladder)
    args = {"dropout": 0.3, "held_out": HELD_OUT}
    layers = ladder.layers(args)
    saved: dict[str, torch.Tensor] = {}
    for file in (root / folder).glob("*.safetensors"):
        saved |= load_file(file)
    batch = {"tokens": torch.stack([s["tokens"] for s in ladder.eval_dataset(args)])}
    value = ladder.inputs(batch)
    with torch.no_grad():
        for index, layer in enumerate(layers):
            for name, parameter in layer.eval().named_parameters():
                parameter.copy_(saved[f"parameters/layers.{index}.{name}"])
            value = layer(value)
        total, weight, _ = ladder.loss(value, batch)
    return float(total / weight)


def test_all_replicas_share_the_held_out_samples_and_say_one_loss(
    trainers: Trainers, tmp_path: Path
) -> None:
    runs = {shape: run(trainers, tmp_path / shape, shape) for shape in ("1x1", "3x1", "1x3", "2x2")}
    assert all(set(generation.codes) == {0} for generation in runs.values())
    lines = {shape: said(generation) for shape, generation in runs.items()}
    for each in lines.values():
        assert [(line.step, line.samples) for line in each] == [(2, 7), (4, 7), (5, 7)]
        assert all(0 <= line.metrics["accuracy"] <= 1 for line in each)
    assert lines["3x1"] == lines["1x1"]
    for shape, each in lines.items():
        loss = by_hand(tmp_path / shape, "step-000005.g2")
        assert each[-1].loss == pytest.approx(loss, rel=1e-6)


def test_it_changes_no_number_of_the_training(trainers: Trainers, tmp_path: Path) -> None:
    never = TRAINING.model_copy(update={"evaluate_every": None})
    with_it = run(trainers, tmp_path / "with", "2x1")
    without = run(trainers, tmp_path / "without", "2x1", training=never)
    curves = [[(s.loss, s.grad_norm) for s in g.ranks[0].steps] for g in (with_it, without)]
    assert curves[0] == curves[1]
    phases = [line.phase for line in with_it.ranks[1].all(PhaseBegun)]
    assert phases[phases.index(Phase.STEP) :] == [
        Phase.STEP, *[Phase.EVALUATION, Phase.STEP] * 3, Phase.SAVE, Phase.DONE
    ]  # fmt: skip


@pytest.mark.parametrize("held_out", [1, 2, 40])
def test_there_may_be_fewer_samples_than_replicas_and_many_more_than_in_a_batch(
    trainers: Trainers, tmp_path: Path, held_out: int
) -> None:
    generation = run(trainers, tmp_path / "job", "2x2", m=1, held_out=held_out)
    assert [line.samples for line in said(generation)] == [held_out] * 3


def test_held_out_samples_may_be_of_another_length(trainers: Trainers, tmp_path: Path) -> None:
    generation = run(trainers, tmp_path / "job", "3x1", held_out_length=9)
    assert [line.step for line in said(generation)] == [2, 4, 5]


@pytest.mark.parametrize("victim", [None, 1])
def test_one_that_is_halted_or_loses_a_rank_costs_no_step(
    trainers: Trainers, tmp_path: Path, victim: int | None
) -> None:
    endless = start(trainers, tmp_path / "job", "2x2", held_out=200_000)
    trainers.wait(endless, lambda g: all(evaluates(rank) for rank in g.ranks))
    if victim is None:
        endless.order(Halt())
    else:
        trainers.kill(endless.ranks[victim])
    others = [rank for number, rank in enumerate(endless.ranks) if number != victim]
    trainers.wait(endless, lambda g: all(rank.all(Halted) for rank in others))
    for rank in others:
        halted = rank.one(Halted)
        assert (halted.applied, halted.prepared, halted.torn) == (2, 2, False)
    endless.order(Leave())
    trainers.wait(endless)


def evaluates(rank: Rank) -> bool:
    return PhaseBegun(phase=Phase.EVALUATION) in rank.lines


def test_a_program_without_held_out_samples_is_refused_at_the_start(
    trainers: Trainers, tmp_path: Path
) -> None:
    program = Program(source=str(path("mlp")))
    generation = trainers.first_weights(tmp_path / "job", program, TRAINING)
    assert generation.codes == [ExitCode.PROGRAM_ERROR]
    assert "has no function eval_dataset()" in generation.ranks[0].one(Failed).message


def test_the_curves_are_in_the_jobs_folder(trainers: Trainers, tmp_path: Path) -> None:
    root = tmp_path / "job"
    generation = run(trainers, root, "2x2")
    folder = root / "curves" / "g2"
    with (folder / "steps.csv").open(newline="") as file:
        steps = list(csv.DictReader(file))
    assert [(int(row["step"]), float(row["loss"]), float(row["accuracy"])) for row in steps] == [
        (s.step, s.loss, s.metrics["accuracy"]) for s in generation.ranks[0].steps
    ]
    with (folder / "evaluations.csv").open(newline="") as file:
        evaluations = list(csv.DictReader(file))
    assert [(int(row["step"]), float(row["loss"])) for row in evaluations] == [
        (line.step, line.loss) for line in said(generation)
    ]
    (events,) = folder.glob("events.out.tfevents.*")
    content = events.read_bytes()
    assert content.count(b"evaluation/accuracy") == 3 and content.count(b"grad_norm") == 5
