"""The schedule's golden orders, its invariants, and that no order of arrivals can hang it."""

import random
import re
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from trainer.contract.schedule import (
    Kind,
    Order,
    StagePlan,
    StageState,
    Task,
    as_text,
    most_in_flight,
    static_order,
    ticks,
)
from trainer.contract.spec import ScheduleName

SCHEDULES: tuple[ScheduleName, ...] = ("varuna", "1f1b", "gpipe")


def spelled(short: str) -> str:
    """``F0-2 R0B0`` -> ``F0 F1 F2 R0 B0``."""
    tasks: list[str] = []
    for kind, first, last in re.findall(r"([FRB])(\d+)(?:-(\d+))?", short):
        tasks += [f"{kind}{m}" for m in range(int(first), int(last or first) + 1)]
    return " ".join(tasks)


P4_N5 = (
    "F0-4 R0B0 R1B1 R2B2 R3B3 R4B4",
    "F0-4 R0B0 R1B1 R2B2 R3B3 R4B4",
    "F0-2 R0B0 R1B1 R2B2 F3 F4 R3B3 R4B4",
    "F0B0 F1B1 F2B2 F3B3 F4B4",
)
P4_N8 = (
    "F0-7 R0B0 R1B1 R2B2 R3B3 R4B4 R5B5 R6B6 R7B7",
    "F0-5 R0B0 R1B1 R2B2 F6 F7 R3B3 R4B4 R5B5 R6B6 R7B7",
    "F0-2 R0B0 R1B1 R2B2 F3-5 R3B3 R4B4 R5B5 F6 F7 R6B6 R7B7",
    "F0B0 F1B1 F2B2 F3B3 F4B4 F5B5 F6B6 F7B7",
)


@pytest.mark.parametrize("golden", [P4_N5, P4_N8])
def test_the_varuna_order_is_the_papers(golden: tuple[str, ...]) -> None:
    micro_batches = golden[3].count("F")
    orders = static_order("varuna", 4, micro_batches)
    assert [as_text(order) for order in orders] == [spelled(line) for line in golden]


def test_1f1b_and_gpipe_recompute_too() -> None:
    assert [as_text(order) for order in static_order("1f1b", 3, 4)] == [
        spelled("F0-2 R0B0 F3 R1B1 R2B2 R3B3"),
        spelled("F0 F1 R0B0 F2 R1B1 F3 R2B2 R3B3"),
        spelled("F0B0 F1B1 F2B2 F3B3"),
    ]
    assert {as_text(order) for order in static_order("gpipe", 2, 3)} == {
        spelled("F0-2 R0B0 R1B1 R2B2")
    }


@pytest.mark.parametrize(
    ("stages", "micro_batches", "expected"),
    [
        (4, 5, 27),
        (2, 8, 33),
        (4, 8, 39),
        (4, 32, 135),
        (8, 32, 147),
        (8, 128, 531),
        (8, 64, 276),
        (16, 128, 555),
        (49, 43, 315),
        (49, 683, 2874),
    ],
)
def test_the_varuna_order_takes_as_many_ticks_as_published(
    stages: int, micro_batches: int, expected: int
) -> None:
    assert ticks("varuna", stages, micro_batches) == expected


def test_the_rivals_recompute_when_the_gradient_is_there() -> None:
    assert ticks("gpipe", 8, 64) == 284
    assert ticks("1f1b", 8, 64) == 282


@pytest.mark.parametrize("stages", range(1, 9))
def test_in_flight_grows_to_three_times_the_distance_to_the_last_stage(stages: int) -> None:
    varuna = static_order("varuna", stages, 64)
    one_f_one_b = static_order("1f1b", stages, 64)
    for stage in range(stages):
        assert most_in_flight(varuna[stage]) == max(1, 3 * (stages - 1 - stage))
        assert most_in_flight(one_f_one_b[stage]) == stages - stage


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("stages", range(1, 9))
def test_every_stage_runs_each_micro_batch_forward_and_backward_once(
    schedule: ScheduleName, stages: int
) -> None:
    for micro_batches in range(1, 21):
        for stage, order in enumerate(static_order(schedule, stages, micro_batches)):
            each = list(range(micro_batches))
            recomputed = each if schedule == "gpipe" or stage < stages - 1 else []
            assert _micro_batches(order, Kind.FORWARD) == each
            assert _micro_batches(order, Kind.BACKWARD) == each
            assert _micro_batches(order, Kind.RECOMPUTE) == recomputed
            for before, task in pairwise(order):
                if before.kind is Kind.RECOMPUTE:
                    assert task == Task(Kind.BACKWARD, before.micro_batch)


def _micro_batches(order: Order, kind: Kind) -> list[int]:
    return [task.micro_batch for task in order if task.kind is kind]


@settings(max_examples=300, deadline=None)
@given(
    schedule=st.sampled_from(SCHEDULES),
    stages=st.integers(1, 8),
    micro_batches=st.integers(1, 20),
    spare=st.integers(0, 5),
    seed=st.integers(0, 2**32),
)
def test_no_order_of_arrivals_hangs_a_pipeline_or_passes_its_cap(
    schedule: ScheduleName, stages: int, micro_batches: int, spare: int, seed: int
) -> None:
    """Stages take turns at random and messages arrive late, each link in its own order."""
    chance = random.Random(seed)
    needed = [most_in_flight(order) for order in static_order(schedule, stages, micro_batches)]
    plans = [
        StagePlan.of(schedule, stage, stages, micro_batches, in_flight=needed[stage] + spare)
        for stage in range(stages)
    ]
    states = [StageState(plan) for plan in plans]
    links: dict[tuple[int, Kind], list[int]] = {}
    ran: list[list[Task]] = [[] for _ in range(stages)]
    idle = 0
    while not all(state.is_done for state in states):
        moved = False
        full = [link for link, messages in links.items() if messages]
        if full and (idle > 50 or chance.random() < 0.4):
            stage, kind = chance.choice(full)
            states[stage].arrived(kind, links[stage, kind].pop(0))
            moved = True
        stage = chance.randrange(stages)
        if task := states[stage].next_task():
            moved = True
            ran[stage].append(task)
            assert states[stage].in_flight <= plans[stage].cap
            if task.kind is Kind.FORWARD and stage < stages - 1:
                links.setdefault((stage + 1, task.kind), []).append(task.micro_batch)
            if task.kind is Kind.BACKWARD and stage > 0:
                links.setdefault((stage - 1, task.kind), []).append(task.micro_batch)
        idle = 0 if moved else idle + 1
        assert idle < 1000, "the pipeline stands still"
    for stage, tasks in enumerate(ran):
        assert sorted(tasks) == sorted(plans[stage].order)
        for kind in Kind:
            assert _micro_batches(tuple(tasks), kind) == _micro_batches(plans[stage].order, kind)


def state_after(plan: StagePlan, *arrivals: tuple[Kind, int]) -> StageState:
    state = StageState(plan)
    for kind, micro_batch in arrivals:
        state.arrived(kind, micro_batch)
    return state


def test_a_forward_runs_instead_of_a_recompute_that_would_wait() -> None:
    plan = StagePlan.of("varuna", 2, 4, 5, in_flight=4)
    state = state_after(plan, *((Kind.FORWARD, m) for m in range(5)))
    tasks = [state.next_task() for _ in range(6)]
    assert _text(tasks) == "F0 F1 F2 F3 R0 -"  # four in flight, then the recompute, then wait


def test_a_recompute_whose_gradient_is_here_is_never_displaced() -> None:
    plan = StagePlan.of("varuna", 2, 4, 5, in_flight=5)
    state = state_after(plan, *((Kind.FORWARD, m) for m in range(5)), (Kind.BACKWARD, 0))
    assert _text([state.next_task() for _ in range(5)]) == "F0 F1 F2 R0 B0"


def test_a_backward_after_its_recompute_is_never_displaced() -> None:
    plan = StagePlan.of("varuna", 2, 4, 5, in_flight=5)
    state = state_after(plan, *((Kind.FORWARD, m) for m in range(3)))
    assert _text([state.next_task() for _ in range(4)]) == "F0 F1 F2 R0"
    state.arrived(Kind.FORWARD, 3)
    assert state.next_task() is None
    state.arrived(Kind.BACKWARD, 0)
    assert _text([state.next_task()]) == "B0"


def test_a_rival_waits_for_the_gradient_before_it_recomputes() -> None:
    state = StageState(StagePlan.of("1f1b", 0, 2, 2))
    assert _text([state.next_task() for _ in range(3)]) == "F0 F1 -"
    state.arrived(Kind.BACKWARD, 0)
    assert _text([state.next_task() for _ in range(3)]) == "R0 B0 -"


def test_a_cap_below_what_the_static_order_needs_is_refused() -> None:
    with pytest.raises(ValueError, match="stage 0 needs 9"):
        StagePlan.of("varuna", 0, 4, 32, in_flight=8)


def _text(tasks: list[Task | None]) -> str:
    return " ".join(str(task) if task else "-" for task in tasks)
