"""Whatever happens, in whatever order: the laws hold, every look is followed by a quiet one, and
once all is healthy the jobs end.

The laws are the cluster's asserts: no action touches a finished job, a launch never seats a gone
node or one that works for another, two generations of a job never both live, numbers never come
back, every move is in its table, what is loaded is complete and not condemned; nothing is asked of
a rank that is gone or torn, and each layer of a salvage is written by a survivor that holds it at
that step.
"""

from typing import NamedTuple

from hypothesis import example, given, settings
from hypothesis import strategies as st

from controller.core.states import GenerationState, JobState, Reason
from controller.core.world import Quarantine
from tests.unit.controller.builders import job
from tests.unit.controller.cluster import Cluster
from trainer.contract.progress import ExitCode

JOBS = ("job_a", "job_b")
BUDGETS = (
    Reason.PROGRAM_ERROR,
    Reason.RESTART_BUDGET,
    Reason.CHECKPOINT_DAMAGED,
    Reason.CHECKPOINT_UNREACHABLE,
)
CHARGED = ("fail", "exit", "signal", "damage")


class Fact(NamedTuple):
    """Something that happens to a cluster; ``which`` picks the node, job or rank."""

    kind: str
    which: int
    seconds: float


KINDS = (
    ["work"] * 8
    + ["time"] * 4
    + ["kill", "freeze", "thaw", "join", "return", "break", "halt", "half a save"]
    + ["late", "torn", "refuse", "notice", "pause", "resume", "stop without saving", "unable"]
    + ["unreachable", "reachable", "stranger", "submit", "cancel", "cut", "set aside"]
    + list(CHARGED)
)
facts = st.lists(
    st.builds(
        Fact,
        st.sampled_from(KINDS),
        st.integers(0, 7),
        st.sampled_from([0.0, 0.1, 0.3, 1.0, 2.1, 5.1, 30.0]),
    ),
    min_size=12,
    max_size=60,
)


def happen(cluster: Cluster, fact: Fact, frozen: set[str]) -> None:
    """Bring ``fact`` about, if the cluster is such that it can."""
    names = list(cluster.nodes)
    name = names[fact.which % len(names)] if names else ""
    job_id = JOBS[fact.which % 2]
    found = cluster.jobs.get(job_id)
    current = found.current if found and not found.state.is_over else None
    seats = current.seats if current and current.is_launched else ()
    rank = fact.which % len(seats) if seats else 0
    match fact.kind:
        case "work":
            for each in cluster.jobs:
                cluster.work(each, save_every=3)
        case "kill" if name:
            cluster.kill(name)
        case "freeze" if name:
            frozen.add(cluster.nodes[name].incarnation)
            cluster.freeze(name)
        case "thaw":
            cluster.mute -= frozen
        case "join" if len(names) < 9:
            cluster.join(f"vm-{cluster.now:g}-{fact.which}")
        case "return" if name:
            cluster.join(name)
        case "break":
            cluster.break_requests(*names)
        case "submit":
            cluster.jobs.setdefault("job_b", job("b", nodes="1..3", steps=7, priority=1))
        case "cancel" if found and fact.which >= 6:
            cluster.cancel(job_id)
        case "unreachable" | "reachable":
            cluster.unreachable = "gone" if fact.kind == "unreachable" else ""
        case "stranger":
            cluster.stranger = fact.which * 2
        case "cut" if len(names) > 1:
            cluster.cut.add(frozenset((name, names[fact.which % len(names) - 1])))
        case "set aside" if name:
            until = cluster.now + 60 * fact.seconds + 1
            cluster.quarantine(name, Quarantine("it flaps", cluster.now, until, 1))
        case "half a save" if seats and current and current.committed:
            cluster.save(job_id, current.committed, complete=False)
        case "halt" if seats:
            cluster.halt(job_id, rank, (rank + 1) % len(seats))
        case "late" if seats and current and current.committed:
            at = current.committed
            cluster.halt(job_id, rank, applied=at - 1, prepared=at, vote_step=at - 1, ballot=None)
        case "torn" if seats and current and current.kind == "train":
            cluster.halt(job_id, rank, torn=True)
        case "notice" if name:
            cluster.notice(name, fact.seconds * 10)
        case "pause" | "resume" if found and not found.state.is_over:
            cluster.pause(job_id, wanted=fact.kind == "pause")
        case "stop without saving" if current and current.state is GenerationState.DRAINING:
            cluster.stop(job_id, save=False)
        case "unable" if name and cluster.nodes[name].preparation:
            cluster.unable(name)
        case "refuse" if seats:
            cluster.refuse(rank, job_id)
        case "fail" | "damage" if seats and job_id == "job_a":
            failures = (ExitCode.PROGRAM_ERROR, ExitCode.STALE, ExitCode.CHECKPOINT_UNREACHABLE)
            damaged = ExitCode.CHECKPOINT_DAMAGED
            cluster.fail(rank, damaged if fact.kind == "damage" else failures[fact.which % 3])
        case "exit" if seats and job_id == "job_a":
            cluster.exit(rank, code=(0, 1, 20, 22)[fact.which % 4], log_tail="\n\nlast words\n")
        case "signal" if seats and job_id == "job_a":
            cluster.exit(rank, signal=9)
        case _:
            pass
    cluster.pass_time(fact.seconds)


@settings(max_examples=50, deadline=None)
@example(
    nodes=4,
    happenings=[
        *[Fact("work", 0, 0.0)] * 9,
        Fact("kill", 0, 0.0),
        Fact("submit", 0, 0.0),
        Fact("set aside", 0, 0.0),
    ],
    step_seconds=0.0,
)
@given(nodes=st.integers(0, 6), happenings=facts, step_seconds=st.sampled_from([0.0, 0.5]))
def test_the_laws_hold_and_all_ends_well(
    nodes: int, happenings: list[Fact], step_seconds: float
) -> None:
    kept, plan = {"dir": "/c", "keep": 2}, {"settle": "2s"}
    cluster = Cluster(job("a", nodes="2..4", steps=12, checkpoint=kept, plan=plan))
    cluster.step_seconds = step_seconds
    for i in range(nodes):
        cluster.join(f"vm-{i}")
    frozen: set[str] = set()
    for fact in happenings:
        happen(cluster, fact, frozen)
        cluster.settle()

    cluster.unreachable = ""
    cluster.cut.clear()
    cluster.mute -= frozen
    for job_id in cluster.jobs:
        cluster.pause(job_id, wanted=False)
    for i in range(4):
        cluster.join(f"new-{i}")
    for turn in range(500):
        cluster.settle()
        if all(found.state.is_over for found in cluster.jobs.values()):
            break
        cluster.pass_time(1.0 if turn < 300 else 600.0)
        for job_id in cluster.jobs:
            cluster.work(job_id, save_every=3)

    harmed = any(
        f.kind in (*CHARGED, "halt", "late", "torn", "unreachable", "kill") for f in happenings
    )
    for found in cluster.jobs.values():
        if found.cancel_wanted and found.state is JobState.CANCELLED:
            assert found.current is None
        elif found.state is JobState.FAILED and harmed:
            assert found.reason in BUDGETS, found.message
        else:
            assert found.state is JobState.SUCCEEDED, found
            assert found.current is None
    assert {done.job for done in cluster.done} <= {
        found.id for found in cluster.jobs.values() if found.state is JobState.SUCCEEDED
    }
