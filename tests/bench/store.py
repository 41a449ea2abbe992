"""What a job leaves behind: how long the readers of the store take after 200 generations and
200,000 steps, as they came and once they were proven and thinned.

Each figure is the median of a few calls in a row, in seconds of processor time, so that what others
do on the machine is not in it; the database lies in the page cache.
"""

import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import Any

import sqlalchemy as sa

from agent import wire
from controller.api import metrics, past, views
from controller.clock import SystemClock
from controller.core.jobspec import Checkpointing, Every, JobSpec, NodeRange
from controller.store import ledger, pruning
from controller.store.engine import Store
from controller.store.snapshot import Snapshots
from controller.store.tables import (
    checkpoints,
    generations,
    jobs,
    nodes,
    recoveries,
    seats,
    steps,
)
from tests.bench.figures import Machine, end, flags, table, tell
from trainer.contract.samples import expected_hash

JOB = "job_01JLONG00000000000000000000"
BATCH_SIZE, SAMPLES, STEP_SECONDS = 8, 50_000, 0.5
EVERY, LOST, RANKS = 50, 5, 8
LOG_TAIL = "a line of the log\n" * 60


def main() -> None:
    """Print the table and the JSON line."""
    given, machine = flags(__doc__ or "", 1, 5), Machine()
    machine.look()
    spans = _spans(20, 20_000) if given.quick else _spans(200, 200_000)
    with tempfile.TemporaryDirectory(prefix="varuna-store-") as folder:
        file = Path(folder) / "varuna.db"
        store = Store(f"sqlite:///{file}")
        now = SystemClock().now()
        tell(f"{len(spans)} generations, {spans[-1][2]:,} steps")
        store.write(lambda c: _tell_story(c, spans, now)).result()
        figures = {"as they came": _read_all(store, given.rounds, now)}
        began = time.process_time()
        passes = _prune(store)
        seconds = time.process_time() - began
        tell(f"pruned in {passes} passes of {1000 * seconds / passes:.1f} ms")
        figures["pruned"] = _read_all(store, given.rounds, now)
        rows = _count(store)
        store.close()
    names = list(figures["pruned"])
    table(["seconds", *figures], [[name, *(f[name] for f in figures.values())] for name in names])
    machine.look()
    end({"bench": "store", **figures, "rows": rows, "machine": machine.view()})


def _spans(number: int, last: int) -> list[tuple[int, int, int]]:
    """(generation, the step it resumed from, the last one it committed)."""
    each = last // number
    return [(g, (g - 1) * each, g * each + LOST) for g in range(1, number + 1)]


def _read_all(store: Store, rounds: int, now: float) -> dict[str, float]:
    snapshots = Snapshots()
    with store.read() as c:
        row = c.execute(sa.select(jobs)).one()
        readers: dict[str, Callable[[], object]] = {
            "GET /jobs/{id}": lambda: views.job_view(c, row),
            "GET /metrics": lambda: metrics.exposition(c, now, 0),
            "snapshot, first": lambda: Snapshots().load(c, {}, 0.0),
            "snapshot": lambda: snapshots.load(c, {}, 0.0),
            "GET series": lambda: past.series_view(c, row, 1000),
            "GET generations": lambda: past.generation_views(c, row.id),
            "GET recoveries": lambda: past.recovery_views(c, row.id),
            "GET checkpoints": lambda: past.checkpoint_views(c, row.id),
            "GET ledger": lambda: past.ledger_view(c, row),
            "page, its recoveries": lambda: past.replay_view(ledger.replay_of(c, row.id)),
        }
        return {name: _seconds(read, rounds) for name, read in readers.items()}


def _seconds(read: Callable[[], object], rounds: int) -> float:
    taken = []
    for _ in range(rounds):
        began = time.thread_time()
        read()
        taken.append(time.thread_time() - began)
    return round(median(taken), 4)


def _prune(store: Store) -> int:
    passes = 1
    while store.write(lambda c: pruning.prune(c, 0.0)).result():
        passes += 1
    return passes


def _count(store: Store) -> dict[str, int]:
    with store.read() as c:
        return {
            t.name: c.execute(sa.select(sa.func.count()).select_from(t)).scalar_one()
            for t in (generations, seats, steps, checkpoints)
        }


# ---- the story


def _tell_story(c: sa.Connection, spans: list[tuple[int, int, int]], now: float) -> None:
    start = now - STEP_SECONDS * spans[-1][2]
    c.execute(jobs.insert(), [_job(spans, start)])
    c.execute(nodes.insert(), [_node(i, start) for i in range(len(spans))])
    c.execute(generations.insert(), [_generation(*span, spans, start) for span in spans])
    c.execute(seats.insert(), [seat for span in spans for seat in _seats(*span)])
    for span in spans:
        c.execute(steps.insert(), list(_steps(*span, start)))
    c.execute(checkpoints.insert(), [saved for span in spans for saved in _saved(*span, start)])
    c.execute(recoveries.insert(), [_recovery(*span, start) for span in spans[1:]])


def _job(spans: list[tuple[int, int, int]], start: float) -> dict[str, Any]:
    spec = JobSpec(
        name="long", program="builtin:gpt", nodes=NodeRange(min=1, max=RANKS),
        batch_size=BATCH_SIZE, steps=10_000_000,
        checkpoint=Checkpointing(dir="/mnt/ckpt", every=Every(steps=EVERY)),
    )  # fmt: skip
    return {
        "id": JOB, "name": "long", "spec": spec.model_dump(mode="json"), "state": "running",
        "message": "Training.", "cancel_wanted": False, "generation": len(spans),
        "samples": SAMPLES, "submitted_at": start, "started_at": start,
    }  # fmt: skip


def _node(i: int, start: float) -> dict[str, Any]:
    facts = wire.Facts(
        hostname="spot", boot_id="b", pid=1000 + i, cores=2, memory_bytes=24 << 30,
        devices=(wire.Device(kind="cpu", index=0, memory_bytes=24 << 30),),
        data_host="127.0.0.1", store_port=4000, agent_version="0.1.0",
    )  # fmt: skip
    live = i < RANKS
    return {
        "name": f"node-{i}", "incarnation": f"incarnation-{i}", "reported": 0,
        "state": "working" if live else "lost", "facts": facts.model_dump(mode="json"),
        "registered_at": start + i, "heard_at": start + i, "gone_at": None if live else start + i,
    }  # fmt: skip


def _generation(
    number: int, first: int, last: int, spans: list[tuple[int, int, int]], start: float
) -> dict[str, Any]:
    begun = {"step": first, "generation": number - 1, "folder": f"step-{first:06d}.g{number - 1}"}
    at, over = start + STEP_SECONDS * first, number < len(spans)
    return {
        "job": JOB, "number": number, "kind": "train", "state": "ended" if over else "running",
        "shape": {"depth": 4, "replicas": 2, "micro_batch": 4}, "cuts": [0, 2, 4, 6, 8],
        "resumed_from": begun if first else None, "because": "4×2: the fastest of 9 shapes",
        "created_at": at, "launched_at": at, "committed": last, "first_step_at": at,
        "committed_at": start + STEP_SECONDS * last, "charged": False,
        "ended_at": start + STEP_SECONDS * last if over else None,
        "end_reason": "node_lost" if over else None, "end_because": "a node is lost",
    }  # fmt: skip


def _seats(number: int, first: int, last: int) -> list[dict[str, Any]]:
    return [
        {
            "job": JOB, "generation": number, "rank": rank, "node": f"node-{rank}",
            "incarnation": f"incarnation-{rank}", "device": 0, "phase": "step", "phases": {},
            "applied": last, "exit": {"code": None, "signal": 9, "log_tail": LOG_TAIL},
        }
        for rank in range(RANKS)
    ]  # fmt: skip


def _steps(number: int, first: int, last: int, start: float) -> list[dict[str, Any]]:
    return [
        {
            "job": JOB, "generation": number, "step": step, "at": start + STEP_SECONDS * step,
            "loss": 2.0 + 1.0 / step, "grad_norm": 1.0, "samples": BATCH_SIZE,
            "sample_ids_hash": expected_hash(step, BATCH_SIZE, SAMPLES, 0),
            "seconds": STEP_SECONDS, "metrics": {},
        }
        for step in range(first + 1, last + 1)
    ]  # fmt: skip


def _saved(number: int, first: int, last: int, start: float) -> list[dict[str, Any]]:
    """One whole checkpoint every so often; all but the newest three of all were deleted."""
    at = start + STEP_SECONDS * last
    return [
        {"job": JOB, "folder": f"step-{step:06d}.g{number}", "step": step, "generation": number,
         "complete_at": at, "deleted_at": at if last - step > 3 * EVERY else None}
        for step in range(first + EVERY, last + 1, EVERY)
    ]  # fmt: skip


def _recovery(number: int, first: int, last: int, start: float) -> dict[str, Any]:
    at = start + STEP_SECONDS * first
    return {
        "job": JOB, "to_generation": number, "from_generation": number - 1,
        "at_step": first + LOST, "resumed_from": first, "began_at": at, "ended_at": at + 2.0,
        "gap_seconds": 2.0, "phases": {"detect": 0.1, "load": 0.4}, "from_shape": "4x2",
        "to_shape": "4x2", "reason": "node_lost", "because": "nodes were lost",
    }  # fmt: skip


if __name__ == "__main__":
    main()
