"""Looking into a checkpoint folder, by the folder alone: no controller, no torch.

    python -I -m trainer.tools checkpoint list|verify DIR [--json]

DIR is one job's folder, a folder of such folders, or one checkpoint; a path or a URL. The exit code
is 0 when all is well, 1 when something is damaged, 3 when there is no checkpoint to look at.
"""

import argparse
import json
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, replace
from typing import Any

from trainer.contract.lineage import counts, lineage
from trainer.contract.listing import Checkpoint, Listing, Unusable, checkpoints, links_of, to_resume
from trainer.contract.places import Place, place_at
from trainer.contract.remote import StoreError

DONE, DAMAGED, NOT_FOUND = 0, 1, 3

Answer = dict[str, Any]


def main(arguments: Sequence[str] | None = None) -> int:
    """Carry out one command; the exit code."""
    parser = argparse.ArgumentParser(prog="varuna")
    verbs = (
        parser.add_subparsers(required=True)
        .add_parser("checkpoint")
        .add_subparsers(dest="verb", required=True)
    )
    for verb, help_ in (
        ("list", "what is there, what is complete, and what a job would resume from"),
        ("verify", "read every file and compare its hash"),
    ):
        command = verbs.add_parser(verb, help=help_)
        command.add_argument("dir")
        command.add_argument("--json", action="store_true")
    given = parser.parse_args(arguments)
    try:
        answer = (_list if given.verb == "list" else _verify)(given.dir)
    except OSError as error:
        print(f"{given.dir} cannot be read: {error.strerror}", file=sys.stderr)
        return NOT_FOUND
    except StoreError as error:
        print(error, file=sys.stderr)
        return NOT_FOUND
    if given.json:
        print(json.dumps(answer))
    else:
        print("\n".join((_list_in_words if given.verb == "list" else _verify_in_words)(answer)))
    if not answer["jobs"]:
        print(f"There is no checkpoint in {given.dir}.", file=sys.stderr)
        return NOT_FOUND
    return DAMAGED if answer.get("damaged") else DONE


def _jobs(
    where: str, *, check_sizes: bool = True
) -> Iterator[tuple[Place, Listing, tuple[Checkpoint, ...]]]:
    """Per job at ``where`` its folder, what is in it and the checkpoints that are asked for."""
    place, folder = place_at(where)
    if folder:
        listing = place.listing(check_sizes=check_sizes)
        only = tuple(c for c in checkpoints(listing) if c.folder == folder)
        skipped = tuple(s for s in listing.skipped if s.path.startswith(f"{folder}/"))
        yield place, replace(listing, skipped=skipped), only
        return
    for root in (place, *place.below()):
        listing = root.listing(check_sizes=check_sizes)
        if listing.newest_generation:
            yield root, listing, checkpoints(listing)


def _list(where: str) -> Answer:
    jobs = []
    for _, listing, found in _jobs(where):
        chain, newest = lineage(links_of(listing)), to_resume(listing)
        jobs.append(
            {
                "root": listing.root,
                "resume": newest.folder if newest else None,
                "done": listing.done is not None,
                "checkpoints": [_row(checkpoint, chain) for checkpoint in found],
                "skipped": [asdict(skipped) for skipped in listing.skipped],
            }
        )
    return {"jobs": jobs}


def _row(checkpoint: Checkpoint, chain: Mapping[int, int | None]) -> Answer:
    return {
        "folder": checkpoint.folder,
        "step": checkpoint.step,
        "generation": checkpoint.generation,
        "complete": checkpoint.complete,
        "in_lineage": counts(checkpoint, chain),
        "missing_layers": checkpoint.missing,
        "layer_count": checkpoint.layer_count,
        "shape": str(checkpoint.parts[0].shape),
        "num_bytes": checkpoint.num_bytes,
    }


def _list_in_words(answer: Answer) -> Iterator[str]:
    for job in answer["jobs"]:
        yield job["root"]
        yield f"  {'FOLDER':<28}{'STEP':>8}{'GEN':>5}{'SHAPE':>7}{'BYTES':>14}  STATE"
        for row in job["checkpoints"]:
            yield (
                f"  {row['folder']:<28}{row['step']:>8,}{row['generation']:>5}{row['shape']:>7}"
                f"{row['num_bytes']:>14,}  {_state(row, job['resume'])}"
            )
        yield from (f"  skipped {skip['path']}: {skip['reason']}" for skip in job["skipped"])
        if not job["resume"]:
            yield "  no complete checkpoint to resume from"


def _state(row: Answer, resume: str | None) -> str:
    if not row["complete"]:
        return f"incomplete, {len(row['missing_layers'])} of {row['layer_count']} layers missing"
    if not row["in_lineage"]:
        return "complete, outside the lineage"
    return "complete, newest to resume" if row["folder"] == resume else "complete"


def _verify(where: str) -> Answer:
    damaged, num_files, num_bytes, jobs = [], 0, 0, []
    for place, listing, found in _jobs(where, check_sizes=False):
        root = listing.root
        jobs.append({"root": root, "checkpoints": [c.folder for c in found]})
        damaged += [{"file": f"{root}/{s.path}", "reason": s.reason} for s in listing.skipped]
        for checkpoint in found:
            for file in (file for part in checkpoint.parts for file in part.files):
                num_files += 1
                num_bytes += file.num_bytes
                try:
                    place.check(checkpoint.folder, file)
                except Unusable as unusable:
                    at = f"{root}/{checkpoint.folder}/{file.name}"
                    damaged.append({"file": at, "reason": unusable.skipped.reason})
    return {"jobs": jobs, "files": num_files, "num_bytes": num_bytes, "damaged": damaged}


def _verify_in_words(answer: Answer) -> Iterator[str]:
    for bad in answer["damaged"]:
        yield f"{bad['file']} {bad['reason']}"
    folders = sum(len(job["checkpoints"]) for job in answer["jobs"])
    yield (
        f"Read {answer['files']:,} layer files ({answer['num_bytes']:,} bytes) of {folders:,} "
        f"checkpoints: {len(answer['damaged']) or 'none'} damaged."
    )


if __name__ == "__main__":
    sys.exit(main())
