"""Numbers and names as people read them."""

import pytest

from controller.core.words import capitalised, count, ended, listed, seconds


@pytest.mark.parametrize(
    ("number", "said"), [(0, "0 VMs"), (1, "1 VM"), (3, "3 VMs"), (1240, "1,240 VMs")]
)
def test_counting(number: int, said: str) -> None:
    assert count(number, "VM") == said


@pytest.mark.parametrize(
    ("names", "said"),
    [
        (["a"], "a"),
        (["a", "b"], "a and b"),
        (["a", "b", "c"], "a, b and c"),
        (["a", "b", "c", "d", "e"], "a, b and 3 more"),
    ],
)
def test_listing(names: list[str], said: str) -> None:
    assert listed(names) == said


@pytest.mark.parametrize(
    ("number", "said"),
    [(0.3, "0.3 s"), (5.0, "5 s"), (119, "119 s"), (120, "2 m"), (86400.0, "24 h")],
)
def test_durations(number: float, said: str) -> None:
    assert seconds(number) == said


def test_sentences_begin_and_end() -> None:
    assert capitalised("vm-1 is gone") == "Vm-1 is gone"
    assert ended("It broke") == "It broke."
    assert ended("Why?") == "Why?"
