"""The snapshot that a decision is made on: frozen, loaded from the store and the in-memory beats,
never changed.

All times are seconds on the controller's own clock (:class:`controller.clock.Clock`): wall seconds
at process start plus monotonic seconds since, so they compare with stored ones and no agent's clock
is among them.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field

from controller.core.jobspec import JobSpec
from controller.core.states import GenerationState, JobState, NodeState, Reason
from trainer.contract.costs import LayerCosts
from trainer.contract.progress import Failed, Halted, Phase
from trainer.contract.spec import ResumedFrom, Shape


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
    """Its parked request broke (and it has not been heard since), or it missed two beats."""
    registered_at: float = 0.0


@dataclass(frozen=True)
class Exit:
    """The end of a trainer's process."""

    code: int | None
    signal: int | None
    log_tail: str
    at: float


@dataclass(frozen=True)
class Seat:
    """One rank of a generation:

    the node (incarnation) and device that hold it, and what was reported of it.
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
    exit: Exit | None = None


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
    """``first_weights`` or ``train``."""
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
    finished: bool
    """All ranks said Finished."""
    because: str = ""


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

    @property
    def last_number(self) -> int:
        """The highest generation number ever given out; 0: none."""
        numbers = [g.number for g in self.past] + ([self.current.number] if self.current else [])
        return max(numbers, default=0)


@dataclass(frozen=True)
class Rules:
    """The knobs that decisions depend on; seconds."""

    lost_after: float = 5.0
    suspect_after: float = 2.0
    coalesce: float = 0.3
    launch_deadline: float = 120.0
    """Per launch, until every rank has reached its first step."""
    look_deadline: float = 10.0
    max_launches_without_progress: int = 6


@dataclass(frozen=True)
class World:
    """Everything at one moment."""

    nodes: tuple[Node, ...]
    jobs: tuple[Job, ...]
    grace_until: float
    """After the controller's own start or a long pause nobody is lost by silence before this."""
    lost_at: Mapping[tuple[str, str], float] = field(default_factory=dict)
    """(node, incarnation) -> when it was marked lost or evicted, for those still seated in a
    current generation.
    """
