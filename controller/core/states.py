"""Job, node and generation states, the reasons of a job's state, and the tables of legal moves.

    job         waiting -> starting -> running <-> recovering -> succeeded
                   ^ ^        |          | |           |
                   | +--------+----------+-+-----------+-------> failed | cancelled
                   |  (waiting -> running, succeeded: nodes that were only cut off are back)
                   +--- paused

    generation  planned -> launching -> running -> draining -> ended
                   |           +----------|--+-----> halted      ^   (launching: a step hangs)
                   +-----------+----------+-------------+--------+

    node        joining -> ready <-> working <-> draining (told that it will be taken)
                any of them -> lost | evicted

lost and evicted are final for every decision: a node that comes back is a new incarnation. Only
registering (store/nodes.py) takes a lost incarnation back, one that was merely cut off.
"""

from collections.abc import Mapping
from enum import StrEnum
from typing import TypeVar


class IllegalMoveError(Exception):
    """The table does not allow this step."""


class JobState(StrEnum):
    """Where a job is, in a person's words."""

    WAITING = "waiting"
    STARTING = "starting"
    RUNNING = "running"
    RECOVERING = "recovering"
    PAUSED = "paused"
    SUCCEEDED = "succeeded"
    FAILED = "failed"
    CANCELLED = "cancelled"

    @property
    def is_over(self) -> bool:
        """Terminal states are final."""
        return self in (JobState.SUCCEEDED, JobState.FAILED, JobState.CANCELLED)


class Reason(StrEnum):
    """Why a job is in its state: a closed set, shown beside one sentence."""

    TOO_FEW_NODES = "too_few_nodes"
    NO_PLAN_FITS = "no_plan_fits"
    LAUNCHING = "launching"
    EVICTION = "eviction"
    NODE_LOST = "node_lost"
    HANG = "hang"
    PROGRAM_ERROR = "program_error"
    NON_FINITE_LOSS = "non_finite_loss"
    CHECKPOINT_DAMAGED = "checkpoint_damaged"
    CHECKPOINT_UNREACHABLE = "checkpoint_unreachable"
    SETUP_FAILED = "setup_failed"
    BAD_PATH_BETWEEN_NODES = "bad_path_between_nodes"
    SCALE_UP = "scale_up"
    STRAGGLER = "straggler"
    USER = "user"
    RESTART_BUDGET = "restart_budget"
    DONE = "done"


class NodeState(StrEnum):
    """Where one incarnation of a node is."""

    JOINING = "joining"
    READY = "ready"
    WORKING = "working"
    DRAINING = "draining"
    LOST = "lost"
    EVICTED = "evicted"

    @property
    def is_gone(self) -> bool:
        """This incarnation will not come back."""
        return self in (NodeState.LOST, NodeState.EVICTED)


class GenerationState(StrEnum):
    """Where one generation of a job is."""

    PLANNED = "planned"
    """Its number is taken; an agent lists the checkpoint folder for it."""
    LAUNCHING = "launching"
    """Seats are given out; no step is committed yet."""
    RUNNING = "running"
    DRAINING = "draining"
    HALTED = "halted"
    ENDED = "ended"


_J, _N, _G = JobState, NodeState, GenerationState

_JOB_MOVES: Mapping[JobState, frozenset[JobState]] = {
    _J.WAITING: frozenset(
        {_J.STARTING, _J.RUNNING, _J.PAUSED, _J.SUCCEEDED, _J.FAILED, _J.CANCELLED}
    ),
    _J.STARTING: frozenset(
        {_J.RUNNING, _J.WAITING, _J.PAUSED, _J.SUCCEEDED, _J.FAILED, _J.CANCELLED}
    ),
    _J.RUNNING: frozenset(
        {_J.RECOVERING, _J.WAITING, _J.PAUSED, _J.SUCCEEDED, _J.FAILED, _J.CANCELLED}
    ),
    _J.RECOVERING: frozenset(
        {_J.RUNNING, _J.WAITING, _J.PAUSED, _J.SUCCEEDED, _J.FAILED, _J.CANCELLED}
    ),
    _J.PAUSED: frozenset({_J.WAITING, _J.FAILED, _J.CANCELLED}),
    _J.SUCCEEDED: frozenset(),
    _J.FAILED: frozenset(),
    _J.CANCELLED: frozenset(),
}
_NODE_MOVES: Mapping[NodeState, frozenset[NodeState]] = {
    _N.JOINING: frozenset({_N.READY, _N.WORKING, _N.DRAINING, _N.LOST, _N.EVICTED}),
    _N.READY: frozenset({_N.WORKING, _N.DRAINING, _N.LOST, _N.EVICTED}),
    _N.WORKING: frozenset({_N.READY, _N.DRAINING, _N.LOST, _N.EVICTED}),
    _N.DRAINING: frozenset({_N.READY, _N.WORKING, _N.LOST, _N.EVICTED}),
    _N.LOST: frozenset(),
    _N.EVICTED: frozenset(),
}
_GENERATION_MOVES: Mapping[GenerationState, frozenset[GenerationState]] = {
    _G.PLANNED: frozenset({_G.LAUNCHING, _G.ENDED}),
    _G.LAUNCHING: frozenset({_G.RUNNING, _G.HALTED, _G.ENDED}),
    _G.RUNNING: frozenset({_G.DRAINING, _G.HALTED, _G.ENDED}),
    _G.DRAINING: frozenset({_G.HALTED, _G.ENDED}),
    _G.HALTED: frozenset({_G.DRAINING, _G.ENDED}),
    _G.ENDED: frozenset(),
}

State = TypeVar("State", JobState, NodeState, GenerationState)


def may_move(current: State, wanted: State) -> bool:
    """Whether the table allows the step."""
    match current:
        case JobState():
            return wanted in _JOB_MOVES[current]
        case NodeState():
            return wanted in _NODE_MOVES[current]
        case GenerationState():
            return wanted in _GENERATION_MOVES[current]


def move(current: State, wanted: State) -> State:
    """Return ``wanted`` if the table allows the step from ``current``, else IllegalMoveError."""
    if not may_move(current, wanted):
        raise IllegalMoveError(f"{type(current).__name__} cannot go from {current} to {wanted}")
    return wanted
