"""Pack a job's folder into a tar.gz whose digest depends on its content alone.

What `.gitignore` and `.varunaignore` name (in any folder) stays behind, and so do `.git`, virtual
environments and caches, tokens, and the folders of a controller or an agent. Files of equal content
give equal bytes: names sorted, no times, no owners.
"""

import gzip
import hashlib
import io
import os
import tarfile
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from pathspec import GitIgnoreSpec

from controller import words
from controller.client.rest import USAGE, CliError

CAP_BYTES = 100_000_000
OURS = ("trainer", "agent", "controller")
"""Import names of ours, which a program's folder would hide behind or be hidden by."""

_IGNORE_FILES = (".gitignore", ".varunaignore")
_NEVER = GitIgnoreSpec.from_lines(
    [".git", "__pycache__/", "*.pyc", ".venv/", ".varunaignore", "*.token"]
)
_STATE_MARKS = ("controller.lock", "agent.lock")
"""A folder with one of them is a controller's or an agent's own, with its secrets in it."""
_Specs = Mapping[Path, GitIgnoreSpec]


@dataclass(frozen=True)
class Bundle:
    """A packed folder."""

    digest: str
    """``sha256:<hex>``."""
    content: bytes
    files: int

    def __str__(self) -> str:
        return f"{words.count(self.files, 'file')}, {words.size(len(self.content))} packed"


def pack(workdir: Path, program: str) -> Bundle:
    """The folder, with ``program`` (a path in it) among its files; CliError with the mend when it
    cannot be.
    """
    if not workdir.is_dir():
        raise CliError(f"workdir {workdir} is not a folder.", USAGE)
    files = sorted(_files(workdir))
    _check(workdir, files, program)
    raw = io.BytesIO()
    with tarfile.open(fileobj=raw, mode="w", format=tarfile.PAX_FORMAT) as tar:
        for name in files:
            _add(tar, name, (workdir / name).resolve())
    content = gzip.compress(raw.getvalue(), compresslevel=6, mtime=0)
    return Bundle("sha256:" + hashlib.sha256(content).hexdigest(), content, len(files))


def _files(workdir: Path) -> Iterator[str]:
    specs: dict[Path, GitIgnoreSpec] = {}
    for folder, folders, names in os.walk(workdir):
        here = Path(folder).relative_to(workdir)
        if any(mark in names for mark in _STATE_MARKS):
            folders.clear()
            continue
        if lines := _ignore_lines(Path(folder)):
            specs[here] = GitIgnoreSpec.from_lines(lines)
        folders[:] = sorted(f for f in folders if not _is_ignored(here / f, specs, folder=True))
        for name in names:
            if (Path(folder) / name).is_file() and not _is_ignored(here / name, specs):
                yield (here / name).as_posix()


def _ignore_lines(folder: Path) -> list[str]:
    return [
        line
        for name in _IGNORE_FILES
        if (folder / name).is_file()
        for line in (folder / name).read_text(errors="replace").splitlines()
    ]


def _is_ignored(path: Path, specs: _Specs, folder: bool = False) -> bool:
    """Whether the deepest folder that has a word on ``path`` says to leave it."""
    if _NEVER.match_file(_as_text(path, folder)):
        return True
    for base in path.parents:
        if base in specs:
            said = specs[base].check_file(_as_text(path.relative_to(base), folder)).include
            if said is not None:
                return said
    return False


def _as_text(path: Path, folder: bool) -> str:
    return path.as_posix() + ("/" if folder else "")


def _check(workdir: Path, files: list[str], program: str) -> None:
    if Path(program).as_posix() not in files:
        there = (workdir / program).is_file()
        why = "is left out by an ignore file" if there else f"is not in {workdir}"
        raise CliError(f"The program {program} {why}.", USAGE)
    tops = {name.split("/")[0].removesuffix(".py") for name in files}
    if hidden := [name for name in OURS if name in tops]:
        raise CliError(
            f"{workdir} holds `{hidden[0]}` at its top, which is an import name of Varuna's own. "
            "Rename it, or put it into a folder of its own.",
            USAGE,
        )
    for name in files:
        if not (workdir / name).resolve().is_relative_to(workdir.resolve()):
            raise CliError(f"{name} is a link to a file outside {workdir}.", USAGE)
    sizes = {name: (workdir / name).stat().st_size for name in files}
    if (total := sum(sizes.values())) > CAP_BYTES:
        biggest = sorted(sizes, key=lambda name: -sizes[name])[:3]
        shown = ", ".join(f"{name} ({words.size(sizes[name])})" for name in biggest)
        raise CliError(
            f"{workdir} has {words.size(total)} to pack; {words.size(CAP_BYTES)} is the cap. "
            f"Biggest: {shown}. Name what the program does not need in .varunaignore.",
            USAGE,
        )


def _add(tar: tarfile.TarFile, name: str, file: Path) -> None:
    content = file.read_bytes()
    member = tarfile.TarInfo(name)
    member.size = len(content)
    member.mode = 0o755 if os.access(file, os.X_OK) else 0o644
    tar.addfile(member, io.BytesIO(content))
