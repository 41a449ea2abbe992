"""The kinds of event: a closed set, the same words in store, REST, CLI and dashboard."""

from enum import StrEnum


class EventType(StrEnum):
    """What has happened, in the past tense."""

    CONTROLLER_STARTED = "controller_started"
    JOB_SUBMITTED = "job_submitted"
    JOB_STATE_CHANGED = "job_state_changed"
    CANCEL_ASKED = "cancel_asked"
    PROGRAM_INSPECTED = "program_inspected"
    NODE_JOINED = "node_joined"
    NODE_LOST = "node_lost"
    NODE_EVICTED = "node_evicted"
    EVICTION_DRILL = "eviction_drill"
    GENERATION_PLANNED = "generation_planned"
    GENERATION_LAUNCHED = "generation_launched"
    GENERATION_RUNNING = "generation_running"
    GENERATION_ENDED = "generation_ended"
    TRAINER_HALTED = "trainer_halted"
    TRAINER_FAILED = "trainer_failed"
    TRAINER_EXITED = "trainer_exited"
    ORDER_FAILED = "order_failed"
    RECOVERED = "recovered"
    CHECKPOINT_COMPLETE = "checkpoint_complete"
    CHECKPOINT_CONDEMNED = "checkpoint_condemned"
    CHECKPOINTS_DELETED = "checkpoints_deleted"
    SAVE_FAILED = "save_failed"
    JOB_DONE_MARKED = "job_done_marked"
