"""The closed set of things that can be done.

Each is recorded fenced and carried out idempotently by the reconciler.
"""

from dataclasses import dataclass

from controller.core.states import GenerationState, JobState, NodeState, Reason
from controller.core.world import Slowness
from trainer.contract.costs import LayerCosts
from trainer.contract.progress import Ballot
from trainer.contract.spec import ResumedFrom, RunKind, Shape


@dataclass(frozen=True)
class MarkNode:
    """The incarnation is over (lost), or its state follows from who sits there (ready, working)."""

    node: str
    incarnation: str
    state: NodeState
    because: str
    since: float | None = None
    """When it went, as far as is known; None: now."""


@dataclass(frozen=True)
class QuarantineNode:
    """No job uses the node of this name until then, but as a last resort."""

    node: str
    until: float
    times: int
    because: str
    unreached: tuple[str, ...] = ()
    """Whom it has no path to, if that is why."""


@dataclass(frozen=True)
class ReleaseNode:
    """The time is served: the node of this name may be used again."""

    node: str
    because: str


@dataclass(frozen=True)
class MarkSlow:
    """Remember of the incarnation that it is slow, or was."""

    node: str
    incarnation: str
    slow: Slowness
    because: str


@dataclass(frozen=True)
class PlanGeneration:
    """Take ``number`` (durable before use) and have ``node`` list the checkpoint folder; those of
    ``connect`` are to try whether they reach each other.
    """

    job: str
    number: int
    node: str
    incarnation: str
    because: str
    connect: tuple[tuple[str, str], ...] = ()


@dataclass(frozen=True)
class SeatAt:
    """Rank i of the tuple sits here."""

    node: str
    incarnation: str
    device: int


@dataclass(frozen=True)
class Launch:
    """Give the planned generation ``number`` its kind, shape and seats: a Start order for each seat
    to its node.
    """

    job: str
    number: int
    kind: RunKind
    shape: Shape
    cuts: tuple[int, ...]
    seats: tuple[SeatAt, ...]
    resumed_from: ResumedFrom | None
    because: str
    in_flight: tuple[int, ...] | None = None
    """Per stage, the most micro-batches in flight; None: what the schedule takes."""
    plan_because: str = ""
    """The planner's sentence: what a step is thought to take, and the runner-up."""
    save_every: float | None = None
    """Seconds between saves; None: as the spec says."""
    save_because: str = ""


@dataclass(frozen=True)
class DumpStacks:
    """Something hangs: all ranks write all their stacks into their logs."""

    job: str
    number: int
    because: str


@dataclass(frozen=True)
class StandStill:
    """Its ranks are ordered to stop, after a common step (``draining``) or at once (``halted``),
    with their state in memory. What it will end by is durable from here on.
    """

    job: str
    number: int
    state: GenerationState
    reason: Reason
    charged: bool
    because: str
    blamed: str | None = None


@dataclass(frozen=True)
class Survivor:
    """A rank that stands still with its state intact."""

    rank: int
    node: str
    incarnation: str


@dataclass(frozen=True)
class RollForward:
    """Hand ``step``'s vote to those who have its gradients and missed the vote: they apply it."""

    job: str
    number: int
    step: int
    ballot: Ballot
    survivors: tuple[Survivor, ...]
    because: str


@dataclass(frozen=True)
class Salvage:
    """Survivor i writes ``layers[i]`` of ``step`` from its memory, beside what it wrote before."""

    job: str
    number: int
    step: int
    survivors: tuple[Survivor, ...]
    layers: tuple[tuple[int, ...], ...]
    because: str


@dataclass(frozen=True)
class EndGeneration:
    """The generation is over; its nodes are ordered to stop everything up to it.

    A planned one (no seats yet) only withdraws its Look.
    """

    job: str
    number: int
    reason: Reason
    charged: bool
    because: str
    blamed: str | None = None
    """The node that is at fault, if one alone is."""


@dataclass(frozen=True)
class MoveGeneration:
    """The generation's state follows the facts (running: its first step is committed)."""

    job: str
    number: int
    state: GenerationState
    because: str


@dataclass(frozen=True)
class SaveEvery:
    """The running generation is to save every so many seconds from now on."""

    job: str
    number: int
    seconds: float
    because: str


@dataclass(frozen=True)
class SpareAt:
    """A node without a seat, and how many trainers are to stand by there."""

    node: str
    incarnation: str
    trainers: int


@dataclass(frozen=True)
class PrepareSpares:
    """``spares`` get ready to take seats of the running generation ``number``."""

    job: str
    number: int
    spares: tuple[SpareAt, ...]
    because: str


@dataclass(frozen=True)
class MoveJob:
    """The job's state, reason and one-sentence message.

    The state may be the one it has: then only the reason and the message change.
    """

    job: str
    state: JobState
    reason: Reason | None
    message: str


@dataclass(frozen=True)
class LearnCosts:
    """Plans are made by these from here on."""

    job: str
    costs: LayerCosts
    because: str


@dataclass(frozen=True)
class Condemn:
    """Never load ``folder`` again."""

    job: str
    folder: str
    because: str


@dataclass(frozen=True)
class DeleteCheckpoints:
    """Order ``node`` to delete superseded folders. Durable: a folder named here counts as condemned
    from now on and is never chosen again.
    """

    job: str
    generation: int
    folders: tuple[str, ...]
    node: str
    incarnation: str


@dataclass(frozen=True)
class MarkDone:
    """Order ``node`` to write done.json: the job succeeded with ``folder``.

    Comes with the MoveJob to ``succeeded``.
    """

    job: str
    generation: int
    step: int
    folder: str
    node: str
    incarnation: str


Action = (
    MarkNode
    | QuarantineNode
    | ReleaseNode
    | MarkSlow
    | PlanGeneration
    | Launch
    | DumpStacks
    | StandStill
    | RollForward
    | Salvage
    | EndGeneration
    | MoveGeneration
    | SaveEvery
    | PrepareSpares
    | MoveJob
    | LearnCosts
    | Condemn
    | DeleteCheckpoints
    | MarkDone
)


@dataclass(frozen=True)
class Decision:
    """What to do about one job (or, with ``job`` None, about the nodes), in order, and the sentence
    that says why.

    The actions are recorded in ONE transaction, all or nothing, fenced by the job's state and
    generation as they stood in the world. The decisions of one look are recorded in their order;
    one that is dropped by its fence drops no other. Then the world is looked at again, until a look
    is quiet.
    """

    job: str | None
    actions: tuple[Action, ...]
    because: str
