"""What is known of the programs that come with us without torch, so that a spec can be refused at
submit.
"""

from collections.abc import Iterator, Mapping
from typing import Any

Args = Mapping[str, Any]

TEXT: Args = {
    "context": 128,  # tokens that a sample predicts
    "lr": 1e-3,
    "weight_decay": 0.01,
    "warmup": 20,  # steps until the full learning rate
    "decay": 0,  # steps until a tenth of it, along a cosine; 0: never
    "text": None,  # path of a file whose bytes are the tokens; None: the default corpus
    "held_out": 256,  # samples of an evaluation, spread evenly over the text's end
}
"""What the language models share."""
GPT: Args = {
    "layers": 6,
    "width": 128,
    "heads": 4,
    "vocab": 256,
    "tied": True,
    "dropout": 0.0,
    **TEXT,
}
BERT: Args = {
    "layers": 6,
    "width": 128,
    "heads": 4,
    "tied": True,
    "dropout": 0.1,
    "masked": 0.15,
    **TEXT,
}
BUILTINS: Mapping[str, Args] = {"bert": BERT, "gpt": GPT}
"""Each builtin's arguments and their defaults."""
NAMES = tuple(sorted(BUILTINS))
_MAY_BE_ZERO = ("warmup", "decay")
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


def wrong_args(name: str, args: Args) -> Iterator[tuple[str, str]]:
    """The arguments that the builtin ``name`` does not take, each with a sentence."""
    known = BUILTINS[name]
    for arg, given in args.items():
        if arg not in known:
            yield arg, f"builtin:{name} has no argument `{arg}`; there are: {', '.join(known)}"
        elif demand := _demand(arg, known[arg], given):
            yield arg, f"`args.{arg}` must be {demand}, not {given!r}"
    width, heads = (args.get(arg, known[arg]) for arg in ("width", "heads"))
    if isinstance(width, int) and isinstance(heads, int) and heads > 0 and width % heads:
        yield "heads", f"`args.heads` must divide `args.width`; {width} is no multiple of {heads}"


def _demand(arg: str, usual: object, given: object) -> str | None:
    """What it must be; None: it is."""
    if usual is None:
        return None if given is None or isinstance(given, str) else "a path"
    if isinstance(usual, bool):
        return None if isinstance(given, bool) else "true or false"
    if isinstance(given, bool) or not isinstance(given, int | float):
        return "a whole number" if isinstance(usual, int) else "a number"
    if isinstance(usual, int):
        least = 0 if arg in _MAY_BE_ZERO else 1
        is_good = isinstance(given, int) and given >= least
        return None if is_good else f"a whole number of at least {least}"
    if arg in ("dropout", "masked"):
        return None if 0 <= given < 1 else "at least 0 and below 1"
    return None if given >= 0 else "at least 0"


def layer_count(name: str, args: Args) -> int:
    """How many layers the builtin ``name`` has with ``args``, if they are right; ValueError: there
    is no such builtin.
    """
    if name not in BUILTINS:
        raise ValueError(f"there is no builtin:{name}; there are: {', '.join(NAMES)}")
    blocks: int = args.get("layers", BUILTINS[name]["layers"])
    return blocks + _AROUND
