"""A trace, played."""

import pytest

from controller.planner.choose import Planner
from controller.planner.moving import Losses, Move, Stay, weigh
from controller.planner.problem import Problem
from controller.planner.rates import Planned, Tabled
from controller.planner.replay import Outcome, Policy, Stops, replay
from controller.planner.trace import read_trace
from tests.unit.controller.builders import costs_of
from tests.unit.controller.planner.pipelines import DATA

HEAD = "t_seconds,event,node\n"
STOPS = Stops(detect_seconds=1.0, decide_seconds=1.0, launch_seconds=2.0)


def table(*rates: float, depth: int | None = None) -> Tabled:
    """Batches of 10 on 1, 2, ... nodes."""
    return Tabled(enumerate(rates, start=1), 10, depth)


def played(trace: str, paces: Tabled, policy: Policy | None = None) -> Outcome:
    return replay(read_trace(HEAD + trace), paces, STOPS, policy or Policy())


def test_without_a_loss_all_but_the_launch_is_training() -> None:
    out = played("0,add,a\n102,add,b\n", table(10.0, 10.0))
    assert (out.steps, out.lost_steps, out.losses, out.stopped_seconds) == (60, 0, 0, 2.0)
    assert out.training_seconds == 100.0


def test_a_loss_goes_back_to_the_newest_checkpoint() -> None:
    policy = Policy(checkpoint_steps=40, checkpoint_seconds=None)
    out = played("0,add,a\n0,add,b\n72,remove,a\n76,add,c\n", table(10.0, 10.0), policy)
    assert (out.steps, out.lost_steps, out.losses) == (40, 30, 1)
    assert out.stopped_seconds == 2.0 + 4.0


def test_survivors_that_hold_every_stage_lose_nothing() -> None:
    trace = "0,add,a\n0,add,b\n0,add,c\n0,add,d\n72,remove,{}\n76,add,x\n"
    four = table(10.0, 10.0, 10.0, 10.0, depth=2)
    whole = played(trace.format("a"), four)
    assert (whole.salvaged, whole.lost_steps, whole.steps) == (1, 0, 70)
    both = played("0,add,a\n0,add,b\n0,add,c\n0,add,d\n72,remove,a\n72,remove,c\n76,add,x\n", four)
    assert (both.salvaged, both.losses, both.lost_steps) == (0, 1, 10)


def test_zero_nodes_are_waited_out() -> None:
    out = played("0,add,a\n12,remove,a\n112,add,b\n124,remove,b\n", table(10.0))
    assert out.waiting_seconds == 100.0
    assert out.seconds == 124.0
    assert out.node_seconds == 24.0


def test_a_lost_spare_stops_nothing() -> None:
    trace = "0,add,a\n0,add,b\n30,remove,b\n62,add,c\n"
    out = played(trace, Tabled([(1, 10.0)], 10))
    assert (out.losses, len(out.gaps)) == (0, 1)


def test_the_job_grows_once_it_has_settled_and_only_if_it_is_worth_it() -> None:
    trace = "0,add,a\n10,add,b\n1000,remove,b\n"
    assert played(trace, table(10.0, 20.0)).moves == 1
    assert played(trace, table(10.0, 10.2)).moves == 0
    assert played("0,add,a\n10,add,b\n60,remove,b\n", table(10.0, 20.0)).moves == 0


def test_the_same_trace_gives_the_same_numbers_and_more_than_the_rivals() -> None:
    """Samples/s on this trace: Bamboo 64, Varuna (the paper's) 188, Oobleck 221."""
    trace = read_trace((DATA / "oobleck_p3_scaled.csv").read_text())
    rates = Tabled.read((DATA / "bert_large_varuna.csv").read_text(), 1024)
    stops = Stops(0.0, 0.0, 1.6, state_bytes=4.1e9)
    first, second = (replay(trace, rates, stops, Policy()) for _ in range(2))
    assert first == second
    assert first.steps * 1024 / first.seconds > 221
    busy = first.training_seconds + first.stopped_seconds + first.waiting_seconds
    assert busy == pytest.approx(first.seconds, rel=0.001)


def test_the_planner_gives_the_pace_on_measured_costs() -> None:
    planner = Planner(Problem(costs_of(6), 64, 4))
    one, four = Planned(planner).of(1), Planned(planner).of(4)
    assert one and four and four.step_seconds < one.step_seconds
    assert four.nodes <= 4 and four.depth is not None


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ("a,b\n1,2\n", "columns"),
        (HEAD + "x,add,a\n", "line 2: 'x' is not a number"),
        (HEAD + "1,take,a\n", "line 2: the event is add or remove"),
        (HEAD + "1,add\n", "line 2: it names no node"),
        (HEAD + "nan,add,a\n", "line 2: 'nan' is not a number"),
        (HEAD, "two moments or more"),
        (HEAD + "1,add,a\n1,add,b\n", "two moments or more"),
        ("", "columns"),
    ],
)
def test_a_trace_that_cannot_be_read_is_refused_in_a_sentence(text: str, sentence: str) -> None:
    with pytest.raises(ValueError, match=sentence):
        read_trace(text)


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ("", "columns"),
        ("a,b,c\n1,2,3\n", "columns"),
        ("0,5\n", "line 1: whole devices"),
        ("devices,samples_per_second\n2.5,5\n", "line 2: whole devices"),
        ("1,5\n2,0\n", "line 2: whole devices"),
        ("1,5\n2,fast\n", "line 2: 'fast' is not a number"),
    ],
)
def test_a_table_of_rates_that_makes_no_sense_is_refused_in_a_sentence(
    text: str, sentence: str
) -> None:
    with pytest.raises(ValueError, match=sentence):
        Tabled.read(text, 10)


def test_a_move_is_worth_it_when_it_saves_more_than_it_takes_before_the_next_loss() -> None:
    usual = {"min_gain": 0.05, "move_seconds": 10.0, "seconds_left": 1000.0}
    assert weigh(1.0, 0.5, **usual, losses=Losses()) == Move(0.5)
    small = weigh(1.0, 0.97, **usual, losses=Losses())
    assert isinstance(small, Stay) and "below the 5% limit" in small.because
    often = weigh(1.0, 0.5, **usual, losses=Losses(count=10, watched_seconds=100.0))
    assert isinstance(often, Stay) and "until the next loss" in often.because
    late = weigh(1.0, 0.5, **{**usual, "seconds_left": 15.0}, losses=Losses())
    assert isinstance(late, Stay) and "until the end" in late.because
