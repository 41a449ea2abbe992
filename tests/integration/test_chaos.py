"""How `varuna chaos` sees what is there: files that change, trainers that live on, what is left."""

import contextlib
import os
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from controller.chaos import processes, watch
from controller.chaos.links import Links
from controller.chaos.watch import Watch
from controller.client.rest import Controller
from tests.fakes.waiting import until

pytestmark = pytest.mark.integration


def no_controller() -> Controller:
    raise AssertionError("nobody was to be asked")


@pytest.fixture
def watcher(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Watch:
    """Of a job whose controller is away; it looks whenever it is told to."""
    monkeypatch.setattr(watch, "_LOOK_SECONDS", 0.0)
    monkeypatch.setattr(watch, "_LIST_SECONDS", 0.0)
    root = tmp_path / "job_1"
    (root / "step-000010.g2").mkdir(parents=True)
    return Watch("job_1", root, tmp_path / "aside", no_controller, time.monotonic())


def look(watcher: Watch) -> list[str]:
    watcher.look(set(), controller_is_up=False)
    return watcher.complaints


# ---- the folder


def test_files_that_appear_and_stay_are_nothing_to_complain_of(watcher: Watch) -> None:
    folder = watcher.root / "step-000010.g2"
    (folder / "layer-000.r0.safetensors").write_bytes(b"a")
    assert look(watcher) == []
    (folder / "part-0.json").write_bytes(b"{}")
    assert look(watcher) == look(watcher) == []
    assert watcher.looks == 3


def test_a_file_that_is_written_twice_is_seen(watcher: Watch) -> None:
    file = watcher.root / "step-000010.g2" / "part-0.json"
    file.write_bytes(b"{}")
    look(watcher)
    again = file.with_name("again")
    again.write_bytes(b"{}")
    again.rename(file)
    assert look(watcher) == ["step-000010.g2/part-0.json was written twice"]


def test_what_is_not_whole_yet_may_change(watcher: Watch) -> None:
    file = watcher.root / "step-000010.g2" / ".part-0.json.17.tmp"
    file.write_bytes(b"{}")
    look(watcher)
    file.write_bytes(b"{}{}")
    assert look(watcher) == []


def test_a_part_of_an_older_generation_long_after_a_newer_began_is_seen(watcher: Watch) -> None:
    marker = watcher.root / "gen-3.json"
    marker.write_bytes(b"{}")
    os.utime(marker, (0, time.time() - 60))
    look(watcher)
    (watcher.root / "step-000010.g2" / "part-0.json").write_bytes(b"{}")
    (complaint,) = look(watcher)
    assert complaint.startswith("step-000010.g2/part-0.json was written 60 s after a newer")


# ---- processes


@pytest.fixture
def trainer(tmp_path: Path) -> Iterator[subprocess.Popen[bytes]]:
    """What looks like rank 1 of generation 3 of job_1 on node-2, and listens on a port."""
    logs = tmp_path / "agents" / "node-2" / "logs"
    logs.mkdir(parents=True)
    code = "import socket; s = socket.create_server(('127.0.0.1', 0)); input()"
    with (logs / "job_1.g3.r1.log").open("wb") as log:
        child = subprocess.Popen(
            [sys.executable, "-I", "-c", code],
            stdin=subprocess.PIPE, stdout=log, env={"CHAOS_RUN": "17"},
        )  # fmt: skip
    yield child
    child.kill()
    child.communicate()


def test_a_trainer_is_found_by_its_log(trainer: subprocess.Popen[bytes]) -> None:
    until(lambda: processes.trainers("job_1"))
    (found,) = processes.trainers("job_1")
    assert (found.pid, found.node, found.generation, found.rank) == (trainer.pid, "node-2", 3, 1)
    assert not processes.trainers("job_2")


def test_what_was_started_from_here_is_found_with_its_ports(
    trainer: subprocess.Popen[bytes],
) -> None:
    until(lambda: processes.ports_of(processes.marked("CHAOS_RUN=17")))
    (found,) = processes.marked("CHAOS_RUN=17")
    assert found.pid == trainer.pid
    assert processes.ports_of([found]) <= processes.listening()
    assert not processes.marked("CHAOS_RUN=1")
    trainer.kill()
    trainer.wait()
    assert not processes.marked("CHAOS_RUN=17")


def test_an_old_trainer_beside_a_new_generation_is_seen_when_its_time_is_over(
    watcher: Watch, trainer: subprocess.Popen[bytes], monkeypatch: pytest.MonkeyPatch
) -> None:
    until(lambda: processes.trainers("job_1"))
    watcher._running[4] = time.monotonic()
    assert look(watcher) == []
    monkeypatch.setattr(watch, "GRACE_SECONDS", 0.0)
    watcher.look({"node-2"}, controller_is_up=False)
    assert watcher.complaints == [], "its node is troubled: it cannot be killed"
    (complaint,) = look(watcher)
    assert "rank 1 of generation 3 still lives on node-2" in complaint


# ---- links


def answer(server: socket.socket) -> None:
    """Echo what each connection sends but `end`, one after the other, until the server is gone."""
    with contextlib.suppress(OSError):
        while True:
            connection, _ = server.accept()
            with connection:
                while (piece := connection.recv(100)) not in (b"", b"end"):
                    connection.sendall(piece)


@pytest.fixture
def server() -> Iterator[socket.socket]:
    with socket.create_server(("127.0.0.1", 0)) as server:
        thread = threading.Thread(target=answer, args=(server,))
        thread.start()
        yield server
        server.shutdown(socket.SHUT_RDWR)
    thread.join(10)


def connect(links: Links, node: str) -> socket.socket:
    port = int(links.url(node).rpartition(":")[2])
    near = socket.create_connection(("127.0.0.1", port))
    near.settimeout(10)
    return near


def test_a_cut_link_carries_nothing_and_closes_nothing_until_it_is_mended(
    server: socket.socket,
) -> None:
    with Links(lambda: server.getsockname()[1]) as links, connect(links, "node-1") as near:
        near.sendall(b"one")
        assert near.recv(100) == b"one"
        links.cut("node-1")
        near.sendall(b"two")
        near.settimeout(0.2)
        with pytest.raises(TimeoutError):
            near.recv(100)
        links.mend("node-1")
        near.settimeout(10)
        assert near.recv(100) == b"two"


def test_the_end_of_the_far_side_is_heard_here(server: socket.socket) -> None:
    with Links(lambda: server.getsockname()[1]) as links, connect(links, "node-1") as near:
        near.sendall(b"end")
        assert near.recv(100) == b""


def test_where_no_controller_listens_a_link_ends_at_once() -> None:
    with socket.create_server(("127.0.0.1", 0)) as gone:
        port = gone.getsockname()[1]
    with Links(lambda: port) as links, connect(links, "node-1") as near:
        assert near.recv(100) == b""


# ---- the disk


FILL_AND_FREE = """
import os, sys
from pathlib import Path
import psutil
from controller.chaos.disk import Disk

with Disk(Path(sys.argv[1])) as disk:
    if not disk.why_not:
        disk.fill()
        full = psutil.disk_usage(str(disk.folder)).free
        disk.free()
        print(full, psutil.disk_usage(str(disk.folder)).free)
print(disk.why_not or os.path.ismount(disk.folder))
"""


@pytest.mark.skipif(os.geteuid() != 0, reason="mounts a file system")
def test_a_disk_is_filled_to_the_last_byte_and_given_back(tmp_path: Path) -> None:
    """In a process of its own: who makes a disk sees other mounts than all others from then on."""
    command = [sys.executable, "-I", "-c", FILL_AND_FREE, str(tmp_path / "disk")]
    said = subprocess.run(command, check=True, capture_output=True, text=True).stdout.split()
    if len(said) != 3:
        pytest.skip(" ".join(said))
    full, free, is_mounted = said
    assert (full, is_mounted) == ("0", "False")
    assert int(free) > 0
