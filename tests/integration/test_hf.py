"""`hf:CONFIG.json`: models of transformers, cut into stages, train as they do uncut; their weights
come from transformers' folders and go back into them.
"""

import json
import sys
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch
import transformers

from tests.fakes.trainers import Trainers
from tests.integration.test_trainer_numbers import Curve, Job, farthest
from trainer import export
from trainer.checkpoint import read_layers
from trainer.contract.spec import Program
from trainer.program import LoadedProgram, ProgramError, load

pytestmark = pytest.mark.integration

SIZE = {
    "vocab_size": 256,
    "hidden_size": 16,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "max_position_embeddings": 32,
    "bos_token_id": 0,
    "eos_token_id": 0,
}
LLAMA = {"model_type": "llama", "intermediate_size": 32, "num_key_value_heads": 2, **SIZE}
NO_DROPOUT = {"embd_pdrop": 0.0, "attn_pdrop": 0.0, "resid_pdrop": 0.0}
GPT2 = {"model_type": "gpt2", **NO_DROPOUT, **SIZE}
CONTEXT, SAMPLES, STEPS = 16, 24, 10


@pytest.fixture
def tokens(tmp_path: Path) -> Path:
    """As many as make one batch of what a job trains on."""
    numbers = numpy.random.default_rng(0).integers(0, 256, 405, dtype=numpy.uint16)
    numpy.save(tmp_path / "tokens.npy", numbers)
    return tmp_path / "tokens.npy"


def wrote(folder: Path, config: dict[str, Any]) -> str:
    (folder / "config.json").write_text(json.dumps(config))
    return f"hf:{folder / 'config.json'}"


def program(folder: Path, config: dict[str, Any], /, **args: Any) -> LoadedProgram:
    args = {"context": CONTEXT} | args
    return load(Program(source=wrote(folder, config), args=args))


def job(trainers: Trainers, folder: Path, config: dict[str, Any], **more: Any) -> Job:
    args = {"context": CONTEXT, "tokens": "tokens.npy", "warmup": 0, "lr": 3e-3}
    more = {"batch_size": SAMPLES, "steps": STEPS} | more
    return Job(trainers, folder / "job", wrote(folder, config), layers=4, args=args, **more)


def plain_loop(model: Any, tokens: Path) -> Curve:
    """Training as with transformers alone: its model, its loss, whole batches."""
    numbers = torch.from_numpy(numpy.load(tokens).astype(numpy.int64))
    batch = torch.stack([
        numbers[i * CONTEXT : i * CONTEXT + CONTEXT + 1] for i in range(SAMPLES)
    ])  # fmt: skip
    decayed = [p for p in model.parameters() if p.ndim >= 2]
    others = [p for p in model.parameters() if p.ndim < 2]
    groups = [{"params": decayed, "weight_decay": 0.01}, {"params": others, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, lr=3e-3)
    curve: Curve = []
    for _ in range(STEPS):
        optimizer.zero_grad()
        loss = model(input_ids=batch, labels=batch).loss
        loss.backward()
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 1e9)
        optimizer.step()
        curve.append((loss.item(), norm.item()))
    return curve


def made(config: dict[str, Any], seed: int) -> Any:
    """The model as transformers makes it from the config."""
    given = {key: value for key, value in config.items() if key != "model_type"}
    auto: Any = transformers.AutoModelForCausalLM
    torch.manual_seed(seed)
    return auto.from_config(transformers.AutoConfig.for_model(config["model_type"], **given))


@pytest.mark.parametrize(
    "config",
    [LLAMA, {**LLAMA, "tie_word_embeddings": True}, GPT2],
    ids=["llama", "llama tied", "gpt2"],
)
def test_every_shape_trains_as_transformers_own_model_in_a_plain_loop(
    warmed: Trainers, tmp_path: Path, tokens: Path, config: dict[str, Any]
) -> None:
    ours = job(warmed, tmp_path, config)
    curves = [ours.curve(*shape) for shape in ((1, 1), (2, 1), (4, 1), (2, 2))]
    reference = plain_loop(made(config, seed=3), tokens)
    assert max(farthest(curve, reference) for curve in curves) < 1e-5
    assert curves[0] == curves[1] == curves[2]


def test_a_saved_model_is_trained_on_exported_and_loaded_again(
    warmed: Trainers, tmp_path: Path, tokens: Path
) -> None:
    pretrained = made({**LLAMA, "tie_word_embeddings": True}, seed=11)
    pretrained.save_pretrained(tmp_path / "pretrained")
    config = json.loads((tmp_path / "pretrained" / "config.json").read_text())
    ours = job(warmed, tmp_path, config, init_from=str(tmp_path / "pretrained"))
    assert farthest(ours.curve(2, 1), plain_loop(pretrained, tokens)) < 1e-5

    out = tmp_path / "exported"
    assert export.main([str(ours.root), "--to", "hf", "--out", str(out)]) == 0
    auto: Any = transformers.AutoModelForCausalLM
    again, info = auto.from_pretrained(out, output_loading_info=True)
    assert type(again) is type(pretrained)
    assert not any(info.values()), info
    assert again.lm_head.weight is again.model.embed_tokens.weight
    tokens_ = torch.arange(2 * CONTEXT).view(2, CONTEXT)
    with torch.no_grad():
        assert torch.equal(again(tokens_).logits, run(ours, tokens_))


def run(job: Job, tokens: torch.Tensor) -> torch.Tensor:
    """Our layers with the weights of the job's last checkpoint."""
    (folder,) = job.root.glob(f"step-0000{STEPS}.*")
    states = read_layers(folder, range(4))
    value = tokens
    for index, layer in enumerate(load(job.program).layers()):
        prefix = f"layers.{index}."
        saved = states[index].parameters | states[index].buffers
        layer.load_state_dict({n.removeprefix(prefix): v for n, v in saved.items()}, strict=False)
        value = layer(value)
    return value


@pytest.mark.parametrize(
    "config",
    [
        {**LLAMA, "model_type": "mistral", "sliding_window": 8},
        {**LLAMA, "model_type": "qwen3", "use_sliding_window": True, "sliding_window": 8,
         "max_window_layers": 1, "head_dim": 4},
        {**LLAMA, "model_type": "gemma3_text", "sliding_window": 8, "head_dim": 4},
    ],
    ids=["mistral", "qwen3", "gemma3"],
)  # fmt: skip
def test_other_models_with_a_plan_are_cut_too(tmp_path: Path, config: dict[str, Any]) -> None:
    cut = program(tmp_path, config).layers()  # compares itself with the model
    with torch.device("meta"):
        on_meta = program(tmp_path, config).layers()
    assert len(cut) == len(on_meta) == 4
    names = [[name for name, _ in layer.named_parameters()] for layer in on_meta]
    assert names == [[name for name, _ in layer.named_parameters()] for layer in cut]


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({**SIZE, "model_type": "gpt_neox"}, "GPTNeoXForCausalLM has no pipeline plan"),
        ({**LLAMA, "model_type": "granite", "logits_scaling": 2.0}, "gives other logits"),
        ({**LLAMA, "model_type": "gemma2", "head_dim": 4}, "gives other logits"),
        ({**SIZE, "model_type": "vit"}, "vit is no causal language model"),
        ({**SIZE, "model_type": "lama"}, "knows no model_type 'lama'"),
        (SIZE, "config.json is no config of transformers: it has no model_type"),
    ],
    ids=lambda value: value.get("model_type") if isinstance(value, dict) else "",
)
def test_what_cannot_be_cut_is_refused_in_words(
    tmp_path: Path, config: dict[str, Any], message: str
) -> None:
    with pytest.raises(ProgramError, match=message):
        program(tmp_path, config).layers()


@pytest.mark.parametrize(
    ("args", "message"),
    [
        ({"context": 64}, "context 64 is more than the model's 32"),
        ({"text": "/nowhere", "tokens": "tokens.npy"}, "give text or tokens, not both"),
    ],
)
def test_arguments_that_do_not_fit_the_model_are_refused(
    tmp_path: Path, args: dict[str, Any], message: str
) -> None:
    found = program(tmp_path, LLAMA, **args)
    with pytest.raises(ProgramError, match=message):
        found.layers()
        _ = found.dataset


def test_a_token_that_the_model_does_not_know_is_refused(tmp_path: Path, tokens: Path) -> None:
    with pytest.raises(ProgramError, match="there is a token 255, and the model knows 100"):
        _ = program(tmp_path, {**LLAMA, "vocab_size": 100}, tokens="tokens.npy").dataset


def test_without_transformers_it_is_said_what_to_install(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "transformers", None)
    with pytest.raises(ProgramError, match=r"needs the package transformers .* extra \[hf\]"):
        program(tmp_path, LLAMA)


def test_tokens_are_the_bytes_of_a_text_or_the_numbers_of_a_file(
    tmp_path: Path, tokens: Path
) -> None:
    text = tmp_path / "text"
    text.write_bytes(bytes(range(256)) * 2)
    first = program(tmp_path, LLAMA, text=str(text)).dataset[0]["tokens"]
    assert first.tolist() == list(range(CONTEXT + 1))
    numbers = numpy.load(tokens)
    dataset = program(tmp_path, LLAMA, tokens="tokens.npy").dataset
    assert dataset[1]["tokens"].tolist() == numbers[CONTEXT : 2 * CONTEXT + 1].tolist()
    numpy.save(tmp_path / "table.npy", numbers[:400].reshape(2, 200))
    with pytest.raises(ProgramError, match=r"must hold a row of whole numbers, not uint16"):
        _ = program(tmp_path, LLAMA, tokens="table.npy").dataset
