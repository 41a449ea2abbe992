"""What a program costs here: its layers at a few micro-batch sizes, its optimizer.

The whole model runs once to warm up, which also shows whether it can be trained at all; then every
layer is timed by itself, forward and backward, over and over while time is left, and the median
counts. The clock stands still while this thread waits for a core that somebody else has: a busy
neighbour would else be taken for a slow layer. How single passes scatter around their mean is the
jitter. What lies between devices, :mod:`trainer.probe` measures.

The model's weights stay on the host. A GPU, which may be too small for all of them, gets one layer
at a time, and is waited for whenever the clock is read.
"""

import os
import platform
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from statistics import fmean, median
from typing import Any, Self

import psutil
import torch
from torch import Tensor, nn

from trainer.contract.costs import AtSize, LayerCost, LayerCosts, Scatter
from trainer.contract.topology import MicroBatch
from trainer.data import Batch
from trainer.device import Device
from trainer.links import tensors_in
from trainer.program import LoadedProgram
from trainer.stages import Stage

FEWEST_PASSES, MOST_PASSES = 3, 15
SECONDS = 0.4
"""For one micro-batch size, once the fewest passes are done."""
MOST_SIZES = 4
MOST_SECONDS = 20.0
"""After which no further size is begun."""
_QUANTILES = 16
_OPTIMIZER_BYTES = 16 << 20
"""So many bytes of weights are stepped to see how fast that is."""


def measure(
    program: LoadedProgram,
    stage: Stage,
    fetch: Callable[[int], Batch],
    size: int,
    ties: Iterable[tuple[int, ...]],
    *,
    glance: bool = False,
) -> LayerCosts:
    """Time all layers of ``stage``, which holds the model, on micro-batches of ``size`` samples and
    fewer; ``fetch`` gets one of so many, ``ties``: per tied weight the layers that hold it.
    ``glance``: once and roughly.

    Raises ProgramError when the model cannot run forward and backward.
    """
    began = time.monotonic()
    if stage.device.kind == "cpu":
        _run_whole(program, stage, fetch(size))
    if glance:
        timed = {size: _time(program, stage, fetch(size), passes=1)}
    else:
        timed = _time_sizes(program, stage, fetch, size)
    fetching = _time_fetching(program, stage, fetch, size)
    rate, copies = _step_a_copy(program, stage)
    at_size = {one: _at_size(layers, one) for one, layers in timed.items()}
    smaller = sorted(one for one in timed if one != size)
    return LayerCosts(
        micro_batch=size,
        layers=tuple(
            LayerCost(
                name=type(layer).__name__,
                forward_seconds=here.forward_seconds,
                backward_seconds=here.backward_seconds,
                parameter_bytes=sum(parameter.nbytes for parameter in layer.parameters()),
                parameter_tensors=len({p.dtype for p in layer.parameters() if p.requires_grad}),
                output_bytes=timed[size][at].output_bytes,
                saved_bytes=here.saved_bytes,
                sizes=tuple(at_size[one][at] for one in smaller),
            )
            for at, (layer, here) in enumerate(
                zip(stage.layers.values(), at_size[size], strict=True)
            )
        ),
        tied=tuple(dict.fromkeys(ties)),
        measured_seconds=time.monotonic() - began,
        fetch_seconds=fetching,
        optimizer_bytes_per_second=rate,
        state_copies=copies,
        jitter=Scatter(compute=_scatter(timed[size])),
        device_kind=stage.device.kind,
        host=host(stage.device),
    )


def host(device: Device) -> str:
    """The machine, for people."""
    gigabytes = psutil.virtual_memory().total / 1e9
    cores = f"{psutil.cpu_count()} cores, {gigabytes:.0f} GB"
    parts = (platform.machine(), cores, device.title, f"torch {torch.__version__}")
    return f"{platform.node()}: {', '.join(filter(None, parts))}"


def _run_whole(program: LoadedProgram, stage: Stage, batch: Batch) -> None:
    place = MicroBatch(0, 0, len(batch.ids))
    output = stage.forward(program.inputs(batch.tensors), 1, place)
    loss = stage.loss(output, batch, 1, place)
    with program.blaming("the backward pass"):
        torch.autograd.backward(loss.sum)
    stage.clear_gradients()


# --- layers -------------------------------------------------------------------------------------


class _OwnClock:
    """Wall seconds less those in which this thread was ready and another had its core.

    The kernel counts them (`run_delay`, second in schedstat); where it does not, wall seconds.
    """

    def __init__(self, device: Device) -> None:
        self._device = device
        try:
            self._file: int | None = os.open("/proc/thread-self/schedstat", os.O_RDONLY)
        except OSError:
            self._file = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        if self._file is not None:
            os.close(self._file)

    def seconds(self) -> float:
        """Since some moment, all that was asked of the device included."""
        self._device.synchronize()
        now = time.perf_counter()
        if self._file is None:
            return now
        return now - int(os.pread(self._file, 64, 0).split()[1]) / 1e9


@dataclass
class _Timed:
    """One layer, pass by pass."""

    forward: list[float] = field(default_factory=list)
    backward: list[float] = field(default_factory=list)
    output_bytes: int = 0
    saved_bytes: int = 0


def _time_sizes(
    program: LoadedProgram, stage: Stage, fetch: Callable[[int], Batch], size: int
) -> dict[int, list[_Timed]]:
    """``size``, and powers of two below it, the largest first."""
    smaller = [1 << power for power in range(size.bit_length()) if 1 << power < size]
    timed: dict[int, list[_Timed]] = {}
    began = time.monotonic()
    for one in [size, *smaller[::-1]][:MOST_SIZES]:
        if not timed or time.monotonic() < began + MOST_SECONDS:
            timed[one] = _time(program, stage, fetch(one))
    return timed


def _time_fetching(
    program: LoadedProgram, stage: Stage, fetch: Callable[[int], Batch], size: int
) -> float:
    """Getting a sample out of the dataset and into a batch, as the first stage does it."""
    seconds = []
    with _OwnClock(stage.device) as clock:
        for _ in range(FEWEST_PASSES):
            began = clock.seconds()
            program.inputs(fetch(size).tensors)
            seconds.append(clock.seconds() - began)
    return max(0.0, median(seconds)) / size


def _time(
    program: LoadedProgram, stage: Stage, batch: Batch, passes: int = MOST_PASSES
) -> list[_Timed]:
    """Pass after pass over all layers; the first warms up and shows what a graph holds."""
    layers = [_Timed() for _ in stage.layers]
    with _OwnClock(stage.device) as clock:
        _pass(program, stage, batch, layers, clock, watched=True)
        for timed in layers:
            timed.forward.clear()
            timed.backward.clear()
        began = time.monotonic()
        for done in range(passes):
            if done >= FEWEST_PASSES and time.monotonic() > began + SECONDS:
                break
            _pass(program, stage, batch, layers, clock)
    stage.clear_gradients()
    return layers


def _pass(
    program: LoadedProgram,
    stage: Stage,
    batch: Batch,
    layers: Sequence[_Timed],
    clock: "_OwnClock",
    watched: bool = False,
) -> None:
    """Each layer gets a fresh copy of what the one before gave, as at a stage's boundary."""
    value: Any = program.inputs(batch.tensors)
    for timed, (index, layer) in zip(layers, stage.layers.items(), strict=True):
        is_last = index == stage.layer_count - 1
        with (
            stage.device.hosting(layer),
            stage.precision(),
            _saving(layer, watched) as saved,
        ):
            began = clock.seconds()
            output = stage.forward_layer(index, value, 1, MicroBatch(0, 0, len(batch.ids)))
            ends = [_loss(stage, output, batch)] if is_last else _with_graph(output)
            between = clock.seconds()
            if ends:
                with program.blaming(f"the backward pass of layer {index}", index):
                    torch.autograd.backward(ends, [torch.ones_like(end) for end in ends])
            ended = clock.seconds()
        timed.forward.append(between - began)
        timed.backward.append(ended - between)
        timed.output_bytes = sum(tensor.nbytes for tensor in tensors_in(output))
        timed.saved_bytes = max(timed.saved_bytes, sum(saved.values()))
        value = _cut_off(output)


@contextmanager
def _saving(layer: nn.Module, watched: bool) -> Iterator[dict[int, int]]:
    """What graphs that grow inside keep: memory by address, the layer's own weights left out."""
    kept: dict[int, int] = {}
    if not watched:
        yield kept
        return
    own = {parameter.untyped_storage().data_ptr() for parameter in layer.parameters()}

    def keep(tensor: Tensor) -> Tensor:
        memory = tensor.untyped_storage()
        if memory.data_ptr() not in own:
            kept[memory.data_ptr()] = memory.nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        yield kept


def _at_size(layers: Sequence[_Timed], size: int) -> list[AtSize]:
    return [
        AtSize(
            micro_batch=size,
            forward_seconds=max(0.0, median(one.forward)),
            backward_seconds=max(0.0, median(one.backward)),
            saved_bytes=one.saved_bytes,
        )
        for one in layers
    ]


def _scatter(layers: Sequence[_Timed]) -> tuple[float, ...]:
    """Equally likely factors on a pass's seconds, of mean 1; the slowest tenth is left out."""
    passes = sorted(sum(times) for times in _by_pass(layers))
    kept = passes[: max(1, len(passes) - len(passes) // 10)]
    if kept[0] <= 0:
        return ()
    levels = [kept[i * len(kept) // _QUANTILES] for i in range(_QUANTILES)]
    mean = fmean(levels)
    return tuple(level / mean for level in levels)


def _by_pass(layers: Sequence[_Timed]) -> Iterator[tuple[float, ...]]:
    return zip(*(times for one in layers for times in (one.forward, one.backward)), strict=True)


def _with_graph(value: Any) -> list[Tensor]:
    return [tensor for tensor in tensors_in(value) if tensor.requires_grad]


def _loss(stage: Stage, output: Any, batch: Batch) -> Tensor:
    return stage.loss(output, batch, 1, MicroBatch(0, 0, len(batch.ids))).sum


def _cut_off(value: Any) -> Any:
    """The same values as a stage boundary hands on: leaves that want a gradient."""
    cut = [t.detach().requires_grad_(t.is_floating_point()) for t in tensors_in(value)]
    return cut[0] if isinstance(value, Tensor) else tuple(cut)


# --- the optimizer ------------------------------------------------------------------------------


def _step_a_copy(program: LoadedProgram, stage: Stage) -> tuple[float | None, float]:
    """Bytes of weights that a step applies a second, and what a rank holds for each byte of them;
    seen on copies of some, since the first weights are to stay.
    """
    copies: list[tuple[str, nn.Parameter]] = []
    taken = 0
    for owner, weight in stage.weights.items():
        if not copies or taken + weight.parameter.nbytes <= _OPTIMIZER_BYTES:
            copy = stage.device.place(weight.parameter.detach().clone())
            copies.append((owner, nn.Parameter(copy)))
            copies[-1][1].grad = torch.zeros_like(copy)
            taken += weight.parameter.nbytes
    optimizer = program.optimizer(copies) if copies else None
    if optimizer is None:
        return None, 1.0
    seconds = []
    with _OwnClock(stage.device) as clock, program.blaming("the optimizer's step"):
        for _ in range(FEWEST_PASSES + 1):
            began = clock.seconds()
            optimizer.step()
            seconds.append(clock.seconds() - began)
    moments = sum(
        value.nbytes
        for state in optimizer.state.values()
        for value in state.values()
        if isinstance(value, Tensor)
    )
    return taken / max(median(seconds), 1e-9), 2 + moments / taken
