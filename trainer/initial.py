"""``init_from``: the weights that a model begins with, out of a folder of safetensors under the
model's own names (as transformers writes them), or out of a checkpoint of another job.

Strict: every parameter must be there in its shape, and nothing may be left over. What was stored in
another precision is cast. Buffers keep what their constructors gave unless the folder has them.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path

from safetensors import SafetensorError, safe_open
from torch import Tensor

from trainer.checkpoint import CheckpointError, read_header, read_layers
from trainer.contract.checkpoints import FolderName, Outside
from trainer.layerfile import LayerState
from trainer.program import ProgramError

Read = Callable[[], Tensor]
_NAMED = 3
"""So many names stand in an error."""


def fill(states: Mapping[int, LayerState], folder: Path, outside: Outside | None) -> None:
    """Copy what lies in ``folder`` into ``states``. Raises ProgramError."""
    with ExitStack() as opened:
        try:
            if FolderName.parse(folder.name):
                _copy(states, _checkpoint(folder), folder, None)
            else:
                _copy(states, _safetensors(folder, opened), folder, outside)
        except (CheckpointError, SafetensorError, OSError) as error:
            raise ProgramError(f"init_from cannot be read: {error}") from error


def _checkpoint(folder: Path) -> dict[str, Read]:
    layers = read_layers(folder, range(read_header(folder).layer_count))
    return {
        name: _given(tensor)
        for state in layers.values()
        for name, tensor in (state.parameters | state.buffers).items()
    }


def _given(tensor: Tensor) -> Read:
    return lambda: tensor


def _safetensors(folder: Path, opened: ExitStack) -> dict[str, Read]:
    files = sorted(folder.glob("*.safetensors"))
    if not files:
        raise ProgramError(f"init_from {folder} holds no .safetensors file and is no checkpoint")
    found: dict[str, Read] = {}
    for path in files:
        file = opened.enter_context(safe_open(path, "pt"))
        found |= {name: _reading(file, name) for name in file.keys()}  # noqa: SIM118 - no dict
    return found


def _reading(file: safe_open, name: str) -> Read:
    def read() -> Tensor:
        tensor: Tensor = file.get_tensor(name)  # type: ignore[no-untyped-call]
        return tensor

    return read


def _copy(
    states: Mapping[int, LayerState],
    found: Mapping[str, Read],
    folder: Path,
    outside: Outside | None,
) -> None:
    def own(name: str) -> str:
        return (outside.renamed(name) if outside else None) or name

    missing, unlike, used = [], [], set[str]()
    aliases = {alias: owner for state in states.values() for alias, owner in state.aliases.items()}
    for name, tensor, is_needed in _wanted(states):
        called = [own(one) for one in (name, *(a for a, owner in aliases.items() if owner == name))]
        there = [one for one in called if one in found]
        if not there:
            missing += [called[0]] if is_needed else []
            continue
        given = found[there[0]]()
        used |= set(there)
        if given.shape != tensor.shape:
            unlike.append(f"{there[0]} of {tuple(given.shape)}, not {tuple(tensor.shape)}")
        elif any(not found[other]().equal(given) for other in there[1:]):
            unlike.append(f"{there[0]} and {there[1]} apart, which are one tied weight")
        else:
            tensor.copy_(given)
    left = sorted(found.keys() - used)
    troubles = [
        *_listed("lacks", missing),
        *_listed("has", unlike),
        *_listed("has, and the model has not,", left),
    ]
    if troubles:
        raise ProgramError(
            f"init_from {folder} does not fit the model: it {'; it '.join(troubles)}"
        )


def _wanted(states: Mapping[int, LayerState]) -> Iterator[tuple[str, Tensor, bool]]:
    """Each tensor that a value may come for, by global name, and whether one must."""
    for state in states.values():
        for name, parameter in state.parameters.items():
            yield name, parameter, True
        for name, buffer in state.buffers.items():
            yield name, buffer, False


def _listed(verb: str, names: Sequence[str]) -> list[str]:
    if not names:
        return []
    more = f" and {len(names) - _NAMED} more" if len(names) > _NAMED else ""
    return [f"{verb} {', '.join(names[:_NAMED])}{more}"]
