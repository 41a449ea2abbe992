"""One warm zygote for a whole test run, whose trainers are :mod:`tests.fakes.fake_trainer`."""

import os
import socket
import subprocess
import sys
from pathlib import Path
from typing import Self

from trainer.contract import forks
from trainer.contract.spec import Program, RunSpec, Saving, Shape, Training

FAKES = Path(__file__).parent


class Mother:
    """Owns the warm zygote and has it fork one for each test: torch is imported once."""

    def __init__(self) -> None:
        self.socket, theirs = forks.pair()
        self._control: socket.socket | None = None
        with theirs:
            self.process = subprocess.Popen(
                [sys.executable, "-I", "-u", "-m", "trainer.zygote", "--fd", str(theirs.fileno()),
                 "--path", str(FAKES), "--entry", "fake_trainer:run"],
                pass_fds=[theirs.fileno()],
                env=os.environ | {"OMP_NUM_THREADS": "1"},
                start_new_session=True,
            )  # fmt: skip
        assert isinstance(self.hear(), forks.Ready)

    def hear(self) -> forks.Answer | None:
        received = forks.receive(self.socket)
        return forks.ANSWER.validate_json(received[0]) if received else None

    def fork(self) -> tuple[socket.socket, int]:
        """The owner's end of a child zygote, and its pid."""
        ours, theirs = forks.pair()
        with theirs:
            forks.send(self.socket, forks.StartZygote(id="child"), theirs.fileno())
        return ours, self._started()

    def start_trainer(self, spec: RunSpec, log_path: Path) -> int:
        """A trainer of the mother's own, which is told nothing; its pid."""
        self._control, theirs = socket.socketpair()
        with theirs:
            order = forks.StartTrainer(
                id="trainer", begin=forks.Begin(spec=spec, log_path=str(log_path))
            )
            forks.send(self.socket, order, theirs.fileno())
        return self._started()

    def _started(self) -> int:
        while not isinstance(answer := self.hear(), forks.Started):
            assert answer is not None, "the mother died"
        return answer.pid

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.socket.close()
        self.process.wait(20)
        if self._control:
            self._control.close()


def run_spec(*, job: str = "job_a", generation: int = 1, rank: int = 0, **args: object) -> RunSpec:
    """A spec whose program is what the fake trainer shall do."""
    return RunSpec.model_validate(
        {
            "kind": "train",
            "job": job,
            "generation": generation,
            "rank": rank,
            "shape": Shape(depth=1, replicas=1, micro_batch=4),
            "cuts": (0, 2),
            "program": Program.model_validate({"source": "builtin:fake", "args": args}),
            "training": Training(batch_size=8, steps=10),
            "saving": Saving(root="/nowhere"),
        }
    )


def is_alive(pid: int) -> bool:
    """Whether the process runs; a zombie does not."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_bytes()
    except (FileNotFoundError, ProcessLookupError):  # ended before it was opened, or read
        return False
    return stat.rpartition(b")")[2].split()[0] != b"Z"
