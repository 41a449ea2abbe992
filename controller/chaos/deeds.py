"""What is done to a cluster, and when: a pure function of the draws. PURE.

A *trouble* befalls a node, the disk or the controller, and is over after a while:

    kill .. join       stop .. continue     hang .. wake     cut .. mend     slow .. steady
    notice .. take .. join      disk-full .. disk-free      controller-kill .. controller-start

A killed node is gone with all its processes; a stopped one stands still with all of them, a hung
one with its agent alone; one that is cut and its controller do not hear each other; the trainers of
a slow one stand still every other moment. For a killed one a new one joins, as when a cloud gives
another VM; now and then it comes back under its name. Troubles overlap. A node that has one gets no
other until it is over. Fewer nodes than the job needs at least are left alone only for a bounded
time, and at the end of the time everything is mended.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from itertools import count

Draw = Callable[[], float]
"""The next number in [0, 1)."""

BELOW_SECONDS = 8.0
"""The longest that fewer nodes than the job's minimum are left alone."""
_FIRST_AT = 2.0
_PAUSE = (2.0, 9.0)
"""Between the beginnings of two troubles."""
_REST = 1.0
"""Between two troubles of one node."""
_COMES_BACK = 0.2
"""The chance that who joins for a killed node has its name."""
_SEVERAL = 0.25
"""The chance that a kill takes more than one node."""


class Verb(StrEnum):
    """One thing that is done."""

    KILL = "kill"
    JOIN = "join"
    STOP = "stop"
    CONTINUE = "continue"
    HANG = "hang"
    WAKE = "wake"
    CUT = "cut"
    MEND = "mend"
    SLOW = "slow"
    STEADY = "steady"
    NOTICE = "notice"
    TAKE = "take"
    DISK_FULL = "disk-full"
    DISK_FREE = "disk-free"
    CONTROLLER_KILL = "controller-kill"
    CONTROLLER_START = "controller-start"


@dataclass(frozen=True)
class Deed:
    """``verb`` at ``at`` seconds, to ``node`` unless it is the disk's or the controller's;
    ``seconds`` is the warning that a notice gives, ``replaces`` whom a new node joins for.
    """

    at: float
    verb: Verb
    node: str = ""
    seconds: float = 0.0
    replaces: str = ""

    def __str__(self) -> str:
        warning = f" ({self.seconds:g} s)" if self.seconds else ""
        return f"{self.at:8.3f}  {self.verb} {self.node}".rstrip() + warning


@dataclass(frozen=True)
class _Trouble:
    """How it begins and ends, how likely it is beside the others, how long it lasts."""

    ends: Verb
    weight: int
    shortest: float
    longest: float


_TROUBLES: Mapping[Verb, _Trouble] = {
    Verb.KILL: _Trouble(Verb.JOIN, 6, 1.0, 12.0),
    Verb.STOP: _Trouble(Verb.CONTINUE, 4, 0.5, 9.0),
    Verb.HANG: _Trouble(Verb.WAKE, 2, 0.5, 9.0),
    Verb.CUT: _Trouble(Verb.MEND, 3, 0.5, 9.0),
    Verb.SLOW: _Trouble(Verb.STEADY, 2, 2.0, 8.0),
    Verb.NOTICE: _Trouble(Verb.JOIN, 3, 4.0, 12.0),
    Verb.DISK_FULL: _Trouble(Verb.DISK_FREE, 2, 2.0, 8.0),
    Verb.CONTROLLER_KILL: _Trouble(Verb.CONTROLLER_START, 2, 0.1, 4.0),
}
_OF_NO_NODE = (Verb.DISK_FULL, Verb.CONTROLLER_KILL)


@dataclass(frozen=True)
class _Outage:
    """A node, the disk or the controller has a trouble."""

    verb: Verb
    whom: str
    begins: float
    ends: float
    warning: float = 0.0
    heir: str = ""
    """Who joins at its end."""

    def deeds(self) -> list[Deed]:
        """What begins it and what ends it."""
        node = "" if self.verb in _OF_NO_NODE else self.whom
        made = [Deed(self.begins, self.verb, node, self.warning)]
        if self.verb is Verb.NOTICE:
            made.append(Deed(round(self.begins + self.warning, 3), Verb.TAKE, node))
        ending = _TROUBLES[self.verb].ends
        if self.heir:
            return [*made, Deed(self.ends, ending, self.heir, replaces=node)]
        return [*made, Deed(self.ends, ending, node)]


def schedule(draw: Draw, nodes: Sequence[str], minimum: int, seconds: float) -> tuple[Deed, ...]:
    """The deeds of ``seconds`` seconds by time, to a cluster that begins with all ``nodes``."""
    outages: list[_Outage] = []
    at, names = _FIRST_AT, _new_names(nodes)
    while at < seconds:
        drawn = _draw_outages(draw, _present(nodes, outages), outages, round(at, 3), names)
        wanted = [*outages, *drawn]
        below = longest_below(
            [(o.begins, o.ends) for o in wanted if o.verb not in (*_OF_NO_NODE, Verb.SLOW)],
            len(nodes) - minimum,
        )
        if below <= BELOW_SECONDS and all(o.ends <= seconds for o in drawn):
            outages = wanted
        at += _between(draw, *_PAUSE)
    deeds = [deed for outage in outages for deed in outage.deeds()]
    return tuple(sorted(deeds, key=lambda d: (d.at, d.verb, d.node)))


def _new_names(nodes: Sequence[str]) -> Iterator[str]:
    """None that is among ``nodes``."""
    numbers = [int(name.rpartition("-")[2]) for name in nodes if name.rpartition("-")[2].isdigit()]
    return (f"node-{number}" for number in count(max(numbers, default=0) + 1))


def _present(nodes: Sequence[str], outages: Sequence[_Outage]) -> list[str]:
    """Who is there, or will be when what has begun is over."""
    present = list(nodes)
    for outage in outages:
        if outage.heir:
            present[present.index(outage.whom)] = outage.heir
    return present


def longest_below(spans: Sequence[tuple[float, float]], spare: int) -> float:
    """The longest time during which more than ``spare`` of the ``spans`` lie over each other."""
    changes = sorted(
        [(a, 1) for a, _ in spans] + [(b, -1) for _, b in spans], key=lambda c: (c[0], -c[1])
    )
    out, since, longest = 0, 0.0, 0.0
    for at, change in changes:
        before, out = out, out + change
        if before <= spare < out:
            since = at
        elif out <= spare < before:
            longest = max(longest, at - since)
    return longest


def _draw_outages(
    draw: Draw,
    nodes: Sequence[str],
    before: Sequence[_Outage],
    at: float,
    names: Iterator[str],
) -> list[_Outage]:
    """One trouble, of one node or of several; none when whom it would befall has one already."""
    verb = _draw_verb(draw)
    kind = _TROUBLES[verb]
    busy = {o.heir or o.whom for o in before if at < o.ends + _REST}
    free = [name for name in (nodes if verb not in _OF_NO_NODE else [verb]) if name not in busy]
    wanted = 1
    if verb is Verb.KILL and draw() < _SEVERAL:
        wanted = 2 + int(draw() * max(1, len(nodes) - 1))
    made = []
    for _ in range(min(wanted, len(free))):
        whom = free.pop(int(draw() * len(free)))
        lasts = _between(draw, kind.shortest, kind.longest)
        warning = round(_between(draw, 0.3, 0.75) * lasts, 3) if verb is Verb.NOTICE else 0.0
        by_another = kind.ends is Verb.JOIN and draw() >= _COMES_BACK
        heir = next(names) if by_another else ""
        made.append(_Outage(verb, whom, at, round(at + lasts, 3), warning, heir))
    return made


def _draw_verb(draw: Draw) -> Verb:
    left = draw() * sum(kind.weight for kind in _TROUBLES.values())
    for verb, kind in _TROUBLES.items():
        left -= kind.weight
        if left < 0:
            return verb
    return Verb.KILL


def _between(draw: Draw, low: float, high: float) -> float:
    return low + draw() * (high - low)
