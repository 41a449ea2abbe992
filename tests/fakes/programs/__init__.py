"""Small programs for tests, written as a user writes them."""

from pathlib import Path


def path(name: str) -> Path:
    """The file of the program ``name``."""
    return Path(__file__).parent / f"{name}.py"
