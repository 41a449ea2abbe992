"""What a generation on one machine says of itself: agreement, and the cause of trouble."""

from pathlib import Path

import pytest

from agent.launcher import Exit
from agent.solo import Heard, SoloError, log_of
from trainer.contract.progress import ExitCode, Failed, Finished, Halted, Line, StepCommitted


def step(number: int, *, loss: float | None = 2.5, seconds: float = 0.1) -> StepCommitted:
    return StepCommitted(
        step=number, loss=loss, grad_norm=1.0, samples=8, sample_ids_hash="0000abcd",
        seconds=seconds,
    )  # fmt: skip


def failed(code: ExitCode, message: str) -> Failed:
    return Failed(code=code, message=message)


PEER_LOST = failed(ExitCode.PEER_LOST, "Rank 1 is gone.")
RAISED = failed(ExitCode.PROGRAM_ERROR, "gpt.py, line 7: it raised.")
HALTED = Halted(applied=3, prepared=3, cause="a peer reset the connection")


def hearing(tmp_path: Path, *events: tuple[int, Line | Exit]) -> tuple[Heard, list[StepCommitted]]:
    agreed: list[StepCommitted] = []
    heard = Heard(2, tmp_path, lambda *_: None, agreed.append)
    for rank, event in events:
        heard.take(rank, event)
    return heard, agreed


def test_a_step_counts_once_all_ranks_have_reported_it(tmp_path: Path) -> None:
    first, again = step(1, seconds=0.1), step(1, seconds=0.2)
    assert hearing(tmp_path, (1, first))[1] == []
    assert hearing(tmp_path, (1, again), (0, first))[1] == [first]


def test_ranks_that_disagree_end_the_run(tmp_path: Path) -> None:
    with pytest.raises(SoloError, match=r"Ranks 0 and 1 disagree about step 4: loss 2\.5"):
        hearing(tmp_path, (0, step(4)), (1, step(4, loss=2.5000001)))


def test_a_run_is_well_only_when_every_rank_is_done_and_has_told_every_step(tmp_path: Path) -> None:
    done = Finished(step=1)
    ends = ((0, done), (1, done), (0, Exit(code=0)), (1, Exit(code=0)))
    assert not hearing(tmp_path, (0, step(1)), (1, step(1)), *ends)[0].in_trouble
    untold = hearing(tmp_path, (0, step(1)), *ends)[0]
    assert untold.in_trouble and "step 1" in untold.why()


@pytest.mark.parametrize(
    ("events", "why"),
    [
        ([(0, PEER_LOST), (1, RAISED), (0, Exit(code=22))], RAISED.message),
        ([(0, HALTED), (0, PEER_LOST), (1, Exit(signal=11))], "Rank 1 ended with signal 11"),
        ([(0, HALTED), (0, PEER_LOST), (0, Exit(code=22))], PEER_LOST.message),
        ([(1, HALTED)], "Rank 1 halted after step 3: a peer reset the connection"),
        ([(1, Exit(code=20)), (0, Exit(code=20))], "The ranks left before their end."),
        ([(1, Exit(code=0))], "Rank 1 ended with code 0 before it was done and printed nothing"),
    ],
)
def test_the_cause_is_told_and_not_its_effects(
    tmp_path: Path, events: list[tuple[int, Line | Exit]], why: str
) -> None:
    heard, _ = hearing(tmp_path, *events)
    assert heard.in_trouble and heard.why().startswith(why)


def test_an_unexplained_end_shows_the_last_line_of_the_log(tmp_path: Path) -> None:
    log_of(tmp_path, 1).write_text("hello\nSegmentation fault\n\n")
    heard, _ = hearing(tmp_path, (1, Exit(signal=11)))
    assert heard.why() == "Rank 1 ended with signal 11; its last line: Segmentation fault"
