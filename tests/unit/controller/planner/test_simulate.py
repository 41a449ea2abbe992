"""The played mini-batch: as published, as measured, and the same by two ways."""

from collections.abc import Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from controller.planner.bound import least_seconds
from controller.planner.gantt import rows
from controller.planner.longest import longest_path
from controller.planner.pipeline import Hop, Jitter, Pipeline, Played, StageTimes
from controller.planner.simulate import Run, play
from tests.unit.controller.planner.pipelines import authors, even
from trainer.contract.schedule import Kind, Task, most_in_flight, static_order, usual_in_flight

PUBLISHED = [(2, 8, 33), (4, 8, 39), (4, 32, 135), (8, 32, 147), (8, 128, 531), (16, 128, 555),
             (49, 43, 315), (49, 683, 2874), (4, 5, 27)]  # fmt: skip


@pytest.mark.parametrize(("stages", "micro_batches", "ticks"), PUBLISHED)
def test_the_static_order_takes_the_published_ticks(
    stages: int, micro_batches: int, ticks: int
) -> None:
    if micro_batches < 600:
        played = play(even(stages), "varuna-static", micro_batches)
        assert played.pipeline_seconds == ticks
    assert longest_path(even(stages), "varuna-static", micro_batches).pipeline_seconds == ticks


def test_the_authors_run_of_a_20b_model_is_reproduced() -> None:
    static = play(authors().pipeline(), "varuna-static", 43).pipeline_seconds
    assert static == pytest.approx(15.451, rel=0.03)


def test_on_the_authors_links_1f1b_takes_a_fifth_longer() -> None:
    pipeline = authors().pipeline()
    varuna = play(pipeline, "varuna", 43).pipeline_seconds
    assert play(pipeline, "1f1b", 43).pipeline_seconds >= 1.2 * varuna


@pytest.mark.parametrize(
    ("stages", "send", "cv", "link", "gpipe", "one_f_one_b", "static", "varuna"),
    [
        (8, 0.0, 0.0, 0.0, 284, 282, 276, 274),
        (8, 0.25, 0.0, 0.0, 288, 312, 290, 282),
        (8, 0.25, 0.3, 1.0, 322, 381, 322, 299),
        (16, 0.25, 0.3, 1.0, 380, 431, 356, 334),
    ],
)
def test_the_schedules_stand_to_each_other_as_known(
    stages: int,
    send: float,
    cv: float,
    link: float,
    gpipe: float,
    one_f_one_b: float,
    static: float,
    varuna: float,
) -> None:
    """engine.md, section 3: 64 micro-batches, mean over 8 seeds."""
    seeds = range(8 if cv else 1)
    published: dict[Played, float] = {
        "gpipe": gpipe, "1f1b": one_f_one_b, "varuna-static": static, "varuna": varuna
    }  # fmt: skip
    for schedule, known in published.items():
        runs = [_jittered(stages, send, schedule, cv, link, seed) for seed in seeds]
        mean = sum(run.pipeline_seconds for run in runs) / len(runs)
        assert mean == pytest.approx(known, rel=0.015), schedule


def _jittered(stages: int, send: float, schedule: Played, cv: float, link: float, seed: int) -> Run:
    return play(even(stages, send), schedule, 64, jitter=Jitter.of(cv, link), seed=seed)


def test_in_flight_peaks_at_three_times_the_distance_to_the_last_stage() -> None:
    assert play(even(4), "varuna", 32).in_flight_peak == (9, 6, 3, 1)
    assert play(even(4), "1f1b", 32).in_flight_peak == (4, 3, 2, 1)
    assert play(even(4), "gpipe", 32).in_flight_peak == (32, 32, 32, 32)


def test_the_bubble_is_the_share_of_time_in_which_nothing_is_done() -> None:
    assert play(even(1), "varuna", 7).bubble == 0.0
    assert play(even(2), "varuna-static", 1).bubble == pytest.approx(1 - (4 + 3) / (2 * 6))


def test_the_same_seed_gives_the_same_run_and_another_seed_another() -> None:
    runs = [_jittered(4, 0.25, "varuna", 0.3, 1.0, seed) for seed in (7, 7, 8)]
    assert runs[0] == runs[1] != runs[2]


def test_a_message_waits_for_the_link_and_no_more_than_four_are_on_the_way() -> None:
    one_after_the_other = play(even(2, busy=10.0), "varuna-static", 8).pipeline_seconds
    assert one_after_the_other >= 8 * 10
    slow = play(even(2, send=100.0), "varuna-static", 8).pipeline_seconds
    fast = play(even(2, send=100.0), "varuna-static", 4).pipeline_seconds
    assert slow >= fast + 100


def test_a_recompute_begins_in_its_place_before_its_gradient_has_come() -> None:
    spans = play(even(3, send=5.0), "varuna-static", 1, watched=True).spans
    (forward, recompute, backward), *_ = spans
    assert recompute.start == forward.end
    assert backward.start > recompute.end
    waits = play(even(3, send=5.0), "1f1b", 1, watched=True).spans[0]
    assert waits[1].start > waits[0].end


def test_the_step_ends_when_the_slowest_stage_has_summed_and_all_have_voted() -> None:
    pipeline = Pipeline(
        (StageTimes(1, 1, 2), StageTimes(1, 1, 2, is_last=True)), (Hop(0.0),), (0.0, 9.0), 0.5
    )
    played = play(pipeline, "varuna", 1)
    assert played.ends == (6.0, 4.0)
    assert played.step_seconds == 4.0 + 9.0 + 0.5


def test_the_picture_shows_each_stage_over_the_same_time() -> None:
    drawn = rows(play(even(4), "varuna-static", 5, watched=True).spans, 27)
    assert drawn == [
        "FFFFFR····BBRBBRBBR···BBRBB",
        "·FFFFFR·BBRBBRBBR···BBRBB··",
        "··FFFRBBRBBRBBFFR·BBRBB····",
        "···FBBFBBFBB···FBBFBB······",
    ]


SECONDS = st.floats(0, 5)
STAGE = st.tuples(SECONDS, SECONDS, SECONDS)


def pipeline_of(
    stages: Sequence[tuple[float, float, float]], hops: Sequence[tuple[float, float]]
) -> Pipeline:
    last = len(stages) - 1
    return Pipeline(
        tuple(StageTimes(*s, is_last=at == last) for at, s in enumerate(stages)),
        tuple(Hop(*hop) for hop in hops[:last]),
        reduce=tuple(s[0] for s in stages),
        after=0.25,
    )


@settings(max_examples=150, deadline=None)
@given(
    stages=st.lists(STAGE, min_size=1, max_size=6),
    hops=st.lists(st.tuples(SECONDS, SECONDS), min_size=5, max_size=5),
    micro_batches=st.integers(1, 12),
    schedule=st.sampled_from(["varuna-static", "1f1b", "gpipe"]),
    jitter=st.sampled_from([Jitter(), Jitter.of(0.3, 0.5)]),
    last=st.sampled_from([1.0, 0.25]),
)
def test_the_longest_path_is_the_event_run_of_a_static_order(
    stages: list[tuple[float, float, float]],
    hops: list[tuple[float, float]],
    micro_batches: int,
    schedule: Played,
    jitter: Jitter,
    last: float,
) -> None:
    pipeline = pipeline_of(stages, hops)
    events = play(pipeline, schedule, micro_batches, jitter=jitter, seed=5, last=last)
    path = longest_path(pipeline, schedule, micro_batches, jitter=jitter, seed=5, last=last)
    assert path.ends == pytest.approx(events.ends)
    assert path.step_seconds == pytest.approx(events.step_seconds)
    assert path.in_flight_peak == events.in_flight_peak
    assert path.bubble == pytest.approx(events.bubble, abs=1e-9)


@settings(max_examples=200, deadline=None)
@given(
    stages=st.lists(STAGE, min_size=1, max_size=6),
    hops=st.lists(st.tuples(SECONDS, SECONDS), min_size=5, max_size=5),
    micro_batches=st.integers(1, 12),
    schedule=st.sampled_from(["varuna", "varuna-static", "1f1b", "gpipe"]),
    caps=st.none() | st.lists(st.integers(1, 6), min_size=6, max_size=6),
    last=st.sampled_from([1.0, 0.25]),
)
def test_no_play_is_shorter_than_its_bound_and_each_task_runs_once_within_its_cap(
    stages: list[tuple[float, float, float]],
    hops: list[tuple[float, float]],
    micro_batches: int,
    schedule: Played,
    caps: list[int] | None,
    last: float,
) -> None:
    pipeline, depth = pipeline_of(stages, hops), len(stages)
    static: Played = "varuna" if schedule == "varuna-static" else schedule
    usual = usual_in_flight(static, depth, micro_batches)  # type: ignore[arg-type]
    few = tuple(caps[:depth]) if caps and static == "varuna" else usual
    run = play(pipeline, schedule, micro_batches, in_flight=few, last=last, watched=True)

    assert run.step_seconds >= least_seconds(pipeline, micro_batches, last, few)
    for stage, spans in enumerate(run.spans):
        assert run.in_flight_peak[stage] <= few[stage]
        for kind in (Kind.FORWARD, Kind.BACKWARD):
            assert [s.task for s in spans if s.task.kind is kind] == [
                Task(kind, m) for m in range(micro_batches)
            ]


@pytest.mark.parametrize("schedule", ["varuna", "1f1b", "gpipe"])
def test_no_order_has_more_in_flight_than_usual(schedule: str) -> None:
    for stages in range(1, 9):
        for micro_batches in range(1, 30):
            orders = static_order(schedule, stages, micro_batches)
            usual = usual_in_flight(schedule, stages, micro_batches)  # type: ignore[arg-type]
            for order, most in zip(orders, usual, strict=True):
                assert most_in_flight(order) <= most


def test_under_a_cap_a_stage_never_has_more_in_flight() -> None:
    caps = (3, 2, 2, 1)
    orders = static_order("varuna", 4, 20, caps)
    assert tuple(map(most_in_flight, orders)) == caps
