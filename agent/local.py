"""``varuna try``: one program at one shape on this machine, by the launcher and the trainer that a
cluster uses, without a controller.

Standard output has a line a step; what goes wrong is one sentence on standard error and exit code
1. It reads any checkpoint folder and writes only under an id of its own. Whatever way it ends, no
process is left behind.
"""

import argparse
import asyncio
import contextlib
import json
import os
import secrets
import signal
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from pydantic import ValidationError

from agent import solo
from agent.launcher import LaunchError, Zygote
from agent.logs import next_chunk
from trainer.contract.checkpoints import FolderName
from trainer.contract.listing import complete, scan, to_resume
from trainer.contract.progress import Evaluated, Inspected, Line, SaveFailed, StepCommitted
from trainer.contract.spec import (
    Address,
    Frozen,
    Program,
    ResumedFrom,
    RunKind,
    RunSpec,
    Saving,
    Shape,
    Training,
)
from trainer.contract.topology import check_cuts, even_cuts, micro_batches

_HOST = "127.0.0.1"
_LOOK_SECONDS = 0.1
"""Between two looks at the logs."""


class TryError(Exception):
    """What went wrong, as one sentence for a person."""


class Request(Frozen):
    """What to run: the JSON file of ``--spec``."""

    program: Program
    training: Training
    cuts: tuple[int, ...] | None = None
    """None: stages of like layer count."""
    init_from: str | None = None
    """A folder of weights to begin with."""
    every_steps: int | None = None
    """How often to save; None: at the end only."""


def main() -> None:
    """The command line. Exit code 0: all steps are done; 1: the sentence says why not."""
    options = _options()
    try:
        asyncio.run(_until_told(options))
    except TryError as error:
        sys.exit(str(error))
    except BrokenPipeError:  # nobody reads the steps any more
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
        sys.exit(1)
    except asyncio.CancelledError:
        sys.exit(130)


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="agent.local", description=__doc__)
    parser.add_argument("--spec", type=Path, required=True, help="a JSON file: program, training")
    parser.add_argument("--shape", required=True, help="PxD: stages x replicas")
    parser.add_argument("--micro-batch", type=int, default=4, help="samples")
    parser.add_argument("--steps", type=int, help="how many to run; else up to the job's last")
    parser.add_argument("--checkpoint-dir", type=Path, help="keep checkpoints below this folder")
    parser.add_argument("--resume", metavar="STEP", help="a step in --checkpoint-dir, or `newest`")
    parser.add_argument("--json", action="store_true", help="one JSON object a step")
    parser.add_argument("--logs", action="store_true", help="what ranks print, on standard error")
    parser.add_argument("--zygote-fd", type=int, help="an inherited socket to a warm zygote")
    options = parser.parse_args()
    if options.resume and not options.checkpoint_dir:
        parser.error("--resume needs --checkpoint-dir")
    return options


async def _until_told(options: argparse.Namespace) -> None:
    """Run; Ctrl-C and SIGTERM end it and all that it started."""
    running = asyncio.ensure_future(_try(options))
    for number in (signal.SIGINT, signal.SIGTERM):
        asyncio.get_running_loop().add_signal_handler(number, running.cancel)
    await running


async def _try(options: argparse.Namespace) -> None:
    request, shape = read_request(options.spec), _read_shape(options.shape, options.micro_batch)
    try:
        micro_batches(request.training.batch_size, shape)
    except ValueError as error:
        raise TryError(f"The shape {shape} does not fit: {error}.") from error
    start = _find(options.checkpoint_dir, options.resume) if options.resume else None
    if options.steps is not None:
        last = options.steps + (start.resumed_from.step if start else 0)
        training = request.training.model_copy(update={"steps": last})
        request = request.model_copy(update={"training": training})
    if start and start.resumed_from.step >= request.training.steps:
        raise TryError(
            f"Step {start.resumed_from.step} is there already: steps is {request.training.steps}."
        )
    agreed = _as_json if options.json else _as_text
    with tempfile.TemporaryDirectory(prefix="varuna-try-", ignore_cleanup_errors=True) as temporary:
        job = f"try_{time.strftime('%Y%m%d-%H%M%S')}-{secrets.token_hex(2)}"
        root = _own_folder(options.checkpoint_dir or Path(temporary), job)
        try:
            async with contextlib.AsyncExitStack() as ending:
                zygote = await _zygote(options.zygote_fd)
                ending.push_async_callback(zygote.close)
                if options.logs:
                    await ending.enter_async_context(_shown(Path(temporary)))
                hear = partial(_hear, options.json)
                run = _Run(request, job, root, Path(temporary), hear, agreed, zygote)
                await run.train(shape, start or await run.first_weights(shape.micro_batch))
        except (LaunchError, solo.SoloError) as error:
            raise TryError(str(error)) from error
    if options.checkpoint_dir:
        print(f"Checkpoints are in {root}", file=sys.stderr)


@contextlib.asynccontextmanager
async def _shown(logs: Path) -> AsyncIterator[None]:
    """Inside, what ranks print goes to standard error as it comes, the rest of it at the end."""
    offsets: dict[Path, int] = {}

    def show(*, is_over: bool) -> None:
        for log in sorted(logs.glob("rank-*.log")):
            while chunk := next_chunk(log, offsets.get(log, 0), is_whole=is_over):
                offsets[log] = chunk.end
                for line in chunk.text.splitlines():
                    print(f"[{log.stem}] {line}", file=sys.stderr)

    async def keep_showing() -> None:
        while True:
            show(is_over=False)
            await asyncio.sleep(_LOOK_SECONDS)

    showing = asyncio.create_task(keep_showing())
    try:
        yield
    finally:
        showing.cancel()
        show(is_over=True)


async def _zygote(descriptor: int | None) -> Zygote:
    return await (Zygote.start() if descriptor is None else Zygote.adopt(descriptor))


@dataclass(frozen=True)
class _Start:
    """The checkpoint to go on from."""

    folder: Path
    layers: int
    resumed_from: ResumedFrom


@dataclass
class _Run:
    """One ``varuna try``: generation after generation under one id."""

    request: Request
    job: str
    root: Path
    logs: Path
    hear: Callable[[int, Line], None]
    agreed: Callable[[StepCommitted], None]
    zygote: Zygote

    async def first_weights(self, micro_batch: int) -> _Start:
        """Build the real model, write step 0 and learn how many layers there are."""
        inspected: list[Inspected] = []

        def hear(rank: int, line: Line) -> None:
            if isinstance(line, Inspected):
                inspected.append(line)

        one = Shape(depth=1, replicas=1, micro_batch=micro_batch)
        spec = self._spec("first_weights", 1, one)
        await solo.run(self.zygote, [spec], self.logs, hear, self.agreed)
        if not inspected:
            raise TryError("The first weights were written but nobody counted the layers.")
        begun = ResumedFrom(step=0, generation=1, folder=str(FolderName(0, 1)))
        return _Start(self.root / begun.folder, len(inspected[0].costs.layers), begun)

    async def train(self, shape: Shape, start: _Start) -> None:
        """Train from ``start`` to the last step."""
        cuts = _cuts(self.request.cuts, start.layers, shape.depth)
        store = None
        if shape.world > 1:
            store = Address(host=_HOST, port=await self.zygote.start_store(_HOST))
        spec = self._spec("train", start.resumed_from.generation + 1, shape).model_copy(
            update={
                "cuts": cuts,
                "store": store,
                "load_from": str(start.folder),
                "resumed_from": start.resumed_from,
            }
        )
        specs = [spec.model_copy(update={"rank": rank}) for rank in range(shape.world)]
        await solo.run(self.zygote, specs, self.logs, self.hear, self.agreed)

    def _spec(self, kind: RunKind, generation: int, shape: Shape) -> RunSpec:
        return RunSpec(
            kind=kind,
            job=self.job,
            generation=generation,
            rank=0,
            shape=shape,
            cuts=(),
            program=self.request.program,
            training=self.request.training,
            data_host=_HOST,
            saving=Saving(root=str(self.root), every_steps=self.request.every_steps),
            init_from=self.request.init_from if kind == "first_weights" else None,
        )


def _cuts(wanted: tuple[int, ...] | None, layers: int, depth: int) -> tuple[int, ...]:
    try:
        cuts = wanted or even_cuts(layers, depth)
        check_cuts(cuts, layers, depth)
    except ValueError as error:
        raise TryError(f"This model does not fit the shape: {error}.") from error
    return cuts


def _hear(is_json: bool, rank: int, line: Line) -> None:
    if isinstance(line, Evaluated) and not rank:
        shown = line.model_dump(include={"step", "loss", "samples", "metrics"})
        loss = "not a number" if line.loss is None else f"{line.loss:.6g}"
        print(
            json.dumps({"evaluation": shown})
            if is_json
            else f"held-out loss after step {line.step}: {loss}",
            flush=True,
        )
    if isinstance(line, SaveFailed):
        print(
            f"Checkpoint at step {line.step} failed on rank {rank}: {line.message}. "
            "Training continues.",
            file=sys.stderr,
        )


def _as_json(line: StepCommitted) -> None:
    shown = line.model_dump(include={"step", "loss", "grad_norm", "samples", "sample_ids_hash"})
    print(json.dumps(shown | ({"metrics": line.metrics} if line.metrics else {})), flush=True)


def _as_text(line: StepCommitted) -> None:
    loss, norm = ("not a number" if x is None else f"{x:.6g}" for x in (line.loss, line.grad_norm))
    print(f"step {line.step}  loss {loss}  gradient norm {norm}  {line.seconds:.3g} s", flush=True)


def read_request(path: Path) -> Request:
    """Raises TryError."""
    try:
        return Request.model_validate_json(path.read_bytes())
    except OSError as error:
        raise TryError(f"Cannot read {path}: {error.strerror}.") from error
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(map(str, first["loc"])) or path
        raise TryError(f"Cannot use {where}: {first['msg']}.") from error


def _read_shape(text: str, micro_batch: int) -> Shape:
    try:
        depth, replicas = map(int, text.lower().split("x"))
        return Shape(depth=depth, replicas=replicas, micro_batch=micro_batch)
    except ValueError as error:
        raise TryError(f"A shape is PxD with micro-batches of 1 or more, not {text!r}.") from error


def _find(folder: Path, step: str) -> _Start:
    """The checkpoint to resume: the newest of the newest run in ``folder``, or that at ``step``."""
    if step != "newest" and not step.isdecimal():
        raise TryError(f"--resume takes a step or `newest`, not {step!r}.")
    wanted = None if step == "newest" else int(step)
    try:
        listings = [scan(root) for root in _runs_in(folder)]
    except OSError as error:
        raise TryError(f"Cannot read {folder}: {error.strerror}.") from error
    for listing in listings:
        if found := to_resume(listing, wanted):
            begun = ResumedFrom(step=found.step, generation=found.generation, folder=found.folder)
            return _Start(Path(listing.root) / found.folder, found.layer_count, begun)
    there = sorted({c.step for listing in listings for c in complete(listing)})
    at = "" if wanted is None else f" at step {wanted}"
    raise TryError(
        f"No complete checkpoint{at} to go on from in {folder}"
        + (f": there are those of steps {', '.join(map(str, there))}." if there else ".")
    )


def _runs_in(folder: Path) -> list[Path]:
    """The folders of checkpoints at or right below ``folder``, newest first."""
    if _holds_checkpoints(folder):
        return [folder]
    below = [path for path in folder.iterdir() if path.is_dir() and _holds_checkpoints(path)]
    return sorted(below, key=lambda path: path.stat().st_mtime, reverse=True)


def _holds_checkpoints(folder: Path) -> bool:
    return folder.is_dir() and any(FolderName.parse(path.name) for path in folder.iterdir())


def _own_folder(folder: Path, job: str) -> Path:
    """Where the run writes: below ``folder``, or beside it when that is a run's own."""
    return (folder.parent if _holds_checkpoints(folder) else folder) / job


if __name__ == "__main__":
    main()
