"""From a Launch to what each trainer is told. Pure: values in, specs out."""

from collections.abc import Sequence
from dataclasses import dataclass

from agent import wire
from controller.core.actions import Launch
from controller.core.jobspec import JobSpec
from trainer.contract.builtins import path_of, source_in
from trainer.contract.spec import Address, Program, RunSpec, Saving


@dataclass(frozen=True)
class Place:
    """A node as far as a launch needs it."""

    name: str
    facts: wire.Facts

    @property
    def device_kind(self) -> str:
        """Of its first device."""
        return self.facts.devices[0].kind


def run_specs(
    launch: Launch, spec: JobSpec, root: str, places: Sequence[Place], *, glance: bool = False
) -> list[RunSpec]:
    """One spec a rank; ``places`` are the seats' nodes, ``root`` the job's checkpoint folder;
    ``glance``: the program's costs are known.

    Rank 0's node holds the rendezvous store. A bundle's paths are relative to its folder.
    """
    first = places[0].facts
    store = Address(host=first.data_host, port=first.store_port)
    begun = launch.resumed_from
    every = spec.checkpoint.every
    return [
        RunSpec(
            kind=launch.kind,
            job=launch.job,
            generation=launch.number,
            rank=rank,
            shape=launch.shape,
            cuts=launch.cuts,
            in_flight=launch.in_flight,
            glance=glance,
            near=_partner(launch, places, on_the_same_node=True),
            far=_partner(launch, places, on_the_same_node=False),
            program=program_of(spec),
            training=spec.training(),
            store=store if launch.shape.world > 1 else None,
            data_host=place.facts.data_host,
            device=_device(place, seat.device),
            saving=Saving(
                root=root,
                every_steps=every.steps,
                every_seconds=launch.save_every if every.auto else every.seconds,
            ),
            load_from=f"{root}/{begun.folder}" if begun else None,
            resumed_from=begun,
            init_from=spec.init_from if launch.kind == "first_weights" else None,
        )
        for rank, (seat, place) in enumerate(zip(launch.seats, places, strict=True))
    ]


def _partner(launch: Launch, places: Sequence[Place], *, on_the_same_node: bool) -> int | None:
    """The first rank with which rank 0 of a first-weights run measures such a link."""
    if launch.kind != "first_weights":
        return None
    of_first = [place.name == places[0].name for place in places]
    return next((r for r, same in enumerate(of_first) if r and same == on_the_same_node), None)


def job_root(folder: str, job: str) -> str:
    """The job's own place in ``checkpoint.dir``, a path or a URL."""
    return f"{folder.rstrip('/')}/{job}"


def program_of(spec: JobSpec) -> Program:
    """Where the agent finds the program."""
    if path_of(spec.program) is None:
        return Program(source=spec.program, args=spec.args)
    if spec.bundle is not None:
        return Program(source=spec.program, workdir=".", args=spec.args)
    folder = spec.workdir or "/"
    return Program(source=source_in(folder, spec.program), workdir=folder, args=spec.args)


def setup_of(spec: JobSpec) -> wire.Setup | None:
    """What an agent runs before the first trainer of the bundle."""
    if not spec.setup:
        return None
    return wire.Setup(lines=spec.setup, timeout_seconds=spec.setup_timeout)


def _device(place: Place, number: int) -> str:
    device = place.facts.devices[number]
    return f"cuda:{device.index}" if device.kind == "cuda" else "cpu"
