"""A causal language model of Hugging Face's transformers as layers: ``hf:CONFIG.json``.

    embeddings | block | block | … | final norm and head

It is cut where its own pipeline plan says (``base_model_pp_plan`` of the config, ``_pp_plan`` of
the model: some 125 architectures of the Llama shape); GPT-2 has none and has its lines here. Each
block runs inside a copy of the model's body that holds this block alone: so what the body computes
once for all blocks, rotary tables and causal masks, each stage computes for itself, by
transformers' own code. Where an architecture does more between its parts than its plan tells, the
layers differ from the whole model: that is looked at when the first weights are made, and refused.

The weights are float32 whatever the config says; the precision of computing is the job's.
"""

import copy
import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import Tensor, nn

from trainer.contract.builtins import TEXT
from trainer.models import text

DEFAULTS: dict[str, Any] = {
    **TEXT,
    "config": None,  # the config's path; given by `hf:`
    "tokens": None,  # path of a .npy file of token ids, as seen from the config's folder
}


_LOOKED_AT = 1 << 24
"""Tokens at the beginning that are looked at, whether the model knows them."""


def layers(args: dict[str, Any]) -> list[nn.Module]:
    """The embeddings, the blocks, and the head."""
    settings = _settings(args)
    config = read_config(Path(settings["config"]))
    context = settings["context"]
    most = getattr(config, "max_position_embeddings", context)
    if context > most:
        raise ValueError(f"context {context} is more than the model's {most}")
    plan = Plan.of(config)
    auto: Any = transformers.AutoModelForCausalLM
    model = auto.from_config(config, dtype=torch.float32)
    cut = plan.cut(model)
    if not model.lm_head.weight.is_meta:
        _refuse_unlike(model, cut, context)
    return cut


def dataset(args: dict[str, Any]) -> text.Windows:
    """All of the text, or of the token ids, but the end."""
    settings = _settings(args)
    return text.to_train_on(_tokens(settings), settings)


def eval_dataset(args: dict[str, Any]) -> text.Windows:
    """Of the end, ``held_out`` samples."""
    settings = _settings(args)
    return text.to_evaluate_on(_tokens(settings), settings)


def inputs(batch: dict[str, Tensor]) -> Tensor:
    """All tokens but the last, which is only to be predicted."""
    return text.all_but_the_last(batch)


def loss(output: Tensor, batch: dict[str, Tensor]) -> tuple[Tensor, int]:
    """The cross-entropy in nats, summed over all predicted tokens."""
    return text.next_token_loss(output, batch)


def lr_scale(step: int, args: dict[str, Any]) -> float:
    """A linear warm-up, then a cosine down to a tenth when ``decay`` is given."""
    return text.lr_scale(step, _settings(args))


def weight_names(args: dict[str, Any]) -> dict[str, str]:
    """What the parts of the layers are called in the model itself, and so in files of weights."""
    return Plan.of(read_config(Path(_settings(args)["config"]))).names()


def export_config(args: dict[str, Any]) -> dict[str, Any]:
    """What stands beside the weights in a folder that transformers reads."""
    read = read_config(Path(_settings(args)["config"]))
    found: dict[str, Any] = json.loads(read.to_json_string())
    return found | {"architectures": [_model_class(read).__name__], "dtype": "float32"}


def read_config(path: Path) -> Any:
    """The config of the model; as it trains, it remembers nothing from token to token."""
    given = json.loads(path.read_bytes())
    kind = given.get("model_type") if isinstance(given, dict) else None
    if kind is None:
        raise ValueError(f"{path.name} is no config of transformers: it has no model_type")
    if kind not in transformers.CONFIG_MAPPING:
        raise ValueError(f"transformers {transformers.__version__} knows no model_type {kind!r}")
    config = transformers.CONFIG_MAPPING[kind].from_dict(given)
    config.use_cache = False
    return config


def _settings(args: dict[str, Any]) -> dict[str, Any]:
    return text.settings(args, DEFAULTS)


def _tokens(settings: Mapping[str, Any]) -> Tensor:
    path = Path(settings["config"])
    if settings["tokens"] is None:
        tokens = text.read_bytes(settings["text"])
    elif settings["text"] is None:
        tokens = text.read_numbers(path.parent / settings["tokens"])
    else:
        raise ValueError("give text or tokens, not both")
    most, known = int(tokens.numpy()[:_LOOKED_AT].max()), read_config(path).vocab_size
    if most >= known:
        raise ValueError(f"there is a token {most}, and the model knows {known}")
    return tokens


def _model_class(config: Any) -> Any:
    try:
        return transformers.MODEL_FOR_CAUSAL_LM_MAPPING[type(config)]
    except KeyError:
        raise ValueError(f"{config.model_type} is no causal language model") from None


# --- Cutting ----------------------------------------------------------------------------------


@dataclass(frozen=True)
class Plan:
    """Where a model is cut, by the names of its parts."""

    body: str
    """The model without its head."""
    block_count: int
    embeddings: type["Embeddings"]
    first: tuple[str, ...] = ("embed_tokens",)
    """The body's parts that :attr:`embeddings` runs, in their order."""
    blocks: str = "layers"
    norm: str = "norm"

    @classmethod
    def of(cls, config: Any) -> "Plan":
        """Raises ValueError for an architecture that has none."""
        model = _model_class(config)
        body, count = model.base_model_prefix, config.num_hidden_layers
        if config.model_type == "gpt2":
            first = ("wte", "wpe", "drop")
            return cls(body, count, PlacedEmbeddings, first, blocks="h", norm="ln_f")
        parts = tuple(config.base_model_pp_plan or ())
        if parts != ("embed_tokens", "layers", "norm") or set(model._pp_plan) != {"lm_head"}:
            raise ValueError(
                f"{model.__name__} has no pipeline plan of the Llama shape (embed_tokens, layers, "
                f"norm, lm_head) in transformers {transformers.__version__}, so it cannot be cut"
            )
        return cls(body, count, Embeddings)

    def cut(self, model: Any) -> list[nn.Module]:
        """The layers; they hold the very parameters of ``model``, tied ones too."""
        body = getattr(model, self.body)
        first = {name: getattr(body, name) for name in self.first}
        blocks = [Block(self._body_of(body, index)) for index in range(self.block_count)]
        return [self.embeddings(first), *blocks, Head(getattr(body, self.norm), model.lm_head)]

    def names(self) -> dict[str, str]:
        """Names in our layers -> names in the model."""
        last = f"layers.{self.block_count + 1}"
        return (
            {f"layers.0.{name}": f"{self.body}.{name}" for name in self.first}
            | {
                f"layers.{i + 1}.body.{self.blocks}.0": f"{self.body}.{self.blocks}.{i}"
                for i in range(self.block_count)
            }
            | {f"{last}.norm": f"{self.body}.{self.norm}", f"{last}.lm_head": "lm_head"}
        )

    def _body_of(self, body: Any, index: int) -> Any:
        """A body with block ``index`` alone, that takes and gives hidden states."""
        alone: Any = copy.copy(body)
        alone._modules = {
            name: copy.deepcopy(child)
            for name, child in body._modules.items()
            if name not in (*self.first, self.blocks, self.norm)
        }
        alone._modules |= {name: _Nothing() for name in self.first}
        alone._modules |= {
            self.blocks: nn.ModuleList([getattr(body, self.blocks)[index]]),
            self.norm: nn.Identity(),
        }
        alone.config = copy.deepcopy(body.config)
        alone.config.num_hidden_layers = 1
        if kinds := getattr(body.config, "layer_types", None):
            alone.config.layer_types = [kinds[index]]
        own = {id(parameter) for parameter in getattr(body, self.blocks)[index].parameters()}
        if shared := [name for name, p in alone.named_parameters() if id(p) not in own]:
            raise ValueError(f"{type(body).__name__} shares {shared[0]} among its blocks")
        return alone


class Embeddings(nn.Module):
    """Tokens (samples, length) -> (samples, length, width)."""

    def __init__(self, parts: Mapping[str, nn.Module]) -> None:
        super().__init__()
        for name, part in parts.items():
            self.add_module(name, part)

    def forward(self, tokens: Tensor) -> Tensor:
        (part,) = self.children()
        out: Tensor = part(tokens)
        return out


class PlacedEmbeddings(Embeddings):
    """GPT-2's: of tokens and of their places, then dropout."""

    def forward(self, tokens: Tensor) -> Tensor:
        of_tokens, of_places, dropout = self.children()
        places = torch.arange(tokens.shape[1], device=tokens.device)
        out: Tensor = dropout(of_tokens(tokens) + of_places(places[None]))
        return out


class Block(nn.Module):
    """(samples, length, width) -> the same."""

    def __init__(self, body: nn.Module) -> None:
        super().__init__()
        self.body = body

    def forward(self, hidden: Tensor) -> Tensor:
        out: Tensor = self.body(inputs_embeds=hidden, return_dict=True).last_hidden_state
        return out


class Head(nn.Module):
    """(samples, length, width) -> scores for each token."""

    def __init__(self, norm: nn.Module, lm_head: nn.Module) -> None:
        super().__init__()
        self.norm = norm
        self.lm_head = lm_head

    def forward(self, hidden: Tensor) -> Tensor:
        out: Tensor = self.lm_head(self.norm(hidden))
        return out


class _Nothing(nn.Module):
    """In the place of what ran before: adds nothing, drops nothing."""

    def forward(self, given: Tensor) -> Tensor:
        return given if given.is_floating_point() else torch.zeros(())


def _refuse_unlike(model: Any, layers: list[nn.Module], length: int) -> None:
    """Run both on some tokens, as they will be trained but for dropout. They must agree to the last
    bit: of what a model does beyond its plan (capping logits, say) little is seen at the start.
    """
    tokens = torch.arange(length)[None] * 7 % model.config.vocab_size
    model.eval()
    with torch.no_grad():
        wanted, found = model(tokens).logits, tokens
        for layer in layers:
            found = layer(found)
    model.train()
    if not torch.equal(found, wanted):
        raise ValueError(
            f"{type(model).__name__} computes more than its pipeline plan tells: cut into layers "
            "it gives other logits, so it cannot be trained here"
        )
