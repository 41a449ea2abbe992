"""A job of ``beset`` that can be run at any shape, disturbed or not, from any checkpoint."""

from pathlib import Path
from typing import Any

from tests.fakes.standing import Contents, hashes
from tests.fakes.trainers import PROGRAMS, Generation, Trainers
from trainer.contract.progress import ExitCode, Leave
from trainer.contract.spec import Program, Shape, Training

LAYERS = 6
ARGS = {"tied": True, "shared": True, "dropout": 0.1, "samples": 60}
TRAINING = Training(batch_size=24, steps=1_000_000, seed=3, clip_grad_norm=0.5)


class Job:
    """A model with tied weights, dropout and Adam's moments, at step 0."""

    def __init__(self, trainers: Trainers, root: Path) -> None:
        self.trainers = trainers
        self.root = root
        made = trainers.first_weights(root, self._program(), TRAINING)
        assert made.codes == [0]

    def start(self, shape: str, *, steps: int | None = None, **more: Any) -> Generation:
        """Begin at step 0, or where ``step`` says (None: at the newest checkpoint)."""
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


class Undisturbed:
    """What a run holds to which nothing happens; each is run once."""

    def __init__(self, job: Job) -> None:
        self._job = job
        self._known: dict[tuple[int, str], Contents] = {}

    def after(self, step: int, shape: str) -> Contents:
        """All layers after ``step``."""
        if (step, shape) not in self._known:
            self._known[step, shape] = self._job.until(step, shape)
            assert len(self._known[step, shape]) == LAYERS
        return self._known[step, shape]
