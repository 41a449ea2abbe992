"""The drill takes an agent with all that it started, and nobody else."""

import subprocess
import sys
from collections.abc import Iterator

import psutil
import pytest

from controller.cloud.local import kill_tree
from tests.fakes.waiting import until

pytestmark = pytest.mark.integration

# A process that starts a child which has a session of its own, and sleeps.
PARENT = """
import subprocess, sys, time
subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"], start_new_session=True)
print("started", flush=True)
time.sleep(60)
"""


@pytest.fixture(params=["agent.daemon", "somebody.else"])
def process(request: pytest.FixtureRequest) -> Iterator[tuple[str, psutil.Process]]:
    name: str = request.param
    with subprocess.Popen(
        [sys.executable, "-c", PARENT, name], stdout=subprocess.PIPE, text=True
    ) as started:
        assert started.stdout and started.stdout.readline() == "started\n"
        tree = [psutil.Process(started.pid), *psutil.Process(started.pid).children(recursive=True)]
        assert len(tree) == 2
        try:
            yield name, tree[0]
        finally:
            for each in tree:
                if each.is_running():
                    each.kill()


def test_an_agent_goes_with_its_descendants_and_a_stranger_stays(
    process: tuple[str, psutil.Process],
) -> None:
    name, parent = process
    children = parent.children(recursive=True)
    kill_tree(parent.pid)
    if name == "agent.daemon":
        until(lambda: not any(_lives(each) for each in (parent, *children)))
        kill_tree(parent.pid)  # gone already is no error
    else:
        assert all(_lives(each) for each in (parent, *children))


def _lives(process: psutil.Process) -> bool:
    return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
