"""One slow VM slows all others: it is named and spared, once."""

import shutil
from pathlib import Path

import pytest

from controller.api.schemas import GenerationView
from controller.chaos.replay import replay
from controller.chaos.verdict import Launch, replays_equal
from controller.core.states import Reason
from tests.e2e.scene import Scene, until

pytestmark = [pytest.mark.e2e, pytest.mark.soak, pytest.mark.timeout(300)]

FOUR = ("vm-1", "vm-2", "vm-3", "vm-4")
MODEL = {"layers": 6, "width": 64, "heads": 4, "context": 64}
"""Long enough tasks for a stage to differ from another."""


def test_a_slow_vm_is_named_and_spared_once_and_the_job_goes_on(
    scene: Scene, tmp_path: Path
) -> None:
    scene.add(*FOUR)
    checkpoint = {"dir": str(scene.cluster.folder / "ckpt"), "every": "1000000 steps", "keep": 99}
    scene.submit(1_000_000, nodes="4", args=MODEL, plan={"depth": 2}, checkpoint=checkpoint)
    scene.wait_for_step(5)
    victim, before = scene.node_of_rank(1), scene.running()
    with scene.slowed(victim, share=0.25):
        until(lambda: slow_ones(scene).get(victim), f"{victim} to be called slow")
        spared = until(lambda: newer(scene, before), "a plan that spares it")
        assert work_of(victim, spared) < work_of(victim, before)
        until(lambda: scene.are_paced(scene.running().number) or None, "a verdict on the plan")
        scene.wait_for_step(scene.job().step + 5)
    assert stops_for(scene, victim) == [before.number], "it would not flip back and forth"
    assert scene.ledger().samples_committed_once
    assert is_as_if_nothing_had_happened(scene, spared, tmp_path)


def slow_ones(scene: Scene) -> dict[str, float]:
    return {node.name: node.slow for node in scene.nodes() if node.slow}


def newer(scene: Scene, than: GenerationView) -> GenerationView | None:
    """One that is running."""
    found = scene.running()
    return found if found.number > than.number else None


def stops_for(scene: Scene, victim: str) -> list[int]:
    return [
        g.number
        for g in scene.generations()
        if g.end_reason is Reason.STRAGGLER and victim in (g.end_because or "")
    ]


def work_of(node: str, generation: GenerationView) -> float:
    """How many layers of how many replicas' worth of samples it computes."""
    assert generation.shape is not None
    held = [
        generation.cuts[seat.stage + 1] - generation.cuts[seat.stage]
        for seat in generation.seats
        if seat.node == node
    ]
    return sum(held) / generation.shape.replicas


def is_as_if_nothing_had_happened(scene: Scene, launched: GenerationView, aside: Path) -> bool:
    """Its first steps again, undisturbed, from the checkpoint that it went on from."""
    resumed, shape = launched.resumed_from, launched.shape
    assert resumed is not None and shape is not None
    shutil.copytree(scene.root / resumed.folder, aside / f"g{launched.number}" / resumed.folder)
    losses = {p.step: p.loss for p in scene.series().points if p.generation == launched.number}
    launch = Launch(launched.number, resumed.step, losses, shape.micro_batch)
    replays = replay(scene.job().spec, [launch], aside, scene.cluster.fleet.lend_zygote)
    verdict = replays_equal([launch], replays)
    assert verdict.holds, verdict.said
    return True
