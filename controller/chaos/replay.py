"""The same steps again, undisturbed: `varuna try` from the checkpoint that a generation went on
from, on one stage and one replica.
"""

import json
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from controller.chaos.verdict import Launch, Replay, to_replay
from controller.core.jobspec import JobSpec
from trainer.contract.spec import Program

_PYTHON = (sys.executable, "-I", "-u", "-m")
_AT_ONCE = 2


def replay(spec: JobSpec, launches: Sequence[Launch], aside: Path) -> list[Replay]:
    """Each launch's first steps; its checkpoint lies in ``aside/g<generation>``. Only builtin
    programs, which need no bundle.
    """
    request = aside / "request.json"
    program = Program(source=spec.program, args=spec.args)
    request.write_text(
        json.dumps(
            {
                "program": program.model_dump(mode="json"),
                "training": spec.training().model_dump(mode="json"),
            }
        )
    )
    done: list[Replay] = []
    for first in range(0, len(launches), _AT_ONCE):
        some = launches[first : first + _AT_ONCE]
        running = [_start(request, launch, aside) for launch in some]
        done += [_end(launch, child) for launch, child in zip(some, running, strict=True)]
    return done


def _start(request: Path, launch: Launch, aside: Path) -> subprocess.Popen[str]:
    folder = aside / f"g{launch.generation}"
    arguments = ["--spec", str(request), "--shape", "1x1", "--micro-batch", str(launch.micro_batch),
                 "--checkpoint-dir", str(folder), "--resume", str(launch.resumed_from),
                 "--steps", str(len(to_replay(launch))), "--json"]  # fmt: skip
    return subprocess.Popen(
        [*_PYTHON, "agent.local", *arguments],
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
    )  # fmt: skip


def _end(launch: Launch, child: subprocess.Popen[str]) -> Replay:
    said, complained = child.communicate()
    if child.returncode != 0:
        why = (complained.strip().splitlines() or ["no word"])[-1]
        return Replay(launch.generation, {}, f"cannot be replayed: {why}")
    lines = [json.loads(line) for line in said.splitlines()]
    return Replay(launch.generation, {line["step"]: line["loss"] for line in lines})
