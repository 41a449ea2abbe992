"""What integration tests share: two warm zygotes, one that forks real trainers and one that forks
make-believe ones.
"""

from collections.abc import Iterator

import pytest

from tests.fakes.trainers import Trainers
from tests.fakes.zygotes import Mother


@pytest.fixture(scope="session")
def trainers(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Trainers]:
    with Trainers(tmp_path_factory.mktemp("logs")) as trainers:
        yield trainers


@pytest.fixture(scope="session")
def mother() -> Iterator[Mother]:
    with Mother() as mother:
        yield mother
