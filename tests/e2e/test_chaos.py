"""`varuna chaos` as a person runs it."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

VARUNA = str(Path(sys.executable).with_name("varuna"))


def chaos(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [VARUNA, "chaos", *arguments], capture_output=True, text=True, check=False,
        env={k: v for k, v in os.environ.items() if not k.startswith("VARUNA_")},
    )  # fmt: skip


@pytest.mark.soak
@pytest.mark.e2e
@pytest.mark.timeout(900)
def test_forty_seconds_of_trouble_break_no_promise() -> None:
    ran = chaos("--for", "40s", "--seed", "7", "--json")
    assert ran.returncode == 0, ran.stdout + ran.stderr[-3000:]
    report = json.loads(ran.stdout)
    assert report["holds"] and len(report["invariants"]) == 8
    assert report["recoveries"] > 0 and 0 < report["goodput"] <= 1


@pytest.mark.e2e
def test_the_list_of_a_seed_is_the_same_each_time_and_nothing_is_done() -> None:
    first, again = (chaos("--for", "60s", "--seed", "3", "--list") for _ in range(2))
    assert first.stdout == again.stdout and "kill node-" in first.stdout
    assert first.returncode == again.returncode == 0


@pytest.mark.e2e
def test_what_cannot_be_is_refused_in_a_sentence() -> None:
    for wrong, sentence in (
        (["--for", "soon"], "--for: `soon` is not a duration"),
        (["--for", "1s"], "--for 1s is too short"),
        (["--nodes", "2", "--min", "3"], "--min 3 is more than --nodes 2"),
    ):
        ran = chaos(*wrong)
        assert ran.returncode == 2 and sentence in ran.stderr
