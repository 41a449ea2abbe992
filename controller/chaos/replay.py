"""The same steps again, undisturbed: `varuna try` from the checkpoint that a generation went on
from, on one stage and one replica.
"""

import json
import socket
import subprocess
from collections.abc import Callable, Sequence
from pathlib import Path

from controller.chaos.verdict import Launch, Replay, that_trained, to_replay
from controller.client import output
from controller.client.children import PYTHON
from controller.core.jobspec import JobSpec
from controller.core.words import count
from trainer.contract.spec import Program

_AT_ONCE = 2

Lend = Callable[[str], socket.socket]
"""A warm zygote under a name: torch is not imported once for each replay."""


def replay(
    spec: JobSpec, launches: Sequence[Launch], aside: Path, lend: Lend | None
) -> list[Replay]:
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
    trained, done = that_trained(launches), list[Replay]()
    output.note(f"Replaying the first steps of {count(len(trained), 'generation')}.")
    for first in range(0, len(trained), _AT_ONCE):
        some = trained[first : first + _AT_ONCE]
        running = [_start(request, launch, aside, lend) for launch in some]
        done += [_end(launch, child) for launch, child in zip(some, running, strict=True)]
    return done


def _start(request: Path, launch: Launch, aside: Path, lend: Lend | None) -> subprocess.Popen[str]:
    folder = aside / f"g{launch.generation}"
    arguments = ["--spec", str(request), "--shape", "1x1", "--micro-batch", str(launch.micro_batch),
                 "--checkpoint-dir", str(folder), "--resume", str(launch.resumed_from),
                 "--steps", str(to_replay(launch)[-1] - launch.resumed_from), "--json"]  # fmt: skip
    command = [*PYTHON, "agent.local", *arguments]
    if lend is None:
        return _piped(command)
    with lend(f"replay-{launch.generation}") as zygote:
        return _piped([*command, "--zygote-fd", str(zygote.fileno())], zygote.fileno())


def _piped(command: Sequence[str], *descriptors: int) -> subprocess.Popen[str]:
    return subprocess.Popen(
        command,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        pass_fds=descriptors,
    )


def _end(launch: Launch, child: subprocess.Popen[str]) -> Replay:
    said, complained = child.communicate()
    if child.returncode != 0:
        why = (complained.strip().splitlines() or ["no word"])[-1]
        return Replay(launch.generation, {}, f"cannot be replayed: {why}")
    lines = [json.loads(line) for line in said.splitlines()]
    return Replay(launch.generation, {line["step"]: line["loss"] for line in lines})
