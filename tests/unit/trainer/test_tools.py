"""`checkpoint list` and `checkpoint verify`: what they print, and their exit codes."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.unit.trainer.test_checkpoints import after, part, written
from trainer import tools
from trainer.contract.checkpoints import write_marker


@pytest.fixture
def job(tmp_path: Path) -> Path:
    """Step 20 of the stale generation 2 lies outside the lineage; step 30 is not whole."""
    root = tmp_path / "checkpoints" / "job_a"
    written(root, part(0, 1), part(10, 2, resumed_from=after(0, 1)))
    written(root, part(20, 2, resumed_from=after(0, 1)), part(15, 3, resumed_from=after(10, 2)))
    written(root, part(30, 3, layers=(0,), resumed_from=after(10, 2)))
    write_marker(root, 3, after(10, 2))
    return root


def asked(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, Any]:
    code = tools.main(["checkpoint", *arguments, "--json"])
    return code, json.loads(capsys.readouterr().out)


def test_the_list_says_what_counts_and_what_to_resume(
    job: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    code, answer = asked(capsys, "list", str(job))
    (only,) = answer["jobs"]
    rows = {row["folder"]: (row["complete"], row["in_lineage"]) for row in only["checkpoints"]}
    assert rows == {
        "step-000000.g1": (True, True),
        "step-000010.g2": (True, True),
        "step-000015.g3": (True, True),
        "step-000020.g2": (True, False),
        "step-000030.g3": (False, True),
    }
    assert (code, only["resume"], only["skipped"]) == (0, "step-000015.g3", [])
    assert only["checkpoints"][-1]["missing_layers"] == [1]


def test_the_list_reads_as_a_table(job: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert tools.main(["checkpoint", "list", str(job)]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == str(job)
    assert [line.split("  ")[-1] for line in lines[2:]] == [
        "complete",
        "complete",
        "complete, newest to resume",
        "complete, outside the lineage",
        "incomplete, 1 of 2 layers missing",
    ]


@pytest.mark.parametrize("verb", ["list", "verify"])
def test_a_folder_of_jobs_is_taken_job_by_job(
    job: Path, verb: str, capsys: pytest.CaptureFixture[str]
) -> None:
    written(job.parent / "job_b", part(0, 1))
    (job.parent / "other").mkdir()
    _, answer = asked(capsys, verb, str(job.parent))
    assert [Path(one["root"]).name for one in answer["jobs"]] == ["job_a", "job_b"]


def test_whole_files_verify(job: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code, answer = asked(capsys, "verify", str(job))
    assert (code, answer["files"], answer["damaged"]) == (0, 9, [])


def test_every_damaged_file_is_named(job: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = job / "step-000010.g2"
    (folder / "layer-000.r0.safetensors").write_bytes(b"weightx")
    (folder / "layer-001.r0.safetensors").write_bytes(b"weight")
    (job / "step-000020.g2" / "layer-001.r0.safetensors").unlink()
    (job / "step-000015.g3" / "part-0.json").write_text("{")
    code, answer = asked(capsys, "verify", str(job))
    named = {str(Path(bad["file"]).relative_to(job)): bad["reason"] for bad in answer["damaged"]}
    assert code == 1
    assert "hash differs" in named.pop("step-000010.g2/layer-000.r0.safetensors")
    assert "Invalid JSON" in named.pop("step-000015.g3/part-0.json")
    assert named == {
        "step-000010.g2/layer-001.r0.safetensors": "has 6 bytes instead of 7",
        "step-000020.g2/layer-001.r0.safetensors": "is missing",
    }


def test_one_checkpoint_can_be_verified_by_itself(
    job: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (job / "step-000010.g2" / "layer-000.r0.safetensors").write_bytes(b"weightx")
    assert asked(capsys, "verify", str(job / "step-000015.g3"))[0] == 0
    code, answer = asked(capsys, "verify", str(job / "step-000010.g2"))
    assert (code, len(answer["damaged"]), answer["files"]) == (1, 1, 2)


@pytest.mark.parametrize("verb", ["list", "verify"])
def test_a_folder_without_checkpoints_is_not_found(
    tmp_path: Path, verb: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert tools.main(["checkpoint", verb, str(tmp_path)]) == 3
    assert tools.main(["checkpoint", verb, str(tmp_path / "never")]) == 3
    assert "There is no checkpoint in" in capsys.readouterr().err


@pytest.mark.parametrize("verb", ["list", "verify"])
@pytest.mark.parametrize("below", ["", "/step-000015.g3", "/.."])
def test_a_url_gives_the_same_answer(
    job: Path, verb: str, below: str, capsys: pytest.CaptureFixture[str]
) -> None:
    (job / "step-000010.g2" / "layer-000.r0.safetensors").write_bytes(b"weightx")
    (job / "step-000010.g2" / "layer-001.r0.safetensors").write_bytes(b"weight")
    (job / "step-000015.g3" / "layer-001.r0.safetensors").unlink()
    where = f"{job.parent if below == '/..' else f'{job}{below}'}"
    code, here = asked(capsys, verb, where)
    there_code, there = asked(capsys, verb, f"file://{where}")
    assert there_code == code
    assert json.dumps(there).replace("file://", "") == json.dumps(here)


def test_a_store_that_cannot_be_had_is_named(capsys: pytest.CaptureFixture[str]) -> None:
    assert tools.main(["checkpoint", "list", "nosuch://x/job_a"]) == 3
    assert "nosuch://x/job_a cannot be listed" in capsys.readouterr().err


def test_it_starts_without_torch(job: Path) -> None:
    command = [sys.executable, "-I", "-X", "importtime", "-m", "trainer.tools"]
    ran = subprocess.run(
        [*command, "checkpoint", "verify", str(job)], capture_output=True, text=True, check=True
    )
    assert ran.stdout.endswith("9 layer files (63 bytes) of 5 checkpoints: none damaged.\n")
    assert " torch\n" not in ran.stderr
