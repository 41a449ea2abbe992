"""What a zygote (:mod:`trainer.zygote`) is told and what it answers.

One JSON message a datagram over a SOCK_SEQPACKET pair; a descriptor rides along by SCM_RIGHTS and
belongs to the receiver. The end of the conversation means that the owner is gone: the zygote kills
what it forked and exits.

    owner                                          zygote
      |  <- Ready                                     |   imports are done
      |  StartTrainer + control socket ->             |
      |  StartStore   + listening socket ->           |   answered by Started or Refused,
      |  StartZygote  + a new zygote's socket ->      |   and one Exited when it is gone
      |  StartCommand + its log ->                    |
      |  Kill ->                                      |

A trainer may be forked before it is known what it is to do: it stands by until :class:`Begin` comes
over its control socket. A zygote may be one for a program: it has loaded that before it is Ready,
or says that it is Unfit to be forked, and ends.
"""

import errno
import socket
from typing import Annotated, Literal

from pydantic import Field, TypeAdapter

from trainer.contract.spec import Frozen, Program, RunSpec

MAX_BYTES = 1 << 20
ONE_THREAD = {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}
"""A zygote's environment: importing numpy or torch must not start threads."""


class Begin(Frozen):
    """What a trainer is to do."""

    spec: RunSpec
    log_path: str
    """Its standard output and error are appended here."""
    threads: int = Field(default=1, ge=1)
    """For torch's own thread pool."""


class StartTrainer(Frozen):
    """Fork a trainer in a session of its own; the descriptor is its control socket."""

    kind: Literal["start_trainer"] = "start_trainer"
    id: str
    begin: Begin | None = None
    """None: it waits for that on its control socket, as :func:`framed` makes it."""


class StartStore(Frozen):
    """Fork a process that serves a rendezvous store on the descriptor, a listening TCP socket."""

    kind: Literal["start_store"] = "start_store"
    id: str


class StartZygote(Frozen):
    """Fork a zygote that serves the descriptor's owner: another agent shares the imports.

    It dies with that owner, not with this zygote; one for a program with either.
    """

    kind: Literal["start_zygote"] = "start_zygote"
    id: str
    program: Program | None = None
    """To be loaded before it is ready."""
    log_path: str | None = None
    """What the program prints meanwhile is appended here."""


class StartCommand(Frozen):
    """Run ``/bin/sh -c command`` in a session of its own; the descriptor is its output.

    It finds this Python and its tools first on its PATH. What it leaves behind is killed.
    """

    kind: Literal["start_command"] = "start_command"
    id: str
    command: str
    folder: str
    """Where it runs."""


class Kill(Frozen):
    """SIGKILL the whole session of ``id``; nothing happens when it is gone already."""

    kind: Literal["kill"] = "kill"
    id: str


class Ready(Frozen):
    """All is imported: a fork costs milliseconds from here on."""

    kind: Literal["ready"] = "ready"
    pid: int
    torch_version: str


class Unfit(Frozen):
    """A zygote for a program cannot be one, and ends."""

    kind: Literal["unfit"] = "unfit"
    message: str
    is_broken: bool = False
    """It cannot be loaded at all; else its trainers can load it themselves."""


class Started(Frozen):
    """``id`` runs as process ``pid``; a trainer's pid is its session too."""

    kind: Literal["started"] = "started"
    id: str
    pid: int


class Refused(Frozen):
    """``id`` could not be forked."""

    kind: Literal["refused"] = "refused"
    id: str
    message: str


class Exited(Frozen):
    """``id`` is gone and reaped, its session killed. Exactly one of ``code``, ``signal`` is set."""

    kind: Literal["exited"] = "exited"
    id: str
    code: int | None = None
    signal: int | None = None


Start = StartTrainer | StartStore | StartZygote | StartCommand
Request = Annotated[Start | Kill, Field(discriminator="kind")]
REQUEST: TypeAdapter[Request] = TypeAdapter(Request)
Answer = Annotated[Ready | Unfit | Started | Refused | Exited, Field(discriminator="kind")]
ANSWER: TypeAdapter[Answer] = TypeAdapter(Answer)


def pair() -> tuple[socket.socket, socket.socket]:
    """A fresh conversation: one end for the owner, one for the zygote."""
    ends = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    for end in ends:
        end.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, MAX_BYTES)
    return ends


def send(to: socket.socket, message: Request | Answer, descriptor: int | None = None) -> None:
    """Send one message; the caller keeps (and closes) its own copy of ``descriptor``.

    Raises ValueError when the message is too long for a datagram, else OSError.
    """
    text = message.model_dump_json().encode()
    try:
        socket.send_fds(to, [text], [] if descriptor is None else [descriptor])
    except OSError as error:
        if error.errno != errno.EMSGSIZE:
            raise
        raise ValueError(
            f"the start message is {len(text)} bytes long, more than a datagram holds: "
            "hand big values to the program in a file, not in `args`"
        ) from error


def receive(sender: socket.socket) -> tuple[bytes, int | None] | None:
    """The next datagram and the descriptor that came with it; None at the end. Raises OSError."""
    text, descriptors, _, _ = socket.recv_fds(sender, MAX_BYTES, 1, socket.MSG_CMSG_CLOEXEC)
    return (text, descriptors[0] if descriptors else None) if text else None


_LENGTH_BYTES = 8


def framed(begin: Begin) -> bytes:
    """``begin`` as it is put on the control socket, before all orders."""
    text = begin.model_dump_json().encode()
    return len(text).to_bytes(_LENGTH_BYTES, "little") + text


def read_begin(control: socket.socket) -> Begin | None:
    """Wait for it, and read not a byte more; None when nothing will come. Raises OSError."""
    length = _read(control, _LENGTH_BYTES)
    text = length and _read(control, int.from_bytes(length, "little"))
    return Begin.model_validate_json(text) if text else None


def _read(control: socket.socket, length: int) -> bytes | None:
    whole = b""
    while len(whole) < length:
        if not (piece := control.recv(length - len(whole))):
            return None
        whole += piece
    return whole
