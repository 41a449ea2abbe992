"""Saving and loading a model with its Adam moments: Varuna beside torch.save and torch's DCP.

    python -m tests.bench.checkpoint [--quick] [--rounds N] [--json]

Four forked processes hold a 2x2: two stages, two replicas of each, float32, about 100M parameters
(1.2 GB with the moments; --quick: 10M). Per way and round: a barrier, then all save at once, then
a barrier, then all load their stage. A first round warms every way up and does not count. The rest
of the disk's work is waited for between two ways, and each way begins the round once.

    stall    how long the training thread is held up, on the slowest rank
    durable  until the last rank's bytes are fsynced
    load     until every rank has its stage's tensors, from the page cache (just written)
    cpu      what all ranks together spent on the save, on the load: steadier on a busy machine
"""

import multiprocessing
import os
import shutil
import statistics
import tempfile
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.checkpoint.staging import DefaultStager, StagingOptions
from torch.distributed.checkpoint.state_dict_loader import load as dcp_load
from torch.distributed.checkpoint.state_dict_saver import async_save as dcp_async_save
from torch.distributed.checkpoint.state_dict_saver import save as dcp_save

from tests.bench import figures
from tests.bench.figures import median, ratio, tell
from trainer.checkpoint import read_layers, write_part
from trainer.contract.checkpoints import DataPosition, PartHeader
from trainer.contract.spec import Program, Shape
from trainer.contract.topology import Seat
from trainer.layerfile import LayerState
from trainer.program import load
from trainer.snapshot import Snapshot
from trainer.stages import Model, layer_of

FULL = {"layers": 12, "width": 768, "heads": 12, "context": 512, "vocab": 16384}
QUICK = {"layers": 6, "width": 352, "heads": 4, "context": 256, "vocab": 4096}
SHAPE = Shape(depth=2, replicas=2, micro_batch=1)
DATA = DataPosition(batch_size=1, seed=0, samples=1)

Flat = dict[str, Any]


@dataclass(frozen=True)
class Saved:
    """What one rank saw of one save."""

    stall: float
    durable: float


@dataclass(frozen=True)
class Seen:
    """What one rank saw of one save and load."""

    saved: Saved
    save_cpu: float
    load: float | None = None
    load_cpu: float | None = None
    is_same: bool = True


class Holding:
    """One rank's stage: each layer's state, with the values that all replicas agree on."""

    def __init__(self, args: dict[str, Any], rank: int) -> None:
        model = Model.draw(load(Program(source="builtin:gpt", args=args)))
        seat, count = Seat.of(rank, SHAPE), len(model.layers)
        cut = count // SHAPE.depth
        self.rank = rank
        self.layer_count = count
        self.mine = range(0, cut) if seat.stage == 0 else range(cut, count)
        self.states = {index: _filled(model, index) for index in self.mine}
        self.share = [i for i in self.mine if i % SHAPE.replicas == seat.replica]

    def header(self, step: int) -> PartHeader:
        """Of this rank's part."""
        return PartHeader(
            step=step,
            generation=1,
            rank=self.rank,
            shape=SHAPE,
            layer_count=self.layer_count,
            data=DATA,
        )

    def flat(self, copy: bool = False) -> Flat:
        """The stage as a state dict that the rivals take; ``copy``: another one to load into."""
        return {
            name: tensor.clone().zero_() if copy else tensor
            for state in self.states.values()
            for name, tensor in _tensors(state)
        }


def _filled(model: Model, index: int) -> LayerState:
    """Layer ``index`` with random weights and moments; a tied weight is there with its owner."""
    torch.manual_seed(index)
    prefix = f"layers.{index}"
    named = model.layers[index].named_parameters(prefix, remove_duplicate=False)
    owned = {n: torch.randn(p.shape) for n, p in named if layer_of(model.owner_of[n]) == index}
    return LayerState(
        parameters=owned,
        optimizer={
            name: {
                "step": torch.tensor(1.0),
                "exp_avg": torch.randn(p.shape),
                "exp_avg_sq": torch.rand(p.shape),
            }
            for name, p in owned.items()
        },
    )


def _tensors(state: LayerState) -> Iterable[tuple[str, Tensor]]:
    for name, parameter in state.parameters.items():
        yield f"model.{name}", parameter
        for key, value in state.optimizer.get(name, {}).items():
            if isinstance(value, Tensor):
                yield f"optimizer.{name}.{key}", value


# --- the ways


class Way(ABC):
    """One way to save and load, on one rank."""

    name: str
    loads: bool = True
    """False: it writes what another way writes, so its load would be that one's."""

    def __init__(self, holding: Holding) -> None:
        self._holding = holding

    @abstractmethod
    def save(self, folder: Path, step: int) -> Saved:
        """Write this rank's part below ``folder``."""

    def load(self, folder: Path, step: int) -> Callable[[], bool]:
        """Read this rank's stage; returns what checks it against what was saved."""
        raise NotImplementedError(folder, step)


class OurSave(Way):
    """`write_part` of this rank's share, as at the last step, in a drain and in a salvage."""

    name = "varuna, waited for"

    def save(self, folder: Path, step: int) -> Saved:
        """Part and layer files are fsynced when it returns."""
        began = time.monotonic()
        share = {index: self._holding.states[index] for index in self._holding.share}
        header = self._holding.header(step)
        write_part(folder, header.folder, header, share)
        seconds = time.monotonic() - began
        return Saved(seconds, seconds)

    def load(self, folder: Path, step: int) -> Callable[[], bool]:
        """With hashes checked, into memory of its own, as a trainer does."""
        read = read_layers(folder / self._holding.header(step).folder, self._holding.mine)
        loaded = {n: t for state in read.values() for n, t in _tensors(state)}
        return lambda: _same(loaded, self._holding.flat())


class OurPeriodic(Way):
    """A snapshot into buffers touched beforehand, and a thread that writes it."""

    name = "varuna, periodic"
    loads = False

    def __init__(self, holding: Holding) -> None:
        super().__init__(holding)
        self._snapshot = Snapshot()
        self._share = {index: holding.states[index] for index in holding.share}
        self._snapshot.touch(self._share)
        self._writer = ThreadPoolExecutor(1)

    def save(self, folder: Path, step: int) -> Saved:
        """The copy is the stall."""
        began = time.monotonic()
        states = self._snapshot.take(self._share)
        header = self._holding.header(step)
        writing = self._writer.submit(write_part, folder, header.folder, header, states)
        stall = time.monotonic() - began
        writing.result()
        return Saved(stall, time.monotonic() - began)


class TorchSave(Way):
    """torch.save of this rank's whole stage, as a script does; its fsync is not in the stall."""

    name = "torch.save per rank"

    def save(self, folder: Path, step: int) -> Saved:
        """One file per rank."""
        began = time.monotonic()
        with (folder / f"rank-{self._holding.rank}.pt").open("wb") as file:
            torch.save(self._holding.flat(), file)
            file.flush()
            stall = time.monotonic() - began
            os.fsync(file.fileno())
        return Saved(stall, time.monotonic() - began)

    def load(self, folder: Path, step: int) -> Callable[[], bool]:
        """Its own file, without unpickling code."""
        path = folder / f"rank-{self._holding.rank}.pt"
        loaded = torch.load(path, weights_only=True)
        return lambda: _same(loaded, self._holding.flat())


class Dcp(Way):
    """torch.distributed.checkpoint, waited for."""

    name = "dcp.save"

    def __init__(self, holding: Holding) -> None:
        super().__init__(holding)
        self._into = holding.flat(copy=True)

    def save(self, folder: Path, step: int) -> Saved:
        """It writes what replicas share once, and fsyncs."""
        began = time.monotonic()
        dcp_save(self._holding.flat(), checkpoint_id=folder)
        seconds = time.monotonic() - began
        return Saved(seconds, seconds)

    def load(self, folder: Path, step: int) -> Callable[[], bool]:
        """Into tensors that are there."""
        dcp_load(self._into, checkpoint_id=folder)
        return lambda: _same(self._into, self._holding.flat())


class DcpAsync(Way):
    """async_save as it comes."""

    name = "dcp.async_save"
    loads = False

    def stager(self) -> DefaultStager | None:
        """None: the default one."""
        return None

    def save(self, folder: Path, step: int) -> Saved:
        """The call is the stall."""
        began = time.monotonic()
        writing = dcp_async_save(
            self._holding.flat(), checkpoint_id=folder, async_stager=self.stager()
        )
        stall = time.monotonic() - began
        writing.result()  # type: ignore[union-attr]
        return Saved(stall, time.monotonic() - began)


class DcpAsyncCached(DcpAsync):
    """async_save with one stager, which keeps its buffers from save to save."""

    name = "dcp.async_save, cached"

    def __init__(self, holding: Holding) -> None:
        super().__init__(holding)
        self._stager = DefaultStager(StagingOptions(False, False, False, False))

    def stager(self) -> DefaultStager:
        """The one of all saves."""
        return self._stager


WAYS: tuple[type[Way], ...] = (OurSave, OurPeriodic, TorchSave, Dcp, DcpAsync, DcpAsyncCached)
RIVALS = tuple(way.name for way in WAYS[2:])


def _same(loaded: Flat, saved: Flat) -> bool:
    """Bit for bit."""
    return loaded.keys() == saved.keys() and all(torch.equal(loaded[n], saved[n]) for n in saved)


# --- one rank


def _rank(rank: int, args: dict[str, Any], meeting: str, orders: Connection) -> None:
    """Carry out (way, folder, step) until told None; answer with what this rank saw."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=meeting, rank=rank, world_size=SHAPE.world)
    holding = Holding(args, rank)
    ways = [way(holding) for way in WAYS]
    orders.send(sum(t.nbytes for i in holding.share for _, t in _tensors(holding.states[i])))
    while (order := orders.recv()) is not None:
        number, folder, step = order
        way = ways[number]
        dist.barrier()
        used = time.process_time()
        saved = way.save(folder, step)
        save_cpu = time.process_time() - used
        dist.barrier()
        if not way.loads:
            orders.send(Seen(saved, save_cpu))
            continue
        used, began = time.process_time(), time.monotonic()
        check = way.load(folder, step)
        seconds, load_cpu = time.monotonic() - began, time.process_time() - used
        orders.send(Seen(saved, save_cpu, seconds, load_cpu, check()))
    dist.destroy_process_group()


# --- all ranks


@dataclass(frozen=True)
class Round:
    """One save and load by all ranks: the slowest one's figures."""

    stall: float
    durable: float
    load: float | None
    save_cpu: float
    load_cpu: float | None
    num_bytes: int


class Ranks:
    """The four processes. They are forked before anything is computed here."""

    def __init__(self, args: dict[str, Any], folder: Path) -> None:
        self._folder = folder
        self._step = 0
        self._ends: list[Connection] = []
        self._processes = []
        context = multiprocessing.get_context("fork")
        for rank in range(SHAPE.world):
            ours, theirs = context.Pipe()
            process = context.Process(
                target=_rank,
                args=(rank, args, f"file://{folder}/meeting", theirs),
                daemon=True,
            )
            process.start()
            theirs.close()
            self._ends.append(ours)
            self._processes.append(process)
        self.state_bytes = sum(end.recv() for end in self._ends)

    def once(self, number: int) -> Round:
        """Way ``number`` on all ranks; its files are gone afterwards."""
        self._step += 1
        folder = self._folder / f"save-{self._step}"
        folder.mkdir()
        os.sync()
        for end in self._ends:
            end.send((number, folder, self._step))
        told: list[Seen] = [end.recv() for end in self._ends]
        if not all(seen.is_same for seen in told):
            raise AssertionError(f"{WAYS[number].name} does not load what it has saved")
        size = sum(file.stat().st_size for file in folder.rglob("*") if file.is_file())
        shutil.rmtree(folder)
        return Round(
            stall=max(seen.saved.stall for seen in told),
            durable=max(seen.saved.durable for seen in told),
            load=max((s.load for s in told if s.load is not None), default=None),
            save_cpu=sum(seen.save_cpu for seen in told),
            load_cpu=sum(s.load_cpu or 0.0 for s in told) if WAYS[number].loads else None,
            num_bytes=size,
        )

    def end(self) -> None:
        """Let them go."""
        for end in self._ends:
            end.send(None)
        for process in self._processes:
            process.join()


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
            if round_ == 0:
                continue
            rounds[WAYS[number].name].append(seen)
            tell(
                f"{WAYS[number].name}: stall {seen.stall:.3f} s, durable {seen.durable:.3f} s, "
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
        "median_durable_s": median(r.durable for r in rounds),
        "median_load_s": median(r.load for r in rounds),
        "median_save_cpu_s": median(r.save_cpu for r in rounds),
        "median_load_cpu_s": median(r.load_cpu for r in rounds),
        "bytes": int(statistics.median(r.num_bytes for r in rounds)),
        "rounds": [
            {
                "stall_s": round(r.stall, 4),
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
        "durable_to_best_rival": ratio(waited["median_durable_s"], best("median_durable_s")),
        "load_to_dcp": ratio(waited["median_load_s"], saved["median_load_s"]),
        "load_cpu_to_dcp": ratio(waited["median_load_cpu_s"], saved["median_load_cpu_s"]),
        "load_to_best_rival": ratio(waited["median_load_s"], best("median_load_s")),
    }


def _tell_all(report: dict[str, Any]) -> None:
    tell()
    figures.table(
        ["medians", "stall s", "durable s", "load s", "save cpu s", "load cpu s", "GB"],
        [
            [
                name,
                way["median_stall_s"],
                way["median_durable_s"],
                way["median_load_s"],
                way["median_save_cpu_s"],
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
