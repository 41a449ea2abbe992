"""What each rank of a launch is told."""

from typing import Any

from agent import wire
from controller.core.actions import Launch, SeatAt
from controller.core.jobspec import JobSpec
from controller.store.launching import Place, program_of, run_specs
from trainer.contract.spec import ResumedFrom, RunKind, Shape


def place(name: str, host: str, devices: str = "cpu") -> Place:
    found = tuple(
        wire.Device(kind="cuda" if devices == "cuda" else "cpu", index=index, memory_bytes=1)
        for index in (3, 5)
    )
    facts = wire.Facts(
        hostname=name, boot_id="b", pid=1, devices=found, cores=1, memory_bytes=1,
        data_host=host, store_port=7000, agent_version="0",
    )  # fmt: skip
    return Place(name, facts)


def spec(**more: Any) -> JobSpec:
    fields = {"program": "builtin:gpt", "batch_size": 8, "steps": 9, "seed": 5,
              "checkpoint": {"dir": "/c", "every": "4 steps"}}  # fmt: skip
    return JobSpec.model_validate({**fields, **more})


def launch(kind: RunKind, shape: Shape, begun: ResumedFrom | None) -> Launch:
    seats = tuple(SeatAt(f"vm-{i}", "life", 1) for i in range(shape.world))
    return Launch("j", 4, kind, shape, (0, 3, 8), seats, begun, "because")


def test_ranks_differ_in_place_alone_and_meet_at_rank_0s_node() -> None:
    begun = ResumedFrom(step=4, generation=2, folder="step-000004.g2")
    places = [place("vm-0", "10.0.0.1", "cuda"), place("vm-1", "10.0.0.2")]
    shape = Shape(depth=2, replicas=1, micro_batch=4)
    first, second = run_specs(launch("train", shape, begun), spec(), "/c/j", places)
    assert (first.rank, second.rank) == (0, 1)
    assert first.store == second.store
    assert first.store and (first.store.host, first.store.port) == ("10.0.0.1", 7000)
    assert (first.data_host, second.data_host) == ("10.0.0.1", "10.0.0.2")
    assert (first.device, second.device) == ("cuda:5", "cpu")
    assert first.load_from == "/c/j/step-000004.g2"
    assert (first.saving.root, first.saving.every_steps) == ("/c/j", 4)
    assert (first.training.steps, first.training.seed) == (9, 5)
    same = first.model_dump(exclude={"rank", "data_host", "device"})
    assert same == second.model_dump(exclude={"rank", "data_host", "device"})


def test_the_first_weights_need_no_store_and_load_nothing() -> None:
    shape = Shape(depth=1, replicas=1, micro_batch=1)
    (only,) = run_specs(
        launch("first_weights", shape, None), spec(), "/c/j", [place("vm-0", "10.0.0.1")]
    )
    assert (only.kind, only.store, only.load_from) == ("first_weights", None, None)


def test_a_bundled_program_is_named_from_its_folder() -> None:
    bundled = program_of(spec(program="a/gpt.py", bundle="sha256:" + "0" * 64))
    assert (bundled.source, bundled.workdir) == ("a/gpt.py", ".")
    shared = program_of(spec(program="gpt.py", workdir="/mnt/code"))
    assert (shared.source, shared.workdir) == ("/mnt/code/gpt.py", "/mnt/code")
