"""Saving a model in the parts of one shape and loading it as any other, bit for bit; damage."""

import errno
import io
import os
import resource
import signal
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch
from torch import Tensor, nn

from trainer import checkpoint
from trainer.checkpoint import (
    DamagedError,
    SaveError,
    StaleError,
    UnreachableError,
    read_header,
    read_layers,
    write_marker,
    write_part,
)
from trainer.contract.checkpoints import DataPosition, PartHeader
from trainer.contract.listing import complete, scan
from trainer.contract.spec import Shape
from trainer.contract.topology import Seat, even_cuts
from trainer.layerfile import LayerState, decode, encode
from trainer.program import ProgramError

pytestmark = pytest.mark.integration

LAYERS = 7
ONE = Shape(depth=1, replicas=1, micro_batch=4)


def trained_states() -> dict[int, LayerState]:
    """Seven layers after two AdamW steps; the last borrows the first one's weight."""
    torch.manual_seed(0)
    modules = [nn.Linear(6, 6) for _ in range(LAYERS)]
    modules[-1].weight = modules[0].weight
    owned = {p for module in modules for p in module.parameters()}
    optimizer = torch.optim.AdamW(owned, lr=0.1)
    for _ in range(2):
        x = torch.randn(4, 6)
        for module in modules:
            x = module(x).tanh()
        torch.autograd.backward(x.sum())
        optimizer.step()
    states = {}
    for index, module in enumerate(modules):
        named = {f"layers.{index}.{name}": p for name, p in module.named_parameters()}
        states[index] = LayerState(
            parameters={name: p.detach() for name, p in named.items()},
            buffers={f"layers.{index}.table": torch.arange(index)},
            optimizer={name: dict(optimizer.state[p]) for name, p in named.items()},
        )
    states[LAYERS - 1].aliases["layers.6.weight"] = "layers.0.weight"
    return states


def header(rank: int = 0, shape: Shape = ONE) -> PartHeader:
    return PartHeader(
        step=12,
        generation=3,
        rank=rank,
        shape=shape,
        layer_count=LAYERS,
        data=DataPosition(batch_size=8, seed=0, samples=100),
    )


FOLDER = header().folder


def save(root: Path, states: Mapping[int, LayerState], depth: int = 1, replicas: int = 1) -> Path:
    """Every rank of the shape writes the layers whose index is its replica, mod the replicas."""
    shape = Shape(depth=depth, replicas=replicas, micro_batch=4)
    cuts = even_cuts(LAYERS, depth)
    for rank in range(shape.world):
        seat = Seat.of(rank, shape)
        stage = range(cuts[seat.stage], cuts[seat.stage + 1])
        mine = {i: states[i] for i in stage if i % replicas == seat.replica}
        write_part(root, FOLDER, header(rank, shape), mine)
    return root / FOLDER


def assert_same(found: LayerState, expected: LayerState) -> None:
    assert found.aliases == expected.aliases
    for name in ("parameters", "buffers", "optimizer"):
        assert_equal(getattr(found, name), getattr(expected, name))


def assert_equal(found: Any, expected: Any) -> None:
    if isinstance(expected, Mapping):
        assert found.keys() == expected.keys()
        for key in expected:
            assert_equal(found[key], expected[key])
    elif isinstance(expected, Tensor):
        assert found.dtype == expected.dtype
        assert torch.equal(found, expected)
    else:
        assert (type(found), found) == (type(expected), expected)


# --- Any shape into any other


@pytest.mark.parametrize(("depth", "replicas"), [(1, 1), (7, 1), (1, 3), (3, 2), (2, 8)])
def test_a_model_saved_in_one_shape_loads_in_any_other_bit_for_bit(
    tmp_path: Path, depth: int, replicas: int
) -> None:
    states = trained_states()
    folder = save(tmp_path, states, depth, replicas)
    assert [c.folder for c in complete(scan(tmp_path))] == [FOLDER]
    for other in range(1, LAYERS + 1):
        cuts = even_cuts(LAYERS, other)
        for begin, end in pairwise(cuts):
            found = read_layers(folder, range(begin, end))
            assert list(found) == list(range(begin, end))
            for layer, state in found.items():
                assert_same(state, states[layer])


def test_a_tied_weight_is_stored_once_and_loaded_by_each_who_holds_it(tmp_path: Path) -> None:
    folder = save(tmp_path, trained_states(), depth=2)
    file = safetensors.torch.load_file(next(folder.glob("layer-006.*")))
    assert [name for name in file if "weight" in name] == []
    alone = read_layers(folder, [6])[6]
    assert alone.parameters["layers.6.weight"].shape == (6, 6)
    assert set(alone.optimizer["layers.6.weight"]) == {"step", "exp_avg", "exp_avg_sq"}
    both = read_layers(folder, [0, 6])
    tied = both[6].parameters["layers.6.weight"]
    assert tied is both[0].parameters["layers.0.weight"]


def test_what_was_read_can_be_written_again_to_the_same_bytes(tmp_path: Path) -> None:
    folder = save(tmp_path / "a", trained_states())
    again = save(tmp_path / "b", read_layers(folder, range(LAYERS)))
    for file in folder.glob("layer-*"):
        assert (again / file.name).read_bytes() == file.read_bytes()


def test_the_header_says_where_the_checkpoint_stands(tmp_path: Path) -> None:
    found = read_header(save(tmp_path, trained_states(), depth=2, replicas=2))
    assert (found.step, found.generation, found.layer_count) == (12, 3, LAYERS)
    assert found.data == header().data


# --- The layer's file


def decoded(data: bytes) -> LayerState:
    stream = io.BytesIO(data)

    def fill(room: memoryview) -> None:
        assert stream.readinto(room) == len(room)

    return decode(fill, len(data))


@pytest.mark.parametrize("flipped", range(8 + 8))
def test_a_header_that_is_none_of_ours_is_refused_before_memory_is_made_for_it(
    flipped: int,
) -> None:
    data = bytearray(b"".join(encode(LayerState({"w": torch.ones(2)}))))
    data[flipped] ^= 0xFF
    with pytest.raises(ValueError):
        decoded(bytes(data))


@pytest.mark.parametrize(
    ("old", "new"),
    [
        (b'"shape": [2]', b'"shape": [9]'),
        (b'"data_offsets": [0, 8]', b'"data_offsets": [0, 9]'),
        (b'"data_offsets": [0, 8]', b'"data_offsets": [4, 8]'),
        (b'"dtype": "F32"', b'"dtype": "F99"'),
        (b'"__metadata__"', b'"__netadata__"'),
    ],
)
def test_a_header_that_contradicts_the_file_is_refused(old: bytes, new: bytes) -> None:
    data = b"".join(encode(LayerState({"w": torch.ones(2)})))
    assert old in data
    with pytest.raises(ValueError):
        decoded(data.replace(old, new))


def test_each_tensor_that_is_read_has_memory_of_its_own_as_aligned_as_torch_makes_it(
    tmp_path: Path,
) -> None:
    folder = save(tmp_path, trained_states())
    for state in read_layers(folder, range(len(trained_states()))).values():
        for tensor in state.parameters.values():
            assert tensor.data_ptr() % 64 == 0
            assert tensor.untyped_storage().nbytes() == tensor.nbytes


@pytest.mark.parametrize(
    "tensor",
    [
        torch.tensor(3.5),
        torch.empty(0, 3),
        torch.tensor([True, False, True]),
        torch.arange(5, dtype=torch.int64),
        torch.randn(3, 5).t(),
        torch.ones(1).expand(4),
        torch.tensor([1.5, -0.0, float("nan")], dtype=torch.bfloat16),
        torch.tensor([1.5, float("inf")], dtype=torch.float16),
        torch.tensor([1.25], dtype=torch.float64),
        torch.tensor([255], dtype=torch.uint8),
    ],
)
def test_any_tensor_survives_and_the_library_reads_it_too(tmp_path: Path, tensor: Tensor) -> None:
    odd = torch.tensor([1], dtype=torch.uint8)  # what would push the next one off its alignment
    data = b"".join(encode(LayerState({"w": tensor}, {"odd": odd})))
    ours = decoded(data).parameters["w"]
    library = safetensors.torch.load(data)["parameters/w"]
    for found in (ours, library):
        assert (found.dtype, found.shape) == (tensor.dtype, tensor.shape)
        assert torch.equal(found.nan_to_num(7.0), tensor.nan_to_num(7.0))


def test_optimizer_state_that_is_no_tensor_survives() -> None:
    moments = {"step": 7, "beta": 0.1, "started": True, "nothing": None, "way": "up"}
    state = LayerState({"w": torch.ones(2)}, {}, {"w": {**moments, "m": torch.ones(2)}})
    found = decoded(b"".join(encode(state))).optimizer["w"]
    assert {key: found[key] for key in moments} == moments


def test_optimizer_state_that_no_file_can_hold_is_refused_in_words(tmp_path: Path) -> None:
    state = LayerState({"w": torch.ones(2)}, {}, {"w": {"history": []}})  # type: ignore[dict-item]
    with pytest.raises(ProgramError, match="the optimizer keeps a list as 'history' of w"):
        write_part(tmp_path, FOLDER, header(), {0: state})
    assert os.listdir(tmp_path / FOLDER) == []


# --- Damage


def test_a_flipped_byte_is_named(tmp_path: Path) -> None:
    folder = save(tmp_path, trained_states(), depth=7)
    victim = folder / "layer-003.r3.safetensors"
    data = bytearray(victim.read_bytes())
    data[-1] ^= 1
    victim.write_bytes(data)
    with pytest.raises(DamagedError, match="another content than was written") as error:
        read_layers(folder, range(LAYERS))
    assert error.value.file == str(victim)
    read_layers(folder, [2, 4])  # the others are as good as ever


def test_a_flipped_byte_in_a_part_file_is_named(tmp_path: Path) -> None:
    folder = save(tmp_path, trained_states())
    part = folder / "part-0.json"
    part.write_text(part.read_text().replace('"seed": 0', '"seed": 1'))
    for read in (read_header, lambda path: read_layers(path, [0])):
        with pytest.raises(DamagedError) as error:
            read(folder)
        assert error.value.file == str(part)


def test_a_truncated_file_is_named(tmp_path: Path) -> None:
    folder = save(tmp_path, trained_states())
    os.truncate(folder / "layer-003.r0.safetensors", 100)
    with pytest.raises(DamagedError, match="has 100 bytes instead of") as error:
        read_layers(folder, range(LAYERS))
    assert error.value.file == str(folder / "layer-003.r0.safetensors")


def test_a_missing_file_folder_or_part_is_unreachable_not_damaged(tmp_path: Path) -> None:
    folder = save(tmp_path, trained_states(), depth=2)
    (folder / "part-1.json").unlink()
    with pytest.raises(UnreachableError, match="has no part that holds layer 5"):
        read_layers(folder, [5])
    (folder / "layer-000.r0.safetensors").unlink()
    with pytest.raises(UnreachableError, match=r"layer-000\.r0\.safetensors is missing"):
        read_layers(folder, [0])
    with pytest.raises(UnreachableError, match="has no part"):
        read_header(tmp_path / "step-000099.g1")


# --- Saving that fails


@contextmanager
def room_for(num_bytes: int) -> Iterator[None]:
    """A file past this size fails with EFBIG, as a full disk fails with ENOSPC."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    ignored = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (num_bytes, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
        signal.signal(signal.SIGXFSZ, ignored)


def test_a_disk_that_takes_no_more_fails_the_save_and_leaves_nothing(tmp_path: Path) -> None:
    states = trained_states()
    save(tmp_path / "good", states)
    big = LayerState({"layers.1.w": torch.zeros(100_000)})
    with room_for(50_000), pytest.raises(SaveError, match="could not be written: File too large"):
        write_part(tmp_path, FOLDER, header(), {0: states[0], 1: big})
    assert os.listdir(tmp_path / FOLDER) == []
    write_part(tmp_path, FOLDER, header(), {0: states[0]})  # and there is room again


@pytest.mark.parametrize(
    "broken", ["trainer.checkpoint.write_json", "trainer.contract.durable.sync_folder"]
)
def test_a_disk_that_fails_at_the_part_leaves_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, broken: str
) -> None:
    (tmp_path / FOLDER).mkdir()

    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(broken, full)
    with pytest.raises(SaveError, match="No space left on device"):
        save(tmp_path, trained_states())
    assert os.listdir(tmp_path / FOLDER) == []


def test_a_part_is_never_written_twice(tmp_path: Path) -> None:
    states = trained_states()
    folder = save(tmp_path, states)
    before = (folder / "part-0.json").read_bytes()
    with pytest.raises(SaveError, match="parts never change"):
        save(tmp_path, states)
    assert (folder / "part-0.json").read_bytes() == before


def test_a_writer_that_was_stopped_on_the_way_publishes_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It wakes up when its layers are written, and a newer generation has begun meanwhile."""

    def long_after(folder: Path) -> None:
        write_marker(tmp_path, 4, None)

    monkeypatch.setattr(checkpoint, "sync_folder", long_after)
    with pytest.raises(StaleError, match="generation 4 has begun"):
        save(tmp_path, trained_states())
    assert list((tmp_path / FOLDER).iterdir()) == []


def test_a_folder_that_was_deleted_by_hand_gets_its_generations_marker_again(
    tmp_path: Path,
) -> None:
    save(tmp_path, trained_states())
    (marker,) = scan(tmp_path).markers
    assert marker.generation == 3
    assert marker.resumed_from == read_header(tmp_path / FOLDER).resumed_from


def test_a_root_that_is_no_folder_fails_the_save(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(SaveError, match="Not a directory"):
        save(tmp_path / "file", trained_states())
    with pytest.raises(SaveError, match=r"gen-3\.json could not be written"):
        write_marker(tmp_path / "file", 3, None)
