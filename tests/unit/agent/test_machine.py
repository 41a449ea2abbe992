"""Which devices a machine has, by what nvidia-smi prints and by CUDA_VISIBLE_DEVICES."""

import asyncio
from pathlib import Path
from typing import Literal

import psutil
import pytest

from agent.daemon import _devices
from agent.machine import DriverError, MachineError, devices
from agent.settings import Settings
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

    def hangs(self) -> None:
        self._path.write_text("#!/bin/sh\nwhile :; do :; done\n")
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


def test_where_nobody_knows_of_a_gpu_there_is_the_cpu(tool: Tool) -> None:
    assert devices("auto") == cpu()
    tool.prints("No devices were found\n")
    assert devices("auto") == cpu()


FAILED = "NVIDIA-SMI has failed because it could not communicate with the driver.\n"


@pytest.mark.parametrize("wanted", ["auto", "cuda"])
def test_a_machine_whose_driver_fails_is_not_taken_for_one_without_gpus(
    tool: Tool, wanted: Literal["auto", "cuda"]
) -> None:
    tool.prints(FAILED, code=9)
    with pytest.raises(DriverError) as told:
        devices(wanted)
    assert str(told.value) == (
        f"nvidia-smi is here but ended with code 9: {FAILED.strip()}"
        " (--devices cpu trains on the CPU all the same)"
    )
    assert devices("cpu") == cpu()


def test_a_tool_that_never_answers_is_a_driver_that_fails(
    tool: Tool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("agent.machine._SMI_SECONDS", 0.1)
    tool.hangs()
    with pytest.raises(DriverError, match=r"has not answered for 0\.1 s"):
        devices("auto")


def told(**given: object) -> Settings:
    given = {"token_file": Path("t"), "controller": "http://127.0.0.1:1", **given}
    return Settings.model_validate(given)


def test_a_driver_that_is_just_coming_up_is_asked_again(
    tool: Tool, monkeypatch: pytest.MonkeyPatch
) -> None:
    tool.prints(FAILED, code=9)

    async def pause(_: float) -> None:
        tool.prints(TWO)

    monkeypatch.setattr("agent.daemon.asyncio.sleep", pause)
    assert [device.kind for device in asyncio.run(_devices(told()))] == ["cuda", "cuda"]


def test_an_agent_does_not_begin_on_a_machine_whose_driver_keeps_failing(
    tool: Tool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("agent.daemon._DRIVER_PAUSES", (0.0, 0.0))
    tool.prints(FAILED, code=9)
    with pytest.raises(DriverError):
        asyncio.run(_devices(told()))
    assert asyncio.run(_devices(told(devices="cpu"))) == cpu()


def test_who_asks_for_a_gpu_where_none_is_is_told_so(tool: Tool) -> None:
    with pytest.raises(MachineError, match="nvidia-smi shows no GPU here"):
        devices("cuda")
    tool.prints(TWO)
    with pytest.raises(MachineError, match="no GPU here among CUDA_VISIBLE_DEVICES=5"):
        devices("cuda", "5")
