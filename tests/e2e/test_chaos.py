"""`varuna chaos` as a person runs it."""

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from controller.chaos.demo import agents_here
from controller.client.cluster import WANTED, Cluster
from controller.client.rest import CliError
from tests.e2e.scene import Scene, until

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(300)]
VARUNA = str(Path(sys.executable).with_name("varuna"))


def chaos(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [VARUNA, "chaos", *arguments], capture_output=True, text=True, check=False,
        env={k: v for k, v in os.environ.items() if not k.startswith("VARUNA_")},
    )  # fmt: skip


@pytest.mark.soak
@pytest.mark.timeout(900)
def test_forty_seconds_of_trouble_break_no_promise() -> None:
    ran = chaos("--for", "40s", "--seed", "7", "--json")
    assert ran.returncode == 0, ran.stdout + ran.stderr[-3000:]
    report = json.loads(ran.stdout)
    assert report["holds"] and len(report["invariants"]) == 8
    assert report["recoveries"] > 0 and 0 < report["goodput"] <= 1


def test_the_list_of_a_seed_is_the_same_each_time_and_nothing_is_done() -> None:
    first, again = (chaos("--for", "60s", "--seed", "3", "--list") for _ in range(2))
    assert first.stdout == again.stdout and "kill node-" in first.stdout
    assert first.returncode == again.returncode == 0


def test_what_cannot_be_is_refused_in_a_sentence() -> None:
    for wrong, sentence in (
        (["--for", "soon"], "--for: `soon` is not a duration"),
        (["--for", "1s"], "--for 1s is too short"),
        (["--nodes", "2", "--min", "3"], "--min 3 is more than --nodes 2"),
    ):
        ran = chaos(*wrong)
        assert ran.returncode == 2 and sentence in ran.stderr


def test_a_demo_brings_back_its_controller_and_the_nodes_that_are_wanted(scene: Scene) -> None:
    cluster = scene.cluster
    scene.add("vm-1", "vm-2")
    scene.submit(100_000, nodes="2")
    scene.wait_for_step(3)
    first = _pid(cluster)
    os.kill(first, signal.SIGKILL)
    scene.kill("vm-2")
    (cluster.folder / WANTED / "vm-2").touch()

    def is_back() -> bool:
        cluster.keep_up()
        return _pid(cluster) != first and not _wanted(cluster)

    until(is_back, "another controller and the node")
    recovery = scene.wait_for_recovery(1)
    scene.wait_for_step(recovery.at_step + 3)
    assert scene.ledger().samples_committed_once


def _pid(cluster: Cluster) -> int:
    return int(json.loads((cluster.folder / "controller.json").read_text())["pid"])


def _wanted(cluster: Cluster) -> list[Path]:
    return list((cluster.folder / WANTED).iterdir())


def test_agents_that_no_demo_started_are_left_alone(scene: Scene) -> None:
    scene.add("vm-9")
    (node,) = [node for node in scene.nodes() if node.name == "vm-9"]
    assert set(agents_here([node])) == {"vm-9"}
    for other, sentence in (
        (node.model_copy(update={"boot_id": "elsewhere"}), "vm-9 is not on this machine"),
        (node.model_copy(update={"pid": os.getpid()}), "vm-9 was not started by `varuna demo`"),
    ):
        with pytest.raises(CliError, match=sentence):
            agents_here([other])
    with pytest.raises(CliError, match="No agents are connected"):
        agents_here([])
