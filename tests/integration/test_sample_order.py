"""Which samples a job is trained on does not depend on how many replicas it has, nor on how often
it is cut short: the program itself says which ones it saw.
"""

from collections import Counter
from pathlib import Path

import pytest

from tests.fakes.trainers import PROGRAMS, Generation, Trainers
from trainer.contract.listing import scan, to_resume
from trainer.contract.progress import PartWritten
from trainer.contract.samples import positions_of
from trainer.contract.spec import Program, Saving, Shape, Training

pytestmark = pytest.mark.integration

SAMPLES, BATCH, STEPS = 16, 10, 20
PROGRAM = Program(
    source=str(PROGRAMS / "counting.py"), workdir=str(PROGRAMS), args={"samples": SAMPLES}
)
Seen = dict[int, Counter[int]]
"""Step -> which samples it took, by all ranks together."""


def begun(trainers: Trainers, root: Path) -> Path:
    weights = trainers.first_weights(root, PROGRAM, Training(batch_size=BATCH, steps=STEPS))
    assert weights.codes == [0]
    return root


def start(trainers: Trainers, root: Path, shape: str, steps: int, every: int = 99) -> Generation:
    """A generation that goes on from the newest checkpoint."""
    depth, replicas = map(int, shape.split("x"))
    training = Training(batch_size=BATCH, steps=steps)
    sizes = Shape(depth=depth, replicas=replicas, micro_batch=3)
    saving = Saving(root=str(root), every_steps=every)
    specs = trainers.specs(root, PROGRAM, training, sizes, layers=3, saving=saving)
    return trainers.start(specs)


def run(trainers: Trainers, root: Path, shape: str, steps: int) -> Seen:
    generation = trainers.wait(start(trainers, root, shape, steps))
    assert set(generation.codes) == {0}
    return seen(generation)


def seen(generation: Generation) -> Seen:
    """From the ranks' logs."""
    found: Seen = {}
    for rank in generation.ranks:
        taken: Counter[int] = Counter()
        for line in rank.log.read_text().splitlines():
            match line.split():
                case ["ids", *ids]:
                    taken.update(map(int, ids))
                case ["step", step] if taken:
                    found.setdefault(int(step), Counter()).update(taken)
                    taken = Counter()
    return found


def test_no_sample_is_lost_or_repeated_when_the_replicas_change_and_a_crash_comes_between(
    trainers: Trainers, tmp_path: Path
) -> None:
    straight = run(trainers, begun(trainers, tmp_path / "straight"), "1x1", STEPS)
    assert list(straight) == list(range(1, STEPS + 1))
    positions = positions_of(STEPS, BATCH).stop
    times = sum(straight.values(), Counter())
    assert sum(times.values()) == positions and set(times) == set(range(SAMPLES))
    assert max(times.values()) - min(times.values()) <= 1, "each once an epoch"

    root = begun(trainers, tmp_path / "job")
    committed = run(trainers, root, "1x1", 7) | run(trainers, root, "2x2", 11)
    crashed = start(trainers, root, "1x4", 1_000_000, every=2)
    trainers.wait(crashed, lambda g: g.ranks[0].all(PartWritten) and len(g.ranks[1].steps) > 4)
    for rank in crashed.ranks:
        trainers.kill(rank)
    trainers.wait(crashed)
    saved = to_resume(scan(root))
    assert saved is not None and saved.step > 11
    assert max(seen(crashed)) >= saved.step
    committed |= {step: ids for step, ids in seen(crashed).items() if step <= saved.step}
    last = saved.step + 4
    committed |= run(trainers, root, "1x3", saved.step + 2) | run(trainers, root, "1x1", last)
    if last > STEPS:
        straight = run(trainers, begun(trainers, tmp_path / "longer"), "1x1", last)
    assert committed == {step: straight[step] for step in range(1, last + 1)}
