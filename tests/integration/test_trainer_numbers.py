"""The numbers of a training do not depend on its shape, and are those of a plain PyTorch loop."""

import importlib.util
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from tests.fakes.trainers import PROGRAMS, Generation, Trainers
from trainer.contract.listing import scan
from trainer.contract.progress import Finished, PartWritten
from trainer.contract.samples import expected_hash
from trainer.contract.scaling import FIRST_SCALE
from trainer.contract.spec import Program, Saving, Shape, Training

pytestmark = pytest.mark.integration

Curve = list[tuple[float | None, float | None]]
"""Loss and gradient norm, step by step."""


class Job:
    """A job of ``ladder`` (or another program) that can be run at any shape from the same start."""

    def __init__(
        self, trainers: Trainers, root: Path, name: str = "ladder", layers: int = 6, **more: Any
    ) -> None:
        args, init_from = more.pop("args", {}), more.pop("init_from", None)
        self.root, self.args, self.layers = root, args, layers
        self.trainers = trainers
        path = name if ":" in name else str(PROGRAMS / f"{name}.py")
        self.program = Program(source=path, workdir=str(PROGRAMS), args=args)
        self.training = Training.model_validate({"batch_size": 24, "steps": 20, "seed": 3} | more)
        first = trainers.first_weights(root, self.program, self.training, init_from=init_from)
        assert first.codes == [0], first.ranks[0].lines

    def run(
        self, depth: int, replicas: int, step: int | None = 0, m: int = 4, **more: Any
    ) -> Generation:
        """All steps after ``step`` (None: after the newest checkpoint), without a mishap."""
        shape = Shape(depth=depth, replicas=replicas, micro_batch=m)
        training = self.training.model_copy(update=more.pop("training", {}))
        specs = self.trainers.specs(
            self.root, self.program, training, shape, layers=self.layers, step=step, **more
        )
        generation = self.trainers.wait(self.trainers.start(specs))
        assert generation.codes == [0] * shape.world, generation.ranks[0].lines[-1]
        return generation

    def curve(self, depth: int, replicas: int, **more: Any) -> Curve:
        return curve(self.run(depth, replicas, **more))


def curve(generation: Generation) -> Curve:
    """What rank 0 said; all ranks say the same."""
    curves = [[(s.loss, s.grad_norm) for s in rank.steps] for rank in generation.ranks]
    assert all(other == curves[0] for other in curves)
    return curves[0]


def farthest(one: Curve, other: Curve) -> float:
    """The largest relative difference of any number."""
    assert len(one) == len(other) > 0
    pairs = zip((n for step in one for n in step), (n for step in other for n in step), strict=True)
    return max(abs(a - b) / abs(b) for a, b in pairs if a is not None and b is not None)


def plain_loop(job: Job) -> Curve:
    """The same training without any of our code: one process, whole batches.

    Each step takes all samples, so that their order is of no account.
    """
    found = importlib.util.spec_from_file_location("plain_ladder", job.program.source)
    assert found and found.loader
    ladder = importlib.util.module_from_spec(found)
    found.loader.exec_module(ladder)
    layers = ladder.layers(job.args)
    named: dict[torch.nn.Parameter, str] = {}
    for index, layer in enumerate(layers):
        for name, parameter in layer.named_parameters():
            if parameter.requires_grad:
                named.setdefault(parameter, f"layers.{index}.{name}")
    saved: dict[str, torch.Tensor] = {}
    for file in (job.root / "step-000000.g1").glob("*.safetensors"):
        saved |= load_file(file)
    for index, layer in enumerate(layers):
        for name, parameter in layer.named_parameters():
            if (value := saved.get(f"parameters/layers.{index}.{name}")) is not None:
                parameter.data.copy_(value)
    optimizer = ladder.optimizer([(name, p) for p, name in named.items()], job.args)
    rates = [group["lr"] for group in optimizer.param_groups]
    samples = ladder.dataset(job.args)
    batch = {key: torch.stack([sample[key] for sample in samples]) for key in samples[0]}
    precision, scale = job.training.precision, 1.0
    dtype = {"bfloat16": torch.bfloat16, "float16": torch.float16}.get(precision)
    if precision == "float16":
        scale = FIRST_SCALE
    clip = job.training.clip_grad_norm or math.inf
    curve: Curve = []
    for step in range(1, job.training.steps + 1):
        with torch.autocast("cpu", dtype=dtype, enabled=dtype is not None):
            value = ladder.inputs(batch)
            for layer in layers:
                value = layer(value)
            total, weight, *_ = ladder.loss(value, batch)
        optimizer.zero_grad()
        if dtype:  # rounds; so let both round the gradients of the same sum
            (total * scale).backward()
            for parameter in named:
                assert parameter.grad is not None
                parameter.grad /= weight * scale
        else:
            (total / weight).backward()
        norm = torch.nn.utils.clip_grad_norm_(list(named), clip)
        for group, rate in zip(optimizer.param_groups, rates, strict=True):
            group["lr"] = rate * ladder.lr_scale(step, job.args)
        if norm.isfinite():
            optimizer.step()
        else:
            scale /= 2
        curve.append(((total / weight).item(), norm.item() if norm.isfinite() else None))
    return curve


@pytest.fixture(scope="module")
def tied_with_dropout(trainers: Trainers, tmp_path_factory: pytest.TempPathFactory) -> Job:
    args = {"tied": True, "dropout": 0.2, "samples": 60}
    return Job(trainers, tmp_path_factory.mktemp("job"), args=args, clip_grad_norm=0.5)


def test_dropout_draws_the_same_numbers_at_every_shape(tied_with_dropout: Job) -> None:
    job = tied_with_dropout
    alone, in_twos = job.curve(1, 1), job.curve(1, 2)
    assert job.curve(4, 1) == alone
    assert job.curve(3, 2) == in_twos
    assert farthest(in_twos, alone) < 1e-5


@pytest.mark.parametrize("schedule", ["1f1b", "gpipe"])
def test_the_schedule_changes_no_bit(tied_with_dropout: Job, schedule: str) -> None:
    job, training = tied_with_dropout, {"schedule": schedule}
    assert job.curve(3, 1, training=training) == job.curve(1, 1)


def test_the_least_in_flight_changes_no_bit(tied_with_dropout: Job) -> None:
    job = tied_with_dropout
    assert job.curve(4, 1, in_flight=(1, 1, 1, 1)) == job.curve(1, 1)


@pytest.mark.parametrize(
    ("batch_size", "m", "replicas"),
    [(4, 4, 1), (3, 8, 1), (6, 3, 1), (22, 4, 1), (22, 4, 3), (5, 1, 2)],
    ids=["one micro-batch", "less than one", "fewer than stages", "short last", "short last of 3",
         "uneven"],
)  # fmt: skip
def test_any_batch_is_dealt_whole(
    trainers: Trainers, tmp_path: Path, batch_size: int, m: int, replicas: int
) -> None:
    args = {"samples": batch_size, "tied": True}
    job = Job(trainers, tmp_path / "job", batch_size=batch_size, steps=5, args=args)
    deep, flat = job.curve(4, replicas, m=m), job.curve(1, replicas, m=m)
    assert deep == flat
    assert farthest(deep, plain_loop(job)) < 1e-5


def test_the_batch_and_the_rate_are_the_same_at_every_number_of_replicas(
    trainers: Trainers, tmp_path: Path
) -> None:
    """24 samples in micro-batches of 4: five replicas do not divide them."""
    args = {"samples": 60, "tied": True}
    job = Job(trainers, tmp_path / "job", batch_size=24, steps=6, args=args)
    curves = {replicas: job.curve(1, replicas, m=4) for replicas in range(1, 6)}
    assert max(farthest(curve, curves[1]) for curve in curves.values()) < 1e-5


def test_a_stage_may_have_nothing_to_train(trainers: Trainers, tmp_path: Path) -> None:
    job = Job(trainers, tmp_path / "job", steps=5, args={"pause": True, "frozen": True})
    cut = job.curve(4, 1, cuts=(0, 1, 2, 3, 6))
    assert cut == job.curve(1, 1)
    assert farthest(cut, plain_loop(job)) < 1e-5


@pytest.mark.parametrize("shape", [(5, 1), (3, 2), (2, 3)])
def test_padding_weighs_nothing_whatever_travels_between_stages(
    trainers: Trainers, tmp_path: Path, shape: tuple[int, int]
) -> None:
    job = Job(trainers, tmp_path / "job", "padded", layers=5, batch_size=22, steps=8,
              args={"samples": 22})  # fmt: skip
    assert farthest(job.curve(*shape), plain_loop(job)) < 1e-5


@pytest.mark.parametrize(("precision", "tolerance"), [("bfloat16", 1e-5), ("float16", 1e-3)])
def test_in_half_precision_it_trains_like_a_plain_loop_with_autocast(
    trainers: Trainers, tmp_path: Path, precision: str, tolerance: float
) -> None:
    job = Job(trainers, tmp_path / "job", precision=precision, args={"tied": True})
    ours, plain = job.curve(2, 1, m=24), plain_loop(job)
    assert farthest(ours, plain) < tolerance
    skipped = [[norm is None for _, norm in curve] for curve in (ours, plain)]
    assert skipped[0] == skipped[1] and any(skipped[0]) == (precision == "float16")
    assert job.curve(3, 1) == job.curve(1, 1)


def test_tuples_with_masks_travel_between_stages(trainers: Trainers, tmp_path: Path) -> None:
    job = Job(trainers, tmp_path / "job", "tuples", layers=4, batch_size=10)
    alone = job.curve(1, 1)
    assert job.curve(4, 1) == job.curve(2, 1) == alone


def test_each_step_takes_its_own_samples_and_says_so_on_every_rank(tied_with_dropout: Job) -> None:
    job = tied_with_dropout
    for rank in job.run(2, 2).ranks:
        steps = range(1, 21)
        assert [(s.step, s.samples, s.sample_ids_hash) for s in rank.steps] == [
            (step, 24, expected_hash(step, 24, 60, seed=3)) for step in steps
        ]
        assert all(0 <= s.metrics["accuracy"] <= 1 for s in rank.steps)


def test_a_job_goes_on_at_another_shape_from_parts_that_each_rank_wrote(
    trainers: Trainers, tmp_path: Path
) -> None:
    args = {"tied": True, "dropout": 0.2, "samples": 60}
    job = Job(trainers, tmp_path / "job", args=args)
    whole = job.curve(1, 2)
    saving = Saving(root=str(job.root), every_steps=10)
    first = job.run(3, 2, saving=saving)
    written = [part for rank in first.ranks for part in rank.all(PartWritten)]
    assert sorted(layer for part in written if part.step == 10 for layer in part.layers) == [
        0, 1, 2, 3, 4, 5
    ]  # fmt: skip
    assert [part.step for part in first.ranks[0].all(PartWritten)] == [10, 20]
    assert first.ranks[0].one(Finished).step == 20
    assert job.curve(2, 2, step=10) == whole[10:]
    assert job.curve(1, 2, step=10) == whole[10:]
    assert farthest(job.curve(4, 1, step=10), whole[10:]) < 1e-5
    listing = scan(job.root)
    assert [marker.generation for marker in listing.markers] == list(range(1, 7))
    assert not listing.skipped


def test_every_so_many_seconds_all_ranks_save_the_same_step(
    trainers: Trainers, tmp_path: Path
) -> None:
    job = Job(trainers, tmp_path / "job", steps=6)
    saving = Saving(root=str(job.root), every_seconds=1e-9)
    first, second = (
        [part.step for part in rank.all(PartWritten)] for rank in job.run(2, 1, saving=saving).ranks
    )
    assert first == second  # all steps, but for those at which a writer was busy
    assert (first[0], first[-1]) == (1, 6)


def test_a_job_that_has_all_its_steps_is_finished_at_once(
    trainers: Trainers, tmp_path: Path
) -> None:
    job = Job(trainers, tmp_path / "job", steps=2)
    job.run(1, 1)
    again = job.run(2, 1, step=None)
    assert [rank.one(Finished).step for rank in again.ranks] == [2, 2]
    assert curve(again) == []
