"""Which nodes a job may have: one node works for one job. PURE.

A job that runs keeps its nodes; one that recovers keeps those that are left. What is free goes to
the others by priority, then age, each up to its most. Only nodes that answer are given out; those
that are set aside only to a job that would be below its fewest without, and no more than it lacks.
"""

import re
from collections.abc import Iterable, Sequence
from dataclasses import replace
from functools import lru_cache
from itertools import chain

from controller.core.actions import QuarantineNode
from controller.core.jobspec import JobSpec
from controller.core.liveness import is_answering, is_leaving, is_silent
from controller.core.quarantine import is_set_aside, last_resorts
from controller.core.seating import NOBODY, Slow, devices_of, is_slow
from controller.core.states import JobState
from controller.core.world import Job, Node, Quarantine, Rules, World
from controller.planner.choose import Choice, NoPlan, choose, planner_of
from controller.planner.problem import Depths, Problem
from controller.planner.shapes import auto_micro_batch

_MOST_SLOW = 2
"""Slow nodes that a plan tries to make use of."""


def by_turn(jobs: Iterable[Job]) -> list[Job]:
    """Those that hold nodes first, then those about to be launched (what they give back is free for
    the others in the same look), then the rest; each by priority, then by age.
    """

    def turn(job: Job) -> tuple[int, int, float, str]:
        stage = 2 if job.current is None else int(not job.current.is_launched)
        return stage, -job.spec.priority, job.submitted_at, job.id

    return sorted(jobs, key=turn)


class Pool:
    """The nodes, as one look hands them out."""

    def __init__(self, world: World, now: float, rules: Rules) -> None:
        self._world, self._now, self._rules = world, now, rules
        self.alive = {node.name: node for node in world.nodes if not node.state.is_gone}
        self._answering = {n.name for n in self.alive.values() if is_answering(n, now, rules)}
        self._leaving = {n.name for n in self.alive.values() if is_leaving(n, now, rules)}
        self._holder: dict[str, str] = {}
        for job in world.jobs:
            works = job.current is not None and job.current.is_launched
            for key in _own(job):
                node = self.find(*key)
                if node and (works or not self.is_aside(node)):  # else it is anybody's last resort
                    self._holder[node.name] = job.id

    def find(self, name: str, incarnation: str) -> Node | None:
        """That incarnation, if it is alive."""
        node = self.alive.get(name)
        return node if node and node.incarnation == incarnation else None

    def answers(self, name: str, incarnation: str) -> bool:
        """Whether that incarnation is alive and answers."""
        return name in self._answering and self.find(name, incarnation) is not None

    def lose(self, node: Node) -> None:
        """It is gone."""
        self.alive.pop(node.name, None)
        self._answering.discard(node.name)
        self._holder.pop(node.name, None)

    def set_aside(self, verdict: QuarantineNode) -> None:
        """It is so from here on."""
        aside = Quarantine(
            verdict.because, self._now, verdict.until, verdict.times, unreached=verdict.unreached
        )
        self.alive[verdict.node] = replace(self.alive[verdict.node], quarantine=aside)

    def is_aside(self, node: Node) -> bool:
        """Whether it is set aside."""
        return is_set_aside(node, self._now)

    def aside(self, job: Job) -> list[Node]:
        """The nodes that ``job`` could have and that are set aside."""
        return [n for n in self._for(job) if self.is_aside(n)]

    def offer(self, job: Job) -> tuple[Node, ...]:
        """What ``job`` could launch on now, at most its most, of one device kind, slow ones only
        where there are too few others; in the order of their names, the last resorts last.
        """
        nodes = [n for n in self._within_reach(job) if n.name in self._answering]
        first = sorted(nodes, key=lambda n: (self._holder.get(n.name) != job.id, _natural(n.name)))
        chosen = sorted(first, key=lambda n: (self.is_aside(n), is_slow(n)))[: job.spec.nodes.max]
        return tuple(sorted(chosen, key=lambda n: (self.is_aside(n), _natural(n.name))))

    def spares(self, job: Job) -> tuple[Node, ...]:
        """Who works for nobody and could take a seat that ``job`` loses: as many as it may have."""
        sound = [n for n in self._within_reach(job) if not self.is_aside(n)]
        free = [n for n in sound if n.name in self._answering and n.name not in self._holder]
        return tuple(sorted(free, key=lambda n: _natural(n.name))[: job.spec.nodes.max])

    def could_answer(self, job: Job) -> int:
        """How many nodes ``job`` could have if all that are not lost answered."""
        return len(self._within_reach(job))

    def take(self, job: Job, nodes: Iterable[Node]) -> None:
        """``job`` works on ``nodes`` and gives back all others."""
        self.release(job)
        self._holder |= {node.name: job.id for node in nodes}

    def release(self, job: Job) -> None:
        """``job`` gives back its nodes."""
        self._holder = {name: holder for name, holder in self._holder.items() if holder != job.id}

    def _within_reach(self, job: Job) -> list[Node]:
        """Its own and the free ones, if they stay; of one device kind: CUDA if there are enough.
        Where too few are in their place, the last resorts that make up for them are among it.
        """
        wanted = ("cuda", "cpu") if job.spec.device == "auto" else (job.spec.device,)
        kinds = [[n for n in self._for(job) if n.device_kind == kind] for kind in wanted]
        sound = [[n for n in nodes if not self.is_aside(n)] for nodes in kinds]
        both = zip(sound, kinds, strict=True)
        filled = ([*good, *self._last_resorts(job, good, every)] for good, every in both)
        fewest = job.spec.nodes.min
        enough = (of for of in chain(sound, filled) if len(self._standing(of)) >= fewest)
        return next(enough, max(sound, key=len))

    def _for(self, job: Job) -> list[Node]:
        """Its own and the free ones that stay."""
        staying = [n for n in self.alive.values() if n.name not in self._leaving]
        return [n for n in staying if self._holder.get(n.name) in (None, job.id)]

    def _standing(self, nodes: Iterable[Node]) -> list[Node]:
        """Those of ``nodes`` that have not gone silent."""
        return [n for n in nodes if not is_silent(n, None, self._world, self._now, self._rules)]

    def _last_resorts(self, job: Job, sound: Sequence[Node], every: Iterable[Node]) -> list[Node]:
        """Who of ``every`` makes up for what ``job`` lacks beside ``sound``."""
        aside = (n for n in every if n.name in self._answering and self.is_aside(n))
        standing = self._standing(sound)
        found = last_resorts(job, aside, standing, self._world.jobs)
        return found[: max(0, job.spec.nodes.min - len(standing))]


def choice_for(job: Job, nodes: Sequence[Node], slow: Slow = NOBODY) -> Choice | NoPlan | None:
    """The planner's answer for ``nodes``; None while nobody has measured the program.

    Where the job's micro-batch fits no more, and the user leaves it to us, a smaller one. Slow
    nodes are left out, or the least slow of them hold fewer layers, whichever makes a step shorter.
    """
    if job.costs is None:
        return None
    fast, lame = _by_pace(nodes, slow)
    if not lame or not fast:
        return _choice(job, nodes)
    without, planner = _choice(job, fast), planner_of(problem_of(job, nodes))
    found = [without] if isinstance(without, Choice) else []
    for count in range(1, 1 + min(len(lame), _MOST_SLOW)):
        used = (*fast, *lame[:count])
        devices = tuple(devices_of(job, node) for node in used)
        factors = tuple(slow.get((node.name, node.incarnation), 1.0) for node in used)
        if choice := planner.choose_with_slow(devices, factors):
            found.append(choice)
    return min(found, key=lambda choice: choice.seconds) if found else without


def _by_pace(nodes: Iterable[Node], slow: Slow) -> tuple[list[Node], list[Node]]:
    """Who is fast, and who is slow, the least slow first."""
    fast = [node for node in nodes if (node.name, node.incarnation) not in slow]
    lame = [node for node in nodes if (node.name, node.incarnation) in slow]
    return fast, sorted(lame, key=lambda node: slow[node.name, node.incarnation])


def foresee(job: Job, nodes: Sequence[Node]) -> bool:
    """Find out one answer ahead of need: ``job`` runs, and may soon have to do with fewer of
    ``nodes``. False: all of them are known.
    """
    if job.costs is None or not nodes:
        return False
    problem = problem_of(job, nodes)
    planner = planner_of(problem)
    for count in range(len(nodes), 0, -1):
        if not planner.knows(count * problem.devices_per_node):
            planner.choose(count * problem.devices_per_node)
            return True
    return False


def _choice(job: Job, nodes: Sequence[Node]) -> Choice | NoPlan:
    problem = problem_of(job, nodes)
    devices = sum(devices_of(job, node) for node in nodes)
    found = choose(problem, devices)
    size = problem.micro_batch
    while isinstance(found, NoPlan) and size > 1 and job.spec.plan.micro_batch == "auto":
        size //= 2
        smaller = choose(replace(problem, micro_batch=size), devices)
        if isinstance(smaller, Choice):
            said = f"Micro-batches of {size} fit where {problem.micro_batch} do not: "
            found = replace(smaller, because=said + smaller.because)
    return found


def problem_of(job: Job, nodes: Sequence[Node]) -> Problem:
    """What a plan for ``nodes`` has to solve; the job's costs are known."""
    assert job.costs is not None
    return Problem(
        costs=job.costs,
        batch_size=job.spec.batch_size,
        micro_batch=micro_batch_of(job),
        depths=depths_of(job.spec),
        schedule=job.spec.plan.schedule,
        device_memory_bytes=min((node.device_memory_bytes for node in nodes), default=0),
        devices_per_node=min((devices_of(job, node) for node in nodes), default=1),
    )


def depths_of(spec: JobSpec) -> Depths:
    """Those that the user allows."""
    depth = spec.plan.depth
    return Depths() if depth == "auto" else Depths(depth.min, depth.max)


def micro_batch_of(job: Job) -> int:
    """The job's micro-batch: one size through every morph, so that numbers stay comparable."""
    wanted, spec = job.spec.plan.micro_batch, job.spec
    if wanted != "auto":
        return wanted
    trained = (g.shape for g in (*job.past, job.current) if g and g.kind == "train" and g.shape)
    if (before := next(trained, None)) is not None:
        return before.micro_batch
    return auto_micro_batch(job.costs, spec.batch_size, spec.nodes.min, spec.nodes.max)


def _own(job: Job) -> Sequence[tuple[str, str]]:
    """Whom ``job`` holds: who is seated, or, while it recovers, who was."""
    if job.current is not None and job.current.is_launched:
        return job.current.nodes
    going = job.state in (JobState.STARTING, JobState.RECOVERING)
    last = next((g for g in reversed(job.past) if g.launched), None)
    return last.nodes if going and last else ()


@lru_cache(maxsize=4096)
def _natural(name: str) -> tuple[tuple[int, str], ...]:
    """``vm-2`` before ``vm-10``."""
    return tuple((int(p) if p.isdigit() else -1, p) for p in re.split(r"(\d+)", name) if p)
