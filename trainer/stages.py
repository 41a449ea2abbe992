"""My slice of the model: consecutive layers with real weights, out of a model that exists in full
only on the meta device.

Every parameter has a global name, ``layers.<index>.<name inside the layer>``. A *tied* weight is
the same Parameter object in several layers, found before slicing; its *owner* is the first that
holds it. On a stage its holders share one storage but keep a Parameter each, and so a gradient: the
sum over all holders is made in layer order wherever the cuts lie (:mod:`trainer.replicas`).
"""

import copy
from collections.abc import Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from trainer import dropout
from trainer.checkpoint import LayerState
from trainer.contract.samples import mix32
from trainer.contract.scaling import LossScale
from trainer.contract.spec import Training
from trainer.contract.topology import MicroBatch
from trainer.data import Batch
from trainer.device import CPU, Device
from trainer.dropout import Place
from trainer.layerfile import Moments
from trainer.links import Message, tensors_in
from trainer.program import LoadedProgram, LossSum, ProgramError

_AUTOCAST = {"bfloat16": torch.bfloat16, "float16": torch.float16}


@dataclass(frozen=True)
class Model:
    """All layers, without values, and which weight is whose."""

    layers: list[nn.Module]
    owner_of: dict[str, str]
    """Each parameter's global name -> its owner's; its own when it is not tied."""

    @classmethod
    def draw(cls, program: LoadedProgram) -> "Model":
        """Build the program's layers on the meta device. Raises ProgramError."""
        with torch.device("meta"):
            layers = program.layers()
        return cls(layers, owners(layers))

    def ties(self) -> dict[str, tuple[int, ...]]:
        """Owner's name -> the layers that hold that weight, for those held by two or more."""
        holders: dict[str, list[int]] = {}
        for name, owner in self.owner_of.items():
            layers = holders.setdefault(owner, [])
            if layer_of(name) not in layers:
                layers.append(layer_of(name))
        return {owner: tuple(layers) for owner, layers in holders.items() if len(layers) > 1}


def owners(layers: Iterable[nn.Module]) -> dict[str, str]:
    """Each parameter's global name -> the global name under which it is met first."""
    first: dict[nn.Parameter, str] = {}
    return {
        name: first.setdefault(parameter, name)
        for index, layer in enumerate(layers)
        for name, parameter in layer.named_parameters(f"layers.{index}", remove_duplicate=False)
    }


def layer_of(name: str) -> int:
    """The layer of a global name."""
    return int(name.split(".", 2)[1])


@dataclass(frozen=True)
class Weight:
    """One trained weight of a stage: the Parameter that its optimizer steps."""

    owner: str
    name: str
    """Under which the stage's first holder has it."""
    parameter: nn.Parameter

    @property
    def is_owned(self) -> bool:
        """Whether the owner is on this stage."""
        return self.name == self.owner

    @property
    def gradient(self) -> Tensor:
        """Of the whole global batch, once the replicas and holders have summed theirs."""
        assert self.parameter.grad is not None
        return self.parameter.grad


class Stage:
    """Layers ``mine`` of ``model``, filled with ``states`` as they stand after ``step`` steps: it
    trains these very tensors, copying none.

    Raises ProgramError when the two do not fit each other exactly.
    """

    def __init__(
        self,
        program: LoadedProgram,
        model: Model,
        mine: range,
        training: Training,
        states: Mapping[int, LayerState],
        step: int,
        loss_scale: LossScale | None = None,
        device: Device = CPU,
    ) -> None:
        self.device = device
        self.layers = _apart({index: model.layers[index] for index in mine})
        self.layer_count = len(model.layers)
        self.outside = program.outside
        self.weights: dict[str, Weight] = {}
        """By the owner's name, in layer order."""
        self.gradients: dict[int, list[Tensor]] = {index: [] for index in mine}
        """Per layer, flat: the gradients of the weights that it owns."""
        self.borrowed: dict[int, dict[str, Tensor]] = {index: {} for index in mine}
        """Per layer: the gradients of the tied weights that others own, by the owner's name."""
        self.loss_scale = (loss_scale or LossScale()) if training.precision == "float16" else None
        """None but in float16."""
        self._program = program
        self._training = training
        self._owner_of = model.owner_of
        self._was_watched: set[int] = set()
        self._fill(states)
        self.optimizer = program.optimizer(
            [(owner, weight.parameter) for owner, weight in self.weights.items()]
        )
        self._base_lrs = [group["lr"] for group in self._parameter_groups()]
        self._load_moments(states, step)

    # --- computing ----------------------------------------------------------------------------

    def forward(self, inputs: Any, step: int, micro_batch: MicroBatch) -> Any:
        """Run all layers on one micro-batch. Raises ProgramError."""
        value = inputs
        with self.precision():
            for index in self.layers:
                value = self.forward_layer(index, value, step, micro_batch)
        return value

    def forward_layer(self, index: int, value: Any, step: int, micro_batch: MicroBatch) -> Any:
        """Run one of them. Raises ProgramError.

        The generator is seeded before each layer, so that any stage, now or in a recompute, draws
        the same numbers. Between layers tensors and their gradients are made contiguous: then a
        kernel sees the same memory whether a cut lies there or not.
        """
        self._seed(step, index, micro_batch.number)
        dropout.enter(Place(self._training.seed, step, index, micro_batch.start))
        with self._program.blaming(f"layer {index}", index):
            value = self._run(index, self.layers[index], value)
        return _handed_on(value, index) if index < self.layer_count - 1 else value

    def loss(self, output: Any, batch: Batch, step: int, micro_batch: MicroBatch) -> LossSum:
        """The user's loss of the last layer's output. Raises ProgramError."""
        self._seed(step, self.layer_count, micro_batch.number)
        with self.precision():
            loss = self._program.loss(output, batch.tensors)
        if torch.is_grad_enabled() and not loss.sum.requires_grad:
            raise ProgramError(
                "loss() gives a number that no weight has a part in: is something detached, turned "
                "into a plain number, or computed under no_grad?"
            )
        return loss

    def precision(self) -> AbstractContextManager[Any]:
        """Autocast, when the job wants it."""
        dtype = _AUTOCAST.get(self._training.precision)
        return self.device.autocast(dtype) if dtype else nullcontext()

    @contextmanager
    def evaluating(self) -> Iterator[None]:
        """Inside, modules are in evaluation mode and no graph grows."""
        modules = [m for layer in self.layers.values() for m in layer.modules() if m.training]
        try:
            for module in modules:
                module.training = False
            with torch.no_grad():
                yield
        finally:
            for module in modules:
                module.training = True

    @property
    def loss_factor(self) -> float:
        """By what the loss is multiplied before the backward pass."""
        return self.loss_scale.scale if self.loss_scale else 1.0

    def gradients_of(self, layer: int) -> tuple[Tensor, ...]:
        """All that layer ``layer`` computes, its own weights' and borrowed ones'."""
        return (*self.gradients[layer], *self.borrowed[layer].values())

    def gradient_of(self, owner: str, layer: int) -> Tensor | None:
        """What layer ``layer``, if it is here, computes for a tied weight."""
        if layer not in self.layers:
            return None
        return (
            self.weights[owner].gradient
            if layer == layer_of(owner)
            else self.borrowed[layer][owner]
        )

    def clear_gradients(self) -> None:
        """Zero them all, in place."""
        for index in self.layers:
            for gradient in self.gradients_of(index):
                gradient.zero_()

    def apply(self, step: int, gradient_scale: float) -> None:
        """Scale the gradients, set the learning rates, and step. Raises ProgramError."""
        if self.optimizer is None:
            return
        lr_scale = self._program.lr_scale(step)
        for gradients in self.gradients.values():
            for flat in gradients:
                flat.mul_(gradient_scale)
        for weight in self.weights.values():
            if not weight.is_owned:
                weight.gradient.mul_(gradient_scale)
        for group, base in zip(self._parameter_groups(), self._base_lrs, strict=True):
            group["lr"] = base * lr_scale
        with self._program.blaming("the optimizer's step"):
            self.optimizer.step()

    def _run(self, index: int, layer: nn.Module, value: Any) -> Any:
        """Call the layer; the first time see whether it changes its buffers."""
        if index in self._was_watched:
            return layer(value)
        before = {name: (buffer, buffer._version) for name, buffer in layer.named_buffers()}
        value = layer(value)
        self._was_watched.add(index)
        for name, buffer in layer.named_buffers():
            was, version = before[name]
            if buffer is not was or buffer._version != version:
                raise ProgramError(
                    f"layer {index} changes its buffer {name!r} in forward (as BatchNorm does), "
                    "which a recompute would do twice: use GroupNorm or LayerNorm"
                )
        return value

    def _seed(self, step: int, layer: int, micro_batch: int) -> None:
        seed = 0
        for number in (self._training.seed, step, layer, micro_batch):
            seed = mix32(seed << 32 ^ number)
        self.device.seed(seed)

    # --- state in and out ---------------------------------------------------------------------

    def states(self, layers: Iterable[int]) -> dict[int, LayerState]:
        """What the checkpoint stores of ``layers``: the live tensors, not copies."""
        moments: Mapping[Tensor, Moments] = self.optimizer.state if self.optimizer else {}
        states = {}
        for index in layers:
            prefix, layer = f"layers.{index}", self.layers[index]
            named = dict(layer.named_parameters(prefix, remove_duplicate=False))
            owned = {n: p.detach() for n, p in named.items() if self._owner_of[n] == n}
            states[index] = LayerState(
                parameters=owned,
                buffers=dict(layer.named_buffers(prefix, remove_duplicate=False)),
                optimizer={
                    n: dict(moments.get(self.weights[n].parameter, {}))
                    for n in owned
                    if n in self.weights
                },
                aliases={n: self._owner_of[n] for n in named if n not in owned},
            )
        return states

    def _fill(self, states: Mapping[int, LayerState]) -> None:
        """Give every parameter and buffer its value, and every trained one its gradient."""
        values: dict[str, Tensor] = {}
        for index, layer in self.layers.items():
            _refuse_unknown(layer, index, states[index])
            made: dict[nn.Parameter, nn.Parameter] = {}
            for path, module in layer.named_modules(prefix=f"layers.{index}"):
                for leaf, parameter in list(module._parameters.items()):
                    if parameter is None:
                        continue
                    if parameter not in made:
                        name = f"{path}.{leaf}"
                        owner = self._owner_of[name]
                        if owner not in values:
                            values[owner] = _value(states[index].parameters, name, parameter)
                        made[parameter] = nn.Parameter(values[owner], parameter.requires_grad)
                        self._train(index, owner, name, made[parameter])
                    setattr(module, leaf, made[parameter])  # a GRU, say, keeps a list of its own
                for leaf, buffer in module._buffers.items():
                    if buffer is not None:
                        name = f"{path}.{leaf}"
                        module._buffers[leaf] = _value(states[index].buffers, name, buffer)
                _refuse_plain_tensors(module, index)
            self._flatten(index)

    def _train(self, index: int, owner: str, name: str, parameter: nn.Parameter) -> None:
        if not parameter.requires_grad:
            return
        self.weights.setdefault(owner, Weight(owner, name, parameter))
        if name != owner:
            parameter.grad = torch.zeros_like(parameter)
            self.borrowed[index][owner] = parameter.grad

    def _flatten(self, index: int) -> None:
        """Make the gradients of the weights that layer ``index`` owns views into flat buffers, one
        per dtype, so that the replicas' sum does not depend on where the cuts lie.
        """
        by_dtype: dict[torch.dtype, list[nn.Parameter]] = {}
        for weight in self.weights.values():
            if weight.is_owned and layer_of(weight.name) == index:
                by_dtype.setdefault(weight.parameter.dtype, []).append(weight.parameter)
        for dtype, parameters in by_dtype.items():
            sizes = [parameter.numel() for parameter in parameters]
            flat = torch.zeros(sum(sizes), dtype=dtype, device=parameters[0].device)
            for parameter, part in zip(parameters, torch.split(flat, sizes), strict=True):
                parameter.grad = part.view_as(parameter)
            self.gradients[index].append(flat)

    def _load_moments(self, states: Mapping[int, LayerState], step: int) -> None:
        if self.optimizer is None or step == 0:
            return
        group_of = {p: group for group in self._parameter_groups() for p in group["params"]}
        for weight in self.weights.values():
            saved = states[layer_of(weight.name)].optimizer
            if weight.name not in saved:
                raise ProgramError(f"the checkpoint has no optimizer state of {weight.owner}")
            parameter = weight.parameter
            moments = saved[weight.name].items()
            self.optimizer.state[parameter] = {
                key: _moved(key, value, parameter, group_of[parameter]) for key, value in moments
            }

    def _parameter_groups(self) -> list[dict[str, Any]]:
        return self.optimizer.param_groups if self.optimizer else []


def _moved(key: str, value: Any, parameter: nn.Parameter, group: Mapping[str, Any]) -> Any:
    """Where optimizers of torch want it: with the parameter, but a plain count of steps."""
    if not isinstance(value, Tensor):
        return value
    if key == "step" and not (group.get("capturable") or group.get("fused")):
        return value
    return value.to(parameter.device)


def _apart(layers: dict[int, nn.Module]) -> dict[int, nn.Module]:
    """Layers that share a module with one before get a copy: a Parameter for each holder."""
    seen: set[nn.Module] = set()
    apart = {}
    for index, layer in layers.items():
        modules = set(layer.modules())
        apart[index] = copy.deepcopy(layer) if modules & seen else layer
        seen |= modules
    return apart


def _handed_on(value: Any, index: int) -> Message:
    if isinstance(value, Tensor):
        return _whole(value)
    if isinstance(value, tuple) and all(isinstance(one, Tensor) for one in value):
        return tuple(_whole(one) for one in value)
    raise ProgramError(
        f"layer {index} gives {_kind(value)}: it must give the next layer a tensor or a flat tuple "
        "of tensors"
    )


def _kind(value: Any) -> str:
    name = f"a {type(value).__name__}"
    if isinstance(value, tuple | list):
        name += f" of {', '.join(type(one).__name__ for one in value) or 'nothing'}"
    return name


def _whole(tensor: Tensor) -> Tensor:
    tensor = tensor.contiguous()
    if tensor.requires_grad:
        tensor.register_hook(Tensor.contiguous)  # type: ignore[no-untyped-call]
    return tensor


def _value(saved: Mapping[str, Tensor], name: str, wanted: Tensor) -> Tensor:
    """The saved tensor itself, which is the stage's from now on."""
    if name not in saved:
        raise ProgramError(f"the checkpoint does not fit the program: it has no {name}")
    found = saved[name]
    if (found.shape, found.dtype) != (wanted.shape, wanted.dtype):
        raise ProgramError(
            f"the checkpoint does not fit the program: {name} is {found.dtype} "
            f"{tuple(found.shape)} there and {wanted.dtype} {tuple(wanted.shape)} here"
        )
    return found


def _refuse_unknown(layer: nn.Module, index: int, state: LayerState) -> None:
    prefix = f"layers.{index}"
    known = {name for name, _ in layer.named_parameters(prefix, remove_duplicate=False)}
    known |= {name for name, _ in layer.named_buffers(prefix, remove_duplicate=False)}
    if unknown := sorted((state.parameters.keys() | state.buffers.keys()) - known):
        raise ProgramError(
            f"the checkpoint does not fit the program: it has {unknown[0]}, which layer {index} "
            "does not have"
        )


def _refuse_plain_tensors(module: nn.Module, index: int) -> None:
    for name, value in vars(module).items():
        if name in ("_parameters", "_buffers", "_modules"):
            continue
        held = tensors_in(value) if isinstance(value, Tensor | list | tuple | dict) else []
        if any(tensor.is_meta for tensor in held):
            raise ProgramError(
                f"layer {index} keeps the tensor {name!r} as a plain attribute: "
                "register it as a buffer, so that it has a value on every machine"
            )
