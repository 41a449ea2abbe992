"""The user's program: a plain Python file with ``layers``, ``dataset``, ``loss`` and, if it likes,
``optimizer``, ``lr_scale``, ``inputs`` and ``eval_dataset``. It imports nothing of ours.

This room loads such a file (a builtin is one too), calls its functions, and turns whatever goes
wrong in them into a :class:`ProgramError`: one sentence that names the user's file and line. Its
folder goes to the END of ``sys.path``, so that it shadows neither us nor an installed package.
"""

import importlib.util
import math
import sys
import traceback
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from types import ModuleType
from typing import Any, Protocol

import torch
from pydantic import ValidationError
from torch import Tensor, nn

from trainer import generators
from trainer.contract import builtins
from trainer.contract.checkpoints import Outside
from trainer.contract.spec import Program

BUILTINS = Path(__file__).parent / "models"
TAKEN_NAMES = ("agent", "controller", "trainer")
"""Our own import names; a program folder with one of them at its top level is refused."""
REQUIRED = ("layers", "dataset", "loss")

NamedParameters = Sequence[tuple[str, nn.Parameter]]


class ProgramError(Exception):
    """The user's program failed or gave what cannot be trained; ``str()`` is one sentence.

    ``details`` is the traceback's tail, ``layer`` the layer that is at fault.
    """

    def __init__(self, message: str, details: str = "", layer: int | None = None) -> None:
        super().__init__(message)
        self.message = message
        self.details = details
        self.layer = layer


class Dataset(Protocol):
    """Map-style: ``ds[i]`` is a dict of tensors (or arrays, or numbers)."""

    def __len__(self) -> int: ...
    def __getitem__(self, index: int, /) -> Mapping[str, Any]: ...


class Args(dict[str, Any]):
    """``spec.program.args`` as the program gets it: a dict whose keys can be read as attributes."""

    def __missing__(self, name: str) -> Any:
        raise MissingArgError(f"args has no {name!r}; it has: {', '.join(self) or 'nothing'}")

    def __getattr__(self, name: str) -> Any:
        try:
            return self[name]
        except KeyError as missing:
            raise AttributeError(str(missing)) from None


class MissingArgError(KeyError):
    """A key that the job's args do not have; ``str()`` is a sentence, not its repr."""

    __str__ = Exception.__str__


@dataclass(frozen=True)
class LossSum:
    """The loss of one micro-batch: sums and weights are added over the global batch, divided once.

    ``metrics``: name -> (sum, weight).
    """

    sum: Tensor
    weight: float
    metrics: dict[str, tuple[float, float]] = field(default_factory=dict)


def load(program: Program) -> "LoadedProgram":
    """Import the program's file. Raises ProgramError."""
    importlib.invalidate_caches()  # `setup` may have installed what was not there when we forked
    args = Args(program.args)
    if program.source.startswith("builtin:"):
        path, workdir = _builtin(program.source.removeprefix("builtin:")), None
    elif program.source.startswith("hf:"):
        path, workdir = _hugging_face(), None
        args["config"] = program.source.removeprefix("hf:")
    else:
        path = Path(program.source).resolve()
        workdir = Path(program.workdir).resolve() if program.workdir else path.parent
        if not path.is_file():
            raise ProgramError(f"there is no program file {path}")
        _refuse_taken_names(workdir)
        if str(workdir) not in sys.path:
            sys.path.append(str(workdir))
    home = workdir or path.parent
    with blaming(f"importing {path.name}", home), generators.restored():
        generators.seed_all(0)
        module = _import(path)
    for name in REQUIRED:
        if not callable(getattr(module, name, None)):
            raise ProgramError(f"{path.name} has no function {name}()")
    return LoadedProgram(module, path, home, args)


def _builtin(name: str) -> Path:
    if name not in builtins.NAMES:
        raise ProgramError(f"there is no builtin {name!r}; there are: {', '.join(builtins.NAMES)}")
    return BUILTINS / f"{name}.py"


def _hugging_face() -> Path:
    if importlib.util.find_spec("transformers") is None:
        raise ProgramError(
            "a program `hf:…` needs the package transformers on every VM: install Varuna there "
            "with the extra [hf], or install transformers in the job's `setup`"
        )
    return BUILTINS / "hf.py"


def _refuse_taken_names(workdir: Path) -> None:
    """A user's ``trainer.py`` beside the program could never be imported: ours comes first."""
    for name in TAKEN_NAMES:
        for entry in (workdir / name, workdir / f"{name}.py"):
            if entry.exists():
                raise ProgramError(
                    f"the program's folder holds {entry.name!r}, which is a name of ours: rename it"
                )


def _import(path: Path) -> ModuleType:
    name = f"varuna_program_{path.stem}"
    found = importlib.util.spec_from_file_location(name, path)
    if found is None or found.loader is None:
        raise ProgramError(f"{path.name} is not a Python file")
    module = importlib.util.module_from_spec(found)
    sys.modules[name] = module  # dataclasses and pickling look the module up by its name
    found.loader.exec_module(module)
    return module


@contextmanager
def blaming(what: str, home: Path) -> Iterator[None]:
    """Turn whatever the user's code raises inside into a ProgramError that says where."""
    try:
        yield
    except ProgramError:
        raise
    except (Exception, SystemExit) as error:
        details = "".join(traceback.format_exception(error))[-4000:]
        # A syntax error's text has the place too, in words of its own.
        text = str(error.msg if isinstance(error, SyntaxError) else error)
        said = " ".join(text.split())[:300]
        raised = type(error).__name__ + (f": {said}" if said else "")
        where = _where(error, home)
        raise ProgramError(
            f"{what} raised {raised}" + (f" ({where})" if where else ""), details
        ) from error


def _where(error: BaseException, home: Path) -> str:
    """``file:line`` of the innermost frame below ``home``, or of a syntax error there."""
    if isinstance(error, SyntaxError) and error.filename:
        return f"{_short(error.filename, home)}:{error.lineno}"
    frames = traceback.extract_tb(error.__traceback__)
    own = [frame for frame in frames if _is_own(Path(frame.filename), home)]
    return f"{_short(own[-1].filename, home)}:{own[-1].lineno}" if own else ""


def _is_own(path: Path, home: Path) -> bool:
    """Whether the user wrote it; an environment may lie below the program's folder."""
    return path.is_relative_to(home) and "site-packages" not in path.parts


def _short(filename: str, home: Path) -> str:
    path = Path(filename)
    return str(path.relative_to(home)) if path.is_relative_to(home) else path.name


class LoadedProgram:
    """The program's functions, checked: each raises ProgramError and nothing else."""

    def __init__(self, module: ModuleType, path: Path, home: Path, args: Args) -> None:
        self.name = path.name
        self._module = module
        self._home = home
        self._args = args

    @contextmanager
    def blaming(self, what: str, layer: int | None = None) -> Iterator[None]:
        """For running the user's layers: what they raise becomes a ProgramError with file:line."""
        try:
            with blaming(what, self._home):
                yield
        except ProgramError as error:
            error.layer = layer
            raise

    def layers(self) -> list[nn.Module]:
        """The model's layers in order, on the device that is current."""
        layers = self._call("layers", self._args)
        if not isinstance(layers, Iterable):
            raise ProgramError(f"{self.name}: layers() gives {_kind(layers)}, not a list of layers")
        layers = list(layers)
        if not layers:
            raise ProgramError(f"{self.name}: layers() gives no layer")
        for index, layer in enumerate(layers):
            if not isinstance(layer, nn.Module):
                raise ProgramError(
                    f"{self.name}: layers()[{index}] is {_kind(layer)}, not an nn.Module"
                )
            if any(layer is other for other in layers[:index]):
                raise ProgramError(
                    f"{self.name}: layers()[{index}] is the same object as an earlier layer; make "
                    "another and share its parameters instead"
                )
        return layers

    @cached_property
    def dataset(self) -> "CheckedDataset":
        """The dataset, built once. Generators are seeded around it, so that all nodes see the same
        even when it is made of random numbers.
        """
        return self._samples("dataset")

    @cached_property
    def eval_dataset(self) -> "CheckedDataset":
        """What evaluations run on, built once, as :attr:`dataset` is. Raises ProgramError when the
        program has none.
        """
        self.require_eval_dataset()
        return self._samples("eval_dataset")

    def require_eval_dataset(self) -> None:
        """Raise ProgramError when there is nothing to evaluate on."""
        if not callable(getattr(self._module, "eval_dataset", None)):
            raise ProgramError(
                f"{self.name} has no function eval_dataset(): evaluate_every needs one, which "
                "gives the held-out samples as dataset() gives those to train on"
            )

    def _samples(self, function: str) -> "CheckedDataset":
        with generators.restored():
            generators.seed_all(0)
            dataset = self._call(function, self._args)
        for method in ("__len__", "__getitem__"):
            if not hasattr(dataset, method):
                raise ProgramError(
                    f"{self.name}: {function}() gives {_kind(dataset)} without {method}"
                )
        return CheckedDataset(dataset, self._home, function)

    @cached_property
    def outside(self) -> Outside | None:
        """What the model is called outside; None when the program does not say."""
        said = {
            field: self._call(function, self._args)
            for function, field in (("weight_names", "names"), ("export_config", "config"))
            if hasattr(self._module, function)
        }
        try:
            return Outside.model_validate(said) if said else None
        except ValidationError as error:
            first = error.errors()[0]
            function = "weight_names" if first["loc"][0] == "names" else "export_config"
            raise ProgramError(
                f"{self.name}: {function}() gives what it must not: {first['msg']}"
            ) from None

    def inputs(self, batch: Mapping[str, Tensor]) -> Any:
        """What the first layer takes; without the user's ``inputs()`` the whole batch."""
        return self._call("inputs", batch) if hasattr(self._module, "inputs") else batch

    def loss(self, output: Any, batch: Mapping[str, Tensor]) -> LossSum:
        """The user's loss as a sum, whichever form it has: a mean over the samples, ``(sum,
        weight)`` or ``(sum, weight, metrics)``.

        A metric is a mean, weighted by ``weight``, or a ``(sum, weight)`` pair.
        """
        given = self._call("loss", output, batch)
        if isinstance(given, Tensor):
            samples = len(next(iter(batch.values())))
            return LossSum(self._scalar(given) * samples, float(samples))
        if not isinstance(given, tuple) or len(given) not in (2, 3):
            raise ProgramError(
                f"{self.name}: loss() gives {_kind(given)}; it must give the mean, "
                "(sum, weight) or (sum, weight, metrics)"
            )
        weight = self._number(given[1], "loss() gives for the weight")
        if not (math.isfinite(weight) and weight >= 0):
            raise ProgramError(f"{self.name}: loss() gives the weight {weight}")
        metrics = given[2] if len(given) == 3 else {}
        if not isinstance(metrics, Mapping):
            raise ProgramError(f"{self.name}: loss() gives metrics that are {_kind(metrics)}")
        return LossSum(
            self._scalar(given[0]),
            weight,
            {str(name): self._metric(str(name), value, weight) for name, value in metrics.items()},
        )

    def optimizer(self, named_params: NamedParameters) -> torch.optim.Optimizer | None:
        """The optimizer of these parameters; None when there are none.

        The default is AdamW without decay on biases and norms (what has fewer than two
        dimensions), with ``args.lr`` (1e-3) and ``args.weight_decay`` (0.01).
        """
        if not named_params:
            return None
        if not hasattr(self._module, "optimizer"):
            return self._adamw(named_params)
        optimizer = self._call("optimizer", list(named_params), self._args)
        if not isinstance(optimizer, torch.optim.Optimizer):
            raise ProgramError(f"{self.name}: optimizer() gives {_kind(optimizer)}")
        return optimizer

    def _adamw(self, named_params: NamedParameters) -> torch.optim.Optimizer:
        decayed = [p for _, p in named_params if p.ndim >= 2]
        others = [p for _, p in named_params if p.ndim < 2]
        decay = self._args.get("weight_decay", 0.01)
        groups = [
            {"params": decayed, "weight_decay": decay},
            {"params": others, "weight_decay": 0.0},
        ]
        with self.blaming("AdamW"):
            return torch.optim.AdamW(
                [group for group in groups if group["params"]], lr=self._args.get("lr", 1e-3)
            )

    def lr_scale(self, step: int) -> float:
        """By what the base learning rates are multiplied in ``step`` (from 1); default 1."""
        if not hasattr(self._module, "lr_scale"):
            return 1.0
        scale = self._number(self._call("lr_scale", step, self._args), "lr_scale() gives")
        if not (math.isfinite(scale) and scale >= 0):
            raise ProgramError(f"{self.name}: lr_scale({step}) gives {scale}")
        return scale

    def _call(self, name: str, *given: Any) -> Any:
        function: Callable[..., Any] = getattr(self._module, name)
        with self.blaming(f"{name}()"):
            return function(*given)

    def _scalar(self, loss: Any) -> Tensor:
        if not isinstance(loss, Tensor) or loss.numel() != 1 or not loss.is_floating_point():
            raise ProgramError(f"{self.name}: loss() gives {_kind(loss)}, not one floating number")
        return loss.reshape(())

    def _number(self, value: Any, what: str) -> float:
        try:
            return float(value.detach() if isinstance(value, Tensor) else value)
        except (TypeError, ValueError, RuntimeError):
            raise ProgramError(f"{self.name}: {what} {_kind(value)}, not a number") from None

    def _metric(self, name: str, value: Any, weight: float) -> tuple[float, float]:
        what = f"loss() gives for the metric {name!r}"
        if isinstance(value, tuple) and len(value) == 2:
            return self._number(value[0], what), self._number(value[1], what)
        return self._number(value, what) * weight, weight


class CheckedDataset:
    """The user's dataset; what it raises becomes a ProgramError with file:line."""

    def __init__(self, dataset: Dataset, home: Path, name: str = "dataset") -> None:
        self._dataset = dataset
        self._home = home
        self._name = name
        with blaming(f"len({name})", home):
            self._length = len(dataset)
        if self._length < 1:
            raise ProgramError(f"the {name} is empty")
        self.fingerprint = str(getattr(dataset, "fingerprint", ""))
        """What the dataset says of its content; empty when it says nothing."""

    def __len__(self) -> int:
        return self._length

    def __getitem__(self, index: int) -> Mapping[str, Any]:
        with blaming(f"{self._name}[{index}]", self._home):
            sample = self._dataset[index]
        if not isinstance(sample, Mapping) or not sample:
            raise ProgramError(f"{self._name}[{index}] is {_kind(sample)}, not a dict of tensors")
        return sample


def _kind(value: Any) -> str:
    """What a value is, in words that fit after "gives"."""
    if isinstance(value, Tensor):
        return f"a tensor of {value.dtype} and shape {tuple(value.shape)}"
    if value is None:
        return "nothing"
    name = type(value).__name__
    return f"{'an' if name[0] in 'aeiouAEIOU' else 'a'} {name}"
