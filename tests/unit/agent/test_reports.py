"""Reports are numbered without a gap and kept until they are durable."""

from agent import wire
from agent.reports import Outbox


def outbox_with(count: int) -> Outbox:
    outbox = Outbox()
    for number in range(1, count + 1):
        outbox.add(wire.OrderDone(number=number))
    return outbox


def waiting(outbox: Outbox) -> list[tuple[int, int]]:
    """(report number, order number) of the next batch."""
    return [
        (report.number, report.body.number)
        for report in outbox.next_batch()
        if isinstance(report.body, wire.OrderDone)
    ]


def test_what_is_not_acknowledged_is_handed_out_again() -> None:
    outbox = outbox_with(3)
    assert waiting(outbox) == waiting(outbox) == [(1, 1), (2, 2), (3, 3)]


def test_what_is_durable_is_forgotten_and_numbers_go_on() -> None:
    outbox = outbox_with(3)
    outbox.acknowledge(2)
    outbox.add(wire.OrderDone(number=9))
    assert waiting(outbox) == [(3, 3), (4, 9)]
    outbox.acknowledge(1)
    assert waiting(outbox) == [(3, 3), (4, 9)]
    outbox.acknowledge(4)
    assert waiting(outbox) == []


def test_a_batch_fits_the_wire() -> None:
    batch = outbox_with(2000).next_batch()
    wire.Reports(incarnation="incarnation", reports=batch)
    assert [report.number for report in batch] == list(range(1, len(batch) + 1))


def test_a_controller_that_holds_all_that_was_acknowledged_changes_no_number() -> None:
    outbox = outbox_with(5)
    outbox.acknowledge(2)
    assert not outbox.resume(3)
    assert waiting(outbox) == [(4, 4), (5, 5)]


def test_numbers_go_on_where_an_older_copy_of_the_store_ends() -> None:
    """Answers to orders that the older copy never gave are not told to it."""
    outbox = outbox_with(5)
    gone = wire.Exited(job="job_a", generation=2, rank=0, code=0)
    outbox.add(gone)
    outbox.acknowledge(3)
    assert outbox.resume(1)
    assert outbox.next_batch() == (wire.Report(number=2, body=gone),)
    outbox.add(wire.OrderDone(number=6))
    assert waiting(outbox) == [(3, 6)]


def test_a_refused_report_leaves_word_in_its_place() -> None:
    outbox = outbox_with(2)
    outbox.set_aside("422: not understood")
    first, second = outbox.next_batch()
    assert first.body == wire.SetAside(refused="order_done", because="422: not understood")
    assert (first.number, second.number) == (1, 2)
