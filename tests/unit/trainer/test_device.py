"""The CPU is where everything is already; other devices are refused with a sentence where they are
not.
"""

import pytest
import torch
from torch import nn

from trainer.device import CPU, Device, is_the_programs, moved
from trainer.program import ProgramError


def test_on_the_cpu_nothing_is_copied() -> None:
    tensor = torch.arange(3.0)
    assert CPU.place(tensor) is CPU.feed(tensor) is CPU.fetch([tensor])[0] is tensor


def test_rooms_and_places_are_like_what_they_are_for() -> None:
    tensors = [torch.zeros(2, 3), torch.zeros((), dtype=torch.int64), torch.zeros(0, 4)]
    rooms = [CPU.room(tensor.shape, tensor.dtype) for tensor in tensors]
    for made in (rooms, CPU.places(tensors)):
        assert [(t.shape, t.dtype) for t in made] == [(t.shape, t.dtype) for t in tensors]


def test_a_mark_is_reached_at_once_and_seconds_pass_between_two() -> None:
    began, ended = CPU.mark(), CPU.mark()
    assert CPU.is_reached(ended) and CPU.seconds(began, ended) >= 0


def test_the_seed_is_that_of_torchs_own_generator() -> None:
    device = Device.of("cpu")
    device.seed(7)
    first = torch.rand(2)
    device.seed(7)
    assert torch.equal(torch.rand(2), first)
    assert (device.kind, device.title, device.tolerance) == ("cpu", "", 0.0)


@pytest.mark.parametrize("name", ["tpu", "cuda", "cuda:-1", "cuda:x", "CPU"])
def test_a_device_of_an_unknown_kind_is_refused(name: str) -> None:
    with pytest.raises(ProgramError, match=f"device {name} is none: take cpu or cuda:N"):
        Device.of(name)


def test_a_torch_without_cuda_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.backends.cuda, "is_built", lambda: False)
    with pytest.raises(ProgramError, match=r"this torch, .*, is built without CUDA"):
        Device.of("cuda:0")


def test_a_gpu_that_is_not_there_is_refused_with_the_number_of_those_that_are(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(torch.backends.cuda, "is_built", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    with pytest.raises(ProgramError, match="device cuda:2 is not here: torch sees 2 CUDA devices"):
        Device.of("cuda:2")


def test_a_layer_that_is_moved_computes_elsewhere_and_comes_back_as_it_was() -> None:
    layer = nn.BatchNorm1d(3)
    layer.weight.grad = torch.full((3,), 5.0)
    before = [(t, t.data_ptr(), t.grad) for t in (*layer.parameters(), *layer.buffers())]
    with pytest.raises(ValueError, match="in the middle"), moved(layer, torch.clone):
        assert all(t.data_ptr() != at and t.grad is None for t, at, _ in before)
        layer(torch.randn(4, 3)).sum().backward()
        assert layer.weight.grad is not None and layer.running_mean is not None
        assert layer.running_mean.any()
        raise ValueError("in the middle")
    assert [(t, t.data_ptr(), t.grad) for t, _, _ in before] == before
    assert layer.weight.grad.tolist() == [5.0] * 3
    assert layer.running_mean is not None and not layer.running_mean.any()


@pytest.mark.parametrize(
    ("error", "blamed"),
    [
        (torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB."), True),
        (RuntimeError("CUDA error: device-side assert triggered"), True),
        (RuntimeError("CUDA error: uncorrectable ECC error encountered"), False),
        (ValueError("no"), False),
    ],
)
def test_memory_and_indexes_are_the_programs_fault_and_broken_hardware_is_not(
    error: Exception, blamed: bool
) -> None:
    assert is_the_programs(error) is blamed
