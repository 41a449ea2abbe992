"""What a trainer says and what it can be told while it runs.

One JSON object a line over the trainer's control socket (a Unix stream socket pair made by the
launcher): lines of :data:`Line` come out of the trainer, lines of :data:`Order` go in. Standard
output is the user's and is a log. :class:`ExitCode` says what the end of the process means.
"""

from enum import IntEnum, StrEnum
from typing import Annotated, Literal

from pydantic import Field, TypeAdapter

from trainer.contract.costs import LayerCosts
from trainer.contract.spec import FINITE_POSITIVE, Frozen


class Phase(StrEnum):
    """Where a trainer is on its way; said once at the beginning of each phase."""

    BOOT = "boot"
    """Forked; nothing imported yet."""
    SETUP = "setup"
    """The job's `setup` lines run on this machine; said by the agent: there is no trainer yet."""
    PROGRAM = "program"
    """Imports the program and opens its dataset."""
    RENDEZVOUS = "rendezvous"
    """Meets the other ranks and makes all process groups."""
    LOAD = "load"
    """Reads its layers from the checkpoint."""
    FIRST_STEP = "first_step"
    """Computes its first step; groups and weights are there."""
    STEP = "step"
    """At least one step is committed."""
    EVALUATION = "evaluation"
    """Runs the held-out samples, forward only; ``step`` again when that is done."""
    SAVE = "save"
    HALTED = "halted"
    """Stands still with its state intact and waits for an order."""
    DONE = "done"
    """The last step is committed and saved."""


class ExitCode(IntEnum):
    """Why a trainer ended by itself.

    Any other code (or a signal) is the program's or the machine's doing.
    """

    DONE = 0
    LEFT = 20
    """It was ordered to leave, or its limbo ran out."""
    PROGRAM_ERROR = 21
    """The user's functions raised or gave what cannot be trained; the ``Failed`` line says what."""
    PEER_LOST = 22
    """A link to another rank broke and no order came."""
    CHECKPOINT_DAMAGED = 23
    """A file's size or hash is wrong; the ``Failed`` line names it."""
    CHECKPOINT_UNREACHABLE = 24
    """A file is missing or cannot be read or written within the deadline."""
    STALE = 25
    """A newer generation's marker stands in the checkpoint folder."""
    INTERNAL = 26
    """Our own mistake."""
    SETUP_FAILED = 27
    """A `setup` line failed or took too long; there was no trainer."""


class PhaseBegun(Frozen):
    """The trainer enters ``phase``."""

    kind: Literal["phase"] = "phase"
    phase: Phase


class Inspected(Frozen):
    """What the first-weights run saw of the model; the planner lives on it."""

    kind: Literal["inspected"] = "inspected"
    costs: LayerCosts
    samples: int = Field(ge=1)
    """``len(dataset)``: with the seed it fixes the sample order, so that a ledger can be checked
    anywhere.
    """


class StepCommitted(Frozen):
    """Step ``step`` is applied on this rank.

    All ranks say it, with the same numbers: they come from the vote.
    """

    kind: Literal["step"] = "step"
    step: int
    """From 1."""
    loss: float | None
    """Weighted mean over the global batch; None when it is not a finite number."""
    grad_norm: float | None
    """Global norm before clipping, tied weights once; None when not finite."""
    samples: int
    """Samples the last stages consumed; equals the batch size."""
    sample_ids_hash: str
    """Eight hex digits: the sum mod 2**32 of a 32-bit mix of each consumed sample id
    (trainer.contract.samples).
    """
    metrics: dict[str, float] = Field(default_factory=dict)
    seconds: float
    """Wall seconds of this step on this rank."""
    loss_scale: float | None = None
    """With which the gradients of this step were computed; None but in float16."""
    skipped: bool = False
    """The weights stayed as they were: float16 overflowed (the scale is halved), or no sample had
    any weight. It is a step all the same, with its samples.
    """


WINDOWS = 5
"""So many :class:`Paced` in a row tell of a slow rank: on a busy machine anybody is for a while."""


class Paced(Frozen):
    """How this rank's tasks went in the newest few steps, the first step never among them: means
    over full micro-batches.
    """

    kind: Literal["paced"] = "paced"
    step: int
    """The last of them."""
    forward_seconds: float = Field(ge=0)
    recompute_seconds: float = Field(ge=0)
    backward_seconds: float = Field(ge=0)
    reduce_seconds: float = Field(ge=0)
    """A step's sum of gradients, waiting for the slowest replica included."""


class Evaluated(Frozen):
    """The held-out samples, with the weights as they are after step ``step``; all ranks say it."""

    kind: Literal["evaluated"] = "evaluated"
    step: int
    loss: float | None
    """Weighted mean; None when it is not a finite number."""
    samples: int
    metrics: dict[str, float] = Field(default_factory=dict)
    seconds: float


class PartWritten(Frozen):
    """This rank's part of checkpoint ``folder`` is durable."""

    kind: Literal["part"] = "part"
    folder: str
    step: int
    layers: tuple[int, ...]
    layer_count: int
    num_bytes: int
    """Of all ``layers``, the earlier ones too when a salvaged part has grown."""
    seconds: float
    """From the first byte to the last sync."""
    stall_seconds: float = 0.0
    """How long training stood still for it."""


class SaveFailed(Frozen):
    """This rank's part is not durable; training goes on."""

    kind: Literal["save_failed"] = "save_failed"
    folder: str
    step: int
    message: str
    put_off: bool = False
    """Nothing is wrong but that the one before is still being written; a later one follows."""


Ballot = tuple[float | None, ...]
"""The summed vote of a step, of use to trainers alone; None: not a finite number."""


class Halted(Frozen):
    """The trainer stands still:

    ``applied`` is the last step applied, ``prepared`` the last whose gradients are whole. Said
    anew when a stopped trainer loses a peer, and after each :class:`Forward`.
    """

    kind: Literal["halted"] = "halted"
    applied: int
    prepared: int
    vote_step: int | None = None
    """The newest step whose vote this rank holds."""
    ballot: Ballot | None = None
    """The vote of ``vote_step``."""
    holds: tuple[int, ...] = ()
    """The layers in memory, rising; none before they are loaded."""
    torn: bool = False
    """The optimizer was interrupted: this rank's state is of no use."""
    cause: str
    suspects: tuple[int, ...] = ()
    """Ranks whose link broke; more than one when a collective failed."""


class Stopped(Frozen):
    """All ranks stopped after ``step`` as ordered; this one has written its share, or said why not,
    and stands still until it is told to leave.
    """

    kind: Literal["stopped"] = "stopped"
    step: int


class NonFinite(Frozen):
    """Step ``step`` would spoil the weights, so nobody applies it: all ranks stop after the step
    before and say :class:`Stopped`. Said by each rank that saw it at home.
    """

    kind: Literal["non_finite"] = "non_finite"
    step: int
    replica: int
    stage: int
    what: str
    """What is not finite and where, in words that fit into a sentence: ``the loss of micro-batch
    3``, ``the gradient of layers.2.mlp.weight``.
    """


class Failed(Frozen):
    """The trainer cannot go on; it ends with ``code`` right after."""

    kind: Literal["failed"] = "failed"
    code: ExitCode
    message: str
    """One sentence for a person."""
    details: str = ""
    """The traceback's tail."""
    file: str | None = None
    """The checkpoint file that is at fault."""
    layer: int | None = None


class Finished(Frozen):
    """All steps are done and this rank's share of the last checkpoint is durable."""

    kind: Literal["finished"] = "finished"
    step: int


Line = Annotated[
    PhaseBegun
    | Inspected
    | StepCommitted
    | Paced
    | Evaluated
    | PartWritten
    | SaveFailed
    | Halted
    | Stopped
    | NonFinite
    | Failed
    | Finished,
    Field(discriminator="kind"),
]
LINE: TypeAdapter[Line] = TypeAdapter(Line)


class Halt(Frozen):
    """Stop waiting for peers, keep the state, report, stand still."""

    kind: Literal["halt"] = "halt"


class Leave(Frozen):
    """End now; what is in memory is of no use any more."""

    kind: Literal["leave"] = "leave"


class Stay(Frozen):
    """To a trainer that stands still: the controller is away, so its limbo begins anew."""

    kind: Literal["stay"] = "stay"


class Stop(Frozen):
    """Have all ranks stop after the same step, the next that is voted: each saves its share, says
    :class:`Stopped` and stands still. One rank that is told so is enough.
    """

    kind: Literal["stop"] = "stop"


class SaveNow(Frozen):
    """Have all ranks save after the same step, the next that is voted, and train on."""

    kind: Literal["save_now"] = "save_now"


class SaveEvery(Frozen):
    """From now on a save is due so many seconds after the one before; the one whose clock asks for
    all, rank 0, heeds it.
    """

    kind: Literal["save_every"] = "save_every"
    seconds: FINITE_POSITIVE


class Forward(Frozen):
    """To a trainer that stands still, prepared for ``step`` and without its vote: here it is."""

    kind: Literal["forward"] = "forward"
    step: int
    ballot: Ballot


class Save(Frozen):
    """To a trainer that stands still: write these layers of the applied step as its part of the
    folder ``step-S.gG.<of>``. Layers that it wrote there before stay in its part.
    """

    kind: Literal["save"] = "save"
    layers: tuple[int, ...]
    of: Literal["salvage"] = "salvage"


Order = Annotated[
    Halt | Leave | Stay | Stop | SaveNow | SaveEvery | Forward | Save,
    Field(discriminator="kind"),
]
ORDER: TypeAdapter[Order] = TypeAdapter(Order)
