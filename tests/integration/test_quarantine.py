"""What is remembered of a node by its name, what a person sees of it, and the way out."""

from collections.abc import Iterator
from pathlib import Path

import httpx2
import pytest

from controller.api.schemas import EventView, NodeView, Page
from controller.core import actions
from controller.core.states import NodeState
from controller.core.world import Node
from controller.store import conduct
from controller.store.tokens import Role
from tests.fakes.agents import Fleet
from tests.fakes.served import Served, served
from tests.fakes.told import LIFE, Told
from tests.fakes.waiting import until

pytestmark = pytest.mark.integration


def vm_1(told: Told) -> Node:
    return next(node for node in told.world().nodes if node.name == "vm-1")


def test_losses_are_remembered_over_incarnations(told: Told) -> None:
    told.decide(actions.MarkNode("vm-1", LIFE, NodeState.LOST, "gone", since=1000.5))
    told.register("vm-1", "second-life")
    told.at = 1002.0
    told.register("vm-1", "a-third-life")  # nobody had missed the second
    assert vm_1(told).losses == (1000.5, 1002.0)
    told.decide(actions.MarkNode("vm-1", "a-third-life", NodeState.EVICTED, "it was told"))
    told.register("vm-1", "fourth-life")
    assert vm_1(told).losses == (1000.5, 1002.0)


def test_a_drill_is_not_held_against_its_nodes(told: Told) -> None:
    told.store.write(lambda c: conduct.drilled(c, ["vm-1"], told.at)).result()
    told.register("vm-1", "second-life")
    assert vm_1(told).losses == ()
    told.at += 60
    told.register("vm-1", "a-third-life")
    assert vm_1(told).losses == (told.at,)


def test_a_quarantine_outlives_the_incarnation_and_ends(told: Told) -> None:
    told.decide(actions.QuarantineNode("vm-1", 1060.0, 1, "it flaps"))
    told.register("vm-1", "second-life")
    found = vm_1(told).quarantine
    assert found is not None
    assert (found.because, found.until, found.times, found.is_over) == (
        "it flaps",
        1060.0,
        1,
        False,
    )
    told.decide(actions.ReleaseNode("vm-1", "it has served"))
    found = vm_1(told).quarantine
    assert found is not None and found.is_over


def test_whom_a_node_has_no_path_to_is_remembered_until_it_is_set_aside_anew(told: Told) -> None:
    told.decide(actions.QuarantineNode("vm-1", 1060.0, 1, "no path", ("vm-2",)))
    found = vm_1(told).quarantine
    assert found is not None and found.unreached == ("vm-2",)
    told.decide(actions.QuarantineNode("vm-1", 1060.0, 2, "it flaps"))
    found = vm_1(told).quarantine
    assert found is not None and found.unreached == ()


@pytest.fixture
def controller(tmp_path: Path) -> Iterator[Served]:
    with served(tmp_path) as running:
        yield running


@pytest.fixture
def admin(controller: Served) -> Iterator[httpx2.Client]:
    with controller.client(Role.ADMIN) as client:
        yield client


def nodes(admin: httpx2.Client) -> dict[str, NodeView]:
    answer = admin.get("/api/v1/nodes")
    return {node.name: node for node in Page[NodeView].model_validate_json(answer.content).items}


def test_a_node_that_keeps_coming_back_is_set_aside_seen_and_released(
    controller: Served, admin: httpx2.Client
) -> None:
    with Fleet(controller.url, controller.token(Role.AGENT)) as fleet:
        fleet.add("vm-1", "vm-2")
        assert nodes(admin)["vm-1"].quarantine is None
        assert admin.post("/api/v1/nodes/vm-1/actions/release").status_code == 409
        for life in ("second-life", "a-third-life", "fourth-life"):
            fleet.kill("vm-1")
            fleet.add("vm-1", incarnation=life)
        until(lambda: nodes(admin)["vm-1"].quarantine is not None)
        view = nodes(admin)["vm-1"].quarantine
        assert view is not None and view.because == (
            "vm-1 was lost 3 times in 5 m; set aside for 60 s."
        )
        assert nodes(admin)["vm-2"].quarantine is None
        assert view.because in admin.get("/panels/nodes").text

        released = admin.post("/api/v1/nodes/vm-1/actions/release")
        assert released.status_code == 202
        assert NodeView.model_validate_json(released.content).quarantine is None
        said = Page[EventView].model_validate_json(admin.get("/api/v1/events?limit=1000").content)
        kinds = [event.type for event in said.items if event.node == "vm-1"]
        assert kinds[-2:] == ["node_quarantined", "node_released"]
