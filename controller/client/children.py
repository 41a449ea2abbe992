"""Modules of ours as processes of their own: what needs torch, or is a service, is never imported
by who starts it.
"""

import os
import subprocess
import sys
from typing import NoReturn

from controller.cloud.local import die_with_parent

PYTHON = (sys.executable, "-I", "-u", "-m")


def flags(**values: object) -> list[str]:
    """``tls_key="k"`` -> ``--tls-key k``; what is None is left out."""
    given = {name: value for name, value in values.items() if value is not None}
    return [word for name, value in given.items() for word in (_flag(name), str(value))]


def _flag(name: str) -> str:
    return "--" + name.replace("_", "-")


def become(module: str, *arguments: str) -> NoReturn:
    """Be ``python -m module`` from here on: its exit code and its signals are ours."""
    sys.stdout.flush()
    os.execv(PYTHON[0], [*PYTHON, module, *arguments])


def run(module: str, *arguments: str) -> int:
    """Run ``python -m module`` to its end; its exit code, or 1 when a signal ended it.

    Ctrl-C reaches it too; it tidies up and ends, and we wait for that.
    """
    child = subprocess.Popen([*PYTHON, module, *arguments], preexec_fn=die_with_parent(os.getpid()))
    while True:
        try:
            code = child.wait()
            return code if code >= 0 else 1
        except KeyboardInterrupt:
            continue
