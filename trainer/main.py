"""A trainer from its spec to its exit code; the zygote calls :func:`run` in a fresh fork.

Troubles of the program, of the disk and of ourselves are said in a ``Failed`` line and end the
process. A lost peer, or a halt, makes it stand still with its state intact.
"""

import faulthandler
import signal
import socket
import traceback

from trainer import first_weights
from trainer.checkpoint import (
    CheckpointError,
    DamagedError,
    StaleError,
    refuse_stale,
    write_marker,
)
from trainer.contract.progress import ExitCode, Failed, Phase
from trainer.contract.spec import RunSpec
from trainer.contract.topology import Seat, check_cuts, stages_of
from trainer.control import Control, HaltingError
from trainer.data import Batches
from trainer.device import Device, is_the_programs
from trainer.groups import PeerLostError, RendezvousError, meet
from trainer.links import Links
from trainer.loading import load_layers
from trainer.loop import Loop
from trainer.pipeline import Pipeline, Share
from trainer.program import ProgramError
from trainer.replicas import Replicas
from trainer.saves import Saves
from trainer.stages import Model, Stage
from trainer.warm import loaded


def run(spec: RunSpec, connection: socket.socket) -> int:
    """Carry out ``spec``, talking over ``connection``; the exit code."""
    faulthandler.register(signal.SIGUSR2, all_threads=True)
    control = Control(connection)
    control.start()
    code = _attempt(spec, control)
    control.flush()
    return code


def _attempt(spec: RunSpec, control: Control) -> ExitCode:
    try:
        control.enter(Phase.BOOT)
        if spec.kind == "first_weights":
            first_weights.run(spec, control.say)
            return ExitCode.DONE
        return _train(spec, control)
    except Exception as error:
        failed = _failure(spec, error)
        traceback.print_exc()
        control.say(failed)
        return failed.code


def _train(spec: RunSpec, control: Control) -> ExitCode:
    if spec.resumed_from is None or spec.load_from is None:
        raise ValueError("a training spec names the checkpoint that it goes on from")
    refuse_stale(spec.saving.root, spec.generation)
    device = Device.of(spec.device)
    share, step = Share.of(spec), spec.resumed_from.step
    seat = Seat.of(spec.rank, spec.shape)
    mine = range(spec.cuts[seat.stage], spec.cuts[seat.stage + 1])

    control.enter(Phase.PROGRAM)
    ready = loaded(spec.program)
    program, model = ready.program, ready.model
    _check_cuts(spec, model)
    if spec.training.evaluate_every:
        program.require_eval_dataset()
    batches = Batches(program.dataset, spec.training, device)
    ties = model.ties()

    control.enter(Phase.RENDEZVOUS)
    groups = meet(spec, (stages_of(layers, spec.cuts) for layers in ties.values()), device)
    control.watch(groups.sockets, groups.abort)

    control.enter(Phase.LOAD)
    header, states = load_layers(spec, mine, batches.position, device, control.check)
    stage = Stage(program, model, mine, spec.training, states, step, header.loss_scale, device)
    if spec.rank == 0:
        write_marker(spec.saving.root, spec.generation, spec.resumed_from)
    control.standing.applied = control.standing.prepared = step
    control.standing.holds = tuple(mine)

    links = Links(
        groups.world,
        previous=spec.rank - 1 if seat.stage > 0 else None,
        following=spec.rank + 1 if seat.stage < spec.shape.depth - 1 else None,
        device=device,
    )
    pipeline = Pipeline(share, program, batches, stage, links)
    replicas = Replicas(spec, stage, ties, groups)
    saves = Saves(spec, batches.position, stage, control.say)
    loop = Loop(spec, stage, pipeline, replicas, saves, control, program)
    try:
        return loop.run()
    except PeerLostError as error:
        control.halt_after_error(str(error), error.ranks)
    except HaltingError:
        pass
    loop.stand_still()
    return ExitCode.PEER_LOST


def _check_cuts(spec: RunSpec, model: Model) -> None:
    try:
        check_cuts(spec.cuts, len(model.layers), spec.shape.depth)
    except ValueError as error:
        raise ProgramError(str(error)) from error


def _failure(spec: RunSpec, error: Exception) -> Failed:
    """What to say of ``error``, and how to end."""
    details = "".join(traceback.format_exception(error))[-4000:]
    message, code, file, layer = str(error), ExitCode.INTERNAL, None, None
    match error:
        case ProgramError():
            code, layer, details = ExitCode.PROGRAM_ERROR, error.layer, error.details
        case CheckpointError():
            is_damaged = isinstance(error, DamagedError)
            code = ExitCode.CHECKPOINT_DAMAGED if is_damaged else ExitCode.CHECKPOINT_UNREACHABLE
            file = error.file
        case OSError():  # markers; what the program opens is a ProgramError
            code = ExitCode.CHECKPOINT_UNREACHABLE
            file = str(error.filename) if error.filename else None
        case StaleError():
            code = ExitCode.STALE
        case RendezvousError():
            code = ExitCode.PEER_LOST
        case RuntimeError() if is_the_programs(error):
            code, message = ExitCode.PROGRAM_ERROR, f"{spec.device}: {message.splitlines()[0]}"
        case _:
            message = f"{type(error).__name__}: {error}"
    message = f"rank {spec.rank}: {message}"
    return Failed(code=code, message=message, details=details, file=file, layer=layer)
