"""The snapshot that a decision is made on: frozen, loaded from the store and the in-memory beats,
never changed.

All times are seconds on the controller's own clock (:class:`controller.clock.Clock`): wall seconds
at process start plus monotonic seconds since, so they compare with stored ones and no agent's clock
is among them.
"""

from dataclasses import dataclass

from controller.core.jobspec import JobSpec
from controller.core.states import GenerationState, JobState, NodeState, Reason
from trainer.contract.costs import LayerCosts
from trainer.contract.progress import Failed, Halted, NonFinite, Paced, Phase
from trainer.contract.spec import ResumedFrom, Shape


@dataclass(frozen=True)
class Notice:
    """A node was told that it will be taken, or somebody wants it emptied."""

    kind: str
    deadline: float
    """When, at the latest that is known; infinite: nobody says."""


@dataclass(frozen=True)
class Quarantine:
    """A node was set aside, under whatever incarnation."""

    because: str
    since: float
    """What it did before does not count any more."""
    until: float
    times: int
    """How often, with little time in between."""
    is_over: bool = False
    """It was released."""
    unreached: tuple[str, ...] = ()
    """The nodes that it had no path to, when it was set aside for that."""


@dataclass(frozen=True)
class Slowness:
    """A node was found to be slow."""

    factor: float
    """Times what its stage usually takes."""
    since: float
    times: int = 1
    """How often it was."""
    over_at: float | None = None
    """When it was found to be as fast as the others, or was to be tried again; None: it is slow."""

    @property
    def is_over(self) -> bool:
        """It is not slow any more, as far as is known."""
        return self.over_at is not None


@dataclass(frozen=True)
class Preparation:
    """A node without a seat was ordered to get ready for one."""

    job: str
    error: str | None = None
    """Why it could not."""
    failed_at: float = 0.0


@dataclass(frozen=True)
class Node:
    """One incarnation of a node that is not gone."""

    name: str
    incarnation: str
    state: NodeState
    devices: int
    device_kind: str
    device_memory_bytes: int
    data_host: str
    store_port: int
    heard_at: float
    """The last beat, report or parked request received from it."""
    suspect_since: float | None = None
    """When its parked order request broke (the client went away unanswered), until it parks a new
    one; beats and reports do not clear it, they may have been on their way when it died. Missed
    beats are not among it: they follow from ``heard_at``.
    """
    silences: tuple[tuple[float, float], ...] = ()
    """When nothing was heard of it for long, and then something was: from, until."""
    registered_at: float = 0.0
    notice: Notice | None = None
    losses: tuple[float, ...] = ()
    """When its name was last lost, under whatever incarnation; by time."""
    quarantine: Quarantine | None = None
    """The last one of its name."""
    zone: str | None = None
    slow: Slowness | None = None
    """The last time that it was."""
    preparation: Preparation | None = None
    """The newest; None when its job is over, or the node was given a seat since."""


@dataclass(frozen=True)
class Exit:
    """The end of a trainer's process."""

    code: int | None
    signal: int | None
    log_tail: str
    at: float


@dataclass(frozen=True)
class Seat:
    """One rank of a generation: the node (incarnation) and device that hold it, and what was
    reported of it.
    """

    rank: int
    node: str
    incarnation: str
    device: int
    phase: Phase | None = None
    phase_at: float = 0.0
    """When the phase was reported; 0 before any."""
    applied: int = 0
    """The last step it reported as committed; 0 before any."""
    halted: Halted | None = None
    halted_at: float = 0.0
    failed: Failed | None = None
    failed_at: float = 0.0
    exit: Exit | None = None
    stopped: int = 0
    """The step that it stopped after, as ordered; 0: it has not."""
    forwarded_at: float = 0.0
    """When it was ordered to apply the step that others have voted; 0: it was not."""
    saving: tuple[int, ...] = ()
    """The layers it was ordered to save for a salvage."""
    saving_at: float = 0.0
    refused: bool = False
    """It could not carry out such an order."""
    paces: tuple[Paced, ...] = ()
    """Its newest few windows of steps."""
    non_finite: NonFinite | None = None
    """What it saw that is not finite: nobody applies that step."""


@dataclass(frozen=True)
class Ending:
    """Why a generation stands still, or is about to: it will end by this."""

    reason: Reason
    charged: bool
    because: str
    at: float
    """When standing still was ordered."""
    blamed: str | None = None
    """The node that is at fault, if one alone is."""


@dataclass(frozen=True)
class Found:
    """What the listing of the checkpoint folder said, as far as a decision needs it."""

    newest_marker: int
    """The highest generation number that any marker or folder there carries; 0: none."""
    error: str | None
    at: float


@dataclass(frozen=True)
class Generation:
    """One generation of a job."""

    number: int
    kind: str
    """A RunKind; empty while planned."""
    state: GenerationState
    shape: Shape | None
    cuts: tuple[int, ...]
    seats: tuple[Seat, ...]
    resumed_from: ResumedFrom | None
    look_node: str | None
    """Whom the listing was ordered from."""
    look_incarnation: str | None
    found: Found | None
    created_at: float
    launched_at: float
    """0 while planned."""
    committed: int
    """The last step that any of its ranks reported; 0: none."""
    committed_at: float
    """When that was received; 0: never."""
    because: str = ""
    """The sentence it was planned or launched with."""
    step_seconds: float = 0.0
    """How long its steps take lately (a median); 0: unknown."""
    launch_seconds: float = 0.0
    """From its launch to its first step; 0: unknown."""
    ending: Ending | None = None
    """Set while it is draining or halted."""
    save_every: float | None = None
    """Seconds between saves that it was last told, where the controller finds them out."""
    dumped_at: float = 0.0
    """When its ranks were last ordered to dump their stacks; 0: never."""
    paths: tuple[tuple[str, tuple[str, ...] | None], ...] = ()
    """While planned: who was asked whom of the others it reaches, and whom it does not; None: it
    has not said.
    """

    @property
    def nodes(self) -> tuple[tuple[str, str], ...]:
        """(node, incarnation) of each of its seats, without repeats, by rank."""
        return tuple(dict.fromkeys((seat.node, seat.incarnation) for seat in self.seats))

    @property
    def is_launched(self) -> bool:
        """It has given out seats and is not over."""
        return self.state not in (GenerationState.PLANNED, GenerationState.ENDED)

    @property
    def is_short_of_seats(self) -> bool:
        """It was taken over as it runs, and who holds a seat has not said so (yet)."""
        return self.shape is not None and len(self.seats) < self.shape.world


@dataclass(frozen=True)
class Checkpoint:
    """A folder whose durable parts are known (reported or found).

    ``complete``: they cover every layer.
    """

    folder: str
    step: int
    generation: int
    complete: bool
    condemned: bool = False
    """A rank found a wrong size or hash in it, or its deletion was ordered."""
    resumed_from: ResumedFrom | None = None
    """What its writer resumed from, as its parts say: the link when the store does not know the
    writer.
    """
    layers: frozenset[int] = frozenset()
    """What its durable parts hold; known while its writer stands still."""


@dataclass(frozen=True)
class EndedGeneration:
    """What is remembered of a generation that is over."""

    number: int
    kind: str
    resumed_from: ResumedFrom | None
    committed: int
    """Its last committed step; 0: it committed none, and is no link of the lineage."""
    charged: bool
    """It ended by the program's fault (counts against ``max_restarts`` until progress)."""
    ended_at: float
    launched: bool
    """It gave out seats."""
    reason: Reason | None = None
    """Why it ended, as :class:`controller.core.actions.EndGeneration` said."""
    because: str = ""
    """The sentence it ended with."""
    shape: Shape | None = None
    nodes: tuple[tuple[str, str], ...] = ()
    """(node, incarnation) of each of its seats, without repeats, by rank."""
    blamed: str | None = None
    """The node that was at fault, if one alone was."""
    error: str = ""
    """What failed, in the program's words without who and where; empty: it said nothing."""
    tail: str = ""
    """The last lines that it wrote."""

    @property
    def reached(self) -> int:
        """The last step that was done when it ended: its own, or what it resumed from."""
        return max(self.committed, self.resumed_from.step if self.resumed_from else 0)

    @property
    def failed(self) -> bool:
        """The program did, or what it computes."""
        return self.charged or self.reason is Reason.NON_FINITE_LOSS


@dataclass(frozen=True)
class SaveCost:
    """What a rank's share of a periodic save takes (medians)."""

    stall_seconds: float
    """Training stands still."""
    write_seconds: float
    """A thread writes beside it."""


@dataclass(frozen=True)
class Job:
    """One job that is not over, with all that is known of it."""

    id: str
    name: str
    spec: JobSpec
    state: JobState
    reason: Reason | None
    message: str
    submitted_at: float
    cancel_wanted: bool
    costs: LayerCosts | None
    """None until a first-weights run has inspected the program (and stored for ever after)."""
    current: Generation | None
    """The newest generation that is not ended."""
    past: tuple[EndedGeneration, ...]
    """By number."""
    checkpoints: tuple[Checkpoint, ...]
    waiting_since: float
    """When it entered ``waiting``; 0 in other states."""
    pause_wanted: bool = False
    save_rate: float = 0.0
    """Bytes a second that one rank has lately written to checkpoints (a median); 0: unknown."""
    save_cost: SaveCost | None = None
    """Of its newest periodic saves; None: there was none."""
    trained_since: float = 0.0
    """When its first step was committed; 0: not yet."""
    saves_fail: bool = False
    """Its last save failed or was put off, and none has succeeded since."""

    @property
    def last_number(self) -> int:
        """The highest generation number ever given out; 0: none."""
        numbers = [g.number for g in self.past] + ([self.current.number] if self.current else [])
        return max(numbers, default=0)


@dataclass(frozen=True)
class Bounds:
    """Seconds that a trainer may take for each phase before it counts as hanging. A step and a save
    get more where those before took long (:mod:`controller.core.hangs`).
    """

    boot: float = 120.0
    """From the order to start it: its program, and from a store its checkpoint, are fetched."""
    program: float = 120.0
    rendezvous: float = 60.0
    load: float = 300.0
    first_step: float = 300.0
    step: float = 60.0
    evaluation: float = 600.0
    save: float = 120.0
    """The last step's, which all stand still for."""


@dataclass(frozen=True)
class Rules:
    """The knobs that decisions depend on; seconds."""

    lost_after: float = 5.0
    """Silence that makes a node lost."""
    mute_after: float = 50.0
    """An agent that has been silent for so long though its job commits steps is gone without."""
    suspect_after: float = 2.0
    """Silence (two beats) that makes a node suspect."""
    broken_bound: float = 1.5
    """Silence after a broken order request that makes a node lost when its peers report broken
    links.
    """
    coalesce: float = 0.3
    """Losses closer than this are one decision: a launch waits this long after the last one's first
    sign. Survivors halt and save meanwhile.
    """
    gather: float = 2.0
    """So long after the controller's start nothing is planned for older jobs: agents that were away
    try at least once a second.
    """
    settle: float = 1.0
    """A start below the job's most nodes waits this long after the last node joined."""
    look_deadline: float = 10.0
    """For the listing of the checkpoint folder."""
    bounds: Bounds = Bounds()
    dump_seconds: float = 1.0
    """A hang's stacks are written for so long before anything is stopped."""
    hang_patience: float = 12.0
    """Who does not stand still so long after a hang is the one that hangs: longer than a trainer
    gives its main thread.
    """
    connect_deadline: float = 6.0
    """For nodes to say whom they reach."""
    halt_patience: float = 2.0
    """How long ranks may stand halted before a culprit is known; then all are launched again."""
    halt_bound: float = 1.5
    """Who has not reported so long after a halt, or after the vote was handed on, is lost for a
    salvage.
    """
    save_deadline: float = 10.0
    """For one rank's share of a salvage; longer when three times the prediction is."""
    drain_deadline: float = 60.0
    """From the order to stop after a common step until all is saved; longer when steps are."""
    notice_margin: float = 2.0
    """A VM that was told to go may go so much before its time."""
    notice_lapses: float = 120.0
    """A VM that is still there so long after its time stays."""
    slow_lapses: float = 600.0
    """A node that is spared because it was slow is tried again so long after, and twice as long
    after each time that it was slow again.
    """
    move_seconds: float = 2.0
    """A running job grows only when it gains more than that by its end."""
    backoff: float = 1.0
    """After the first of several failures in a row; doubles with each."""
    backoff_cap: float = 60.0
    max_launches_without_progress: int = 6
    max_interrupted_launches: int = 20
    """In a row, each ended by the loss of a node before a new step: evictions are never charged,
    but a job that kills its nodes must not loop for ever.
    """
    flaps: int = 3
    """A node that was lost so often within ``flap_window`` is set aside."""
    flap_window: float = 300.0
    verdict_patience: float = 10.0
    """Where each rank is by itself, a failure waits so long for the others to fail or pass."""
    failures_alone: int = 2
    """So is one that so many launches in a row failed on, and on no other."""
    quarantine: float = 60.0
    """The first time; doubles with each."""
    quarantine_cap: float = 3600.0
    """At most; after so long without another the doubling begins anew."""


@dataclass(frozen=True)
class World:
    """Everything at one moment."""

    nodes: tuple[Node, ...]
    jobs: tuple[Job, ...]
    grace_until: float
    """After the controller's own start or a long pause nobody is lost by silence before this."""
    last_loss_at: float = 0.0
    """When any incarnation was last closed (lost, evicted, replaced by a newer one); 0: never."""
    started_at: float = 0.0
    """When this controller was started: what it has loaded may be an old copy until the agents have
    said what they run.
    """
    awaits_agents: bool = False
    """Some of the nodes that are not gone have not registered since."""
