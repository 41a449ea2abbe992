"""Peers that die, orders, programs that cannot be trained, checkpoints that cannot be used."""

import os
import re
import signal
import time
from pathlib import Path
from typing import Any

import pytest

from tests.fakes.trainers import PROGRAMS, Generation, Rank, Trainers
from tests.fakes.waiting import until
from trainer.contract.checkpoints import write_marker
from trainer.contract.progress import (
    ExitCode,
    Failed,
    Halt,
    Halted,
    Leave,
    Phase,
    PhaseBegun,
    SaveFailed,
)
from trainer.contract.spec import Program, Saving, Shape, Training

pytestmark = pytest.mark.integration

LONG = Training(batch_size=12, steps=1_000_000)
SHORT = Training(batch_size=12, steps=8)
GPIPE = SHORT.model_copy(update={"schedule": "gpipe"})


def odd(how: str = "is slow") -> Program:
    return Program(source=str(PROGRAMS / "odd.py"), workdir=str(PROGRAMS), args={"how": how})


def start(
    trainers: Trainers,
    root: Path,
    shape: str,
    program: Program | None = None,
    training: Training = LONG,
    **more: Any,
) -> Generation:
    """The first training generation of a job, running; ``more`` goes into the specs."""
    program = program or odd()
    if not root.exists():
        assert trainers.first_weights(root, program, training, micro_batch=3).codes == [0]
    depth, replicas = map(int, shape.split("x"))
    sizes = Shape(depth=depth, replicas=replicas, micro_batch=3)
    return trainers.start(trainers.specs(root, program, training, sizes, layers=4, **more))


def in_full_swing(generation: Generation) -> bool:
    return all(len(rank.steps) >= 3 for rank in generation.ranks)


def stands_still(generation: Generation, *besides: int) -> bool:
    return all(
        has_halted(rank) for number, rank in enumerate(generation.ranks) if number not in besides
    )


def has_halted(rank: Rank) -> bool:
    return bool(rank.all(Halted)) and PhaseBegun(phase=Phase.HALTED) in rank.lines


@pytest.mark.parametrize(("shape", "victim"), [("4x1", 0), ("4x1", 2), ("2x2", 3), ("1x3", 1)])
def test_a_rank_that_dies_is_named_by_all_others_which_stand_still_until_they_may_leave(
    trainers: Trainers, tmp_path: Path, shape: str, victim: int
) -> None:
    generation = trainers.wait(start(trainers, tmp_path / "job", shape), in_full_swing)
    began = time.monotonic()
    trainers.kill(generation.ranks[victim])
    trainers.wait(generation, lambda g: stands_still(g, victim))
    assert time.monotonic() - began < 2
    survivors = [rank for n, rank in enumerate(generation.ranks) if n != victim]
    for rank in survivors:
        halted = rank.one(Halted)
        assert halted.suspects == (victim,)
        assert not halted.torn
        assert halted.applied == rank.steps[-1].step
        assert halted.applied <= halted.prepared <= halted.applied + 1
        assert rank.exit is None
    applied = [rank.one(Halted).applied for rank in survivors]
    assert max(applied) - min(applied) <= 1
    generation.order(Leave())
    trainers.wait(generation)
    assert {rank.exit.code for rank in survivors if rank.exit} == {ExitCode.LEFT}


def test_a_halt_order_ends_every_wait_for_a_rank_that_hangs(
    trainers: Trainers, tmp_path: Path
) -> None:
    generation = trainers.wait(start(trainers, tmp_path / "job", "2x2"), in_full_swing)
    hanging = generation.ranks[3]
    os.kill(hanging.trainer.pid, signal.SIGSTOP)
    generation.order(Halt())
    trainers.wait(generation, lambda g: stands_still(g, 3), seconds=30)
    for rank in generation.ranks[:3]:
        assert rank.one(Halted).cause == "ordered"
        assert not rank.one(Halted).torn
    trainers.kill(hanging)
    generation.order(Leave())
    assert trainers.wait(generation).codes == [*[ExitCode.LEFT] * 3, None]


def test_a_rank_that_waits_for_nobody_halts_between_two_tasks(
    trainers: Trainers, tmp_path: Path
) -> None:
    generation = trainers.wait(start(trainers, tmp_path / "job", "1x1"), in_full_swing)
    generation.order(Halt())
    trainers.wait(generation, stands_still, seconds=30)
    assert generation.ranks[0].one(Halted).applied == generation.ranks[0].steps[-1].step
    generation.order(Leave())
    trainers.wait(generation)


def test_a_signal_dumps_every_threads_stack_into_the_log(
    trainers: Trainers, tmp_path: Path
) -> None:
    generation = trainers.wait(start(trainers, tmp_path / "job", "2x1"), in_full_swing)
    rank = generation.ranks[0]

    def asked_until_it_is_in_mid_step() -> bool:
        os.kill(rank.trainer.pid, signal.SIGUSR2)
        return all(file in rank.log.read_text() for file in ("pipeline.py", "links.py"))

    until(asked_until_it_is_in_mid_step)
    generation.order(Leave())
    trainers.wait(generation)


def test_limbo_ends_by_itself(trainers: Trainers, tmp_path: Path) -> None:
    running = start(trainers, tmp_path / "job", "2x1", limbo_seconds=0.05)
    generation = trainers.wait(running, in_full_swing)
    trainers.kill(generation.ranks[1])
    trainers.wait(generation)
    assert generation.ranks[0].exit
    assert generation.ranks[0].exit.code == ExitCode.PEER_LOST


def test_leave_is_obeyed_in_mid_step(trainers: Trainers, tmp_path: Path) -> None:
    generation = trainers.wait(start(trainers, tmp_path / "job", "2x1"), in_full_swing)
    generation.order(Leave())
    assert trainers.wait(generation).codes == [ExitCode.LEFT] * 2


def test_a_layer_that_raises_ends_its_rank_and_its_peers_name_it(
    trainers: Trainers, tmp_path: Path
) -> None:
    root = tmp_path / "job"
    assert trainers.first_weights(root, odd(), LONG, micro_batch=3).codes == [0]
    generation = start(trainers, root, "4x1", odd("raises"))
    trainers.wait(generation, lambda g: stands_still(g, 1) and g.ranks[1].exit)
    failed = generation.ranks[1].one(Failed)
    lines = (PROGRAMS / "odd.py").read_text().splitlines()
    line = next(n for n, text in enumerate(lines, 1) if "raise ArithmeticError" in text)
    assert failed.message == f"rank 1: layer 1 raised ArithmeticError: enough (odd.py:{line})"
    assert (failed.code, failed.layer) == (ExitCode.PROGRAM_ERROR, 1)
    assert "Traceback" in failed.details
    assert generation.ranks[1].exit
    assert generation.ranks[1].exit.code == ExitCode.PROGRAM_ERROR
    assert {generation.ranks[n].one(Halted).suspects for n in (0, 2, 3)} == {(1,)}
    generation.order(Leave())
    trainers.wait(generation)


ENOUGH, NO_MEMORY = "ValueError: enough of this", "DefaultCPUAllocator: can't allocate memory"


@pytest.mark.parametrize(
    ("where", "what", "ranks", "sentence", "reason"),
    [
        ("layer", "error", {2}, "layer 2 raised", ENOUGH),
        ("backward", "error", {2}, "the backward pass of layer 2 raised", ENOUGH),
        ("loss", "error", {3}, "loss() raised", ENOUGH),
        ("sample", "error", {0, 3}, "dataset[", ENOUGH),
        ("step", "error", {0, 1, 2, 3}, "the optimizer's step raised", ENOUGH),
        ("layer", "memory", {2}, "layer 2 raised", "MemoryError"),
        ("layer", "device", {2}, "layer 2 raised", "OutOfMemoryError: CUDA out of memory."),
        ("backward", "allocator", {2}, "the backward pass of layer 2 raised", NO_MEMORY),
    ],
)
def test_what_a_program_raises_in_mid_run_is_told_with_rank_layer_and_line(
    trainers: Trainers, tmp_path: Path, where: str, what: str, ranks: set[int], sentence: str,
    reason: str,
) -> None:  # fmt: skip
    root = tmp_path / "job"

    def program(at: int) -> Program:
        args: dict[str, Any] = {"where": where, "what": what, "at": at}
        return Program(source=str(PROGRAMS / "breaking.py"), args=args)

    assert trainers.first_weights(root, program(at=10**9), LONG, micro_batch=3).codes == [0]
    generation = start(trainers, root, "4x1", program(at=30))
    trainers.wait(generation, lambda g: all(r.exit or has_halted(r) for r in g.ranks))
    failed = {n: rank.one(Failed) for n, rank in enumerate(generation.ranks) if rank.all(Failed)}
    assert failed and failed.keys() <= ranks
    for number, line in failed.items():
        assert line.code == ExitCode.PROGRAM_ERROR
        assert line.message.startswith(f"rank {number}: {sentence}")
        assert reason in line.message
        assert re.search(r"\(breaking\.py:[0-9]+\)$", line.message)
    generation.order(Leave())
    trainers.wait(generation)


@pytest.mark.parametrize(
    ("how", "rank", "sentence"),
    [
        ("changes its input", 0, "layer 0: the input is changed in place"),
        ("draws elsewhere", 1, "layer 1: a second run gives something else"),
        ("changes shape", 1, "the output of a stage changed from float32 (6, 4) to float32 (3, 4)"),
        ("names a metric late", 3, "loss() gives a new metric 'late' in mid-run"),
    ],
)
def test_what_would_train_wrongly_is_refused(
    trainers: Trainers, tmp_path: Path, how: str, rank: int, sentence: str
) -> None:
    generation = start(trainers, tmp_path / "job", "4x1", odd(how))
    trainers.wait(generation, lambda g: stands_still(g, rank) and g.ranks[rank].exit)
    failed = generation.ranks[rank].one(Failed)
    assert failed.code == ExitCode.PROGRAM_ERROR
    assert sentence in failed.message
    generation.order(Leave())
    trainers.wait(generation)


def test_buffers_that_change_in_forward_are_refused_before_anything_is_trained(
    trainers: Trainers, tmp_path: Path
) -> None:
    generation = trainers.first_weights(tmp_path / "job", odd("keeps statistics"), SHORT)
    assert generation.codes == [ExitCode.PROGRAM_ERROR]
    message = generation.ranks[0].one(Failed).message
    assert "layer 1 changes its buffer" in message
    assert "use GroupNorm" in message


@pytest.mark.parametrize(
    ("change", "sentence", "code"),
    [
        ({"device": "cuda:99"}, "device cuda:99 ", ExitCode.PROGRAM_ERROR),
        ({"cuts": (0, 1, 3)}, "do not split 4 layers into 2 stages", ExitCode.PROGRAM_ERROR),
        (
            {"in_flight": (1, 1), "training": GPIPE},
            "stage 0 needs 4 micro-batches in flight",
            ExitCode.INTERNAL,
        ),
    ],
)
def test_a_spec_that_cannot_be_carried_out_is_refused_with_a_sentence(
    trainers: Trainers, tmp_path: Path, change: dict[str, Any], sentence: str, code: ExitCode
) -> None:
    root = tmp_path / "job"
    assert trainers.first_weights(root, odd(), SHORT, micro_batch=3).codes == [0]
    generation = start(trainers, root, "2x1", odd(), **{"training": SHORT} | change)
    trainers.wait(generation, lambda g: g.ranks[0].exit)
    generation.order(Leave())
    trainers.wait(generation)
    failed = generation.ranks[0].one(Failed)
    assert failed.code == generation.codes[0] == code
    assert sentence in failed.message


def test_a_damaged_file_is_named(trainers: Trainers, tmp_path: Path) -> None:
    root = tmp_path / "job"
    assert trainers.first_weights(root, odd(), SHORT).codes == [0]
    file = root / "step-000000.g1" / "layer-002.r0.safetensors"
    content = bytearray(file.read_bytes())
    content[-1] ^= 1
    file.write_bytes(content)
    generation = trainers.wait(start(trainers, root, "1x1", training=SHORT))
    assert generation.codes == [ExitCode.CHECKPOINT_DAMAGED]
    assert generation.ranks[0].one(Failed).file == str(file)


def test_a_checkpoint_of_another_model_is_refused(trainers: Trainers, tmp_path: Path) -> None:
    root = tmp_path / "job"
    assert trainers.first_weights(root, odd(), SHORT).codes == [0]
    other = Program(source=str(PROGRAMS / "tuples.py"), workdir=str(PROGRAMS))
    generation = trainers.wait(start(trainers, root, "1x1", other, SHORT))
    failed = generation.ranks[0].one(Failed)
    assert failed.code == ExitCode.PROGRAM_ERROR
    assert "checkpoint" in failed.message


def test_a_newer_generation_makes_the_older_leave(trainers: Trainers, tmp_path: Path) -> None:
    root = tmp_path / "job"
    saving = Saving(root=str(root), every_steps=1)
    running = start(trainers, root, "1x1", training=LONG, saving=saving)
    generation = trainers.wait(running, in_full_swing)
    write_marker(root, 7, None)
    assert trainers.wait(generation).codes == [ExitCode.STALE]
    late = trainers.start([spec.model_copy(update={"generation": 6}) for spec in running.specs])
    assert trainers.wait(late).codes == [ExitCode.STALE]


def test_a_save_that_fails_is_said_and_training_goes_on(trainers: Trainers, tmp_path: Path) -> None:
    root = tmp_path / "job"
    saving = Saving(root=str(root), every_steps=3)
    assert trainers.first_weights(root, odd(), SHORT).codes == [0]
    (root / "step-000003.g2").write_text("a file where the folder should be")
    generation = trainers.wait(
        start(trainers, root, "1x1", training=SHORT, saving=saving, generation=2)
    )
    assert generation.codes == [0]
    assert generation.ranks[0].one(SaveFailed).step == 3
    assert len(generation.ranks[0].steps) == 8
