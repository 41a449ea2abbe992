"""What integration tests share: one warm zygote whose forks are real trainers."""

from collections.abc import Iterator

import pytest

from tests.fakes.trainers import Trainers


@pytest.fixture(scope="session")
def trainers(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Trainers]:
    with Trainers(tmp_path_factory.mktemp("logs")) as trainers:
        yield trainers
