"""The curves in the job's folder never trouble the training."""

import sys
from pathlib import Path

import pytest

from trainer.contract.progress import Evaluated, StepCommitted
from trainer.curves import Curves


@pytest.fixture(autouse=True)
def without_tensorboard(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "tensorboardX", None)


def step(number: int, **metrics: float) -> StepCommitted:
    return StepCommitted(
        step=number, loss=0.5, grad_norm=None, samples=8, sample_ids_hash="00000000", seconds=0.25,
        metrics=metrics,
    )  # fmt: skip


def rows(file: Path) -> list[list[str]]:
    return [line.split(",") for line in file.read_text().splitlines()]


def test_without_tensorboard_they_are_csv_alone_and_that_is_said_once(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    curves = Curves(tmp_path / "g2")
    curves.add(step(1), ())
    curves.add(Evaluated(step=1, loss=0.75, samples=3, seconds=1.0), ())
    curves.add(step(2), ())
    curves.close()
    assert capsys.readouterr().out.count("tensorboardX is not installed") == 1
    assert {file.name for file in (tmp_path / "g2").iterdir()} == {"steps.csv", "evaluations.csv"}
    assert [row[0] for row in rows(tmp_path / "g2" / "steps.csv")] == ["step", "1", "2"]
    assert rows(tmp_path / "g2" / "evaluations.csv")[1][:3] == ["1", "0.75", "3"]


def test_a_number_that_is_not_finite_is_an_empty_cell(tmp_path: Path) -> None:
    curves = Curves(tmp_path)
    curves.add(step(1, right=0.5), ("wrong", "right"))
    curves.close()
    head, row = rows(tmp_path / "steps.csv")
    said = dict(zip(head, row, strict=True))
    assert (said["loss"], said["grad_norm"], said["right"], said["wrong"]) == ("0.5", "", "0.5", "")


def test_a_folder_that_cannot_be_ends_the_curves_and_nothing_else(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "file").write_text("")
    curves = Curves(tmp_path / "file" / "g2")
    curves.add(step(1), ())
    curves.close()
    curves.add(step(2), ())
    curves.close()
    assert capsys.readouterr().out.count("end here") == 1
