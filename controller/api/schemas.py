"""The USER's API: what REST answers, what SSE sends, what CLI and dashboard show. Nothing else.

Names carry their units, times are RFC 3339 UTC, numbers are finite or null. All paths are below
``/api/v1`` (but ``/healthz``, ``/readyz``, ``/version`` and ``/openapi.json`` at the root); a job
is named by its id, its name (the newest of that name) or a unique prefix of its id:

    POST /jobs                          SubmitRequest -> 201 JobView     (header Idempotency-Key; or
                                        the YAML itself as application/yaml)
    GET  /jobs[?state=…&all=true]       -> Page[JobView]                 newest first; without all,
                                        only those that are not over
    GET  /jobs/{job}                    -> JobView
    POST /jobs/{job}/actions/cancel     -> 202 JobView                   again: the same, no-op
    POST /jobs/{job}/actions/pause      -> 202 JobView                   saves a common step first
    POST /jobs/{job}/actions/resume     -> 202 JobView
    POST /jobs/{job}/actions/checkpoint -> 202 JobView                   409: no step is on its way
    POST /jobs/{job}/actions/evict      EvictRequest -> 202 EvictAnswer  a drill
    GET  /jobs/{job}/events             -> Page[EventView]               ?after=SEQ&limit=50&type=…
                                                                         &last=N (the newest N)
    GET  /jobs/{job}/generations        -> Page[GenerationView]          by number, rising
    GET  /jobs/{job}/checkpoints        -> Page[CheckpointView]          by step, rising
    GET  /jobs/{job}/recoveries         -> Page[RecoveryView]            in order
    GET  /jobs/{job}/series             -> SeriesView                    ?points=1000
    GET  /jobs/{job}/logs               -> LogView                       ?rank=&generation=&tail=200
                                                                         or &offset=N
    GET  /jobs/{job}/logs/setup         -> LogView                       ?node=&rank=&offset=0
    GET  /jobs/{job}/ledger             -> LedgerView
    GET  /jobs/{job}/costs              -> LayerCosts (trainer/contract/costs.py)
    POST /plans                         PlansRequest -> PlansView        a what-if: no state
    POST /nodes/{node}/actions/{drain|undrain|release} -> 202 NodeView
    GET  /nodes[?all=true]              -> Page[NodeView]                without all, only live ones
    GET  /events                        -> Page[EventView]               as above, of everything
    GET  /stream?after=SEQ[&job=…]      -> SSE: hello, event, job, tick, nodes, reset
    PUT  /bundles/{sha256:hex}          tar.gz bytes -> 201 BundleView (200 when it was there)
    GET  /schema/job.json               the JSON Schema of a job spec

Errors are :class:`Problem` as ``application/problem+json``, always.
"""

from collections.abc import Sequence
from datetime import datetime
from typing import Generic, TypeVar

from pydantic import BaseModel, ConfigDict, Field, JsonValue

from controller.core.events import EventType
from controller.core.jobspec import JobSpec, NodeRange, Strict
from controller.core.states import GenerationState, JobState, NodeState, Reason
from trainer.contract.costs import LayerCosts
from trainer.contract.spec import RunKind

Item = TypeVar("Item")


class View(BaseModel):
    """What is answered: frozen; a reader ignores fields that it does not know yet."""

    model_config = ConfigDict(frozen=True, ser_json_inf_nan="null")


class Page(View, Generic[Item]):
    """A list and where the next page begins (``?after=``); None: that was all."""

    items: Sequence[Item]
    next: int | str | None = None


# ---- what is asked


class SubmitRequest(Strict):
    """``POST /jobs``."""

    spec: JobSpec


class EvictRequest(Strict):
    """A drill: SIGKILL ``count`` nodes of the job (which ones: by ``seed``), or the named ones,
    like a reclaim without notice.
    """

    count: int | None = Field(default=None, ge=1)
    nodes: tuple[str, ...] = ()
    seed: int | None = None


class EvictAnswer(View):
    """Who was taken."""

    nodes: tuple[str, ...]


# ---- jobs


class ShapeView(View):
    """P x D x m."""

    depth: int
    replicas: int
    micro_batch: int

    def __str__(self) -> str:
        return f"{self.depth}x{self.replicas}"


class NodeCounts(View):
    """``used`` hold seats of the job now; ``ready`` are live and free."""

    min: int
    max: int | None
    used: int
    ready: int


class JobView(View):
    """One job at a glance, the row of `varuna jobs` and the head of its page."""

    id: str
    name: str
    state: JobState
    reason: Reason | None
    message: str
    """One sentence: why it is in its state."""
    program: str
    cancel_wanted: bool
    pause_wanted: bool = False
    shape: ShapeView | None
    """Of the generation that is launching or running; of the last one when the job is over."""
    cuts: tuple[int, ...]
    generation: int | None
    """The newest number given out."""
    nodes: NodeCounts
    step: int
    """The last committed step of the lineage; goes back at a recovery that lost steps."""
    steps: int
    batch_size: int
    loss: float | None
    """Of ``step``; null when there is none or it is not finite."""
    non_finite: bool = False
    """The newest step's loss was NaN or infinite."""
    evaluation: "EvaluationPoint | None" = None
    """The newest that counts."""
    examples_per_second: float | None
    step_time_seconds: float | None
    """Median of the newest steps of the running generation."""
    last_checkpoint_step: int | None
    """The newest complete one of the lineage."""
    saving: str | None = None
    """How often it saves and why so, where ``checkpoint.every`` is auto."""
    recoveries: int
    gap_seconds: float
    """Sum over its recoveries."""
    lost_steps: int
    priority: int
    drills: bool
    labels: dict[str, str]
    submitted_at: datetime
    started_at: datetime | None
    """When the first step was committed."""
    finished_at: datetime | None
    spec: JobSpec
    """As resolved and stored."""


class ResumedFromView(View):
    """Where a generation went on."""

    step: int
    generation: int
    folder: str


class SeatView(View):
    """One rank: who holds it and how it goes."""

    rank: int
    stage: int
    replica: int
    node: str
    incarnation: str
    device: int
    phase: str | None
    """trainer.contract.progress.Phase; null before it has said anything."""
    step: int
    """The last step it reported as committed; 0 before any."""
    failed: str | None = None
    exit_code: int | None = None
    exit_signal: int | None = None


class GenerationView(View):
    """One launch of a job, from its plan to its end."""

    number: int
    kind: RunKind | None
    """Null while only planned."""
    state: GenerationState
    shape: ShapeView | None
    cuts: tuple[int, ...]
    seats: tuple[SeatView, ...]
    resumed_from: ResumedFromView | None
    committed: int
    """Its last committed step; 0: none."""
    because: str
    """Why it was launched so (shape, what was chosen over what)."""
    end_reason: Reason | None
    end_because: str | None
    created_at: datetime
    launched_at: datetime | None
    first_step_at: datetime | None
    ended_at: datetime | None


class CheckpointView(View):
    """One folder, as far as parts of it were reported or found."""

    folder: str
    step: int
    generation: int
    complete: bool
    """Its parts cover every layer."""
    in_lineage: bool
    condemned: bool
    deleted: bool
    """Its deletion was ordered."""
    size_bytes: int
    parts: int
    layers_covered: int
    layer_count: int
    completed_at: datetime | None


class RecoveryPhases(View):
    """Where the gap went, in seconds of the controller's receive times; null: not got there yet."""

    detect: float | None = None
    decide: float | None = None
    save: float | None = None
    stop: float | None = None
    launch: float | None = None
    rendezvous: float | None = None
    load: float | None = None
    first_step: float | None = None


class RecoveryView(View):
    """From the first loss to the first new step, over all superseded launches."""

    number: int
    at_step: int
    """The last step that was committed before."""
    resumed_from: int | None
    lost_steps: int | None
    """``at_step`` - ``resumed_from``."""
    gap_s: float | None
    """End of the last step before to end of the first one after, minus one step time."""
    phases: RecoveryPhases
    from_shape: str
    to_shape: str | None
    """As ``4x2``."""
    from_generation: int
    to_generation: int | None
    reason: Reason | None
    because: str
    began_at: datetime
    ended_at: datetime | None


class SeriesPoint(View):
    """One committed step."""

    step: int
    at: datetime
    generation: int
    loss: float | None
    """Null when it is not finite (then ``non_finite``)."""
    grad_norm: float | None
    non_finite: bool
    step_time_seconds: float
    examples_per_second: float
    superseded: bool
    """Lost by a roll-back: a later generation did the step again."""


class EvaluationPoint(View):
    """The held-out samples, with the weights as they were after step ``step``."""

    step: int
    at: datetime
    generation: int
    loss: float | None
    """Null when it is not finite."""
    metrics: dict[str, float]
    samples: int
    seconds: float
    superseded: bool
    """Of a step that a later generation did again."""


class CapacityPoint(View):
    """From ``at`` on: ``live`` nodes connected, ``used`` of them seated by this job."""

    at: datetime
    live: int
    used: int


class SeriesView(View):
    """Points by time, thinned to ``?points=`` (the newest and every first of a generation stay)."""

    job: str
    points: tuple[SeriesPoint, ...]
    thinned: bool
    """Not every step is among the points."""
    capacity: tuple[CapacityPoint, ...]
    evaluations: tuple[EvaluationPoint, ...] = ()
    """The newest thousand, by time."""


class LogView(View):
    """A piece of one rank's log. Follow with ``?generation=&rank=&offset=next_offset``."""

    generation: int
    rank: int
    node: str
    offset: int
    next_offset: int
    text: str
    over: bool
    """The trainer has exited: no more will come."""


class LedgerGap(View):
    """The first step that was not committed exactly once with the right samples."""

    step: int
    what: str


class LedgerLink(View):
    """Steps ``first`` .. ``last`` count from this generation."""

    generation: int
    first: int
    last: int
    samples: int = 0
    """That these steps reported as consumed."""
    sample_ids_hash: str = ""
    """Of all of them: eight hex digits, the sum of the steps' hashes."""


class ReplayView(View):
    """Steps that more than one generation committed: each gave the same again, or did not."""

    steps: int
    max_difference: float
    """The greatest between two losses of one step; shapes differ by the rounding of their sums."""
    at_step: int | None
    first_mismatch: int | None
    """The first that took other samples, or was finite only once."""


class LedgerView(View):
    """The proof that the training is one training."""

    samples_committed_once: bool
    """Every step 1..``steps`` was reported by exactly one generation that counts, with the hash of
    its own range of the permutation.
    """
    steps: int
    samples: int
    """``steps`` x batch size."""
    first_gap: LedgerGap | None
    lineage: tuple[LedgerLink, ...]
    replay: ReplayView


# ---- nodes, events, the rest


class QuarantineView(View):
    """A node is not used until then, or until somebody releases it; ``because`` is a sentence."""

    because: str
    until: datetime


class NodeView(View):
    """One incarnation of a node."""

    name: str
    incarnation: str
    state: NodeState
    suspect: bool
    job: str | None
    job_name: str | None
    ranks: tuple[int, ...]
    devices: int
    device_kind: str
    device_memory_bytes: int
    cores: int
    memory_bytes: int
    memory_free_bytes: int | None
    load1: float | None
    hostname: str
    boot_id: str
    pid: int
    data_host: str
    zone: str | None
    agent_version: str
    torch_version: str | None
    registered_at: datetime
    heard_at: datetime
    heard_seconds_ago: float
    gone_at: datetime | None
    leaves_at: datetime | None = None
    """When it will be taken, as it was told."""
    quarantine: QuarantineView | None = None
    """It is set aside."""
    slow: float | None = None
    """It is slow: its tasks take so many times what they take on others. Plans spare it."""


class EventView(View):
    """One thing that happened; ``message`` is the sentence that a person reads."""

    seq: int
    at: datetime
    type: EventType
    job: str | None
    job_name: str | None
    node: str | None
    generation: int | None
    message: str
    data: dict[str, JsonValue] = Field(default_factory=dict)


class BundleView(View):
    """A stored bundle."""

    digest: str
    size_bytes: int


class VersionView(View):
    """Who answers."""

    version: str
    wire_version: int
    epoch: str
    """New at every start of the controller."""


class HealthView(View):
    """``/readyz``: 503 with the reasons when not ready."""

    ready: bool
    reasons: tuple[str, ...] = ()


# ---- the stream


class Hello(View):
    """First message of a stream. ``seq``: the newest event; another ``epoch``: fetch all anew."""

    epoch: str
    seq: int
    now: datetime


class Tick(View):
    """Progress of a job, at most one a second: ``event: tick``.

    ``event: job`` carries a JobView, ``event: event`` an EventView with ``id:`` its seq, ``event:
    nodes`` a Page[NodeView] of the live ones; ``event: reset`` means: fetch all anew.
    """

    job: str
    step: int
    loss: float | None
    examples_per_second: float | None
    at: datetime
    evaluated: int | None = None
    """The step of the newest evaluation."""


# ---- plans


class PlansRequest(Strict):
    """``POST /plans``: a what-if; nothing is stored."""

    spec: JobSpec
    nodes: NodeRange | None = None
    """Which numbers of them; else the spec's. At most 1,024."""
    devices_per_node: int = Field(default=1, ge=1, le=64)
    device_memory_bytes: int = Field(default=0, ge=0)
    """0: unknown, not checked."""
    price_per_node_hour: float | None = Field(default=None, ge=0)
    """USD."""
    costs: LayerCosts | None = None
    """As `varuna profile` measures them; else what a job with this program measured."""


class PlannedStageView(View):
    """One stage of a plan."""

    first_layer: int
    last_layer: int
    in_flight: int
    size_bytes: int
    """What its device holds."""


class RunnerUpView(View):
    """A shape that is slower."""

    shape: ShapeView
    step_time_seconds: float
    at_least: bool
    """It was not played, since it can take no less than this."""
    because: str


class PlanView(View):
    """What so many nodes get; without a plan ``because`` says what does not fit."""

    nodes: int
    shape: ShapeView | None
    step_time_seconds: float | None
    examples_per_second: float | None
    bubble: float | None
    memory_bytes: int | None
    """Of the fullest device."""
    price_per_million_examples: float | None
    stages: tuple[PlannedStageView, ...] = ()
    runners_up: tuple[RunnerUpView, ...] = ()
    because: str


class PlansView(View):
    """One row a number of nodes."""

    costs_from: str
    """Whose measurement it is."""
    items: tuple[PlanView, ...]


# ---- errors


class ProblemError(View):
    """One fault of the request."""

    pointer: str
    """JSON pointer into the body, as ``/spec/batch_size``; ``#query/…`` for a parameter."""
    detail: str
    line: int | None = None
    """In a YAML text."""
    suggestion: str | None = None


class Problem(View):
    """RFC 9457."""

    type: str = "about:blank"
    title: str
    status: int
    detail: str = ""
    instance: str = ""
    request_id: str = ""
    errors: tuple[ProblemError, ...] = ()
