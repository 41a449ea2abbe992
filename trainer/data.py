"""Which samples belong to a step, and fetching them: the same for any shape.

The order is a stateless permutation (:mod:`trainer.contract.samples`), so any rank can fetch any
micro-batch of any step. Around every ``dataset[i]`` the generators are seeded by (seed, position):
random augmentation gives the first stage (inputs) and the last (labels) the same sample, and a
replay the same again. They are the process's own generators, so samples are fetched on the main
thread, not ahead on another.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from trainer import generators
from trainer.contract.checkpoints import DataPosition
from trainer.contract.samples import positions_of, sample_at
from trainer.contract.spec import Training
from trainer.contract.topology import MicroBatch
from trainer.device import CPU, Device
from trainer.program import Dataset, ProgramError


@dataclass(frozen=True)
class Batch:
    """One micro-batch: tensors stacked along a first dimension of samples, on the device, and the
    samples' ids.
    """

    tensors: dict[str, Tensor]
    ids: tuple[int, ...]


class Batches:
    """The dataset in the order of the job's seed."""

    def __init__(self, dataset: Dataset, training: Training, device: Device = CPU) -> None:
        self._dataset = dataset
        self._device = device
        self._samples = len(dataset)
        self._training = training

    @property
    def position(self) -> DataPosition:
        """What fixes the order; it goes into every checkpoint."""
        return DataPosition(
            batch_size=self._training.batch_size,
            seed=self._training.seed,
            samples=self._samples,
            fingerprint=str(getattr(self._dataset, "fingerprint", "")),
        )

    def fetch(self, step: int, micro_batch: MicroBatch) -> Batch:
        """The samples of ``micro_batch`` of ``step`` (from 1). Raises ProgramError."""
        seed = self._training.seed
        of_step = positions_of(step, self._training.batch_size)
        positions = of_step[micro_batch.start : micro_batch.start + micro_batch.size]
        ids = tuple(sample_at(position, self._samples, seed) for position in positions)
        return _batch("dataset", self._dataset, ids, seed, positions, self._device)


class HeldOut:
    """The evaluation's samples, in their own order."""

    def __init__(self, dataset: Dataset, seed: int, device: Device = CPU) -> None:
        self._dataset = dataset
        self._device = device
        self._seed = seed

    def __len__(self) -> int:
        return len(self._dataset)

    def fetch(self, micro_batch: MicroBatch) -> Batch:
        """The samples of ``micro_batch``. Raises ProgramError."""
        ids = range(micro_batch.start, micro_batch.start + micro_batch.size)
        return _batch("eval_dataset", self._dataset, ids, self._seed, ids, self._device)


def _batch(
    name: str,
    dataset: Dataset,
    ids: Sequence[int],
    seed: int,
    positions: Sequence[int],
    device: Device,
) -> Batch:
    """These samples, each drawn with the generators seeded by ``seed`` and its position."""
    with generators.restored():
        samples = []
        for index, position in zip(ids, positions, strict=True):
            generators.seed_all(seed, position)
            sample = dataset[index]
            where = f"{name}[{index}]"
            samples.append({str(k): _tensor(v, f"{where}[{k!r}]") for k, v in sample.items()})
    stacked = _stack(samples, [f"{name}[{index}]" for index in ids])
    return Batch({key: device.feed(tensor) for key, tensor in stacked.items()}, tuple(ids))


def same_data(saved: DataPosition, current: DataPosition) -> None:
    """Raise ProgramError when a checkpoint cannot go on with the data of this run."""
    for name, what in (
        ("samples", "a dataset of {} samples"),
        ("batch_size", "batch_size {}"),
        ("seed", "seed {}"),
        ("fingerprint", "a dataset with the fingerprint {!r}"),
    ):
        then, now = getattr(saved, name), getattr(current, name)
        if then != now:
            raise ProgramError(
                f"the checkpoint was made with {what.format(then)}, this run has "
                f"{what.format(now)}: the samples would not be the same"
            )


def _tensor(value: Any, where: str) -> Tensor:
    if isinstance(value, Tensor):
        return value.detach()
    try:
        return torch.as_tensor(value)
    except (TypeError, ValueError, RuntimeError):
        raise ProgramError(f"{where} is a {type(value).__name__}, not a tensor") from None


def _stack(samples: Sequence[dict[str, Tensor]], names: Sequence[str]) -> dict[str, Tensor]:
    """Stack like tensors; name the sample that is unlike the first."""
    first = samples[0]
    for sample, name in zip(samples, names, strict=True):
        if sample.keys() != first.keys():
            raise ProgramError(
                f"{name} has the keys {sorted(sample)}, {names[0]} has {sorted(first)}"
            )
        for key, tensor in sample.items():
            if (tensor.shape, tensor.dtype) != (first[key].shape, first[key].dtype):
                raise ProgramError(
                    f"{name}[{key!r}] is {tensor.dtype} {tuple(tensor.shape)}, "
                    f"{names[0]}[{key!r}] is "
                    f"{first[key].dtype} {tuple(first[key].shape)}: samples must be alike"
                )
    return {key: torch.stack([sample[key] for sample in samples]) for key in first}
