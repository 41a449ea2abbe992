"""Numbers and names as people read them: the small change of every sentence. PURE."""

from collections.abc import Sequence


def count(number: int, noun: str) -> str:
    """``1 VM``, ``3 VMs``, ``1,240 steps``."""
    return f"{number:,} {noun}" + ("" if number == 1 else "s")


def listed(names: Sequence[str]) -> str:
    """``vm-1``, ``vm-1 and vm-2``, ``vm-1, vm-2 and 6 more``."""
    if len(names) > 3:
        return f"{', '.join(names[:2])} and {len(names) - 2} more"
    *front, last = names
    return f"{', '.join(front)} and {last}" if front else last


def times(shape: object) -> str:
    """``4x2`` as people read it: ``4×2``."""
    return str(shape).replace("x", "×")


def seconds(number: float) -> str:
    """``5 s``, ``0.3 s``, ``10 m``, ``24 h``."""
    if number >= 3600:
        return f"{round(number / 3600, 2):g} h"
    return f"{round(number / 60, 2):g} m" if number >= 120 else f"{number:g} s"


def capitalised(sentence: str) -> str:
    """``sentence`` with its first letter raised, the rest as it is."""
    return sentence[:1].upper() + sentence[1:]


def ended(sentence: str) -> str:
    """``sentence`` with a full stop when it has no end of its own."""
    return sentence if sentence.endswith((".", "!", "?", "…")) else sentence + "."
