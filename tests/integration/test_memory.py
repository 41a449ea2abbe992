"""A rank holds its stage, not the model."""

import re
from pathlib import Path

import pytest

from tests.fakes.programs import path
from tests.fakes.trainers import Rank, Trainers
from trainer.contract.progress import Leave, PartWritten, SaveNow
from trainer.contract.spec import Program, Shape, Training

pytestmark = [pytest.mark.integration, pytest.mark.soak]

LAYERS, WIDTH = 8, 2560


def peak_mb(rank: Rank) -> float:
    """The most memory that the process had resident so far."""
    status = Path(f"/proc/{rank.trainer.pid}/status").read_text()
    found = re.search(r"VmHWM:\s+([0-9]+) kB", status)
    assert found
    return int(found[1]) / 1024


def zygote_mb(rank: Rank) -> float:
    """What its parent has, most of which the process was forked with."""
    status = Path(f"/proc/{rank.trainer.pid}/status").read_text()
    parent = re.search(r"PPid:\s+([0-9]+)", status)
    assert parent
    of_parent = Path(f"/proc/{parent[1]}/status").read_text()
    found = re.search(r"VmRSS:\s+([0-9]+) kB", of_parent)
    assert found
    return int(found[1]) / 1024


def peak_above_the_zygote(trainers: Trainers, root: Path, depth: int) -> float:
    """In MB, of the rank that needs most, while it trains, and saves once."""
    program = Program(source=str(path("heavy")), args={"layers": LAYERS, "width": WIDTH})
    training = Training(batch_size=8, steps=1_000_000)
    assert trainers.first_weights(root, program, training, micro_batch=2).codes == [0]
    shape = Shape(depth=depth, replicas=1, micro_batch=2)
    generation = trainers.start(trainers.specs(root, program, training, shape, layers=LAYERS))
    trainers.wait(generation, lambda g: all(len(rank.steps) >= 3 for rank in g.ranks), 600)
    generation.order(SaveNow())
    trainers.wait(generation, lambda g: all(rank.all(PartWritten) for rank in g.ranks), 600)
    peaks = [peak_mb(rank) - zygote_mb(rank) for rank in generation.ranks]
    generation.order(Leave())
    trainers.wait(generation)
    print(f"depth {depth}: {', '.join(f'{peak:.0f}' for peak in peaks)} MB above the zygote")
    return max(peaks)


def test_a_fourth_of_the_model_needs_less_than_two_fifths_of_the_memory(
    trainers: Trainers, tmp_path: Path
) -> None:
    whole = peak_above_the_zygote(trainers, tmp_path / "whole", depth=1)
    fourth = peak_above_the_zygote(trainers, tmp_path / "fourth", depth=4)
    assert whole > 200
    assert fourth <= 0.4 * whole
