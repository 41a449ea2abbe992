"""What a seed says is done: reproducible, mended at the end, never too much at once."""

import random
from collections import defaultdict

from hypothesis import given, settings
from hypothesis import strategies as st

from controller.chaos.deeds import BELOW_SECONDS, Deed, Verb, longest_below, schedule

ENDS = {
    Verb.KILL: (Verb.JOIN,),
    Verb.STOP: (Verb.CONTINUE,),
    Verb.HANG: (Verb.WAKE,),
    Verb.CUT: (Verb.MEND,),
    Verb.SLOW: (Verb.STEADY,),
    Verb.NOTICE: (Verb.TAKE, Verb.JOIN),
    Verb.DISK_FULL: (Verb.DISK_FREE,),
    Verb.CONTROLLER_KILL: (Verb.CONTROLLER_START,),
}
AWAY = (Verb.KILL, Verb.STOP, Verb.HANG, Verb.CUT, Verb.NOTICE)

settings.register_profile("chaos", max_examples=20, deadline=None)
of_a_run = given(
    seed=st.integers(0, 10_000),
    count=st.integers(2, 8),
    spare=st.integers(0, 6),
    seconds=st.floats(10, 300),
)


def plan(seed: int, count: int, spare: int, seconds: float) -> tuple[Deed, ...]:
    names = [f"node-{i}" for i in range(count)]
    return schedule(random.Random(seed).random, names, max(1, count - spare), seconds)


def by_whom(deeds: tuple[Deed, ...]) -> dict[str, list[Deed]]:
    """The deeds to each node and those that joined for it, to the disk, to the controller."""
    found, first = defaultdict(list), dict[str, str]()
    for deed in deeds:
        whom = deed.node or str(deed.verb).split("-")[0]
        first[whom] = first.get(deed.replaces or whom, deed.replaces or whom)
        found[first[whom]].append(deed)
    return found


@settings(settings.get_profile("chaos"))
@of_a_run
def test_the_same_seed_gives_the_same_deeds(
    seed: int, count: int, spare: int, seconds: float
) -> None:
    assert plan(seed, count, spare, seconds) == plan(seed, count, spare, seconds)


def test_other_seeds_give_other_deeds() -> None:
    assert len({plan(seed, 4, 2, 60) for seed in range(20)}) == 20


@settings(settings.get_profile("chaos"))
@of_a_run
def test_every_trouble_ends_within_the_time_before_the_next_one_of_the_same_begins(
    seed: int, count: int, spare: int, seconds: float
) -> None:
    deeds = plan(seed, count, spare, seconds)
    assert [d.at for d in deeds] == sorted(d.at for d in deeds)
    assert all(0 < d.at <= seconds for d in deeds)
    for done in by_whom(deeds).values():
        left = list(done)
        while left:
            ends = ENDS[left[0].verb]
            assert tuple(d.verb for d in left[1 : 1 + len(ends)]) == ends
            left = left[1 + len(ends) :]


@settings(settings.get_profile("chaos"))
@of_a_run
def test_fewer_nodes_than_the_minimum_never_last_long(
    seed: int, count: int, spare: int, seconds: float
) -> None:
    minimum, below_since, away = max(1, count - spare), None, set[str]()
    for deed in plan(seed, count, spare, seconds):
        if below_since is not None:
            assert deed.at - below_since <= BELOW_SECONDS + 1e-9
        if deed.verb in AWAY:
            away.add(deed.node)
        elif deed.verb in (Verb.CONTINUE, Verb.WAKE, Verb.MEND, Verb.JOIN):
            away.discard(deed.replaces or deed.node)
        if count - len(away) >= minimum:
            below_since = None
        elif below_since is None:
            below_since = deed.at
    assert not away


def test_mostly_a_new_node_joins_for_a_killed_one_and_now_and_then_it_comes_back() -> None:
    deeds = plan(0, 4, 2, 3600)
    joined = [deed for deed in deeds if deed.verb is Verb.JOIN]
    new = [deed for deed in joined if deed.replaces]
    assert 0 < len(joined) - len(new) < len(new)
    assert len({deed.node for deed in new}) == len(new)
    gone: set[str] = set()
    for deed in deeds:
        assert deed.node not in gone, "what was replaced is never heard of again"
        gone.add(deed.replaces or "nobody")


def test_ten_minutes_have_troubles_of_every_kind() -> None:
    for seed in range(4):
        assert {deed.verb for deed in plan(seed, 4, 2, 600)} == set(Verb)


def test_some_kills_take_all_nodes_but_one_or_more_at_once() -> None:
    at_once: defaultdict[float, int] = defaultdict(int)
    for deed in plan(1, 4, 2, 3600):
        if deed.verb is Verb.KILL:
            at_once[deed.at] += 1
    assert {1, 2, 3} <= set(at_once.values())


def test_a_node_told_to_go_is_taken_when_its_warning_is_over() -> None:
    deeds = plan(0, 4, 2, 3600)
    told = [deed for deed in deeds if deed.verb is Verb.NOTICE]
    assert told
    for deed in told:
        taken = next(
            d for d in deeds if d.verb is Verb.TAKE and d.node == deed.node and d.at > deed.at
        )
        assert abs(taken.at - deed.at - deed.seconds) < 1e-6


def test_the_time_below_is_that_of_overlapping_outages() -> None:
    spans = [(0.0, 10.0), (4.0, 6.0), (5.0, 9.0)]
    assert longest_below(spans, spare=3) == 0.0
    assert longest_below(spans, spare=2) == 1.0
    assert longest_below(spans, spare=1) == 5.0
    assert longest_below(spans, spare=0) == 10.0


def test_an_outage_that_begins_when_another_ends_goes_on_being_one() -> None:
    assert longest_below([(0.0, 5.0), (5.0, 9.0)], spare=0) == 9.0
