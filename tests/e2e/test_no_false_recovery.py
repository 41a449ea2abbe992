"""What looks like a loss and is none costs nothing: a busy machine, a controller that stands still,
late beats, a proxy that is reloaded.
"""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from urllib.parse import urlsplit

import psutil
import pytest

from controller.core.states import JobState
from tests.e2e.scene import LEISURELY, Scene
from tests.fakes.proxy import Proxy

pytestmark = [pytest.mark.e2e, pytest.mark.soak, pytest.mark.timeout(1200)]

CONTROLLER_STANDS_STILL = 15.0
"""Three times ``lost_after``."""
LATEST_BEAT = 4.0
BURNERS = int(os.environ.get("SOAK_BURNERS", psutil.cpu_count() or 1))


@contextmanager
def burners() -> Iterator[None]:
    """One on each core."""
    burning = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(BURNERS)]
    try:
        yield
    finally:
        for process in burning:
            process.kill()
            process.wait()


def controller_of(scene: Scene) -> psutil.Process:
    port = urlsplit(scene.cluster.controller.place.url).port
    (found,) = [
        process
        for process in psutil.Process().children()
        if any(c.laddr.port == port for c in process.net_connections("tcp") if c.status == "LISTEN")
    ]
    return found


@pytest.mark.parametrize("seconds", [45, 600])
def test_nothing_is_recovered_where_nothing_is_lost(
    scene: Scene, seconds: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    port = urlsplit(scene.cluster.controller.place.url).port
    assert port
    with ExitStack() as stack:
        quick, slow = stack.enter_context(Proxy(port)), stack.enter_context(Proxy(port, seed=1))
        ways = {"vm-4": slow}
        way = lambda node: ways.get(node, quick).url  # noqa: E731
        monkeypatch.setattr(scene.cluster.fleet, "way", way)
        scene.add("vm-1", "vm-2", "vm-3", "vm-4")
        checkpoint = {"dir": str(scene.cluster.folder / "ckpt"), "every": "10s", "keep": 3}
        scene.submit(10_000_000, nodes="4", checkpoint=checkpoint, **LEISURELY)
        before = scene.wait_for_step(12)
        stack.enter_context(burners())
        slow.slowest = LATEST_BEAT
        ends_at, rounds = time.monotonic() + seconds, 0
        while time.monotonic() < ends_at:
            quick.reload()
            time.sleep(5)
            if rounds % 6 == 0:
                controller = controller_of(scene)
                controller.send_signal(signal.SIGSTOP)
                time.sleep(CONTROLLER_STANDS_STILL)
                controller.send_signal(signal.SIGCONT)
            time.sleep(10)
            rounds += 1
        slow.slowest = 0.0
        after = scene.wait_for(JobState.RUNNING)
        scene.wait_for_step(after.step + 3)
        assert scene.recoveries() == [] and after.generation == before.generation
        assert after.step > before.step + seconds / 20
        assert scene.ledger().samples_committed_once
        scene.clear()
