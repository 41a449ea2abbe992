"""The job spec: what a user submits, resolved and strict.

Short forms (``2..8``, ``50 steps``, ``90s``) are normalised to the JSON objects here, so YAML,
``--set`` and REST accept both and the store holds one. Every refusal is a sentence with the mend;
where it stands in a text is :mod:`controller.specfile`'s business.
"""

import re
from typing import Annotated, Any, Literal

from pydantic import (
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    JsonValue,
    field_validator,
    model_validator,
)

from trainer.contract.builtins import path_of
from trainer.contract.spec import FINITE_POSITIVE, Precision, ScheduleName, Training

JOB_AT_STEP = re.compile(r"([^/@]+)@(\d+|newest)$")
NAME_PATTERN = r"^[a-z0-9][a-z0-9-]{0,39}$"


def _no_stand_in(given: Any) -> Any:
    if isinstance(given, bool | str):
        raise ValueError("must be a whole number")
    return given


NOT_NEGATIVE = Annotated[float, Field(ge=0, allow_inf_nan=False)]
Whole = Annotated[int, BeforeValidator(_no_stand_in)]
"""An int that ``true`` and ``"8"`` are not taken for."""


class Strict(BaseModel):
    """Frozen; an unknown key, NaN or infinity is an error."""

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)


class NodeRange(Strict):
    """How many VMs: ``4``, ``2..8`` or ``2..`` (no upper bound)."""

    min: Whole = Field(default=1, ge=1)
    max: Whole | None = Field(default=None, ge=1)

    @model_validator(mode="before")
    @classmethod
    def _short_form(cls, given: Any) -> Any:
        return parse_range(given) if isinstance(given, int | str) else given

    @model_validator(mode="after")
    def _rising(self) -> "NodeRange":
        if self.max is not None and self.max < self.min:
            raise ValueError(f"max {self.max} is below min {self.min}")
        return self


class Every(Strict):
    """``50 steps``, a duration as ``5m``, or ``auto``: exactly one of the three."""

    steps: Whole | None = Field(default=None, ge=1)
    seconds: FINITE_POSITIVE | None = None
    auto: bool = False
    """From what a save costs and how often nodes are lost."""

    @model_validator(mode="before")
    @classmethod
    def _short_form(cls, given: Any) -> Any:
        if not isinstance(given, str):
            return given
        if found := re.fullmatch(r"\s*(\d+)\s*steps?\s*", given):
            return {"steps": int(found[1])}
        if given.strip() == "auto":
            return {"auto": True}
        return {"seconds": parse_duration(given)}

    @model_validator(mode="after")
    def _one(self) -> "Every":
        if (self.steps is not None) + (self.seconds is not None) + self.auto != 1:
            raise ValueError("give one of steps and seconds, as `50 steps` or `5m`, or auto")
        return self


class Checkpointing(Strict):
    """Where checkpoints go (a folder that all VMs reach), how often, how many complete ones are
    kept.
    """

    dir: str | None = Field(default=None, min_length=1)
    every: Every = Every(auto=True)
    keep: Whole = Field(default=3, ge=1)


class Plan(Strict):
    """What the planner may choose. ``depth``: auto, an int, or ``2..8``."""

    depth: Literal["auto"] | NodeRange = "auto"
    micro_batch: Literal["auto"] | Annotated[Whole, Field(ge=1)] = "auto"
    schedule: ScheduleName = "varuna"
    min_gain: float = Field(default=0.05, ge=0, lt=1)
    """A running job grows when a step is estimated to take so much less: ``5%``, or 0.05."""
    settle: NOT_NEGATIVE = 60.0
    """... and nobody has joined for so long."""

    @field_validator("min_gain", mode="before")
    @classmethod
    def _percent(cls, given: Any) -> Any:
        if isinstance(given, str) and (found := re.fullmatch(r"\s*([\d.]+)\s*%\s*", given)):
            return float(found[1]) / 100
        return given

    @field_validator("settle", mode="before")
    @classmethod
    def _duration(cls, given: Any) -> Any:
        return parse_duration(given) if isinstance(given, str) else given


class Health(Strict):
    """``slow_factor``: a node whose forwards take so many times its stage's median is slow."""

    slow_factor: float = Field(default=1.3, gt=1)


class Recovery(Strict):
    """Budgets. Evictions are never charged."""

    max_restarts: Whole = Field(default=3, ge=0)
    below_min: Literal["wait", "fail"] = "wait"
    max_wait: FINITE_POSITIVE = 86400.0

    @field_validator("max_wait", mode="before")
    @classmethod
    def _duration(cls, given: Any) -> Any:
        return parse_duration(given) if isinstance(given, str) else given


class JobSpec(Strict):
    """One job. ``bundle`` is set by the CLI after it has uploaded the packed ``workdir``."""

    spec_version: Literal[1] = 1
    name: str | None = Field(default=None, pattern=NAME_PATTERN)
    program: str = Field(min_length=1)
    workdir: str | None = None
    bundle: str | None = Field(default=None, pattern=r"^sha256:[0-9a-f]{64}$")
    args: dict[str, JsonValue] = Field(default_factory=dict)
    setup: tuple[Annotated[str, Field(pattern=r"\S")], ...] = ()
    """Shell lines that each machine runs once per bundle before it imports the program."""
    setup_timeout: FINITE_POSITIVE = 600.0
    """For all of them: ``10m``."""
    nodes: NodeRange = NodeRange()
    device: Literal["auto", "cpu", "cuda"] = "auto"
    devices_per_node: Literal["auto"] | Annotated[Whole, Field(ge=1)] = "auto"
    batch_size: Whole = Field(ge=1)
    steps: Whole = Field(ge=1)
    seed: Whole = 0
    init_from: str | None = Field(default=None, min_length=1)
    """The weights to begin with: a folder of safetensors, in the workdir or absolute, or
    ``JOB@STEP`` (``JOB@newest``).
    """
    clip_grad_norm: FINITE_POSITIVE | None = None
    precision: Precision = "float32"
    evaluate_every: Annotated[Whole, Field(ge=1)] | None = None
    """Steps between two evaluations on the program's ``eval_dataset``."""
    plan: Plan = Plan()
    checkpoint: Checkpointing = Checkpointing()
    recovery: Recovery = Recovery()
    health: Health = Health()
    priority: Whole = 0
    drills: bool = False
    labels: dict[str, str] = Field(default_factory=dict)

    @field_validator("program")
    @classmethod
    def _program_form(cls, given: str) -> str:
        path = path_of(given)
        if path is None:
            return given
        suffix = ".json" if given.startswith("hf:") else ".py"
        if not path.endswith(suffix) or path.startswith("/") or ".." in path.split("/"):
            raise ValueError("give a .py file inside workdir, hf:CONFIG.json, or builtin:gpt")
        return given

    @field_validator("setup", mode="before")
    @classmethod
    def _one_line(cls, given: Any) -> Any:
        return (given,) if isinstance(given, str) else given

    @field_validator("setup_timeout", mode="before")
    @classmethod
    def _duration(cls, given: Any) -> Any:
        return parse_duration(given) if isinstance(given, str) else given

    @model_validator(mode="after")
    def _whole(self) -> "JobSpec":
        if self.checkpoint.dir is None and self.nodes.max != 1:
            raise ValueError(
                "checkpoint.dir is needed: a folder that every VM reaches"
                " (only `nodes: 1` does without)"
            )
        return self

    def training(self) -> Training:
        """The part that the numbers depend on."""
        return Training(
            batch_size=self.batch_size,
            steps=self.steps,
            seed=self.seed,
            clip_grad_norm=self.clip_grad_norm,
            precision=self.precision,
            evaluate_every=self.evaluate_every,
            schedule=self.plan.schedule,
        )


def parse_range(given: int | str) -> dict[str, int | None]:
    """``4`` -> 4..4, ``2..8``, ``2..``; ValueError with the forms otherwise."""
    if isinstance(given, bool):
        raise ValueError("give N, min..max or min..")
    if isinstance(given, int):
        return {"min": given, "max": given}
    found = re.fullmatch(r"\s*(\d+)\s*(?:(\.\.)\s*(\d+)?)?\s*", given)
    if not found:
        raise ValueError(f"`{given}` is not N, min..max or min..")
    low, dots, high = found.groups()
    if not dots:
        return {"min": int(low), "max": int(low)}
    return {"min": int(low), "max": int(high) if high else None}


def parse_duration(given: str) -> float:
    """``90s``, ``30m``, ``1h30m``, ``2d`` -> seconds; ValueError with the forms otherwise."""
    units = {"d": 86400, "h": 3600, "m": 60, "s": 1, "ms": 0.001}
    found = re.fullmatch(r"\s*(?:\d+(?:\.\d+)?(?:ms|[dhms])\s*)+", given)
    if not found:
        raise ValueError(f"`{given}` is not a duration; write 90s, 30m, 1h30m or 2d")
    pieces = re.findall(r"(\d+(?:\.\d+)?)(ms|[dhms])", given)
    return float(sum(float(number) * units[unit] for number, unit in pieces))
