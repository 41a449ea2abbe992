"""The verbs that need no controller, and what every error looks like."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from controller.cli.demo import Eviction, read_evictions
from controller.cli.main import main, with_resume_value
from controller.client import output
from controller.client.rest import CliError

SPEC = """\
name: mini
program: builtin:gpt
nodes: 1
batch_size: 8
steps: 3
"""


def run(*arguments: str) -> int:
    with pytest.raises(SystemExit) as left:
        main(arguments)
    return int(left.value.code or 0)


@pytest.fixture
def spec(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "config"))
    path = tmp_path / "job.yaml"
    path.write_text(SPEC)
    return path


def test_a_valid_spec_is_shown_resolved(spec: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run("validate", str(spec), "--set", "plan.depth=2..4", "--json") == 0
    assert json.loads(capsys.readouterr().out)["plan"]["depth"] == {"min": 2, "max": 4}


def test_every_mistake_is_a_line_on_stderr_and_the_exit_code_is_usage(
    spec: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    spec.write_text(SPEC + "batchsize: 3\nseeds: 1\n")
    assert run("validate", str(spec)) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert err.splitlines() == [
        "Unknown field `batchsize` (line 6). Did you mean `batch_size`?",
        "Unknown field `seeds` (line 7). Did you mean `seed`?",
    ]


def test_a_missing_spec_is_said(capsys: pytest.CaptureFixture[str]) -> None:
    assert run("validate", "/no/such.yaml") == 2
    assert "cannot be read: No such file or directory." in capsys.readouterr().err


def test_init_writes_a_spec_that_is_valid_and_never_overwrites(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = str(tmp_path / "new.yaml")
    assert run("init", path) == 0
    assert run("validate", path) == 0
    assert run("init", path) == 2
    assert "is there already" in capsys.readouterr().err


def test_a_dry_run_packs_and_shows_and_sends_nothing(
    spec: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (spec.parent / "mine.py").write_text("def layers(args): ...")
    assert run("submit", str(spec), "--set", "program=mine.py", "--dry-run") == 0
    out, err = capsys.readouterr()
    assert json.loads(out)["bundle"].startswith("sha256:")
    assert "2 files" in err


def test_no_controller_is_exit_code_4(spec: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run("jobs") == 4
    assert "Start one with `varuna serve`" in capsys.readouterr().err


def test_the_static_order_is_the_papers(capsys: pytest.CaptureFixture[str]) -> None:
    assert run("schedule", "--stages", "4", "--micro-batches", "5", "--json") == 0
    stages = json.loads(capsys.readouterr().out)["stages"]
    assert stages[3] == "F0 B0 F1 B1 F2 B2 F3 B3 F4 B4"
    assert stages[2].startswith("F0 F1 F2 R0 B0 R1 B1 R2 B2 F3")


@pytest.mark.parametrize(
    ("given", "meant"),
    [
        ("try s --resume", "try s --resume newest"),
        ("try s --resume --json", "try s --resume newest --json"),
        ("try s --resume 20 --json", "try s --resume 20 --json"),
        ("try --resume s.yaml", "try --resume newest s.yaml"),
        ("try s --resume newest", "try s --resume newest"),
        ("jobs", "jobs"),
    ],
)
def test_resume_may_stand_alone(given: str, meant: str) -> None:
    assert with_resume_value(given.split()) == meant.split()


def test_resume_needs_a_folder(spec: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run("try", str(spec), "--shape", "1x1", "--resume") == 2
    assert "--resume needs --checkpoint-dir" in capsys.readouterr().err


def test_evictions_are_read_in_the_order_of_their_steps() -> None:
    assert read_evictions("2@40, 1@20") == (Eviction(1, 20), Eviction(2, 40))
    assert read_evictions("") == ()


@pytest.mark.parametrize("text", ["3", "0@5", "a@b", "1@2;3@4", "1@-2"])
def test_other_evictions_are_refused(text: str) -> None:
    with pytest.raises(CliError, match="N@STEP"):
        read_evictions(text)


def test_what_others_wrote_cannot_steer_the_terminal() -> None:
    assert output.clean("a\x1b[31mb\r\nc\x07") == "a�[31mb�\nc�"


def test_help_is_quick_to_come_and_brings_no_heavy_package() -> None:
    code = (
        "import sys; from controller.cli import main;"
        "sys.exit(', '.join({'torch', 'numpy', 'fastapi', 'sqlalchemy', 'alembic', 'uvicorn'}"
        " & set(sys.modules)) or 0)"
    )
    done = subprocess.run([sys.executable, "-I", "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
