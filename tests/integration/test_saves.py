"""Saving beside the training: the same bytes, hardly a stall, no matter how the disk is; loading at
any other shape; and what is found after everybody was killed.
"""

import queue
import random
import threading
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import pytest
import torch

from tests.fakes.jobs import LAYERS, Job, Undisturbed
from tests.fakes.standing import all_halted, hashes, newest, salvage, stands_still
from tests.fakes.trainers import Generation
from trainer.checkpoint import read_layers
from trainer.contract.checkpoints import DataPosition
from trainer.contract.listing import complete, scan, to_resume
from trainer.contract.progress import (
    Halt,
    Line,
    PartWritten,
    Phase,
    PhaseBegun,
    SaveFailed,
    Stop,
    Stopped,
)
from trainer.contract.spec import Program, RunSpec, Saving, Shape, Training
from trainer.device import CPU
from trainer.layerfile import LayerState
from trainer.saves import Saves
from trainer.snapshot import Snapshot
from trainer.stages import Stage

pytestmark = pytest.mark.integration

SHAPES = ["1x1", "2x1", "4x1", "3x1", "2x2", "1x3"]


def parts(generation: Generation) -> list[PartWritten]:
    return [part for rank in generation.ranks for part in rank.all(PartWritten)]


def every(steps: int, job: Job) -> Saving:
    return Saving(root=str(job.root), every_steps=steps)


# --- Beside the training


def test_what_is_written_beside_the_training_is_what_was_there_at_that_step(
    beset: Job, undisturbed: Undisturbed
) -> None:
    run = beset.start("2x2", saving=every(2, beset))
    beset.trainers.wait(run, lambda g: all(len(rank.all(PartWritten)) >= 2 for rank in g.ranks))
    run.order(Stop())
    beset.trainers.wait(run, lambda g: all(map(stands_still, g.ranks)))
    beset.leave(run)
    _, *saved = complete(scan(beset.root))
    last = run.ranks[0].one(Stopped).step
    assert len(saved) >= 3 and saved[-1].step == last
    for found in saved[:2] + saved[-1:]:
        assert hashes(beset.root, found.step) == undisturbed.after(found.step, "2x2")
    assert all(part.stall_seconds < part.seconds for part in parts(run) if part.step < last)
    assert all(part.stall_seconds == part.seconds for part in parts(run) if part.step == last)


def test_a_disk_that_hangs_stops_no_step_and_the_save_that_is_put_off_is_made_when_it_is_back(
    beset: Job, tmp_path: Path
) -> None:
    disk = tmp_path / "disk"
    run = beset.start("2x2", saving=every(1, beset), args={"disk": str(disk)})
    beset.trainers.wait(run, lambda g: all(rank.steps for rank in g.ranks))
    disk.write_text("slow")
    beset.trainers.wait(run, lambda g: any(rank.all(SaveFailed) for rank in g.ranks))
    # those under way may still end; then nothing is written any more and training goes on
    steps, written = [len(rank.steps) for rank in run.ranks], len(parts(run))
    beset.trainers.wait(
        run,
        lambda g: all(len(r.steps) >= n + 20 for r, n in zip(g.ranks, steps, strict=True)),
        seconds=30,
    )
    assert len(parts(run)) <= written + 4
    put_off = [failed for rank in run.ranks for failed in rank.all(SaveFailed)]
    assert {failed.message for failed in put_off} == {
        "it is put off, because the one before is still being written"
    }
    assert all(len(rank.all(SaveFailed)) <= 1 + len(rank.all(PartWritten)) for rank in run.ranks)
    reached = run.ranks[0].steps[-1].step
    disk.unlink()
    beset.trainers.wait(
        run, lambda g: all(any(p.step >= reached for p in r.all(PartWritten)) for r in g.ranks)
    )
    beset.leave(run)


def test_a_full_disk_stops_no_step_and_the_next_save_is_made_when_there_is_room(
    beset: Job, tmp_path: Path
) -> None:
    disk = tmp_path / "disk"
    run = beset.start("2x1", saving=every(2, beset), args={"disk": str(disk)})
    beset.trainers.wait(run, lambda g: all(rank.steps for rank in g.ranks))
    disk.write_text("full")
    beset.trainers.wait(
        run, lambda g: all("No space" in f.message for r in g.ranks for f in r.all(SaveFailed)[:1])
        and all(rank.all(SaveFailed) for rank in g.ranks)
    )  # fmt: skip
    failed = max(rank.all(SaveFailed)[-1].step for rank in run.ranks)
    assert not list(beset.root.glob(f"step-{failed:06d}.g2/*.tmp"))
    disk.unlink()
    beset.trainers.wait(
        run, lambda g: all(any(p.step > failed for p in r.all(PartWritten)) for r in g.ranks)
    )
    run.order(Stop())
    beset.trainers.wait(run, lambda g: all(map(stands_still, g.ranks)))
    (step,) = {rank.one(Stopped).step for rank in run.ranks}
    assert complete(scan(beset.root))[-1].step == step
    beset.leave(run)


def small_state() -> LayerState:
    return LayerState(
        parameters={"layers.0.w": torch.arange(6.0).reshape(2, 3).t()},
        buffers={"layers.0.b": torch.tensor(3)},
        optimizer={"layers.0.w": {"step": torch.tensor(1.0), "scalar": 2}},
        aliases={"layers.0.tied": "layers.1.w"},
    )


def test_a_snapshot_stays_as_it_was_taken_in_memory_that_is_used_again() -> None:
    state, snapshot = small_state(), Snapshot()
    taken = snapshot.take({0: state})[0]
    place = taken.parameters["layers.0.w"].data_ptr()
    before = state.parameters["layers.0.w"].clone()
    state.parameters["layers.0.w"].add_(1)
    assert torch.equal(taken.parameters["layers.0.w"], before)
    assert taken.optimizer["layers.0.w"] == {"step": torch.tensor(1.0), "scalar": 2}
    assert taken.aliases == state.aliases
    again = snapshot.take({0: state})[0]
    assert again.parameters["layers.0.w"].data_ptr() == place
    assert torch.equal(again.parameters["layers.0.w"], before + 1)
    state.optimizer["layers.0.w"] |= {"step": torch.tensor(2.0), "more": torch.ones(2)}
    grown = snapshot.take({0: state})[0]
    assert torch.equal(grown.buffers["layers.0.b"], torch.tensor(3))
    assert grown.optimizer["layers.0.w"].keys() == {"step", "scalar", "more"}


def test_a_layer_without_any_tensor_is_copied_like_the_others() -> None:
    empty = LayerState(parameters={}, buffers={})
    for _ in range(2):
        assert Snapshot().take({0: small_state(), 1: empty})[1] == empty


class HeldUp(dict[int, LayerState]):
    """States whose copying begins when the gate opens."""

    def __init__(self, states: dict[int, LayerState], gate: threading.Event) -> None:
        super().__init__(states)
        self.gate = gate

    def items(self) -> Any:
        self.gate.wait()
        return super().items()


def test_the_state_changes_only_when_all_of_it_is_copied(tmp_path: Path) -> None:
    state, gate = replace(small_state(), aliases={}), threading.Event()
    weight = state.parameters["layers.0.w"]
    before = weight.clone()

    class OneLayer:
        layers, layer_count, loss_scale, outside = (0,), 1, None, None
        device = CPU

        def states(self, _: object) -> HeldUp:
            return HeldUp({0: state}, gate)

    said: queue.SimpleQueue[Line] = queue.SimpleQueue()
    position = DataPosition(batch_size=1, seed=0, samples=1)
    saves = Saves(one_rank(tmp_path), position, cast(Stage, OneLayer()), said.put)
    saves.start(step=3)

    def apply() -> None:
        saves.settle()
        weight.add_(1)

    applying = threading.Thread(target=apply)
    applying.start()
    applying.join(0.05)
    assert torch.equal(weight, before)
    gate.set()
    applying.join()
    written = said.get(timeout=30)
    assert isinstance(written, PartWritten) and written.stall_seconds > 0
    saved = read_layers(tmp_path / written.folder, [0])[0].parameters["layers.0.w"]
    assert torch.equal(saved, before) and torch.equal(weight, before + 1)


def one_rank(root: Path) -> RunSpec:
    return RunSpec(
        kind="train",
        job="j",
        generation=1,
        rank=0,
        shape=Shape(depth=1, replicas=1, micro_batch=1),
        cuts=(0, 1),
        program=Program(source="builtin:gpt"),
        training=Training(batch_size=1, steps=9),
        saving=Saving(root=str(root), every_steps=3),
    )


# --- At any other shape


@pytest.mark.parametrize("saved_at", SHAPES)
def test_what_one_shape_saved_every_other_holds_bit_for_bit(
    beset: Job, tmp_path: Path, saved_at: str
) -> None:
    """Parameters, moments, buffers and the data's position; the learning rate is the step's."""
    saved, gate = beset.until(3, saved_at), tmp_path / "gate"
    position = scan(beset.root).parts[-1].data
    for shape in SHAPES:
        gate.unlink(missing_ok=True)
        run = beset.start(shape, step=3, args={"gate": str(gate)})
        beset.trainers.wait(
            run, lambda g: all(PhaseBegun(phase=Phase.FIRST_STEP) in r.lines for r in g.ranks)
        )
        run.order(Halt())
        gate.touch()
        beset.trainers.wait(run, all_halted)
        salvage(beset.trainers, run, [(rank, newest(rank).holds) for rank in run.ranks])
        beset.leave(run)
        number = run.specs[0].generation
        assert hashes(beset.root, 3, kind="salvage", generation=number) == saved, shape
        assert {p.data for p in scan(beset.root).parts if p.generation == number} == {position}


# --- After everybody was killed


def killed_around_saves(beset: Job, undisturbed: Undisturbed, times: int, seed: int) -> None:
    """Kill all trainers at random moments, again and again, each time going on from what is left:
    no checkpoint that all reported is lost, and at last the bits are those of an undisturbed run.
    """
    chance = random.Random(seed)
    begun = 0
    for number in range(2, times + 2):  # never twice, whether it came to its marker or not
        run = beset.start("2x2", step=None, saving=every(2, beset), generation=number)
        steps, written = chance.randint(0, 3), chance.randint(0, 9)
        beset.trainers.wait(
            run,
            lambda g, s=steps, w=written: (
                all(len(rank.steps) >= s for rank in g.ranks) and len(parts(g)) >= w
            ),
        )
        ranks = list(run.ranks)
        chance.shuffle(ranks)
        for rank in ranks:
            beset.trainers.kill(rank)
        beset.trainers.wait(run)
        found = to_resume(scan(beset.root))
        assert found is not None and found.step >= begun
        told = [{part.step for part in rank.all(PartWritten)} for rank in run.ranks]
        assert found.step >= max(set.intersection(*told), default=0)
        begun = found.step
    found = to_resume(scan(beset.root))
    assert found is not None and found.step == begun > 0
    held = hashes(beset.root, begun, generation=found.generation)
    assert len(held) == LAYERS
    assert held == undisturbed.after(begun, "2x2")


def test_after_a_kill_of_all_trainers_a_complete_checkpoint_is_found(
    beset: Job, undisturbed: Undisturbed
) -> None:
    killed_around_saves(beset, undisturbed, times=4, seed=1)


@pytest.mark.soak
@pytest.mark.timeout(3600)
def test_after_100_kills_of_all_trainers_a_complete_checkpoint_is_found(
    beset: Job, undisturbed: Undisturbed
) -> None:
    killed_around_saves(beset, undisturbed, times=100, seed=2)
