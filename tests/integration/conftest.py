"""What integration tests share: two warm zygotes, one that forks real trainers and one that forks
make-believe ones; a make-believe controller; stores to which something was told.
"""

from collections.abc import Iterator
from pathlib import Path

import pytest

from controller.store.engine import Store
from tests.fakes import story
from tests.fakes.controller import FakeController
from tests.fakes.jobs import Job, Undisturbed
from tests.fakes.stores import azurite
from tests.fakes.told import Told
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


@pytest.fixture
def controller() -> Iterator[FakeController]:
    """To which a real agent speaks."""
    controller = FakeController()
    with controller.serving():
        yield controller
    controller.close()


@pytest.fixture
def told(tmp_path: Path) -> Iterator[Told]:
    """Two nodes have registered, a job was submitted."""
    told = Told(tmp_path)
    yield told
    told.store.close()


@pytest.fixture
def store(tmp_path: Path) -> Iterator[Store]:
    """It has seen a whole job."""
    opened = Store(f"sqlite:///{tmp_path / 'varuna.db'}")
    story.tell(opened, story.NOW)
    yield opened
    opened.close()
