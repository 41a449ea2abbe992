"""What the layers cost, measured roughly: one process, this machine, the job's micro-batch.

The whole model runs once to warm up, which also shows whether it can be trained at all; then every
layer is timed by itself, forward and backward, and the faster of two passes counts.
"""

import time
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor

from trainer.contract.costs import LayerCost, LayerCosts
from trainer.contract.topology import MicroBatch
from trainer.data import Batch
from trainer.program import LoadedProgram
from trainer.stages import Stage

PASSES = 2


def measure(
    program: LoadedProgram, stage: Stage, batch: Batch, ties: Iterable[tuple[int, ...]]
) -> LayerCosts:
    """Time all layers on ``batch``; ``ties``: per tied weight the layers that hold it.

    Raises ProgramError when the model cannot run forward and backward.
    """
    began = time.monotonic()
    _run_whole(program, stage, batch)
    passes = [_time_layers(program, stage, batch) for _ in range(PASSES)]
    return LayerCosts(
        micro_batch=len(batch.ids),
        layers=tuple(_faster(tries) for tries in zip(*passes, strict=True)),
        tied=tuple(dict.fromkeys(ties)),
        measured_seconds=time.monotonic() - began,
    )


def _run_whole(program: LoadedProgram, stage: Stage, batch: Batch) -> None:
    output = stage.forward(program.inputs(batch.tensors), 1, MicroBatch(0, 0, len(batch.ids)))
    loss = stage.loss(output, batch, 1, MicroBatch(0, 0, len(batch.ids)))
    with program.blaming("the backward pass"):
        torch.autograd.backward(loss.sum)
    stage.clear_gradients()


def _time_layers(program: LoadedProgram, stage: Stage, batch: Batch) -> list[LayerCost]:
    """One pass; each layer gets a fresh copy of what the one before gave."""
    value: Any = program.inputs(batch.tensors)
    costs = []
    for index, layer in stage.layers.items():
        is_last = index == stage.layer_count - 1
        with program.blaming(f"layer {index}"), stage.precision():
            began = time.perf_counter()
            output = layer(value)
            ends = [_loss(stage, output, batch)] if is_last else _with_graph(output)
            between = time.perf_counter()
            if ends:
                torch.autograd.backward(ends, [torch.ones_like(end) for end in ends])
            ended = time.perf_counter()
        costs.append(
            LayerCost(
                name=type(layer).__name__,
                forward_seconds=between - began,
                backward_seconds=ended - between,
                parameter_bytes=sum(parameter.nbytes for parameter in layer.parameters()),
                output_bytes=sum(tensor.nbytes for tensor in _tensors(output)),
            )
        )
        value = _cut_off(output)
    stage.clear_gradients()
    return costs


def _loss(stage: Stage, output: Any, batch: Batch) -> Tensor:
    return stage.loss(output, batch, 1, MicroBatch(0, 0, len(batch.ids))).sum


def _faster(tries: tuple[LayerCost, ...]) -> LayerCost:
    return tries[0].model_copy(
        update={
            "forward_seconds": min(cost.forward_seconds for cost in tries),
            "backward_seconds": min(cost.backward_seconds for cost in tries),
        }
    )


def _tensors(value: Any) -> list[Tensor]:
    return [value] if isinstance(value, Tensor) else list(value)


def _with_graph(value: Any) -> list[Tensor]:
    return [tensor for tensor in _tensors(value) if tensor.requires_grad]


def _cut_off(value: Any) -> Any:
    """The same values as a stage boundary hands on: leaves that want a gradient."""
    cut = [t.detach().requires_grad_(t.is_floating_point()) for t in _tensors(value)]
    return cut[0] if isinstance(value, Tensor) else tuple(cut)
