"""What this machine is. Asks the kernel and the driver's own tool, never torch."""

import os
import shutil
import socket
import subprocess
from importlib.metadata import version
from pathlib import Path
from typing import Literal

import psutil

from agent.wire import Beat, Device, Facts, RunningTrainer


class MachineError(Exception):
    """The machine is not what the operator said; a sentence."""


def facts(
    devices: tuple[Device, ...], data_host: str, store_port: int, torch_version: str
) -> Facts:
    """What is told at registration. The zone is unknown."""
    return Facts(
        hostname=socket.gethostname(),
        boot_id=boot_id(),
        pid=os.getpid(),
        devices=devices,
        cores=len(os.sched_getaffinity(0)),
        memory_bytes=psutil.virtual_memory().total,
        data_host=data_host,
        store_port=store_port,
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


def devices(wanted: Literal["auto", "cpu", "cuda"]) -> tuple[Device, ...]:
    """One device a trainer: every GPU, else the CPU as one. Raises MachineError."""
    gpus = () if wanted == "cpu" else _gpus()
    if wanted == "cuda" and not gpus:
        raise MachineError("--devices cuda: nvidia-smi shows no GPU here")
    return gpus or (Device(kind="cpu", index=0, memory_bytes=psutil.virtual_memory().total),)


def _gpus() -> tuple[Device, ...]:
    if not (tool := shutil.which("nvidia-smi")):
        return ()
    query = [tool, "--query-gpu=index,name,memory.total", "--format=csv,noheader,nounits"]
    try:
        listed = subprocess.run(query, capture_output=True, text=True, timeout=20, check=True)
    except (OSError, subprocess.SubprocessError):
        return ()
    rows = (line.split(", ") for line in listed.stdout.splitlines())
    return tuple(
        Device(kind="cuda", index=int(index), name=name, memory_bytes=int(mebibytes) << 20)
        for index, name, mebibytes in rows
    )
