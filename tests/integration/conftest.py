"""What integration tests share: two warm zygotes, one that forks real trainers and one that forks
make-believe ones.
"""

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.fakes.jobs import Job, Undisturbed
from tests.fakes.stores import azurite
from tests.fakes.trainers import Trainers
from tests.fakes.zygotes import Mother


@pytest.fixture(scope="session")
def trainers(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Trainers]:
    with Trainers(tmp_path_factory.mktemp("logs")) as trainers:
        yield trainers


@pytest.fixture(scope="session")
def warmed(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Trainers]:
    """For programs that import much."""
    with Trainers(tmp_path_factory.mktemp("logs"), "warmed") as trainers:
        yield trainers


@pytest.fixture
def beset(trainers: Trainers, tmp_path: Path) -> Job:
    """A job to which things happen."""
    return Job(trainers, tmp_path / "job")


@pytest.fixture(scope="session")
def undisturbed(trainers: Trainers, tmp_path_factory: pytest.TempPathFactory) -> Undisturbed:
    """The same job, to which nothing happens."""
    return Undisturbed(Job(trainers, tmp_path_factory.mktemp("undisturbed")))


@pytest.fixture(scope="session")
def mother() -> Iterator[Mother]:
    with Mother() as mother:
        yield mother


@pytest.fixture(scope="session")
def emulated(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """Azure's blob emulator, as the URL of a folder in it."""
    with azurite(tmp_path_factory.mktemp("azurite")) as url:
        yield url
