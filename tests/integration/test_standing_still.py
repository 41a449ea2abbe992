"""Votes cut off by a death, drains and salvages: what survivors hold is what an undisturbed run
holds, to the last bit of every moment.
"""

import random
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.fakes.standing import (
    Contents,
    all_halted,
    hashes,
    newest,
    roll_forward,
    salvage,
    stands_still,
    survivors,
)
from tests.fakes.trainers import PROGRAMS, Generation, Trainers
from trainer.contract.checkpoints import complete, scan
from trainer.contract.progress import (
    ExitCode,
    Forward,
    Halt,
    Halted,
    Leave,
    PartWritten,
    Save,
    SaveFailed,
    SaveNow,
    Stop,
    Stopped,
)
from trainer.contract.spec import Program, Saving, Shape, Training

pytestmark = pytest.mark.integration

LAYERS = 6
VOTED = 4
"""The step whose vote is cut off."""
ARGS = {"tied": True, "shared": True, "dropout": 0.1, "samples": 60}
TRAINING = Training(batch_size=24, steps=1_000_000, seed=3, clip_grad_norm=0.5)


class Job:
    """A job of ``beset`` that is disturbed in all its generations but those of :meth:`until`."""

    def __init__(self, trainers: Trainers, root: Path) -> None:
        self.trainers = trainers
        self.root = root
        made = trainers.first_weights(root, self._program(), TRAINING)
        assert made.codes == [0]

    def start(self, shape: str, *, steps: int | None = None, **more: Any) -> Generation:
        """Begin at step 0, or where ``step`` says."""
        depth, replicas = map(int, shape.split("x"))
        sizes = Shape(depth=depth, replicas=replicas, micro_batch=4)
        training = TRAINING.model_copy(update={"steps": steps}) if steps else TRAINING
        program = self._program(**more.pop("args", {}))
        more = {"step": 0} | more
        specs = self.trainers.specs(self.root, program, training, sizes, layers=LAYERS, **more)
        return self.trainers.start(specs)

    def until(self, step: int, shape: str) -> Contents:
        """What an undisturbed run of ``shape`` holds after ``step``."""
        run = self.trainers.wait(self.start(shape, steps=step))
        assert set(run.codes) == {0}
        return hashes(self.root, step, generation=run.specs[0].generation)

    def leave(self, generation: Generation) -> None:
        generation.order(Leave())
        self.trainers.wait(generation)
        assert {rank.exit.code for rank in generation.ranks if rank.exit} <= {ExitCode.LEFT, None}

    @staticmethod
    def _program(**args: Any) -> Program:
        source = str(PROGRAMS / "beset.py")
        return Program(source=source, workdir=str(PROGRAMS), args=ARGS | args)


@pytest.fixture
def job(trainers: Trainers, tmp_path: Path) -> Job:
    return Job(trainers, tmp_path / "job")


@pytest.fixture(scope="module")
def undisturbed(
    trainers: Trainers, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Callable[[int, str], Contents]]:
    """What an undisturbed run holds after a step; each is run once."""
    job = Job(trainers, tmp_path_factory.mktemp("undisturbed"))
    known: dict[tuple[int, str], Contents] = {}

    def held(step: int, shape: str) -> Contents:
        if (step, shape) not in known:
            known[step, shape] = job.until(step, shape)
            assert len(known[step, shape]) == LAYERS
        return known[step, shape]

    yield held


def rolled_forward(job: Job, shape: str, **args: Any) -> tuple[int, int, Contents]:
    """Cut a vote off; the step that the survivors are brought to, how many were behind, and what
    each of them then holds.
    """
    generation = job.start(shape, args={"vote_at": VOTED} | args)
    job.trainers.wait(generation, lambda g: all_halted(g, args["dies"]))
    step, behind = roll_forward(job.trainers, generation)
    salvage(job.trainers, generation, [(r, newest(r).holds) for r in survivors(generation)])
    job.leave(generation)
    number = generation.specs[0].generation
    return step, behind, hashes(job.root, step, kind="salvage", generation=number)


# --- Rolling forward


@pytest.mark.parametrize(
    ("shape", "dies", "misses"),
    [("2x2", 3, [0]), ("2x2", 0, [1, 2]), ("4x1", 2, [0, 1]), ("1x3", 1, [2])],
)
def test_a_survivor_without_the_vote_gets_it_and_is_bit_equal_to_an_undisturbed_run(
    job: Job,
    undisturbed: Callable[[int, str], Contents],
    shape: str,
    dies: int,
    misses: list[int],
) -> None:
    step, behind, held = rolled_forward(job, shape, dies=dies, misses=misses)
    assert (step, behind) == (VOTED, len(misses))
    assert held and held <= undisturbed(step, shape)


def test_a_step_whose_vote_only_the_dead_saw_is_done_again(
    job: Job, undisturbed: Callable[[int, str], Contents]
) -> None:
    step, behind, held = rolled_forward(job, "1x3", dies=0, misses=[1, 2])
    assert (step, behind) == (VOTED - 1, 0)
    assert held == undisturbed(step, "1x3")


def cut_at_random(
    job: Job, undisturbed: Callable[[int, str], Contents], times: int, seed: int
) -> int:
    """Kill a rank at random moments of a vote; how many survivors were behind, over all."""
    chance, late = random.Random(seed), 0
    for _ in range(times):
        shape = chance.choice(["2x2", "4x1", "1x3"])
        dies = chance.randrange(3)
        step, behind, held = rolled_forward(job, shape, dies=dies, after=chance.uniform(0, 2e-3))
        assert step >= VOTED - 1
        assert held and held <= undisturbed(step, shape), (
            f"{shape}, rank {dies} killed, step {step}"
        )
        late += behind
    return late


def test_survivors_of_kills_inside_the_vote_are_bit_equal_to_an_undisturbed_run(
    job: Job, undisturbed: Callable[[int, str], Contents]
) -> None:
    cut_at_random(job, undisturbed, times=4, seed=1)


@pytest.mark.soak
@pytest.mark.timeout(3600)
def test_survivors_of_100_kills_inside_the_vote_are_bit_equal_to_an_undisturbed_run(
    job: Job, undisturbed: Callable[[int, str], Contents]
) -> None:
    behind = cut_at_random(job, undisturbed, times=100, seed=2)
    print(f"{behind} survivors were rolled forward")
    assert behind > 0


def test_a_forward_for_a_step_it_is_not_prepared_for_changes_nothing(job: Job) -> None:
    generation = job.start("1x1")
    job.trainers.wait(generation, lambda g: len(g.ranks[0].steps) >= 3)
    generation.order(Halt())
    job.trainers.wait(generation, all_halted)
    (rank,) = generation.ranks
    before = newest(rank)
    assert before.ballot is not None and before.holds == tuple(range(LAYERS))
    for step in (before.applied, before.applied + 1, before.applied + 2):
        rank.trainer.send(Forward(step=step, ballot=before.ballot))
    job.trainers.wait(generation, lambda _: len(rank.all(Halted)) == 4)
    assert rank.all(Halted) == [before] * 4
    job.leave(generation)


# --- Draining


@pytest.mark.parametrize("moment", ["before the first step", "step 2", "step 7"])
def test_a_drain_stops_all_ranks_after_the_same_step_with_a_complete_checkpoint(
    job: Job, undisturbed: Callable[[int, str], Contents], moment: str
) -> None:
    generation = job.start("2x2")
    steps = int(moment[-1]) if moment[-1].isdigit() else 0
    job.trainers.wait(generation, lambda g: all(len(rank.steps) >= steps for rank in g.ranks))
    generation.ranks[steps % 4].trainer.send(Stop())  # one that knows is enough
    job.trainers.wait(generation, lambda g: all(map(stands_still, g.ranks)))
    (step,) = {rank.one(Stopped).step for rank in generation.ranks}
    assert {rank.steps[-1].step for rank in generation.ranks} == {step}
    (_, found) = complete(scan(job.root))
    assert (found.step, len(found.parts)) == (step, 4)
    assert hashes(job.root, step) == undisturbed(step, "2x2")
    job.leave(generation)


def test_who_stands_still_after_a_drain_says_so_when_a_peer_dies_and_can_still_save(
    job: Job,
) -> None:
    generation = job.start("2x2")
    generation.order(Stop())
    job.trainers.wait(generation, lambda g: all(map(stands_still, g.ranks)))
    job.trainers.kill(generation.ranks[3])
    job.trainers.wait(generation, lambda g: all_halted(g, 3))
    for rank in generation.ranks[:3]:
        halted, step = rank.one(Halted), rank.one(Stopped).step
        assert (halted.applied, halted.vote_step, halted.suspects) == (step, step, (3,))
        assert not halted.torn
    first = generation.ranks[0]
    salvage(job.trainers, generation, [(first, (0, 1))])
    job.leave(generation)


def test_a_drain_that_cannot_save_says_so_and_stands_still(job: Job, tmp_path: Path) -> None:
    disk = tmp_path / "disk"
    generation = job.start("2x1", args={"disk": str(disk)})
    job.trainers.wait(generation, lambda g: all(rank.steps for rank in g.ranks))
    disk.write_text("full")
    generation.order(Stop())
    job.trainers.wait(generation, lambda g: all(map(stands_still, g.ranks)))
    for rank in generation.ranks:
        step = rank.one(Stopped).step
        assert rank.one(SaveFailed).step == step == rank.steps[-1].step
        assert "No space left" in rank.one(SaveFailed).message
    job.leave(generation)


# --- Salvaging


def test_survivors_that_cover_the_model_save_what_a_new_shape_goes_on_from_bit_for_bit(
    job: Job, undisturbed: Callable[[int, str], Contents]
) -> None:
    generation = job.start("2x2")
    job.trainers.wait(generation, lambda g: all(len(rank.steps) >= 3 for rank in g.ranks))
    job.trainers.kill(generation.ranks[3])
    job.trainers.wait(generation, lambda g: all_halted(g, 3))
    step, _ = roll_forward(job.trainers, generation)
    ranks = generation.ranks
    assert [newest(rank).holds for rank in ranks[:3]] == [(0, 1, 2), (3, 4, 5), (0, 1, 2)]
    salvage(job.trainers, generation, [(ranks[0], (0, 2)), (ranks[1], (3, 4, 5))])
    assert not [found for found in complete(scan(job.root)) if found.step]
    salvage(job.trainers, generation, [(ranks[0], (0, 1))])  # rank 2, say, went too
    job.leave(generation)
    listing = scan(job.root)
    assert not listing.skipped
    (found,) = (found for found in complete(listing) if found.step)
    assert found.folder == f"step-{step:06d}.g2.salvage"
    assert [part.layers for part in found.parts] == [(0, 2, 1), (3, 4, 5)]
    assert hashes(job.root, step, kind="salvage") == undisturbed(step, "2x2")

    on = job.trainers.wait(job.start("3x2", step=step, steps=step + 4))
    assert set(on.codes) == {0}
    assert hashes(job.root, step + 4) == undisturbed(step + 4, "2x2")


def test_a_layer_that_is_not_held_is_refused_with_a_sentence(job: Job) -> None:
    generation = job.start("2x1")
    generation.order(Stop())
    job.trainers.wait(generation, lambda g: all(map(stands_still, g.ranks)))
    first = generation.ranks[0]
    first.trainer.send(Save(layers=(2, 3)))
    job.trainers.wait(generation, lambda _: first.all(SaveFailed))
    assert first.one(SaveFailed).message == "layer 3 is not on this stage"
    job.leave(generation)


# --- Saving on order


def test_a_save_on_order_is_made_by_all_at_one_step_while_they_train_on(
    job: Job, undisturbed: Callable[[int, str], Contents]
) -> None:
    generation = job.start("2x2", saving=Saving(root=str(job.root)))
    job.trainers.wait(generation, lambda g: all(rank.steps for rank in g.ranks))
    generation.order(SaveNow())
    job.trainers.wait(generation, lambda g: all(rank.all(PartWritten) for rank in g.ranks))
    steps = sorted(part.step for rank in generation.ranks for part in rank.all(PartWritten))
    at = [len(rank.steps) for rank in generation.ranks]
    job.trainers.wait(
        generation,
        lambda g: all(len(r.steps) > before for r, before in zip(g.ranks, at, strict=True)),
    )
    job.leave(generation)
    for step in set(steps):  # the order may reach one rank a step later than the others
        assert hashes(job.root, step) == undisturbed(step, "2x2")
