"""The cases from the field that README.md lists: tests hold off each of them, and exist."""

import re
from pathlib import Path

TESTS = Path(__file__).parents[1]


def test_each_case_names_a_test_and_each_of_them_is_there() -> None:
    cases = re.findall(r"^(\d+)\. (.*)$", (TESTS / "README.md").read_text(), re.MULTILINE)
    assert [int(number) for number, _ in cases] == list(range(1, len(cases) + 1)) != []
    for number, line in cases:
        named = re.findall(r"`([\w/]+\.py)::(\w+)`", line)
        assert named, f"case {number} has no test"
        for file, test in named:
            assert f"def {test}(" in (TESTS / file).read_text(), f"{file} has no {test}"
