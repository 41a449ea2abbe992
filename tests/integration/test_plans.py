"""What-ifs over HTTP and by command, and the measuring that they live on."""

import json
import subprocess
import sys
from collections.abc import Iterator
from itertools import product
from pathlib import Path
from typing import Any

import httpx2
import pytest

from controller.core.jobspec import JobSpec
from controller.core.whatif import program_key
from controller.store.known import known_costs
from controller.store.tables import jobs
from tests.fakes import programs
from tests.fakes.served import Served, served
from tests.unit.controller.builders import costs_of
from trainer.contract.costs import LayerCosts

pytestmark = pytest.mark.integration

SPEC: dict[str, Any] = {
    "program": "builtin:gpt", "nodes": "1..4", "batch_size": 32, "steps": 10,
    "checkpoint": {"dir": "/nowhere"},
}  # fmt: skip
COSTS = costs_of(6).model_dump(mode="json")


@pytest.fixture(scope="module")
def controller(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    with served(tmp_path_factory.mktemp("plans")) as running:
        yield running


@pytest.fixture(scope="module")
def user(controller: Served) -> Iterator[httpx2.Client]:
    with controller.client() as client:
        yield client


def ask(user: httpx2.Client, **more: Any) -> httpx2.Response:
    return user.post("/api/v1/plans", json={"spec": SPEC, **more})


def test_a_plan_for_each_number_of_nodes_and_nothing_is_stored(user: httpx2.Client) -> None:
    answer = ask(user, costs=COSTS, nodes="1..6", price_per_node_hour=0.5)
    assert answer.status_code == 200, answer.text
    rows = answer.json()["items"]
    assert [row["nodes"] for row in rows] == [1, 2, 3, 4, 5, 6]
    rates = [row["examples_per_second"] for row in rows]
    assert rates == sorted(rates)
    for row in rows:
        shape, stages = row["shape"], row["stages"]
        assert shape["depth"] * shape["replicas"] <= row["nodes"]
        assert [s["first_layer"] for s in stages[1:]] == [s["last_layer"] + 1 for s in stages[:-1]]
        assert row["memory_bytes"] == max(stage["size_bytes"] for stage in stages)
        assert row["because"] and row["price_per_million_examples"] > 0
    assert user.get("/api/v1/jobs?all=true").json()["items"] == []


def test_every_layer_is_on_one_stage_at_every_depth_and_more_stages_than_layers_are_refused(
    user: httpx2.Client,
) -> None:
    for blocks, depth in product((1, 4, 9), range(1, 11)):
        layers = blocks + 2
        spec = {**SPEC, "args": {"layers": blocks}, "plan": {"depth": depth}}
        costs = costs_of(layers).model_dump(mode="json")
        body = {"spec": spec, "costs": costs, "nodes": depth}
        (row,) = user.post("/api/v1/plans", json=body).json()["items"]
        if depth > layers:
            assert row["shape"] is None and f"{layers} layers" in row["because"]
            refused = user.post("/api/v1/jobs", json={"spec": spec})
            assert refused.status_code == 422
            assert refused.json()["errors"][0]["pointer"] == "/spec/plan/depth"
            continue
        held = [range(s["first_layer"], s["last_layer"] + 1) for s in row["stages"]]
        assert len(held) == depth and all(held)
        assert [layer for stage in held for layer in stage] == list(range(layers))


def test_what_fits_nowhere_is_said_with_its_bytes(user: httpx2.Client) -> None:
    (row,) = ask(user, costs=COSTS, nodes=2, device_memory_bytes=1_000_000).json()["items"]
    assert row["shape"] is None
    assert "MB, the smallest device has 1.0 MB" in row["because"]


def test_a_program_that_nobody_has_measured_is_a_conflict_with_the_mend(
    user: httpx2.Client,
) -> None:
    answer = ask(user)
    assert answer.status_code == 409
    assert "varuna profile" in answer.json()["title"] + answer.json()["detail"]


def test_too_many_nodes_are_refused(user: httpx2.Client) -> None:
    assert ask(user, costs=COSTS, nodes="1..4000").status_code == 422


def test_what_a_job_has_measured_is_known_for_its_program_and_device_kind(
    controller: Served, user: httpx2.Client
) -> None:
    with controller.client() as client:
        job = client.post("/api/v1/jobs", json={"spec": SPEC}).json()["id"]
    spec = JobSpec.model_validate(SPEC)
    measured = costs_of(6).model_copy(update={"program": program_key(spec), "device_kind": "cpu"})
    stored = jobs.update().where(jobs.c.id == job).values(costs=measured.model_dump(mode="json"))
    controller.parts.store.write(lambda connection: connection.execute(stored)).result()
    assert LayerCosts.model_validate(user.get(f"/api/v1/jobs/{job}/costs").json()) == measured
    answer = ask(user).json()
    assert answer["costs_from"].startswith("job ")
    assert len(answer["items"]) == 4
    other = spec.model_copy(update={"args": {"layers": 9}})
    with controller.parts.store.read() as connection:
        assert known_costs(connection, spec, "cpu") is not None
        assert known_costs(connection, spec, "cuda") is None
        assert known_costs(connection, other) is None


def test_a_profile_holds_layers_at_a_few_sizes_and_the_way_between_processes(
    tmp_path: Path,
) -> None:
    request = tmp_path / "request.json"
    program = {"source": str(programs.path("mlp"))}
    training = {"batch_size": 32, "steps": 1}
    request.write_text(json.dumps({"program": program, "training": training}))
    command = [sys.executable, "-I", "-m", "agent.measure", "--spec", str(request)]
    done = subprocess.run([*command, "--micro-batch", "4"], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    costs = LayerCosts.model_validate_json(done.stdout)
    assert costs.micro_batch == 4
    assert [size.micro_batch for size in costs.layers[0].sizes] == [1, 2]
    assert costs.cross_node and costs.cross_node.latency_seconds > 0
    assert costs.same_node is None
    assert costs.all_reduce and costs.optimizer_bytes_per_second
    assert costs.state_copies == pytest.approx(4, abs=0.1)
    assert any(layer.saved_bytes for layer in costs.layers)
