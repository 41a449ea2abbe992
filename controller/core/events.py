"""The kinds of event: a closed set, the same words in store, REST, CLI and dashboard."""

from enum import StrEnum


class EventType(StrEnum):
    """What has happened, in the past tense."""

    CONTROLLER_STARTED = "controller_started"
    JOB_SUBMITTED = "job_submitted"
    JOB_STATE_CHANGED = "job_state_changed"
    CANCEL_ASKED = "cancel_asked"
    PAUSE_ASKED = "pause_asked"
    RESUME_ASKED = "resume_asked"
    SAVE_ASKED = "save_asked"
    SAVE_PERIOD_MOVED = "save_period_moved"
    PROGRAM_INSPECTED = "program_inspected"
    NODE_JOINED = "node_joined"
    NODE_PREPARED = "node_prepared"
    NODE_NOTICED = "node_noticed"
    NODE_NOTICE_WITHDRAWN = "node_notice_withdrawn"
    NODE_DRAIN_ASKED = "node_drain_asked"
    NODE_DRAIN_UNDONE = "node_drain_undone"
    NODE_LOST = "node_lost"
    NODE_EVICTED = "node_evicted"
    NODE_QUARANTINED = "node_quarantined"
    NODE_RELEASED = "node_released"
    NODE_SLOW = "node_slow"
    NODE_AS_FAST_AGAIN = "node_as_fast_again"
    EVICTION_DRILL = "eviction_drill"
    JOB_UNKNOWN = "job_unknown"
    GENERATION_ADOPTED = "generation_adopted"
    GENERATION_PLANNED = "generation_planned"
    GENERATION_LAUNCHED = "generation_launched"
    GENERATION_RUNNING = "generation_running"
    GENERATION_HALTED = "generation_halted"
    GENERATION_DRAINING = "generation_draining"
    STACKS_DUMPED = "stacks_dumped"
    ROLLED_FORWARD = "rolled_forward"
    SALVAGE_ORDERED = "salvage_ordered"
    GENERATION_ENDED = "generation_ended"
    TRAINER_HALTED = "trainer_halted"
    TRAINER_FAILED = "trainer_failed"
    TRAINER_EXITED = "trainer_exited"
    TRAINER_NOT_FINITE = "trainer_not_finite"
    ORDER_FAILED = "order_failed"
    REPORT_REFUSED = "report_refused"
    RECOVERED = "recovered"
    CHECKPOINT_COMPLETE = "checkpoint_complete"
    CHECKPOINT_SKIPPED = "checkpoint_skipped"
    CHECKPOINT_CONDEMNED = "checkpoint_condemned"
    CHECKPOINTS_DELETED = "checkpoints_deleted"
    SAVE_FAILED = "save_failed"
    JOB_DONE_MARKED = "job_done_marked"

    @property
    def is_routine(self) -> bool:
        """It comes again and again in a healthy job; where room is short it is left out."""
        return self in (
            EventType.CHECKPOINT_COMPLETE,
            EventType.CHECKPOINTS_DELETED,
            EventType.SAVE_PERIOD_MOVED,
            EventType.NODE_PREPARED,
        )
