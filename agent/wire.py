"""PUBLIC. The messages between agent and controller, JSON over HTTP; needs only pydantic and the
trainer's contract.

The agent always asks; the controller never dials a VM. All paths are below ``/api/v1/agents``, all
need a token of role ``agent``:

    POST /register                     Register -> Registered
    POST /{node}/beat                  Beat -> BeatAnswer          once a second
    GET  /{node}/orders?incarnation=…&after=N[&wait=SECONDS]       -> Orders     parked until there
    is an order > N
    POST /{node}/reports               Reports -> ReportsAnswer    at once, whenever something
    happened
    POST /{node}/logs                  LogChunk -> 204             bytes of one trainer's log, in
    order
    GET  /api/v1/bundles/{digest}      the program's folder as a tar.gz; ``digest`` is
    ``sha256:<hex>``

An **order** is numbered, stands until the report that it is carried out is durable, is sent again
at every fresh park (``after=0``), and is carried out once per incarnation. A **report** is numbered
per (node, incarnation) from 1; the answer carries the last durable number and the agent resends
what is above it after any break.

A 409 answer with problem type ``unknown-incarnation`` to anything but ``/register`` means: register
again.
"""

from typing import Annotated, Literal

from pydantic import Field

from trainer.contract.checkpoints import Committed
from trainer.contract.progress import Ballot, Line
from trainer.contract.spec import FINITE_POSITIVE, Frozen, Program, RunSpec

WIRE_VERSION = 2
SETUP_BEGINS, SETUP_ENDS = "[varuna] setup, line 1 of", "[varuna] setup is done\n"
"""What stands around the output of `setup` lines in the log of the rank that began them."""
NODE_NAME = r"^[a-z0-9]([a-z0-9.-]{0,61}[a-z0-9])?$"


class Device(Frozen):
    """One device that can hold one trainer."""

    kind: Literal["cpu", "cuda"]
    index: int = Field(ge=0)
    name: str = ""
    memory_bytes: int = Field(ge=0)


class Facts(Frozen):
    """What a node is. ``data_host`` is its address on the interface by which it reaches the
    controller.
    """

    hostname: str
    boot_id: str
    """Equal on two agents = one machine."""
    pid: int
    """The agent's process."""
    devices: tuple[Device, ...] = Field(min_length=1)
    cores: int = Field(ge=1)
    memory_bytes: int = Field(ge=0)
    data_host: str
    store_port: int = Field(ge=1, le=65535)
    """The rendezvous store of this node listens here, for generations whose rank 0 sits here."""
    zone: str | None = None
    agent_version: str
    torch_version: str | None = None


class RunningTrainer(Frozen):
    """A trainer that is alive on this node."""

    job: str
    generation: int
    rank: int
    phase: str
    step: int = 0
    """The last step it committed, 0 before the first."""
    spec: RunSpec | None = None
    """As it was ordered; told at registration, so that a store which is an old copy can take the
    trainer over as it runs.
    """
    said: tuple[Line, ...] = ()
    """Beside ``spec``: the newest of each kind of line that tells how it stands."""


class Register(Frozen):
    """An agent has come up (or the controller has forgotten it).

    An upsert: closes older incarnations of the name.
    """

    wire_version: int = WIRE_VERSION
    node: str = Field(pattern=NODE_NAME)
    incarnation: str = Field(min_length=8, max_length=64)
    """New for every start of the daemon."""
    facts: Facts
    running: tuple[RunningTrainer, ...] = ()
    """Empty at a fresh start; not empty when the controller was started anew meanwhile."""
    warm_for: str | None = None
    """The job whose program is loaded here, or being made ready; None at a fresh start."""


class Registered(Frozen):
    """Welcome."""

    beat_seconds: float
    max_offline_seconds: float
    reported: int | None = None
    """The last durable report of this incarnation; less than was acknowledged when the controller's
    store is an old copy: the agent then numbers on from here.
    """


class Beat(Frozen):
    """I live, and this runs here. Facts only."""

    incarnation: str
    running: tuple[RunningTrainer, ...] = ()
    load1: float = 0.0
    memory_free_bytes: int = 0


class BeatAnswer(Frozen):
    """``reported``: the last durable report number."""

    reported: int


class Setup(Frozen):
    """What a bundle needs on a machine before its program is imported there."""

    lines: tuple[str, ...] = Field(min_length=1)
    """Each is run by ``/bin/sh -c`` in the bundle's folder, one after the other."""
    timeout_seconds: float = Field(gt=0)
    """For all of them."""


class Start(Frozen):
    """Start one trainer. Everything of this job of an older generation is stopped on the node
    before.
    """

    kind: Literal["start"] = "start"
    spec: RunSpec
    bundle: str | None = None
    """``sha256:<hex>``: fetch, verify and unpack it first; the paths of ``spec.program`` are then
    relative to its folder.
    """
    setup: Setup | None = None
    """Run there once, before the first trainer of this bundle on this machine."""


class Stop(Frozen):
    """SIGKILL every trainer of ``job`` whose generation is ``up_to_generation`` or older: they hold
    nothing.
    """

    kind: Literal["stop"] = "stop"
    job: str
    up_to_generation: int


class Prepare(Frozen):
    """Get ready for a seat of ``job`` while nothing runs here: fetch its bundle, run ``setup``,
    load the program, have ``trainers`` stand by. For one job at a time: it takes another's place.

    Done when that is so, or when something else came between; an error says why it cannot be.
    """

    kind: Literal["prepare"] = "prepare"
    job: str
    generation: int
    program: Program
    bundle: str | None = None
    setup: Setup | None = None
    trainers: int = Field(ge=1)


class Release(Frozen):
    """``job`` is over, ``generation`` was its last: end what is left of it, and what is warm."""

    kind: Literal["release"] = "release"
    job: str
    generation: int
    root: str | None = None
    """Where its checkpoints are: what was being saved there is finished by nobody and goes."""


class HaltOrder(Frozen):
    """Pass :class:`trainer.contract.progress.Halt` to the trainers of this generation."""

    kind: Literal["halt"] = "halt"
    job: str
    generation: int


class DumpOrder(Frozen):
    """Have the trainers of this generation write all their stacks into their logs: one hangs."""

    kind: Literal["dump"] = "dump"
    job: str
    generation: int


class DrainOrder(Frozen):
    """Pass :class:`trainer.contract.progress.Stop` to the trainers of this generation."""

    kind: Literal["drain"] = "drain"
    job: str
    generation: int


class SaveNowOrder(Frozen):
    """Pass :class:`trainer.contract.progress.SaveNow` to the trainers of this generation."""

    kind: Literal["save_now"] = "save_now"
    job: str
    generation: int


class SaveEveryOrder(Frozen):
    """Pass :class:`trainer.contract.progress.SaveEvery` to the trainers of this generation."""

    kind: Literal["save_every"] = "save_every"
    job: str
    generation: int
    seconds: FINITE_POSITIVE


class ForwardOrder(Frozen):
    """Pass :class:`trainer.contract.progress.Forward` to one trainer."""

    kind: Literal["forward"] = "forward"
    job: str
    generation: int
    rank: int
    step: int
    ballot: Ballot


class SaveLayers(Frozen):
    """Pass :class:`trainer.contract.progress.Save` to one trainer. Done means passed on: its
    ``PartWritten`` or ``SaveFailed`` says what became of it.
    """

    kind: Literal["save_layers"] = "save_layers"
    job: str
    generation: int
    rank: int
    layers: tuple[int, ...]


class Look(Frozen):
    """List the job's checkpoint folder (``root``) now: parts, markers."""

    kind: Literal["look"] = "look"
    job: str
    generation: int
    root: str


class Peer(Frozen):
    """A node that another is to connect to: its rendezvous store always listens."""

    node: str
    host: str
    port: int = Field(ge=1, le=65535)


class Connect(Frozen):
    """Try which of ``peers`` this node reaches; answered by :class:`Connected`."""

    kind: Literal["connect"] = "connect"
    job: str
    generation: int
    peers: tuple[Peer, ...]


class Delete(Frozen):
    """Delete these folders (names below ``root``); one that is gone already is no error.

    Refused unless the node itself sees a complete checkpoint that is newer than all of them, and no
    newer generation than this order's.
    """

    kind: Literal["delete"] = "delete"
    job: str
    generation: int
    root: str
    folders: tuple[str, ...]


class MarkDone(Frozen):
    """Write ``done.json`` into ``root``: the job is over and its final checkpoint is complete."""

    kind: Literal["mark_done"] = "mark_done"
    job: str
    generation: int
    root: str
    step: int
    folder: str


PassedOn = HaltOrder | DrainOrder | SaveNowOrder | SaveEveryOrder | ForwardOrder | SaveLayers
Passed = PassedOn | DumpOrder
"""What is passed on to trainers that run here; an error when there is none (any more)."""

OrderBody = Annotated[
    Start | Stop | Prepare | Release | Passed | Look | Connect | Delete | MarkDone,
    Field(discriminator="kind"),
]


class Order(Frozen):
    """One numbered order; numbers rise over the whole store and never come back."""

    number: int = Field(ge=1)
    body: OrderBody


class Orders(Frozen):
    """All standing orders of this node above ``after``, by number. Empty when the wait ran out."""

    orders: tuple[Order, ...]


class Said(Frozen):
    """A trainer said ``line``."""

    kind: Literal["said"] = "said"
    job: str
    generation: int
    rank: int
    line: Line


class Exited(Frozen):
    """A trainer's process is gone. Exactly one of ``code`` and ``signal`` is set."""

    kind: Literal["exited"] = "exited"
    job: str
    generation: int
    rank: int
    code: int | None = None
    signal: int | None = None
    log_tail: str = ""
    """The last lines of its log, at most 4 kB, invalid UTF-8 replaced."""


class OrderDone(Frozen):
    """Order ``number`` is carried out, or failed. Of a start: the trainer is forked; of a stop:
    nothing of it is alive.
    """

    kind: Literal["order_done"] = "order_done"
    number: int
    error: str | None = None


class PartFound(Frozen):
    """A valid ``part-<rank>.json`` in the folder, whose files are there with the right size."""

    folder: str
    step: int
    generation: int
    rank: int
    layers: tuple[int, ...]
    layer_count: int
    num_bytes: int
    resumed_from: int | None
    """The step that the writing generation resumed from."""
    resumed_from_generation: int | None = None
    committed: tuple[Committed, ...] = ()
    """The newest steps since the checkpoint before; one part of a folder tells them."""


class MarkerFound(Frozen):
    """A ``gen-<g>.json``."""

    generation: int
    resumed_from: int | None
    resumed_from_generation: int | None = None


class FileSkipped(Frozen):
    """A file that is of no use, by its path below the folder."""

    path: str
    reason: str


class Looked(Frozen):
    """What order ``number`` (a Look) found.

    ``error``: the folder could not be read; a missing folder is empty.
    """

    kind: Literal["looked"] = "looked"
    number: int
    job: str
    generation: int
    parts: tuple[PartFound, ...] = ()
    markers: tuple[MarkerFound, ...] = ()
    skipped: tuple[FileSkipped, ...] = ()
    """Some of what is damaged, or missing of a part that is there."""
    newest_generation: int = 0
    """The highest number that any marker or folder carries, damaged ones too; 0: none."""
    error: str | None = None


class Connected(Frozen):
    """What order ``number`` (a Connect) found: whom this node does not reach."""

    kind: Literal["connected"] = "connected"
    number: int
    job: str
    generation: int
    unreached: tuple[str, ...] = ()


class Noticed(Frozen):
    """This node was told that it will be taken. Each event is told once."""

    kind: Literal["noticed"] = "noticed"
    notice: Literal["preempt", "terminate"]
    """The cloud wants its VM back, or somebody deletes it."""
    seconds_left: float = Field(ge=0)
    """Until then, from when this was made."""
    event: str
    """What the source calls it."""


class NoticeGone(Frozen):
    """What this node was told does not stand any more: it stays."""

    kind: Literal["notice_gone"] = "notice_gone"
    event: str


class SetAside(Frozen):
    """Stands for a report that the controller refused: it would refuse it again for ever."""

    kind: Literal["set_aside"] = "set_aside"
    refused: str
    """The ``kind`` of the body that was refused."""
    because: str
    job: str | None = None
    generation: int | None = None


ReportBody = Annotated[
    Said | Exited | OrderDone | Looked | Connected | Noticed | NoticeGone | SetAside,
    Field(discriminator="kind"),
]


class Report(Frozen):
    """One numbered report."""

    number: int = Field(ge=1)
    body: ReportBody


class Reports(Frozen):
    """Reports in order of their numbers, without a gap."""

    incarnation: str
    reports: tuple[Report, ...] = Field(max_length=1000)


class ReportsAnswer(Frozen):
    """``reported``: the last durable number; what is at or below it may be forgotten."""

    reported: int


class LogChunk(Frozen):
    """Text of one trainer's log from byte ``offset``; invalid UTF-8 is replaced by the agent."""

    incarnation: str
    job: str
    generation: int
    rank: int
    offset: int = Field(ge=0)
    text: str = Field(max_length=262144)
