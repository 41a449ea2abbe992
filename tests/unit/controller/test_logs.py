"""Logs grow in order, never past their cap, and are read from the end."""

from pathlib import Path

from controller.logs import MAX_READ, Logs

CAP = 1 << 16


def logs(folder: Path) -> Logs:
    return Logs(folder, CAP)


def fill(log: Logs, chunks: int, size: int = 1000) -> None:
    for number in range(chunks):
        log.append("j", 1, 0, number * size, f"{number:06d} ".ljust(size - 1, ".") + "\n")


def test_chunks_come_out_as_they_came_in(tmp_path: Path) -> None:
    log = logs(tmp_path)
    log.append("j", 1, 0, 0, "one\ntwo\n")
    log.append("j", 1, 0, 8, "three\n")
    assert log.tail("j", 1, 0, 2).text == "two\nthree\n"
    assert log.tail("j", 1, 0, 0).text == ""
    assert log.tail("j", 1, 0, 99).text == "one\ntwo\nthree\n"
    assert log.tail("j", 1, 0, 1).offset == 8


def test_a_chunk_that_is_sent_again_is_there_once(tmp_path: Path) -> None:
    log = logs(tmp_path)
    log.append("j", 1, 0, 0, "one\n")
    log.append("j", 1, 0, 4, "two\n")
    log.append("j", 1, 0, 4, "two\nthree\n")  # the answer was lost, more had come meanwhile
    log.append("j", 1, 0, 0, "one\n")  # and one that strayed
    assert logs(tmp_path).read("j", 1, 0, 0).text == "one\ntwo\nthree\n"


def test_each_rank_and_generation_has_its_own(tmp_path: Path) -> None:
    log = logs(tmp_path)
    for generation, rank in ((1, 0), (1, 1), (2, 0)):
        log.append("j", generation, rank, 0, f"{generation}.{rank}\n")
    assert log.read("j", 1, 1, 0).text == "1.1\n"
    assert log.read("j", 3, 0, 0).text == ""


def test_only_the_newest_is_kept_and_that_is_said(tmp_path: Path) -> None:
    log = logs(tmp_path)
    fill(log, 200)
    kept = sum(file.stat().st_size for file in (tmp_path / "j" / "g1").iterdir())
    assert kept < CAP + 2000
    everything = log.read("j", 1, 0, 0)
    assert everything.text.count("older lines were dropped") == 2
    assert everything.text.startswith("[varuna]")
    assert log.tail("j", 1, 0, 1).text.startswith("000199 ")
    assert everything.next_offset - everything.offset == len(everything.text)


def test_following_gives_every_byte_once_across_the_turn(tmp_path: Path) -> None:
    log, seen, offset = logs(tmp_path), "", 0
    for number in range(80):
        log.append("j", 1, 0, number * 1000, f"{number:06d} ".ljust(999, ".") + "\n")
        piece = log.read("j", 1, 0, offset)
        assert piece.offset == offset
        seen, offset = seen + piece.text, piece.next_offset
    lines = [line for line in seen.splitlines() if not line.startswith("[varuna]")]
    assert [int(line[:6]) for line in lines] == list(range(80))


def test_a_line_without_an_end_does_not_fill_the_memory(tmp_path: Path) -> None:
    log = Logs(tmp_path, 64 << 20)
    for number in range(12):
        log.append("j", 1, 0, number * 200_000, "x" * 200_000)
    piece = log.tail("j", 1, 0, 5)
    assert len(piece.text) == MAX_READ
    assert piece.next_offset == 12 * 200_000


def test_a_piece_ends_between_characters(tmp_path: Path) -> None:
    log = Logs(tmp_path, 64 << 20)
    text = "é" * (MAX_READ // 2 + 10)
    log.append("j", 1, 0, 0, "x" + text)
    first = log.read("j", 1, 0, 0)
    second = log.read("j", 1, 0, first.next_offset)
    assert first.text + second.text == "x" + text


def test_a_piece_is_cut_behind_what_is_asked_for(tmp_path: Path) -> None:
    log = logs(tmp_path)
    log.append("j", 1, 0, 0, "begun\né done\nand more\n")
    assert log.begins("j", 1, 0, "begun") and not log.begins("j", 1, 0, "gun")
    assert not log.begins("j", 1, 1, "begun")
    piece, is_there = log.read("j", 1, 0, 3).up_to("done\n")
    assert (piece.text, is_there) == ("un\né done\n", True)
    assert log.read("j", 1, 0, piece.next_offset).text == "and more\n"
    assert log.read("j", 1, 0, 0).up_to("nowhere") == (log.read("j", 1, 0, 0), False)


def test_rank_and_job_lead_nowhere_else(tmp_path: Path) -> None:
    log = logs(tmp_path / "logs")
    log.append("job_01", 1, 0, 0, "\ud800 is no character\n")
    assert [p.name for p in tmp_path.iterdir()] == ["logs"]
    assert log.read("job_01", 1, 0, 0).text == "? is no character\n"
