"""What is known of the programs that come with us without torch, so that a spec can be refused at
submit.
"""

from collections.abc import Callable, Mapping
from typing import Any

GPT_LAYERS = 6
"""``builtin:gpt`` without ``args.layers``."""

BERT_LAYERS = 6
"""``builtin:bert`` without ``args.layers``."""

_LAYERS: Mapping[str, Callable[[Mapping[str, Any]], Any]] = {
    "bert": lambda args: args.get("layers", BERT_LAYERS),
    "gpt": lambda args: args.get("layers", GPT_LAYERS),
}
NAMES = tuple(sorted(_LAYERS))
_AROUND = 2
"""An embedding before the blocks, a head after them."""


def path_of(program: str) -> str | None:
    """The file that a job spec's ``program`` names, that of ``hf:CONFIG.json`` too; None for a
    builtin.
    """
    return None if program.startswith("builtin:") else program.removeprefix("hf:")


def source_in(folder: str, program: str) -> str:
    """``program`` with its file as ``folder`` has it."""
    path = path_of(program)
    return program if path is None else f"{program.removesuffix(path)}{folder.rstrip('/')}/{path}"


def layer_count(name: str, args: Mapping[str, Any]) -> int:
    """How many layers the builtin ``name`` has with ``args``; ValueError says what is wrong."""
    if name not in _LAYERS:
        raise ValueError(f"there is no builtin:{name}; there are: {', '.join(NAMES)}")
    blocks = _LAYERS[name](args)
    if isinstance(blocks, bool) or not isinstance(blocks, int) or blocks < 1:
        raise ValueError(f"`args.layers` must be a whole number of at least 1, not {blocks!r}")
    return blocks + _AROUND
