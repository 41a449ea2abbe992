"""What a trainer is told: one frozen :class:`RunSpec` per rank and generation.

The spec is whole. A trainer reads no environment, asks nobody and picks nothing: two ranks of a
generation differ only in ``rank``. The same spec drives a trainer under a controller and under
``varuna try``.
"""

from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field, JsonValue

Precision = Literal["float32", "bfloat16", "float16"]
ScheduleName = Literal["varuna", "1f1b", "gpipe"]
RunKind = Literal["first_weights", "train"]
FINITE_POSITIVE = Annotated[float, Field(gt=0, allow_inf_nan=False)]


class Frozen(BaseModel):
    """A value that says no to unknown fields, NaN and change."""

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)


class Shape(Frozen):
    """P x D x m: ``depth`` stages, ``replicas`` of each, ``micro_batch`` samples a micro-batch."""

    depth: int = Field(ge=1)
    replicas: int = Field(ge=1)
    micro_batch: int = Field(ge=1)

    @property
    def world(self) -> int:
        """How many ranks the shape has."""
        return self.depth * self.replicas

    def __str__(self) -> str:
        return f"{self.depth}x{self.replicas}"


class Program(Frozen):
    """Where the user's functions are and what they are given."""

    source: str
    """``builtin:NAME``, the absolute path of a Python file, or ``hf:`` and that of a config."""
    workdir: str | None = None
    """A folder put at the END of ``sys.path``; ``None`` for what comes with us."""
    args: dict[str, JsonValue] = Field(default_factory=dict)


class Training(Frozen):
    """What the numbers depend on. No shape is among it: that is the point of the project."""

    batch_size: int = Field(ge=1)
    """M, samples a step over all replicas, exact."""
    steps: int = Field(ge=1)
    """The job is done when this many steps are."""
    seed: int = 0
    clip_grad_norm: FINITE_POSITIVE | None = None
    precision: Precision = "float32"
    evaluate_every: int | None = Field(default=None, ge=1)
    """Steps between two evaluations on the held-out samples; one more after the last step."""
    schedule: ScheduleName = "varuna"


class Address(Frozen):
    """Where a TCP server listens."""

    host: str
    port: int = Field(ge=1, le=65535)


class ResumedFrom(Frozen):
    """The link of a generation to the one before it in the lineage."""

    step: int = Field(ge=0)
    generation: int = Field(ge=1)
    folder: str
    """The name of the checkpoint's folder, as ``step-000120.g7``."""


class Saving(Frozen):
    """Where and when a generation writes checkpoints."""

    root: str
    """The job's own folder, absolute: ``<checkpoint.dir>/<job id>``."""
    every_steps: int | None = Field(default=None, ge=1)
    every_seconds: FINITE_POSITIVE | None = None
    """At most one of the two; none: only the last step is saved."""


class RunSpec(Frozen):
    """All that one trainer is told.

    ``kind`` ``first_weights``: ``shape`` 1xD, ``resumed_from`` None: all ranks measure what lies
    between them; rank 0 builds the real model, measures it, writes step 0, says
    :class:`~trainer.contract.progress.Inspected`.
    ``train``: load ``load_from`` and train.
    """

    version: Literal[1] = 1
    kind: RunKind
    job: str
    """The job's id; with ``generation`` it prefixes every rendezvous key."""
    generation: int = Field(ge=1)
    rank: int = Field(ge=0)
    shape: Shape
    cuts: tuple[int, ...]
    """``depth`` + 1 layer indexes, rising from 0 to the layer count; stage s holds layers cuts[s]
    .. cuts[s+1]-1.

    Empty for ``first_weights``, when nobody has counted the layers yet.
    """
    in_flight: tuple[int, ...] | None = None
    """Per stage, the most micro-batches in flight, which is how many inputs it stashes; None: what
    the static order needs. ``varuna`` makes its order under fewer, too.
    """
    near: int | None = None
    far: int | None = None
    """Of ``first_weights``: a rank on rank 0's node, and one on another, to measure links with."""
    glance: bool = False
    """Of ``first_weights``: what it costs is known from before; see only that it can be trained."""
    program: Program
    training: Training
    store: Address | None = None
    """The rendezvous store of this generation; None when the world is one rank."""
    data_host: str = "127.0.0.1"
    """This node's address for gloo; its interface is found from it."""
    device: str = "cpu"
    saving: Saving
    init_from: str | None = None
    """Of ``first_weights``: the folder whose weights the model begins with, safetensors under the
    names of :class:`~trainer.contract.checkpoints.Outside` or a checkpoint of another job.
    """
    load_from: str | None = None
    """Absolute path of the checkpoint folder to load; None only for ``first_weights``."""
    resumed_from: ResumedFrom | None = None
    load_seconds: FINITE_POSITIVE = 10.0
    """How long what is missing in ``load_from``, or cannot be read, is looked for again."""
    timeout_seconds: FINITE_POSITIVE = 1800.0
    """The process groups' own timeout: a long stop, never the way a loss is seen."""
    limbo_seconds: FINITE_POSITIVE = 60.0
    """How long a halted trainer stands still without an order before it leaves."""
