"""The daemon as a process, with a real zygote, against a small real controller."""

import contextlib
import gzip
import hashlib
import io
import json
import os
import signal
import socket
import subprocess
import sys
import tarfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from agent import wire
from agent.sweep import Sessions, started_at
from tests.fakes.controller import TOKEN, FakeController
from tests.fakes.waiting import until
from tests.fakes.zygotes import Mother, is_alive, run_spec
from tests.unit.trainer.test_checkpoints import part, written
from trainer.contract.progress import (
    ORDER,
    ExitCode,
    Failed,
    Forward,
    Halt,
    Phase,
    PhaseBegun,
    Save,
    SaveNow,
    StepCommitted,
    Stop,
)
from trainer.contract.spec import Saving

pytestmark = pytest.mark.integration


@contextlib.contextmanager
def agent(
    mother: Mother, controller: FakeController, folder: Path, *more: str, token: str = TOKEN
) -> Iterator[subprocess.Popen[str]]:
    """An agent of its own zygote; killed at the end if it still runs."""
    folder.mkdir(exist_ok=True)
    (folder / "token").write_text(token + "\n")
    ours, _ = mother.fork()
    with ours:
        process = subprocess.Popen(
            [sys.executable, "-I", "-u", "-m", "agent.daemon", "--controller", controller.url,
             "--token-file", str(folder / "token"), "--name", "vm-1",
             "--state-dir", str(folder / "state"), "--zygote-fd", str(ours.fileno()), *more],
            pass_fds=[ours.fileno()], stderr=subprocess.PIPE, text=True,
        )  # fmt: skip
    try:
        yield process
    finally:
        process.kill()
        process.communicate()


def start(generation: int = 1, *, job: str = "job_a", **args: Any) -> wire.Start:
    return wire.Start(spec=run_spec(job=job, generation=generation, **args))


def lines(controller: FakeController, generation: int) -> list[object]:
    return [
        said.line
        for said in controller.told(wire.Said)
        if isinstance(said, wire.Said) and said.generation == generation
    ]


def exits(controller: FakeController) -> list[tuple[int, int | None, int | None]]:
    """(generation, code, signal) in the order in which they were reported."""
    return [
        (body.generation, body.code, body.signal)
        for body in controller.told(wire.Exited)
        if isinstance(body, wire.Exited)
    ]


def done(controller: FakeController) -> dict[int, str | None]:
    """Order number -> error of each order that was answered."""
    return {
        body.number: body.error
        for body in controller.told(wire.OrderDone)
        if isinstance(body, wire.OrderDone)
    }


def is_running(controller: FakeController, generation: int, phase: str = Phase.BOOT) -> bool:
    last = controller.beats[-1].running if controller.beats else ()
    return [(r.generation, r.phase) for r in last] == [(generation, phase)]


def test_an_ordered_trainer_runs_once_and_all_it_says_is_reported(
    mother: Mother, controller: FakeController, tmp_path: Path
) -> None:
    with agent(mother, controller, tmp_path) as process:
        until(lambda: controller.beats)
        hello = controller.registered[0]
        assert (hello.node, hello.running, hello.facts.pid) == ("vm-1", (), process.pid)
        assert hello.facts.data_host == "127.0.0.1" and hello.facts.torch_version
        controller.loses_answers = 2
        controller.give(start(steps=3, print="hello\n", end={"code": 0}))
        until(lambda: exits(controller) and controller.text("job_a", 1))
        controller.give(start(job="job_b", end={"signal": signal.SIGSEGV}))
        until(lambda: len(exits(controller)) == 2)
    assert exits(controller) == [(1, 0, None), (1, None, signal.SIGSEGV)]
    assert done(controller) == {1: None, 2: None}
    said = [line for line in lines(controller, 1) if isinstance(line, StepCommitted)]
    assert [line.step for line in said] == [1, 2, 3]
    assert lines(controller, 1)[0] == PhaseBegun(phase=Phase.BOOT)
    assert controller.received > len(controller.reports), "nothing was ever sent again"
    assert controller.text("job_a", 1) == "hello\n"


def test_an_older_generation_is_dead_before_a_newer_one_is_started(
    mother: Mother, controller: FakeController, tmp_path: Path
) -> None:
    with agent(mother, controller, tmp_path):
        controller.give(start(1))
        until(lambda: is_running(controller, 1))
        controller.give(start(3), start(2))
        until(lambda: is_running(controller, 3))
        controller.give(wire.Stop(job="job_a", up_to_generation=3))
        until(lambda: 4 in done(controller))
    assert exits(controller) == [(1, None, 9), (3, None, 9)]
    order = [r.body for r in controller.reports if isinstance(r.body, wire.Exited | wire.OrderDone)]
    started = next(i for i, b in enumerate(order) if b == wire.OrderDone(number=2))
    assert isinstance(order[started - 1], wire.Exited), "started beside the older one"
    assert "void" in (done(controller)[3] or "")


def test_orders_are_passed_on_to_the_trainer_they_are_for_and_to_no_other(
    mother: Mother, controller: FakeController, tmp_path: Path
) -> None:
    about: dict[str, Any] = {"job": "job_a", "generation": 1}
    orders = (
        wire.DrainOrder(**about),
        wire.SaveNowOrder(**about),
        wire.HaltOrder(**about),
        wire.ForwardOrder(**about, rank=0, step=8, ballot=(0.1 + 0.2, None, 1e300)),
        wire.SaveLayers(**about, rank=0, layers=(1, 2)),
        wire.SaveLayers(**about, rank=1, layers=(3,)),
    )
    with agent(mother, controller, tmp_path):
        controller.give(start())
        until(lambda: is_running(controller, 1))
        controller.give(*orders)
        until(lambda: len(done(controller)) == 7 and controller.text("job_a", 1).count("\n") == 5)
    assert [n for n, error in done(controller).items() if error] == [7]
    heard = [ORDER.validate_json(line) for line in controller.text("job_a", 1).splitlines()]
    assert heard == [
        Stop(),
        SaveNow(),
        Halt(),
        Forward(step=8, ballot=(0.1 + 0.2, None, 1e300)),
        Save(layers=(1, 2)),
    ]


def test_stacks_are_dumped_and_peers_tried_on_order(
    mother: Mother, controller: FakeController, tmp_path: Path
) -> None:
    about: dict[str, Any] = {"job": "job_a", "generation": 1}
    there = wire.Peer(node="vm-2", host="127.0.0.1", port=controller.port)
    with agent(mother, controller, tmp_path), socket.socket() as bound:
        bound.bind(("127.0.0.1", 0))  # and does not listen
        gone = wire.Peer(node="vm-3", host="127.0.0.1", port=bound.getsockname()[1])
        controller.give(start())
        until(lambda: is_running(controller, 1))
        controller.give(wire.DumpOrder(**about), wire.Connect(**about, peers=(there, gone)))
        until(lambda: "all stacks" in controller.text("job_a", 1))
        until(lambda: controller.told(wire.Connected))
    assert done(controller) == {1: None, 2: None}
    assert controller.told(wire.Connected) == [
        wire.Connected(number=3, **about, unreached=("vm-3",))
    ]
    assert exits(controller) == []


def test_who_stands_still_is_told_to_stay_while_the_controller_is_away(
    mother: Mother, tmp_path: Path
) -> None:
    controller = FakeController()
    with agent(mother, controller, tmp_path):
        with controller.serving():
            controller.give(start())
            until(lambda: is_running(controller, 1))
            controller.give(wire.HaltOrder(job="job_a", generation=1))
            until(lambda: is_running(controller, 1, Phase.HALTED))
        written = tmp_path / "state" / "logs" / "job_a.g1.r0.log"
        until(lambda: written.read_text().count('"stay"') >= 2)
    controller.close()


def test_a_controller_that_goes_and_forgets_is_no_reason_to_stop(
    mother: Mother, tmp_path: Path
) -> None:
    controller = FakeController()
    with agent(mother, controller, tmp_path):
        with controller.serving():
            controller.give(start(steps=2))
            until(lambda: is_running(controller, 1, Phase.STEP))
            beats = len(controller.beats)
        controller.knows = False
        with controller.serving():
            until(lambda: len(controller.registered) == 2 and len(controller.beats) > beats)
            again = controller.registered[1]
            assert again.incarnation == controller.registered[0].incarnation
            assert [(r.generation, r.phase, r.step) for r in again.running] == [(1, "step", 2)]
            controller.give(wire.HaltOrder(job="job_a", generation=1))
            until(lambda: is_running(controller, 1, Phase.HALTED))
    assert exits(controller) == [] and done(controller) == {1: None, 2: None}
    controller.close()


def test_an_agent_that_is_cut_off_for_too_long_stops_what_runs(
    mother: Mother, tmp_path: Path
) -> None:
    controller = FakeController()
    controller.max_offline_seconds = 0.5
    with agent(mother, controller, tmp_path):
        with controller.serving():
            controller.give(start())
            until(lambda: is_running(controller, 1))
            trainer = recorded(tmp_path)
        until(lambda: not is_alive(trainer))
        with controller.serving():
            until(lambda: exits(controller) == [(1, None, 9)])
    controller.close()


def recorded(folder: Path) -> int:
    """The pid of the one trainer that the agent wrote down."""
    file = folder / "state/sessions.json"

    def sessions() -> list[int]:
        return list(map(int, json.loads(file.read_text())["sessions"])) if file.exists() else []

    until(lambda: sessions())
    (pid,) = sessions()
    return pid


def test_an_agent_that_is_killed_leaves_nothing_alive(
    mother: Mother, controller: FakeController, tmp_path: Path
) -> None:
    left = tmp_path / "left"
    with agent(mother, controller, tmp_path) as process:
        controller.give(start(leave_behind=str(left)))
        until(lambda: is_running(controller, 1))
        until(left.exists)
        family = [recorded(tmp_path), *map(int, left.read_text().split())]
        assert all(map(is_alive, family))
        process.kill()
        until(lambda: not any(map(is_alive, family)))


def test_a_store_that_cannot_be_reached_ends_a_trainer_as_if_it_had_tried_itself(
    mother: Mother, controller: FakeController, tmp_path: Path
) -> None:
    spec = run_spec().model_copy(
        update={
            "saving": Saving(root="nosuch://store/job_a"),
            "load_from": "nosuch://store/job_a/step-000010.g1",
            "load_seconds": 0.1,
        }
    )
    with agent(mother, controller, tmp_path):
        controller.give(wire.Start(spec=spec))
        until(lambda: exits(controller))
        controller.give(wire.Look(job="job_a", generation=1, root="nosuch://store/job_a"))
        until(lambda: controller.told(wire.Looked))
        controller.give(start(job="job_b", steps=1))  # and the agent goes on
        until(lambda: any(r.job == "job_b" for r in controller.beats[-1].running))
    assert exits(controller) == [(1, ExitCode.CHECKPOINT_UNREACHABLE, None)]
    (failed,) = lines(controller, 1)[:1]
    assert isinstance(failed, Failed) and "nosuch://store/job_a cannot be read" in failed.message
    (looked,) = controller.told(wire.Looked)
    assert isinstance(looked, wire.Looked) and "cannot be listed" in (looked.error or "")


def test_a_notice_is_reported_at_once_and_once(
    mother: Mother, controller: FakeController, tmp_path: Path
) -> None:
    told = tmp_path / "notice"
    with agent(mother, controller, tmp_path, "--notices", f"file:{told}"):
        until(lambda: len(controller.beats) > 1)
        assert controller.told(wire.Noticed) == []
        told.write_text('{"seconds": 20, "event": "e1"}')
        until(lambda: controller.told(wire.Noticed))
        beats = len(controller.beats)
        until(lambda: len(controller.beats) > beats + 5)
    (noticed,) = controller.told(wire.Noticed)
    assert isinstance(noticed, wire.Noticed)
    assert (noticed.notice, noticed.event) == ("preempt", "e1")
    assert noticed.seconds_left is not None and 15 < noticed.seconds_left <= 20


def test_an_agent_that_is_told_to_end_lets_its_trainers_leave(
    mother: Mother, controller: FakeController, tmp_path: Path
) -> None:
    with agent(mother, controller, tmp_path) as process:
        controller.give(start())
        until(lambda: is_running(controller, 1))
        process.terminate()
        assert process.wait(20) == 0
    assert exits(controller) == [(1, 20, None)]


def test_an_agent_whose_zygote_dies_reports_its_trainers_and_ends(
    mother: Mother, controller: FakeController, tmp_path: Path
) -> None:
    with agent(mother, controller, tmp_path) as process:
        controller.give(start())
        until(lambda: is_running(controller, 1))
        stat = Path(f"/proc/{recorded(tmp_path)}/stat").read_text()
        os.kill(int(stat.rpartition(")")[2].split()[1]), signal.SIGKILL)
        _, said = process.communicate(timeout=20)
    assert process.returncode == 1
    assert said.endswith("varuna-agent: the zygote died, and all trainers with it\n")
    assert "Traceback" not in said
    assert exits(controller) == [(1, None, 9)]


def test_a_flood_of_output_hurts_nobody(
    mother: Mother, controller: FakeController, tmp_path: Path
) -> None:
    with agent(mother, controller, tmp_path):
        controller.give(start(flood=200, end={"code": 0}))
        until(lambda: exits(controller) and controller.text("job_a", 1).endswith("x"), 30)
    text = controller.text("job_a", 1)
    assert len(text) < 10 << 20 and "bytes left out" in text


def packed(program: bytes) -> tuple[str, bytes]:
    """Digest and content of a bundle."""
    raw = io.BytesIO()
    with tarfile.open(fileobj=raw, mode="w") as tar:
        info = tarfile.TarInfo("prog.py")
        info.size = len(program)
        tar.addfile(info, io.BytesIO(program))
    content = gzip.compress(raw.getvalue())
    return "sha256:" + hashlib.sha256(content).hexdigest(), content


def test_a_bundle_is_fetched_checked_and_used(
    mother: Mother, controller: FakeController, tmp_path: Path
) -> None:
    good, content = packed(b"a = 1")
    bad = "sha256:" + "0" * 64
    controller.bundles = {good: content, bad: content}
    wanted = start(source=True, end={"code": 0})
    spec = wanted.spec.model_copy(
        update={"program": wanted.spec.program.model_copy(update={"source": "prog.py"})}
    )
    with agent(mother, controller, tmp_path):
        controller.give(wire.Start(spec=spec, bundle=bad))
        until(lambda: 1 in done(controller))
        controller.give(wire.Start(spec=spec, bundle=good))
        until(lambda: controller.text("job_a", 1))
    assert "hash" in (done(controller)[1] or "") and done(controller)[2] is None
    assert controller.text("job_a", 1) == "a = 1\n"


def test_a_launch_makes_old_bundles_go_but_none_that_something_works_with(
    mother: Mother, controller: FakeController, tmp_path: Path
) -> None:
    (one, content), (other, other_content) = packed(b"a = 1"), packed(b"b = 2")
    controller.bundles = {one: content, other: other_content}
    folder = tmp_path / "state" / "bundles"
    in_use, unused = folder / one.removeprefix("sha256:"), folder / ("0" * 64)
    unused.mkdir(parents=True)
    with agent(mother, controller, tmp_path):
        controller.give(wire.Start(spec=start().spec, bundle=one))
        until(lambda: done(controller).get(1, "not yet") is None)
        for path in (in_use, unused):
            os.utime(path, (0, 0))
        second = start(job="job_b", launched=True, steps=1).spec
        controller.give(wire.Start(spec=second, bundle=other))
        until(lambda: not unused.exists())
        assert {path.name for path in folder.glob("[0-9a-f]*")} == {
            digest.removeprefix("sha256:") for digest in (one, other)
        }


def test_the_checkpoint_folder_is_listed_and_changed_on_order(
    mother: Mother, controller: FakeController, tmp_path: Path
) -> None:
    root = written(tmp_path / "ckpt", part(1, 4), part(2, 4))
    about: dict[str, Any] = {"job": "job_a", "generation": 5, "root": str(root)}
    with agent(mother, controller, tmp_path):
        controller.give(
            wire.Delete(**about, folders=("step-000001.g4", "step-000000.g1")),
            wire.Delete(**about, folders=("../ckpt",)),
            wire.MarkDone(**about, step=2, folder="step-000002.g4"),
            wire.Look(**about),
        )
        until(lambda: controller.told(wire.Looked) and len(done(controller)) == 3)
    assert done(controller)[1] is None and done(controller)[3] is None
    assert "not the name" in (done(controller)[2] or "")
    assert sorted(os.listdir(root)) == ["done.json", "step-000002.g4"]
    (looked,) = controller.told(wire.Looked)
    assert isinstance(looked, wire.Looked)
    assert (looked.number, looked.newest_generation, looked.error) == (4, 4, None)


def test_two_agents_do_not_share_a_state_folder(
    mother: Mother, controller: FakeController, tmp_path: Path
) -> None:
    with agent(mother, controller, tmp_path) as first:
        until(lambda: controller.beats)
        with agent(mother, controller, tmp_path) as second:
            _, said = second.communicate(timeout=20)
        assert second.returncode == 1
        assert f"another agent (process {first.pid}) uses" in said and "Traceback" not in said
        assert first.poll() is None


def test_a_token_that_is_not_known_ends_the_agent_with_a_sentence(
    mother: Mother, controller: FakeController, tmp_path: Path
) -> None:
    with agent(mother, controller, tmp_path, token="wrong") as process:
        _, said = process.communicate(timeout=20)
    assert process.returncode == 1
    assert said == (
        "varuna-agent: the controller refuses this agent: 401: The token is not known.\n"
    )


def test_what_an_earlier_agent_left_is_swept_only_when_it_is_the_same_process(
    tmp_path: Path,
) -> None:
    def sleeper() -> subprocess.Popen[bytes]:
        return subprocess.Popen(["sleep", "60"], start_new_session=True)

    with sleeper() as ours, sleeper() as stranger:
        try:
            path = tmp_path / "sessions.json"
            running = {ours.pid: started_at(ours.pid), stranger.pid: 1}
            path.write_text(json.dumps({"boot_id": "this", "sessions": running}))
            assert Sessions(path, "another").sweep() == 0
            path.write_text(json.dumps({"boot_id": "this", "sessions": running}))
            assert Sessions(path, "this").sweep() == 1
            assert ours.wait(10) == -signal.SIGKILL
            assert is_alive(stranger.pid)
            assert Sessions(path, "this").sweep() == 0
        finally:
            stranger.kill()
