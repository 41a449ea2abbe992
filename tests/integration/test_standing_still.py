"""Votes cut off by a death, drains and salvages: what survivors hold is what an undisturbed run
holds, to the last bit of every moment.
"""

import os
import random
import signal
import time
from pathlib import Path
from typing import Any

import pytest

from tests.fakes.jobs import LAYERS, Job, Undisturbed
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
from trainer.contract.listing import complete, scan
from trainer.contract.progress import (
    Forward,
    Halt,
    Halted,
    PartWritten,
    Save,
    SaveEvery,
    SaveFailed,
    SaveNow,
    Stop,
    Stopped,
)
from trainer.contract.spec import Saving

pytestmark = pytest.mark.integration

VOTED = 4
"""The step whose vote is cut off."""


def rolled_forward(beset: Job, shape: str, **args: Any) -> tuple[int, int, Contents]:
    """Cut a vote off; the step that the survivors are brought to, how many were behind, and what
    each of them then holds.
    """
    generation = beset.start(shape, args={"vote_at": VOTED} | args)
    beset.trainers.wait(generation, lambda g: all_halted(g, args["dies"]))
    step, behind = roll_forward(beset.trainers, generation)
    salvage(beset.trainers, generation, [(r, newest(r).holds) for r in survivors(generation)])
    beset.leave(generation)
    number = generation.specs[0].generation
    return step, behind, hashes(beset.root, step, kind="salvage", generation=number)


# --- Rolling forward


@pytest.mark.parametrize(
    ("shape", "dies", "misses"),
    [("2x2", 3, [0]), ("2x2", 0, [1, 2]), ("4x1", 2, [0, 1]), ("1x3", 1, [2])],
)
def test_a_survivor_without_the_vote_gets_it_and_is_bit_equal_to_an_undisturbed_run(
    beset: Job,
    undisturbed: Undisturbed,
    shape: str,
    dies: int,
    misses: list[int],
) -> None:
    step, behind, held = rolled_forward(beset, shape, dies=dies, misses=misses)
    assert (step, behind) == (VOTED, len(misses))
    assert held and held <= undisturbed.after(step, shape)


def test_a_step_whose_vote_only_the_dead_saw_is_done_again(
    beset: Job, undisturbed: Undisturbed
) -> None:
    step, behind, held = rolled_forward(beset, "1x3", dies=0, misses=[1, 2])
    assert (step, behind) == (VOTED - 1, 0)
    assert held == undisturbed.after(step, "1x3")


def cut_at_random(beset: Job, undisturbed: Undisturbed, times: int, seed: int) -> int:
    """Kill a rank at random moments of a vote; how many survivors were behind, over all."""
    chance, late = random.Random(seed), 0
    for _ in range(times):
        shape = chance.choice(["2x2", "4x1", "1x3"])
        dies = chance.randrange(3)
        step, behind, held = rolled_forward(beset, shape, dies=dies, after=chance.uniform(0, 2e-3))
        assert step >= VOTED - 1
        assert held and held <= undisturbed.after(step, shape), (
            f"{shape}, rank {dies} killed, step {step}"
        )
        late += behind
    return late


def test_survivors_of_kills_inside_the_vote_are_bit_equal_to_an_undisturbed_run(
    beset: Job, undisturbed: Undisturbed
) -> None:
    cut_at_random(beset, undisturbed, times=4, seed=1)


@pytest.mark.soak
@pytest.mark.timeout(3600)
def test_survivors_of_100_kills_inside_the_vote_are_bit_equal_to_an_undisturbed_run(
    beset: Job, undisturbed: Undisturbed
) -> None:
    behind = cut_at_random(beset, undisturbed, times=100, seed=2)
    print(f"{behind} survivors were rolled forward")
    assert behind > 0


def test_a_forward_for_a_step_it_is_not_prepared_for_changes_nothing(beset: Job) -> None:
    generation = beset.start("1x1")
    beset.trainers.wait(generation, lambda g: len(g.ranks[0].steps) >= 3)
    generation.order(Halt())
    beset.trainers.wait(generation, all_halted)
    (rank,) = generation.ranks
    before = newest(rank)
    assert before.ballot is not None and before.holds == tuple(range(LAYERS))
    for step in (before.applied, before.applied + 1, before.applied + 2):
        rank.trainer.send(Forward(step=step, ballot=before.ballot))
    beset.trainers.wait(generation, lambda _: len(rank.all(Halted)) == 4)
    assert rank.all(Halted) == [before] * 4
    beset.leave(generation)


@pytest.mark.soak
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("blow", [signal.SIGKILL, signal.SIGSTOP])
@pytest.mark.parametrize("victim", range(4))
def test_no_rank_that_dies_or_hangs_at_any_moment_keeps_the_others_from_standing_still(
    beset: Job, undisturbed: Undisturbed, victim: int, blow: signal.Signals
) -> None:
    chance = random.Random(victim)
    for _ in range(20):
        generation = beset.start("2x2")
        steps, moment = chance.randint(1, 8), chance.uniform(0, 0.03)
        beset.trainers.wait(
            generation, lambda g, n=steps: all(len(rank.steps) >= n for rank in g.ranks)
        )
        time.sleep(moment)
        struck = generation.ranks[victim]
        os.kill(struck.trainer.pid, blow)
        if blow == signal.SIGSTOP:
            others = [rank for rank in generation.ranks if rank is not struck]
            for rank in others:
                rank.trainer.send(Halt())
        beset.trainers.wait(generation, lambda g: all_halted(g, victim), seconds=10)
        step, _ = roll_forward(beset.trainers, generation)
        assert not any(newest(rank).torn for rank in survivors(generation))
        held = [(rank, newest(rank).holds) for rank in survivors(generation)]
        salvage(beset.trainers, generation, held)
        beset.trainers.kill(struck)
        beset.leave(generation)
        number = generation.specs[0].generation
        saved = hashes(beset.root, step, kind="salvage", generation=number)
        assert saved == undisturbed.after(step, "2x2")


# --- Draining


@pytest.mark.parametrize("moment", ["before the first step", "step 2", "step 7"])
def test_a_drain_stops_all_ranks_after_the_same_step_with_a_complete_checkpoint(
    beset: Job, undisturbed: Undisturbed, moment: str
) -> None:
    generation = beset.start("2x2")
    steps = int(moment[-1]) if moment[-1].isdigit() else 0
    beset.trainers.wait(generation, lambda g: all(len(rank.steps) >= steps for rank in g.ranks))
    generation.ranks[steps % 4].trainer.send(Stop())  # one that knows is enough
    beset.trainers.wait(generation, lambda g: all(map(stands_still, g.ranks)))
    (step,) = {rank.one(Stopped).step for rank in generation.ranks}
    assert {rank.steps[-1].step for rank in generation.ranks} == {step}
    (_, found) = complete(scan(beset.root))
    assert (found.step, len(found.parts)) == (step, 4)
    assert hashes(beset.root, step) == undisturbed.after(step, "2x2")
    beset.leave(generation)


def test_who_stands_still_after_a_drain_says_so_when_a_peer_dies_and_can_still_save(
    beset: Job,
) -> None:
    generation = beset.start("2x2")
    generation.order(Stop())
    beset.trainers.wait(generation, lambda g: all(map(stands_still, g.ranks)))
    beset.trainers.kill(generation.ranks[3])
    beset.trainers.wait(generation, lambda g: all_halted(g, 3))
    for rank in generation.ranks[:3]:
        halted, step = rank.one(Halted), rank.one(Stopped).step
        assert (halted.applied, halted.vote_step, halted.suspects) == (step, step, (3,))
        assert not halted.torn
    first = generation.ranks[0]
    salvage(beset.trainers, generation, [(first, (0, 1))])
    beset.leave(generation)


def test_a_drain_that_cannot_save_says_so_and_stands_still(beset: Job, tmp_path: Path) -> None:
    disk = tmp_path / "disk"
    generation = beset.start("2x1", args={"disk": str(disk)})
    beset.trainers.wait(generation, lambda g: all(rank.steps for rank in g.ranks))
    disk.write_text("full")
    generation.order(Stop())
    beset.trainers.wait(generation, lambda g: all(map(stands_still, g.ranks)))
    for rank in generation.ranks:
        step = rank.one(Stopped).step
        assert rank.one(SaveFailed).step == step == rank.steps[-1].step
        assert "No space left" in rank.one(SaveFailed).message
    beset.leave(generation)


# --- Salvaging


def test_survivors_that_cover_the_model_save_what_a_new_shape_goes_on_from_bit_for_bit(
    beset: Job, undisturbed: Undisturbed
) -> None:
    generation = beset.start("2x2")
    beset.trainers.wait(generation, lambda g: all(len(rank.steps) >= 3 for rank in g.ranks))
    beset.trainers.kill(generation.ranks[3])
    beset.trainers.wait(generation, lambda g: all_halted(g, 3))
    step, _ = roll_forward(beset.trainers, generation)
    ranks = generation.ranks
    assert [newest(rank).holds for rank in ranks[:3]] == [(0, 1, 2), (3, 4, 5), (0, 1, 2)]
    salvage(beset.trainers, generation, [(ranks[0], (0, 2)), (ranks[1], (3, 4, 5))])
    assert not [found for found in complete(scan(beset.root)) if found.step]
    salvage(beset.trainers, generation, [(ranks[0], (0, 1))])  # rank 2, say, went too
    beset.leave(generation)
    listing = scan(beset.root)
    assert not listing.skipped
    (found,) = (found for found in complete(listing) if found.step)
    assert found.folder == f"step-{step:06d}.g2.salvage"
    assert [part.layers for part in found.parts] == [(0, 2, 1), (3, 4, 5)]
    assert hashes(beset.root, step, kind="salvage") == undisturbed.after(step, "2x2")

    on = beset.trainers.wait(beset.start("3x2", step=step, steps=step + 4))
    assert set(on.codes) == {0}
    assert hashes(beset.root, step + 4) == undisturbed.after(step + 4, "2x2")


def test_a_layer_that_is_not_held_is_refused_with_a_sentence(beset: Job) -> None:
    generation = beset.start("2x1")
    generation.order(Stop())
    beset.trainers.wait(generation, lambda g: all(map(stands_still, g.ranks)))
    first = generation.ranks[0]
    first.trainer.send(Save(layers=(2, 3)))
    beset.trainers.wait(generation, lambda _: first.all(SaveFailed))
    assert first.one(SaveFailed).message == "layer 3 is not on this stage"
    beset.leave(generation)


# --- Saving on order


def test_a_save_on_order_is_made_by_all_at_one_step_while_they_train_on(
    beset: Job, undisturbed: Undisturbed
) -> None:
    generation = beset.start("2x2", saving=Saving(root=str(beset.root)))
    beset.trainers.wait(generation, lambda g: all(rank.steps for rank in g.ranks))
    generation.order(SaveNow())
    beset.trainers.wait(generation, lambda g: all(rank.all(PartWritten) for rank in g.ranks))
    steps = sorted(part.step for rank in generation.ranks for part in rank.all(PartWritten))
    at = [len(rank.steps) for rank in generation.ranks]
    beset.trainers.wait(
        generation,
        lambda g: all(len(r.steps) > before for r, before in zip(g.ranks, at, strict=True)),
    )
    beset.leave(generation)
    for step in set(steps):  # the order may reach one rank a step later than the others
        assert hashes(beset.root, step) == undisturbed.after(step, "2x2")


def test_a_period_that_is_told_anew_counts_at_once_and_on_all_ranks(beset: Job) -> None:
    never = Saving(root=str(beset.root), every_seconds=10_000)
    generation = beset.start("2x2", saving=never)
    beset.trainers.wait(generation, lambda g: all(rank.steps for rank in g.ranks))
    assert not any(rank.all(PartWritten) for rank in generation.ranks)
    generation.ranks[0].trainer.send(SaveEvery(seconds=0.01))
    beset.trainers.wait(generation, lambda g: all(len(r.all(PartWritten)) > 1 for r in g.ranks))
    beset.leave(generation)
    saved = [{part.step for part in rank.all(PartWritten)} for rank in generation.ranks]
    assert len(set.intersection(*saved)) > 1
