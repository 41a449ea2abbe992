"""The ways to save and load a stage that the checkpoint bench compares, on one rank of a 2x2.

Skeleton   what a rank knows of its stage before it has any value
Training   the stage with its values, and a step that changes them
Way        one way to save what a Training holds, and to load it in a fresh process
"""

import os
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.checkpoint.staging import DefaultStager, StagingOptions
from torch.distributed.checkpoint.state_dict_loader import load as dcp_load
from torch.distributed.checkpoint.state_dict_saver import async_save as dcp_async_save
from torch.distributed.checkpoint.state_dict_saver import save as dcp_save

from trainer.checkpoint import read_layers, write_part
from trainer.contract.checkpoints import DataPosition, PartHeader
from trainer.contract.spec import Program, Shape
from trainer.contract.topology import Seat
from trainer.layerfile import LayerState
from trainer.program import load
from trainer.snapshot import Snapshot
from trainer.stages import Model, layer_of

SHAPE = Shape(depth=2, replicas=2, micro_batch=1)
DATA = DataPosition(batch_size=1, seed=0, samples=1)
MATMULS = 4
"""Of 1024 x 1024 a step and rank: half a second on two cores, far less than such a model takes."""

Flat = dict[str, Any]


class Skeleton:
    """What a rank knows of its stage before it has any value."""

    def __init__(self, args: dict[str, Any], rank: int) -> None:
        self.model = Model.draw(load(Program(source="builtin:gpt", args=args)))
        seat, count = Seat.of(rank, SHAPE), len(self.model.layers)
        cut = count // SHAPE.depth
        self.rank = rank
        self.layer_count = count
        self.mine = range(0, cut) if seat.stage == 0 else range(cut, count)
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

    def owned(self, index: int) -> dict[str, Tensor]:
        """Layer ``index``'s own parameters, on meta; a tied weight is there with its owner."""
        prefix = f"layers.{index}"
        named = self.model.layers[index].named_parameters(prefix, remove_duplicate=False)
        owner_of = self.model.owner_of
        return {name: p for name, p in named if layer_of(owner_of[name]) == index}

    def empty(self) -> Flat:
        """Memory for all of the stage, as DCP loads into it."""
        flat: Flat = {}
        for index in self.mine:
            for name, like in self.owned(index).items():
                flat[f"model.{name}"] = torch.empty(like.shape)
                flat[f"optimizer.{name}.step"] = torch.empty(())
                flat[f"optimizer.{name}.exp_avg"] = torch.empty(like.shape)
                flat[f"optimizer.{name}.exp_avg_sq"] = torch.empty(like.shape)
        return flat


class Training:
    """One rank's stage with the values that all replicas agree on, and what a step does to it."""

    def __init__(self, skeleton: Skeleton) -> None:
        self.skeleton = skeleton
        self._weights = {i: _weights(skeleton, i) for i in skeleton.mine}
        every = [p for named in self._weights.values() for p in named.values()]
        self._optimizer = torch.optim.AdamW(every, lr=1e-4)
        for parameter in every:
            parameter.grad = torch.full_like(parameter, 1e-3)
        self._optimizer.step()
        self._left, self._right = torch.rand(1024, 1024), torch.rand(1024, 1024)

    def states(self, layers: Iterable[int]) -> dict[int, LayerState]:
        """The live tensors of ``layers``."""
        return {
            i: LayerState(
                parameters={n: p.detach() for n, p in self._weights[i].items()},
                optimizer={n: dict(self._optimizer.state[p]) for n, p in self._weights[i].items()},
            )
            for i in layers
        }

    def flat(self) -> Flat:
        """The stage as a state dict that the rivals take."""
        states = self.states(self.skeleton.mine)
        return {name: tensor for state in states.values() for name, tensor in _tensors(state)}

    def share_bytes(self) -> int:
        """Of what this rank writes where replicas share the work."""
        states = self.states(self.skeleton.share)
        return sum(tensor.nbytes for state in states.values() for _, tensor in _tensors(state))

    def step(self, before_apply: Callable[[], None] = lambda: None) -> float:
        """Compute, vote, apply; the seconds."""
        began = time.monotonic()
        for _ in range(MATMULS):
            torch.mm(self._left, self._right)
        dist.barrier()
        before_apply()
        self._optimizer.step()
        return time.monotonic() - began


def _weights(skeleton: Skeleton, index: int) -> dict[str, nn.Parameter]:
    torch.manual_seed(index)
    return {n: nn.Parameter(torch.randn(p.shape)) for n, p in skeleton.owned(index).items()}


def _tensors(state: LayerState) -> Iterable[tuple[str, Tensor]]:
    for name, parameter in state.parameters.items():
        yield f"model.{name}", parameter
        for key, value in state.optimizer.get(name, {}).items():
            if isinstance(value, Tensor):
                yield f"optimizer.{name}.{key}", value


class Way(ABC):
    """One way to save and load, on one rank."""

    name: str
    loads: bool = True
    """False: it writes what another way writes, so its load would be that one's."""

    def __init__(self, training: Training) -> None:
        self._training = training
        self.durable_at = 0.0

    @abstractmethod
    def save(self, folder: Path, step: int) -> None:
        """Write this rank's part below ``folder``, or begin to."""

    def settle(self) -> None:
        """To be called before the state changes."""
        return

    def finish(self) -> None:
        """Wait until it is durable; ``durable_at`` says when it was."""
        self.durable_at = self.durable_at or time.monotonic()

    @staticmethod
    def load(skeleton: Skeleton, folder: Path, step: int) -> Flat:
        """Read this rank's stage, in a fresh process."""
        raise NotImplementedError(skeleton, folder, step)


class OurSave(Way):
    """`write_part` of this rank's share, as at the last step, in a drain and in a salvage."""

    name = "varuna, waited for"

    def save(self, folder: Path, step: int) -> None:
        """Part and layer files are fsynced when it returns."""
        skeleton = self._training.skeleton
        header = skeleton.header(step)
        write_part(folder, header.folder, header, self._training.states(skeleton.share))
        self.durable_at = time.monotonic()

    @staticmethod
    def load(skeleton: Skeleton, folder: Path, step: int) -> Flat:
        """With hashes checked, into memory of its own, as a trainer does."""
        read = read_layers(folder / skeleton.header(step).folder, skeleton.mine)
        return {n: t for state in read.values() for n, t in _tensors(state)}


class OurPeriodic(Way):
    """A thread copies and writes; the next apply waits for the copy (:mod:`trainer.saves`)."""

    name = "varuna, periodic"
    loads = False

    def __init__(self, training: Training) -> None:
        super().__init__(training)
        self._snapshot = Snapshot()
        self._writer = ThreadPoolExecutor(1)
        self._writing: Future[None] | None = None

    def save(self, folder: Path, step: int) -> None:
        """Nothing is copied yet when it returns."""
        skeleton = self._training.skeleton
        states = self._training.states(skeleton.share)
        self._snapshot.announce()
        self._writing = self._writer.submit(self._write, folder, skeleton.header(step), states)

    def _write(self, folder: Path, header: PartHeader, states: dict[int, LayerState]) -> None:
        write_part(folder, header.folder, header, self._snapshot.take(states))
        self.durable_at = time.monotonic()

    def settle(self) -> None:
        """Until all is copied."""
        self._snapshot.wait()

    def finish(self) -> None:
        """Until all is written."""
        assert self._writing
        self._writing.result()


class TorchSave(Way):
    """torch.save of this rank's whole stage, as a script does; its fsync is done beside."""

    name = "torch.save per rank"

    def save(self, folder: Path, step: int) -> None:
        """One file per rank."""
        self._file = (folder / f"rank-{self._training.skeleton.rank}.pt").open("wb")
        torch.save(self._training.flat(), self._file)
        self._syncing = ThreadPoolExecutor(1).submit(self._sync)

    def _sync(self) -> None:
        with self._file:
            self._file.flush()
            os.fsync(self._file.fileno())
        self.durable_at = time.monotonic()

    def finish(self) -> None:
        """Until it is fsynced."""
        self._syncing.result()

    @staticmethod
    def load(skeleton: Skeleton, folder: Path, step: int) -> Flat:
        """Its own file, without unpickling code."""
        flat: Flat = torch.load(folder / f"rank-{skeleton.rank}.pt", weights_only=True)
        return flat


class Dcp(Way):
    """torch.distributed.checkpoint, waited for."""

    name = "dcp.save"

    def save(self, folder: Path, step: int) -> None:
        """It writes what replicas share once, and fsyncs."""
        dcp_save(self._training.flat(), checkpoint_id=folder)
        self.durable_at = time.monotonic()

    @staticmethod
    def load(skeleton: Skeleton, folder: Path, step: int) -> Flat:
        """Into tensors that are made for it."""
        flat = skeleton.empty()
        dcp_load(flat, checkpoint_id=folder)
        return flat


class DcpAsync(Way):
    """async_save as it comes, with a process group of its own: the training uses the other."""

    name = "dcp.async_save"
    loads = False

    def __init__(self, training: Training) -> None:
        super().__init__(training)
        self._group = dist.new_group(backend="gloo")

    def stager(self) -> DefaultStager | None:
        """None: the default one."""
        return None

    def save(self, folder: Path, step: int) -> None:
        """All is copied when it returns."""
        writing = dcp_async_save(
            self._training.flat(),
            checkpoint_id=folder,
            process_group=self._group,
            async_stager=self.stager(),
        )
        assert isinstance(writing, Future)
        self._writing: Future[Any] = writing
        writing.add_done_callback(self._note)

    def _note(self, _: object) -> None:
        self.durable_at = time.monotonic()

    def finish(self) -> None:
        """Until all is written."""
        self._writing.result()


class DcpAsyncCached(DcpAsync):
    """async_save with one stager, which keeps its buffers from save to save."""

    name = "dcp.async_save, cached"

    def __init__(self, training: Training) -> None:
        super().__init__(training)
        self._stager = DefaultStager(StagingOptions(False, False, False, False))

    def stager(self) -> DefaultStager:
        """The one of all saves."""
        return self._stager


WAYS: tuple[type[Way], ...] = (OurSave, OurPeriodic, TorchSave, Dcp, DcpAsync, DcpAsyncCached)
RIVALS = tuple(way.name for way in WAYS[2:])
