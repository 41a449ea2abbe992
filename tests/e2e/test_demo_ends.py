"""However a demo ends, nothing that it started stays alive."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import psutil
import pytest

from tests.fakes.waiting import until

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(240)]

VARUNA = str(Path(sys.executable).with_name("varuna"))


@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGINT], ids=["killed", "ctrl-c"])
def test_nothing_of_a_demo_outlives_it(how: signal.Signals, tmp_path: Path) -> None:
    environment = {k: v for k, v in os.environ.items() if not k.startswith("VARUNA_")}
    environment["XDG_CONFIG_HOME"] = str(tmp_path / "config")
    command = [VARUNA, "demo", "--nodes", "2", "--data", str(tmp_path / "demo"), "--no-browser"]
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env=environment
    ) as demo:
        try:
            _wait_for("Next", demo)
            family = psutil.Process(demo.pid).children(recursive=True)
            assert len(family) >= 1 + 1 + 2 * 3, "controller, mother, agents, zygotes, trainers"
        finally:
            demo.send_signal(how)
            assert demo.stdout
            said = demo.stdout.read()
    until(lambda: not any(_lives(process) for process in family))
    if how is signal.SIGINT:
        assert demo.returncode == 0
        assert f"Stopped. Data kept in {tmp_path / 'demo'}." in said


def _wait_for(word: str, demo: subprocess.Popen[str]) -> None:
    """The lines up to the one with ``word``; all of them in the error when it does not come."""
    assert demo.stdout
    lines = []
    for line in demo.stdout:
        lines.append(line)
        if word in line:
            return
    raise AssertionError("".join(lines))


def _lives(process: psutil.Process) -> bool:
    return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
