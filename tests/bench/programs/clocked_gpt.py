"""`builtin:gpt` with a clock, for the recovery bench: right after each optimizer step every rank
appends ``<monotonic seconds> <pid> <step>`` to the file ``args["clock"]``.

Varuna's trainers and the rival's script run these same functions, so both sides are timed at the
same point by the same clock, and neither by what it says of itself.
"""

import os
import time
from typing import Any

import torch
from torch import nn

from trainer.models import gpt, text
from trainer.models.gpt import inputs, loss

__all__ = ["dataset", "inputs", "layers", "loss", "lr_scale", "optimizer"]

_step = 0
"""That the optimizer takes next: ``lr_scale`` is asked right before."""


def layers(args: dict[str, Any]) -> list[nn.Module]:
    """Those of `builtin:gpt`."""
    return gpt.layers(_model(args))


def dataset(args: dict[str, Any]) -> text.Windows:
    """The text of `builtin:gpt`."""
    return gpt.dataset(_model(args))


def lr_scale(step: int, args: dict[str, Any]) -> float:
    """That of `builtin:gpt`."""
    global _step
    _step = step
    return gpt.lr_scale(step, _model(args))


def optimizer(
    named_params: list[tuple[str, nn.Parameter]], args: dict[str, Any]
) -> torch.optim.Optimizer:
    """AdamW that says when it has stepped."""
    clock = os.open(args["clock"], os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)

    def say(*_: object) -> None:
        os.write(clock, f"{time.monotonic()} {os.getpid()} {_step}\n".encode())

    adam = torch.optim.AdamW([parameter for _, parameter in named_params], lr=1e-3)
    adam.register_step_post_hook(say)
    return adam


def _model(args: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in args.items() if name != "clock"}
