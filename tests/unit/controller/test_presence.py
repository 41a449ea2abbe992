"""Who was heard when, and what a broken order request means."""

import pytest

from agent import wire
from controller.presence import Presence

VM = ("vm-1", "first-life")


@pytest.fixture
def presence() -> Presence:
    known = Presence()
    known.admit(VM, reported=3, at=100.0)
    return known


def suspect_since(presence: Presence) -> float | None:
    return presence.signs()[VM].suspect_since


def test_a_broken_request_makes_suspect_until_the_next_is_parked(presence: Presence) -> None:
    presence.parked(VM, 101.0)
    assert presence.left(VM, 102.0, broken=True)
    presence.beat(VM, wire.Beat(incarnation="first-life"), 102.1)
    assert suspect_since(presence) == 102.0
    presence.parked(VM, 103.0)
    assert suspect_since(presence) is None


def test_an_answered_request_is_no_sign_of_anything(presence: Presence) -> None:
    presence.parked(VM, 101.0)
    assert not presence.left(VM, 102.0, broken=False)
    assert suspect_since(presence) is None


def test_an_old_request_that_breaks_beside_a_new_one_says_nothing(presence: Presence) -> None:
    """The agent gave up on one connection and parked anew; we notice the first end later."""
    presence.parked(VM, 101.0)
    presence.parked(VM, 102.0)
    assert not presence.left(VM, 103.0, broken=True)
    assert suspect_since(presence) is None


def test_a_new_life_dismisses_the_old_one(presence: Presence) -> None:
    presence.admit(("vm-1", "second-life"), reported=0, at=105.0)
    assert VM not in presence
    assert not presence.left(VM, 106.0, broken=True)


def test_registering_again_clears_the_suspicion_and_keeps_the_request(presence: Presence) -> None:
    presence.parked(VM, 101.0)
    presence.left(VM, 102.0, broken=True)
    presence.admit(VM, reported=3, at=103.0)
    assert suspect_since(presence) is None


def test_gaps_longer_than_two_beats_are_kept_in_mind_the_newest_of_them(presence: Presence) -> None:
    for at in (102.0, 104.1, 105.0, 405.0):
        presence.heard(VM, at)
    assert presence.signs()[VM].silences == ((102.0, 104.1), (105.0, 405.0))
    for at in range(1000, 4000, 3):
        presence.heard(VM, float(at))
    kept = presence.signs()[VM].silences
    assert len(kept) == 256 and kept[-1] == (3994.0, 3997.0)


def test_time_heard_never_goes_back(presence: Presence) -> None:
    presence.heard(VM, 120.0)
    presence.heard(VM, 110.0)
    assert presence.signs()[VM].heard_at == 120.0
    presence.reported(VM, 9)
    presence.reported(VM, 4)
    assert presence.beat(VM, wire.Beat(incarnation="first-life"), 121.0) == 9
