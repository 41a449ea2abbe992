"""What an agent does with orders: a pure function of what runs here and what was ordered."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from agent import wire
from agent.decide import Action, Answer, CarryOut, Kill, Runner, Standing, decide, is_for
from tests.fakes.zygotes import run_spec


def start(generation: int, *, job: str = "job_a", rank: int = 0) -> wire.Start:
    return wire.Start(spec=run_spec(job=job, generation=generation, rank=rank))


def stop(up_to: int, *, job: str = "job_a") -> wire.Stop:
    return wire.Stop(job=job, up_to_generation=up_to)


def look(generation: int) -> wire.Look:
    return wire.Look(job="job_a", generation=generation, root="/ckpt")


def halt(generation: int) -> wire.HaltOrder:
    return wire.HaltOrder(job="job_a", generation=generation)


def forward(generation: int, rank: int = 0) -> wire.ForwardOrder:
    return wire.ForwardOrder(
        job="job_a", generation=generation, rank=rank, step=8, ballot=(1, None)
    )


def save(generation: int, rank: int = 0) -> wire.SaveLayers:
    return wire.SaveLayers(job="job_a", generation=generation, rank=rank, layers=(3,))


def drain(generation: int) -> wire.DrainOrder:
    return wire.DrainOrder(job="job_a", generation=generation)


def save_now(generation: int) -> wire.SaveNowOrder:
    return wire.SaveNowOrder(job="job_a", generation=generation)


def prepare(generation: int = 2, *, job: str = "job_a") -> wire.Prepare:
    program = run_spec().program
    return wire.Prepare(job=job, generation=generation, program=program, trainers=1)


def release(generation: int = 2, *, job: str = "job_a") -> wire.Release:
    return wire.Release(job=job, generation=generation)


def ordered(*bodies: wire.OrderBody) -> Standing:
    return Standing().taking(dict(enumerate(bodies, 1)))


def runs(generation: int, *, job: str = "job_a", rank: int = 0, ending: bool = False) -> Runner:
    return Runner(job, generation, rank, ending)


def test_a_start_on_an_idle_node_is_carried_out() -> None:
    assert decide(ordered(start(2)), []) == (CarryOut(1, start(2)),)


def test_what_is_older_of_the_job_dies_before_a_newer_trainer_is_started() -> None:
    standing = ordered(start(3))
    assert decide(standing, [runs(2)]) == (Kill(runs(2)),)
    assert decide(standing, [runs(2, ending=True)]) == ()
    assert decide(standing, []) == (CarryOut(1, start(3)),)


def test_another_job_and_another_rank_of_the_same_generation_are_left_alone() -> None:
    others = [runs(1, job="job_b"), runs(2, rank=1)]
    assert decide(ordered(start(2)), others) == (CarryOut(1, start(2)),)


def test_a_start_of_what_runs_already_is_answered_and_not_carried_out() -> None:
    assert decide(ordered(start(2)), [runs(2)]) == (Answer(1),)


def test_a_start_that_is_ordered_twice_is_carried_out_once() -> None:
    assert decide(ordered(start(2), start(2)), []) == (CarryOut(1, start(2)), Answer(2))


def test_a_stop_is_done_when_nothing_of_it_is_alive() -> None:
    standing = ordered(stop(2))
    assert decide(standing, [runs(1), runs(2), runs(3)]) == (Kill(runs(1)), Kill(runs(2)))
    assert decide(standing, [runs(2, ending=True), runs(3)]) == ()
    assert decide(standing, [runs(3)]) == (Answer(1),)


def test_two_orders_that_want_the_same_death_kill_once() -> None:
    assert decide(ordered(stop(2), start(3)), [runs(2)]) == (Kill(runs(2)),)


@pytest.mark.parametrize("newer", [start(3), stop(2), look(3)])
@pytest.mark.parametrize("older", [start(2), look(2)])
def test_an_order_older_than_the_newest_known_generation_is_void(
    older: wire.OrderBody, newer: wire.OrderBody
) -> None:
    answers = {a.number: a for a in decide(ordered(older, newer), []) if isinstance(a, Answer)}
    assert (answers[1].error or "").startswith("void: generation 2")
    late = ordered(newer).settling(1).taking({2: older})
    assert [a.number for a in decide(late, []) if isinstance(a, Answer) and a.error] == [2]


@pytest.mark.parametrize("order", [halt(2), drain(2), save_now(2), forward(2), save(2)])
def test_what_is_for_trainers_reaches_its_generation_though_a_newer_one_is_planned(
    order: wire.OrderBody,
) -> None:
    carried = decide(ordered(order, look(3)), [runs(2)])
    assert carried == (CarryOut(1, order), CarryOut(2, look(3)))


@pytest.mark.parametrize("order", [halt(2), drain(2), save_now(2), forward(2), save(2)])
@pytest.mark.parametrize("here", [[], [runs(2, ending=True)], [runs(1)], [runs(2, job="job_b")]])
def test_what_is_for_a_trainer_that_is_gone_is_answered_with_an_error(
    order: wire.OrderBody, here: list[Runner]
) -> None:
    (answer,) = decide(ordered(order), here)
    assert isinstance(answer, Answer) and "does not run here" in (answer.error or "")


def test_a_forward_and_a_save_are_for_one_rank_alone() -> None:
    here = [runs(2, rank=0), runs(2, rank=3)]
    assert is_for(forward(2, rank=3), here[1]) and not is_for(forward(2, rank=3), here[0])
    assert is_for(halt(2), here[0]) and is_for(halt(2), here[1])
    (answer,) = decide(ordered(save(2, rank=1)), here)
    assert isinstance(answer, Answer) and answer.error


def test_a_settled_order_is_not_carried_out_when_it_is_sent_again() -> None:
    standing = ordered(start(2)).settling(1).taking({1: start(2)})
    assert decide(standing, []) == ()


def test_a_spare_gets_ready_when_nothing_runs_there() -> None:
    assert decide(ordered(prepare()), []) == (CarryOut(1, prepare()),)
    dying = [runs(1, job="job_b", ending=True)]
    assert decide(ordered(prepare()), dying) == ()
    assert decide(ordered(stop(1), prepare()), [runs(1)]) == (Kill(runs(1)),)


@pytest.mark.parametrize("job", ["job_a", "job_b"])
def test_who_trains_need_not_get_ready(job: str) -> None:
    assert decide(ordered(prepare()), [runs(2, job=job)]) == (Answer(1),)
    begun = decide(ordered(start(2, job=job), prepare()), [])
    assert begun == (CarryOut(1, start(2, job=job)), Answer(2))


@pytest.mark.parametrize("newer", [start(3), release(2)])
def test_nobody_gets_ready_for_what_is_over(newer: wire.OrderBody) -> None:
    answers = decide(ordered(prepare(2), newer), [])
    assert answers == (Answer(1), CarryOut(2, newer))
    assert decide(ordered(newer).settling(1).taking({2: prepare(2)}), []) == (Answer(2),)


def test_what_is_warm_goes_when_the_last_of_its_job_is_gone() -> None:
    standing = ordered(release(3))
    here = [runs(3), runs(1, job="job_b")]
    assert decide(standing, here) == (Kill(runs(3)),)
    assert decide(standing, here[1:]) == (CarryOut(1, release(3)),)
    (answer,) = decide(standing.settling(1).taking({2: start(3)}), [])
    assert isinstance(answer, Answer) and (answer.error or "").startswith("void")


Orders = st.lists(
    st.one_of(
        st.builds(prepare, st.integers(1, 4), job=st.sampled_from("ab")),
        st.builds(release, st.integers(1, 4), job=st.sampled_from("ab")),
        st.builds(start, st.integers(1, 4), job=st.sampled_from("ab"), rank=st.integers(0, 1)),
        st.builds(stop, st.integers(1, 4), job=st.sampled_from("ab")),
        st.builds(look, st.integers(1, 4)),
        st.builds(halt, st.integers(1, 4)),
        st.builds(forward, st.integers(1, 4), st.integers(0, 1)),
    ),
    max_size=8,
)


@given(st.lists(Orders, max_size=4))
def test_whatever_is_ordered_generations_never_mix_and_every_order_is_settled_once(
    batches: list[list[wire.OrderBody]],
) -> None:
    """A node in which the killed are gone one turn later."""
    standing, runners = Standing(), set[Runner]()
    settled: list[int] = []
    number = 0
    for batch in [*batches, *[[]] * 20]:
        new = {}
        for body in batch:
            number += 1
            new[number] = body
        standing = standing.taking(new)
        runners = {r for r in runners if not r.is_ending}
        for action in decide(standing, runners):
            standing, runners = _apply(action, standing, runners)
            if not isinstance(action, Kill):
                settled.append(action.number)
        for job in "ab":
            assert len({r.generation for r in runners if r.job == job and not r.is_ending}) <= 1
    assert sorted(settled) == list(range(1, number + 1))
    assert decide(standing, runners) == ()


def _apply(
    action: Action, standing: Standing, runners: set[Runner]
) -> tuple[Standing, set[Runner]]:
    match action:
        case Kill(r):
            return standing, (runners - {r}) | {Runner(r.job, r.generation, r.rank, True)}
        case CarryOut(number, wire.Start(spec=spec)):
            older = [r for r in runners if r.job == spec.job and r.generation < spec.generation]
            assert not older, "a newer generation was started beside an older one"
            born = Runner(spec.job, spec.generation, spec.rank)
            return standing.settling(number), runners | {born}
        case CarryOut(body=wire.Prepare()):
            assert not runners, "a spare gets ready where something runs"
    return standing.settling(action.number), runners
