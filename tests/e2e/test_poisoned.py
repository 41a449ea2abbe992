"""A checkpoint whose every hash is right and whose weights are no numbers."""

from pathlib import Path

import pytest
import torch
import xxhash

from controller.api.schemas import CheckpointView, JobView
from controller.core.states import JobState, Reason
from tests.e2e.scene import Scene, until
from trainer.checkpoint import read_layers
from trainer.contract.checkpoints import Part, part_file, write_json
from trainer.layerfile import encode

pytestmark = [pytest.mark.e2e, pytest.mark.soak, pytest.mark.timeout(300)]

LAYER = 2


def complete(scene: Scene) -> list[CheckpointView]:
    return sorted((c for c in scene.checkpoints() if c.complete), key=lambda c: c.step)


def poison(folder: Path) -> None:
    """As if the layer's writer had held that."""
    (file,) = folder.glob(f"layer-{LAYER:03d}.*")
    state = read_layers(folder, [LAYER])[LAYER]
    for weight in state.parameters.values():
        weight.fill_(torch.nan)
    file.write_bytes(content := b"".join(encode(state)))
    about = folder / part_file(int(file.suffixes[0].removeprefix(".r")))
    part = Part.model_validate_json(about.read_bytes())
    named = {f.layer: f for f in part.files}
    named[LAYER] = named[LAYER].model_copy(update={"xxh3": xxhash.xxh3_128_hexdigest(content)})
    write_json(about, part.model_copy(update={"files": tuple(named.values())}))


def resume_to_a_pause(scene: Scene) -> JobView:
    generation = scene.job().generation
    scene.act("resume")
    until(lambda: scene.job().generation != generation or None, "another try")
    return scene.wait_for(JobState.PAUSED)


def test_weights_that_are_no_numbers_are_left_for_the_checkpoint_before_them(scene: Scene) -> None:
    scene.add("vm-1", "vm-2")
    scene.submit(100_000, nodes="2")
    until(lambda: len(complete(scene)) >= 3 or None, "checkpoints")
    scene.act("pause")
    paused = scene.wait_for(JobState.PAUSED)
    *_, before, newest = complete(scene)
    assert newest.step == paused.step
    poison(scene.root / newest.folder)
    for _ in range(2):
        again = resume_to_a_pause(scene)
        assert again.reason is Reason.NON_FINITE_LOSS, again.message
    assert f"Resume from step {before.step:,}" in again.message
    scene.act("resume")
    scene.wait_for_step(newest.step + 5)
    link = scene.running().resumed_from
    assert link is not None and link.step == before.step
    assert scene.ledger().samples_committed_once
