"""A job's whole life as rows: eight nodes, two evictions, three plans, every table a page reads.

Written straight into the store, so that pages and commands have something to show without a run.
"""

import math
from typing import Any

import sqlalchemy as sa

from agent import wire
from controller.core.jobspec import Checkpointing, Every, JobSpec, NodeRange
from controller.store.engine import Store
from controller.store.tables import (
    checkpoints,
    evaluations,
    events,
    generations,
    jobs,
    nodes,
    parts,
    recoveries,
    seats,
    steps,
)
from trainer.contract.samples import expected_hash

NOW = 1_000_000.0
"""When it may be told."""
JOB = "job_01JSTORY0000000000000000000"
STEP_SECONDS = 0.5
BATCH_SIZE, SAMPLES = 16, 5000
SHAPES = {2: (4, 2), 3: (5, 1), 4: (2, 2)}
SPANS = {2: (0, 63), 3: (60, 124), 4: (120, 187)}
"""Generation -> the step it resumed from, the last one it committed."""
EVALUATE_EVERY = 20
BEGAN = {2: 10.0, 3: 45.0, 4: 81.0}
ENDED = {2: 42.5, 3: 78.2}


def tell(store: Store, now: float, name: str = "gpt-mini") -> str:
    """Write it so that the newest step was committed at ``now``; the job's id."""
    start = now - BEGAN[4] - (SPANS[4][1] - SPANS[4][0]) * STEP_SECONDS

    def work(connection: sa.Connection) -> None:
        connection.execute(jobs.insert(), [_job(start, name)])
        connection.execute(nodes.insert(), [_node(i, start) for i in range(1, 9)])
        for number in (1, 2, 3, 4):
            connection.execute(generations.insert(), [_generation(number, start)])
        connection.execute(seats.insert(), [seat for g in SHAPES for seat in _seats(g)])
        connection.execute(steps.insert(), [step for g in SHAPES for step in _steps(g, start)])
        found = [one for g in SHAPES for one in _evaluations(g, start)]
        connection.execute(evaluations.insert(), found)
        connection.execute(recoveries.insert(), [_recovery(3, start), _recovery(4, start)])
        for table, rows in (_saved(start)).items():
            connection.execute(table.insert(), rows)
        connection.execute(events.insert(), list(_events(start, name)))

    store.write(work).result()
    return JOB


def _job(start: float, name: str) -> dict[str, Any]:
    spec = JobSpec(
        name=name,
        program="builtin:gpt",
        nodes=NodeRange(min=1, max=8),
        batch_size=BATCH_SIZE,
        steps=2000,
        evaluate_every=EVALUATE_EVERY,
        checkpoint=Checkpointing(dir="/mnt/ckpt", every=Every(steps=10)),
        drills=True,
    )
    return {
        "id": JOB, "name": name, "spec": spec.model_dump(mode="json"), "state": "running",
        "reason": None, "message": "Training as 2×2 on 4 of 5 nodes.", "cancel_wanted": False,
        "generation": 4, "samples": SAMPLES, "submitted_at": start, "started_at": start + 10,
    }  # fmt: skip


def _node(i: int, start: float) -> dict[str, Any]:
    gone = {2: ENDED[2], 5: ENDED[2], 7: ENDED[3]}.get(i)
    state = "lost" if gone else "ready" if i == 8 else "working"
    facts = wire.Facts(
        hostname="spot", boot_id="b", pid=1000 + i, cores=2, memory_bytes=24 << 30,
        devices=(wire.Device(kind="cpu", index=0, memory_bytes=24 << 30),),
        data_host="127.0.0.1", store_port=4000 + i, agent_version="0.1.0",
    )  # fmt: skip
    return {
        "name": f"node-{i}", "incarnation": f"incarnation-{i}", "reported": 0,
        "state": state, "facts": facts.model_dump(mode="json"),
        "registered_at": start + i / 5, "heard_at": start + 100,
        "gone_at": start + gone if gone else None,
    }  # fmt: skip


def _generation(number: int, start: float) -> dict[str, Any]:
    shape = SHAPES.get(number)
    first, last = SPANS.get(number, (0, 0))
    ended = 9.0 if number == 1 else ENDED.get(number)
    begun = {"step": first, "generation": number - 1, "folder": f"step-{first:06d}.g{number - 1}"}
    return {
        "job": JOB, "number": number, "kind": "train" if shape else "first_weights",
        "state": "ended" if ended else "running",
        "shape": {"depth": shape[0], "replicas": shape[1], "micro_batch": 4} if shape else None,
        "cuts": [8 * i // shape[0] for i in range(shape[0] + 1)] if shape else [],
        "resumed_from": begun if shape else None,
        "because": f"{shape[0]}×{shape[1]}: the fastest of 9 shapes" if shape else "first weights",
        "created_at": start + BEGAN.get(number, 2.0) - 1.5,
        "launched_at": start + BEGAN.get(number, 2.0) - 1.2,
        "committed": last, "committed_at": start + _at(number, last) if shape else None,
        "first_step_at": start + BEGAN[number] if shape else None,
        "ended_at": start + ended if ended else None, "charged": False,
        "end_reason": "node_lost" if number in ENDED else None,
        "end_because": "2 nodes are lost" if number in ENDED else None,
    }  # fmt: skip


def _at(generation: int, step: int) -> float:
    return BEGAN[generation] + (step - SPANS[generation][0] - 1) * STEP_SECONDS


def _seats(generation: int) -> list[dict[str, Any]]:
    depth, replicas = SHAPES[generation]
    gone = {2: (), 3: (2, 5), 4: (2, 5, 7)}[generation]
    live = [i for i in range(1, 9) if i not in gone]
    running = generation == max(SHAPES)
    return [
        {
            "job": JOB, "generation": generation, "rank": rank, "node": f"node-{live[rank]}",
            "incarnation": f"incarnation-{live[rank]}", "device": 0, "phase": "step",
            "phases": {}, "applied": SPANS[generation][1],
            "exit": None if running else {"code": None, "signal": 9, "log_tail": ""},
        }
        for rank in range(depth * replicas)
    ]  # fmt: skip


def _loss(step: int) -> float:
    return 2.2 + 3.4 * math.exp(-step / 45) + 0.05 * math.sin(step * 1.7)


def _evaluations(number: int, start: float) -> list[dict[str, Any]]:
    """As the steps are, a little worse."""
    return [
        {
            "job": JOB, "generation": number, "step": step["step"], "at": step["at"],
            "loss": step["loss"] + 0.125, "samples": 100, "seconds": 0.5, "metrics": {},
        }
        for step in _steps(number, start)
        if step["step"] % EVALUATE_EVERY == 0
    ]  # fmt: skip


def _steps(generation: int, start: float) -> list[dict[str, Any]]:
    first, last = SPANS[generation]
    return [
        {
            "job": JOB, "generation": generation, "step": step, "at": start + _at(generation, step),
            "loss": _loss(step), "grad_norm": 1.0, "samples": BATCH_SIZE,
            "sample_ids_hash": expected_hash(step, BATCH_SIZE, SAMPLES, seed=0),
            "seconds": STEP_SECONDS, "metrics": {},
        }
        for step in range(first + 1, last + 1)
    ]  # fmt: skip


def _recovery(to: int, start: float) -> dict[str, Any]:
    at_step, resumed = SPANS[to - 1][1], SPANS[to][0]
    gap = 2.14 if to == 3 else 1.62
    phases = {"detect": 0.09, "decide": 0.31, "save": 0.0, "stop": 0.12, "launch": 0.3,
              "rendezvous": 0.25, "load": 0.14, "first_step": gap - 1.21}  # fmt: skip
    shapes = ["x".join(map(str, SHAPES[g])) for g in (to - 1, to)]
    return {
        "job": JOB, "to_generation": to, "from_generation": to - 1, "at_step": at_step,
        "resumed_from": resumed, "began_at": start + ENDED[to - 1], "gap_seconds": gap,
        "ended_at": start + BEGAN[to], "phases": phases, "from_shape": shapes[0],
        "to_shape": shapes[1], "reason": "node_lost", "because": "nodes were lost",
    }  # fmt: skip


def _saved(start: float) -> dict[sa.Table, list[dict[str, Any]]]:
    """A complete checkpoint every ten steps."""
    at = [(g, s) for g in SHAPES for s in range(SPANS[g][0] + 10, SPANS[g][1] + 1, 10)]
    folders = [(f"step-{step:06d}.g{g}", g, step, start + _at(g, step)) for g, step in at]
    folders.insert(0, ("step-000000.g1", 1, 0, start + 8))
    return {
        checkpoints: [
            {"job": JOB, "folder": folder, "step": step, "generation": g, "complete_at": moment}
            for folder, g, step, moment in folders
        ],
        parts: [
            {"job": JOB, "folder": folder, "rank": 0, "layers": list(range(8)), "layer_count": 8,
             "num_bytes": 1_400_000, "at": moment}
            for folder, _, _, moment in folders
        ],
    }  # fmt: skip


def _events(start: float, name: str) -> list[dict[str, Any]]:
    told = [
        (0.0, "job_submitted", f"{name} was submitted."),
        (10.0, "generation_running", "Generation 2 trains as 4×2."),
        (ENDED[2], "node_lost", "node-2 has not answered for 5 s; treated as lost."),
        (ENDED[2] + 0.01, "node_lost", "node-5 has not answered for 5 s; treated as lost."),
        (BEGAN[3], "recovered", "2 of 8 nodes were lost; re-planned 4×2 → 5×1; resumed from step "
                                "60 (lost 3 steps, 2.1 s)."),
        (ENDED[3], "node_lost", "node-7 has not answered for 5 s; treated as lost."),
        (BEGAN[4], "recovered", "1 of 6 nodes was lost; re-planned 5×1 → 2×2; resumed from step "
                                "120 (lost 4 steps, 1.6 s)."),
    ]  # fmt: skip
    return [
        {"at": start + at, "type": kind, "job": JOB, "message": message, "data": {}}
        for at, kind, message in told
    ]
