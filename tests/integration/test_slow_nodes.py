"""What is remembered of a slow node, and what a person sees of it."""

from dataclasses import replace
from pathlib import Path

import pytest

from controller.core import actions
from controller.core.world import Node, Slowness
from controller.store.tables import nodes
from controller.store.tokens import Role
from tests.fakes.agents import Fleet
from tests.fakes.served import served
from tests.fakes.told import LIFE, Told

pytestmark = pytest.mark.integration

SLOW = Slowness(1.6, 1000.0)


def vm_1(told: Told) -> Node:
    return next(node for node in told.world().nodes if node.name == "vm-1")


def test_a_slow_node_is_remembered_as_such_until_it_is_over_or_begins_anew(told: Told) -> None:
    assert vm_1(told).slow is None
    told.decide(actions.MarkSlow("vm-1", LIFE, SLOW, "vm-1 is slow."))
    assert vm_1(told).slow == SLOW
    over = replace(SLOW, over_at=1100.0)
    told.decide(actions.MarkSlow("vm-1", LIFE, over, "vm-1 is as fast as the others again."))
    found = vm_1(told).slow
    assert found is not None and found.is_over
    told.register("vm-1", "second-life")
    assert vm_1(told).slow is None


def test_a_slow_node_is_seen_as_such_by_name_and_factor(tmp_path: Path) -> None:
    with (
        served(tmp_path) as controller,
        controller.client(Role.ADMIN) as admin,
        Fleet(controller.url, controller.token(Role.AGENT)) as fleet,
    ):
        fleet.add("vm-1", "vm-2")
        slow = {"factor": 1.6, "since": controller.parts.clock.now(), "times": 1, "over_at": None}
        marked = nodes.update().where(nodes.c.name == "vm-1").values(slow=slow)
        controller.parts.store.write(lambda connection: connection.execute(marked)).result()
        seen = {n["name"]: n["slow"] for n in admin.get("/api/v1/nodes").json()["items"]}
        assert seen == {"vm-1": 1.6, "vm-2": None}
        assert "slow 1.60×" in admin.get("/panels/nodes").text
