"""Training on CUDA devices, compared with the same training on the CPU. ``make gpu`` runs these;
where there is no such device they say why they do not.

Each rank has a device of its own while there are enough. With fewer the stages of a replica share
one; NCCL wants a device per member of a group, so what it would refuse is skipped.
"""

import os
import signal
import threading
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.fakes.programs import path
from tests.fakes.standing import all_halted, hashes, newest, salvage, survivors
from tests.fakes.trainers import Generation, Trainers
from tests.integration.test_trainer_numbers import Job, curve, farthest
from trainer.contract.progress import (
    Evaluated,
    ExitCode,
    Failed,
    Inspected,
    Leave,
    PartWritten,
)
from trainer.contract.spec import Program, Saving, Shape, Training
from trainer.contract.topology import Seat
from trainer.device import Device
from trainer.dropout import Place, dropped
from trainer.layerfile import LayerState
from trainer.snapshot import Snapshot

pytestmark = [pytest.mark.integration, pytest.mark.gpu]

TOLERANCE = 1e-4
"""Relative, of any loss or gradient norm of 20 float32 steps: other kernels sum in another order
(some 1e-7 a step), and AdamW makes more of that where a gradient is near zero.
"""
HALF_TOLERANCE = 3e-2
"""The same of the last loss in bfloat16 and float16, which keep 8 and 11 bits; float16 may also
skip another step at the start than the CPU does.
"""


@pytest.fixture(scope="module")
def gpus() -> int:
    """How many there are; without any the test is skipped."""
    if not torch.backends.cuda.is_built():  # type: ignore[no-untyped-call]
        pytest.skip(f"this torch, {torch.__version__}, is built without CUDA")
    if not (count := torch.cuda.device_count()):
        pytest.skip("torch sees no CUDA device here")
    return count


@pytest.fixture
def gpu(gpus: int) -> Device:
    return Device.of("cuda:0")


def devices(shape: Shape, gpus: int, *, ties: bool = False) -> list[str]:
    """One per rank."""
    if gpus >= shape.world:
        return [f"cuda:{rank}" for rank in range(shape.world)]
    if gpus < shape.replicas or (ties and shape.depth > 1):
        pytest.skip(f"NCCL needs more than the {gpus} CUDA devices here for a {shape}")
    return [f"cuda:{Seat.of(rank, shape).replica}" for rank in range(shape.world)]


def start(job: Job, gpus: int, depth: int, replicas: int, **more: Any) -> Generation:
    """Begin after ``step`` (0)."""
    shape = Shape(depth=depth, replicas=replicas, micro_batch=4)
    training = job.training.model_copy(update=more.pop("training", {}))
    more = {"step": 0} | more
    specs = job.trainers.specs(job.root, job.program, training, shape, layers=job.layers, **more)
    names = devices(shape, gpus, ties=bool(job.args.get("tied")))
    placed = zip(specs, names, strict=True)
    return job.trainers.start([s.model_copy(update={"device": name}) for s, name in placed])


def run(job: Job, gpus: int, depth: int, replicas: int, **more: Any) -> Generation:
    generation = job.trainers.wait(start(job, gpus, depth, replicas, **more))
    assert generation.codes == [0] * (depth * replicas), generation.ranks[0].lines[-1]
    return generation


# --- Numbers ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "shape", [(1, 1), (2, 1), (1, 2), (2, 2)], ids=["1x1", "2x1", "1x2", "2x2"]
)
def test_a_gpu_trains_what_the_cpu_trains(
    trainers: Trainers, tmp_path: Path, gpus: int, shape: tuple[int, int]
) -> None:
    devices(Shape(depth=shape[0], replicas=shape[1], micro_batch=4), gpus)
    job = Job(trainers, tmp_path / "job", clip_grad_norm=0.5, batch_size=22, args={"samples": 22},
              evaluate_every=10)  # fmt: skip
    there, here = run(job, gpus, *shape), job.run(*shape)
    assert farthest(curve(there), curve(here)) < TOLERANCE
    held_out = [[line.loss for line in g.ranks[0].all(Evaluated)] for g in (there, here)]
    assert len(held_out[0]) == 2
    assert held_out[0] == pytest.approx(held_out[1], rel=TOLERANCE)


def test_tied_weights_are_summed_between_gpus(
    trainers: Trainers, tmp_path: Path, gpus: int
) -> None:
    devices(Shape(depth=2, replicas=1, micro_batch=4), gpus, ties=True)
    job = Job(trainers, tmp_path / "job", args={"tied": True})
    assert farthest(curve(run(job, gpus, 2, 1)), job.curve(1, 1)) < TOLERANCE


def test_tuples_with_masks_travel_between_gpus(
    trainers: Trainers, tmp_path: Path, gpus: int
) -> None:
    job = Job(trainers, tmp_path / "job", "tuples", layers=4, batch_size=10)
    assert farthest(curve(run(job, gpus, 2, 1)), job.curve(1, 1)) < TOLERANCE


@pytest.mark.parametrize("precision", ["bfloat16", "float16"])
def test_in_half_precision_it_trains_like_the_cpu(
    trainers: Trainers, tmp_path: Path, gpus: int, precision: str
) -> None:
    job = Job(trainers, tmp_path / "job", precision=precision)
    first, *_, last = [loss for loss, _ in curve(run(job, gpus, 2, 1)) if loss is not None]
    assert last == pytest.approx(job.curve(1, 1)[-1][0], rel=HALF_TOLERANCE)
    assert last < first


def test_dropout_of_a_users_own_draws_the_same_at_every_depth(
    trainers: Trainers, tmp_path: Path, gpus: int
) -> None:
    job = Job(trainers, tmp_path / "job", args={"dropout": 0.2, "samples": 60})
    assert farthest(curve(run(job, gpus, 2, 1)), curve(run(job, gpus, 1, 1))) < TOLERANCE


def test_our_dropout_drops_the_same_on_every_device(gpu: Device) -> None:
    shape, place = torch.Size((8, 16, 16)), Place(1, 2, 3, 4)
    here = dropped(place, shape, 0.25)
    there = dropped(Place(1, 2, 3, 4), shape, 0.25, gpu.torch)
    assert there.is_cuda and torch.equal(there.cpu(), here)


# --- Checkpoints ------------------------------------------------------------------------------


@pytest.mark.parametrize("first_on_gpu", [True, False])
def test_a_step_saved_on_one_device_is_gone_on_from_on_the_other(
    trainers: Trainers, tmp_path: Path, gpus: int, first_on_gpu: bool
) -> None:
    job = Job(trainers, tmp_path / "job")
    saving = Saving(root=str(job.root), every_steps=10)
    if first_on_gpu:
        whole = run(job, gpus, 2, 1, saving=saving)
        rest = job.run(1, 1, step=10)
    else:
        whole = job.run(2, 1, saving=saving)
        rest = run(job, gpus, 1, 1, step=10)
    assert [part.step for part in whole.ranks[0].all(PartWritten)] == [10, 20]
    assert farthest(curve(rest), curve(whole)[10:]) < TOLERANCE


def test_a_copy_is_of_the_step_it_was_announced_after(gpu: Device) -> None:
    """What the GPU has still to do then comes before it, what is asked for later does not."""
    weight, factor = torch.ones(1 << 20, device=gpu.torch), torch.eye(2048, device=gpu.torch)
    snapshot = Snapshot(gpu)
    for _ in range(20):
        factor = factor @ factor  # keeps the GPU busy
    weight.mul_(2)
    snapshot.announce()
    taken: list[dict[int, LayerState]] = []
    states = {0: LayerState(parameters={"layers.0.w": weight})}
    writer = threading.Thread(target=lambda: taken.append(snapshot.take(states)))
    writer.start()
    snapshot.wait()
    weight.mul_(2)
    gpu.synchronize()
    writer.join(30)
    copied = taken[0][0].parameters["layers.0.w"]
    assert copied.is_pinned() and torch.equal(copied, torch.full((1 << 20,), 2.0))


# --- Between GPU and host ---------------------------------------------------------------------


def test_memory_for_messages_is_lent_again(gpu: Device) -> None:
    message = torch.arange(1 << 16, device=gpu.torch)
    places = set()
    for _ in range(20):
        (fetched,) = gpu.fetch([message])
        assert fetched.is_pinned() and torch.equal(fetched, torch.arange(1 << 16))
        places.add(fetched.data_ptr())
        del fetched
    assert len(places) <= 2


def test_what_is_fed_is_whole_though_its_host_memory_is_gone(gpu: Device) -> None:
    fed = [gpu.feed(torch.full((1 << 16,), float(i))) for i in range(50)]
    assert [tensor.mean().item() for tensor in fed] == list(range(50))


def test_the_first_weights_are_measured_on_the_gpu_layer_by_layer(
    trainers: Trainers, tmp_path: Path, gpus: int
) -> None:
    job = Job(trainers, tmp_path / "job")
    first = trainers.first_weights(
        tmp_path / "there", job.program, job.training, device=f"cuda:{gpus - 1}"
    )
    assert first.codes == [0], first.ranks[0].lines
    costs = first.ranks[0].one(Inspected).costs
    assert costs.device_kind == "cuda"
    assert torch.cuda.get_device_name(gpus - 1) in costs.host
    assert all(layer.forward_seconds > 0 for layer in costs.layers)
    assert hashes(tmp_path / "there", 0) == hashes(job.root, 0)


# --- What goes wrong --------------------------------------------------------------------------


def test_too_little_memory_names_rank_layer_and_line(
    trainers: Trainers, tmp_path: Path, gpus: int
) -> None:
    program = Program(source=str(path("greedy")), workdir=str(path("greedy").parent))
    training = Training(batch_size=12, steps=4)
    assert trainers.first_weights(tmp_path / "job", program, training).codes == [0]
    shape = Shape(depth=1, replicas=1, micro_batch=4)
    specs = trainers.specs(
        tmp_path / "job", program, training, shape, layers=3, step=0, device="cuda:0"
    )
    generation = trainers.wait(trainers.start(specs))
    assert generation.codes == [ExitCode.PROGRAM_ERROR]
    failed = generation.ranks[0].one(Failed)
    assert failed.layer == 1
    assert failed.message.startswith("rank 0: layer 1 raised OutOfMemoryError")
    assert "greedy.py:10" in failed.message


@pytest.mark.parametrize("shape", [(1, 2), (2, 2)], ids=["1x2", "2x2"])
def test_survivors_of_a_death_stand_still_with_their_state(
    trainers: Trainers, tmp_path: Path, gpus: int, shape: tuple[int, int]
) -> None:
    """NCCL would wait for the dead for ever."""
    devices(Shape(depth=shape[0], replicas=shape[1], micro_batch=4), gpus)
    job = Job(trainers, tmp_path / "job", steps=1_000_000)
    generation = start(job, gpus, *shape)
    trainers.wait(generation, lambda g: all(len(rank.steps) >= 3 for rank in g.ranks))
    os.kill(generation.ranks[0].trainer.pid, signal.SIGKILL)
    trainers.wait(generation, lambda g: all_halted(g, 0), seconds=30)
    for rank in survivors(generation):
        assert newest(rank).suspects == (0,) and not newest(rank).torn
        assert newest(rank).applied >= 3
    salvage(trainers, generation, [(rank, newest(rank).holds) for rank in survivors(generation)])
    generation.order(Leave())
    trainers.wait(generation)


def test_a_device_that_is_not_there_is_refused_with_how_many_are(
    trainers: Trainers, tmp_path: Path, gpus: int
) -> None:
    job = Job(trainers, tmp_path / "job", steps=2)
    shape = Shape(depth=1, replicas=1, micro_batch=4)
    specs = trainers.specs(
        job.root, job.program, job.training, shape, layers=6, step=0, device="cuda:99"
    )
    generation = trainers.wait(trainers.start(specs))
    assert generation.codes == [ExitCode.PROGRAM_ERROR]
    assert f"torch sees {gpus} CUDA devices" in generation.ranks[0].one(Failed).message
