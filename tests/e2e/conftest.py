"""One cluster for all: its mother zygote imports torch once, each test submits jobs of its own."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from controller.client.cluster import Cluster
from tests.e2e.scene import Scene


@pytest.fixture(scope="session")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    folder: Path = tmp_path_factory.mktemp("cluster")
    with pytest.MonkeyPatch.context() as environment:
        environment.setenv("XDG_CONFIG_HOME", str(folder / "config"))  # not the tester's own
        with Cluster(folder, port=0) as cluster:
            cluster.fleet.wait_for_torch()
            yield cluster


@pytest.fixture
def scene(cluster: Cluster, request: pytest.FixtureRequest) -> Iterator[Scene]:
    """Begins without nodes and without unfinished jobs, and ends so."""
    scene = Scene(cluster, request.node.name)
    yield scene
    scene.clear()
