"""``varuna try`` as a process: resuming, sentences, and no trace after Ctrl-C."""

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from tests.fakes.waiting import until

pytestmark = pytest.mark.integration

PROGRAMS = Path(__file__).parents[1] / "fakes" / "programs"


@contextmanager
def trying(
    folder: Path, *flags: object, program: str = "mlp", steps: int = 6, **more: Any
) -> Iterator[subprocess.Popen[str]]:
    request = {
        "program": {"source": str(PROGRAMS / f"{program}.py"), "args": more.pop("args", {})},
        "training": {"batch_size": 24, "steps": steps},
        **more,
    }
    (folder / "request.json").write_text(json.dumps(request))
    (folder / "tmp").mkdir(exist_ok=True)
    process = subprocess.Popen(
        [sys.executable, "-I", "-u", "-m", "agent.local", "--spec", str(folder / "request.json"),
         "--json", *map(str, flags)],
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        env=os.environ | {"TMPDIR": str(folder / "tmp")},
    )  # fmt: skip
    try:
        yield process
    finally:
        process.kill()
        process.communicate()


def tried(folder: Path, *flags: object, **more: Any) -> tuple[int, list[dict[str, Any]], str]:
    """Exit code, the steps, what was said of errors."""
    with trying(folder, *flags, **more) as process:
        out, said = process.communicate(timeout=60)
    return process.returncode, [json.loads(line) for line in out.splitlines()], said


def test_a_run_is_resumed_at_another_shape_and_each_writes_under_an_id_of_its_own(
    tmp_path: Path,
) -> None:
    kept = tmp_path / "kept"
    code, whole, said = tried(tmp_path, "--shape", "2x1", "--checkpoint-dir", kept, every_steps=2)
    assert (code, [step["step"] for step in whole]) == (0, [1, 2, 3, 4, 5, 6])
    assert set(whole[0]) == {"step", "loss", "grad_norm", "samples", "sample_ids_hash"}
    (own,) = kept.iterdir()
    assert said == f"Checkpoints are in {own}\n"
    before = sorted(own.iterdir())
    for folder in (kept, own):
        code, again, said = tried(
            tmp_path, "--shape", "1x2", "--checkpoint-dir", folder, "--resume", 2
        )
        assert (code, again[0]["step"]) == (0, 3), said
        for old, new in zip(whole[2:], again, strict=True):
            assert new["sample_ids_hash"] == old["sample_ids_hash"]
            assert new["loss"] == pytest.approx(old["loss"], rel=1e-5)
        assert sorted(own.iterdir()) == before
    assert len(list(kept.iterdir())) == 3
    assert not list((tmp_path / "tmp").glob("varuna-*"))


@pytest.mark.parametrize(
    ("flags", "more", "sentence"),
    [
        (("--shape", "2by1"), {}, "A shape is PxD"),
        (("--shape", "0x1"), {}, "A shape is PxD"),
        (("--shape", "1x9"), {}, "The shape 1x9 does not fit: 6 micro-batches of 4 are too few"),
        (("--shape", "99x1"), {}, "This model does not fit the shape"),
        (("--shape", "1x1"), {"program": "missing"}, "missing.py"),
        (("--shape", "1x1"), {"cuts": (0, 99)}, "do not split"),
        (("--shape", "1x1", "--checkpoint-dir", "/nowhere", "--resume", "3"), {}, "/nowhere"),
        (("--shape", "2x1"), {"program": "odd", "args": {"how": "raises"}}, "enough"),
    ],
)
def test_what_goes_wrong_is_one_sentence_and_exit_code_1(
    tmp_path: Path, flags: tuple[str, ...], more: dict[str, Any], sentence: str
) -> None:
    code, _, said = tried(tmp_path, *flags, **more)
    assert code == 1
    assert sentence in said
    assert said.count("\n") == 1, f"more than a sentence: {said}"
    assert not list((tmp_path / "tmp").glob("varuna-*"))


def test_it_evaluates_on_held_out_samples(tmp_path: Path) -> None:
    training = {"batch_size": 24, "steps": 4, "evaluate_every": 3}
    code, said, _ = tried(tmp_path, "--shape", "2x1", program="ladder", training=training)
    assert code == 0
    found = [line["evaluation"] for line in said if "evaluation" in line]
    assert [(one["step"], one["samples"]) for one in found] == [(3, 10), (4, 10)]


def test_what_the_program_prints_is_shown_when_that_is_asked_for(tmp_path: Path) -> None:
    text = (PROGRAMS / "mlp.py").read_text()
    (tmp_path / "own.py").write_text(f"print('hello there')\n{text}")
    own = str(tmp_path / "own")
    code, steps, said = tried(tmp_path, "--shape", "2x1", "--logs", program=own, steps=2)
    assert (code, len(steps)) == (0, 2)
    assert set(said.splitlines()) == {"[rank-0] hello there", "[rank-1] hello there"}


def test_a_step_that_is_not_finite_ends_it_with_a_sentence(tmp_path: Path) -> None:
    args = {"how": "loss", "sample": 0, "samples": 24}
    code, steps, said = tried(tmp_path, "--shape", "2x1", program="spoilt", args=args)
    assert (code, steps) == (1, [])
    assert "Step 1 is not finite: the loss of micro-batch" in said
    assert "(replica 0, stage 1). All is as it was after step 0." in said


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGKILL])
def test_no_process_is_left_however_it_is_ended(tmp_path: Path, number: int) -> None:
    with trying(tmp_path, "--shape", "2x1", steps=100_000) as process:
        assert process.stdout
        process.stdout.readline()
        family = descendants(process.pid)
        assert len(family) == 4, "a zygote, a store and two trainers"
        process.send_signal(number)
        process.wait(20)
        until(lambda: not any(map(os.path.exists, (f"/proc/{pid}" for pid in family))))
    if number != signal.SIGKILL:
        assert process.returncode == 130
        assert not list((tmp_path / "tmp").glob("varuna-*"))


def descendants(pid: int) -> set[int]:
    """The pids below ``pid``."""
    children: dict[int, set[int]] = {}
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            fields = stat.read_bytes().rpartition(b")")[2].split()
        except OSError:
            continue
        children.setdefault(int(fields[1]), set()).add(int(stat.parent.name))
    found, to_ask = set[int](), [pid]
    while to_ask:
        below = children.get(to_ask.pop(), set())
        found |= below
        to_ask += below
    return found
