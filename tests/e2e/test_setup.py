"""A program of one's own on fresh VMs: they are set up first; another begins with its weights."""

from pathlib import Path

import pytest

from controller.api.schemas import BundleView, LogView
from controller.client.pack import pack
from controller.client.rest import job_path
from controller.core.states import JobState, Reason
from tests.e2e.scene import Scene, until

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(300)]

PROGRAM = """
import pathlib, torch

def layers(args):
    return [torch.nn.Linear(1, 8), torch.nn.Tanh(), torch.nn.Linear(8, 1)]

def dataset(args):
    prepared = pathlib.Path(__file__).with_name("data.txt").read_text().split()
    return [{"x": torch.tensor([float(n) / 32])} for n in prepared]

def loss(output, batch):
    return ((output - 5) ** 2).mean()

def inputs(batch):
    return batch["x"]
"""


def bundled(scene: Scene, folder: Path) -> str:
    (folder / "own.py").write_text(PROGRAM)
    bundle = pack(folder, "own.py")
    path = f"/api/v1/bundles/{bundle.digest}"
    scene.cluster.controller.put(path, bundle.content, BundleView)
    return bundle.digest


def setup_log(scene: Scene, **asked: object) -> LogView:
    path = job_path(scene.job_id, "/logs/setup")
    return scene.cluster.controller.get(path, LogView, **asked)


def test_vms_are_set_up_before_the_program_is_imported_and_a_second_job_begins_where_it_ended(
    scene: Scene, tmp_path: Path
) -> None:
    scene.add("vm-1", "vm-2")
    until(lambda: len(scene.nodes()) == 2 or None, "two VMs")
    go = tmp_path / "go"
    own: dict[str, object] = {
        "program": "own.py", "bundle": bundled(scene, tmp_path), "args": {"lr": 0.1},
        "setup": ["seq 1 64 > data.txt", f"until [ -e {go} ]; do sleep 0.05; done; echo ready"],
    }  # fmt: skip
    first = scene.submit(5, nodes="2", name="first", **own)
    told = "Running `setup` (2 lines) on vm-"
    until(lambda: told in scene.job().message or None, "the word that a VM is set up")
    go.touch()
    scene.wait_for(JobState.SUCCEEDED)
    losses = scene.losses()
    for node in ("vm-1", "vm-2"):
        log = setup_log(scene, node=node)
        assert log.text.startswith("[varuna] setup, line 1 of 2: seq 1 64 > data.txt\n")
        assert log.text.endswith("ready\n[varuna] setup is done\n")
        assert (log.node, log.over) == (node, True)

    second = scene.submit(2, nodes="2", name="second", **own, init_from="first@newest")
    scene.wait_for(JobState.SUCCEEDED)
    assert second.id != first.id
    assert scene.losses()[1] < losses[5] < losses[1]


def test_a_setup_that_fails_fails_the_job_with_its_words_and_costs_no_vm(
    scene: Scene, tmp_path: Path
) -> None:
    scene.add("vm-3")
    until(lambda: state(scene, "vm-3"), "a VM")
    scene.submit(
        5, nodes="1", program="own.py", bundle=bundled(scene, tmp_path),
        setup="echo no such package; exit 1", recovery={"max_restarts": 0},
    )  # fmt: skip
    job = scene.wait_for(JobState.FAILED)
    assert job.reason is Reason.SETUP_FAILED
    assert "(echo no such package; exit 1) ended with code 1: no such package" in job.message
    assert state(scene, "vm-3") == "ready"


def state(scene: Scene, name: str) -> str | None:
    return next((node.state.value for node in scene.nodes() if node.name == name), None)
