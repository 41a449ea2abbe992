"""Saving and loading a model with its Adam moments: Varuna beside torch.save and torch's DCP.

    python -m tests.bench.checkpoint [--quick] [--rounds N] [--json]

Four forked processes hold a 2x2: two stages, two replicas of each, float32, about 100M parameters
(1.2 GB with the moments; --quick: 10M), and train: products of matrices in the place of forward and
backward, a barrier in that of the vote, a real AdamW. Per way and round: some steps without a save,
then a save and some steps more, until it is durable. Then four fresh processes load, each its
stage, which is compared bit for bit. A first round warms every way up and does not count. The rest
of the disk's work is waited for between two ways, and each way begins the round once.

    stall    how long the save holds up the training thread by its calls, on the slowest rank
    delay    how much longer the steps take during which it is made: calls, and shared processors
    durable  from its begin until the last rank's bytes are fsynced
    load     until every rank has its stage's tensors, from the page cache (just written)
    cpu      what all ranks together spent on the load: steadier on a busy machine
"""

import multiprocessing
import os
import shutil
import statistics
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import xxhash

from tests.bench import figures
from tests.bench.figures import median, ratio, tell
from tests.bench.ways import (
    RIVALS,
    SHAPE,
    WAYS,
    Dcp,
    Flat,
    OurPeriodic,
    OurSave,
    Skeleton,
    Training,
    Way,
)

FULL = {"layers": 12, "width": 768, "heads": 12, "context": 512, "vocab": 16384}
QUICK = {"layers": 6, "width": 352, "heads": 4, "context": 256, "vocab": 4096}
STEPS = 3
"""Without a save, then with one: it is durable before they are over."""


@dataclass(frozen=True)
class Saved:
    """What one rank saw of one save."""

    stall: float
    durable: float
    delay: float
    digests: dict[str, str]
    """Of all its tensors as they were."""


# --- one rank


def _rank(rank: int, args: dict[str, Any], meeting: str, orders: Connection) -> None:
    """Train and save by (way, folder, step) until told None; answer with what this rank saw."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=meeting, rank=rank, world_size=SHAPE.world)
    training = Training(Skeleton(args, rank))
    ways = [way(training) for way in WAYS]
    orders.send(training.share_bytes())
    while (order := orders.recv()) is not None:
        number, folder, step = order
        orders.send(_save(training, ways[number], folder, step))
    dist.destroy_process_group()


def _save(training: Training, way: Way, folder: Path, step: int) -> Saved:
    training.step()
    plain = statistics.median(training.step() for _ in range(STEPS))
    digests = _digests(training.flat())
    dist.barrier()
    way.durable_at, waits = 0.0, []

    def settle() -> None:
        began = time.monotonic()
        way.settle()
        waits.append(time.monotonic() - began)

    began = time.monotonic()
    way.save(folder, step)
    waits.append(time.monotonic() - began)
    for _ in range(STEPS):
        training.step(settle)
    way.finish()
    delay = time.monotonic() - began - STEPS * plain
    return Saved(sum(waits), way.durable_at - began, delay, digests)


@dataclass(frozen=True)
class Loaded:
    """What one rank saw of one load."""

    seconds: float
    cpu: float
    digests: dict[str, str]


def _load(
    rank: int, args: dict[str, Any], meeting: str, orders: Connection, number: int, work: Any
) -> None:
    """Load once, in this fresh process, when told to."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=meeting, rank=rank, world_size=SHAPE.world)
    skeleton = Skeleton(args, rank)
    dist.barrier()
    used, began = time.process_time(), time.monotonic()
    flat = WAYS[number].load(skeleton, *work)
    seconds, cpu = time.monotonic() - began, time.process_time() - used
    orders.send(Loaded(seconds, cpu, _digests(flat)))
    dist.destroy_process_group()


def _digests(flat: Flat) -> dict[str, str]:
    return {name: xxhash.xxh3_128_hexdigest(t.numpy().data) for name, t in flat.items()}


# --- all ranks


@dataclass(frozen=True)
class Round:
    """One save and load by all ranks: the slowest one's figures."""

    stall: float
    delay: float
    durable: float
    load: float | None
    load_cpu: float | None
    num_bytes: int


class Ranks:
    """The four processes that train. They are forked before anything is computed here."""

    def __init__(self, args: dict[str, Any], folder: Path) -> None:
        self._args = args
        self._folder = folder
        self._step = 0
        self._processes, self._ends = _forked(_rank, args, f"file://{folder}/meeting")
        self.state_bytes = sum(end.recv() for end in self._ends)

    def once(self, number: int) -> Round:
        """Way ``number`` on all ranks; its files are gone afterwards."""
        self._step += 1
        folder = self._folder / f"save-{self._step}"
        folder.mkdir()
        os.sync()
        for end in self._ends:
            end.send((number, folder, self._step))
        saved: list[Saved] = [end.recv() for end in self._ends]
        size = sum(file.stat().st_size for file in folder.rglob("*") if file.is_file())
        loaded = self._load(number, folder) if WAYS[number].loads else []
        if any(s.digests != one.digests for s, one in zip(saved, loaded, strict=False)):
            raise AssertionError(f"{WAYS[number].name} does not load what it has saved")
        shutil.rmtree(folder)
        return Round(
            stall=max(one.stall for one in saved),
            delay=max(one.delay for one in saved),
            durable=max(one.durable for one in saved),
            load=max((one.seconds for one in loaded), default=None),
            load_cpu=sum(one.cpu for one in loaded) if loaded else None,
            num_bytes=size,
        )

    def _load(self, number: int, folder: Path) -> list[Loaded]:
        meeting = f"file://{self._folder}/meeting-{self._step}"
        processes, ends = _forked(_load, self._args, meeting, number, (folder, self._step))
        loaded: list[Loaded] = [end.recv() for end in ends]
        for process in processes:
            process.join()
        return loaded

    def end(self) -> None:
        """Let them go."""
        for end in self._ends:
            end.send(None)
        for process in self._processes:
            process.join()


def _forked(
    target: Callable[..., None], args: dict[str, Any], meeting: str, *more: Any
) -> tuple[list[Any], list[Connection]]:
    """A process for each rank, and our ends of the pipes to them."""
    context, processes, ends = multiprocessing.get_context("fork"), [], []
    for rank in range(SHAPE.world):
        ours, theirs = context.Pipe()
        work = (rank, args, meeting, theirs, *more)
        process = context.Process(target=target, args=work, daemon=True)
        process.start()
        theirs.close()
        ends.append(ours)
        processes.append(process)
    return processes, ends


def main() -> None:
    """Measure and tell."""
    called = figures.flags(__doc__ or "", quick_rounds=3, full_rounds=5)
    machine = figures.Machine()
    args = QUICK if called.quick else FULL
    folder = Path(tempfile.mkdtemp(prefix="varuna-bench-"))
    rounds: dict[str, list[Round]] = {way.name: [] for way in WAYS}
    ranks = Ranks(args, folder)
    tell(f"{ranks.state_bytes / 1e9:.2f} GB of parameters and moments in {SHAPE}, below {folder}")
    for round_ in range(called.rounds + 1):
        machine.look()
        for at in range(len(WAYS)):
            number = (at + round_) % len(WAYS)  # each way begins a round once
            seen = ranks.once(number)
            if round_:
                rounds[WAYS[number].name].append(seen)
            tell(
                f"{'' if round_ else 'warming up, '}{WAYS[number].name}: "
                f"stall {seen.stall:.3f} s, delay {seen.delay:.3f} s, "
                f"durable {seen.durable:.3f} s, "
                f"load {figures.shown(seen.load)} s"
            )
    ranks.end()
    shutil.rmtree(folder, ignore_errors=True)
    ways = {name: _sum_up(seen) for name, seen in rounds.items()}
    report = {
        "bench": "checkpoint",
        "quick": called.quick,
        "machine": machine.view(),
        "work": {"model": args, "shape": str(SHAPE), "state_bytes": ranks.state_bytes},
        "ways": ways,
        "ratios": _ratios(ways),
    }
    _tell_all(report)
    figures.end(report)


def _sum_up(rounds: list[Round]) -> dict[str, Any]:
    """Medians, and each round as it was."""
    return {
        "median_stall_s": median(r.stall for r in rounds),
        "median_delay_s": median(r.delay for r in rounds),
        "median_durable_s": median(r.durable for r in rounds),
        "median_load_s": median(r.load for r in rounds),
        "median_load_cpu_s": median(r.load_cpu for r in rounds),
        "bytes": int(statistics.median(r.num_bytes for r in rounds)),
        "rounds": [
            {
                "stall_s": round(r.stall, 4),
                "delay_s": round(r.delay, 4),
                "durable_s": round(r.durable, 4),
                "load_s": None if r.load is None else round(r.load, 4),
            }
            for r in rounds
        ],
    }


def _ratios(ways: dict[str, dict[str, Any]]) -> dict[str, float | None]:
    """Ours to the best rival's, by medians."""

    def best(figure: str) -> float:
        return min(float(ways[n][figure]) for n in RIVALS if ways[n][figure] is not None)

    periodic, waited, saved = ways[OurPeriodic.name], ways[OurSave.name], ways[Dcp.name]
    return {
        "stall_to_best_rival": ratio(periodic["median_stall_s"], best("median_stall_s")),
        "delay_to_best_rival": ratio(periodic["median_delay_s"], best("median_delay_s")),
        "durable_to_best_rival": ratio(waited["median_durable_s"], best("median_durable_s")),
        "load_to_dcp": ratio(waited["median_load_s"], saved["median_load_s"]),
        "load_cpu_to_dcp": ratio(waited["median_load_cpu_s"], saved["median_load_cpu_s"]),
        "load_to_best_rival": ratio(waited["median_load_s"], best("median_load_s")),
    }


def _tell_all(report: dict[str, Any]) -> None:
    tell()
    figures.table(
        ["medians", "stall s", "delay s", "durable s", "load s", "load cpu s", "GB"],
        [
            [
                name,
                way["median_stall_s"],
                way["median_delay_s"],
                way["median_durable_s"],
                way["median_load_s"],
                way["median_load_cpu_s"],
                way["bytes"] / 1e9,
            ]
            for name, way in report["ways"].items()
        ],
    )
    for name, value in report["ratios"].items():
        tell(f"{name.replace('_', ' ')}: {figures.shown(value)}")
    tell(f"load: {report['machine']['load1']} on {report['machine']['cores']} cores")


if __name__ == "__main__":
    main()
