"""Which devices a machine has, by what nvidia-smi prints and by CUDA_VISIBLE_DEVICES."""

from pathlib import Path

import psutil
import pytest

from agent.machine import MachineError, devices
from agent.wire import Device

TWO = """\
0, GPU-5a1c0ff8-5b0a-1c2e-9c1d-0a0b0c0d0e0f, 16384, Tesla V100-SXM2-16GB
1, GPU-77e1d2c3-0000-4444-8888-ffffffffffff, 81559, NVIDIA H100 80GB HBM3
"""
"""Of two unlike GPUs, as driver 550 prints it."""


class Tool:
    """The only command there is: an nvidia-smi that prints ``text``."""

    def __init__(self, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self._path = folder / "nvidia-smi"
        monkeypatch.setenv("PATH", str(folder))

    def prints(self, text: str, code: int = 0) -> None:
        self._path.write_text(
            "#!/bin/sh\n"
            '[ "$1" = --query-gpu=index,uuid,memory.total,name ] || exit 2\n'
            '[ "$2" = --format=csv,noheader,nounits ] || exit 2\n'
            f"printf '%s' '{text}'\nexit {code}\n"
        )
        self._path.chmod(0o755)


@pytest.fixture
def tool(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Tool:
    return Tool(tmp_path, monkeypatch)


def cpu() -> tuple[Device, ...]:
    return (Device(kind="cpu", index=0, memory_bytes=psutil.virtual_memory().total),)


def test_every_gpu_is_a_device_with_its_memory(tool: Tool) -> None:
    tool.prints(TWO)
    assert devices("auto") == devices("cuda") == (
        Device(kind="cuda", index=0, name="Tesla V100-SXM2-16GB", memory_bytes=16384 << 20),
        Device(kind="cuda", index=1, name="NVIDIA H100 80GB HBM3", memory_bytes=81559 << 20),
    )  # fmt: skip


def test_a_machine_with_gpus_can_be_told_to_use_its_cpu(tool: Tool) -> None:
    tool.prints(TWO)
    assert devices("cpu") == cpu()


@pytest.mark.parametrize(
    ("visible", "names"),
    [
        ("0,1", ["V100", "H100"]),
        ("1", ["H100"]),
        ("1, 0", ["H100", "V100"]),
        ("GPU-77e1", ["H100"]),
        ("1,-1,0", ["H100"]),
        ("GPU-", []),
        ("7", []),
        ("", []),
    ],
)
def test_cuda_visible_devices_says_which_and_in_which_order(
    tool: Tool, visible: str, names: list[str]
) -> None:
    tool.prints(TWO)
    found = [device for device in devices("auto", visible) if device.kind == "cuda"]
    assert [device.index for device in found] == list(range(len(names)))
    assert all(name in device.name for name, device in zip(names, found, strict=True))


def test_a_gpu_without_memory_of_its_own_has_the_machines(tool: Tool) -> None:
    tool.prints("0, GPU-1, [N/A], NVIDIA GB10\n")
    (found,) = devices("auto")
    assert (found.name, found.memory_bytes) == ("NVIDIA GB10", psutil.virtual_memory().total)


def test_without_a_driver_that_answers_there_is_the_cpu(tool: Tool) -> None:
    assert devices("auto") == cpu()
    tool.prints("NVIDIA-SMI has failed because it could not communicate with the driver.\n", code=9)
    assert devices("auto") == cpu()
    tool.prints("No devices were found\n")
    assert devices("auto") == cpu()


def test_who_asks_for_a_gpu_where_none_is_is_told_so(tool: Tool) -> None:
    with pytest.raises(MachineError, match="nvidia-smi shows no GPU here"):
        devices("cuda")
    tool.prints(TWO)
    with pytest.raises(MachineError, match="no GPU here among CUDA_VISIBLE_DEVICES=5"):
        devices("cuda", "5")
