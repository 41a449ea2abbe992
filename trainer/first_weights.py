"""The first generation of a job: one process builds the real model from the seed, or with the
weights of ``init_from``, measures it, and writes ``step-000000``. Every later launch, the first
step's too, loads a checkpoint. A few others help it measure what lies between devices, and leave.

A model built on the meta device has neither its constructor's values nor its buffers; so this is
the one place where constructors' values count, and all parameters and buffers are written. Then the
weights are loaded back as a trainer would: what cannot be trained is refused here, at the start.
"""

import random
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import numpy
import torch
from torch import nn
from torch.nn.parameter import is_lazy

from trainer import initial
from trainer.checkpoint import LayerState, read_layers, write_marker, write_part
from trainer.contract.checkpoints import PartHeader
from trainer.contract.costs import MovingCost
from trainer.contract.progress import (
    Finished,
    Inspected,
    Line,
    PartWritten,
    Phase,
    PhaseBegun,
)
from trainer.contract.spec import RunSpec
from trainer.contract.topology import MicroBatch
from trainer.data import Batches
from trainer.device import Device
from trainer.groups import PeerLostError, meet
from trainer.probe import Probed, probe
from trainer.profile import measure
from trainer.program import LoadedProgram, ProgramError, load
from trainer.stages import Model, Stage, owners

Report = Callable[[Line], None]


def run(spec: RunSpec, report: Report) -> None:
    """Build, inspect and save the first weights, or help. Raises ProgramError, SaveError,
    RendezvousError.
    """
    if spec.rank > 0:
        _probe(spec, report)
        report(Finished(step=0))
        report(PhaseBegun(phase=Phase.DONE))
        return
    device = Device.of(spec.device)
    report(PhaseBegun(phase=Phase.PROGRAM))
    program = load(spec.program)
    if spec.training.evaluate_every:
        program.require_eval_dataset()
    batches = Batches(program.dataset, spec.training, device)
    probed = _probe(spec, report)
    states = build(program, spec.training.seed)
    if spec.init_from:
        initial.fill(states, Path(spec.init_from), program.outside)
    model = Model.draw(program)
    whole = range(len(model.layers))
    stage = Stage(program, model, whole, spec.training, states, step=0, device=device)
    if not stage.weights:
        raise ProgramError("there is nothing to train: no layer has a parameter that is not frozen")
    size = min(spec.shape.micro_batch, spec.training.batch_size)
    costs = measure(
        program,
        stage,
        lambda samples: batches.fetch(1, MicroBatch(0, 0, samples)),
        size,
        model.ties().values(),
        glance=spec.glance,
    )
    if probed is not None:
        costs = probed.added_to(costs)

    report(PhaseBegun(phase=Phase.SAVE))
    header = PartHeader(
        step=0,
        generation=spec.generation,
        rank=spec.rank,
        shape=spec.shape,
        layer_count=len(states),
        data=batches.position,
        outside=program.outside,
    )
    write_marker(spec.saving.root, spec.generation, None)
    written = write_part(spec.saving.root, header.folder, header, states)
    moving = _moving(written, Path(spec.saving.root) / header.folder, states, costs.moving)
    costs = costs.model_copy(update={"moving": moving})
    report(Inspected(costs=costs, samples=batches.position.samples))
    report(written)
    report(Finished(step=0))


def _moving(
    written: PartWritten, folder: Path, states: Mapping[int, LayerState], known: MovingCost
) -> MovingCost:
    """How fast checkpoints go out, and come back, as far as these files and the largest tell."""
    sizes = {i: sum(p.nbytes for p in state.parameters.values()) for i, state in states.items()}
    largest = max(sizes, key=lambda layer: sizes[layer])
    began = time.monotonic()
    read_layers(folder, [largest])
    took, size = time.monotonic() - began, sizes[largest]
    return known.model_copy(
        update={
            "write_bytes_per_second": max(1, written.num_bytes) / max(1e-6, written.seconds),
            "load_bytes_per_second": max(1, size) / max(1e-6, took),
        }
    )


def _probe(spec: RunSpec, report: Report) -> Probed | None:
    """What lies between the ranks, if nobody goes away meanwhile."""
    if spec.shape.world == 1 or spec.glance:
        return None
    report(PhaseBegun(phase=Phase.RENDEZVOUS))
    try:
        return probe(spec, meet(spec, ()))
    except PeerLostError:
        return None
    finally:
        if spec.rank == 0:
            report(PhaseBegun(phase=Phase.PROGRAM))  # building a large model takes its time


def build(program: LoadedProgram, seed: int) -> dict[int, LayerState]:
    """The real layers' parameters and buffers as their constructors make them under ``seed``:
    those of a plain script that calls ``torch.manual_seed(seed)`` and then ``layers(args)``.
    """
    random.seed(seed)
    numpy.random.seed(seed & 0xFFFFFFFF)
    torch.manual_seed(seed)
    layers = program.layers()
    _refuse_without_value(layers)
    owner_of = owners(layers)
    states = {}
    for index, layer in enumerate(layers):
        prefix = f"layers.{index}"
        named = dict(layer.named_parameters(prefix, remove_duplicate=False))
        states[index] = LayerState(
            parameters={name: p.detach() for name, p in named.items() if owner_of[name] == name},
            buffers=dict(layer.named_buffers(prefix, remove_duplicate=False)),
            aliases={name: owner_of[name] for name in named if owner_of[name] != name},
        )
    return states


def _refuse_without_value(layers: Sequence[nn.Module]) -> None:
    for index, layer in enumerate(layers):
        for name, tensor in (*layer.named_parameters(), *layer.named_buffers()):
            if is_lazy(tensor):
                raise ProgramError(f"layer {index}'s {name} has no size yet (Lazy…): say all sizes")
            if tensor.is_meta:
                raise ProgramError(f"layer {index} gives its {name} no value: it is on meta")
        for name, parameter in layer.named_parameters():
            if not parameter.isfinite().all():
                raise ProgramError(f"layer {index}'s {name} does not begin with finite numbers")
