"""What this machine is. Asks the kernel and the driver's own tool, never torch."""

import os
import shutil
import socket
import subprocess
from collections.abc import Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Literal

import psutil

from agent.wire import Beat, Device, Facts, RunningTrainer

_SMI_SECONDS = 20
"""For nvidia-smi, which wakes the driver up first."""


class MachineError(Exception):
    """The machine is not what the operator said; a sentence."""


class DriverError(MachineError):
    """There is a tool to see GPUs, and it fails; another try may help."""


def facts(
    devices: tuple[Device, ...],
    data_host: str,
    store_port: int,
    torch_version: str,
    zone: str | None,
) -> Facts:
    """What is told at registration."""
    return Facts(
        hostname=socket.gethostname(),
        boot_id=boot_id(),
        pid=os.getpid(),
        devices=devices,
        cores=len(os.sched_getaffinity(0)),
        memory_bytes=psutil.virtual_memory().total,
        data_host=data_host,
        store_port=store_port,
        zone=zone,
        agent_version=version("varuna-spot"),
        torch_version=torch_version,
    )


def beat(incarnation: str, running: tuple[RunningTrainer, ...]) -> Beat:
    """What is told every second."""
    return Beat(
        incarnation=incarnation,
        running=running,
        load1=os.getloadavg()[0],
        memory_free_bytes=psutil.virtual_memory().available,
    )


def boot_id() -> str:
    """One for each start of this machine's kernel."""
    return Path("/proc/sys/kernel/random/boot_id").read_text().strip()


def data_host(controller: tuple[str, int]) -> str:
    """Our address on the way to the controller: peers reach us there. Raises MachineError."""
    host, port = controller
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_DGRAM)[
            0
        ]
        with socket.socket(family, kind, protocol) as probe:
            probe.connect(address)  # UDP: nothing is sent
            return str(probe.getsockname()[0])
    except OSError as error:
        raise MachineError(f"no way to the controller at {host}: {error.strerror}") from error


def devices(
    wanted: Literal["auto", "cpu", "cuda"], visible: str | None = None
) -> tuple[Device, ...]:
    """One device a trainer: every GPU, else the CPU as one. Raises MachineError, and DriverError
    where a machine with GPUs would else pass for one without.

    ``visible``: CUDA_VISIBLE_DEVICES, which trainers inherit. The GPUs are then those, in its
    order; their indexes are always what CUDA calls them in here.
    """
    gpus = () if wanted == "cpu" else tuple(_numbered(_visible(_gpus(), visible)))
    if wanted == "cuda" and not gpus:
        among = "" if visible is None else f" among CUDA_VISIBLE_DEVICES={visible}"
        raise MachineError(f"--devices cuda: nvidia-smi shows no GPU here{among}")
    return gpus or (Device(kind="cpu", index=0, memory_bytes=psutil.virtual_memory().total),)


@dataclass(frozen=True)
class _Gpu:
    index: str
    uuid: str
    name: str
    memory_bytes: int


def _gpus() -> list[_Gpu]:
    """All of the machine; none when nvidia-smi is not there, or says so. Raises DriverError."""
    if not (tool := shutil.which("nvidia-smi")):
        return []
    rows = (line.split(", ", 3) for line in _asked(tool).splitlines())
    return [
        _Gpu(index, uuid, name, _memory(mebibytes))
        for index, uuid, mebibytes, name in (row for row in rows if len(row) == 4)
    ]


def _asked(tool: str) -> str:
    """What nvidia-smi prints. Raises DriverError."""
    query = [tool, "--query-gpu=index,uuid,memory.total,name", "--format=csv,noheader,nounits"]
    try:
        asking = subprocess.Popen(query, stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
    except OSError as error:
        raise DriverError(_failing(f"cannot be run: {error.strerror}")) from error
    try:
        printed = asking.communicate(timeout=_SMI_SECONDS)[0].decode(errors="replace")
    except subprocess.TimeoutExpired:
        asking.kill()
        with suppress(subprocess.TimeoutExpired):  # a driver that is stuck may not let it die
            asking.wait(1)
        assert asking.stdout, "it is a pipe"
        asking.stdout.close()
        raise DriverError(_failing(f"has not answered for {_SMI_SECONDS} s")) from None
    if asking.returncode:
        words = " ".join(printed.split())[:200] or "no word"
        raise DriverError(_failing(f"ended with code {asking.returncode}: {words}"))
    return printed


def _failing(how: str) -> str:
    return f"nvidia-smi is here but {how} (--devices cpu trains on the CPU all the same)"


def _memory(mebibytes: str) -> int:
    """A GPU that shares the machine's memory has no number of its own."""
    return int(mebibytes) << 20 if mebibytes.isdecimal() else psutil.virtual_memory().total


def _visible(gpus: list[_Gpu], visible: str | None) -> Iterator[_Gpu]:
    """As CUDA reads it: indexes or beginnings of UUIDs, up to the first that is none."""
    if visible is None:
        yield from gpus
        return
    for wanted in map(str.strip, visible.split(",")):
        found = [g for g in gpus if g.index == wanted or (wanted and g.uuid.startswith(wanted))]
        if len(found) != 1:
            return
        yield found[0]


def _numbered(gpus: Iterable[_Gpu]) -> Iterator[Device]:
    for index, gpu in enumerate(gpus):
        yield Device(kind="cuda", index=index, name=gpu.name, memory_bytes=gpu.memory_bytes)
