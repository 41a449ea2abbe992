"""The main promise on one machine: lose three of eight nodes, and it stays the same training."""

import json
import os
import sqlite3
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(400)]

VARUNA = str(Path(sys.executable).with_name("varuna"))


def test_three_of_eight_nodes_die_and_the_training_is_the_same(tmp_path: Path) -> None:
    data = tmp_path / "demo"
    told = _run("demo", "--nodes", "8", "--steps", "80", "--evict", "3@30", "--exit", "--json",
                "--data", str(data))  # fmt: skip
    outcome = json.loads(told.splitlines()[-1])
    assert (outcome["state"], outcome["steps"]) == ("succeeded", 80)
    assert outcome["samples_committed_once"] is True
    assert _held_against_nodes(data) == [], "it was a drill"
    (recovery,) = outcome["recoveries"]
    # From the survivors' memory where they hold every layer, else from disk.
    assert recovery["resumed_from"] in (20, 30, recovery["at_step"])
    assert recovery["lost_steps"] == recovery["at_step"] - recovery["resumed_from"]
    assert recovery["from_shape"] != recovery["to_shape"]
    assert set(recovery["phases"]) == {
        "detect", "decide", "save", "stop", "launch", "rendezvous", "load", "first_step"
    }  # fmt: skip
    assert recovery["gap_s"] < 20, "something waited"

    resumed = recovery["resumed_from"]
    morphed = _losses_after(data, resumed)
    spec = _job_file(data, tmp_path / "job.yaml")
    replayed = _run("try", str(spec), "--shape", "1x2", "--resume", str(resumed),
                    "--checkpoint-dir", str(next((data / "checkpoints").iterdir())),
                    "--steps", "20", "--json")  # fmt: skip
    lines = [json.loads(line) for line in replayed.splitlines()]
    assert [line["step"] for line in lines] == list(range(resumed + 1, resumed + 21))
    for line in lines:
        assert line["loss"] == pytest.approx(morphed[line["step"]], rel=1e-5)


def _run(*arguments: str) -> str:
    environment = {k: v for k, v in os.environ.items() if not k.startswith("VARUNA_")}
    ran = subprocess.run(
        [VARUNA, *arguments], capture_output=True, text=True, env=environment, check=False
    )
    assert ran.returncode == 0, ran.stderr[-3000:]
    return ran.stdout


def _losses_after(data: Path, step: int) -> dict[int, float]:
    """What the generation after the morph reported, from the demo's own store."""
    with sqlite3.connect(f"file:{data / 'varuna.db'}?mode=ro", uri=True) as store:
        rows = store.execute(
            "SELECT step, loss FROM steps WHERE step > ? AND generation = "
            "(SELECT max(generation) FROM steps) ORDER BY step",
            (step,),
        ).fetchall()
    store.close()
    return dict(rows)


def _held_against_nodes(data: Path) -> list[str]:
    """Who has a loss on its record."""
    with sqlite3.connect(f"file:{data / 'varuna.db'}?mode=ro", uri=True) as store:
        rows = store.execute("SELECT node, losses FROM conduct").fetchall()
    store.close()
    return [node for node, losses in rows if json.loads(losses)]


def _job_file(data: Path, path: Path) -> Path:
    """The demo's job as a spec file."""
    with sqlite3.connect(f"file:{data / 'varuna.db'}?mode=ro", uri=True) as store:
        (spec,) = store.execute("SELECT spec FROM jobs").fetchone()
    store.close()
    path.write_text(spec if isinstance(spec, str) else json.dumps(spec))  # JSON is YAML
    return path
